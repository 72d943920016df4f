"""Requests of every API as one and the same: a conversation or a prompt, and how its answer is sampled."""
