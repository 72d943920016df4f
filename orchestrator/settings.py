"""What one cluster is told when it starts: a frozen record, checked once, here and nowhere else.

Knows names and ranges; touches no file, no socket and no model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from outrider.protocol.errors import InvalidRequest

MODES = ("auto", "ar", "sd", "ssd")
DRAFT_BACKENDS = ("mlx", "replay", "coreml", "ngram", "none")
# Those that can draw from their distribution, for residual sampling; n-grams and none need no word about it.
DRAWING_BACKENDS = ("mlx", "coreml", "ngram", "none")
FAN_OUTS = ("best-first", "geometric", "uniform")
BRANCH_DEPTHS = ("auto", "full")
LOG_LEVELS = ("debug", "info", "warning", "error")
DRAFT_TOKENS = 4
BRANCHES = 16
MAX_DRAFT_TOKENS = 32
MAX_BRANCHES_ASKED = 256
NO_SSD_COLOCATED = (
    "mode ssd needs a drafter that works while the target verifies, and colocate makes both take turns in one process;"
    " expected mode sd, ar or auto, or no colocate"
)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of one cluster; every field is a flag of the command line by the same name.

    `model` and `draft_model` are Hugging Face ids or folders; both None: the embedded pair. `endpoint` is where clients
    connect; None: a socket of its own in the run directory. `num_draft_tokens` and `branches` None: in `auto` what
    `outrider tune` found, else `DRAFT_TOKENS` and `BRANCHES`. `threads`: BLAS threads of each worker. `max_active`:
    requests in flight at once. `ngrams`: let repeated text fill what the drafter has not reached. `replay`: the script
    of the replay drafter. `simulate`: a latency profile that both workers keep to (docs/simulation.md).
    `draft_prefill`: who reads prompts for a drafter on MLX (docs/coreml.md). `colocate`: the target drafts in its own
    process, in turn with verifying, instead of a draft worker that works ahead.

    Raises:
        InvalidRequest: a value is out of range, or two don't go together; the message says what is allowed.
    """

    model: str | None = None
    draft_model: str | None = None
    draft_backend: str = "mlx"
    draft_prefill: str = "auto"
    num_draft_tokens: int | None = None
    branches: int | None = None
    fan_out: str = "best-first"
    branch_depth: str = "auto"
    ngrams: bool = True
    mode: str = "auto"
    endpoint: str | None = None
    threads: int = 1
    max_active: int = 1
    trace: Path | None = None
    log_level: str = "warning"
    replay: Path | None = None
    simulate: Path | None = None
    colocate: bool = False

    def __post_init__(self) -> None:
        check_word("mode", self.mode, MODES)
        check_word("draft_backend", self.draft_backend, DRAFT_BACKENDS)
        check_word("fan_out", self.fan_out, FAN_OUTS)
        check_word("branch_depth", self.branch_depth, BRANCH_DEPTHS)
        check_word("log_level", self.log_level, LOG_LEVELS)
        check_draft_tokens(self.depth)
        check_branches(self.breadth)
        check_whole("threads", self.threads, 1, 1024)
        check_whole("max_active", self.max_active, 1, 1024)
        self._check_together()

    @property
    def depth(self) -> int:
        """K where a request names none and nothing was tuned."""
        return DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens

    @property
    def breadth(self) -> int:
        """B, the same."""
        return BRANCHES if self.branches is None else self.branches

    @property
    def has_draft_worker(self) -> bool:
        """Whether a process of its own proposes; n-grams live in the orchestrator."""
        return self.draft_backend not in ("ngram", "none") and not self.colocate

    @property
    def needs_draft_model(self) -> bool:
        """Whether somebody drafts with a model, in whatever process."""
        return self.has_draft_worker or self.colocate

    def _check_together(self) -> None:
        if self.colocate:
            self._check_colocated()
        if self.draft_model is not None and not self.needs_draft_model:
            raise InvalidRequest(
                f"draft_backend {self.draft_backend} runs no draft model; leave out draft_model {self.draft_model!r}"
                " or choose the backend mlx"
            )
        if self.draft_model is not None and self.model is None:
            raise InvalidRequest(
                f"draft_model {self.draft_model!r} has no model beside it; name both, or neither for the embedded pair"
            )
        if self.draft_prefill != "auto" and self.draft_backend != "mlx":
            raise InvalidRequest(
                f"draft_prefill {self.draft_prefill} is for drafters on MLX; leave it out with {self.draft_backend}"
            )
        if self.draft_backend == "ngram" and not self.ngrams:
            raise InvalidRequest("draft_backend ngram without ngrams drafts nothing; expected one or the other")
        if self.draft_backend == "none" and self.mode in ("sd", "ssd"):
            raise InvalidRequest(f"mode {self.mode} needs a drafter; expected a draft_backend that drafts, or mode ar")
        if self.draft_backend == "replay" and self.replay is None:
            raise InvalidRequest("draft_backend replay has no script; expected replay to name the file it plays")

    def _check_colocated(self) -> None:
        if self.draft_backend != "mlx":
            raise InvalidRequest(
                f"colocate drafts with MLX in the target's process, so draft_backend {self.draft_backend} has no place"
                " there; leave out one of the two"
            )
        if self.draft_prefill not in ("auto", "mlx"):
            raise InvalidRequest(
                f"draft_prefill {self.draft_prefill} is for a draft worker and colocate has none; leave one out"
            )
        if self.model is not None and self.draft_model is None:
            raise InvalidRequest("colocate has no model to draft with; expected draft_model beside model, or neither")
        if self.simulate is not None:
            raise InvalidRequest("colocate keeps to no latency profile; expected simulate or colocate, not both")
        if self.mode == "ssd":
            raise InvalidRequest(NO_SSD_COLOCATED)


def flags(settings: ServeSettings) -> list[str]:
    """The command line that says these settings; defaults are left out."""
    line = []
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", str(value)]
    return line


def check_draft_tokens(value: object) -> None:
    check_whole("num_draft_tokens", value, 1, MAX_DRAFT_TOKENS)


def check_branches(value: object) -> None:
    check_whole("branches", value, 1, MAX_BRANCHES_ASKED)


def check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}; expected a whole number from {low} to {high}")


def check_word(name: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        raise InvalidRequest(f"{name} is {value!r}; expected one of {', '.join(words)}")
