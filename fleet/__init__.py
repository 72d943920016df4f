"""Several engines behind one HTTP address (docs/fleet.md). The only package that uses Ray, an extra: `outrider[fleet]`.

`serve run outrider.fleet:app plan=fleet.yaml` loads `app` from here; Ray is imported only then.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.fleet.deployment import app

    return app
