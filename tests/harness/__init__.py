"""What the tests hold the product to: fuzzers, faults, clients, scripted models, virtual clusters.

Programs among them run from a checkout as `python -m tests.harness.NAME`; not installed.
"""
