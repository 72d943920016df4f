"""Unsupported input of converter and loader is refused in one sentence, and leaves no files."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from outrider.drafters.coreml import converter
from outrider.drafters.coreml.converter import convert
from outrider.drafters.coreml.layout import PackageLayout
from outrider.drafters.coreml.package import (
    EMBEDDING_FILE,
    EXPECTED_FILE,
    MODEL_PATH,
    WEIGHTS_PATH,
    import_coremltools,
    open_package,
)
from outrider.protocol.errors import InvalidRequest, ModelError, OutriderError
from tests.coreml.conftest import SIZES, Converted

Model = Callable[..., Path]
SHORT = ("fp16", 64)


def conversion_error(model: Path, tmp_path: Path, context: int | None = 64) -> str:
    """The sentence with which converting `model` is refused; checks that nothing is left behind."""
    (tmp_path / "out").mkdir(exist_ok=True)
    with pytest.raises(OutriderError) as caught:
        convert(model, tmp_path / "out" / "package", "fp16", context)
    assert list((tmp_path / "out").iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize(
    ("family", "config", "sentence"),
    [
        ("phi3", {}, "can't convert a 'phi3' model; expected model_type llama, qwen2, qwen3"),
        ("mistral", {}, "can't convert a 'mistral' model"),
        ("gemma3_text", {}, "can't convert a 'gemma3_text' model"),
        ("qwen3_moe", {}, "can't convert a 'qwen3_moe' model"),
        ("llama", {"rope_traditional": True}, "does not rotate the two halves of a head (a traditional"),
        ("llama", {"draft_vocab_size": 100}, "has fewer output tokens than input tokens (draft_vocab_size)"),
        ("llama", {"head_dim": 48}, "head size is 48; the Neural Engine needs a multiple of 32"),
        ("qwen2", {"hidden_size": 64}, "head size is 16; the Neural Engine"),
        ("llama", {"intermediate_size": 16385}, "a layer is 16385 wide, but the Neural Engine takes at most 16384"),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads can't share 3"),
        (
            "llama",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            "has sliding_attention layers",
        ),
    ],
)
def test_unsupported_architecture_is_refused(
    tiny_model: Model, tmp_path: Path, family: str, config: dict[str, Any], sentence: str
) -> None:
    sizes = {} if family in ("gemma3_text", "qwen3_moe") else {**SIZES, "num_hidden_layers": 2}
    assert sentence in conversion_error(tiny_model(family, **{**sizes, **config}), tmp_path)


def copy_with_config(model: Path, tmp_path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """A copy of `model` with another config.json."""
    copy = tmp_path / "edited"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if k not in drop}))
    return copy


def change_weights(model: Path, change: Callable[[dict[str, mx.array]], None]) -> Path:
    """Changes the weights of `model` in place."""
    file = model / "model.safetensors"
    tensors: Any = mx.load(str(file))
    tensors = {name: mx.array(np.array(tensor)) for name, tensor in tensors.items()}
    change(tensors)
    mx.save_safetensors(str(file), tensors)
    return model


def test_traditional_rope_is_detected_by_its_behaviour(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever config.json calls it."""
    import mlx.nn as nn

    original = nn.RoPE.__init__

    def traditional(self: nn.RoPE, dims: int, traditional: bool = False, *rest: Any, **others: Any) -> None:
        original(self, dims, True, *rest, **others)

    monkeypatch.setattr(nn.RoPE, "__init__", traditional)
    assert "does not rotate the two halves of a head" in conversion_error(tiny_model("qwen2", **SIZES), tmp_path)


def test_missing_untied_head_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    model = copy_with_config(tiny_model("llama", **SIZES), tmp_path, tie_word_embeddings=False)
    assert "Missing 1 parameters: lm_head.weight" in conversion_error(model, tmp_path)


