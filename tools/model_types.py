"""Tests what each of mlx-lm's model types can do: loads tiny random models of each type, and generates with them.

    python -m tools.model_types                        # the table: ten minutes on two cores
    python -m tools.model_types --write docs/models.md # the same, into that page
    python -m tools.model_types --serve llama4 ...     # these types as target and draft of a real cluster

The abilities that a type reports are checked: texts by plain decoding and by right and wrong chains are compared with
mlx-lm's own loop, past its window, and its token tree with its logits. Each type is tried with tied and with untied
embeddings, in a process that may crash.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step

from outrider.engine.kv_cache import SeparateKVCache
from outrider.engine.load_checks import (
    find_tree_form,
    open_kv_cache,
    probe_abilities,
    tree_logits_match,
)
from outrider.engine.loading import LoadedModel, load
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.sampling import SamplingParams
from tests.harness.model_configs import WINDOW, config_of, model_types
from tests.harness.tiny_models import write_model, write_tokenizer
from tests.slots import open_slots, verify

SPECULATES, COPIES, DECODES, REFUSED = "speculates", "speculates, by copies", "decodes only", "refused"
NOT_BUILT, WRONG, FAILED = "not tried", "WRONG TEXT", "FAILED"
TREE_FORMS = {"JointKVRows": "tree", "DenseKVRows": "tree", "RecurrentKVRows": "rows"}
_PROMPT_TOKENS, _NEW_TOKENS, _CHAIN_TOKENS = 2 * WINDOW, 3 * WINDOW, 5
_TABLE_MARKER = "<!-- python -m tools.model_types --write docs/models.md -->"


@dataclass(frozen=True, slots=True)
class ModelTypeRow:
    """A type's abilities as `target` and as `draft`, and `why` they are limited. `tied`: its embeddings; None: both."""

    name: str
    tied: bool | None
    target: str
    draft: str = "-"
    why: str = ""

    @property
    def line(self) -> str:
        embeddings = {True: "tied", False: "untied", None: "either"}[self.tied]
        return f"| `{self.name}` | {embeddings} | {self.target} | {self.draft} | {self.why} |"


def try_model_type(name: str, tied: bool) -> ModelTypeRow:
    """Tries one type in this process. Returns a row for every error, too."""
    try:
        with wrap_model_errors("the trial"):
            return _try_model_type(name, tied)
    except OutriderError as error:
        return ModelTypeRow(name, tied, FAILED, why=_shorten_error(error))


def _try_model_type(name: str, tied: bool) -> ModelTypeRow:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with wrap_model_errors("building"):
                path = write_model(Path(folder), config_of(name, tied))
        except SystemExit:
            return ModelTypeRow(name, tied, NOT_BUILT, why="mlx-lm needs a library that is not installed")
        except OutriderError as error:
            return ModelTypeRow(name, tied, NOT_BUILT, why=_shorten_error(error))
        try:
            model = load(path, progress=lambda _: None)
            able = probe_abilities(model)
        except OutriderError as error:
            return ModelTypeRow(name, tied, REFUSED, why=_shorten_error(error))
        how = SPECULATES if SeparateKVCache(model.model).open().has_free_marks else COPIES
        target, why = how if able.chains else DECODES, [_text_in_brackets(able.why)]
        if not _matches_mlx_lm(model, able.chains):
            target = WRONG
        try:
            form = find_tree_form(model)
            draft = TREE_FORMS[form.__name__]
            with wrap_model_errors("a tree past the window"):
                if not tree_logits_match(model, form, _PROMPT_TOKENS):
                    draft = f"{draft}, inexact past a window"
        except OutriderError as error:
            draft, why = "no", [*why, "draft: " + _text_in_brackets(str(error))]
        return ModelTypeRow(name, tied, target, draft, "; ".join(filter(None, why)))


def _matches_mlx_lm(model: LoadedModel, chains: bool) -> bool:
    """Whether greedy texts, token by token and by partly accepted chains, equal mlx-lm's."""
    prompt = [(31 * i + 7) % 250 + 2 for i in range(_PROMPT_TOKENS)]
    truth = [int(token) for token, _ in generate_step(mx.array(prompt), model.model, max_tokens=_NEW_TOKENS)]
    params = SamplingParams(max_tokens=_NEW_TOKENS)
    kv_cache = open_kv_cache(model)
    slot = open_slots(model, [prompt], [params], kv_cache=kv_cache)[0]
    texts = [[verify(slot).bonus for _ in range(_NEW_TOKENS)]]
    if chains:
        slot, rng = open_slots(model, [prompt], [params], kv_cache=kv_cache)[0], random.Random(model.model_type)
        while len(slot.tokens) - _PROMPT_TOKENS < _NEW_TOKENS - _CHAIN_TOKENS:
            done, right = len(slot.tokens) - _PROMPT_TOKENS, rng.randint(0, _CHAIN_TOKENS)
            next_tokens = truth[done : done + _CHAIN_TOKENS]
            verify(slot, [token if i < right else (token + 1) % 258 for i, token in enumerate(next_tokens)])
        texts.append(slot.tokens[_PROMPT_TOKENS:])
    return all(text == truth[: len(text)] for text in texts)


