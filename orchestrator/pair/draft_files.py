"""A draft model that is stored without what it shares with its target, made whole: a folder that can be loaded.

Stored are its layers, its final norm, which tokens it can say (`d2t`, as EAGLE-3's heads tell it), and `lens`, a matrix
that turns its rows into those that the target's output layer reads. Its embedding is the target's; its output layer is
the target's rows for these tokens times the lens; the tokenizer is copied. Knows files and numpy.
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
_GROUP = 32
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
    tensors |= {name: value for name, value in shared.items() if name.startswith(f"{_EMBEDDING}.")}
    rows = _whole({part: shared[f"{output}.{part}"][tokens] for part in _PARTS if f"{output}.{part}" in shared})
    lens = tensors.pop("lens", None)
    if lens is None or lens.shape != 2 * (config["hidden_size"],) or rows.shape[1] != len(lens):
        raise ModelError(
            f"{stored} lacks the matrix lens, {config['hidden_size']} wide both ways; fetch the draft again"
        )
    tensors |= _quantised(rows @ lens.astype(np.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    for name in _TOKENIZER:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
    quantisation = config["quantization"] | {f"{_HEAD}.rows": {"group_size": _GROUP, "bits": 8}}
    said = (of_target.get("quantization") or {}).get(_EMBEDDING)
    quantisation |= {} if said is None else {_EMBEDDING: said}  # otherwise mlx-lm infers it
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


def _whole(parts: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """A matrix [N, K] that may be quantised as MLX does it, in 4 or 8 bits. Raises ModelError for another form."""
    weight = parts["weight"]
    if "scales" not in parts:
        return weight.astype(np.float32)
    scales, biases = parts["scales"].astype(np.float32), parts["biases"].astype(np.float32)
    octets = weight.view(np.uint8)
    bits = 8 * octets.shape[1] // (scales.shape[1] * _GROUP)
    if bits not in (4, 8) or scales.shape[1] * _GROUP * bits != 8 * octets.shape[1]:
        raise ModelError(
            f"the target's embedding has another form than groups of {_GROUP} in 4 or 8 bits; use another copy"
        )
    steps = octets if bits == 8 else np.stack([octets & 15, octets >> 4], axis=-1)
    grouped = steps.reshape(*scales.shape, _GROUP) * scales[..., None] + biases[..., None]
    whole: NDArray[np.float32] = grouped.reshape(len(weight), -1)
    return whole


def _quantised(rows: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """The output layer's matrix [N, K] in 8 bits, as MLX holds it."""
    groups = rows.reshape(len(rows), -1, _GROUP)
    biases = groups.min(axis=-1).astype(np.float16)
    reach = groups.max(axis=-1) - biases.astype(np.float32)
    scales = np.maximum(reach / 255, 6e-8).astype(np.float16)
    steps = (groups - biases[..., None].astype(np.float32)) / scales[..., None].astype(np.float32)
    packed = np.clip(np.rint(steps), 0, 255).astype(np.uint8).reshape(len(rows), -1).view(np.uint32)
    return {f"{_HEAD}.weight": packed, f"{_HEAD}.scales": scales, f"{_HEAD}.biases": biases}
