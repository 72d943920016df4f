"""Progress: one line rewritten on a terminal, few lines in a log, and the end always shown."""

from __future__ import annotations

import io

from models.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_one_line_per_stage() -> None:
    stream = Terminal()
    progress = Progress("target", 2000, "steps", stream=stream)
    for done in range(1, 2001):
        progress.update(done, "loss 3.0")
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert "2,000/2,000 steps  loss 3.0" in written.split("\r")[-1]


def test_log_shows_the_end_without_control_characters() -> None:
    stream = io.StringIO()
    progress = Progress("target", 50, "steps", stream=stream)
    for done in range(1, 51):
        progress.update(done)
    assert stream.getvalue().startswith("target  50/50 steps")
    assert stream.getvalue().rstrip("\n").isprintable()
