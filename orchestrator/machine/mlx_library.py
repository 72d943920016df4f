"""Whether MLX has what it computes with: on Linux that is a package of its own, and a person chooses which."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from outrider.protocol.errors import InvalidRequest

LIBRARY = Path("lib", "libmlx.so")


def require_mlx() -> None:
    """Before a process is started that imports MLX: there it would be a traceback.

    Raises:
        InvalidRequest: MLX's library is not installed.
    """
    if not sys.platform.startswith("linux"):
        return
    found = find_spec("mlx")
    places = found.submodule_search_locations if found is not None else None
    if not any(Path(place, LIBRARY).is_file() for place in places or ()):
        raise InvalidRequest(
            "MLX has no backend installed; run pip install 'outrider[cpu]', or 'outrider[cuda]' for a GPU"
        )
