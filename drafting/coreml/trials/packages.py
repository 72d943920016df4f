"""The packages a draft can be had as on this machine: those made of a checkpoint, or the one that was named itself."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.drafting.coreml.converter import store
from outrider.drafting.coreml.converter.converter import Options, Progress
from outrider.drafting.coreml.package import source
from outrider.drafting.coreml.package.layout import Mode
from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.trials.verdicts import Variant

VARIANTS = tuple(Variant(mode, weights) for weights in ("fp16", "int8") for mode in Mode)
"""In the order in which they are tried: the draft's own numbers first, and what the Neural Engine takes readily."""


class Packages(Protocol):
    """Where a draft's packages come from."""

    @property
    def source_hash(self) -> str: ...

    @property
    def variants(self) -> tuple[Variant, ...]: ...

    def made(self, variant: Variant) -> bool:
        """Whether the package is there already."""
        ...

    def get(self, variant: Variant) -> Package:
        """The package, made now if need be. Raises ModelError when it can't be."""
        ...

    def discard(self, variant: Variant) -> None:
        """Gives up a package that can be made again."""
        ...


@dataclass(frozen=True, slots=True)
class OfCheckpoint:
    """Packages of the model directory `checkpoint`, of `context` tokens, kept in `folder` (the cache by default)."""

    checkpoint: Path
    context: int
    source_hash: str
    progress: Progress | None = None
    folder: Path | None = None
    variants: tuple[Variant, ...] = VARIANTS

    @classmethod
    def of(cls, checkpoint: Path, context: int, progress: Progress | None = None) -> OfCheckpoint:
        return cls(checkpoint, context, source.fingerprint(checkpoint), progress)

    def made(self, variant: Variant) -> bool:
        return store.directory_of(self.source_hash, self._options(variant), self.folder).exists()

    def get(self, variant: Variant) -> Package:
        return store.package_of(self.checkpoint, self._options(variant), self.progress, self.folder)

    def discard(self, variant: Variant) -> None:
        directory = store.directory_of(self.source_hash, self._options(variant), self.folder)
        shutil.rmtree(directory, ignore_errors=True)

    def _options(self, variant: Variant) -> Options:
        return Options(variant.mode, variant.weights, self.context)


@dataclass(frozen=True, slots=True)
class OnePackage:
    """A package that was named: there is no other, and it stays."""

    package: Package

    @property
    def source_hash(self) -> str:
        return self.package.manifest.source_hash

    @property
    def variants(self) -> tuple[Variant, ...]:
        return (Variant(self.package.layout.mode, self.package.layout.weights),)

    def made(self, variant: Variant) -> bool:
        return True

    def get(self, variant: Variant) -> Package:
        return self.package

    def discard(self, variant: Variant) -> None:
        """It is not ours to remove."""
