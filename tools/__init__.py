"""Measurements, simulations and generated pages for developers: `python -m tools.NAME` in a checkout. Not installed.

The docstring of each module says what it does and how to call it. The default model is the tiny pair.
"""

import os

os.environ.setdefault("OUTRIDER_MODEL", "tiny")
