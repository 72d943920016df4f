"""Training tiny heads end to end: learning, continuing after an interruption, and loading the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, save_config

from models import train
from models.training import corpus
from models.training.heads.recipe import KINDS, check
from tests.models.heads import TINY, recipe, write_target

torch = pytest.importorskip("torch", reason="training needs PyTorch (the extra `train`)")

from models.training.heads import loss, pipeline  # noqa: E402
from models.training.heads.head import Target  # noqa: E402
from models.training.heads.store import Batch, Prompts, Store, StoreIdentity, generate  # noqa: E402
from models.training.loop import Loop, autocast  # noqa: E402
from models.training.target import load_target  # noqa: E402
from outrider.drafters.heads import load as loading  # noqa: E402
from outrider.drafters.heads.drafter import HeadDrafter  # noqa: E402
from outrider.drafters.heads.pair_kv_cache import (  # noqa: E402
    FeatureKVCache,
    PairKVCache,
)
from outrider.engine.hidden_states import AFTER_NORM  # noqa: E402
from outrider.engine.loading import load  # noqa: E402
from outrider.protocol.digest import model_digest  # noqa: E402
from outrider.protocol.errors import InvalidRequest, ModelError  # noqa: E402
from outrider.protocol.heads import head_kind  # noqa: E402
from outrider.protocol.sampling import SamplingParams  # noqa: E402
from tests.drafters.pair_feeds import PairFeed, slots  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # equal sums in every run, whatever else the machine does
    return write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module", autouse=True)
def _little_text() -> Iterator[None]:
    """Limits the library to a part: reading all of it would take most of the time."""
    part = corpus.standard_library() / "email"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda: part)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's text, which all heads learn from."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module", params=KINDS)
def head(
    _little_text: None,
    request: pytest.FixtureRequest,
    target: Path,
    store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("trained") / request.param
    pipeline.run(recipe(request.param), target, out, store)
    return out


def test_a_head_is_trained_and_no_other_file_is_left(head: Path) -> None:
    assert {entry.name for entry in head.parent.iterdir()} == {head.name}
    assert {entry.name for entry in head.iterdir()} == {"config.json", "model.safetensors", "training.json"}
    assert len({entry.stat().st_mode for entry in head.iterdir()}) == 1  # safetensors writes files for their owner only
    record = json.loads((head / "training.json").read_text())
    assert record["tokens_seen"] == 5_120 and len(record["held_out"]) == 4
    assert record["held_out_agreement"][0] > 0.03  # chance is 1 in 300; what ten steps learn differs by CPU


def test_stopped_run_resumes_to_the_same_head(
    head: Path, target: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, steps = recipe(head.name), []

    def stopping(loop: Loop, *args: Any) -> float:
        if len(steps) == 7:
            raise KeyboardInterrupt
        steps.append(args)
        return whole(loop, *args)

    whole = Loop._step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Loop, "_step", stopping)
        patch.setattr(Loop.run, "__kwdefaults__", {"period_s": 0.0})
        pipeline.run(made, target, tmp_path / "head", store)
    assert not (tmp_path / "head").exists()
    pipeline.run(made, target, tmp_path / "head", store)
    ours, theirs = (mx.load(str(folder / "model.safetensors")) for folder in (tmp_path / "head", head))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]).item() for name in theirs)


def test_training_lowers_the_loss(target: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    step = Loop._step
    monkeypatch.setattr(Loop, "_step", lambda *args: seen.append(step(*args)) or seen[-1])
    pipeline.run(recipe("eagle3", vocab=100), target, tmp_path / "head", store)
    assert np.mean(seen[-5:]) < 0.8 * np.mean(seen[:3])
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["draft_vocab_size"] == 100


def batch_of(model: Any, taps: tuple[int, ...], length: int) -> Batch:
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, TINY.vocab, (1, length)))
    with torch.no_grad():
        rows = model.hidden_states(tokens)
    return Batch(tokens, torch.stack([rows[tap] for tap in taps], dim=2), tokens[..., None], torch.zeros(1, length, 1))


def test_mtp_head_is_initialised_from_the_last_layer(target: Path) -> None:
    """Its output for a row and a token is nearer to the last layer's input than any single vector."""
    made, model = recipe("mtp"), load_target(target, CPU).float()
    trained = pipeline.build(made, Target(model, made.taps(TINY), torch.arange(TINY.vocab), 7, {}))
    batch = batch_of(model, made.taps(TINY), 60)
    trained.init_from(batch)
    assert torch.equal(trained.self_attn.q_proj.weight, model.layers[-1].self_attn.q_proj.weight)
    with torch.no_grad():
        wanted = model.hidden_states(batch.tokens)[-2][0, 1:]
        made_up = trained.input_proj(trained._inputs(trained.features(batch, 59), batch.tokens[:, 1:]))[0]
    assert ((made_up - wanted) ** 2).sum() < 0.5 * ((wanted - wanted.mean(0)) ** 2).sum()


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_generation_agrees_with_a_forward_over_the_whole_text(target: Path, temp: float) -> None:
    """One token at a time from cached keys, or all at once: no token is much less likely than when drawn."""
    model, temps = load_target(target, CPU), torch.full((64,), temp)
    windows = torch.zeros((64, 24), dtype=torch.int64)
    generate(model, windows, torch.ones(64, dtype=torch.int64), temps, torch.Generator().manual_seed(0))
    with torch.no_grad(), autocast(CPU):
        logits = model(windows)[:, :-1].float()
    drawn = logits.gather(-1, windows[:, 1:, None])[..., 0]
    if temp == 0:
        assert (logits.max(dim=-1).values - drawn).max() < 0.2
        return
    log_probs = torch.log_softmax(logits / temp, dim=-1)
    expected = (log_probs.exp() * log_probs).sum(-1)
    assert abs((drawn / temp - torch.logsumexp(logits / temp, -1) - expected).mean()) < 0.1