@pytest.fixture
def no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets conversions skip the graph, whose writing takes most of their time."""

    def write(layout: PackageLayout, weights: object, directory: Path, progress: object) -> None:
        for path in (MODEL_PATH, WEIGHTS_PATH):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).touch()

    monkeypatch.setattr(converter, "_write_mlpackage", write)


@pytest.mark.usefixtures("no_graph")
def test_tied_head_that_is_stored_twice_is_accepted(tiny_model: Model, tmp_path: Path) -> None:
    model = copy_with_config(tiny_model("llama", **SIZES), tmp_path)
    change_weights(model, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert convert(model, tmp_path / "package", *SHORT).layout.architecture.tied


@pytest.mark.usefixtures("no_graph")
def test_bfloat16_becomes_float16(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("qwen3", **SIZES, dtype="bfloat16")
    convert(model, tmp_path / "package", *SHORT)
    found, expected = np.load(tmp_path / "package" / EMBEDDING_FILE), load_model(model)[0].model.embed_tokens.weight
    assert found.dtype == np.float16 and (found == np.array(expected.astype(mx.float16))).all()


@pytest.mark.parametrize("bad", [1e5, np.inf, np.nan])
def test_weights_beyond_float16_are_refused(tiny_model: Model, tmp_path: Path, bad: float) -> None:
    model = copy_with_config(tiny_model("llama", **SIZES), tmp_path)

    def spoil(tensors: dict[str, mx.array]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = bad

    message = conversion_error(change_weights(model, spoil), tmp_path)
    assert "model.layers.1.mlp.up_proj has values" in message and "65504" in message


def test_directory_without_a_model_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    assert "is not a model folder: expected a config.json" in conversion_error(tmp_path / "nowhere", tmp_path)
    model = tmp_path / "empty"
    model.mkdir()
    assert "is not a model folder: expected a config.json" in conversion_error(model, tmp_path)
    (model / "config.json").write_text((tiny_model("llama", **SIZES) / "config.json").read_text())
    assert "has no weights: expected model*.safetensors" in conversion_error(model, tmp_path)


def test_invalid_or_incomplete_config_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    model = copy_with_config(tiny_model("llama", **SIZES), tmp_path, drop=("hidden_size",))
    assert "config.json of this llama model is incomplete (KeyError('hidden_size'))" in conversion_error(
        model, tmp_path
    )
    (model / "config.json").write_text("{")
    assert "can't be read as JSON" in conversion_error(model, tmp_path)


def test_weights_that_do_not_match_the_config_are_refused(tiny_model: Model, tmp_path: Path) -> None:
    model = copy_with_config(tiny_model("llama", **SIZES), tmp_path, num_hidden_layers=3)
    assert "can't be loaded" in conversion_error(model, tmp_path)


def test_truncated_checkpoint_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    model = copy_with_config(tiny_model("llama", **SIZES), tmp_path)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    assert "can't be loaded" in conversion_error(model, tmp_path)


def test_context_that_a_package_cannot_have_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    long, short = (tiny_model("llama", **SIZES, max_position_embeddings=most) for most in (10**6, 128))
    for context in (8, 16193):
        assert f"context is {context}; expected 64 to 16192" in conversion_error(long, tmp_path, context)
    assert "context is 256; expected 64 to 128 tokens" in conversion_error(short, tmp_path, 256)


def test_existing_destination_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidRequest, match="already exists"):
        convert(tiny_model("llama", **SIZES), tmp_path / "mine", *SHORT)


def test_path_that_cannot_be_looked_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't be written \(File name too long\); .* choose another folder"):
        convert(tmp_path, tmp_path / ("x" * 300), *SHORT)


@pytest.mark.parametrize("step", ["weights", "package"])
def test_disk_that_fills_up_while_converting_leaves_no_files(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Numpy and coremltools' C++ writer raise different errors."""
    if step == "weights":
        monkeypatch.setattr(np, "save", _raise(OSError(errno.ENOSPC, "No space left on device")))
        expected = "No space left on device"
    else:
        utils = import_coremltools().utils
        monkeypatch.setattr(utils, "save_spec", _raise(RuntimeError("[MIL FileWriter]: Unknown error")))
        expected = "MIL FileWriter"
    assert expected in conversion_error(tiny_model("llama", **SIZES), tmp_path)


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


@pytest.fixture
def package_copy(converted: Callable[..., Converted], tmp_path: Path) -> Path:
    """A copy of a package, which a test may damage."""
    return Path(shutil.copytree(converted("llama").package.path, tmp_path / "package_copy"))


def open_error(directory: Path, source: Path | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        open_package(directory, source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_package_of_other_weights_than_the_draft_is_refused(package_copy: Path, tiny_model: Model) -> None:
    message = open_error(package_copy, tiny_model("llama", seed=5, **SIZES))
    assert "was made from llama-" in message and "other weights than" in message


@pytest.mark.parametrize("file", [EMBEDDING_FILE, EXPECTED_FILE, str(WEIGHTS_PATH), str(MODEL_PATH)])
def test_changed_or_missing_package_file_is_refused(package_copy: Path, file: str) -> None:
    data = bytearray((package_copy / file).read_bytes())
    data[-1] ^= 1
    (package_copy / file).write_bytes(data)
    assert "is not the file its manifest names; convert the model again" in open_error(package_copy)
    (package_copy / file).unlink()
    assert f"lacks {file}" in open_error(package_copy)


def test_manifest_with_unknown_values_is_refused(package_copy: Path) -> None:
    file = package_copy / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["layout"] |= {"context": "long"}
    file.write_text(json.dumps(manifest))
    assert "is not a manifest" in open_error(package_copy)


def test_invalid_or_missing_manifest_is_refused(package_copy: Path, tmp_path: Path) -> None:
    file = package_copy / "manifest.json"
    file.write_text('{"format": 99}')
    assert "has format 99; this version reads 5" in open_error(package_copy)
    file.write_text("[]")
    assert "has format None" in open_error(package_copy)
    file.write_text("{")
    assert "is not a converted model" in open_error(package_copy)
    assert "is not a converted model" in open_error(tmp_path / "nowhere")
