"""Other engines on the same weights: mlx-lm and llama.cpp, each in a process of its own.

Requests are JSON, one per line. {tokens, max_tokens, temp, seed, ignore_eos}, for mlx-lm also num_draft_tokens (0:
plain decoding), returns {tokens, count, decode_seconds}, timed from the first generated token to the last. {batch,
max_tokens, temp, seed}, for mlx-lm also `slots` and `reads` (prompts per forward), returns {replies}: for each prompt,
when it was sent and when its tokens arrived, in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from outrider.bench.comparison.runs import (
    SEED_STRIDE,
    BatchRunner,
    Reply,
    Run,
    Texts,
    Timed,
    run_interleaved,
    time_replies,
    total_rate,
)
from outrider.bench.helper import HelperProcess
from outrider.orchestrator.machine import system
from outrider.orchestrator.pairing.model_files import default_model, is_gguf
from outrider.orchestrator.pairing.pulled import PULLED_MODELS, pull
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.version import install_command

MLX_LM, LLAMA_CPP = "mlx-lm", "llama.cpp"
PEERS = {MLX_LM: "mlx_lm", LLAMA_CPP: "xllamacpp"}
"""Peers by name, with the module that each needs."""
CLASSES = {MLX_LM: f"{__package__}.mlx_lm_peer:MlxLm", LLAMA_CPP: f"{__package__}.llama_cpp_peer:LlamaCpp"}

# Prompts per forward to try with mlx-lm; its default is 8.
PREFILL_BATCH_SIZES = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class LlamaSpeculation:
    """One of llama.cpp's speculation types, with its parameters."""

    kind: str
    settings: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.settings.items())])


SPECULATIONS = (
    LlamaSpeculation("ngram-simple", {"size_n": 3, "size_m": 4}),
    LlamaSpeculation("ngram-simple", {"size_n": 12, "size_m": 48}),  # llama.cpp's defaults
    LlamaSpeculation("ngram-map-k", {"size_n": 4, "size_m": 8}),
    LlamaSpeculation("ngram-map-k4v", {"size_n": 8, "size_m": 8, "min_hits": 2}),  # as in its documentation
    LlamaSpeculation("ngram-mod", {"n_match": 8, "n_min": 2, "n_max": 16}),
    LlamaSpeculation("ngram-cache", {"n_max": 4}),
)
"""Settings of llama.cpp's lookup to try; the best of the trial is measured."""
DRAFT_SPECULATIONS = tuple(LlamaSpeculation("draft-simple", {"n_max": most}) for most in (2, 3, 5))


class PeerProcess(HelperProcess):
    """A peer's process, with our target's BLAS, threads and core. `given` are the arguments of the peer's class."""

    def __init__(self, name: str, settings: ServeSettings, /, **given: Any) -> None:
        super().__init__(
            "outrider.bench.helper", CLASSES[name], json.dumps(given), threads=system.threads_of("target", settings)
        )
        self._name = name
        system.assign_core(self.pid, "target", settings)

    def run(self, prompt: Sequence[int], sampling: SamplingParams, **extra: Any) -> Run:
        """Continues a prompt. `extra`: more fields of the request, for mlx-lm the number of draft tokens."""
        answer = self._complete(sampling, tokens=list(prompt), ignore_eos=sampling.ignore_eos, **extra)
        return Run(tuple(answer["tokens"]), Timed(max(answer["count"] - 1, 0), answer["decode_seconds"]))

    def run_batch(self, texts: Texts, sampling: SamplingParams, **extra: Any) -> list[Reply]:
        """Completes all prompts; `extra` as for `run`."""
        answer = self._complete(sampling, batch=[list(text) for text in texts], **extra)
        return msgspec.convert(answer["replies"], list[Reply])

    def _complete(self, sampling: SamplingParams, **request: Any) -> dict[str, Any]:
        """Sends a request with the fields of `sampling` that both kinds of requests have."""
        given = {"max_tokens": sampling.max_tokens, "temp": sampling.temp, "seed": sampling.seed or 0}
        return self.ask({**given, **request})


def mlx_lm(settings: ServeSettings) -> PeerProcess:
    """Starts mlx-lm. `settings` must name folders (see `pairing`)."""
    return PeerProcess(MLX_LM, settings, model=settings.model, draft_model=settings.draft_model)


def llama_cpp(
    settings: ServeSettings,
    file: Path,
    slots: int = 1,
    speculation: LlamaSpeculation | None = None,
    draft: Path | None = None,
) -> PeerProcess:
    """Starts llama.cpp on a GGUF file, with the target's threads."""
    given = asdict(speculation) if speculation is not None else {}
    draft_model = str(draft) if draft is not None else None
    threads = system.threads_of("target", settings)
    return PeerProcess(
        LLAMA_CPP, settings, model=str(file), draft_model=draft_model, threads=threads, slots=slots, **given
    )


def choose_mlx_lm_batch(
    process: PeerProcess, slots: int, rounds: Sequence[Texts], sampling: SamplingParams
) -> BatchRunner:
    """Returns mlx-lm's `BatchGenerator` with the prefill batch size that is fastest in a trial."""
    candidates: dict[str, BatchRunner] = {
        f"prefill batch {reads}": partial(process.run_batch, slots=slots, reads=reads)
        for reads in PREFILL_BATCH_SIZES
        if reads <= slots
    }
    trial = run_interleaved(candidates, rounds, sampling, lambda _: None, seeds=SEED_STRIDE)
    return candidates[max(trial, key=lambda name: total_rate(list(map(time_replies, trial[name]))))]


@dataclass(frozen=True, slots=True)
class ChosenPeers:
    """The peers of a bench. `gguf`, `draft`: llama.cpp's files; None without llama.cpp. `left_out`: a sentence for each
    peer that can't run."""

    mlx_lm: bool = False
    gguf: Path | None = None
    draft: Path | None = None
    left_out: tuple[str, ...] = ()


def choose_peers(wanted: str | None, model: str | None, draft: str | None) -> ChosenPeers:
    """Returns the peers to run. `wanted`: comma-separated names, "none", or None for all available ones. `model` and
    `draft`: the names that the user gave.

    Raises:
        InvalidRequest: a peer is unknown, not installed, or has no file to read.
    """
    if wanted == "none":
        return ChosenPeers()
    names = list(PEERS) if wanted is None else wanted.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidRequest(f"peers is {unknown[0]!r}; expected none, or comma-separated names of {', '.join(PEERS)}")
    target, file, why = model or default_model()[0], None, dict[str, str]()
    for name in names:
        if find_spec(PEERS[name]) is None:
            why[name] = f"{name} is left out: {PEERS[name]} is not installed; run {install_command('bench')}"
        elif name == LLAMA_CPP:
            file = pull(PULLED_MODELS[target]) if target in PULLED_MODELS else Path(target).expanduser()
            if not is_gguf(file):
                why[name] = f"{name} is left out: it reads GGUF files; expected --model FILE.gguf"
    if wanted is not None and why:
        raise InvalidRequest(next(iter(why.values())))
    return ChosenPeers(
        mlx_lm=MLX_LM in names and MLX_LM not in why,
        gguf=file if LLAMA_CPP not in why else None,
        draft=Path(draft).expanduser() if draft is not None and is_gguf(Path(draft).expanduser()) else None,
        left_out=tuple(why.values()),
    )
