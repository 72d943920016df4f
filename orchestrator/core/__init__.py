"""The fast half: workers, rounds, the speculation cache, and what is learned from them. Knows tokens, not text."""
