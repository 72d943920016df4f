"""Constrained decoding: which tokens a grammar allows next, the same on both sides (by llguidance)."""
