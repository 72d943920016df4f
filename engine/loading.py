"""Loads a model from a directory, ready to compute, without its tokenizer.

Chooses the number format: on a GPU as stored; on a CPU as stored if ONNX Runtime computes (`engine.ort`), else float32,
because MLX is 20 to 80 times slower there in half precision or 4 bits. Every failure is a `ModelError` of one sentence.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, get_total_parameters, load_model

from outrider.engine import memory
from outrider.engine.cache import flatten_caches, is_attention
from outrider.engine.flat import patch_ropes
from outrider.engine.hidden_states import ReducedLMHead
from outrider.engine.ort.check import open_forward
from outrider.engine.ort.forward import OrtForward
from outrider.protocol.digest import read_json
from outrider.protocol.errors import ModelError, first_line, wrap_model_errors
from outrider.protocol.heads import context_length
from outrider.protocol.process import physical_memory

if TYPE_CHECKING:
    from outrider.engine.ranks import Ranks

log = logging.getLogger(__name__)

_MLX_THREADS = 8  # four read weights, one computes; the rest is a margin


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory. `vocab_size`: the width of its logits, including padding; `weight_bytes`: as held now.

    `attention_only`: its only state is keys and values, so any token can be rolled back or masked out. `folder`: the
    folder it was read from, if any. `cpu`: computes its forwards; None: MLX does.
    """

    model: nn.Module
    config: dict[str, Any]
    model_type: str
    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    attention_only: bool
    folder: Path | None = None
    cpu: OrtForward | None = None

    @property
    def number_format(self) -> str:
        """MLX's name for the format of its first weight that is not quantised.

        If activations are rounded, the name of the CPU's kernels, because the bits depend on them.
        """
        if self.cpu is not None and self.cpu.quantised:
            return self.cpu.number_format
        weights = (value.dtype for _, value in tree_flatten(self.model.parameters()))
        found = next((dtype for dtype in weights if mx.issubdtype(dtype, mx.floating)), mx.float32)
        return str(found).removeprefix("mlx.core.")


