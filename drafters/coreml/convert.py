"""`python -m outrider.drafters.coreml.convert`: a checkpoint to a package, with a progress bar and JSON on stdout.

`outrider convert` runs this program, so that the command line itself never imports MLX.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from outrider.drafters.coreml.layout import DEFAULT_CONTEXT, WEIGHTS, Mode, Options
from outrider.protocol.errors import OutriderError

_BAR = 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider convert", description="Make a CoreML package of an mlx-lm model.")
    add_flags(parser)
    options = parser.parse_args()
    started = time.monotonic()
    try:
        wanted = Options(Mode(options.mode), options.weights, options.context)
        from outrider.drafters.coreml.converter import convert
        from outrider.engine.loading import find

        model = find(options.model, lambda stage: _say(f"{stage}\n"))
        manifest = convert(model, options.out, wanted, None if options.quiet else _bar, options.mlx_out)
    except OutriderError as error:
        _say(f"{parser.prog}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    result = {
        "package": str(options.out), "source": manifest.source, "family": manifest.layout.architecture.family,
        "mode": manifest.layout.mode.value, "weights": manifest.layout.weights, "context": manifest.layout.context,
        "functions": [function.name for function in manifest.layout.functions], "parameters": manifest.parameters,
        "bytes": size, "seconds": round(time.monotonic() - started, 2), "notes": list(manifest.notes),
    }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a directory or a Hugging Face id (Llama, Qwen2/2.5, Qwen3)")
    parser.add_argument("--out", type=Path, required=True, help="the package's directory; must not exist")
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default=Mode.STATELESS.value)
    parser.add_argument("--weights", choices=WEIGHTS, default="fp16")
    positions = "positions the package can draft at (1024)"
    parser.add_argument("--context", type=int, default=DEFAULT_CONTEXT, help=positions)
    parser.add_argument("--mlx-out", type=Path, help="also write an mlx-lm checkpoint with the same numbers")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _bar(stage: str, done: int, total: int) -> None:
    """Draws a progress bar on a terminal, and writes a line for each stage anywhere else."""
    filled = _BAR * done // max(total, 1)
    line = f"{stage:16} [{'#' * filled}{' ' * (_BAR - filled)}] {done}/{total}"
    if sys.stderr.isatty():
        _say(f"\r\033[K{line}" + ("\n" if done == total else ""))
    elif done == total:
        _say(f"{line}\n")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
