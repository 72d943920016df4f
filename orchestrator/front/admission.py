"""What the front checks before a request may wait, what it makes of it (tokens, a seed, a text stream), and the
queue.

Every refusal is one sentence with what was expected. Knows the pair's text side and limits; knows nothing of sockets.

`is_code`: whether a prompt looks like code; code and prose are each drafted best by another drafter. It counts
characters: in nine of ten pieces of Python more than one character in twenty is a sign, in nine of ten pieces of prose
and Markdown fewer are. What a prompt asks for it does not know.

`FairQueue`: requests wait in one line per client, and the clients take turns; so do the users a client asks for.

`Ticket`: a request as the front keeps it, and its lines in the log.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from outrider.grammar.compiler import check, vocabulary_of
from outrider.orchestrator.events import Admit
from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.limits import KVBudget, in_mb
from outrider.orchestrator.pairing.model_files import drafters
from outrider.orchestrator.pairing.pairing import PairText
from outrider.orchestrator.pairing.tokenizer import ModelText, fingerprint
from outrider.orchestrator.settings import DRAWING_BACKENDS, NO_SSD_COLOCATED, check_branches, check_draft_tokens
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import InvalidRequest, OtherModel, PromptTooLong, UnknownDrafter
from outrider.protocol.heads import DRAFT_MODEL, is_joint
from outrider.protocol.messages import Generate
from outrider.protocol.sampling import Grammar, SamplingParams

NEWEST = 512  # of a prompt's tokens
SHORTEST = 80  # characters that tell anything
SHARE = 0.05
SIGNS = frozenset('{}[]();=_<>/\\#:"*+|&')


def is_code(text: str) -> bool:
    """Whether a prompt's end looks like a program, or anything else that is written with many signs."""
    return len(text) >= SHORTEST and sum(char in SIGNS for char in text) > SHARE * len(text)


