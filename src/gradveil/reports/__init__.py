"""What a run directory shows: read once, as facts, for the page, the comparison and the gate."""
