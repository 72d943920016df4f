"""Models with limited abilities in a real cluster: it starts, notes the limits, and every mode gives the same text."""

from __future__ import annotations

from pathlib import Path

from outrider import LocalCluster, SamplingParams
from tests.harness.model_configs import config_of
from tests.harness.tiny_models import write_model, write_tokenizer

LONG = SamplingParams(max_tokens=40, ignore_eos=True)  # with the prompt past the window of 12


def model(folder: Path, name: str) -> str:
    write_tokenizer(write_model(folder / name, config_of(name)))
    return str(folder / name)


def test_unusable_draft_model_starts_a_server_without_a_drafter(tmp_path: Path) -> None:
    """The target's layers share keys and values. The draft has a chunked cache, which can't be copied for branches."""
    with LocalCluster(model=model(tmp_path, "gemma3n"), draft_model=model(tmp_path, "llama4")) as cluster:
        assert any("a llama4 model can't be a draft model" in note for note in cluster.notes)
        client = cluster.client()
        found = {mode: client.generate("the quick brown", sampling=LONG, mode=mode) for mode in ("ar", "ssd", "auto")}
    assert len({result.token_ids for result in found.values()}) == 1
    assert any("a llama4 model can't be a draft model" in note for note in found["ssd"].notes)
