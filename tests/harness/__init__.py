"""Tools for testing Outrider: fuzzers, fault injection, API clients, scripted models, simulated clusters.

Not installed. The programs among them run from a checkout as `python -m tests.harness.NAME`; they test the tiny pair
unless OUTRIDER_MODEL names another model.
"""

import os

os.environ.setdefault("OUTRIDER_MODEL", "tiny")
