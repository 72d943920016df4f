"""Cases of other projects' test suites and of the APIs' references, written again and run against this server.

Each case names its source and what is expected there; its result is always measured, never written by hand. Knows HTTP
only, and nothing of how the server works.
"""