CHAINS = {
    "eagle3": {"hidden": 32},
    "eagle3, few words": {"hidden": 32, "vocab": 100},
    "mtp": {},
    "redrafter": {"hidden": 48},
    "redrafter, wide": {"hidden": 128},
}


@pytest.mark.parametrize("bits", [4, 8])
def test_a_target_in_groups_of_64_is_read(target: Path, tmp_path: Path, bits: int) -> None:
    """mlx-lm's own size."""
    model, config = load_model(target)
    nn.quantize(model, 64, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] == 64)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    save_config(config | {"quantization": {"group_size": 64, "bits": bits}}, tmp_path / "config.json")
    layer = model.model.layers[0].mlp.up_proj
    steps = [part.astype(mx.float32) for part in (layer.scales, layer.biases)]
    whole = mx.dequantize(layer.weight, *steps, group_size=64, bits=bits)
    read = load_target(tmp_path, CPU, torch.float32).state_dict()["layers.0.mlp.up_proj.weight"]
    assert np.allclose(read.numpy(), np.array(whole), atol=1e-6)


@pytest.mark.parametrize("name", CHAINS)
def test_loaded_head_computes_the_logits_of_the_trained_one(target: Path, tmp_path: Path, name: str) -> None:
    """After true pairs and after the head's own pairs, to as many steps as it is trained for."""
    made = recipe(name.partition(",")[0], **CHAINS[name])
    model = load_target(target, CPU).float()
    ids = torch.arange(0, 3 * made.vocab, 3) if made.vocab else torch.arange(TINY.vocab)
    config = json.loads((target / "config.json").read_text())
    trained = pipeline.build(made, Target(model, made.taps(TINY), ids, 7, config)).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape)).copy_(parameter.half().float())
    pipeline.write_head(tmp_path / "head", trained, model_digest(target))
    loaded = load(target)
    assert head_kind(json.loads((tmp_path / "head" / "config.json").read_text()), config) == made.kind
    head = loading.read_head(made.kind, str(tmp_path / "head"), loaded, print)
    batch = batch_of(model, made.taps(TINY), 24)
    with torch.no_grad():
        steps = [np.array(step.hidden @ trained.output_weight.T)[:, :] for step in trained(batch)]
    for row in (0, 3, 19):
        ours = chain(head, model, batch, row, made.steps)
        for step, logits in enumerate(ours):
            np.testing.assert_allclose(logits[ids.numpy()], steps[step][row], atol=2e-3)
            assert np.isinf(logits).sum() == TINY.vocab - len(ids)


