"""Test cases of other projects and of the APIs' references, rewritten as requests to a running server.

Each case names its source and what is expected there. The outcomes in docs/conformance.md are always generated. Uses
HTTP only, and nothing of the server's code.
"""
