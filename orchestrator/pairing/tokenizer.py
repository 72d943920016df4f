"""A model's text side without its weights: the tokenizer, the bytes of each token, and the chat template.

`TextCodec`: text to tokens, and the tokens that end a text. Needs only the tokenizers library for a byte-level
tokenizer.json. Knows a model's folder; knows nothing of requests, sockets and rounds.

`Spelling`: the bytes of each token inside a text, so that a text can be built token by token. A decoder of the
tokenizers library needs the whole text: it turns a run of byte tokens into U+FFFD while one character in it is
incomplete, and drops a space at the beginning.

`vocabulary_difference` compares the text of each token in two models; a draft model needs the same texts as its target.
How text is split does not matter (only the target's tokenizer splits text), nor does padding: embedding rows beyond the
last token, and tokens that are reserved or unused by name.

`chat_template` and `render_template`: turn a conversation into the prompt that a model was trained to answer. Templates
come with models, so they run in Jinja's sandbox. `ModelText`: prompts as tokens.

`TextStream` converts one request's committed tokens to text: whole characters only, and nothing of a stop string. It
handles tokens one by one, so that the text does not depend on how they were committed.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from outrider.orchestrator.pairing.model_files import ModelFiles, read_json
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_SAMPLES = 3
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_FILLER = re.compile(r"reserved|unused|placeholder|dummy|extra_\d|extra_id|^\W*(control_\d|pad\d*\W*$)", re.IGNORECASE)
JINJA_FILE = "chat_template.jinja"
Message: TypeAlias = Mapping[str, Any]
"""A message as templates expect it: `role` and `content`, and optionally `tool_calls`, `tool_call_id`, `name`, ..."""

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""The variables that `render_template` sets itself, which a caller's keyword may not replace."""

_END_MARK = "\ue000\ue001\ue000"  # private characters, which no template writes or changes
MAX_CHARACTER_BYTES = 4  # bytes, so tokens at most


class Spelling:
    """The bytes of one tokenizer's tokens: byte-level tokens are spelled in the alphabet of bytes, byte-fallback tokens
    as <0x41>; any other token has the text that decoding adds for it after another token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = decoder_kinds(tokenizer)
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        tokens = range(tokenizer.get_vocab_size())
        self._context_token = next((token for token in tokens if self._decode(token).strip()), 0)
        self._context_length = len(self._decode(self._context_token))

    def of(self, token: int) -> bytes:
        """Returns the bytes that `token` adds to a text, which may begin or end inside a character; none if unknown."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._alphabet is not None:
            known = all(letter in self._alphabet for letter in name)
            return bytes(self._alphabet[letter] for letter in name) if known else name.encode()
        byte = _BYTE.fullmatch(name) if self._has_byte_tokens else None
        return (
            bytes.fromhex(byte[1])
            if byte
            else self._decode(self._context_token, token)[self._context_length :].encode()
        )

    def _decode(self, *tokens: int) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    """Returns the steps of the tokenizer's decoder by their names in tokenizer.json."""
    if tokenizer.decoder is None:
        return frozenset()
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(step["type"] for step in described.get("decoders", [described]))