def test_loaded_block_head_computes_the_trained_blocks(target: Path, tmp_path: Path) -> None:
    made, model = recipe("dflash", layers=2), load_target(target, CPU).float()
    config = json.loads((target / "config.json").read_text())
    trained = pipeline.build(made, Target(model, made.taps(TINY), torch.arange(TINY.vocab), 7, config)).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape)).copy_(parameter.bfloat16().float())
    pipeline.write_head(tmp_path / "head", trained, model_digest(target))
    head = loading.read_head("dflash", str(tmp_path / "head"), load(target), print)
    assert head.depth == made.steps
    batch = batch_of(model, made.taps(TINY), 24)
    with torch.no_grad():
        steps = [np.array(step.hidden @ trained.output_weight.T) for step in trained(batch)]
        anchors = trained(batch)[0].positions.tolist()
    for block, anchor in enumerate(anchors):
        contexts = FeatureKVCache(head)
        features = head.fuse(mx.array(batch.hidden[0, :anchor].flatten(1).numpy()))
        fed = mx.array(np.array(batch.tokens[0])[1 : anchor + 1], mx.int32)
        _, logits = slots(contexts, [PairFeed(contexts.open(), fed, features)], [made.steps])
        np.testing.assert_allclose(np.array(logits), [step[block] for step in steps], atol=5e-3)


def test_blocks_are_trained_after_prefixes_as_in_the_draft_worker(target: Path, tmp_path: Path) -> None:
    """Some tokens after the anchor are known, and the tokens after those are learned."""
    made, model = recipe("dflash", visible_prefix=True), load_target(target, CPU).float()
    config = json.loads((target / "config.json").read_text())
    trained = pipeline.build(made, Target(model, made.taps(TINY), torch.arange(TINY.vocab), 7, config)).train()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape)).copy_(parameter.bfloat16().float())
    pipeline.write_head(tmp_path / "head", trained, model_digest(target))
    head = loading.read_head("dflash", str(tmp_path / "head"), load(target), print)
    ahead = HeadDrafter(head, TINY.vocab)
    batch = batch_of(model, made.taps(TINY), 60)
    tokens = np.array(batch.tokens[0])
    with torch.no_grad():
        steps = trained(batch)
        known = trained._prefix_lengths(batch, (60 - made.steps - 1) // (made.steps + 1) + 1)[0].tolist()
    assert len(set(known)) > 1
    trained_rows = {step: iter(np.array(one.hidden @ trained.output_weight.T)) for step, one in enumerate(steps)}
    begun = 1 + int(tokens.sum()) % (made.steps + 1)
    for block, count in enumerate(known):
        anchor = begun + block * (made.steps + 1)
        if anchor >= 60 - made.steps - 1:
            break
        tree = ahead.open(tokens[: anchor + 1].tolist(), SamplingParams())
        tree.add_features(0, np.array(head.fuse(mx.array(batch.hidden[0, :anchor].flatten(1).numpy()))))
        tree.read(tokens[: anchor + 1].tolist())
        node = tree.root
        for token in tokens[anchor + 1 : anchor + 1 + count].tolist():
            (node,) = tree.feed([node], [token])
        for step in range(made.steps - count):
            np.testing.assert_allclose(np.array(tree.scores(node)), next(trained_rows[step]), atol=5e-3)
            (node,) = tree.feed([node], [None])


def test_loaded_exit_computes_the_logits_of_the_trained_one(target: Path, tmp_path: Path) -> None:
    made, model = recipe("early-exit", hidden=16), load_target(target, CPU).float()
    trained = pipeline.build(made, Target(model, made.taps(TINY), torch.arange(TINY.vocab), 7, {})).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape)).copy_(parameter.half().float())
    pipeline.write_head(tmp_path / "head", trained, model_digest(target))
    own = loading.load("early-exit", str(tmp_path / "head"), load(target), print)
    assert "2 of 4 layers and an adapter" in own.note and "another target" not in own.note
    batch = batch_of(model, made.taps(TINY), 24)
    with torch.no_grad():
        expected = (trained(batch)[0].hidden @ trained.output_weight.T).numpy()
    np.testing.assert_allclose(np.array(own.head.logits(mx.array(batch.hidden[0, :, 1].numpy()))), expected, atol=2e-3)


