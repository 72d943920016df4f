"""`python models/train.py --out DIR`: trains a model pair like the tiny one, and writes Hugging Face folders.

The command reads this Python's standard library, trains a tokenizer and the target, distils the draft from the target,
and writes DIR/target, DIR/draft and DIR/training.json. For an existing target, `--head KIND` trains a head, `--draft` a
draft model, and `--draft --ngrams` makes a table of n-grams, all from text that the target generates. After an
interruption, the same command continues. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: the checkout is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.training.heads.recipe import KINDS, HeadRecipe
from models.training.recipe import PRESETS, preset
from outrider.orchestrator import cli
from outrider.protocol.errors import InvalidRequest, OutriderError

_TARGET_FLAGS = ("target", "store", "text_tokens", "vocab", "rate")
_FLAGS = {
    "pair": ("preset", "target_tokens", "draft_tokens", "extra_dir"),
    "head": (*_TARGET_FLAGS, "tokens", "length", "hidden", "steps", "visible_prefix", "extra_dir"),
    "draft": (*_TARGET_FLAGS, "layers", "mlp", "minutes", "coupled", "begin_as", "text_only", "export", "ngrams"),
}
"""The flags that apply to some kinds of training only, by kind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit code."""
    return cli.run("train", lambda: sys.modules[__name__], sys.argv[1:] if arguments is None else arguments)


def run(options: argparse.Namespace) -> int:
    """Trains what the flags say."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    kind = "draft" if options.draft else "pair" if options.head is None else "head"
    _check(options, kind)
    try:
        {"pair": _train_pair, "head": _train_head, "draft": _train_draft}[kind](options, options.out.resolve())
    except ModuleNotFoundError as error:
        raise OutriderError(
            f"training needs {error.name}, which is not installed; run: pip install -e '.[train]'"
        ) from error
    except OSError as error:
        raise OutriderError(f"{error}; when that is mended, the same command continues") from error
    except KeyboardInterrupt:
        sys.stderr.write("train: stopped; the same command continues from the last checkpoint\n")
        return cli.INTERRUPTED_EXIT_CODE
    result = "table of n-grams" if options.ngrams else kind
    sys.stderr.write("the text is complete\n" if options.text_only else f"the {result} is in {options.out}\n")
    return 0


def _check(options: argparse.Namespace, kind: str) -> None:
    """Raises InvalidRequest for flags that do not apply to this kind of training, or are missing."""
    if options.draft and options.head is not None:
        raise InvalidRequest("--draft trains a draft model and --head a head; expected one of them")
    for name in sorted({name for names in _FLAGS.values() for name in names} - set(_FLAGS[kind])):
        if getattr(options, name) not in (None, False):
            others = " or ".join(f"a {other}" for other, names in _FLAGS.items() if name in names)
            raise InvalidRequest(f"--{name.replace('_', '-')} is for {others}, but this trains a {kind}; omit it")
    if kind != "pair" and options.target is None:
        raise InvalidRequest(f"a {kind} is trained for a target; expected --target with its folder")
    if options.draft and options.store is None:
        raise InvalidRequest("a draft needs a folder for the target's text; expected --store FOLDER")


def _train_pair(options: argparse.Namespace, out: Path) -> None:
    recipe = preset(
        options.preset or "tiny",
        seed=options.seed,
        target_tokens=options.target_tokens,
        draft_tokens=options.draft_tokens,
        batch_tokens=options.batch_tokens,
    )
    from models.training import pipeline

    pipeline.run(recipe, out, _extra_folders(options))


def _train_head(options: argparse.Namespace, out: Path) -> None:
    names = (
        "hidden", "vocab", "steps", "text_tokens", "tokens", "length", "rate", "visible_prefix", "batch_tokens",
    )  # fmt: skip
    recipe = HeadRecipe(options.head, options.seed, **_given(options, names))
    from models.training.heads import pipeline

    pipeline.run(recipe, options.target, out, options.store, _extra_folders(options))


