"""Models load ready to compute, and anything else is refused in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_model

from outrider.drafters.heads.checkpoint import HeadTarget
from outrider.engine import memory
from outrider.engine.loading import flat_rope_fields, load
from outrider.protocol.errors import ModelError
from outrider.protocol.worker_link import CPU_KERNELS_VARIABLE
from tests.tiny import HYBRIDS, VOCAB_SIZE

TinyModel = Callable[..., Path]


def test_loaded_model_reports_its_type_sizes_and_progress(tiny_model: TinyModel) -> None:
    stages: list[str] = []
    loaded = load(tiny_model("llama", max_position_embeddings=96), progress=stages.append)
    assert (loaded.model_type, loaded.vocab_size, loaded.context_length) == ("llama", VOCAB_SIZE, 96)
    assert loaded.parameters == sum(v.size for _, v in tree_flatten(loaded.model.parameters()))
    assert loaded.weight_bytes == 4 * loaded.parameters
    assert loaded.attention_only
    assert stages


def test_load_is_refused_where_mlx_can_not_start_its_threads(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise MLX would wait forever for the threads that did start."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(ModelError, match=r"MLX can't start its threads .*\(ulimit -v\).*\(ulimit -u\)"):
        load(tiny_model("llama"))
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_models_are_not_attention_only(tiny_model: TinyModel, family: str) -> None:
    assert not load(tiny_model(family)).attention_only


def test_vocab_size_is_the_padded_width_of_the_logits(tiny_model: TinyModel) -> None:
    assert load(tiny_model("mistral", vocab_size=272)).vocab_size == 272


def test_half_precision_is_computed_in_float32_on_a_cpu(tiny_model: TinyModel) -> None:
    loaded = load(tiny_model("llama", dtype="float16"))
    assert {value.dtype for _, value in tree_flatten(loaded.model.parameters())} == {mx.float32}


def test_quantised_weights_become_dense_float32_for_mlx_on_a_cpu(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, "mlx")
    source = tiny_model("llama", dtype="float16")
    model, config = load_model(source)
    model, config = quantize_model(model, config, 32, 4)
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path)
    linear = loaded.model.layers[0].self_attn.q_proj
    assert type(linear) is nn.Linear
    assert linear.weight.dtype == mx.float32
    packed = model.layers[0].self_attn.q_proj
    exact = mx.dequantize(packed.weight, packed.scales.astype(mx.float32), packed.biases.astype(mx.float32), 32, 4)
    assert mx.array_equal(linear.weight, exact)
    text = mx.array([[5, 6, 7, 8]])
    model.set_dtype(mx.float32)
    np.testing.assert_allclose(np.array(loaded.model(text)), np.array(model(text)), atol=1e-3)
    assert loaded.parameters == load(source).parameters
    monkeypatch.setattr("outrider.engine.loading.physical_memory", lambda: 8 * loaded.parameters - 2)
    assert type(load(tmp_path).model.layers[0].self_attn.q_proj) is nn.QuantizedLinear


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_weights_in_small_floats_become_dense_float32_on_a_cpu(
    tiny_model: TinyModel, tmp_path: Path, mode: str, bits: int, group_size: int
) -> None:
    """mlx-lm dequantizes them to bfloat16, in which a CPU is many times slower."""
    model, config = load_model(tiny_model("llama", dtype="bfloat16"))
    model, config = quantize_model(model, config, group_size, bits, mode)
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path)
    assert {value.dtype for _, value in tree_flatten(loaded.model.parameters())} == {mx.float32}
    text = mx.array([[5, 6, 7, 8]])
    model.set_dtype(mx.float32)
    np.testing.assert_allclose(np.array(loaded.model(text)), np.array(model(text)), atol=1e-3)


_SCALED = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED |= {"original_max_position_embeddings": 64}
_PARTIAL = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("family", "outer", "before", "rope"),
    [
        ("llama", None, {"rope_theta": 500.0, "rope_scaling": _SCALED}, {"rope_theta": 500.0, **_SCALED}),
        ("phi3", None, _PARTIAL, _PARTIAL),
        (
            "gemma3_text",
            "gemma3",
            {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {
                "full_attention": {"rope_theta": 500.0, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
            },
        ),
    ],
)
def test_positions_of_a_config_of_transformers_5_are_read(
    tiny_model: TinyModel, tmp_path: Path, family: str, outer: str | None, before: dict[str, Any], rope: dict[str, Any]
) -> None:
    source = tiny_model(family, **before)
    config = json.loads((source / "config.json").read_text())
    weights = mx.load(str(source / "model.safetensors"))
    config = {key: value for key, value in config.items() if key not in before} | {"rope_parameters": rope}
    if outer is not None:
        config = {"model_type": outer, "vocab_size": VOCAB_SIZE, "text_config": config}
        weights = {f"language_model.{key}": value for key, value in weights.items()}  # type: ignore[union-attr]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = mx.array([list(range(5, 45))])
    np.testing.assert_array_equal(np.array(load(tmp_path).model(text)), np.array(load(source).model(text)))


def test_absent_scaling_is_given_to_models_that_require_the_field() -> None:
    """Such as GLM-4.5 and EXAONE 4."""
    saved = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert flat_rope_fields(saved) == {"rope_theta": 5e5, "rope_scaling": None}
    assert flat_rope_fields({**saved, "rope_theta": 1e4}) == {"rope_scaling": None}
    assert flat_rope_fields({"rope_theta": 1e4}) == {}


@pytest.mark.parametrize("where", ["nowhere", "/nowhere/at/all"])
def test_missing_model_is_refused_in_one_line(where: str) -> None:
    with pytest.raises(ModelError, match=f"{where} is not a model folder") as caught:
        load(where)
    assert "\n" not in str(caught.value)


def damaged_copy(source: Path, tmp_path: Path, name: str) -> Path:
    """Copies a model folder and damages it in the way that `name` says."""
    path = tmp_path / name
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    match name:
        case "no-config":
            (path / "config.json").unlink()
        case "no-weights":
            (path / "model.safetensors").unlink()
        case "bad-json":
            (path / "config.json").write_text("{")
        case "no-type":
            (path / "config.json").write_text("{}")
        case "strange-type":
            (path / "config.json").write_text(json.dumps({**config, "model_type": "frobnicator"}))
        case "half-config":
            del config["hidden_size"]
            (path / "config.json").write_text(json.dumps(config))
        case "other-shape":
            (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
        case "no-heads":
            (path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
        case "other-quantization":
            config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
            (path / "config.json").write_text(json.dumps(config))
        case "odd-bits":
            odd = {"group_size": 32, "bits": 7}
            config["quantization"] = {**odd, "model.layers.0.self_attn.q_proj": odd}
            (path / "config.json").write_text(json.dumps(config))
        case "own-code":
            (path / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
        case "half-rope":
            config["rope_scaling"] = {"rope_type": "llama3"}
            (path / "config.json").write_text(json.dumps(config))
        case "truncated":
            (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:100])
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no-config", "is not a model folder"),
        ("no-weights", "has no weights"),
        ("bad-json", "can't be read as JSON"),
        ("no-type", "is not a model folder"),
        ("strange-type", "no model type 'frobnicator'"),
        ("half-config", "can't be loaded as llama"),
        ("other-shape", r"as llama: Missing 18 parameters: model\.layers\.3\.\S+\w; download it again"),
        ("no-heads", "can't be loaded as llama"),
        ("other-quantization", "as llama: .*; its weights are quantised by gptq: choose this model in MLX format"),
        ("odd-bits", "as llama: .*bits 7 is not supported.*; download it again"),
        ("own-code", r"needs code of its own \(model.py\), which is not run; choose another"),
        ("half-rope", "can't be loaded as llama: 'factor' is missing"),
        ("truncated", "can't be loaded as llama"),
    ],
)
def test_invalid_model_folder_is_refused_in_one_line(
    tiny_model: TinyModel, tmp_path: Path, name: str, expected: str
) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        load(damaged_copy(tiny_model("llama"), tmp_path, name))
    assert "\n" not in str(caught.value)


def test_path_to_a_file_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match="is not a model folder"):
        load(tiny_model("llama") / "config.json")


def test_wired_limit_leaves_room_within_the_recommended_size() -> None:
    small = memory.wired_limit(2**30, 96 * 2**30)
    assert 2**30 < small < 8 * 2**30
    assert memory.wired_limit(95 * 2**30, 96 * 2**30) == 96 * 2**30


def test_text_config_of_another_type_is_ignored(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("llama"), tmp_path / "odd")
    config = json.loads((path / "config.json").read_text())
    config.pop("bos_token_id", None)
    (path / "config.json").write_text(json.dumps({**config, "text_config": "x"}))
    assert HeadTarget.of(load(path)).config["model_type"] == "llama"


@pytest.mark.parametrize("device", [mx.cpu, mx.gpu])
def test_model_loads_on_either_device_of_a_mac(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, device: mx.DeviceType
) -> None:
    """`mx.device_info` describes the default device, but only a GPU reports the size of its working set."""
    limits: list[int] = []
    own = mx.device_info(mx.cpu)
    described = {mx.cpu: own, mx.gpu: {**own, "max_recommended_working_set_size": 2**31}}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda named=device: described[named])
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    assert load(tiny_model("llama")).parameters > 0
    assert limits == [2**31]


@pytest.mark.parametrize("compiler", ["none", "broken"])
def test_model_loads_and_runs_without_a_working_compiler(tiny_model: TinyModel, tmp_path: Path, compiler: str) -> None:
    """MLX compiles small kernels with g++ at run time, which may be missing or broken."""
    (tmp_path / "bin").mkdir()
    if compiler == "broken":
        fake = tmp_path / "bin" / "g++"
        fake.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
        fake.chmod(0o755)
    program = (
        "from outrider.engine.models_only import models_only; models_only()\n"
        "from outrider.engine.loading import load; from tests.slots import open_slots, verify\n"
        "from outrider.protocol.sampling import SamplingParams\n"
        f"model = load({str(tiny_model('llama'))!r})\n"
        "slots = open_slots(model, [[5, 6, 7]], [SamplingParams(temp=1.0, top_p=0.9, min_p=0.01, seed=1)])\n"
        "print(verify(slots[0], [1, 2]).accepted < 3)\n"
    )
    environment = {"PATH": f"{tmp_path / 'bin'}:/bin" if compiler == "broken" else str(tmp_path / "bin")}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
    assert ("can't be compiled" in done.stderr) == (compiler == "broken")
