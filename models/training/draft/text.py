"""Lets the target answer prompts through its chat template, and stores the answers until there are enough."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.training import corpus
from models.training.draft.prompts import KINDS, PLAIN, Pieces, Prompt, Prompts, gather
from models.training.draft.store import Answer, Store, StoreForm
from models.training.draft.writer import Question, Writer
from models.training.llama import Llama
from outrider.orchestrator.pairing.chat_template import render_template
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.protocol.digest import replace_file
from outrider.protocol.errors import InvalidRequest, ModelError

log = logging.getLogger(__name__)

Enough = Callable[[int], bool]
"""Returns whether the prompt with this number is no longer needed."""

LENGTH = 1024  # most tokens of a prompt and its answer
_LONGEST_PROMPT = 5 / 8  # of LENGTH
_LIMITS = (96, 256)  # range of an answer's random length limit, so that slots do not become free all at once
TOP = 32
TEMPS = (0.0, 0.8)
_END_OF_MESSAGE = "\x1e"  # stands in the template for the end of a message that is still open


class Chat:
    """A model's tokenizer and chat template, from its folder."""

    def __init__(self, folder: Path) -> None:
        self._codec = load_codec(find_model(str(folder)), template=True)
        self.end = self._codec.eos
        if self._codec.template is None or not self.end:
            raise ModelError(f"{folder} has no chat template, or no end token; use a chat model")

    def counts(self, texts: Iterable[str], vocab: int) -> Tensor:
        """Returns how often each token occurs in these texts [vocab]."""
        found = torch.zeros(vocab, dtype=torch.float64)
        for encoding in self._codec.tokenizer.encode_batch(list(texts), add_special_tokens=False):
            found.index_add_(0, torch.tensor(encoding.ids), torch.ones(len(encoding.ids), dtype=torch.float64))
        return found

    def question(self, prompt: Prompt) -> Question:
        """Returns the prompt in tokens. The limit of its answer depends on its number."""
        codec = self._codec
        if prompt.kind == PLAIN:
            return Question(prompt.number, prompt.kind, (), list(codec.encode(prompt.text)[:512]), 0)
        messages = [{"role": "user", "content": prompt.text + _END_OF_MESSAGE * prompt.is_open}]
        text = render_template(str(self._codec.template), messages, codec.special)
        limit = int(np.random.default_rng(prompt.number).integers(*_LIMITS))
        ids, *rest = (codec.encode(of, special=False) for of in text.split(_END_OF_MESSAGE))
        temps = (TEMPS[prompt.number // (2 * len(KINDS)) % len(TEMPS)],) if prompt.is_open else TEMPS
        return Question(prompt.number, prompt.kind, temps, list(ids), limit, *rest)


def pieces(store: Path) -> Pieces:
    """Returns pieces of this Python's standard library (without its tests) and packages; they are kept in the `store`'s
    folder, so that its prompts stay the same on another machine."""
    path = store / "pieces.json"
    if not path.exists():
        library = corpus.python_files(corpus.standard_library())
        found = gather([source for source in library if "test" not in source.name])
        replace_file(path, json.dumps(asdict(found)))
        return found
    try:
        return Pieces(**{name: tuple(of) for name, of in json.loads(path.read_text(encoding="utf-8")).items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path} is damaged ({error}); choose another --store") from error


def form(target: str, cut: Pieces, seed: int) -> StoreForm:
    return StoreForm(target, cut.digest(), seed, TOP)


def write(store: Store, model: Llama, chat: Chat, prompts: Prompts, *, slots: int, shard: int, enough: Enough) -> None:
    """Answers the prompts after those in the store until there are `enough`, in shards of `shard` answers."""
    following = store.following
    length = min(LENGTH, model.shape.context)
    writer = Writer(model, slots=slots, length=length, end=chat.end, top=TOP, seed=following)

    def question() -> Question | None:
        nonlocal following
        while not enough(following):
            asked = chat.question(prompts.get(following))
            following += 1
            if len(asked.tokens) <= _LONGEST_PROMPT * length:
                return asked
        return None

    kept: list[Answer] = []
    started, before = time.monotonic(), store.token_count
    for answer in writer.answers(question):
        kept.append(answer)
        if len(kept) >= shard:
            store.add(kept)
            kept = []
            rate = (store.token_count - before) / (time.monotonic() - started)
            log.info("text: %d answers, %d tokens, %.0f tokens/s", len(store.answers), store.token_count, rate)
    if kept:
        store.add(kept)
