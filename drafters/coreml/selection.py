"""Finds the package of a draft, and the compute unit of this machine that runs it, by trials that are kept."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.drafters.coreml import package, trial
from outrider.drafters.coreml.converter import write_package
from outrider.drafters.coreml.drafter import CoreMLDrafter, PackageReader
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import DeviceUnavailable, open_runtime, require_core_ml
from outrider.drafters.drafter import Drafter
from outrider.protocol.digest import cache_folder, make_cached, model_digest, use_cached
from outrider.protocol.errors import InvalidRequest, ModelError

log = logging.getLogger(__name__)

PREFERRED_UNITS = ("CPU_AND_NE", "CPU_ONLY")  # a drafter on the Neural Engine slows the target least

ProgressCallback = Callable[[str], None]


def package_folder(checkpoint: Path, weights: str = "fp16") -> Path:
    """Returns where the cache keeps the package of the model directory `checkpoint`; it need not exist."""
    name = f"{model_digest(checkpoint)}-{weights}.{package.MANIFEST_FORMAT}"
    return cache_folder() / "coreml" / "packages" / name


def cached_package(checkpoint: Path, progress: ProgressCallback, weights: str = "fp16") -> Package:
    """Returns the package of the model directory `checkpoint`, converted now if it is missing or damaged.

    `progress` receives each stage of a conversion once. Raises ModelError if the model can't be converted.
    """
    directory = package_folder(checkpoint, weights)
    if use_cached(directory, package.MANIFEST_FILE):
        try:
            return open_package(directory)
        except ModelError as error:  # the system may delete files of a cache
            log.warning("%s (converting it again now)", error)
            shutil.rmtree(directory, ignore_errors=True)

    def report(stage: str, done: int, total: int) -> None:
        if not done:
            progress(f"converting the draft for Core ML: {stage}")

    convert = partial(write_package, checkpoint, weights=weights, context=None, progress=report)
    return open_package(make_cached(directory, convert, package.MANIFEST_FILE))


def choose_unit(package: Package, progress: ProgressCallback) -> tuple[str, str]:
    """Returns the first of PREFERRED_UNITS on which a trial of `package` succeeds, and a sentence about it for users.

    `progress` receives a sentence before each trial, which may take minutes. Raises DeviceUnavailable if all fail.
    """
    rejections: list[str] = []
    for units in PREFERRED_UNITS:
        found = trial.try_once(package, units, progress)
        if not found.reason:
            sentence = f"drafting with Core ML on {units}, {package.layout.weights}, {found.ms['q1']:.2f} ms a token"
            return units, f"{sentence} ({'; '.join(rejections)})" if rejections else sentence
        rejections.append(f"{units}: {found.reason}")
    raise DeviceUnavailable(f"Core ML does not help this draft on this machine ({'; '.join(rejections)})")


def find_package(checkpoint: Path, prefill: str, progress: ProgressCallback) -> Package:
    """Returns the package that the setting `draft_prefill` names for the model directory `checkpoint`: that in a
    directory, or otherwise (`mlx`, `coreml`) the model's own, which is converted first (once).

    Raises:
        InvalidRequest: `prefill` is neither mlx nor coreml nor a package's directory.
        DeviceUnavailable: there is no Core ML.
        ModelError: the package has other weights, or the model can't be converted.
    """
    directory, is_own = Path(os.path.expanduser(prefill)), prefill in ("mlx", "coreml")
    if not is_own and not (directory / package.MANIFEST_FILE).is_file():
        raise InvalidRequest(f"draft prefill is {prefill!r}; expected mlx, coreml or the directory of a package")
    require_core_ml()
    return cached_package(checkpoint, progress) if is_own else open_package(directory, checkpoint)


def load_drafter(model: str, prefill: str, progress: ProgressCallback) -> Drafter:
    """Returns the drafter for the directory `model`, by the package that `find_package` finds.

    MLX drafts, with a note, if trials fail on every unit, or there is no Core ML. `progress` receives a sentence about
    each step. Raises InvalidRequest or ModelError as `find_package`.
    """
    try:
        chosen = find_package(Path(model), prefill, progress)
        units, sentence = choose_unit(chosen, progress)
        drafter = CoreMLDrafter(chosen, open_runtime(chosen, units), note=sentence)
    except DeviceUnavailable as error:
        from outrider.drafters.mlx import MlxDrafter

        note = f"drafting with MLX instead of Core ML: {error}"
        progress(note)
        return MlxDrafter.load(model, progress, note)
    progress(sentence)
    return drafter


def load_prompt_reader(model: str, prefill: str, progress: ProgressCallback) -> PackageReader | str:
    """Returns the package that reads prompts for the draft `model`, or why MLX reads them; empty if it was to
    (`prefill` is `mlx`). Raises InvalidRequest or ModelError as `find_package`."""
    if prefill == "mlx":
        return ""
    try:
        chosen = find_package(Path(model), prefill, progress)
        units, _ = choose_unit(chosen, progress)
        reader = PackageReader(chosen, open_runtime(chosen, units, [chosen.layout.prefill.name]))
    except DeviceUnavailable as error:
        return f"prompts are read by MLX: {error}"
    progress(reader.note)
    return reader
