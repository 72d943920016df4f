"""Times a verify and the drafter's work ahead, each alone and both together; the same as tools/overlap_timing.py."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OUTRIDER_MODEL", "")  # the default model, as for commands; tools run the tiny pair
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    runpy.run_module("tools.overlap_timing", run_name="__main__", alter_sys=True)
