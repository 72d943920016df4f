"""`python models/train.py --out DIR`: trains a model pair like the tiny one, from text to Hugging Face folders.

The command reads this Python's standard library, learns a tokenizer, trains the target, distils the draft from it and
writes DIR/target, DIR/draft and DIR/training.json. With `--head KIND --target MODEL` it trains a head for that model
instead, and with `--draft --target MODEL` a draft model or, with `--ngrams`, a table of n-grams, all from text that the
model writes itself. After an interruption the same command continues. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by its path: the checkout is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.training.heads.recipe import KINDS, HeadRecipe
from models.training.recipe import PRESETS, Recipe, preset
from outrider.protocol.errors import InvalidRequest, OutriderError

_OF_PAIRS = ("preset", "target_tokens", "draft_tokens")
_OF_BOTH = ("target", "store", "text_tokens", "vocab", "rate")
_OF_HEADS = ("tokens", "length", "hidden", "steps", "visible_prefix")
_OF_DRAFTS = ("layers", "mlp", "minutes", "coupled", "begin_as", "text_only", "export", "ngrams")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        _check(options)
        _make(options)
    except OutriderError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped; the same command continues from the last checkpoint", 130)
    made = "table of n-grams" if options.ngrams else _kind_of(options)
    sys.stderr.write(f"the {made} is in {options.out}\n" if not options.text_only else "the text is complete\n")
    return 0


def _kind_of(options: argparse.Namespace) -> str:
    return "draft" if options.draft else "pair" if options.head is None else "head"


def _check(options: argparse.Namespace) -> None:
    """Raises InvalidRequest for flags that do not apply to the kind of training."""
    if options.draft and options.head is not None:
        raise InvalidRequest("--draft trains a draft model and --head a head; expected one of them")
    made = _kind_of(options)
    kinds = {"pair": _OF_PAIRS, "head": (*_OF_BOTH, *_OF_HEADS), "draft": (*_OF_BOTH, *_OF_DRAFTS)}
    for name in sorted({name for of in kinds.values() for name in of} - set(kinds[made])):
        if getattr(options, name) not in (None, False):
            wanted = " or ".join(f"a {kind}" for kind, names in kinds.items() if name in names)
            raise InvalidRequest(f"--{name.replace('_', '-')} is for {wanted}, but this trains a {made}; omit it")
    if made != "pair" and options.target is None:
        raise InvalidRequest(f"a {made} is trained for a target; expected --target with its folder")
    if options.draft and options.store is None:
        raise InvalidRequest("a draft needs a folder for the target's text; expected --store FOLDER")


def _make(options: argparse.Namespace) -> None:
    out, extra = options.out.resolve(), [folder.resolve() for folder in options.extra_dir]
    try:
        if options.draft:
            _make_draft(options, out)
            return
        made = _pair_recipe(options) if options.head is None else _head_recipe(options)
        if isinstance(made, Recipe):
            from models.training import pipeline

            pipeline.run(made, out, extra)
        else:
            from models.training.heads import pipeline as heads

            heads.run(made, options.target, out, options.store, extra)
    except ModuleNotFoundError as error:
        raise OutriderError(
            f"training needs {error.name}, which is not installed; run: pip install -e '.[train]'"
        ) from error


def _make_draft(options: argparse.Namespace, out: Path) -> None:
    from models.training.draft import ngrams
    from models.training.draft import pipeline as drafts
    from outrider.orchestrator.pairing.model_files import find_model

    target = find_model(str(options.target)).folder
    if options.export:
        drafts.export(out, target)
        return
    if options.ngrams:
        ngrams.write_table(out, options.store.resolve())
        return
    names = ("layers", "vocab", "mlp", "text_tokens", "minutes", "rate", "batch_tokens", "coupled", "begin_as")
    asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    recipe = drafts.DraftRecipe(seed=options.seed, **asked)
    drafts.run(recipe, target, out, options.store.resolve(), text_only=options.text_only)


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers; expected numbers like 0,1,-1") from None


def _pair_recipe(options: argparse.Namespace) -> Recipe:
    return preset(
        options.preset or "tiny",
        seed=options.seed,
        target_tokens=options.target_tokens,
        draft_tokens=options.draft_tokens,
        batch_tokens=options.batch_tokens,
    )


def _head_recipe(options: argparse.Namespace) -> HeadRecipe:
    asked = {
        "hidden": options.hidden,
        "vocab": options.vocab,
        "steps": options.steps,
        "text_tokens": options.text_tokens,
        "tokens": options.tokens,
        "length": options.length,
        "rate": options.rate,
        "visible_prefix": options.visible_prefix,
        "batch_tokens": options.batch_tokens,
    }
    return HeadRecipe(options.head, options.seed, **{name: value for name, value in asked.items() if value is not None})


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"train: {sentence}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train", description="Train a pair from Python source, or a head or a draft for a target."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to create; it must not exist or be empty")
    parser.add_argument("--preset", help=f"{' or '.join(PRESETS)} (default: tiny)")
    parser.add_argument("--target-tokens", type=int, help="tokens to train the target on (tiny: 7,650,000)")
    parser.add_argument("--draft-tokens", type=int, help="tokens to train the draft on (tiny: 5,000,000)")
    parser.add_argument("--batch-tokens", type=int, help="tokens per step (tiny: 4,096; a head: 2,048)")
    parser.add_argument(
        "--extra-dir",
        type=Path,
        action="append",
        default=[],
        help="folder with more permissively licensed Python to train on; repeatable",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and order (default: 0)")
    head = parser.add_argument_group("a head")
    head.add_argument("--head", help=f"train a head for a target instead of a pair: {' or '.join(KINDS)}")
    head.add_argument(
        "--target",
        type=Path,
        help="folder of the Llama-like target; for a draft also a GGUF file or smollm2",
    )
    head.add_argument("--store", type=Path, help="keep the target's text here, also for its other heads")
    head.add_argument("--text-tokens", type=int, help="tokens that the target writes (2,000,000)")
    head.add_argument("--tokens", type=int, help="tokens to train the head on (4,000,000)")
    head.add_argument("--length", type=int, help="tokens per window (512)")
    head.add_argument("--hidden", type=int, help="width of the head (the target's)")
    head.add_argument("--vocab", type=int, help="number of tokens it can draft, the most frequent (the target's)")
    head.add_argument("--steps", type=int, help="length of the chains that it learns to draft (4)")
    head.add_argument(
        "--visible-prefix",
        action="store_true",
        default=None,
        help="train a dflash head with known first tokens in its blocks, as it is used in the draft worker",
    )
    head.add_argument("--rate", type=float, help="peak learning rate (a head 0.0015, a draft 0.0005)")
    draft = parser.add_argument_group("a draft model (with --target, --store, --vocab, --text-tokens and --rate, too)")
    draft.add_argument("--draft", action="store_true", help="train a draft model, initialised with target layers")
    draft.add_argument("--layers", type=_layer_list, help="target layers to begin with, from 0; -1: the last (0,1)")
    draft.add_argument("--mlp", type=int, help="width of its MLPs, the strongest columns (the target's)")
    draft.add_argument("--minutes", type=float, help="minutes for text and training (until it is stopped)")
    draft.add_argument("--coupled", type=float, help="weight of equal choices relative to the KL divergence (1)")
    draft.add_argument(
        "--begin-as", type=Path, help="finished draft, or unfinished run (OUT.partial), with no more layers"
    )
    draft.add_argument("--text-only", action="store_true", help="only write text; another run may train meanwhile")
    draft.add_argument("--export", action="store_true", help="write the best draft so far; the run may continue")
    draft.add_argument(
        "--ngrams",
        action="store_true",
        help="write the n-grams of --store (or of the stores in it) to the file --out",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
