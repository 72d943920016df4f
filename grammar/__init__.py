"""Constrained decoding by llguidance: the tokens that a grammar allows next, equal in target and drafter."""
