"""A target of several ranks: rank 0, which serves, and the others, which follow it."""
