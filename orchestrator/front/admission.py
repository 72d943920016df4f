"""Admission: checks a request and prepares it (tokens, seed, text stream), and the queue of waiting requests.

Every refusal is one sentence that says what was expected. Knows the pair's tokenizer, template and limits; knows
nothing of sockets.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from outrider.grammar.compiler import check_grammar, get_vocabulary
from outrider.orchestrator.events import Admit, KVBudget, in_units
from outrider.orchestrator.pairing.detokenizer import TextStream
from outrider.orchestrator.pairing.model_files import drafter_names
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.orchestrator.pairing.tokenizer import TextCodec, vocabulary_digest
from outrider.orchestrator.settings import NO_SSD_COLOCATED, SAMPLING_BACKENDS, check_setting
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import InvalidRequest, OtherModel, PromptTooLong, UnknownDrafter
from outrider.protocol.heads import DRAFT_MODEL, JOINT_SEPARATOR
from outrider.protocol.messages import Generate
from outrider.protocol.sampling import Grammar, SamplingParams

log = logging.getLogger(__name__)

CODE_SAMPLE_TOKENS = 512  # at the end of a prompt
MIN_CODE_CHARS = 80  # shorter prompts are not taken for code
CODE_SYMBOL_RATIO = 0.05
CODE_SYMBOLS = frozenset('{}[]();=_<>/\\#:"*+|&')
SEED_RANGE = 2**32

# The default of max_active assumes texts of this length; each request still waits for the memory that it needs.
TYPICAL_TOKENS = 4096

# The highest default of max_active: more have not been measured.
MAX_ACTIVE = 16

QueuePath: TypeAlias = tuple[bytes, ...]
"""A request's line in the queue: its client, or its client and a user of that client, and so on."""

T = TypeVar("T")


def is_code(text: str) -> bool:
    """Whether the end of a prompt looks like a program, or like another text with many symbols, since code and prose
    suit different drafters. It does not tell what kind of text a prompt asks for.

    In nine of ten pieces of Python more than one character in twenty is a symbol, in nine of ten pieces of prose and
    Markdown fewer.
    """
    return len(text) >= MIN_CODE_CHARS and sum(char in CODE_SYMBOLS for char in text) > CODE_SYMBOL_RATIO * len(text)


@dataclass(slots=True)
class Ticket:
    """A request from GENERATE to its end: its order to the core, its text stream, and `notes` for the client.

    `path` is its line in the queue; `complete` says why a resumed text is complete already, if it is; `end_reason`
    says why no more text is sent (stop or cancelled); `begun_ns` is when it was admitted (0: it waits).
    """

    sender: bytes
    name: str
    path: QueuePath
    admit: Admit
    text: TextStream
    notes: tuple[str, ...]
    complete: str = ""
    tokens: int = 0
    end_reason: str = ""
    received_ns: int = field(default_factory=clock.now)
    begun_ns: int = 0

    @property
    def queue_ms(self) -> float:
        """How long it has waited in the queue."""
        return ((self.begun_ns or clock.now()) - self.received_ns) / MILLISECOND_NS

    @property
    def key(self) -> str:
        return self.admit.request

    @property
    def max_length(self) -> int:
        """The number of tokens that its text can have, prompt included."""
        return len(self.admit.tokens) + self.admit.sampling.max_tokens


