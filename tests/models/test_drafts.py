"""Training a tiny draft end to end: the target's text, continuing after an interruption, and serving the draft."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, save_config

from models import train
from models.training.recipe import Shape
from outrider.engine.kv_cache import Feed, FlatKVCache
from outrider.engine.loading import load
from outrider.orchestrator.pairing.pulled import assemble_draft
from outrider.protocol.errors import InvalidRequest, ModelError
from tests.models import heads

torch = pytest.importorskip("torch", reason="training needs PyTorch (the extra `train`)")

from safetensors.torch import save  # noqa: E402

from models.training import corpus  # noqa: E402
from models.training.draft import batch_generator, pipeline, prompts, text, trainer  # noqa: E402
from models.training.draft.batch_generator import BatchGenerator, TokensPrompt  # noqa: E402
from models.training.draft.export import read_draft, write_draft  # noqa: E402
from models.training.draft.model import coupled_agreement  # noqa: E402
from models.training.draft.pipeline import DraftRecipe  # noqa: E402
from models.training.draft.store import Sample, Store, StoreIdentity  # noqa: E402
from models.training.draft.text import ChatTokenizer  # noqa: E402
from models.training.draft.trainer import Trainer  # noqa: E402
from models.training.loop import matrix_dtype  # noqa: E402
from models.training.quantise import fake_quantise, pack, quantise  # noqa: E402
from models.training.storage import file_lock  # noqa: E402
from models.training.target import load_shape, load_target  # noqa: E402

CPU = torch.device("cpu")
RECIPE = DraftRecipe(layers=(1,), vocab=160, text_tokens=1500, rate=5e-3, batch_tokens=512, held_out=6)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
FORM = StoreIdentity("target", "text", 0, 4)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Any:
    """Short texts and few of them."""
    torch.set_num_threads(1)
    part = corpus.standard_library() / "email"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda: part)
        patch.setattr(pipeline, "_MIN_TOKENS", 100)
        patch.setattr(pipeline, "_SLOTS", {"cpu": 8})
        patch.setattr(text, "_ANSWER_LIMITS", (8, 24))
        patch.setattr(heads, "TINY", Shape(hidden=64, layers=3, heads=2, kv_heads=1, mlp=96, vocab=300, context=512))
        yield


@pytest.fixture(scope="module")
def target(_small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model in 4 bits, its embedding in 8, as the default target is."""
    whole, folder = heads.write_target(tmp_path_factory.mktemp("whole") / "model"), tmp_path_factory.mktemp("target")
    model, config = load_model(whole)
    eight = {"group_size": 32, "bits": 8}
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda path, m: hasattr(m, "to_quantized") and (eight if "embed" in path else True),
    )
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    quantisation = {"group_size": 32, "bits": 4, "model.embed_tokens": eight}
    save_config(config | {"quantization": quantisation, "quantization_config": quantisation}, folder / "config.json")
    shutil.copy(whole / "tokenizer.json", folder)
    said = json.loads((whole / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def run_folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after 30 steps."""
    folder = tmp_path_factory.mktemp("run")
    _run_until(30, target, folder)
    return folder


@pytest.fixture(scope="module")
def draft(run_folder: Path, target: Path) -> Path:
    """A draft exported while its run can be resumed."""
    pipeline.export(run_folder / "draft", target)
    yield run_folder / "draft"


def _run_until(step: int, target: Path, folder: Path) -> None:
    """Trains as the command does, until a stop at that step."""

    def refresh(samples: Store, done: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_refresh", refresh)
        patch.setattr(trainer, "_EVALUATION_SPACING", 0)
        patch.setattr(pipeline.TrainerConfig, "__init__", _often(pipeline.TrainerConfig.__init__))
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(RECIPE, target, folder / "draft", folder / "store")


def _often(init: Callable[..., None]) -> Callable[..., None]:
    return lambda *args, **more: init(*args, **{**more, "save_s": 0.0, "judge_s": 0.0})


def test_stopped_run_resumes_from_its_last_step(run_folder: Path, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    original = Trainer._step

    def watched(self: Trainer, done: float) -> float:
        seen.append((self.state.step, len(self.state.curve)))
        return original(self, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", watched)
        _run_until(32, target, run_folder)
    assert [step for step, _ in seen] == [30, 31] and seen[0][1] == 30


def test_pauses_of_the_process_do_not_count_as_training(run_folder: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    seconds: list[float] = []
    original = Trainer._batch

    def paused(self: Trainer, step: int) -> Any:
        seconds.append(self.state.seconds)
        time.sleep(0.3)
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_batch", paused)
        _run_until(36, target, tmp_path / "run")
    assert 0 < seconds[-1] - seconds[0] < 0.3 * (len(seconds) - 1)


def test_a_draft_learns_its_targets_distribution(run_folder: Path) -> None:
    curve = json.loads((run_folder / "draft.partial" / "curve.json").read_text())["curve"]
    assert max(coupled for *_, coupled in curve[15:]) > curve[0][3]  # equal choices at T = 0.8


def test_generation_resumes_after_the_last_shard_when_its_writer_was_killed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, model, chat = Store.add, load_target(target, CPU, torch.float32), ChatTokenizer(target)
    asked = prompts.Prompts(text.load_snippets(tmp_path), seed=0)
    tmp_path /= "answers"

    def killed(store: Store, samples: Any) -> None:
        if len(list(tmp_path.glob("shard-*"))) == 2:
            (tmp_path / "shard-00000099.safetensors.new").write_bytes(b"half of a sh")
            raise KeyboardInterrupt
        original(store, samples)

    monkeypatch.setattr(Store, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        text.generate(Store(tmp_path, FORM), model, chat, asked, slots=4, shard=4, is_enough=lambda number: False)
    monkeypatch.setattr(Store, "add", original)
    again = Store(tmp_path, FORM)
    assert len(again.samples) == 8
    begun = again.next_number
    text.generate(again, model, chat, asked, slots=4, shard=4, is_enough=lambda number: number >= begun + 2)
    kept = Store(tmp_path, FORM).samples
    assert {sample.number for sample in kept[8:]} <= {begun, begun + 1} and len(kept) > 8
    assert len({(sample.number, sample.temp) for sample in kept}) == len(kept)


def test_stored_probabilities_of_an_answer_are_the_targets(target: Path) -> None:
    model = load_target(target, CPU, torch.float32)
    token_prompts = [
        TokensPrompt(0, "chat", (0.0, 0.8), list(range(3, 20)), 12),
        TokensPrompt(1, "plain", (), list(range(5, 40)), 0),
        TokensPrompt(2, "code", (0.8,), list(range(60, 70)), 5),
    ]
    waiting = iter(token_prompts)
    found = list(
        BatchGenerator(model, slots=2, length=64, eos=frozenset({0}), top=8, seed=0).samples(
            lambda: next(waiting, None)
        )
    )
    assert sorted((sample.number, sample.temp) for sample in found) == [(0, 0.0), (0, 0.8), (1, 0.0), (2, 0.8)]
    for sample in found:
        with torch.no_grad():
            own = torch.log_softmax(model(sample.tokens[None].long())[0, -len(sample.ids) :], dim=-1)
        assert torch.allclose(own.gather(1, sample.ids.long()), sample.log_probs.float(), atol=0.02)
        if sample.temp == 0 and sample.kind != "plain":
            assert sample.tokens[sample.prompt_length :].tolist() == own.argmax(dim=-1)[:-1].tolist()


def test_an_open_message_is_completed_by_the_target_and_then_answered(target: Path) -> None:
    model, end, follows = load_target(target, CPU, torch.float32), 7, (7, 8, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_generator, "_MAX_MESSAGE_TOKENS", 6)  # if it does not end by itself
        waiting = iter([TokensPrompt(0, "chat", (0.0,), list(range(20, 30)), 5, follows)])
        made = BatchGenerator(model, slots=1, length=64, eos=frozenset({end}), top=8, seed=0)
        (sample,) = made.samples(lambda: next(waiting, None))
    tokens = sample.tokens.tolist()[sample.prompt_length :]
    at = tokens.index(follows[0])
    assert at <= 6 and tuple(tokens[at : at + 3]) == follows
    assert len(sample.ids) == len(tokens) + 1
    with torch.no_grad():
        own = model(sample.tokens[None].long())[0].argmax(dim=-1)[sample.prompt_length - 1 :].tolist()
    assert tokens[at + 3 :] == own[at + 3 : -1]  # the answer is at T = 0


def test_every_other_prompt_leaves_its_message_open(target: Path, tmp_path: Path) -> None:
    asked = prompts.Prompts(text.load_snippets(tmp_path), seed=0)
    made = [asked.get(number) for number in range(204)]
    assert sum(prompt.is_open for prompt in made) == 96  # of the 192 that are answered
    assert {prompt.kind for prompt in made if prompt.is_open} == set(prompts.KINDS)
    token_prompts = [ChatTokenizer(target).tokenize(prompt) for prompt in made]
    assert all(bool(tokens.suffix) == prompt.is_open for tokens, prompt in zip(token_prompts, made, strict=True))
    assert {temp for tokens in token_prompts if tokens.suffix for temp in tokens.temps} == {0.0, 0.8}


def test_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    cut = text.load_snippets(tmp_path)
    assert text.load_snippets(tmp_path) == cut  # as they were kept
    trained, held_out = prompts.Prompts(cut, seed=0), prompts.Prompts(cut, seed=0, held_out=True)
    seen = {trained.get(number).text for number in range(600)}
    asked = [held_out.get(number) for number in range(60)]
    assert not seen & {prompt.text for prompt in asked}
    assert {prompt.kind for prompt in asked} == set(prompts.KINDS)


def test_no_snippet_of_the_training_has_a_held_out_one_in_it_or_is_part_of_one() -> None:
    held_out = next(text for number in range(999) if prompts._is_held_out(text := f"It says the number {number}."))
    trained = [text for number in range(99) if not prompts._is_held_out(text := f"It counts to {number}.")]
    inside = [f"def f({n}):\n    # {held_out.replace(chr(32), chr(10), 2)}" for n in "ab"]
    cut = prompts.Snippets((held_out, *trained), tuple(inside)).split(held_out=False)
    assert cut == prompts.Snippets(tuple(trained), ())


def test_coupled_probability_equals_that_of_shared_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(1, 40, generator=generator)
    draft = target + torch.randn(1, 40, generator=generator)
    noise = -torch.log(-torch.log(torch.rand(100_000, 40, generator=generator).clamp(min=1e-9)))
    equal = ((target / 0.8 + noise).argmax(-1) == (draft / 0.8 + noise).argmax(-1)).float().mean()
    top = target.topk(32, dim=-1).indices
    found = coupled_agreement(target.log_softmax(-1).gather(1, top), (draft / 0.8).log_softmax(-1).gather(1, top), 0.8)
    assert float(found[0]) == pytest.approx(float(equal), abs=0.01)


def test_packed_4_bit_weights_are_read_correctly_by_mlx() -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    steps, scales, biases = quantise(weight)
    parts = [mx.array(pack(steps).numpy()), mx.array(scales.numpy()), mx.array(biases.numpy())]
    read = np.array(
        mx.dequantize(*(p if p.dtype == mx.uint32 else p.astype(mx.float32) for p in parts), group_size=32, bits=4)
    )
    assert np.allclose(read, fake_quantise(weight).numpy(), atol=1e-5)
    assert torch.equal(fake_quantise(fake_quantise(weight)), fake_quantise(weight))


def test_an_assembled_draft_computes_as_the_trained_one(
    draft: Path, run_folder: Path, target: Path, tmp_path: Path
) -> None:
    assemble_draft(draft, target, tmp_path)
    served = load(tmp_path)
    best = torch.load(run_folder / "draft.partial" / "best.pt", weights_only=True)
    model = pipeline.DraftModel(load_target(target, CPU, torch.float32), (1,), best["outputs"])
    model.load_state_dict(best["mean"], strict=False)
    tokens = [3, 7, 90, 41, 5, 260]
    with torch.no_grad(), model.fake_quantised():
        own = model.logits(model(torch.tensor([tokens])))[0].numpy()
    assert served.vocab_size == 300
    kv_cache = FlatKVCache(served.model)
    said = np.array(kv_cache.forward([Feed(kv_cache.open(), tokens, len(tokens))]), np.float32)
    kept = best["outputs"].numpy()
    assert np.allclose(said[:, kept], own, atol=0.02 * own.std())
    assert np.isneginf(np.delete(said, kept, axis=1)).all()


def _copy_unfinished(run: Path, to: Path) -> None:
    for name in ("draft.partial", "store"):
        shutil.copytree(run / name, to / name)


def test_a_stop_after_an_evaluation_keeps_its_draft_until_a_better_one(
    run_folder: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best draft is written before the checkpoint that knows of it."""
    _copy_unfinished(run_folder, tmp_path / "run")
    path = tmp_path / "run" / "draft.partial" / "best.pt"
    best = torch.load(path, weights_only=True)
    best["progress"]["best"] = 0.99
    torch.save(best, path)
    before = path.read_bytes()
    _run_until(32, target, tmp_path / "run")
    assert path.read_bytes() == before


def test_all_time_of_the_training_counts_as_minutes(
    run_folder: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations, checkpoints and reading new text, too; a GPU is paid for them."""
    _copy_unfinished(run_folder, tmp_path / "run")
    now, steps = [0.0], list[float]()
    original = Trainer._evaluate

    def slow(self: Trainer, loss: float) -> None:
        now[0] += 20.0
        original(self, loss)

    def counted(self: Trainer, done: float) -> float:
        steps.append(done)
        return 0.0

    monkeypatch.setattr(trainer, "clock_of", lambda device: lambda: now[0])
    monkeypatch.setattr(Trainer, "_evaluate", slow)
    monkeypatch.setattr(Trainer, "_step", counted)
    monkeypatch.setattr(trainer, "_EVALUATION_SPACING", 0)
    monkeypatch.setattr(pipeline.TrainerConfig, "__init__", _often(pipeline.TrainerConfig.__init__))
    monkeypatch.setattr(Trainer, "scale_logits", lambda self: None)
    pipeline.run(replace(RECIPE, minutes=2.0), target, tmp_path / "run" / "draft", tmp_path / "run" / "store")
    assert 4 <= len(steps) <= 6  # of 20 seconds each


def test_a_pause_during_generation_takes_no_minutes(tmp_path: Path) -> None:
    timer = pipeline._TextTimer(tmp_path / "text.json", pipeline.clock_of(CPU))
    time.sleep(0.5)
    assert timer.update() < 0.5


def test_stopped_held_out_answers_are_generated_again_as_a_whole(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that end first are short, so a part of them would not represent all."""
    original = BatchGenerator.samples

    def stopped(self: BatchGenerator, next_prompt: Any) -> Any:
        for number, sample in enumerate(original(self, next_prompt)):
            if number == 9:
                raise KeyboardInterrupt
            yield sample

    with monkeypatch.context() as patch:
        patch.setattr(BatchGenerator, "samples", stopped)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(RECIPE, target, tmp_path / "draft", tmp_path / "store", text_only=True)
    assert not (tmp_path / "draft.partial").exists()  # its time is not that of a training
    pipeline.run(replace(RECIPE, minutes=0.0), target, tmp_path / "draft", tmp_path / "store")
    found = list((tmp_path / "store" / "held-out").glob("shard-*"))
    identity = StoreIdentity(**json.loads((tmp_path / "store" / "held-out" / "store.json").read_text()))
    samples = Store(tmp_path / "store" / "held-out", identity).samples
    assert len(found) == 1 and len(samples) == 2 * len({sample.number for sample in samples})


def test_little_text_is_enough_for_a_run_that_asks_for_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would generate the rest, so the run would wait for ever."""
    monkeypatch.setattr(pipeline, "_MIN_TOKENS", 10_000)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for text"))
    recipe = replace(RECIPE, text_tokens=300, minutes=0.0)
    pipeline.run(recipe, target, tmp_path / "draft", tmp_path / "store")
    assert (tmp_path / "draft" / "config.json").is_file()


def test_a_run_generates_text_itself_if_the_other_one_has_stopped(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ExitStack()
    assert other.enter_context(file_lock(tmp_path / "store" / "writing"))
    with pytest.raises(InvalidRequest, match="another run generates text"):
        pipeline.run(RECIPE, target, tmp_path / "draft", tmp_path / "store", text_only=True)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: (waits.append(seconds), other.close()))
    pipeline.run(replace(RECIPE, minutes=0.0), target, tmp_path / "draft", tmp_path / "store")
    assert len(waits) == 1


def test_answers_at_once_take_half_of_a_gpus_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, element_size=lambda: 2)
    shape = Shape(hidden=576, layers=30, heads=9, kv_heads=3, mlp=1536, vocab=49152, context=8192)
    model: Any = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight), shape=shape)
    for gigabytes, slots in ((16, 339), (80, 768)):
        device = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, device=device: device)
        monkeypatch.setattr(pipeline, "_SLOTS", {"cuda": 768})
        assert pipeline._slot_count(model) == slots


@pytest.mark.parametrize("fast", [False, True])
def test_a_gpu_that_only_emulates_bfloat16_computes_in_float32(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: fast or including_emulation)
    assert matrix_dtype(torch.device("cuda")) == (torch.bfloat16 if fast else torch.float32)


def test_two_runs_cannot_train_the_same_draft(run_folder: Path, target: Path, tmp_path: Path) -> None:
    _copy_unfinished(run_folder, tmp_path / "run")
    with (
        file_lock(tmp_path / "run" / "draft.partial" / "lock"),
        pytest.raises(InvalidRequest, match="another run uses"),
    ):
        pipeline.run(replace(RECIPE, minutes=0.0), target, tmp_path / "run" / "draft", tmp_path / "run" / "store")


def test_an_interrupted_export_leaves_nothing(
    run_folder: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copy_unfinished(run_folder, tmp_path / "run")
    out = tmp_path / "run" / "draft"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("models.training.draft.export._config", _interrupt)
        pipeline.export(out, target)
    assert not out.exists()
    pipeline.export(out, target)
    assert read_draft(out)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"layers": (3,)}, "expected layers of the target, -3 to 2"),
        ({"mlp": 40}, "groups of 32"),
        ({"mlp": 128}, "between 32 and 96, not 128"),
        ({"vocab": 0}, "vocabulary must lie"),
        ({"seed": -1}, "seed must lie"),
        ({"rate": float("nan")}, "learning rate must lie"),
        ({"batch_tokens": 0}, "tokens per batch must lie"),
        ({"text_tokens": 0}, "text tokens must lie"),
        ({"minutes": -1.0}, "minutes must lie"),
        ({"coupled": -1.0}, "--coupled must lie"),
    ],
)
def test_a_setting_out_of_range_is_refused_before_anything_is_written(
    setting: dict[str, Any], sentence: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        pipeline.run(replace(RECIPE, **setting), target, tmp_path / "draft", tmp_path / "store")
    assert not any(tmp_path.iterdir())


def test_a_draft_without_an_evaluation_is_not_exported(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no draft that has been evaluated"):
        pipeline.export(tmp_path / "draft", target)


def test_a_run_without_time_left_is_published_into_an_empty_folder(
    run_folder: Path, target: Path, tmp_path: Path
) -> None:
    _copy_unfinished(run_folder, tmp_path)
    (tmp_path / "draft").mkdir()
    pipeline.run(replace(RECIPE, minutes=0.0), target, tmp_path / "draft", tmp_path / "store")
    assert (tmp_path / "draft" / "training.json").is_file()


def test_a_chat_template_runs_in_a_sandbox(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "target")
    config = tmp_path / "target" / "tokenizer_config.json"
    escape = "{{ cycler.__init__.__globals__.os.getcwd() }}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": escape}))
    with pytest.raises(ModelError, match="chat template failed"):
        ChatTokenizer(tmp_path / "target").tokenize(prompts.Prompt(0, "chat", "Hello"))


@pytest.mark.parametrize("best", [1.0, 1.2])
def test_logits_of_the_finished_draft_are_scaled_for_the_best_agreement(
    run_folder: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: float
) -> None:
    """Each time relative to the trained draft, not to the one that is scaled already."""
    shutil.copytree(run_folder, tmp_path / "run")
    work, out = tmp_path / "run" / "draft.partial", tmp_path / "run" / "draft"
    trained = torch.load(work / "best.pt", weights_only=True)["mean"]["lens"]
    size = float(trained.norm())

    def scored(model: Any, *_: Any) -> trainer.Score:
        agreement = 0.1 - abs(float(model.lens.detach().norm()) / size - best)
        return trainer.Score({"all": 0.0}, {"all": agreement}, ())

    monkeypatch.setattr(trainer, "score", scored)
    for _ in range(2):
        shutil.rmtree(out, ignore_errors=True)
        pipeline.run(replace(RECIPE, minutes=0), target, out, tmp_path / "run" / "store")
        assert json.loads((out / "training.json").read_text())["sharpness"] == best
        assert torch.allclose(read_draft(out)[0]["lens"], (best * trained).half().float(), rtol=1e-2, atol=1e-3)


def test_a_stored_draft_contains_no_weights_of_its_target(draft: Path) -> None:
    from safetensors import safe_open

    with safe_open(draft / "model.safetensors", "numpy") as file:
        names = set(file.keys())
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert len({entry.stat().st_mode for entry in draft.iterdir()}) == 1  # who may read config.json may read the draft


def test_training_continues_from_a_finished_draft(draft: Path, target: Path, tmp_path: Path) -> None:
    """Its weights are those in 4 bits: written again, they stay as they are."""
    weights, tokens = read_draft(draft)
    shape = load_target(target, torch.device("cpu"), torch.float32).shape
    write_draft(tmp_path / "again", weights, tokens, shape, {})
    again, same = read_draft(tmp_path / "again")
    assert torch.equal(tokens, same) and weights.keys() == again.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, again[name], atol=1e-3), name
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"half")
    for folder in (tmp_path, tmp_path / "damaged"):
        with pytest.raises(ModelError, match="has no draft"):
            read_draft(folder)


def test_a_run_cannot_begin_as_a_head(run_folder: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder / "store", tmp_path / "store")
    (tmp_path / "head").mkdir()
    tensors = {"d2t": torch.zeros(8), "midlayer.mlp.up_proj.weight": torch.zeros(8, 8)}
    (tmp_path / "head" / "model.safetensors").write_bytes(save(tensors))
    with pytest.raises(InvalidRequest, match="has 0 layers of width 0"):
        recipe = replace(RECIPE, minutes=0.0, begin_as=tmp_path / "head")
        pipeline.run(recipe, target, tmp_path / "draft", tmp_path / "store")


def test_a_run_that_begins_as_a_draft_keeps_its_tokens_and_adds_likely_ones(
    run_folder: Path, draft: Path, target: Path, tmp_path: Path
) -> None:
    weights, _ = read_draft(draft)
    shape, unlikely = load_target(target, CPU, torch.float32).shape, torch.arange(140, 300)
    write_draft(tmp_path / "begun", weights, unlikely, shape, {})
    shutil.copytree(run_folder / "store", tmp_path / "store")
    longer = replace(RECIPE, vocab=200, minutes=0.0, begin_as=tmp_path / "begun")
    pipeline.run(longer, target, tmp_path / "draft", tmp_path / "store")
    _, tokens = read_draft(tmp_path / "draft")
    assert len(tokens) == 200 and set(unlikely.tolist()) < set(tokens.tolist())
    assert torch.equal(tokens, tokens.unique())


@pytest.mark.parametrize("setting", [{"mlp": 64}, {"layers": (0,)}])
def test_a_run_cannot_begin_as_a_draft_of_another_form(
    setting: dict[str, Any], run_folder: Path, draft: Path, target: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_folder / "store", tmp_path / "store")
    weights, tokens = read_draft(draft)
    weights |= {name.replace("layers.0", "layers.1"): weight for name, weight in weights.items() if "layers.0" in name}
    write_draft(tmp_path / "two", weights, tokens, load_shape(target), {})
    recipe = replace(RECIPE, **{"layers": (0, 1), "minutes": 0.0, "begin_as": tmp_path / "two", **setting})
    with pytest.raises(InvalidRequest, match="has 2 layers of width 64 with MLPs of 96; expected"):
        pipeline.run(recipe, target, tmp_path / "draft", tmp_path / "store")
    assert not (tmp_path / "draft.partial" / "draft.json").exists()


def test_a_draft_that_does_not_fit_its_target_is_refused(draft: Path, target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(draft, other)
    config = json.loads((other / "config.json").read_text()) | {"draft_vocab_size": 12}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="can't be used with"):
        assemble_draft(other, target, tmp_path)
    (other / "model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0not JSON!")
    with pytest.raises(ModelError, match="can't be used with"):
        assemble_draft(other, target, tmp_path)


@pytest.mark.parametrize("offsets", [None, [400] * 160])
def test_a_draft_with_missing_or_wrong_d2t_is_not_loaded(
    offsets: list[int] | None, draft: Path, target: Path, tmp_path: Path
) -> None:
    assemble_draft(draft, target, tmp_path)
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    del tensors["d2t"]
    if offsets is not None:
        tensors["d2t"] = mx.array(offsets)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(ModelError, match="d2t"):
        load(tmp_path)


def test_answers_to_one_prompt_may_lie_in_several_shards(tmp_path: Path) -> None:
    log_probs, ids = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int32)
    for temp in (0.0, 0.8):
        Store(tmp_path, FORM).add([Sample(7, "chat", temp, 1, torch.zeros(3, dtype=torch.int32), ids, log_probs)])
    assert [sample.temp for sample in Store(tmp_path, FORM).samples] == [0.0, 0.8]


def test_a_new_shard_replaces_none_after_one_was_removed(tmp_path: Path) -> None:
    log_probs, ids = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int32)
    for number in range(3):
        if number == 2:
            (tmp_path / "shard-00000000.safetensors").unlink()
        Store(tmp_path, FORM).add([Sample(number, "chat", 0.0, 1, torch.zeros(3, dtype=torch.int32), ids, log_probs)])
    assert [sample.number for sample in Store(tmp_path, FORM).samples] == [1, 2]


def test_damaged_shard_and_foreign_store_are_refused(tmp_path: Path) -> None:
    sample = Sample(
        0, "chat", 0.0, 1, torch.zeros(3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4)
    )
    Store(tmp_path, FORM).add([sample])
    with pytest.raises(InvalidRequest, match="another target"):
        Store(tmp_path, StoreIdentity("other", "text", 0, 4))
    next(tmp_path.glob("shard-*")).write_bytes(b"half")
    with pytest.raises(InvalidRequest, match="damaged"):
        Store(tmp_path, FORM)


def test_a_file_that_cannot_be_written_is_named_in_a_sentence(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    where = ["--out", str(tmp_path / "draft"), "--store", str(tmp_path / "file" / "store")]
    assert train.main(["--draft", "--target", str(target), *where]) != 0
    said = capsys.readouterr().err
    assert "Not a directory" in said and "the same command continues" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--draft", "--store", "s"], "trained for a target"),
        (["--draft", "--target", "t"], "a folder for the target's text"),
        (
            ["--draft", "--target", "t", "--store", "s", "--steps", "4"],
            "--steps is for a head, but this trains a draft; omit it",
        ),
        (["--draft", "--target", "t", "--head", "mtp"], "expected one of them"),
        (["--minutes", "3"], "--minutes is for a draft, but this trains a pair; omit it"),
        (
            ["--draft", "--target", "t", "--store", "s", "--extra-dir", "x"],
            "--extra-dir is for a pair or a head, but this trains a draft; omit it",
        ),
        (["--draft", "--target", "t", "--store", "s", "--export"], "no such path: t"),
    ],
)
def test_contradicting_arguments_are_refused_with_a_reason(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main(["--out", "draft", *arguments]) != 0
    assert sentence in capsys.readouterr().err