def _byte_alphabet() -> dict[str, int]:
    """Maps each letter to its byte: printable bytes are their own letters, the others have letters from U+0100 on."""
    letters = sorted(ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    rest = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip(letters[len(own) :], rest, strict=True))


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A model's tokenizer. `eos`: tokens that end a text; `special`: the texts of bos_token, eos_token and so on.

    `decode` is for complete texts, `spelling` for texts in progress.
    """

    model: ModelFiles
    tokenizer: Tokenizer
    eos: frozenset[int]
    special: dict[str, str]
    spelling: Spelling

    def encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Returns the tokens of `text`. `special` adds tokenizer.json's tokens around it, unless it begins with bos.

        Encodes a batch of one, since the library releases the GIL for a batch, and does not for a single text.
        """
        bos = self.special.get("bos_token")
        begun = bos is not None and text.startswith(bos)
        try:
            (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special and not begun)
        except TypeError:  # half a surrogate pair, or a byte of a terminal or command line that is not UTF-8
            raise InvalidRequest("the text can't be encoded as UTF-8; expected Unicode text") from None
        return tuple(encoding.ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Returns the text of `tokens`, including special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_codec(model: ModelFiles) -> TextCodec:
    """Loads the tokenizer in a model's folder.

    Raises:
        ModelError: there is no tokenizer, or it can't be read.
    """
    config = read_json(model.folder / "tokenizer_config.json")
    tokenizer = _load_tokenizer(model)
    special = _read_special_tokens(model.folder, config)
    eos = special.get("eos_token")
    sizes, generation = (read_json(model.folder / name) for name in ("config.json", "generation_config.json"))
    places = (generation, sizes, sizes.get("text_config") or {})
    ends = next(filter(None, (_token_set(place.get("eos_token_id")) for place in places)), frozenset[int]())
    if eos is not None:
        ends |= _token_set(tokenizer.token_to_id(eos))
    return TextCodec(model=model, tokenizer=tokenizer, eos=ends, special=special, spelling=Spelling(tokenizer))


def _load_tokenizer(model: ModelFiles) -> Tokenizer:
    path = model.folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower class
            raise ModelError(
                f"{path} can't be read ({error}); expected a tokenizer of the tokenizers library"
            ) from None
        if "ByteLevel" not in decoder_kinds(tokenizer):
            with suppress(ModelError):  # in which case mlx-lm has no other tokenizer, either
                tokenizer = _load_with_transformers(model)
    else:
        tokenizer = _load_with_transformers(model)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_with_transformers(model: ModelFiles) -> Tokenizer:
    """Loads the tokenizer as transformers, and so mlx-lm, does.

    For SentencePiece, its class uses only the vocabulary of tokenizer.json, and has its own rules for spaces;
    without a tokenizer.json it converts older files, if it can.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer  # deferred: takes more than a second

    try:
        loaded = AutoTokenizer.from_pretrained(str(model.folder), trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model.name} has no readable tokenizer ({str(error).partition(chr(10))[0]})") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(f"{model.name} has a tokenizer without a tokenizer.json; convert it to tokenizer.json first")
    return backend


def _read_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    merged = {**read_json(folder / "special_tokens_map.json"), **config}
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = merged.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _token_set(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token for token in values if isinstance(token, int) and not isinstance(token, bool))


def vocabulary_difference(target: TextCodec, draft: TextCodec) -> str:
    """Describes how the texts of the token ids differ in two models; empty if they do not."""
    ours, theirs = token_texts(target), token_texts(draft)
    shared = ours.keys() & theirs.keys()
    unlike = sorted(i for i in shared if ours[i] != theirs[i] and not (_is_filler(ours[i]) or _is_filler(theirs[i])))
    if unlike:
        samples = ", ".join(f"{i} is {ours[i]!r} and {theirs[i]!r}" for i in unlike[:MAX_SAMPLES])
        return f"{len(unlike)} of {len(shared)} tokens differ, such as {samples}"
    for one, other, owner in ((ours, theirs, "the target's"), (theirs, ours, "the draft's")):
        alone = sorted(i for i in one.keys() - other.keys() if not _is_filler(one[i]))
        if alone:
            samples = ", ".join(f"{i} ({one[i]!r})" for i in alone[:MAX_SAMPLES])
            return f"{len(alone)} tokens are only in {owner} vocabulary, such as {samples}"
    return ""


def require_same_vocabulary(target: TextCodec, draft: TextCodec) -> None:
    """Checks that the draft model has the target's vocabulary. Raises ModelError, which says how they differ."""
    if differs := vocabulary_difference(target, draft):
        raise ModelError(
            f"the vocabularies of {target.model.name} and {draft.model.name} differ: {differs};"
            " use a draft model of the target's family (`outrider pairs` lists some)"
        )


def vocabulary_digest(codec: TextCodec) -> str:
    """Returns a digest of the texts of all tokens, to compare the vocabularies of models on two machines.

    Names in brackets are left out: models of a family differ in them, and `vocabulary_difference` mostly ignores them.
    """
    ordinary = [(i, token) for i, token in token_texts(codec).items() if not _BRACKETED.fullmatch(token)]
    return hashlib.sha256(repr(sorted(ordinary)).encode()).hexdigest()[:32]


def token_texts(codec: TextCodec) -> dict[int, str]:
    """Returns the text of each token id, special tokens included."""
    return {token_id: token for token, token_id in codec.tokenizer.get_vocab(with_added_tokens=True).items()}


def _is_filler(token: str) -> bool:
    return bool(_FILLER.search(token)) and token.startswith(("<", "["))


def chat_template(folder: Path) -> str | None:
    """Returns the chat template in a model's folder; None if there is none.

    Raises:
        ModelError: its file can't be read.
    """
    file = folder / JINJA_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} can't be read as text ({error}); download the model again") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _default_template(read_json(folder / name).get("chat_template"))
        if template is not None:
            return template
    return None


