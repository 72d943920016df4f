"""Converts an mlx-lm model to a Core ML package, with its progress on stderr and one JSON object on stdout."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from outrider.drafters.coreml.layout import DEFAULT_CONTEXT, WEIGHT_FORMATS
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.pairing.model_files import find_model


def run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    from outrider.drafters.coreml.converter import convert  # deferred: imports MLX and coremltools

    screen = Screen()

    def show(stage: str, done: int, total: int) -> None:
        screen.show(f"{stage}: {done} of {total}")

    try:
        model = find_model(options.model)
        manifest = convert(model.folder, options.out, options.weights, options.context, show)
    finally:
        screen.clear()
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    result = {
        "package": str(options.out), "source": manifest.source, "family": manifest.layout.architecture.family,
        "weights": manifest.layout.weights, "context": manifest.layout.context,
        "functions": [function.name for function in manifest.layout.functions], "parameters": manifest.parameters,
        "bytes": size, "seconds": round(time.monotonic() - started, 2),
    }  # fmt: skip
    print(json.dumps(result))
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    source = "a model (Llama, Qwen2/2.5, Qwen3), named as for generate; required"
    parser.add_argument("--model", required=True, metavar="ID|PATH", help=source)
    package = "the package's directory, which must not exist; required"
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help=package)
    numbers = "the format of the weights (default: %(default)s)"
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, default="fp16", help=numbers)
    positions = f"the package's context length, in tokens (default: {DEFAULT_CONTEXT}, or the model's if it is shorter)"
    parser.add_argument("--context", type=int, metavar="N", help=positions)
