"""`python models/evaluate.py`: measures the held-out loss of a pair, and how often the target accepts the draft.

The text is that of the pair's held-out files, which its `training.json` lists, or of `--text`. Uses MLX in float32;
preload OpenBLAS on Linux, because it is slow otherwise.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: the checkout is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import mlx.core as mx
import mlx_lm

from models.comparison import Comparison, Figure, compare
from models.training.corpus import python_files, standard_library
from models.training.record import read_held_out
from outrider.protocol.errors import InvalidRequest, ModelError, OutriderError

_HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        texts = _named_texts(options.text) if options.text else _held_out_texts(options.pair)
        comparison = _compare(options, texts)
    except OutriderError as error:
        sys.stderr.write(f"evaluate: {error}\n")
        return error.exit_code
    sys.stdout.write(_report(comparison, options.temp))
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.context < 2:
        raise InvalidRequest(f"--context must be at least 2 tokens, not {options.context}")
    if options.tokens < 1:
        raise InvalidRequest(f"--tokens must be at least 1, not {options.tokens}")
    if not all(temp > 0 for temp in options.temp):  # NaN, too
        raise InvalidRequest("--temp must be above 0; agreement at temperature 0 is always shown")


def _held_out_texts(pair: Path) -> list[str]:
    held_out = read_held_out(pair)
    if held_out is None:
        raise InvalidRequest(f"{pair} has no training.json that lists held-out files; expected --text with unseen text")
    if held_out.python != platform.python_version():
        raise InvalidRequest(
            f"the held-out files are those of Python {held_out.python}, but this is {platform.python_version()}; "
            "run that Python, or use --text with unseen text"
        )
    return [_read(standard_library() / name) for name in held_out.names]


def _named_texts(paths: Sequence[Path]) -> list[str]:
    texts = []
    for path in paths:
        texts += [source.text for source in python_files(path)] if path.is_dir() else [_read(path)]
    if not texts:
        raise InvalidRequest(f"{', '.join(map(str, paths))} has no usable .py file")
    return texts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"can't read {path} as UTF-8 text; expected a Python file or a folder of them") from error


def _compare(options: argparse.Namespace, texts: Sequence[str]) -> Comparison:
    target, tokenizer = _load(options.target or options.pair / "target")
    draft, other = _load(options.draft or options.pair / "draft")
    if tokenizer.get_vocab() != other.get_vocab():
        raise ModelError("target and draft have different vocabularies; expected a pair with one tokenizer")
    documents = [tokenizer.encode(text) for text in texts]
    if all(len(document) < 2 for document in documents):
        read = ", ".join(map(str, options.text or [options.pair]))
        raise InvalidRequest(f"{read} has too little text; expected two tokens or more")
    return compare(target, draft, documents, length=options.context, limit=options.tokens, temps=options.temp)


def _load(path: Path) -> tuple[Any, Any]:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; expected a model folder in Hugging Face layout")
    # Documents are cut into windows afterwards, so the tokenizer's own length limit would only warn.
    model, tokenizer = mlx_lm.load(str(path), tokenizer_config={"model_max_length": sys.maxsize})[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def _report(comparison: Comparison, temps: Sequence[float]) -> str:
    rows = [
        ("target loss, nats per token", comparison.target_loss),
        ("draft loss, nats per token", comparison.draft_loss),
        ("same best token (T = 0)", comparison.agreement),
    ]
    rows += [
        (f"sum min(p, q) at T = {temp:g}", figure) for temp, figure in zip(temps, comparison.overlaps, strict=True)
    ]
    lines = [f"{name:28} {_shown(figure)}" for name, figure in rows]
    return "\n".join([f"{comparison.tokens:,} tokens; mean and standard error over windows", *lines]) + "\n"


def _shown(figure: Figure) -> str:
    return f"{figure.mean:.3f}" + (f" +- {figure.error:.3f}" if not math.isnan(figure.error) else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evaluate", description="Held-out loss and acceptance of a model pair.")
    parser.add_argument("--pair", type=Path, default=_HERE, help="folder with target/ and draft/ (default: models)")
    parser.add_argument("--target", type=Path, help="folder of another target")
    parser.add_argument("--draft", type=Path, help="folder of another draft")
    parser.add_argument("--text", type=Path, nargs="+", help="files or folders that the pair was not trained on")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens to read (default: 65,536)")
    parser.add_argument("--context", type=int, default=1024, help="tokens per window (default: 1,024)")
    parser.add_argument("--temp", type=float, nargs="+", default=[0.8, 1.0], help="temperatures above 0 (0.8 1.0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
