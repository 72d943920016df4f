"""Instruments for developers, run from a checkout as `python -m tools.NAME`; not installed.

Each module says in its first lines what it measures. Where no model is named they mean the tiny pair.
"""

import os

os.environ.setdefault("OUTRIDER_MODEL", "tiny")
