"""Requests, rounds, clients and the command line. Never imports MLX. Has the public names of `outrider`, too."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:
    from outrider import __getattr__  # noqa: F401
