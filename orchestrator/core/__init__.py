"""The core thread: workers, rounds, the speculation cache, the policy. Knows tokens, not text."""
