"""Where noise and samples come from: one secret key per run, and the streams derived from it."""
