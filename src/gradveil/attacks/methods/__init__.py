"""Attacks: from what was seen to a reconstruction."""
