"""The protocol version, the releases of libraries, and how to install the extras. Imports no extra.

Two processes communicate only when their PROTOCOL_VERSION is the same.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from outrider.protocol.errors import InvalidRequest

PROTOCOL_VERSION = 1

EXTRA_MODULES = {
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "otel": ("opentelemetry",),
    "bench": ("matplotlib",),
    "discovery": ("zeroconf",),
    "fleet": ("ray", "mmh3", "yaml"),
}
"""The modules that show whether an extra is installed."""


def installed_release(library: str) -> str:
    """Returns a library's release, or that it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def missing_modules(extra: str) -> list[str]:
    """Returns the modules of an extra that are not installed."""
    return [module for module in EXTRA_MODULES[extra] if find_spec(module) is None]


def install_command(extra: str) -> str:
    """Returns the command that installs an extra from a checkout; this version is on no package index yet."""
    return f"pip install '.[{extra}]' in a checkout (docs/install.md)"


def require_extra(extra: str, what: str, otherwise: str = "") -> None:
    """Checks that an extra is installed.

    Raises:
        InvalidRequest: `what` needs the extra; the message says how to install it, or to use `otherwise`.
    """
    if lacking := missing_modules(extra):
        verb = "is" if len(lacking) == 1 else "are"
        instead = f", or {otherwise}" if otherwise else ""
        raise InvalidRequest(
            f"{what} needs {' and '.join(lacking)}, which {verb} not installed; run {install_command(extra)}{instead}"
        )