class Admission:
    """Checks requests against one pair of models. The limits are config.json's until a worker reports its own."""

    def __init__(self, pair: ChosenPair, codec: TextCodec) -> None:
        self._pair = pair
        self._codec = codec
        self._settings = pair.settings
        self._drafters = drafter_names(pair.settings)
        self._vocabulary = get_vocabulary(codec.tokenizer)
        self.context_length = pair.target.context_length
        self.vocab_size = pair.target.vocab_size
        self.draft_context = pair.draft.context_length if pair.draft is not None else None
        self.kv_budget = KVBudget()
        self.target_fingerprint = ""
        self.tokenizer_fingerprint = vocabulary_digest(codec)

    @property
    def fingerprint(self) -> str:
        """Identifies the weights, number format and tokenizer that a resumed text needs; empty without a target."""
        return f"{self.target_fingerprint}-{self.tokenizer_fingerprint}" if self.target_fingerprint else ""

    @property
    def max_active(self) -> int:
        """How many requests may run at once: the setting, or as many of typical length as memory holds."""
        if self._settings.max_active is not None:
            return self._settings.max_active
        return min(self.kv_budget.max_texts(min(TYPICAL_TOKENS, self.context_length)), MAX_ACTIVE)

    def accept(self, generate: Generate, key: str, sender: bytes = b"", path: QueuePath = ()) -> Ticket:
        """Checks and prepares a request of this sender, called `key` in the core.

        Raises:
            InvalidRequest: it can't run.
            ModelError: the model's chat template refuses the prompt.
        """
        for name in ("num_draft_tokens", "branches"):
            check_setting(name, getattr(generate, name))
        tokens, given = self._tokenize(generate), generate.resume_tokens
        if given is not None and generate.sampling.seed is None:
            raise InvalidRequest("the resumed text has no seed; expected the one that it began with")
        resumed = tuple(int(token) for token in given) if given is not None else ()
        self._check_fingerprint(generate)
        self._check_tokens(tokens, resumed, generate.sampling)
        sampling, notes = self._fit_sampling(generate.sampling, len(tokens))
        eos = self._codec.end_tokens(sampling)
        if sampling.grammar is not None:
            self._check_grammar(sampling.grammar)
        mode = self._choose_mode(generate.mode)
        admit = Admit(
            request=key,
            tokens=tokens,
            sampling=sampling,
            mode=mode,
            eos=eos,
            num_draft_tokens=generate.num_draft_tokens or self._settings.num_draft_tokens,
            branches=generate.branches or self._settings.branches,
            origins=generate.origins,
            rounds=generate.rounds,
            resume_tokens=resumed,
            drafter=self._check_drafter(generate),
            code=mode == "auto" and is_code(self._codec.decode(tokens[-CODE_SAMPLE_TOKENS:])),
        )
        text = TextStream(self._codec.spelling, tokens, sampling.stop, eos)
        complete = _feed_resumed(admit, text, generate.resume_chars)
        return Ticket(sender, generate.request, path, admit, text, notes, complete)

    def _choose_mode(self, requested: str) -> str:
        mode = self._settings.mode if requested == "auto" else requested
        if self._settings.draft_backend == "none" and not self._settings.head:
            if mode in ("sd", "ssd"):
                raise InvalidRequest(f"mode {mode} needs a drafter and this server has none; expected auto or ar")
            return "ar"
        if mode == "ssd" and not self._settings.can_work_ahead:
            raise InvalidRequest(NO_SSD_COLOCATED)
        return mode

    def _check_drafter(self, generate: Generate) -> str:
        """Returns the only drafter that may draft; empty: any."""
        drafter = generate.drafter
        if drafter and drafter not in self._drafters:
            known = f"one of {', '.join(self._drafters)}" if self._drafters else "none: this server has no drafter"
            raise UnknownDrafter(f"no drafter is called {drafter!r} here; expected {known}")
        if drafter not in ("", DRAFT_MODEL) and generate.mode == "ssd" and JOINT_SEPARATOR not in drafter:
            raise InvalidRequest(f"mode ssd is for draft workers, and {drafter} is not one; expected mode sd or auto")
        if JOINT_SEPARATOR in drafter and generate.mode == "sd":
            raise InvalidRequest(f"{drafter} needs a drafter that works ahead; expected mode ssd or auto")
        return drafter

    def _check_fingerprint(self, generate: Generate) -> None:
        theirs, ours = generate.fingerprint, self.fingerprint
        if generate.resume_tokens is not None and len(generate.resume_tokens) and theirs and ours and theirs != ours:
            raise OtherModel(
                f"the text began with another model or number format ({theirs}) than this server runs ({ours}), so it"
                " would continue differently; expected a server with the same files on the same kind of device"
            )

    def _tokenize(self, generate: Generate) -> tuple[int, ...]:
        if (generate.prompt is None) == (generate.tokens is None):
            raise InvalidRequest("the request has a prompt and tokens, or neither; expected exactly one of them")
        if generate.tokens is not None:
            return tuple(int(token) for token in generate.tokens)
        codec = self._codec if generate.chat_template else replace(self._codec, template=None)
        return codec.encode_prompt(generate.prompt) if generate.prompt else ()

    def _check_tokens(self, tokens: tuple[int, ...], resumed: tuple[int, ...], sampling: SamplingParams) -> None:
        if not tokens:
            raise InvalidRequest("the prompt is empty; expected text, or at least one token")
        most, where = self._max_length()
        if len(tokens) >= most:
            raise PromptTooLong(
                f"the prompt is too long: {len(tokens)} tokens > {max(most - 1, 0)} maximum; this model's maximum"
                f" context length is {most} tokens{where}, one of them for the answer"
            )
        if self.vocab_size is None:
            return
        biased = tuple(token for token, _ in sampling.logit_bias)
        for name, ids in (("the prompt", tokens), ("the text so far", resumed), ("logit_bias", biased)):
            unknown = next((token for token in ids if not 0 <= token < self.vocab_size), None)
            if unknown is not None:
                raise InvalidRequest(f"{name} has token {unknown}; expected ids from 0 to {self.vocab_size - 1}")

    def _max_length(self) -> tuple[int, str]:
        """Returns the number of tokens that a text can have, prompt included, and " in kv_memory" if that is less than
        the model's context."""
        memory = f" in kv_memory ({in_units(self.kv_budget.limit)})"
        return min((self.context_length, ""), (self.kv_budget.max_tokens, memory))

    def _check_grammar(self, grammar: Grammar) -> None:
        if not self._codec.eos:
            target = self._pair.target.name
            raise InvalidRequest(f"{target} has no end token, so a text with a {grammar.name} could not end")
        check_grammar(grammar, self._vocabulary)

    def _fit_sampling(self, sampling: SamplingParams, prompt_tokens: int) -> tuple[SamplingParams, tuple[str, ...]]:
        """Returns the parameters with a seed and a maximum of tokens that fits, and notes on what was changed."""
        notes = self._pair.notes
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbelow(SEED_RANGE))
        most, where = self._max_length()
        if sampling.max_tokens > (room := most - prompt_tokens):
            why = f"the context{where} would be full"
            notes += (f"max_tokens was reduced from {sampling.max_tokens} to {room}, because {why}",)
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        if self.draft_context is not None and prompt_tokens + sampling.max_tokens > self.draft_context:
            notes += (f"the draft model's context ends at {self.draft_context} tokens; drafting stops there",)
        if sampling.is_residual and self._settings.draft_backend not in SAMPLING_BACKENDS:
            backend = self._settings.draft_backend
            notes += (f"the {backend} drafter does not sample: its tokens are verified as if they had probability 1",)
        return sampling, notes


