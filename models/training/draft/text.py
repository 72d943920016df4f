"""Generates the text of a store: the target's answers to prompts in its chat template."""

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
from models.training.draft.batch_generator import BatchGenerator, TokensPrompt
from models.training.draft.prompts import KINDS, PLAIN, Prompt, Prompts, Snippets, gather_snippets
from models.training.draft.store import Sample, Store
from models.training.llama import Llama
from outrider.orchestrator.pairing.chat_template import render_template
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.protocol.digest import replace_file
from outrider.protocol.errors import InvalidRequest, ModelError

log = logging.getLogger(__name__)

MAX_TOKENS = 1024  # of a prompt and its answer
TOP = 32
_MAX_PROMPT_SHARE = 5 / 8  # of MAX_TOKENS
_MAX_PLAIN_TOKENS = 512
_ANSWER_LIMITS = (96, 256)  # range of the random limit of an answer, so that slots do not become free all at once
_TEMPS = (0.0, 0.8)
_END_OF_MESSAGE = "\x1e"  # marks the end of an open message in the rendered template


class ChatTokenizer:
    """The tokenizer and chat template of the model in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._codec = load_codec(find_model(str(folder)), template=True)
        self.eos = self._codec.eos
        if self._codec.template is None or not self.eos:
            raise ModelError(f"{folder} has no chat template, or no end token; use a chat model")

    def token_counts(self, texts: Iterable[str], vocab: int) -> Tensor:
        """Returns how often each token occurs in these texts [vocab]."""
        encodings = self._codec.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = np.array([token for encoding in encodings for token in encoding.ids], np.int64)
        return torch.from_numpy(np.bincount(ids, minlength=vocab)).double()

    def tokenize(self, prompt: Prompt) -> TokensPrompt:
        """Returns the prompt in tokens. The limit of its answer depends on its number."""
        codec = self._codec
        if prompt.kind == PLAIN:
            tokens = list(codec.encode(prompt.text)[:_MAX_PLAIN_TOKENS])
            return TokensPrompt(prompt.number, prompt.kind, (), tokens, 0)
        messages = [{"role": "user", "content": prompt.text + _END_OF_MESSAGE * prompt.is_open}]
        text = render_template(str(self._codec.template), messages, codec.special)
        limit = int(np.random.default_rng(prompt.number).integers(*_ANSWER_LIMITS))
        tokens, *suffix = (codec.encode(part, special=False) for part in text.split(_END_OF_MESSAGE))
        temps = (_TEMPS[prompt.number // (2 * len(KINDS)) % len(_TEMPS)],) if prompt.is_open else _TEMPS
        return TokensPrompt(prompt.number, prompt.kind, temps, list(tokens), limit, *suffix)


def load_snippets(store: Path) -> Snippets:
    """Returns the material of the prompts: snippets of this Python's standard library, without its tests, and of
    installed packages. They are kept in the `store`, so that its prompts stay the same on another machine."""
    path = store / "pieces.json"
    if not path.exists():
        library = corpus.python_files(corpus.standard_library())
        snippets = gather_snippets([source for source in library if "test" not in source.name])
        replace_file(path, json.dumps(asdict(snippets)))
        return snippets
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Snippets(**{name: tuple(texts) for name, texts in content.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path} is damaged ({error}); choose another --store") from error


def generate(
    store: Store,
    model: Llama,
    tokenizer: ChatTokenizer,
    prompts: Prompts,
    *,
    slots: int,
    shard: int,
    is_enough: Callable[[int], bool],
) -> None:
    """Answers the prompts after those in the store, and adds the answers in shards of `shard` samples.

    `is_enough(number)` returns whether prompt `number` is no longer needed.
    """
    number = store.next_number
    length = min(MAX_TOKENS, model.shape.context)
    generator = BatchGenerator(model, slots=slots, length=length, eos=tokenizer.eos, top=TOP, seed=number)

    def next_prompt() -> TokensPrompt | None:
        nonlocal number
        while not is_enough(number):
            prompt = tokenizer.tokenize(prompts.get(number))
            number += 1
            if len(prompt.tokens) <= _MAX_PROMPT_SHARE * length:
                return prompt
        return None

    samples: list[Sample] = []
    started, tokens_before = time.monotonic(), store.token_count
    for sample in generator.samples(next_prompt):
        samples.append(sample)
        if len(samples) >= shard:
            store.add(samples)
            samples = []
            rate = (store.token_count - tokens_before) / (time.monotonic() - started)
            log.info("text: %d answers, %d tokens, %.0f tokens/s", len(store.samples), store.token_count, rate)
    if samples:
        store.add(samples)
