"""A draft model that is stored without what it shares with its target, made whole: a folder that can be loaded.

Stored are its layers, its final norm and which tokens it can say (`d2t`, as EAGLE-3's heads tell it). Its embedding and
the rows of its output layer are the target's and are copied from there, as is the tokenizer. Knows files and numpy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from outrider.protocol.errors import ModelError

SHARED = "target"
"""The value of `embedding` in the config.json of a draft that is stored without one."""
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_PARTS = ("weight", "scales", "biases")
_SAME = ("hidden_size", "vocab_size")


def assemble_draft(stored: Path, target: Path, folder: Path) -> None:
    """Writes the draft in `stored`, made for the model in `target`, into the empty `folder`.

    Raises:
        ModelError: one of them is damaged, or they do not belong together; the message says which and what to do.
        OSError: `folder` can't be written.
    """
    config, of_target = _config(stored), _config(target)
    if config.get("embedding") != SHARED or not isinstance(config.get("draft_vocab_size"), int):
        raise ModelError(
            f'{stored} is no draft that shares its target\'s embedding; expected "embedding": "{SHARED}" and '
            "draft_vocab_size in its config.json"
        )
    for key in _SAME:
        if config.get(key) != of_target.get(key):
            raise ModelError(
                f"{stored} was made for a target with {key} {config.get(key)}, and {target} has {of_target.get(key)}; "
                "choose the target it was made for, or another draft"
            )
    tensors = _read(stored, None)
    tokens = _tokens(stored, tensors.get("d2t"), config)
    shared = _read(target, (_EMBEDDING, _HEAD))
    output = _HEAD if f"{_HEAD}.weight" in shared else _EMBEDDING
    if f"{_EMBEDDING}.weight" not in shared:
        raise ModelError(f"{target} has no {_EMBEDDING}.weight; expected a Llama's weights")
    for part in _PARTS:
        if f"{_EMBEDDING}.{part}" in shared:
            tensors[f"{_EMBEDDING}.{part}"] = shared[f"{_EMBEDDING}.{part}"]
        if f"{output}.{part}" in shared:
            tensors[f"{_HEAD}.{part}"] = np.ascontiguousarray(shared[f"{output}.{part}"][tokens])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    for name in _TOKENIZER:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
    quantisation = config["quantization"] | _quantisation(of_target, output)
    whole = {key: value for key, value in config.items() if key != "embedding"}
    whole |= {key: of_target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in of_target}
    whole |= {"quantization": quantisation, "quantization_config": quantisation, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no readable config.json; expected a model in Hugging Face layout") from error
    if not isinstance(found, dict):
        raise ModelError(f"{folder / 'config.json'} holds no settings; expected a model's config")
    return found


def _read(folder: Path, modules: tuple[str, ...] | None) -> dict[str, NDArray[Any]]:
    """All tensors, or those of `modules`."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no weights; expected model*.safetensors beside config.json")
    found: dict[str, NDArray[Any]] = {}
    try:
        for path in files:
            if modules is None:
                found |= load_file(path)
                continue
            with safe_open(path, "numpy") as file:
                names = [name for name in file.keys() if name.rpartition(".")[0] in modules]  # noqa: SIM118
                found |= {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, TypeError) as error:
        raise ModelError(f"the weights in {folder} can't be read ({error}); fetch the model again") from error
    return found


def _tokens(stored: Path, offsets: NDArray[Any] | None, config: dict[str, Any]) -> NDArray[np.int64]:
    """Ids of the tokens that the draft can say."""
    count = config["draft_vocab_size"]
    if offsets is None or offsets.shape != (count,):
        raise ModelError(f"{stored} does not tell the {count} tokens that it can say; expected a tensor d2t of as many")
    tokens: NDArray[np.int64] = np.arange(count) + offsets.astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= config["vocab_size"]:
        raise ModelError(f"{stored}: d2t names tokens outside the vocabulary of {config['vocab_size']}; fetch it again")
    return tokens


def _quantisation(target: dict[str, Any], output: str) -> dict[str, Any]:
    """Of the shared matrices, where the target's config tells it; otherwise mlx-lm infers it."""
    said = target.get("quantization") or {}
    pairs = ((_EMBEDDING, _EMBEDDING), (f"{_HEAD}.rows", output))
    return {new: said[old] for new, old in pairs if old in said}
