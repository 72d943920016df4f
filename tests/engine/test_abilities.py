"""A model's abilities as a target are found by trials; the page of model types lists the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from outrider.engine.cache import FlatSequence
from outrider.engine.flat import FlatCache
from outrider.engine.load_checks import find_tree_form, probe_abilities
from outrider.engine.loading import LoadedModel, load
from outrider.protocol.errors import CannotDraft, ModelError
from tests.harness.model_configs import WINDOW, config_of, model_types
from tests.harness.tiny_models import write_model
from tools.model_types import FAILED, SPECULATES, WRONG, ModelTypeRow, merge_rows, try_model_type

Loaded = Callable[..., LoadedModel]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = PAGE.read_text().partition("<!-- python -m tools.model_types")[2]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| `")]
# Plain, shared keys, chunked attention, compressed keys, two caches per layer, a window that is not mlx-lm's own,
# recurrent, and recurrent with attention.
SAMPLE = (
    "llama", "gemma3n", "afm7", "llama4", "deepseek_v3", "deepseek_v32", "deepseek_v41", "plamo3", "mamba2",
    "falcon_h1",
)  # fmt: skip
TIED_BY_HAND = ("llama4_text", "seed_oss")  # their code multiplies by the embedding weights directly


def test_models_page_lists_every_type_and_none_as_wrong() -> None:
    assert sorted({line.split("`")[1] for line in ROWS}) == model_types()
    assert not {WRONG, FAILED} & {line.split(" | ")[2] for line in ROWS}


TRIED = [*((name, False) for name in SAMPLE), *((name, True) for name in TIED_BY_HAND)]


@pytest.mark.parametrize(("name", "tied"), TRIED)
def test_examined_type_matches_its_row_on_the_models_page(
    name: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.model_types._NEW_TOKENS", 3 * WINDOW // 2)  # the prompt is longer than the window, too
    row = try_model_type(name, tied)
    assert row.target not in (WRONG, FAILED), row.why
    lines = [replace(row, tied=which, why="").line.removesuffix(" |") for which in (tied, None)]
    assert [line for line in ROWS if line.startswith(tuple(lines))]


def test_failed_trial_of_a_type_becomes_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: LoadedModel) -> None:
        raise AttributeError("no attribute 'weight'")

    monkeypatch.setattr("tools.model_types.open_kv_cache", fails)
    row = try_model_type("llama", tied=True)
    assert row.target == FAILED and "no attribute 'weight'" in row.why


def test_equal_rows_of_a_tied_and_untied_type_are_merged() -> None:
    rows = [ModelTypeRow(name, tied, SPECULATES) for name in "ab" for tied in (True, False)]
    rows[2] = replace(rows[2], target=FAILED)
    assert merge_rows(rows) == [ModelTypeRow("a", None, SPECULATES), *rows[2:]]


def without_ort(model: LoadedModel) -> LoadedModel:
    """A copy of the model that MLX computes and that has not been probed yet."""
    return replace(model, cpu=None)


@pytest.fixture
def loaded(tiny_model: Callable[..., Path]) -> Loaded:
    """Like the shared `loaded`, but loads the model again for each call."""
    return lambda family="llama", seed=0, **config: load(tiny_model(family, seed, **config))


@pytest.fixture(autouse=True)
def mlx_forwards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets MLX compute every model; ONNX Runtime's forwards have a check of their own."""
    monkeypatch.setattr("outrider.engine.loading.open_forward", lambda *_: None)


@pytest.mark.parametrize("window", [32, 700])
def test_cache_that_is_wrong_only_past_the_window_is_detected(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    model = loaded("gemma3_text", sliding_window=window)
    assert probe_abilities(without_ort(model)).chains

    sound = FlatCache.make_mask

    def mask_one_column_wider(
        cache: FlatCache, n: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        return sound(cache, n, return_array, window_size and window_size + 1)

    monkeypatch.setattr(FlatCache, "make_mask", mask_one_column_wider)
    assert "past its window" in probe_abilities(without_ort(model)).why


def test_sharp_attention_past_a_window_does_not_look_like_an_error(loaded: Loaded) -> None:
    """Gemma 3 gives most attention to few tokens; with keys unlike its own, it would amplify rounding errors."""
    model = loaded("gemma3_text", num_hidden_layers=12)
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight = 6 * (1 + norm.weight) - 1
    assert probe_abilities(without_ort(model)).chains


def test_rollback_that_drops_too_little_is_detected(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sound = loaded("llama"), FlatSequence.roll_back
    monkeypatch.setattr(FlatSequence, "roll_back", lambda kv, length: sound(kv, length + 1))
    assert not probe_abilities(without_ort(model)).chains

    monkeypatch.setattr(FlatSequence, "roll_back", lambda kv, length: None)
    found = probe_abilities(without_ort(model))
    assert not found.chains
    assert found.why.startswith("a llama model can't verify several tokens at once (")


class Broken(nn.Module):  # type: ignore[misc]
    """A model whose forward returns logits with the given value, or raises the given exception."""

    def __init__(self, what: Exception | float) -> None:
        super().__init__()
        self._what = what
        self.layers: list[nn.Module] = []

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if isinstance(self._what, Exception):
            raise self._what
        return mx.full((*tokens.shape, 300), self._what)


@pytest.mark.parametrize("what", [AttributeError("no offset"), TypeError("unexpected 'scale'"), KeyError("x"), mx.nan])
def test_model_that_cannot_decode_is_refused_with_a_reason(loaded: Loaded, what: Exception | float) -> None:
    broken = replace(loaded("llama"), model=Broken(what))
    with pytest.raises(ModelError, match="of this llama model"):
        probe_abilities(broken)


def test_model_whose_warm_up_fails_is_refused_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path, config_of("llama"))

    def fails(model: nn.Module) -> None:
        raise TypeError("'scale' is not expected")

    monkeypatch.setattr("outrider.engine.loading._forward_once", fails)
    with pytest.raises(ModelError, match="a forward of this llama model failed: TypeError: 'scale'"):
        load(path)


def test_model_without_a_working_tree_form_is_refused_as_draft(loaded: Loaded) -> None:
    with pytest.raises(CannotDraft, match="a llama model can't be a draft model"):
        find_tree_form(replace(loaded("llama"), model=Broken(ValueError("shapes"))))


def test_wrapped_rope_exposes_the_attributes_that_models_read(loaded: Loaded) -> None:
    rope = loaded("llama").model.layers[0].self_attn.rope
    assert rope.base == 10000.0 and rope.dims == 16
    with pytest.raises(AttributeError):
        _ = rope.nothing
