"""The settings of one cluster: a frozen record that checks itself.

Each field has a check and the help of its flag, from which `cli.flags` makes the command line. Knows names and ranges;
uses no file, socket or model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from outrider.protocol import process, values
from outrider.protocol.endpoints import is_local, parse_endpoint
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.heads import DRAFTER_BACKENDS, HEAD_KINDS, TARGET_HEADS, WORKER_HEADS
from outrider.protocol.worker_link import WORKER_MODULES_VARIABLE

MODES = ("auto", "ar", "sd", "ssd")
DRAFT_BACKENDS = (*DRAFTER_BACKENDS, *HEAD_KINDS, "auto", "ngram", "none")
# Backends that can sample from their distribution, for residual sampling; n-grams and none need no note about that.
SAMPLING_BACKENDS = ("mlx", "coreml", "ngram", "none")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_BRANCHES = 16
MODELS_WITH_DRAFT = ("tiny", "smollm2")
"""The named models (`pairing.model_files`) that come with a draft model."""
MAX_DRAFTERS = 8
MAX_DRAFT_TOKENS = 32
MAX_REQUESTED_BRANCHES = 256
NO_SSD_COLOCATED = (
    "mode ssd needs a drafter that works while the target verifies; with colocate, or heads alone, both take turns in"
    " one process; expected mode sd, ar or auto, or a drafter in a process of its own"
)
DRAFT_WORKER_SETTINGS = ("draft_model", "draft_backend", "drafters", "draft_prefill", "head_in")
"""What to leave out for a cluster like another one, but without its draft workers."""
SPECULATION, MODELS, DRAFTING, WORKERS = "speculation", "models", "drafting", "workers"
MEMORY, LOGS, ENDPOINTS = "requests and memory", "keys, logs and traces", "endpoints"


def setting(default: Any, check: values.Check, group: str, metavar: str, *, help: str, **more: Any) -> Any:
    """Returns a field whose flag is in this group of a command's help; `help` need not state a plain default.

    `more`: `type`, argparse's type of its value, and `flag`, the flag's name (default: the field's).
    """
    return values.checked_field(
        default, check, group=group, metavar=metavar, help=help_with_default(help, default), **more
    )


def help_with_default(help: str, default: object) -> str:
    """Returns the help of a flag with its default, unless that is stated or the flag is a switch."""
    if isinstance(default, bool) or "(default: " in help:
        return help
    return f"{help} (default: {'none' if default in (None, ()) else default})"


def _enum(default: str, words: tuple[str, ...], group: str, metavar: str = "", *, help: str) -> Any:
    return setting(default, partial(values.check_choice, words=words), group, metavar or "|".join(words), help=help)


def count(default: int | None, low: int, high: int, group: str, metavar: str = "N", *, help: str) -> Any:
    return setting(default, partial(values.check_int, low=low, high=high), group, metavar, help=help, type=int)


def switch(default: bool, group: str, *, help: str) -> Any:
    """Returns a field with the flag, --NAME or --no-NAME, for the opposite of the default, described by `help`."""
    return setting(default, values.check_bool, group, "", help=help, type=bool)


def _path(group: str, metavar: str = "FILE", *, help: str) -> Any:
    return setting(None, values.check_path, group, metavar, help=help, type=Path)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of one cluster; every field is a flag of the command line by the same name, with its help here.

    - Both models None: the default pair (docs/models.md). `num_draft_tokens` and `branches` None: in `auto` the values
      of `outrider tune`, else `DEFAULT_DRAFT_TOKENS`, and `DEFAULT_BRANCHES` for each drafter.
    - `draft_backend` mtp: the head in the model's own folder, unless `draft_model` names another; auto: by the files of
      `draft_model`. `head`: a kind, such as "mtp", means the model's own, or one that comes with the tiny target. A
      head that can't be used is left out. `head_in` draft-worker: the target sends it the features that it reads.
    - `threads` None: see `machine.system.threads_of`. `pin_cores`: turn it off if another cluster runs on the machine.
      `worker_timeout`: a drafter that is silent for a fifth of it is not waited for. `prompt_cache`: keeps ended texts
      if running ones leave room.
    - `keyed`: endpoints for other machines always require keys. `await_target`: the target may have several ranks.

    Raises:
        InvalidRequest: a value is out of range, or two exclude each other; the message says what is allowed.
    """

    mode: str = _enum("auto", MODES, SPECULATION, help="how tokens are generated")
    num_draft_tokens: int | None = count(
        None, 1, MAX_DRAFT_TOKENS, SPECULATION, "K",
        help=f"maximum number of draft tokens per round (default: {DEFAULT_DRAFT_TOKENS}); n-gram chains may be longer",
    )  # fmt: skip
    branches: int | None = count(
        None, 1, MAX_REQUESTED_BRANCHES, SPECULATION, "B",
        help=f"outcomes to prepare per round (default: as many as the drafter can finish, up to {DEFAULT_BRANCHES})",
    )  # fmt: skip
    model: str | None = setting(
        None, values.check_text, MODELS, "ID|PATH",
        help="target: a name of `outrider pairs`, a Hugging Face id, a folder or a GGUF file (default: smollm2)",
    )  # fmt: skip
    draft_model: str | None = setting(
        None, values.check_text, MODELS, "ID|PATH",
        help="a small model of the same family (default: the one that comes with --model, if any)",
    )  # fmt: skip
    gguf_keep_precision: bool = switch(
        False, MODELS,
        help="convert GGUF tensors in formats that MLX lacks to half precision, instead of quantising them again",
    )  # fmt: skip
    draft_backend: str = _enum("mlx", DRAFT_BACKENDS, MODELS, "NAME", help=f"the drafter: {', '.join(DRAFT_BACKENDS)}")
    head: tuple[str, ...] = setting(
        (), values.check_texts, MODELS, "ID|PATH",
        help="an additional drafter: a head in the target's process (mtp, early-exit: the model's own); repeatable",
    )  # fmt: skip
    head_in: str = _enum("target", ("target", "draft-worker"), MODELS, help="the process that a head drafts in")
    drafters: int = count(1, 1, MAX_DRAFTERS, DRAFTING, help="number of draft processes, which share the outcomes")
    draft_prefill: str = setting(
        "mlx", values.check_text, DRAFTING, "mlx|coreml|PACKAGE",
        help="what reads prompts for a drafter on MLX, or the package that draft_backend coreml runs",
    )  # fmt: skip
    draft_device: str = _enum(
        "auto", ("auto", "cpu"), DRAFTING, help="the device of draft workers on MLX; auto: the target's"
    )
    colocate: bool = switch(False, DRAFTING, help="draft in the target's process")
    fan_out: str = _enum("best-first", ("best-first", "geometric", "uniform"), DRAFTING, help="the outcomes to prepare")
    branch_depth: str = _enum("auto", ("auto", "full"), DRAFTING, help="full: wait until branches have K tokens")
    ngrams: bool = switch(True, DRAFTING, help="do not draft with n-grams")
    ngram_table: str | None = setting(
        None, values.check_text, DRAFTING, "FILE",
        help="a table of n-grams that the model often generates (default: the one that comes with --model)",
    )  # fmt: skip
    trees: bool = switch(
        False, DRAFTING, help="verify trees of alternative drafts instead of chains, if the target can and it is faster"
    )
    threads: int | None = count(
        None, 1, 1024, WORKERS,
        help="threads of each worker on a CPU (default: 1 for a drafter, for the target the other cores, up to 8)",
    )  # fmt: skip
    cpu_kernels: str = _enum(
        "auto", ("auto", "mlx"), WORKERS,
        help="the kernels on a CPU; auto: ONNX Runtime, or MLX for models that it does not support",
    )  # fmt: skip
    pin_cores: bool = switch(
        True, WORKERS, help="share the machine with other clusters: one thread per worker, on any core"
    )
    shards: int = count(1, 1, 64, WORKERS, help="ranks of the target on this machine")
    prefill_workers: int = count(0, 0, MAX_DRAFTERS, WORKERS, help="number of processes that read long prompts")
    prefill_from: int | None = count(
        None, 1, 2**31 - 1, WORKERS, "TOKENS",
        help="the shortest prompt that prefill workers read (default: as measured by tune, else 512)",
    )  # fmt: skip
    prefill_backend: str = _enum("mlx", ("mlx", "coreml"), WORKERS, help="backend of prefill workers")
    await_target: bool = switch(False, WORKERS, help="start no target; wait for `outrider worker target`")
    worker_timeout: int = count(
        10, 1, 86_400, WORKERS, "SECONDS", help="seconds of silence before a worker is considered dead"
    )
    max_active: int | None = count(
        None, 1, 1024, MEMORY, help="maximum number of running requests (default: as many as fit in memory, up to 16)"
    )
    max_waiting: int = count(
        256, 0, 1_000_000, MEMORY, help="maximum number of waiting requests; beyond it, clients without any may add one"
    )
    kv_memory: int | None = setting(
        None, values.check_size, MEMORY, "SIZE",
        help="memory for keys and values in all workers, such as 2GB (default: half of what the weights leave free)",
    )  # fmt: skip
    prompt_cache: bool = switch(True, MEMORY, help="read every prompt in full, reusing no earlier one")
    memory: bool = switch(True, MEMORY, help="neither load nor save what mode auto has learned")
    keys: Path | None = _path(LOGS, "FOLDER", help="the folder of your keys (default: ~/.config/outrider/keys)")  # noqa: RUF009
    trace: Path | None = _path(LOGS, help="write a timeline for chrome://tracing or Perfetto")  # noqa: RUF009
    log_level: str = _enum("warning", LOG_LEVELS, LOGS, help="the lowest level that is logged")
    log_format: str = _enum(
        "text", process.LOG_FORMATS, LOGS, help="json: one object per line on stderr, from every process"
    )
    endpoint: str | None = setting(
        None, values.check_text, ENDPOINTS, "ENDPOINT",
        help="the endpoint for Python clients, ipc://PATH or tcp://HOST:PORT (default: a new socket)",
    )  # fmt: skip
    workers_endpoint: str | None = setting(
        None, values.check_text, ENDPOINTS, "ENDPOINT",
        help="the endpoint for draft and prefill workers of other machines, tcp://HOST:PORT, see docs/security.md",
    )  # fmt: skip
    advertise: bool = switch(False, ENDPOINTS, help="announce the workers' endpoint on the local network")
    keyed: bool = switch(False, ENDPOINTS, help="require keys on this machine, too; other machines always need them")

    def __post_init__(self) -> None:
        values.check_fields(self)
        if self.drafts_with_head and self.head_in == "target":
            values.set_field(self, "colocate", True)
        for conflict in self._find_conflicts():
            raise InvalidRequest(conflict)

    @property
    def depth(self) -> int:
        """K, if neither the request nor a tuning sets it."""
        return DEFAULT_DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens

    @property
    def breadth(self) -> int:
        """B, if neither the request nor a tuning sets it."""
        return DEFAULT_BRANCHES if self.branches is None else self.branches

    @property
    def full_depth(self) -> bool:
        """Whether rounds wait until their branches are complete, which makes them reproducible."""
        return self.branch_depth == "full"

    def requires_keys(self, endpoint: str | None) -> bool:
        """Whether peers at this endpoint, if there is one, need a key. Raises EndpointError if it is malformed."""
        return endpoint is not None and (self.keyed or not is_local(parse_endpoint(endpoint)))

    @property
    def drafts_with_head(self) -> bool:
        """Whether the drafter is a head, which reads the target's hidden states."""
        return self.draft_backend in HEAD_KINDS

    @property
    def has_draft_worker(self) -> bool:
        """Whether there are draft workers; n-grams need none."""
        return self.draft_backend not in ("ngram", "none") and not self.colocate

    @property
    def no_worker_reason(self) -> str:
        """The setting because of which there are no draft workers: a head sets `colocate`, too."""
        return "colocate" if self.colocate and not self.drafts_with_head else f"draft_backend {self.draft_backend}"

    @property
    def can_colocate(self) -> bool:
        """Whether the draft model of this draft worker could draft in the target's process instead.

        Another implementation of the target (`WORKER_MODULES_VARIABLE`) need not be able to.
        """
        on_target = self.draft_device == "auto" and self.draft_prefill == "mlx"
        only_one = self.drafters == 1 and WORKER_MODULES_VARIABLE not in os.environ
        return self.draft_backend == "mlx" and on_target and only_one

    @property
    def can_work_ahead(self) -> bool:
        """Whether draft workers, or n-grams instead, may draft while the target verifies."""
        return not self.colocate and self.draft_backend != "none"

    @property
    def needs_draft_model(self) -> bool:
        """Whether there is a draft model, in any process."""
        return self.has_draft_worker or self.colocate

    @property
    def lacks_draft_model(self) -> bool:
        """Whether there is no draft model: none is given, and none comes with the target."""
        return self.model is not None and self.model not in MODELS_WITH_DRAFT and self.draft_model is None

    def _find_conflicts(self) -> Iterator[str]:
        """Yields a sentence for each pair of settings that exclude each other."""
        if self.drafters > 1 and not self.has_draft_worker:
            yield f"drafters is {self.drafters}, but {self.no_worker_reason} starts no draft workers; expected 1"
        yield from self._find_head_conflicts()
        if self.colocate:
            yield from self._find_colocate_conflicts()
        if self.draft_model is not None and not self.needs_draft_model:
            yield (
                f"draft_backend {self.draft_backend} runs no draft model; leave out draft_model {self.draft_model!r},"
                " or use draft_backend mlx"
            )
        if self.draft_model is not None and self.model is None:
            yield f"draft_model {self.draft_model!r} needs model; give both, or neither for the default"
        if self.advertise and self.workers_endpoint is None:
            yield "advertise needs workers_endpoint, the endpoint that it announces"
        if self.await_target and self.shards > 1:
            yield "await_target starts no target; expected shards on the target's own command line, or neither"
        if self.draft_prefill != "mlx" and self.draft_backend not in ("mlx", "auto", "coreml"):
            yield f"draft_prefill {self.draft_prefill} is for draft models; leave it out with {self.draft_backend}"
        if self.draft_backend == "ngram" and not self.ngrams and self.workers_endpoint is None:
            yield "draft_backend ngram drafts nothing without ngrams; leave out one of the two settings"
        if self.ngram_table is not None and not self.ngrams:
            yield "ngram_table is not used without ngrams; leave out one of the two settings"
        if self.draft_backend == "none" and self.mode in ("sd", "ssd") and not self.head:
            yield f"mode {self.mode} needs a drafter; expected a draft model, a draft_backend that drafts, or mode ar"
        elif self.mode == "ssd" and not self.can_work_ahead:
            yield NO_SSD_COLOCATED

    def _find_head_conflicts(self) -> Iterator[str]:
        if self.head_in != "target" and self.draft_backend not in (*WORKER_HEADS, "auto"):
            yield (
                f"head_in {self.head_in} is for heads that can work ahead, and draft_backend {self.draft_backend} is"
                f" not one; expected one of {', '.join(WORKER_HEADS)}, or no head_in"
            )
        if self.head_in != "target" and self.colocate:
            yield "colocate drafts in the target's process; leave out colocate or head_in"
        if self.drafts_with_head and self.draft_backend not in TARGET_HEADS and self.lacks_draft_model:
            yield (
                f"draft_backend {self.draft_backend} has no head to draft with; expected draft_model to name one made"
                " for this model"
            )

    def _find_colocate_conflicts(self) -> Iterator[str]:
        if self.draft_backend not in ("mlx", "auto", *HEAD_KINDS):
            yield (
                f"colocate drafts with MLX in the target's process and can't use draft_backend {self.draft_backend};"
                " leave out one of the two"
            )
        for name, value in (("draft_device", self.draft_device), ("draft_prefill", self.draft_prefill)):
            if value not in ("auto", "mlx"):
                cause = self.no_worker_reason
                yield f"{name} {value} is for draft workers, but {cause} starts none; leave out one of them"
        if self.lacks_draft_model and self.draft_backend not in TARGET_HEADS:
            yield "colocate needs draft_model with model, or neither of them"


class Settings(TypedDict, total=False):
    """The fields of `ServeSettings` as keywords, in every accepted form; see `LocalCluster`."""

    mode: str
    num_draft_tokens: int | None
    branches: int | None
    model: str | os.PathLike[str] | None
    draft_model: str | os.PathLike[str] | None
    gguf_keep_precision: bool
    draft_backend: str
    head: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    head_in: str
    drafters: int
    draft_prefill: str | os.PathLike[str]
    draft_device: str
    colocate: bool
    fan_out: str
    branch_depth: str
    ngrams: bool
    ngram_table: str | os.PathLike[str] | None
    trees: bool
    threads: int | None
    cpu_kernels: str
    pin_cores: bool
    shards: int
    prefill_workers: int
    prefill_from: int | None
    prefill_backend: str
    await_target: bool
    worker_timeout: int
    max_active: int | None
    max_waiting: int
    kv_memory: int | str | None
    prompt_cache: bool
    memory: bool
    keys: str | os.PathLike[str] | None
    trace: str | os.PathLike[str] | None
    log_level: str
    log_format: str
    endpoint: str | None
    workers_endpoint: str | None
    advertise: bool
    keyed: bool


def describe_settings() -> str:
    """Returns a list of the settings for a class's docstring: each name, the default of a switch, and the help."""
    lines = []
    for field in dataclasses.fields(ServeSettings):
        switch = f" (default: {field.default}); {not field.default}" if isinstance(field.default, bool) else ""
        lines.append(f"- `{field.name}`{switch}: {field.metadata['help'].replace(' --', ' ')}.")
    return "\n    ".join(lines)


def to_flags(settings: ServeSettings) -> list[str]:
    """Returns the settings as command-line flags, without defaults."""
    line = []
    for field in dataclasses.fields(settings):
        value, flag = getattr(settings, field.name), flag_of(field)
        if isinstance(value, bool):
            line += [flag] if value != field.default else []
        elif value != field.default:  # as one word, because a value may begin with a dash
            line += [f"{flag}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    return line


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns the flag of a setting; that of a switch sets the opposite of its default."""
    return f"--{'no-' if field.default is True else ''}{field.metadata.get('flag', field.name.replace('_', '-'))}"


def check_setting(name: str, value: object) -> Any:
    """Returns a value of the setting `name`, converted; None is allowed if it is the default. Raises InvalidRequest."""
    field = ServeSettings.__dataclass_fields__[name]
    return None if value is None and field.default is None else field.metadata["check"](name, value)
