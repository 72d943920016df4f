"""What the tests hold the product to: fuzzers, faults, clients, scripted models, virtual clusters.

Programs among them run from a checkout as `python -m tests.harness.NAME`; not installed. Where they name
no model they mean the tiny pair.
"""

import os

os.environ.setdefault("OUTRIDER_MODEL", "tiny")