def load(
    name: str | Path,
    *,
    progress: Callable[[str], None] | None = None,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Loads a model from a directory.

    With `ranks` each rank loads its part, and `weight_bytes` counts this part.

    Raises:
        ModelError: there is no such directory, it holds no model, or mlx-lm does not have its architecture.
    """
    report = progress or log.info
    path = Path(name)
    report(f"loading {name}")
    _require_threads()
    model, config = read_model(path)
    parameters = get_total_parameters(model)
    forward = None
    if mx.default_device().type == mx.cpu:
        model.set_dtype(mx.float32)
        forward = open_forward(model, config, path) if ranks is None else None
        if forward is not None:
            model.update(read_model(path)[0].parameters())  # MLX's weights stay in their files until they are used
            model.set_dtype(mx.float32)
            memory.release_memory()  # memory that only the session's creation needed
        else:
            report("converting to float32")
            model = _to_float32(model, parameters)
    if ranks is not None:
        ranks.shard_model(model, config["model_type"])
    weight_bytes = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    patch_ropes(model)
    memory.set_limits(weight_bytes)
    if forward is None:
        mx.eval(model.parameters())
        report("warming up")
        among = f", sharded over {ranks.size} ranks," if ranks is not None else ""
        with wrap_model_errors(f"a forward of this {config['model_type']} model{among}"):
            _warm_up(model)
    return _make_loaded_model(path, model, config, parameters, weight_bytes, forward)


def _require_threads() -> None:
    """Checks that MLX can start its threads: if only some of them start, it waits without end. Raises ModelError."""
    done = threading.Event()
    with ThreadPoolExecutor(_MLX_THREADS) as pool:
        try:
            for _ in range(_MLX_THREADS):
                pool.submit(done.wait)
        except RuntimeError as error:
            raise ModelError(
                f"MLX can't start its threads ({error}): allow this process more memory (ulimit -v) or threads"
                " (ulimit -u)"
            ) from error
        finally:
            done.set()


def load_lazily(name: str | Path) -> LoadedModel:
    """Returns the model with its weights left in their files until they are used. Raises ModelError as `load` does."""
    path = Path(name)
    model, config = read_model(path)
    parameters = get_total_parameters(model)
    if mx.default_device().type == mx.cpu:
        model = _to_float32(model, parameters)
    return _make_loaded_model(path, model, config, parameters, 0, None)


def _make_loaded_model(
    path: Path, model: nn.Module, config: dict[str, Any], parameters: int, weight_bytes: int, cpu: OrtForward | None
) -> LoadedModel:
    return LoadedModel(
        model=model,
        config=config,
        model_type=config["model_type"],
        vocab_size=cpu.vocab_size if cpu is not None else model(mx.array([[0]])).shape[-1],  # lazy: only a shape
        context_length=context_length(config),
        parameters=parameters,
        weight_bytes=weight_bytes,
        attention_only=all(is_attention(leaf) for cache in make_prompt_cache(model) for leaf in flatten_caches(cache)),
        folder=path,
        cpu=cpu,
    )


def read_config(path: Path) -> dict[str, Any]:
    """Returns the config.json of a model folder. Raises ModelError if there is none, or it can't be a model's."""
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} is not a model folder: expected a config.json with a model_type in it")
    return config


def read_model(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model of a folder, whose weights are not read yet, and its config. Raises ModelError."""
    config = read_config(path)
    if "model_file" in config:
        raise ModelError(f"{path} needs code of its own ({config['model_file']}), which is not run; choose another")
    try:
        changed = flat_rope_fields(config)
        if isinstance(text := config.get("text_config"), dict):
            changed["text_config"] = text | flat_rope_fields(text)
        own = {"get_model_classes": _make_reduced_llama} if "draft_vocab_size" in config else {}
        model, config = load_model(path, lazy=True, model_config=changed, **own)
    except FileNotFoundError as error:
        raise ModelError(f"{path} has no weights: expected model*.safetensors next to config.json") from error
    except MemoryError:
        raise
    except Exception as error:  # mlx-lm has a file of code for each model type, which may raise anything
        reason = first_line(error)
        if reason.startswith("Model type"):
            raise ModelError(f"{path}: mlx-lm has no model type {config['model_type']!r}; choose another") from error
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        advice = "download it again, or choose another model"
        if "quantization" not in config and isinstance(foreign := config.get("quantization_config"), dict):
            kind = foreign.get("quant_method", "an unknown method")
            advice = f"its weights are quantised by {kind}: choose this model in MLX format, or not quantised"
        raise ModelError(f"{path} can't be loaded as {config['model_type']}: {reason}; {advice}") from error
    except SystemExit as error:  # mlx-lm's OLMo ends the process if a library of its own is missing
        raise ModelError(
            f"{path}: mlx-lm's {config['model_type']} needs a library that is not installed; see stderr for its name"
        ) from error
    return model, config


def flat_rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that transformers 5 writes into `rope_parameters`, under the names that most of mlx-lm's
    models read. They would otherwise use their default base, without an error."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    main, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    kind = main.get("rope_type") or main.get("type") or "default"
    fields = {
        "rope_theta": main.get("rope_theta"),
        "rope_local_base_freq": local.get("rope_theta"),
        "partial_rotary_factor": main.get("partial_rotary_factor"),
    }
    found = {name: value for name, value in fields.items() if value is not None}
    found["rope_scaling"] = {**main, "type": kind} if kind != "default" else None  # some models require the field
    return {name: value for name, value in found.items() if config.get(name) is None}


def _make_reduced_llama(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Returns the classes of a Llama with an output layer of `draft_vocab_size` tokens; `d2t` has their ids, as in
    EAGLE-3's heads. Raises ValueError if the config describes another model."""
    count: int = config["draft_vocab_size"]
    size: int = config.get("vocab_size", 0)
    expected = f"expected a llama with draft_vocab_size from 1 to its vocab_size, {size}; not {count}"
    numbers = isinstance(count, int) and isinstance(size, int)
    if config["model_type"] != "llama" or not numbers or not 0 < count <= size:
        raise ValueError(expected)

    class Reduced(llama.Model):  # type: ignore[misc]
        def __init__(self, args: llama.ModelArgs) -> None:
            super().__init__(args)
            self.lm_head = ReducedLMHead(args.hidden_size, count, size)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = super().sanitize(weights)
            offsets = weights.pop("d2t", None)
            if offsets is None or offsets.shape != (count,):
                raise ValueError(f"expected a tensor d2t of {count} offsets to the tokens that it can draft")
            tokens = mx.arange(count) + offsets.astype(mx.int32)
            if mx.any((tokens < 0) | (tokens >= size)).item():
                raise ValueError(f"d2t has tokens outside the vocabulary of {size}")
            moved = {key.replace("lm_head.", "lm_head.rows."): value for key, value in weights.items()}
            return moved | {"lm_head.tokens": tokens}

    return Reduced, llama.ModelArgs


def _to_float32(model: nn.Module, parameters: int) -> nn.Module:
    """Converts scales first, then dequantises: dequantising in float16 would round the weights."""
    model.set_dtype(mx.float32)
    quantised = any(hasattr(module, "bits") and hasattr(module, "scales") for module in model.modules())
    if not quantised:
        return model
    dense_bytes, physical = 4 * parameters, physical_memory()
    if dense_bytes > physical // 2:
        log.warning(
            "the model stays quantised, because dense float32 weights would take %.1f of the memory's %.1f GiB; so "
            "verifying M tokens takes M times as long as one",
            dense_bytes / 2**30,
            physical / 2**30,
        )
        return model
    model = dequantize_model(model)
    model.set_dtype(mx.float32)  # weights in small floats (mxfp4, nvfp4, mxfp8) have become bfloat16, exactly
    return model


def _warm_up(model: nn.Module) -> None:
    """Runs a forward of one token and one of two: the first of each shape compiles kernels, which may take seconds.

    On a CPU MLX compiles with g++ if there is one. A g++ that fails would otherwise raise in the middle of a request.
    """
    try:
        _forward_once(model)
    except RuntimeError as error:
        log.warning("Metal kernels can't be compiled (%s); continuing without them, slightly slower", first_line(error))
        os.environ["MLX_DISABLE_COMPILE"] = "1"
        mx.disable_compile()
        _forward_once(model)


def _forward_once(model: nn.Module) -> None:
    for text in ([[0]], [[0, 0]]):
        mx.eval(model(mx.array(text), cache=make_prompt_cache(model)))