def _feed_resumed(admit: Admit, text: TextStream, characters: int) -> str:
    """Feeds `text` the resumed tokens, of which the client has `characters`; returns why it is complete, if it is."""
    if text.resume(admit.resume_tokens, characters).stopped:
        return "stop"
    if not admit.eos.isdisjoint(admit.resume_tokens[-1:]):
        return "eos"
    return "length" if len(admit.resume_tokens) >= admit.sampling.max_tokens else ""


class FairQueue(Generic[T]):
    """A queue in which clients take turns, and so do the users of a client: one with many requests does not delay one
    with a single request."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._lines: OrderedDict[bytes, FairQueue[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items) + sum(map(len, list(self._lines.values())))  # may be called on any thread

    def __contains__(self, client: bytes) -> bool:
        return client in self._lines

    def put(self, path: QueuePath, item: T, first: bool = False) -> None:
        """Appends an item to its line; `first`: before all others, because it continues a text."""
        if not path:
            self._items.appendleft(item) if first else self._items.append(item)
            return
        self._lines.setdefault(path[0], FairQueue()).put(path[1:], item, first)
        if first:
            self._lines.move_to_end(path[0], last=False)

    def peek(self) -> T | None:
        """Returns the next item without removing it; None if the queue is empty."""
        return self._items[0] if self._items else next((line.peek() for line in self._lines.values()), None)

    def take(self) -> T:
        """Removes and returns the next item, of which there must be one, and moves its client to the back."""
        if self._items:
            return self._items.popleft()
        name, line = self._lines.popitem(last=False)
        item = line.take()
        if len(line):
            self._lines[name] = line
        return item

    def drop(self, path: QueuePath, item: T) -> bool:
        """Removes `item` from its line; returns False if it is not there."""
        if not path and item in self._items:
            self._items.remove(item)
            return True
        line = self._lines.get(path[0]) if path else None
        if line is None or not line.drop(path[1:], item):
            return False
        if not len(line):
            del self._lines[path[0]]
        return True


def log_ticket(ticket: Ticket, level: int, message: str, *values: object) -> None:
    """Logs a message about a request, with its names here and at the client."""
    fields = {"request": ticket.key, "client_request": ticket.name}
    log.log(level, f"%s (%s) {message}", ticket.key, ticket.name, *values, extra=fields)
