"""Creates and writes Matplotlib figures. Matplotlib is imported on first use, and pictures are left out without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.orchestrator.cli.terminal import say
from outrider.protocol import version
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.version import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(path: Path, draw: Callable[[], Figure]) -> bool:
    """Writes what `draw` returns to `path`, or says that Matplotlib is not installed. Returns whether it was written.

    Raises:
        InvalidRequest: the file can't be written.
    """
    if version.missing_modules("bench"):
        say(f"Note: no picture was drawn, because Matplotlib is not installed ({install_command('bench')}).")
        return False
    save(draw(), path)
    return True


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