def try_model_types(names: Sequence[str]) -> Iterator[ModelTypeRow]:
    """Yields rows of all these types, tied and untied, from a process that is replaced if a type ends it."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, initializer=_silence_logs)
    for name, tied in product(names, (True, False)):
        try:
            yield pool.submit(try_model_type, name, tied).result()
        except BrokenProcessPool:
            yield ModelTypeRow(name, tied, REFUSED, why="its code ends the process")
            pool = ProcessPoolExecutor(1, context, initializer=_silence_logs)
    pool.shutdown()


def merge_rows(rows: Sequence[ModelTypeRow]) -> list[ModelTypeRow]:
    """Merges the two rows of each type that is the same tied and untied."""
    either = [replace(row, tied=None) for row in rows]
    return [
        plain if either.count(plain) > 1 else row
        for i, (row, plain) in enumerate(zip(rows, either, strict=True))
        if plain not in either[:i]
    ]


def _silence_logs() -> None:
    logging.disable(logging.ERROR)
    mx.disable_compile()  # compiling each type's kernels would take most of the time


def _shorten_error(error: OutriderError) -> str:
    """Shortens an error for a cell of the table: without paths and advice."""
    text = str(error).partition(" can't be loaded as ")
    return (text[2].partition(": ")[2] or text[0]).partition("; ")[0].replace("|", "/").strip(": ")[:160]


def _text_in_brackets(sentence: str) -> str:
    """Returns the text in brackets in a sentence."""
    return sentence.partition("(")[2].rpartition(")")[0].replace("|", "/")[:160]


def render_page(head: str, rows: Sequence[ModelTypeRow]) -> str:
    """Returns the page: the text of `head` up to the table, and a new table."""
    counts = Counter(row.target for row in rows)
    drafts = Counter(row.draft for row in rows)
    types, tried = len({row.name for row in rows}), len(rows) - counts[NOT_BUILT]
    built = f"{types} types, each with tied and untied embeddings; of these {len(rows)} models {tried} could be built"
    return f"""{head.partition(_TABLE_MARKER)[0]}{_TABLE_MARKER}

mlx-lm {version("mlx-lm")}, MLX {version("mlx")} on a CPU: {built}.
As targets {counts[SPECULATES] + counts[COPIES]} speculate ({counts[COPIES]} of them by copies), \
{counts[DECODES]} decode only, {counts[REFUSED]} are refused; {counts[WRONG]} generate another text than mlx-lm, \
{counts[FAILED]} fail.
As drafts {drafts["tree"]} grow a tree in one row, {drafts["rows"]} in rows, {drafts["no"]} are refused.

| type | embeddings | target | draft | why |
|---|---|---|---|---|
""" + "".join(f"{row.line}\n" for row in merge_rows(rows))


def try_in_cluster(name: str) -> str:
    """Runs a cluster with this type as target and draft. Returns a sentence with its answers, or its refusal."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), config_of(name))
        write_tokenizer(path)
        try:
            with LocalCluster(model=str(path), draft_model=str(path), memory=False) as cluster:
                client, texts = cluster.client(), {}
                for mode in ("ar", "sd", "ssd", "auto"):
                    sampling = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
                    texts[mode] = client.generate("the quick brown fox jumps", sampling=sampling, mode=mode)
                same = len({result.token_ids for result in texts.values()}) == 1
                ran = ", ".join(f"{mode} as {result.mode}" for mode, result in texts.items())
                notes = sorted({*cluster.notes, *texts["ssd"].notes})
                return f"{name}: {'one text' if same else 'DIFFERENT TEXTS'}; {ran}. {' '.join(notes)}"
        except OutriderError as error:
            return f"{name}: refused, {error}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table into this page")
    parser.add_argument("--serve", action="store_true", help="run each type in a cluster instead")


def run(options: argparse.Namespace) -> int:
    names = options.types or model_types()
    if options.serve:
        for name in names:
            print(try_in_cluster(name), flush=True)
        return 0
    rows = []
    for row in try_model_types(names):
        rows.append(row)
        print(row.line, flush=True)
    if options.write:
        options.write.write_text(render_page(options.write.read_text(), rows))
    return int(any(row.target in (WRONG, FAILED) for row in rows))


if __name__ == "__main__":
    raise SystemExit(run_as_program())
