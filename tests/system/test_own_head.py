"""A head in real processes is recognised by its files, and drafts in the target's process or the draft worker."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from outrider import LocalCluster
from outrider.protocol.sampling import SamplingParams
from tests.suspend import pid_of, throttled
from tests.target_worker.block_heads import write_block_head
from tests.target_worker.heads import markov_llama, write_feature_head


def test_head_in_the_targets_process_drafts_without_changing_the_text(tmp_path: Path) -> None:
    target = markov_llama(tmp_path / "target")
    head = write_feature_head(tmp_path / "head", target)
    with LocalCluster(
        model=tmp_path / "target", draft_model=head, draft_backend="auto", ngrams=False, memory=False
    ) as cluster:
        client = cluster.client()
        for temp in (0.0, 0.8):
            params = SamplingParams(max_tokens=24, temp=temp, seed=3, ignore_eos=True)
            alone, by_head = (client.generate([40, 41, 42], params, mode=mode) for mode in ("ar", "sd"))
            assert alone.token_ids == by_head.token_ids and len(alone.token_ids) == 24
            assert by_head.timings.draft_n_accepted > (0 if temp else 8)


def test_head_in_the_draft_worker_drafts_without_changing_the_text(tmp_path: Path) -> None:
    target = markov_llama(tmp_path / "target")
    head = write_feature_head(tmp_path / "head", target)
    with LocalCluster(
        model=tmp_path / "target", draft_model=head, draft_backend="auto", head_in="draft-worker", ngrams=False,
        memory=False,
    ) as cluster:  # fmt: skip
        client = cluster.client()
        for mode in ("sd", "ssd"):
            params = SamplingParams(max_tokens=24, temp=0.0, ignore_eos=True)
            alone, by_head = (client.generate([40, 41, 42], params, mode=way) for way in ("ar", mode))
            assert alone.token_ids == by_head.token_ids and len(alone.token_ids) == 24
            while mode == "sd" and by_head.timings.draft_n_accepted <= 4:  # the drafter was too slow
                with throttled(pid_of(client, "target")):
                    by_head = client.generate([40, 41, 42], params, mode=mode)
        by_name = {worker.name: worker for worker in client.stats().workers}
        assert by_name["draft-0"].backend == "eagle3" and by_name["draft-0"].state == "ready"


@pytest.mark.parametrize("head_in", ["target", "draft-worker"])
def test_head_that_does_not_agree_with_the_target_is_noted(tmp_path: Path, head_in: str) -> None:
    head = write_feature_head(tmp_path / "head", markov_llama(tmp_path / "target"))
    weights = cast("dict[str, mx.array]", mx.load(str(head / "model.safetensors")))
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    mx.save_safetensors(str(head / "model.safetensors"), weights)
    with LocalCluster(
        model=tmp_path / "target", draft_model=head, draft_backend="eagle3", head_in=head_in, ngrams=False, memory=False
    ) as cluster:
        drafted, plain = (cluster.client().generate([40, 41], max_tokens=4, mode=mode).notes for mode in ("sd", "ar"))
        notes = [note for note in cluster.notes if "few drafts will be accepted" in note]
    assert len(notes) == 1 and "the head agrees with the target on 0% of the tokens of a trial" in notes[0]
    assert notes[0] in drafted and notes[0] not in plain


def test_block_head_in_the_draft_worker_works_ahead(tmp_path: Path) -> None:
    markov_llama(tmp_path / "target")
    head = write_block_head(tmp_path / "head")
    with LocalCluster(
        model=tmp_path / "target", draft_model=head, draft_backend="auto", head_in="draft-worker", ngrams=False,
        memory=False,
    ) as cluster:  # fmt: skip
        client = cluster.client()
        params = SamplingParams(max_tokens=24, temp=0.8, seed=3, ignore_eos=True)
        alone, ahead = (client.generate([40, 41, 42], params, mode=way) for way in ("ar", "ssd"))
        assert alone.token_ids == ahead.token_ids and len(alone.token_ids) == 24
        by_name = {worker.name: worker for worker in client.stats().workers}
        assert by_name["draft-0"].backend == "dflash"
