"""`python -m orchestrator`: the same command line as `outrider`."""

from __future__ import annotations

from orchestrator.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