def render_template(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    answer: bool = True,
    keywords: Mapping[str, Any] | None = None,
) -> str:
    """Renders `messages` with the template; `answer` appends the beginning of an answer (add_generation_prompt).

    `tools` are functions in OpenAI's shape, `keywords` further variables of this template, such as enable_thinking.

    Raises:
        InvalidRequest: a keyword has the name of a variable that is always set.
        ModelError: the template refuses the messages, or is broken.
    """
    from jinja2 import TemplateError  # deferred: many models have no template

    given = {**special, **(keywords or {})}
    taken = RESERVED_VARIABLES.intersection(given)
    if taken:
        raise InvalidRequest(f"the chat template keyword {min(taken)} is reserved; rename it")
    try:
        return _compile_template(template).render(
            messages=[_to_template_fields(one) for one in messages],
            add_generation_prompt=answer,
            tools=tools,
            documents=None,
            **given,
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ModelError(
            f"the model's chat template failed ({error}); expected a template that takes these messages, or"
            " none (--ignore-chat-template)"
        ) from None


def _to_template_fields(message: Message) -> Message:
    """Returns a message with its thinking under both names that templates read, as in transformers.

    An answer of gpt-oss with all its channels counts from the final one, because its template refuses the others.
    """
    thought = next((message[name] for name in ("reasoning_content", "thinking") if message.get(name)), None)
    fields = {**message, "reasoning_content": thought, "thinking": thought} if thought else message
    content = message.get("content")
    if message.get("role") == "assistant" and isinstance(content, str) and content.startswith("<|channel|>"):
        _, found, answer = content.rpartition("<|channel|>final<|message|>")
        fields = {**fields, "content": answer if found else ""}
    return fields


def render_open(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Renders a conversation up to the end of its last message's text, so that the model continues that text.

    A second rendering with a mark at the end of the text shows what the template writes after it.

    Raises:
        InvalidRequest: the text is empty, or the template has changed it, so that its end can't be found.
    """
    last = messages[-1]
    text = str(last.get("content") or "")
    rendered = render(messages)
    _, mark, after = render([*messages[:-1], {**last, "content": text + _END_MARK}]).rpartition(_END_MARK)
    if not (text.strip() and mark and rendered.endswith(after)):
        raise InvalidRequest("the final message can't be continued: its text is empty, or the chat template changes it")
    return rendered.removesuffix(after)


@lru_cache(maxsize=4)
def _compile_template(template: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Ignores the tags around answers, which mark the text to train on."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _default_template(value: object) -> str | None:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer and chat template; `template`: None if there is none, or it is not to be used. `sampling`:
    the values of SamplingParams that its generation_config.json recommends."""

    codec: TextCodec
    template: str | None
    sampling: Mapping[str, float]

    def tokens(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Returns the tokens of a user's text, or of a conversation to answer.

        Without a template the text is used as it is, and messages become one text for the model to continue.

        Raises:
            ModelError: the template refuses the messages.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.template is None:
            return self.codec.encode(join_messages(messages))
        return self.codec.encode(render_template(self.template, messages, self.codec.special), special=False)


def join_messages(messages: Sequence[Message]) -> str:
    """Joins messages for a model without a template: each text begins a new line, except for answers, which continue
    the text before them."""
    begins = ["" if message.get("role") == "assistant" or not place else "\n" for place, message in enumerate(messages)]
    return "".join(f"{begin}{message.get('content') or ''}" for begin, message in zip(begins, messages, strict=True))


_SAMPLING_KEYS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def load_text(model: ModelFiles, template: bool = True) -> ModelText:
    """Loads a model's tokenizer and chat template; `template` False: the tokenizer only.

    Raises:
        ModelError: its files can't be read.
    """
    used = chat_template(model.folder) if template else None
    return ModelText(load_codec(model), used, read_default_sampling(model.folder))


def read_default_sampling(folder: Path) -> dict[str, float]:
    """Returns the values of SamplingParams in a model's generation_config.json, except for those out of range."""
    config = read_json(folder / "generation_config.json")
    if not config.get("do_sample", True):
        return {}
    found = dict[str, float]()
    for theirs, ours in _SAMPLING_KEYS.items():
        with suppress(InvalidRequest):
            if config.get(theirs) is not None:
                SamplingParams(**{ours: config[theirs]})
                found[ours] = config[theirs]
    return found


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text for the reader, its tokens, and whether a stop string ended the text here."""

    text: str
    tokens: tuple[int, ...]
    stopped: bool = False


class TextStream:
    """The text of one request. It completes a character that `prompt` leaves unfinished; `ends` have no text."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stop: Sequence[str], ends: frozenset[int]) -> None:
        self._detokenizer = Detokenizer(codec, prompt)
        self._stops = StopFinder(stop)
        self._ends = ends
        self._skipped = 0

    def resume(self, tokens: Sequence[int], characters: int) -> TextDelta:
        """Feeds the tokens that the reader has received before, and returns what `feed` returned then.

        If the reader has more `characters` than these tokens complete, the text had ended; they are not returned again.
        """
        delta = self.feed(tokens)
        self._skipped = max(characters - len(delta.text), 0)
        return delta

    def feed(self, tokens: Sequence[int]) -> TextDelta:
        """Returns the text that `tokens` complete. Tokens after the one that completes a stop string are dropped."""
        shown = ""
        for count, token in enumerate(tokens, start=1):
            if token not in self._ends:
                shown += self._stops.feed(self._detokenizer.feed(token))
            if self._stops.found:
                return TextDelta(self._drop_received(shown), tuple(tokens[:count]), stopped=True)
        return TextDelta(self._drop_received(shown), tuple(tokens))

    def finish(self) -> TextDelta:
        """Returns the text held back, after the last token."""
        shown = self._stops.feed(self._detokenizer.finish())
        return TextDelta(self._drop_received(shown + self._stops.finish()), (), self._stops.found)

    def _drop_received(self, text: str) -> str:
        """Returns the part that the reader has not received."""
        new = text[self._skipped :]
        self._skipped -= len(text) - len(new)
        return new


class Detokenizer:
    """Converts tokens to text, holding back a character until all its bytes have come.

    Bytes that can't become a character are U+FFFD once that is certain; so text once returned never changes.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int]) -> None:
        self._spelling = codec.spelling
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-MAX_CHARACTER_BYTES:]:
            self.feed(token)  # the prompt may end inside a character, which is then the output's

    def feed(self, token: int) -> str:
        """Returns the text that `token` completes, which may be empty."""
        return self._characters.decode(self._spelling.of(token))

    def finish(self) -> str:
        """Returns the bytes of an incomplete character as U+FFFD."""
        return self._characters.decode(b"", final=True)


class StopFinder:
    """Passes text on, except what may begin a stop string; `found` is True when one is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Returns the text that may be shown; nothing from the first stop string on."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._pending += text
        starts = [start for stop in self._stops if (start := self._pending.find(stop)) >= 0]
        self.found = bool(starts)
        end = min(starts) if starts else len(self._pending) - partial_match_length(self._pending, self._stops)
        shown, self._pending = self._pending[:end], self._pending[end:]
        return shown

    def finish(self) -> str:
        """Returns the text held back for a stop string that never came."""
        return "" if self.found else self._pending


def partial_match_length(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest suffix of `text` that begins a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
