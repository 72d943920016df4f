"""Training a tiny pair end to end: the command, its files, and continuing after an interruption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from models import evaluate, train, training
from models.training import tokenizer
from models.training.recipe import Phase, Shape

SHORT = ["--preset", "toy", "--target-tokens", "40960", "--draft-tokens", "10240"]
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="training needs PyTorch (the extra `train`)")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair made by the command, without a stop."""
    torch = pytest.importorskip("torch", reason="training needs PyTorch (the extra `train`)")
    torch.set_num_threads(1)  # equal sums in every run, whatever else the machine does
    out = tmp_path_factory.mktemp("trained") / "pair"
    assert train.main(["--out", str(out), *SHORT]) == 0
    return out


def test_the_command_writes_two_models_and_a_record_and_nothing_else(pair: Path) -> None:
    assert {entry.name for entry in pair.parent.iterdir()} == {"pair"}
    assert {entry.name for entry in pair.iterdir()} == {"target", "draft", "training.json"}
    assert {entry.name for entry in (pair / "target").iterdir()} == FILES
    assert {entry.name for entry in (pair / "draft").iterdir()} == FILES
    record = json.loads((pair / "training.json").read_text())
    assert record["target"]["held_out_loss"] < np.log(512) - 1  # it has learned more than nothing
    assert len(record["held_out"]) == 4


def test_mlx_lm_loads_both_models_and_generates(pair: Path) -> None:
    for role in ("target", "draft"):
        model, words = mlx_lm.load(str(pair / role))
        assert len(mlx_lm.generate(model, words, prompt="def f(", max_tokens=8)) > 0


def test_evaluate_finds_the_loss_that_training_recorded(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--pair", str(pair), "--context", "128", "--tokens", "65536"]) == 0
    shown = {line[:28].strip(): float(line[28:].split()[0]) for line in capsys.readouterr().out.splitlines()[1:]}
    record = json.loads((pair / "training.json").read_text())
    for role in ("target", "draft"):
        assert shown[f"{role} loss, nats per token"] == pytest.approx(record[role]["held_out_loss"], abs=0.05)


@pytest.mark.parametrize("stage", ["teacher", "distill"])
def test_stopped_run_leaves_no_pair_and_resumes_to_the_same_one(
    stage: str, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from models.training import pipeline, teacher

    out = tmp_path / "pair"
    with monkeypatch.context() as patch:
        if stage == "teacher":
            patch.setattr(teacher.TeacherCache, "_write", stop)
        else:
            patch.setattr(pipeline, "kl_to_teacher", stop)
        assert train.main(["--out", str(out), *SHORT]) == 130
    assert "stopped; the same command continues" in capsys.readouterr().err
    assert not out.exists()
    assert train.main(["--out", str(out), *SHORT]) == 0
    assert "target, windows of 64" not in capsys.readouterr().err  # the target was done
    for role in ("target", "draft"):
        ours, theirs = (mx.load(str(folder / role / "model.safetensors")) for folder in (out, pair))
        assert all(mx.array_equal(ours[name], theirs[name]).item() for name in theirs)


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_interrupted_loop_ends_with_the_weights_of_an_unbroken_one(torch: Any, tmp_path: Path) -> None:
    from models.training.loop import Loop

    phases = (Phase(tokens=40, length=2, rate=0.1), Phase(tokens=20, length=4, rate=0.01))

    def trained(checkpoint: Path, stop_at: int | None) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        calls = []

        def loss_of(draws: Any) -> Any:
            calls.append(draws)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            value = torch.full((1, 3), 1.0 + draws.first + 10 * draws.phase)
            return model(value).square().mean()

        Loop("toy", model, phases, batch_tokens=4).run(loss_of, checkpoint, period_s=0)
        return model.weight.detach()

    expected = trained(tmp_path / "whole.pt", None)
    for stop_at in (1, 7, 12):
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / f"{stop_at}.pt", stop_at)
        assert torch.equal(trained(tmp_path / f"{stop_at}.pt", None), expected)


def test_tokens_are_sampled_by_their_probabilities_at_each_temperature(torch: Any) -> None:
    from models.training.llama import sample

    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, 1.9])
    temps = torch.tensor([0.0, 0.8, 1.5]).repeat_interleave(20_000)
    tokens = sample(logits.repeat(len(temps), 1), temps, torch.Generator().manual_seed(0))
    cold, *warm = tokens.view(3, -1)
    assert (cold == 0).all()
    for temp, drawn in zip((0.8, 1.5), warm, strict=True):
        shares = torch.bincount(drawn, minlength=5) / len(drawn)
        assert torch.allclose(shares, (logits / temp).softmax(-1), atol=0.02)


def test_the_exported_model_computes_as_the_trained_one(torch: Any, tmp_path: Path) -> None:
    from models.training.export import write_model
    from models.training.llama import Llama

    shape = Shape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=96, vocab=300, context=32)
    model = Llama(shape, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).copy_(parameter.half().float())  # far from flat, and exact in float16
    write_model(tmp_path / "model", model, tokenizer.train(["def f(): pass\n" * 50], 257))
    tokens = np.random.default_rng(0).integers(0, 300, (2, 32))
    opened = mlx_lm.load(str(tmp_path / "model"))[0]
    opened.set_dtype(mx.float32)
    expected = model(torch.from_numpy(tokens)).detach().numpy()
    assert np.abs(expected).max() > 1
    assert np.abs(np.array(opened(mx.array(tokens))) - expected).max() < 1e-3


def test_missing_pytorch_is_reported_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "models.training.pipeline", raising=False)
    monkeypatch.delattr(training, "pipeline", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert train.main(["--out", str(tmp_path / "pair")]) == 1
    assert capsys.readouterr().err.startswith("train: training needs torch, which is not installed; run: pip install")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--preset", "huge"], "unknown preset 'huge'"),
        (["--target-tokens", "0"], "the target needs at least one batch"),
        (["--seed", "-1"], "the seed must lie between"),
        (["--batch-tokens", "7"], "a batch must have between"),
    ],
)
def test_invalid_settings_are_a_one_line_error(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--out", str(tmp_path / "pair"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert sentence in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_layers_that_is_none_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--out", "x", "--draft", "--layers", "first"])
    sentence = capsys.readouterr().err
    assert "'first' is not a list of layers; expected numbers like 0,1,-1" in sentence and sentence.count("\n") == 1


def test_unusable_folders_are_a_one_line_error(torch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--out", str(tmp_path / "pair"), "--extra-dir", str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err == f"train: {tmp_path / 'gone'} is not a folder; expected a folder with .py files\n"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    assert train.main(["--out", str(tmp_path / "full")]) == 2
    assert "exists already" in capsys.readouterr().err
