"""Lists model pairs that fit, with sizes; with two models named, checks whether those two fit."""

from __future__ import annotations

import argparse

from outrider.orchestrator.pair.known_pairs import BILLION, KNOWN_PAIRS
from outrider.orchestrator.pair.model_files import DEFAULT, ModelFiles, embedded_pair, find_model
from outrider.orchestrator.pair.pulled import PULLED, PulledModel
from outrider.orchestrator.pair.tokenizer import load_codec
from outrider.orchestrator.pair.vocabulary import compare
from outrider.protocol.errors import InvalidRequest, ModelError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", help="a Hugging Face id or folder; its weights are not downloaded")
    parser.add_argument("draft", nargs="?", help="the same for the draft")


def run(options: argparse.Namespace) -> int:
    if options.target is None:
        print(_listing())
        return 0
    if options.draft is None:
        raise InvalidRequest("expected two models, a target and a draft, or none to list the known pairs")
    target, draft = find_model(options.target, weights=False), find_model(options.draft, weights=False)
    found = compare(load_codec(target), load_codec(draft))
    for line in _facts(target, draft):
        print(line)
    if found.difference:
        raise ModelError(f"{options.draft} can't draft for {options.target}: {found.difference}")
    print(f"fits: the same {found.shared} tokens mean the same in both")
    return 0


def _facts(target: ModelFiles, draft: ModelFiles) -> list[str]:
    lines = [
        f"{role}: {model.name} ({model.model_type}, vocabulary {model.vocab_size}, context {model.context_length})"
        for role, model in (("target", target), ("draft", draft))
    ]
    if draft.context_length is not None and draft.context_length < (target.context_length or 0):
        lines.append(f"the draft stops drafting at {draft.context_length} tokens, where its context ends")
    return lines


def _to_pull(model: PulledModel) -> str:
    notes = [
        *(["default"] if model.name == DEFAULT else []),
        *([] if model.chat else ["base model"]),
        *(["terms"] if model.terms else []),
        *(["pulled"] if model.is_here else []),
    ]
    return f"  {model.name:13}{model.title:23}{model.size / 1e6:3.0f} MB  {model.licence:12}{', '.join(notes)}".rstrip()


def _listing() -> str:
    """Two lines a pair, for ids are long and a terminal has 80 columns."""
    lines = [f"{'TARGET':52}SIZES", f"  + {'DRAFT':48}NOTE"]
    for pair in KNOWN_PAIRS:
        sizes = f"{pair.target_parameters / BILLION:g}B / {pair.draft_parameters / BILLION:g}B ({pair.ratio:.0f}x)"
        lines += [f"{pair.target:52}{sizes}", f"  + {pair.draft:48}{pair.note}".rstrip()]
    target, draft = embedded_pair()
    lines += ["", "to pull (outrider pull NAME, --model NAME):", *map(_to_pull, PULLED.values())]
    return "\n".join([
        *lines,
        "",
        "embedded, a tiny pair for tests (--model tiny):",
        f"  {target}",
        f"  + {draft}",
        "According to their publishers, each pair shares a tokenizer;",
        "`outrider pairs TARGET DRAFT` compares the vocabularies of any two models.",
    ])  # fmt: skip
