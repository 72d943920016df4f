"""All measuring: what is timed, compared and simulated. A client of the orchestrator like any other.

What says in its first lines how to run it is a program: `python -m outrider.bench.identity` and so on. They start
oracle, rules and version_side as processes; what several of them share has a room of its own.
"""
