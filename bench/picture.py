"""Creates and saves Matplotlib figures. Matplotlib is imported on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.protocol import version
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.version import install

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LEFT_OUT = f"Note: no picture was drawn, because Matplotlib is not installed ({install('bench')})."


def can_draw() -> bool:
    """Whether Matplotlib is installed."""
    return not version.missing("bench")


def figure(width: float, height: float) -> Figure:
    """Returns a figure of this size in inches. Needs no display.

    Raises:
        InvalidRequest: Matplotlib is not installed.
    """
    version.require("bench", "a picture")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, path: Path, dpi: int) -> None:
    """Writes the figure to `path`.

    Raises:
        InvalidRequest: the file can't be written.
    """
    try:
        drawn.savefig(path, dpi=dpi)
    except OSError as error:
        raise InvalidRequest(f"the picture can't be written to {path}: {error.strerror}") from error
