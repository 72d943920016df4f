"""Lists model pairs that fit, with sizes; given two models, checks whether they fit."""

from __future__ import annotations

import argparse

from outrider.orchestrator.pairing.model_files import DEFAULT_MODEL, ModelFiles, find_model, has_tiny_pair, tiny_pair
from outrider.orchestrator.pairing.pulled import PULLED_MODELS, PulledModel
from outrider.orchestrator.pairing.tokenizer import load_codec, ordinary_tokens, require_same_vocabulary
from outrider.protocol.errors import InvalidRequest

KNOWN_PAIRS = (
    ("Llama-3.3-70B-Instruct-4bit", 70.6, "Llama-3.2-1B-Instruct-4bit", 1.24, "families of the SSD paper"),
    ("Meta-Llama-3.1-8B-Instruct-4bit", 8.03, "Llama-3.2-1B-Instruct-4bit", 1.24, "large draft model"),
    ("Qwen3-32B-4bit", 32.8, "Qwen3-0.6B-4bit", 0.6, "families of the SSD paper"),
    ("Qwen3-14B-4bit", 14.8, "Qwen3-0.6B-4bit", 0.6, ""),
    ("Qwen3-8B-4bit", 8.2, "Qwen3-0.6B-4bit", 0.6, ""),
    ("Qwen2.5-32B-Instruct-4bit", 32.8, "Qwen2.5-0.5B-Instruct-4bit", 0.49, ""),
    ("Qwen2.5-Coder-32B-Instruct-4bit", 32.8, "Qwen2.5-Coder-0.5B-Instruct-4bit", 0.49, "code"),
    ("Qwen2.5-Coder-7B-Instruct-4bit", 7.6, "Qwen2.5-Coder-0.5B-Instruct-4bit", 0.49, "code"),
    ("gemma-3-27b-it-4bit", 27.4, "gemma-3-1b-it-4bit", 1.0, "text only"),
    ("Mistral-Large-Instruct-2407-4bit", 123.0, "Mistral-7B-Instruct-v0.3-4bit", 7.25, "needs 80 GB"),
)
"""Target and draft of mlx-community, each with its billions of parameters, and a note. The draft model is of the
target's family, has its tokenizer and is much smaller."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", metavar="TARGET", help="target, as for --model; no weights are loaded")
    parser.add_argument("draft", nargs="?", metavar="DRAFT", help="draft model, as for --draft-model")


def run(options: argparse.Namespace) -> int:
    if options.target is None:
        print(_format_pairs())
        return 0
    if options.draft is None:
        raise InvalidRequest("the draft model is missing; expected a target and a draft model, or neither for a list")
    target, draft = find_model(options.target, weights=False), find_model(options.draft, weights=False)
    codecs = load_codec(target), load_codec(draft)
    for line in _describe_pair(target, draft):
        print(line)
    require_same_vocabulary(*codecs)
    print(f"fits: both have the same {len(ordinary_tokens(codecs[0]))} tokens, besides names in brackets")
    return 0


def _describe_pair(target: ModelFiles, draft: ModelFiles) -> list[str]:
    lines = [
        f"{role}: {model.name} ({model.model_type}, vocabulary {model.vocab_size}, context {model.context_length})"
        for role, model in (("target", target), ("draft", draft))
    ]
    if draft.context_length < target.context_length:
        lines.append(f"the draft stops drafting at {draft.context_length} tokens, where its context ends")
    return lines


def _format_pulled(model: PulledModel) -> str:
    notes = [
        *(["default"] if model.name == DEFAULT_MODEL else []),
        *([] if model.chat else ["base model"]),
        *(["terms"] if model.terms else []),
        *(["pulled"] if model.is_on_disk else []),
    ]
    return f"  {model.name:13}{model.title:23}{model.size / 1e6:3.0f} MB  {model.licence:12}{', '.join(notes)}".rstrip()


def _format_pairs() -> str:
    """Returns two lines for each pair, to fit long ids into 80 columns."""
    lines = [f"{'TARGET':52}SIZES", f"  + {'DRAFT':48}NOTE"]
    for target, target_b, draft, draft_b, note in KNOWN_PAIRS:
        sizes = f"{target_b:g}B / {draft_b:g}B ({target_b / draft_b:.0f}x)"
        lines += [f"{f'mlx-community/{target}':52}{sizes}", f"  + {f'mlx-community/{draft}':48}{note}".rstrip()]
    lines += [
        "According to their publishers, each of these pairs shares a tokenizer;",
        "`outrider pairs TARGET DRAFT` compares the vocabularies of any two models.",
    ]
    lines += ["", "downloads by name (outrider pull NAME, --model NAME):", *map(_format_pulled, PULLED_MODELS.values())]
    if has_tiny_pair():
        target, draft = tiny_pair()
        lines += ["", "for tests, in a clone (--model tiny):", f"  {target}", f"  + {draft}"]
    return "\n".join(lines)
