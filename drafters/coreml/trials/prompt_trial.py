"""`python -m outrider.drafters.coreml.trials.prompt_trial`: reads prompts with MLX and with the package, timed.

Meant to be sacrificed, as `trial` is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from outrider.drafters.coreml.host.prefill import PackageReader
from outrider.drafters.coreml.package.package import Package, open_package
from outrider.drafters.coreml.runtime.interpreter import NAMES, runtime_of
from outrider.drafters.coreml.runtime.runtimes import DeviceAbsent
from outrider.drafters.coreml.trials import trial
from outrider.engine.kv_transfer import FillableKVRows
from outrider.engine.load_checks import open_kv_rows
from outrider.engine.loading import LoadedModel
from outrider.engine.loading import load as load_model
from outrider.protocol.errors import OutriderError

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Median milliseconds to read prompts of `lengths` tokens, by MLX and by the package on `units`."""

    units: str
    lengths: tuple[int, ...]
    mlx_ms: tuple[float, ...]
    package_ms: tuple[float, ...]


def measure(model: LoadedModel, package: Package, units: str) -> PromptTimes:
    """Reads prompts as the drafter would.

    Raises:
        OutriderError: the package can't be run, or its model can't draft.
    """
    reader = PackageReader(package, runtime_of(package, units, [package.layout.prefill.name]), least=1)
    vocabulary = package.layout.architecture.vocab_size
    lengths = tuple(length for length in LENGTHS if length <= package.layout.context)

    def by_mlx(tokens: list[int]) -> None:
        open_kv_rows(model).prefill(tokens, None, len(tokens))

    def by_package(tokens: list[int]) -> None:
        kv_rows = open_kv_rows(model, reader)
        kv_rows.prefill(tokens, None, len(tokens))
        if not isinstance(kv_rows, FillableKVRows) or kv_rows.read != len(tokens):
            raise OutriderError("the package did not read the prompt")

    prompts = [[(7 * i + 3) % vocabulary for i in range(length)] for length in lengths]
    return PromptTimes(
        units, lengths, tuple(_ms(by_mlx, tokens) for tokens in prompts), tuple(_ms(by_package, t) for t in prompts)
    )


def _ms(read: Callable[[list[int]], None], tokens: list[int]) -> float:
    taken = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        read(tokens)
        taken.append(time.perf_counter() - started)
    return round(1e3 * median(taken[1:]), 3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.drafters.coreml.trials.prompt_trial", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--units", choices=NAMES, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    try:
        package = open_package(options.package, source=options.model)
        times = measure(load_model(options.model), package, options.units)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return trial.ABSENT if isinstance(error, DeviceAbsent) else error.exit_code
    options.result.write_text(json.dumps(dataclasses.asdict(times)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
