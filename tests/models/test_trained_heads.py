"""The acceptance of the heads that ship with the tiny target.

Only a minimum of acceptance reveals a bug here: wrong input or output of a head never changes a text.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.load import load as load_head
from outrider.engine.loading import LoadedModel, load
from outrider.orchestrator.pairing.model_files import TINY_TARGET, tiny_heads
from outrider.protocol.heads import head_kind
from outrider.protocol.messages import Autonomous, InProcess, Open, Outcome, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.harness.default_model import mixed_tokens
from tests.system.links import FakeLink, drafted_chain, run_worker

SHIPPED = {kind: Path(folder) for kind, folder in tiny_heads().items()}
LENGTH, DEPTH, PROMPTS = 16, 3, 2
FLOORS = {"mtp": {0.0: 0.45, 0.8: 0.4}}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load(TINY_TARGET)


def outcomes(target: LoadedModel, own: HeadDrafter, temp: float) -> list[Outcome]:
    prompts = mixed_tokens(PROMPTS)
    opens = [
        Open(str(n), 0, 0, np.array(prompt, np.int32), SamplingParams(temp=temp, seed=n, ignore_eos=True))
        for n, prompt in enumerate(prompts)
    ]
    link = FakeLink("target-0", deque(opens))
    worker = TargetWorker(link, target, drafters=InProcessDrafters({"own": own}))  # type: ignore[arg-type]
    run_worker(worker, link, ())
    go = [Verify(o.request, 0, 1, len(o.tokens) + 1, Autonomous(LENGTH, InProcess(DEPTH))) for o in opens]
    found = run_worker(worker, link, go)
    assert all(isinstance(one, Outcome) for one in found), found
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_head_reaches_its_minimum_acceptance(target: LoadedModel, name: str) -> None:
    folder = SHIPPED[name]
    kind = head_kind(json.loads((folder / "config.json").read_text()), target.config)
    assert kind is not None
    own = load_head(kind, str(folder), target, lambda stage: None)
    assert own.note == ""
    for temp, floor in FLOORS[name].items():
        found = outcomes(target, own, temp)
        drafted = sum(len(drafted_chain(one)) for one in found)
        share = sum(one.accepted for one in found) / drafted
        assert share > floor, (temp, share)


def test_shipped_heads_are_small_and_have_finite_weights() -> None:
    files = [path for folder in SHIPPED.values() for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
    for path in files:
        if path.suffix == ".safetensors":
            assert all(mx.isfinite(value).all().item() for value in mx.load(str(path)).values())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_head_has_a_training_record(name: str) -> None:
    record = json.loads((SHIPPED[name] / "training.json").read_text())
    assert record["recipe"]["kind"] == name and record["held_out"]
