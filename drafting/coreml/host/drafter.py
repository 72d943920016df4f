"""The drafter `coreml`: a converted model on the Neural Engine, or in the reference interpreter where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.drafting.coreml.host.host import Host, cache_bytes
from outrider.drafting.coreml.host.tree import CoreMLTree
from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.runtime.runtime import Runtime
from outrider.engine.draws import Draws
from outrider.engine.prompt_cache import PromptCache
from outrider.grammar.constraint import Constraint
from outrider.protocol.kv import KvCost
from outrider.protocol.sampling import SamplingParams


class CoreMLDrafter:
    """A `Drafter` over `package`, run by `runtime`, which only ever sees one thread."""

    backend = "coreml"

    def __init__(self, package: Package, runtime: Runtime, note: str = "") -> None:
        self.note = note or f"drafting with {runtime.name}"
        self.vocab_size = package.layout.architecture.vocab_size
        self.context_length = package.layout.context
        self.parameters = package.manifest.parameters
        self.weight_bytes = package.weight_bytes
        self.prompt_cache = PromptCache(KvCost(per_text=cache_bytes(package.layout)))
        self._runtime = runtime
        self._host = Host(package, runtime)
        self._predict = ThreadPoolExecutor(max_workers=1, thread_name_prefix="predict")

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> CoreMLTree:
        return CoreMLTree(self._host, self._predict, tokens, sampling, progress, None, constraint)

    def open_drawing(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        cached: int,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> CoreMLTree:
        return CoreMLTree(self._host, self._predict, tokens, sampling, progress, Draws.of(sampling, cached), constraint)

    def close(self) -> None:
        """Ends the predict thread and lets the device go."""
        self._predict.submit(self._runtime.close).result()
        self._predict.shutdown()
