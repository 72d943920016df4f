"""Many engines behind one gate (docs/fleet.md): the only room that knows Ray, which is an extra, `outrider[fleet]`.

`serve run outrider.fleet:app plan=fleet.yaml` finds `app` here, with which Ray comes in, and not before.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.fleet.deployment import app

    return app
