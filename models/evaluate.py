"""`python models/evaluate.py`: measures the loss of a target and a draft on held-out text, and the acceptance rate.

The text is that of the pair's held-out files, which `training.json` lists, or of `--text`. Both models read the text
itself (teacher forcing), in windows, with MLX in float32. Acceptance is that of Leviathan et al. (2023): at temperature
0 the share of positions with equal most likely tokens, above 0 the overlap sum(min(p, q)). On Linux, preload OpenBLAS;
MLX is slow without it.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: the checkout is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from numpy.typing import NDArray

from models.training.corpus import python_files, standard_library
from models.training.progress import Progress
from models.training.record import read_held_out
from outrider.orchestrator import cli
from outrider.protocol.errors import InvalidRequest, ModelError

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over windows, weighted by their tokens, and its standard error (NaN for a single window)."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Losses in nats per token, `agreement` at temperature 0, and the overlap at each other temperature."""

    tokens: int
    target_loss: Estimate
    draft_loss: Estimate
    agreement: Estimate
    overlaps: tuple[Estimate, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit code."""
    return cli.run("evaluate", lambda: sys.modules[__name__], sys.argv[1:] if arguments is None else arguments)


def run(options: argparse.Namespace) -> int:
    """Evaluates the pair, and prints the estimates."""
    _check(options)
    texts = _named_texts(options.text) if options.text else _held_out_texts(options.pair)
    sys.stdout.write(_report(_compare(options, texts), options.temp))
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
    draft, draft_tokenizer = _load(options.draft or options.pair / "draft")
    if tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        raise ModelError("target and draft have different vocabularies; expected a pair with one tokenizer")
    documents = [tokenizer.encode(text) for text in texts]
    if all(len(document) < 2 for document in documents):
        paths = ", ".join(map(str, options.text or [options.pair]))
        raise InvalidRequest(f"{paths} has too little text; expected two tokens or more")
    return compare(target, draft, documents, length=options.context, limit=options.tokens, temps=options.temp)


def compare(
    target: Any, draft: Any, documents: Sequence[Sequence[int]], *, length: int, limit: int, temps: Sequence[float]
) -> Comparison:
    """Measures both models on the first windows of the documents, until these have `limit` tokens or more."""
    chosen: list[list[int]] = []
    count = 0
    for window in windows(documents, length):
        if count >= limit:
            break
        chosen.append(window)
        count += len(window) - 1
    progress = Progress("evaluating", len(chosen), "windows")
    measured = []
    for index, window in enumerate(chosen, start=1):
        measured.append(measure_window(target, draft, window, temps))
        progress.update(index)
    weights = np.array([len(window) - 1 for window in chosen], dtype=np.float64)
    estimates = [_estimate(column, weights) for column in np.array(measured).T]
    return Comparison(count, estimates[0], estimates[1], estimates[2], tuple(estimates[3:]))


def windows(documents: Sequence[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Yields windows of `length` tokens and the token after them. No window crosses the end of a document.

    The last window of a document is shorter; it is left out if it is at most half full, unless it is the only one.
    """
    for document in documents:
        for start in range(0, len(document) - 1, length):
            window = list(document[start : start + length + 1])
            if len(window) > length // 2 or start == 0:
                yield window


def measure_window(target: Any, draft: Any, window: Sequence[int], temps: Sequence[float]) -> list[float]:
    """Returns means over one window: the target's loss, the draft's loss, agreement, and the overlap by temperature."""
    tokens = mx.array(list(window))
    p_logits, q_logits = target(tokens[None, :-1])[0], draft(tokens[None, :-1])[0]
    vocab = min(p_logits.shape[-1], q_logits.shape[-1])  # one of the models may pad its vocabulary
    p_logits, q_logits = (logits[:, :vocab].astype(mx.float32) for logits in (p_logits, q_logits))
    means = [
        nn.losses.cross_entropy(p_logits, tokens[1:], reduction="mean"),
        nn.losses.cross_entropy(q_logits, tokens[1:], reduction="mean"),
        (p_logits.argmax(axis=-1) == q_logits.argmax(axis=-1)).astype(mx.float32).mean(),
    ]
    for temp in temps:
        p, q = mx.softmax(p_logits / temp, axis=-1), mx.softmax(q_logits / temp, axis=-1)
        means.append(mx.minimum(p, q).sum(axis=-1).mean())
    mx.eval(means)
    return [float(mean.item()) for mean in means]


def _estimate(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Estimate:
    mean = float(np.average(values, weights=weights))
    if len(values) < 2:
        return Estimate(mean, float("nan"))
    shares = weights / weights.sum()
    return Estimate(mean, float(np.sqrt(np.sum(shares**2 * (values - mean) ** 2) * len(values) / (len(values) - 1))))


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
        *(
            (f"sum min(p, q) at T = {temp:g}", overlap)
            for temp, overlap in zip(temps, comparison.overlaps, strict=True)
        ),
    ]
    lines = [f"{name:28} {_format(estimate)}" for name, estimate in rows]
    return "\n".join([f"{comparison.tokens:,} tokens; mean and standard error over windows", *lines]) + "\n"


def _format(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f}" + (f" +- {estimate.error:.3f}" if not math.isnan(estimate.error) else "")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair", type=Path, default=_HERE, help="folder with target/ and draft/ (default: models)")
    parser.add_argument("--target", type=Path, help="folder of the target (default: PAIR/target)")
    parser.add_argument("--draft", type=Path, help="folder of the draft (default: PAIR/draft)")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="Python files, or folders of them, to evaluate on (default: the pair's held-out files)",
    )
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens to evaluate on (default: 65,536)")
    parser.add_argument("--context", type=int, default=1024, help="tokens per window (default: 1,024)")
    parser.add_argument(
        "--temp", type=float, nargs="+", default=[0.8, 1.0], help="temperatures above 0 (default: 0.8 1.0)"
    )


if __name__ == "__main__":
    sys.exit(main())