def chain(head: Any, model: Any, batch: Batch, row: int, steps: int) -> list[np.ndarray]:
    """Returns the loader's logits after the true pairs up to `row`, and after its own pairs that follow."""
    pairs, tokens = PairKVCache(head), np.array(batch.tokens[0])
    rows = batch.hidden[0, : row + 1]
    tapped = rows.flatten(1) if head.points != (AFTER_NORM,) else model.norm(rows[:, -1])
    features = head.fuse(mx.array(tapped.numpy()))
    sequence, found = pairs.open(), []
    fed = mx.array(tokens[1 : row + 2], mx.int32)
    for step in range(steps):
        hidden, logits = slots(pairs, [PairFeed(sequence, fed, features)], [1])
        found.append(np.array(logits)[0])
        features, fed = hidden, mx.array(tokens[row + step + 2 : row + step + 3], mx.int32)
    return found


def test_divergence_and_its_gradients_match_the_definition() -> None:
    torch.manual_seed(0)
    hidden, matrix = torch.randn(300, 8).bfloat16().float(), torch.randn(40, 8).bfloat16().float()
    log_probs = torch.log_softmax(2 * torch.randn(310, 50), dim=-1)
    best = log_probs.topk(6, dim=-1)
    names = torch.cat((torch.full((10,), -1), torch.arange(40)))  # the head lacks ten tokens
    words = loss.TargetTopK.of(best.indices[None], best.values[None], names)
    where = torch.arange(300) + 10
    results = []
    for divergence in (loss.divergence, plainly):
        inputs = [hidden.clone().requires_grad_(), matrix.clone().requires_grad_()]
        found = divergence(*inputs, words, where)
        (3 * found).backward()
        results.append([found.detach(), *(one.grad for one in inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def plainly(hidden: Any, matrix: Any, words: loss.TargetTopK, where: Any) -> Any:
    q = (hidden @ matrix.T).softmax(dim=-1)
    total, count = 0, 0
    for row, at in enumerate(where.tolist()):
        if not words.known[at, 0]:
            continue
        known = words.known[at]
        kept = list(zip(words.ids[at][known].tolist(), words.log_probs[at][known].exp().tolist(), strict=True))
        rest = max(0.0, 1 - float(words.log_probs[at].exp().sum()))
        scale = sum(p for _, p in kept) + rest
        lump = 1 - sum(q[row, i] for i, _ in kept)
        total = total + sum(p / scale * (np.log(p / scale) - q[row, i].log()) for i, p in kept)
        total, count = total + rest / scale * (np.log(rest / scale) - lump.log()), count + 1
    return total / count


def test_generation_follows_the_targets_own_logits(target: Path) -> None:
    """At temperature 0 the best token each time; others are drawn, and the given tokens stay."""
    model = load_target(target, CPU).float()
    windows = torch.from_numpy(np.random.default_rng(2).integers(0, TINY.vocab, (3, 20)))
    before, given = windows.clone(), torch.tensor([4, 6, 20])
    generate(model, windows, given, torch.tensor([0.0, 0.8, 0.8]), torch.Generator().manual_seed(1))
    for row, count in enumerate(given.tolist()):
        assert torch.equal(windows[row, :count], before[row, :count])
    best = model(windows).argmax(dim=-1)
    assert (windows[0, 4:] == best[0, 3:-1]).float().mean() > 0.8  # bfloat16 and near-ties
    assert not torch.equal(windows[1, 6:], best[1, 5:-1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "medusa"}, "unknown head 'medusa'; expected one of eagle3, mtp"),
        ({"kind": "mtp", "vocab": 100}, "mtp heads always draft all of the target's tokens; omit --vocab"),
        ({"kind": "mtp", "visible_prefix": True}, "mtp heads draft no blocks with prefixes"),
        ({"kind": "mtp", "hidden": 32}, "mtp heads are as wide as their target; omit --hidden"),
        ({"hidden": 40}, "--hidden of this eagle3 head must be a multiple of 16 up to 64, not 40"),
        ({"kind": "redrafter", "hidden": 129}, "must be a multiple of 1 up to 128, not 129"),
        ({"kind": "early-exit", "hidden": 65}, "must be a multiple of 1 up to 64, not 65"),
        ({"vocab": 999}, "a head for this target can have 17 to 300 tokens, not 999"),
        ({"length": 100}, "at most 64, the target's context"),
        ({"steps": 0}, "a head can learn 1 to 16 steps"),
        ({"tokens": 5}, "expected at least a batch"),
    ],
)
def test_invalid_settings_are_refused_with_a_reason(
    target: Path, tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    made = recipe(**{"kind": "eagle3", **settings})
    with pytest.raises(InvalidRequest, match=sentence):
        pipeline.run(made, target, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{"kind": "redrafter", "hidden": 128}, {"kind": "early-exit", "hidden": 10}])
def test_a_head_without_attention_may_have_any_width(settings: dict[str, Any]) -> None:
    """Apple's ReDrafter heads are twice as wide as their target."""
    check(recipe(**settings), TINY)


def test_an_early_exit_is_not_the_last_layer() -> None:
    with pytest.raises(InvalidRequest, match="at least four layers, not 3"):
        check(recipe("early-exit"), replace(TINY, layers=3))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model_type": "mamba"}, "has a mamba model; expected one of llama, mistral"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "has rope_scaling; expected a plain Llama"),
        ({"num_hidden_layers": 5}, "lacks layers.4."),
        ({"hidden_size": None}, "lacks .*expected a Llama's sizes"),
    ],
)
def test_a_target_that_cannot_have_a_head_is_refused(
    target: Path, tmp_path: Path, changed: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "target"
    other.mkdir()
    for file in target.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((target / "config.json").read_text()), **changed}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=sentence):
        pipeline.run(recipe("eagle3"), other, tmp_path / "head")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--head", "eagle3"], "a head is trained for a target; expected --target with its folder"),
        (["--head", "eagle3", "--target", "x", "--preset", "tiny"], "--preset is for a pair, but this trains a head"),
        (["--hidden", "64"], "--hidden is for a head, but this trains a pair"),
        (["--head", "eagle3", "--target", "nowhere"], "nowhere has no readable config.json"),
    ],
)
def test_contradicting_arguments_are_a_one_line_error(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--out", str(tmp_path / "head"), *arguments]) != 0
    captured = capsys.readouterr().err
    assert sentence in captured and captured.count("\n") == 1


def test_two_runs_generate_the_text_of_a_store_once(target: Path, tmp_path: Path) -> None:
    made, model, asked = recipe("eagle3"), load_target(target, CPU), []
    identity = StoreIdentity("target", "text", 0, made.length, (0, 1, 3), made.top, made.temps, made.part)
    windows = np.random.default_rng(0).integers(0, TINY.vocab, (made.part, made.length))
    second = Thread(target=lambda: Store(tmp_path, identity).fill(2, model, read))

    def read(part: int) -> Prompts:
        if not asked:
            second.start()
            second.join(1.0)
        asked.append(part)
        return Prompts(windows, np.full(made.part, made.length), np.zeros(made.part, np.float32))

    store = Store(tmp_path, identity)
    store.fill(2, model, read)
    second.join()
    assert asked == [0, 1] and store.count == 2 * made.part


def test_store_of_another_origin_is_refused_and_unchanged(target: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine").write_text("mine")
    with pytest.raises(InvalidRequest, match="has other files"):
        pipeline.run(recipe("eagle3"), target, tmp_path / "head", tmp_path / "store")
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == ["mine"]
