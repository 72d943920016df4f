"""`python -m outrider`, and the `outrider` command."""

from __future__ import annotations

from outrider.orchestrator.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
