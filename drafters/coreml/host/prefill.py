"""A prompt read by the package in an MLX model's place.

The package keeps keys and values as MLX does, [kv_heads, position, head_dim] after the rotation, so nothing is
transposed or computed again; what differs from MLX's own reading is float16 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from outrider.drafters.coreml.host.host import LinearCache, PackageHost
from outrider.drafters.coreml.package.package import Package
from outrider.drafters.coreml.runtime.runtimes import Runtime
from outrider.engine.kv_transfer import KeysValues, ReadingFault
from outrider.protocol.errors import OutriderError


class PackageReader:
    """An `engine.kv_transfer.PromptReader`; the package must be of the model's own weights, and `runtime` runs it.

    Args:
        least: shorter prompts are left to the model.
    """

    def __init__(self, package: Package, runtime: Runtime, least: int) -> None:
        self.least, self.package = least, package
        self.note = f"prompts of {least} tokens and more are read by {runtime.name}"
        self._host = PackageHost(package, runtime)
        self._name = runtime.name

    def readable(self, count: int) -> int:
        """What fits the package's context of a prompt that is long enough."""
        return min(count, self._host.layout.context) if count >= self.least else 0

    def read(self, tokens: Sequence[int]) -> Iterator[KeysValues]:
        prefill, line = self._host.layout.prefill, LinearCache(self._host)
        try:
            for first in range(0, len(tokens), prefill.rows):
                fresh = line.feed(tokens[first : first + prefill.rows], prefill)
                if fresh.keys is None or fresh.values is None:
                    raise ReadingFault(f"{prefill.name} hands out no keys")
                if not (np.isfinite(fresh.keys).all() and np.isfinite(fresh.values).all()):
                    raise ReadingFault(f"{self._name} returned keys that are NaN or infinite")
                yield KeysValues(fresh.keys, fresh.values)
        except OutriderError as error:
            raise ReadingFault(f"the prompt can't be read by the package: {error}") from error
        finally:
            line.close()
