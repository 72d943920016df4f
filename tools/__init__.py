"""Instruments for developers, run from a checkout as `python -m tools.NAME`; not installed.

Each module says in its first lines what it measures.
"""