SEEDS = 2**32
# Of so many tokens a request's text is usually at most; each waits for its own memory all the same.
USUAL_TOKENS = 4096
# Until memory is known, and as many at once as were measured.
FEW_PLACES, MOST_PLACES = 4, 16


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that may run: what the core is to do, its text to be, and `notes` for whoever asked.

    `ended`: why the text is complete with what was said of it before, if it is.
    """

    admit: Admit
    text: TextStream
    notes: tuple[str, ...]
    ended: str = ""


class Admission:
    """Checks requests against one pair of models. The limits are config.json's until a worker has said its own."""

    def __init__(self, text: PairText) -> None:
        self._text = text
        self._settings = text.pair.settings
        self._drafters = drafters(text.pair.settings)
        self._vocabulary = vocabulary_of(text.codec.tokenizer)
        self.context_length = text.pair.target.context_length
        self.vocab_size = text.pair.target.vocab_size
        draft = text.pair.draft
        self.draft_context = draft.context_length if draft is not None else None
        self.kv_budget: KVBudget | None = None
        self.of_target = ""
        self._of_tokens = fingerprint(text.codec)

    @property
    def fingerprint(self) -> str:
        """Whose texts this server can go on with: those of its weights, number format and tokenizer; empty until a
        target has said its own."""
        return f"{self.of_target}-{self._of_tokens}" if self.of_target else ""

    @property
    def places(self) -> int:
        """How many requests may run at once: as was said, or as many of usual length as memory holds."""
        if self._settings.max_active is not None:
            return self._settings.max_active
        if self.kv_budget is None:
            return FEW_PLACES
        return min(self.kv_budget.places(min(USUAL_TOKENS, self.context_length or USUAL_TOKENS)), MOST_PLACES)

    def accept(self, asked: Generate, key: str) -> Accepted:
        """Raises InvalidRequest for what can't run, ModelError when the model's chat template refuses the prompt."""
        if asked.num_draft_tokens is not None:
            check_draft_tokens(asked.num_draft_tokens)
        if asked.branches is not None:
            check_branches(asked.branches)
        tokens, said = self._tokens(asked), _said(asked)
        self._check_same(asked)
        self._check_tokens(tokens, said, asked.sampling)
        sampling, notes = self._fitted(asked.sampling, len(tokens))
        eos = frozenset() if sampling.ignore_eos else self._text.codec.eos
        if sampling.grammar is not None:
            self._check_grammar(sampling.grammar)
        mode = self._mode(asked.mode)
        admit = Admit(
            request=key,
            tokens=tokens,
            sampling=sampling,
            mode=mode,
            eos=eos,
            num_draft_tokens=asked.num_draft_tokens or self._settings.num_draft_tokens,
            branches=asked.branches or self._settings.branches,
            origins=asked.origins,
            rounds=asked.rounds,
            resume_tokens=said,
            drafter=self._drafter(asked),
            code=mode == "auto" and is_code(self._text.codec.decode(tokens[-NEWEST:])),
        )
        text = TextStream(self._text.codec, tokens, sampling.stop, eos)
        return Accepted(admit, text, notes, _ended(admit, text, asked.resume_chars))

    def need(self, admit: Admit) -> int:
        """Bytes that a request takes in all workers when its text is as long as it may get."""
        return (
            self.kv_budget.cost.of(len(admit.tokens) + admit.sampling.max_tokens) if self.kv_budget is not None else 0
        )

    def _mode(self, asked: str) -> str:
        mode = self._settings.mode if asked == "auto" else asked
        if self._settings.draft_backend == "none" and not self._settings.head:
            if mode in ("sd", "ssd"):
                raise InvalidRequest(f"mode {mode} needs a drafter and this server has none; expected auto or ar")
            return "ar"
        if mode == "ssd" and not self._settings.can_work_ahead:
            raise InvalidRequest(NO_SSD_COLOCATED)
        return mode

    def _drafter(self, asked: Generate) -> str:
        """The only one that is to draft; empty: whoever is there."""
        if asked.drafter and asked.drafter not in self._drafters:
            known = ", ".join(self._drafters) or "none: this server has no drafter"
            raise UnknownDrafter(f"no drafter is called {asked.drafter!r} here; expected {known}")
        if asked.drafter not in ("", DRAFT_MODEL) and asked.mode == "ssd" and not is_joint(asked.drafter):
            raise InvalidRequest(
                f"mode ssd is for draft workers, and {asked.drafter} is not one; expected mode sd or auto"
            )
        if is_joint(asked.drafter) and asked.mode == "sd":
            raise InvalidRequest(f"{asked.drafter} draft for one tree while one works ahead; expected mode ssd or auto")
        return asked.drafter

    def _check_same(self, asked: Generate) -> None:
        theirs, ours = asked.fingerprint, self.fingerprint
        if asked.resume_tokens is not None and len(asked.resume_tokens) and theirs and ours and theirs != ours:
            raise OtherModel(
                f"the text began with another model or number format ({theirs}) than this server runs ({ours}), so it"
                " would go on as another text; expected a server with the same files on the same kind of device"
            )

    def _tokens(self, asked: Generate) -> tuple[int, ...]:
        if (asked.prompt is None) == (asked.tokens is None):
            raise InvalidRequest("the request has a prompt and tokens, or neither; expected exactly one of them")
        if asked.tokens is not None:
            return tuple(int(token) for token in asked.tokens)
        if not asked.prompt:
            raise InvalidRequest("the prompt is empty; expected at least one character")
        return ModelText(self._text.codec, self._text.template if asked.chat_template else None).tokens(asked.prompt)

    def _check_tokens(self, tokens: tuple[int, ...], said: tuple[int, ...], sampling: SamplingParams) -> None:
        if not tokens:
            raise InvalidRequest("the prompt is empty; expected at least one token")
        if self.context_length is not None and len(tokens) >= self.context_length:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; expected at most {self.context_length - 1}, one less than the"
                f" model's context of {self.context_length}"
            )
        budget = self.kv_budget
        if budget is not None and len(tokens) >= budget.tokens:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and takes {in_mb(budget.cost.of(len(tokens) + 1))} with one more;"
                f" expected at most {max(budget.tokens - 1, 0)} tokens, what fits into the {in_mb(budget.limit)} of"
                " kv_memory"
            )
        if self.vocab_size is None:
            return
        biased = tuple(token for token, _ in sampling.logit_bias)
        for what, ids in (("the prompt", tokens), ("the text so far", said), ("logit_bias", biased)):
            beyond = next((token for token in ids if not 0 <= token < self.vocab_size), None)
            if beyond is not None:
                raise InvalidRequest(f"{what} has token {beyond}; expected ids from 0 to {self.vocab_size - 1}")

    def _check_grammar(self, grammar: Grammar) -> None:
        if not self._text.codec.eos:
            target = self._text.pair.target.name
            raise InvalidRequest(f"{target} has no end token, so a text by a {grammar.name} could not end")
        check(grammar, self._vocabulary)

    def _fitted(self, sampling: SamplingParams, prompt_tokens: int) -> tuple[SamplingParams, tuple[str, ...]]:
        """With a seed, and no more tokens than the context has room for."""
        notes = self._text.pair.notes
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbelow(SEEDS))
        if self.context_length is not None and prompt_tokens + sampling.max_tokens > self.context_length:
            room = self.context_length - prompt_tokens
            notes += (f"max tokens was reduced from {sampling.max_tokens} to {room}: the context is full then",)
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        if self.kv_budget is not None and prompt_tokens + sampling.max_tokens > self.kv_budget.tokens:
            room = self.kv_budget.tokens - prompt_tokens
            limit = in_mb(self.kv_budget.limit)
            notes += (f"max tokens is {room} instead of {sampling.max_tokens}: the {limit} of kv_memory end there",)
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        if self.draft_context is not None and prompt_tokens + sampling.max_tokens > self.draft_context:
            notes += (f"the draft model's context ends at {self.draft_context} tokens: no drafting after that",)
        if sampling.is_residual and self._settings.draft_backend not in DRAWING_BACKENDS:
            backend = self._settings.draft_backend
            notes += (f"the {backend} drafter does not draw: what it proposes is taken as certain",)
        return sampling, notes


