"""`python models/train.py --out DIR`: make a model pair like the embedded one, from text to Hugging Face folders.

One command: reads this Python's standard library, learns a tokenizer, trains the target, distils the draft from it and
writes DIR/target, DIR/draft and DIR/training.json. With `--head KIND --target MODEL` it makes a head that drafts for
that model instead, from text that the model writes itself. Stopped, the same command goes on. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by its path: the rooms lie one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.training.heads.recipe import KINDS, HeadRecipe
from models.training.recipe import PRESETS, Recipe, preset
from outrider.protocol.errors import InvalidRequest, OutriderError

_OF_PAIRS = ("preset", "target_tokens", "draft_tokens")
_OF_HEADS = ("target", "store", "text_tokens", "tokens", "length", "hidden", "vocab", "steps", "rate", "visible_prefix")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 0 when the pair is made."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        _check(options)
        _make(options)
    except OutriderError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped; the same command goes on from the last checkpoint", 130)
    sys.stderr.write(f"the {'pair' if options.head is None else 'head'} lies in {options.out}\n")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise InvalidRequest for what goes with heads only or with pairs only."""
    others = _OF_PAIRS if options.head is not None else _OF_HEADS
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(options, name) is not None]
    if given and options.head is None:
        raise InvalidRequest(f"{', '.join(given)} is for a head; name which with --head: {', '.join(KINDS)}")
    if given:
        raise InvalidRequest(f"{', '.join(given)} is for a pair, and --head makes a head alone; leave one of them out")
    if options.head is not None and options.target is None:
        raise InvalidRequest("a head is made for a target; name its folder with --target")


def _make(options: argparse.Namespace) -> None:
    made = _pair_recipe(options) if options.head is None else _head_recipe(options)
    out, extra = options.out.resolve(), [folder.resolve() for folder in options.extra_dir]
    try:
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


def _pair_recipe(options: argparse.Namespace) -> Recipe:
    return preset(
        options.preset or "embedded",
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
        prog="train", description="Make a pair from Python source, or a head for a target."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make; it must not exist or be empty")
    parser.add_argument("--preset", help=f"{' or '.join(PRESETS)} (default: embedded)")
    parser.add_argument("--target-tokens", type=int, help="tokens the target sees (embedded: 7,650,000)")
    parser.add_argument("--draft-tokens", type=int, help="tokens the draft sees (embedded: 5,000,000)")
    parser.add_argument("--batch-tokens", type=int, help="tokens a step (embedded: 4,096; a head: 2,048)")
    parser.add_argument(
        "--extra-dir",
        type=Path,
        action="append",
        default=[],
        help="more permissively licensed Python to train on; may be given several times",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order (default: 0)")
    head = parser.add_argument_group("a head")
    head.add_argument("--head", help=f"make one for a target instead of a pair: {' or '.join(KINDS)}")
    head.add_argument("--target", type=Path, help="folder of the Llama-like model to make it for")
    head.add_argument("--store", type=Path, help="keep the target's text here, for its other heads as well")
    head.add_argument("--text-tokens", type=int, help="text that the target writes (2,000,000)")
    head.add_argument("--tokens", type=int, help="tokens that the head sees (4,000,000)")
    head.add_argument("--length", type=int, help="of a window, in tokens (512)")
    head.add_argument("--hidden", type=int, help="its width (the target's)")
    head.add_argument("--vocab", type=int, help="how many tokens it can say, the most frequent (the target's)")
    head.add_argument("--steps", type=int, help="tokens it learns to draft behind one another (4)")
    head.add_argument(
        "--visible-prefix",
        action="store_true",
        default=None,
        help="a dflash head learns with the first tokens of its blocks known, as in the draft worker they are",
    )
    head.add_argument("--rate", type=float, help="of learning, at its highest (0.0015)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
