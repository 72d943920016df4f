"""What one cluster is told when it starts: a frozen record, checked once, here and nowhere else.

Knows names and ranges; touches no file, no socket and no model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from outrider.protocol import process, values
from outrider.protocol.endpoints import is_local, parse
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.heads import AHEAD, HEADS, OF_TARGET
from outrider.protocol.worker_link import KERNELS

MODES = ("auto", "ar", "sd", "ssd")
DRAFT_BACKENDS = ("mlx", "replay", "coreml", *HEADS, "auto", "ngram", "none")
PREFILL_BACKENDS = ("mlx", "coreml")
DRAFT_DEVICES = ("auto", "cpu")
# Those that can draw from their distribution, for residual sampling; n-grams and none need no word about it.
DRAWING_BACKENDS = ("mlx", "coreml", "ngram", "none")
FAN_OUTS = ("best-first", "geometric", "uniform")
BRANCH_DEPTHS = ("auto", "full")
HEAD_PLACES = ("target", "draft-worker")
LOG_LEVELS = ("debug", "info", "warning", "error")
DRAFT_TOKENS = 4
BRANCHES = 16
_WORDS = {
    "mode": MODES,
    "draft_backend": DRAFT_BACKENDS,
    "prefill_backend": PREFILL_BACKENDS,
    "draft_device": DRAFT_DEVICES,
    "cpu_kernels": KERNELS,
    "fan_out": FAN_OUTS,
    "branch_depth": BRANCH_DEPTHS,
    "head_in": HEAD_PLACES,
    "log_level": LOG_LEVELS,
    "log_format": process.FORMATS,
}
FLAGS = (
    "ngrams", "trees", "colocate", "prompt_cache", "memory", "keyed", "await_target", "advertise", "pin_cores",
    "gguf_keep_precision",
)  # fmt: skip
NAMED = ("tiny", "smollm2", "gemma3-270m")
"""Models with names of their own (`pair.model_files`), with which a draft may come."""
MAX_DRAFTERS = 8
MAX_DRAFT_TOKENS = 32
MAX_SHARDS = 64
MAX_BRANCHES_ASKED = 256
NO_SSD_COLOCATED = (
    "mode ssd needs a drafter that works while the target verifies, and with colocate, or heads alone, both take turns"
    " in one process; expected mode sd, ar or auto, or a drafter on its own"
)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of one cluster; every field is a flag of the command line by the same name.

    `model` and `draft_model` are Hugging Face ids, folders or GGUF files; both None: the default (docs/models.md).
    `endpoint` is where clients connect; None: a socket of its own in the run directory. `num_draft_tokens` and
    `branches` None: in `auto` what `outrider tune` found, else `DRAFT_TOKENS` and `BRANCHES`. `threads`: threads of
    each worker for matrix products. `cpu_kernels`: what computes on a CPU: mlx, or auto: ONNX Runtime for models that
    it serves. `pin_cores`: on a machine of two cores, target and drafter keep to one each; not where another cluster
    runs. `max_active`: requests in flight at once; None: as many as `kv_memory` holds, at most 16. `max_waiting`: how
    many may wait for their turn; more are refused. `kv_memory`: bytes, or text like "2GB", for keys and values in all
    workers together; None: half of what the weights leave of the machine's. `prompt_cache`: keep what was read of texts
    that have ended, where running ones leave room. `ngrams`: let repeated text fill what the drafter has not reached.
    `trees`: verify drafts of several origins at once. `replay`: the script of the replay drafter. `simulate`: a latency
    profile that both workers keep to (docs/simulation.md). `draft_backend`: who drafts; mtp, a head that reads the
    target (`protocol.heads`), is in the model's own folder unless `draft_model` names another, and comes along where
    neither is named; auto looks what `draft_model` is. `head_in`: the process that a head drafts in, the target's or a
    draft worker, which is told the rows that it reads and works ahead. `head`: heads that draft in the target's process
    beside whoever else does, "mtp" or "early-exit" for the model's own, a kind that comes along for the embedded
    target's; one that can't be used is done without. `draft_prefill`: who reads prompts for a drafter on MLX
    (docs/coreml.md). `draft_device`: where draft workers on MLX compute; auto: where the target does, cpu: beside a
    target on a GPU. `drafters`: so many processes draft and share a round's outcomes; `branches` None: `BRANCHES` for
    each. `colocate`: the target drafts in its own process, in turn with verifying, instead of a draft worker that works
    ahead. `shards`: so many ranks of the target on this machine, each with a part of each layer. `await_target`: none
    is started; one that somebody else starts joins, from several machines maybe. `worker_timeout`: seconds for which a
    worker may be silent until it is given up; a drafter is done without after a fifth of that. `memory`: carry over
    from run to run what `auto` learned of this pair on this machine. `workers_endpoint`: where drafters of other
    machines join, tcp://HOST:PORT; None: only this machine's do. `keys`: the folder of keys; None:
    `protocol.keys.default_folder`. `keyed`: ask for keys at `endpoint` and `workers_endpoint` also where only this
    machine reaches them; beyond it they are always asked for. `advertise`: announce `workers_endpoint` on the local
    network. `prefill_workers`: so many processes read long prompts in the target's place; `prefill_from`: of so many
    tokens and more; None: what `outrider tune` found, else 512; `prefill_backend`: by what, of the target's own
    weights. `gguf_keep_precision`: blocks of a GGUF file that MLX has no form for stay in half precision, and are not
    quantised anew.

    Raises:
        InvalidRequest: a value is out of range, or two don't go together; the message says what is allowed.
    """

    model: str | None = None
    draft_model: str | None = None
    draft_backend: str = "mlx"
    head: tuple[str, ...] = ()
    draft_prefill: str = "auto"
    draft_device: str = "auto"
    drafters: int = 1
    num_draft_tokens: int | None = None
    branches: int | None = None
    fan_out: str = "best-first"
    branch_depth: str = "auto"
    head_in: str = "target"
    ngrams: bool = True
    trees: bool = False
    mode: str = "auto"
    endpoint: str | None = None
    threads: int = 1
    cpu_kernels: str = "auto"
    pin_cores: bool = True
    max_active: int | None = None
    max_waiting: int = 256
    kv_memory: int | None = None
    prompt_cache: bool = True
    trace: Path | None = None
    log_level: str = "warning"
    log_format: str = "text"
    replay: Path | None = None
    simulate: Path | None = None
    colocate: bool = False
    shards: int = 1
    await_target: bool = False
    worker_timeout: int = 10
    memory: bool = True
    workers_endpoint: str | None = None
    keys: Path | None = None
    keyed: bool = False
    advertise: bool = False
    prefill_workers: int = 0
    prefill_from: int | None = None
    prefill_backend: str = "mlx"
    gguf_keep_precision: bool = False

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            self._keep(name, values.word(name, getattr(self, name), words))
        for name in ("threads", "max_active"):
            if getattr(self, name) is not None or name == "threads":
                self._keep(name, values.whole(name, getattr(self, name), 1, 1024))
        self._keep("shards", values.whole("shards", self.shards, 1, MAX_SHARDS))
        self._keep("drafters", values.whole("drafters", self.drafters, 1, MAX_DRAFTERS))
        self._keep("prefill_workers", values.whole("prefill_workers", self.prefill_workers, 0, MAX_DRAFTERS))
        if self.prefill_from is not None:
            self._keep("prefill_from", values.whole("prefill_from", self.prefill_from, 1, 2**31 - 1))
        self._keep("max_waiting", values.whole("max_waiting", self.max_waiting, 0, 1_000_000))
        self._keep("worker_timeout", values.whole("worker_timeout", self.worker_timeout, 1, 86_400))
        if self.kv_memory is not None:
            self._keep("kv_memory", values.size("kv_memory", self.kv_memory))
        for name in FLAGS:
            self._keep(name, values.flag(name, getattr(self, name)))
        for name in ("model", "draft_model", "endpoint", "workers_endpoint"):
            if getattr(self, name) is not None:
                self._keep(name, values.text(name, getattr(self, name)))
        for name in ("trace", "replay", "simulate", "keys"):
            if getattr(self, name) is not None:
                self._keep(name, values.path(name, getattr(self, name)))
        self._keep("head", values.texts("head", self.head))
        self._keep("draft_prefill", values.text("draft_prefill", self.draft_prefill))
        if self.num_draft_tokens is not None:
            self._keep("num_draft_tokens", check_draft_tokens(self.num_draft_tokens))
        if self.branches is not None:
            self._keep("branches", check_branches(self.branches))
        if self.drafts_by_head and self.head_in == "target":
            self._keep("colocate", True)
        self._check_together()

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the record is frozen for everybody else

    @property
    def depth(self) -> int:
        """K where a request names none and nothing was tuned."""
        return DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens

    @property
    def breadth(self) -> int:
        """B, the same."""
        return BRANCHES if self.branches is None else self.branches

    def asks_for_keys(self, endpoint: str) -> bool:
        """Whether who comes to this endpoint has to show a key. Raises EndpointError when it is none."""
        return self.keyed or not is_local(parse(endpoint))

    @property
    def drafts_by_head(self) -> bool:
        """Whether what drafts reads the target, and so lives in its process."""
        return self.draft_backend in HEADS

    @property
    def has_draft_worker(self) -> bool:
        """Whether a process of its own proposes; n-grams live in the orchestrator."""
        return self.draft_backend not in ("ngram", "none") and not self.colocate

    @property
    def can_work_ahead(self) -> bool:
        """Whether somebody may draft while the target verifies, or what stands for that, n-grams."""
        return not self.colocate and not (self.head and self.draft_backend == "none")

    @property
    def needs_draft_model(self) -> bool:
        """Whether somebody drafts with a model, in whatever process."""
        return self.has_draft_worker or self.colocate

    @property
    def _has_no_draft(self) -> bool:
        """Of what comes with a model that has a name of its own, or is the default, the names' owner knows."""
        return self.model is not None and self.model not in NAMED and self.draft_model is None

    def _check_together(self) -> None:
        if self.drafters > 1 and not self.has_draft_worker:
            why = "colocate drafts" if self.colocate else f"draft_backend {self.draft_backend} works"
            raise InvalidRequest(
                f"drafters is {self.drafters}, and {why} in the target's process; expected 1, or a draft model"
            )
        self._check_head()
        if self.colocate:
            self._check_colocated()
        if self.draft_model is not None and not self.needs_draft_model:
            raise InvalidRequest(
                f"draft_backend {self.draft_backend} runs no draft model; leave out draft_model {self.draft_model!r}"
                " or choose the backend mlx"
            )
        if self.draft_model is not None and self.model is None:
            raise InvalidRequest(f"draft_model {self.draft_model!r} needs model; give both, or neither for the default")
        if self.advertise and self.workers_endpoint is None:
            raise InvalidRequest("advertise needs workers_endpoint, the endpoint that it announces")
        if self.await_target and self.shards > 1:
            raise InvalidRequest(
                "await_target starts no target; expected shards where the target is started, or neither"
            )
        if self.prefill_workers and self.simulate is not None:
            raise InvalidRequest("prefill_workers can't be simulated; leave out simulate or prefill_workers")
        if self.draft_prefill != "auto" and self.draft_backend not in ("mlx", "auto"):
            raise InvalidRequest(
                f"draft_prefill {self.draft_prefill} is for drafters on MLX; leave it out with {self.draft_backend}"
            )
        if self.draft_backend == "ngram" and not self.ngrams:
            raise InvalidRequest("draft_backend ngram without ngrams drafts nothing; expected one or the other")
        if self.draft_backend == "none" and self.mode in ("sd", "ssd") and not self.head:
            raise InvalidRequest(f"mode {self.mode} needs a drafter; expected a draft_backend that drafts, or mode ar")
        if self.head and self.simulate is not None:
            raise InvalidRequest("a head can't be simulated; leave out simulate or head")
        if self.mode == "ssd" and not self.can_work_ahead:
            raise InvalidRequest(NO_SSD_COLOCATED)
        if self.draft_backend == "replay" and self.replay is None:
            raise InvalidRequest("draft_backend replay needs replay, the script to play")

    def _check_head(self) -> None:
        if self.head_in != "target" and self.draft_backend not in (*AHEAD, "auto"):
            raise InvalidRequest(
                f"head_in {self.head_in} is for heads that can work ahead, and draft_backend {self.draft_backend} is"
                f" none; expected one of {', '.join(AHEAD)}, or no head_in"
            )
        if self.head_in != "target" and self.colocate:
            raise InvalidRequest("colocate drafts in the target's process; leave out colocate or head_in")
        if not self.drafts_by_head:
            return
        if self.simulate is not None:
            raise InvalidRequest("a draft head can't be simulated; leave out simulate, or use a draft model")
        if self.draft_backend not in OF_TARGET and self._has_no_draft:
            raise InvalidRequest(
                f"draft_backend {self.draft_backend} has no head to draft with; expected draft_model to name one made"
                " for this model"
            )

    def _check_colocated(self) -> None:
        if self.draft_backend not in ("mlx", "auto", *HEADS):
            raise InvalidRequest(
                f"colocate drafts with MLX in the target's process, so draft_backend {self.draft_backend} has no place"
                " there; leave out one of the two"
            )
        if self.draft_device != "auto":
            raise InvalidRequest(
                "draft_device is for draft workers, which colocate does not start; leave out one of them"
            )
        if self.draft_prefill not in ("auto", "mlx"):
            raise InvalidRequest(
                f"draft_prefill {self.draft_prefill} is for draft workers, which colocate does not"
                " start; leave out one of them"
            )
        if self._has_no_draft and self.draft_backend not in OF_TARGET:
            raise InvalidRequest("colocate needs draft_model with model, or neither of them")
        if self.simulate is not None:
            raise InvalidRequest("colocate can't be simulated; leave out simulate or colocate")