def _said(asked: Generate) -> tuple[int, ...]:
    if asked.resume_tokens is None:
        return ()
    if asked.sampling.seed is None:
        raise InvalidRequest("a text that goes on has no seed; expected the one that it began with")
    return tuple(int(token) for token in asked.resume_tokens)


def _ended(admit: Admit, text: TextStream, characters: int) -> str:
    """Why the text so far, with so many characters, is the whole text, if it is; `text` has read it then."""
    if text.resume(admit.resume_tokens, characters).stopped:
        return "stop"
    if not admit.eos.isdisjoint(admit.resume_tokens[-1:]):
        return "eos"
    return "length" if len(admit.resume_tokens) >= admit.sampling.max_tokens else ""


T = TypeVar("T")
Whose: TypeAlias = tuple[bytes, ...]
"""Whose turns a request takes: a client's, or a client's and one of its users', and so on."""


class FairQueue(Generic[T]):
    """A client with a hundred requests does not keep one with a single request waiting."""

    def __init__(self) -> None:
        self._own: deque[T] = deque()
        self._lines: OrderedDict[bytes, FairQueue[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._own) + sum(map(len, list(self._lines.values())))  # any thread may ask

    def put(self, whose: Whose, item: T, first: bool = False) -> None:
        """At the end of its own line; `first`: before all, since a text under way continues."""
        if not whose:
            self._own.appendleft(item) if first else self._own.append(item)
            return
        self._lines.setdefault(whose[0], FairQueue()).put(whose[1:], item, first)
        if first:
            self._lines.move_to_end(whose[0], last=False)

    def first(self) -> T | None:
        """The next item, left in the line; None when none waits."""
        return self._own[0] if self._own else next((line.first() for line in self._lines.values()), None)

    def take(self) -> T | None:
        """The next item; its client goes to the back. None when none waits."""
        if self._own:
            return self._own.popleft()
        if not self._lines:
            return None
        name, line = self._lines.popitem(last=False)
        item = line.take()
        if len(line):
            self._lines[name] = line
        return item

    def drop(self, whose: Whose, item: T) -> bool:
        """Takes `item` out of its line; False when it is not in it."""
        if not whose:
            found = item in self._own
            if found:
                self._own.remove(item)
            return found
        line = self._lines.get(whose[0])
        if line is None or not line.drop(whose[1:], item):
            return False
        if not len(line):
            del self._lines[whose[0]]
        return True


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ticket:
    """A request from the client's word to its end. `whose` turns it waits for. `ending`: stop or cancelled once the
    reader wants no more. `begun_ns`: when it was its turn; 0: it waits."""

    sender: bytes
    name: str
    accepted: Accepted
    whose: Whose
    tokens: int = 0
    ending: str = ""
    asked_ns: int = field(default_factory=clock.now)
    begun_ns: int = 0

    @property
    def queue_ms(self) -> float:
        """How long it has waited for its turn."""
        return ((self.begun_ns or clock.now()) - self.asked_ns) / MILLISECOND_NS

    @property
    def key(self) -> str:
        return self.accepted.admit.request


def note(ticket: Ticket, level: int, told: str, *values: object) -> None:
    """A line about a request: what it is called here, and by its client."""
    about = {"request": ticket.key, "client_request": ticket.name}
    log.log(level, f"%s (%s) {told}", ticket.key, ticket.name, *values, extra=about)
