"""One run over several processes: who draws, clips and noises what, and what they exchange."""