def _train_draft(options: argparse.Namespace, out: Path) -> None:
    from models.training.draft import ngrams, pipeline
    from outrider.orchestrator.pairing.model_files import find_model

    target = find_model(str(options.target)).folder
    if options.export:
        pipeline.export(out, target)
    elif options.ngrams:
        ngrams.write_table(out, options.store.resolve())
    else:
        names = ("layers", "vocab", "mlp", "text_tokens", "minutes", "rate", "batch_tokens", "coupled", "begin_as")
        recipe = pipeline.DraftRecipe(seed=options.seed, **_given(options, names))
        pipeline.run(recipe, target, out, options.store.resolve(), text_only=options.text_only)


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the flags that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _extra_folders(options: argparse.Namespace) -> list[Path]:
    return [folder.resolve() for folder in options.extra_dir or ()]


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers; expected numbers like 0,1,-1") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to create (with --ngrams: file)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument(
        "--batch-tokens", type=int, help="tokens per step (default: pair 4,096; head 2,048; draft 2,048 or 16,384)"
    )
    parser.add_argument(
        "--extra-dir", type=Path, action="append", help="folder with more Python files to train on; repeatable"
    )
    pair = parser.add_argument_group("a pair")
    pair.add_argument("--preset", help=f"{' or '.join(PRESETS)} (default: tiny)")
    pair.add_argument("--target-tokens", type=int, help="tokens to train the target on (default of tiny: 7,650,000)")
    pair.add_argument("--draft-tokens", type=int, help="tokens to train the draft on (default of tiny: 5,000,000)")
    target = parser.add_argument_group("a head or a draft model")
    target.add_argument(
        "--target", type=Path, help="folder of the target; for a draft also a GGUF file or a name like smollm2"
    )
    target.add_argument("--store", type=Path, help="folder for the target's text, which several runs may share")
    target.add_argument("--text-tokens", type=int, help="tokens to generate (default: head 2,000,000; draft 3,000,000)")
    target.add_argument("--vocab", type=int, help="size of the vocabulary (default: head the target's; draft 12,288)")
    target.add_argument("--rate", type=float, help="peak learning rate (default: head 0.0015; draft 0.0005)")
    head = parser.add_argument_group("a head")
    head.add_argument("--head", help=f"train a head of this kind: {', '.join(KINDS)}")
    head.add_argument("--tokens", type=int, help="tokens to train on (default: 4,000,000)")
    head.add_argument("--length", type=int, help="tokens per window (default: 512)")
    head.add_argument("--hidden", type=int, help="width (default: the target's), or rank of an adapter (default: 128)")
    head.add_argument("--steps", type=int, help="length of the chains that it learns to draft (default: 4)")
    head.add_argument(
        "--visible-prefix",
        action="store_true",
        default=None,
        help="train a dflash head with known first tokens in its blocks, for use in the draft worker",
    )
    draft = parser.add_argument_group("a draft model")
    draft.add_argument("--draft", action="store_true", help="train a draft model that begins as layers of the target")
    draft.add_argument(
        "--layers", type=_layer_list, help="layers of the target, from 0; -1 is the last one (default: 0,1)"
    )
    draft.add_argument("--mlp", type=int, help="width of the MLPs: the strongest columns (default: the target's)")
    draft.add_argument("--minutes", type=float, help="minutes for text and training (default: until it is stopped)")
    draft.add_argument(
        "--coupled",
        type=float,
        help="weight of agreement with the same noise, relative to the cross entropy (default: 1)",
    )
    draft.add_argument(
        "--begin-as", type=Path, help="initialise with this finished draft or unfinished run (OUT.partial)"
    )
    instead = draft.add_mutually_exclusive_group()
    instead.add_argument(
        "--text-only", action="store_true", help="only generate text; another run may train on it meanwhile"
    )
    instead.add_argument(
        "--export", action="store_true", help="write the best draft so far of the run for --out, which may continue"
    )
    instead.add_argument(
        "--ngrams", action="store_true", help="write the n-grams of --store, or of the stores in it, to the file --out"
    )


if __name__ == "__main__":
    sys.exit(main())
