"""Creates and writes Matplotlib figures. Matplotlib is imported on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.protocol import version
from outrider.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def create_figure(width: float, height: float) -> Figure:
    """Returns a figure of this size in inches. Needs no display.

    Raises:
        InvalidRequest: Matplotlib is not installed.
    """
    version.require_extra("bench", "a picture")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, path: Path, dpi: int = 110) -> None:
    """Writes the figure to `path`.

    Raises:
        InvalidRequest: the file can't be written.
    """
    try:
        drawn.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:  # ValueError: Matplotlib does not know the suffix
        why = getattr(error, "strerror", error)
        raise InvalidRequest(f"the picture can't be written to {path}: {why}") from error