class Settings(TypedDict, total=False):
    """The fields of `ServeSettings` as keywords, in every form in which they are taken; see `LocalCluster`."""

    model: str | os.PathLike[str] | None
    draft_model: str | os.PathLike[str] | None
    draft_backend: str
    head: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    draft_prefill: str | os.PathLike[str]
    draft_device: str
    drafters: int
    num_draft_tokens: int | None
    branches: int | None
    fan_out: str
    branch_depth: str
    head_in: str
    ngrams: bool
    trees: bool
    mode: str
    endpoint: str | None
    threads: int
    cpu_kernels: str
    pin_cores: bool
    max_active: int | None
    max_waiting: int
    kv_memory: int | str | None
    prompt_cache: bool
    trace: str | os.PathLike[str] | None
    log_level: str
    log_format: str
    replay: str | os.PathLike[str] | None
    simulate: str | os.PathLike[str] | None
    colocate: bool
    shards: int
    await_target: bool
    worker_timeout: int
    memory: bool
    workers_endpoint: str | None
    keys: str | os.PathLike[str] | None
    keyed: bool
    advertise: bool
    prefill_workers: int
    prefill_from: int | None
    prefill_backend: str
    gguf_keep_precision: bool


def settings_from(given: Settings) -> ServeSettings:
    """The record that these keywords make. Raises InvalidRequest like the record itself."""
    return ServeSettings(**cast("dict[str, Any]", given))


def flags(settings: ServeSettings) -> list[str]:
    """The command line that says these settings; defaults are left out."""
    line = []
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            line += [f"--{name}={one}" for one in value]
        else:
            line.append(f"--{name}={value}")  # in one word, for a value may begin with a dash
    return line


def check_draft_tokens(value: object) -> int:
    """`num_draft_tokens` as a plain number. Raises InvalidRequest."""
    return values.whole("num_draft_tokens", value, 1, MAX_DRAFT_TOKENS)


def check_branches(value: object) -> int:
    """`branches` as a plain number. Raises InvalidRequest."""
    return values.whole("branches", value, 1, MAX_BRANCHES_ASKED)
