"""`python -m outrider.orchestrator`: the same command line as `outrider`."""

from __future__ import annotations

from outrider.orchestrator.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
