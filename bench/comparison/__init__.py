"""Interleaved runs of our modes and other engines on the same prompts, and their analysis."""
