"""`python models/train.py --out DIR`: make a model pair like the embedded one, from text to Hugging Face folders.

One command: reads this Python's standard library, learns a tokenizer, trains the target, distils the draft from it and
writes DIR/target, DIR/draft and DIR/training.json. Stopped, the same command goes on. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by its path: the rooms lie one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.training.recipe import PRESETS, Recipe, preset
from outrider.protocol.errors import OutriderError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 0 when the pair is made."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        recipe = preset(
            options.preset,
            seed=options.seed,
            target_tokens=options.target_tokens,
            draft_tokens=options.draft_tokens,
            batch_tokens=options.batch_tokens,
        )
        _run(recipe, options)
    except OutriderError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped; the same command goes on from the last checkpoint", 130)
    sys.stderr.write(f"the pair lies in {options.out}\n")
    return 0


def _run(recipe: Recipe, options: argparse.Namespace) -> None:
    try:
        from models.training import pipeline
    except ModuleNotFoundError as error:
        raise OutriderError(
            f"training needs {error.name}, which is not installed; run: pip install -e '.[train]'"
        ) from error
    pipeline.run(recipe, options.out.resolve(), [folder.resolve() for folder in options.extra_dir])


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"train: {sentence}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train", description="Make a target and a draft from Python source.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; it must not exist or be empty")
    parser.add_argument("--preset", default="embedded", help=f"{' or '.join(PRESETS)} (default: embedded)")
    parser.add_argument("--target-tokens", type=int, help="tokens the target sees (embedded: 7,650,000)")
    parser.add_argument("--draft-tokens", type=int, help="tokens the draft sees (embedded: 5,000,000)")
    parser.add_argument("--batch-tokens", type=int, help="tokens a step (embedded: 4,096)")
    parser.add_argument(
        "--extra-dir",
        type=Path,
        action="append",
        default=[],
        help="more permissively licensed Python to train on; may be given several times",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
