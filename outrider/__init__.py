"""Outrider: speculative speculative decoding on MLX. A thin facade over `outrider.orchestrator`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.orchestrator import *  # noqa: F403

    __version__: str
else:
    from outrider.orchestrator import __all__

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from outrider.protocol.version import PACKAGE_VERSION

            return PACKAGE_VERSION
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from outrider import orchestrator

        return getattr(orchestrator, name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
