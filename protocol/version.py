"""The protocol version, the release, and what to install for the parts that need an extra. Imports none of these.

Two processes communicate only when their PROTOCOL_VERSION is the same.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from outrider.protocol.errors import InvalidRequest

PROTOCOL_VERSION = 1


def _installed() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


PACKAGE_VERSION = _installed()


EXTRAS = {
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "otel": ("opentelemetry",),
    "bench": ("matplotlib",),
    "discovery": ("zeroconf",),
    "fleet": ("ray", "mmh3", "yaml"),
}
"""Of each extra of the package the modules that tell whether it is there."""


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def install(extra: str) -> str:
    """What to run to install an extra: the version is on no package index yet."""
    return f"pip install '.[{extra}]' in a checkout (docs/install.md)"


def require(extra: str, what: str, otherwise: str = "") -> None:
    """
    Raises:
        InvalidRequest: `what` can't be had without the extra; the message says how to install it, or what `otherwise`.
    """
    lacking = missing(extra)
    if lacking:
        verb = "is" if len(lacking) == 1 else "are"
        instead = f", or {otherwise}" if otherwise else ""
        raise InvalidRequest(
            f"{what} needs {' and '.join(lacking)}, which {verb} not installed; run {install(extra)}{instead}"
        )
