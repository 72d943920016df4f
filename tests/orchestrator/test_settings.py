"""Settings are checked once, with one sentence per error, and round-trip through the flags of the command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from outrider.orchestrator.cli import Parser, flags, serve
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.settings import ServeSettings, Settings
from outrider.orchestrator.settings import to_flags as as_flags
from outrider.protocol.errors import InvalidRequest


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0; expected a whole number from 1 to 32"),
        ({"num_draft_tokens": 1000}, "from 1 to 32"),
        ({"num_draft_tokens": 2.5}, "whole number"),
        ({"branches": 0}, "from 1 to 256"),
        ({"branches": 257}, "from 1 to 256"),
        ({"mode": "fast"}, "mode is 'fast'; expected one of auto, ar, sd, ssd"),
        ({"draft_backend": "gpu"}, "expected one of mlx"),
        ({"fan_out": "all"}, "best-first"),
        ({"branch_depth": "half"}, "auto, full"),
        ({"log_level": "loud"}, "debug, info"),
        ({"threads": 0}, "threads is 0"),
        ({"ngrams": 0}, "ngrams is 0; expected True or False"),
        ({"colocate": "yes"}, "colocate is 'yes'"),
        ({"model": 7}, "model is 7; expected text"),
        ({"trace": 7}, "trace is 7; expected a path"),
        ({"mode": ["ar"]}, "mode is"),
        ({"max_active": True}, "max_active is True"),
        ({"max_active": 0}, "max_active is 0; expected a whole number from 1 to 1024"),
        ({"kv_memory": 0}, "kv_memory is 0; expected"),
        ({"kv_memory": "-1GB"}, "kv_memory is '-1GB'; expected a number of bytes, or a size like 2GB or 512MiB"),
        ({"kv_memory": "much"}, "expected a number of bytes"),
        ({"prompt_cache": 1}, "prompt_cache is 1; expected True or False"),
        ({"draft_model": "d"}, "needs model"),
        ({"model": "m", "draft_model": "d", "draft_backend": "ngram"}, "runs no draft model"),
        ({"draft_backend": "none", "mode": "ssd"}, "mode ssd needs a drafter"),
        ({"advertise": True}, "advertise needs workers_endpoint"),
        ({"draft_backend": "ngram", "ngrams": False}, "drafts nothing"),
        ({"ngram_table": "table.safetensors", "ngrams": False}, "not used without ngrams"),
        *(
            ({"colocate": True, "draft_backend": b}, f"can't use draft_backend {b}")
            for b in ("coreml", "ngram", "none")
        ),
        ({"head_in": "draft-worker"}, "is for heads that can work ahead, and draft_backend mlx is not one"),
        ({"draft_backend": "eagle3", "model": "m"}, "eagle3 has no head to draft with; expected draft_model"),
        ({"draft_backend": "eagle3", "model": "m", "draft_model": "d", "mode": "ssd"}, "take turns in one process"),
        ({"colocate": True, "mode": "ssd"}, "take turns in one process; expected mode sd, ar or auto"),
        ({"colocate": True, "model": "m"}, "colocate needs draft_model"),
        (
            {"colocate": True, "draft_prefill": "coreml"},
            "draft_prefill coreml is for draft workers, but colocate starts",
        ),
        ({"colocate": True, "draft_device": "cpu"}, "draft_device cpu is for draft workers, but colocate starts none"),
        ({"colocate": True, "drafters": 2}, "drafters is 2, but colocate starts no draft workers; expected 1"),
        ({"draft_backend": "mtp", "drafters": 2}, "drafters is 2, but draft_backend mtp starts no draft workers"),
        ({"draft_backend": "mtp", "draft_device": "cpu"}, "for draft workers, but draft_backend mtp starts none"),
        ({"draft_backend": "ngram", "draft_prefill": "coreml"}, "is for draft models; leave it out with ngram"),
        ({"draft_backend": "none", "drafters": 2}, "drafters is 2, but draft_backend none starts no draft workers"),
        ({"draft_device": "gpu"}, "expected one of auto, cpu"),
        ({"model": "\ud800"}, "model is .*; expected Unicode text without null characters"),
        ({"trace": Path("a\0b")}, "trace is .*; expected Unicode text without null characters"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(given, words):
    with pytest.raises(InvalidRequest, match=words):
        ServeSettings(**given)


def test_only_drafter_may_be_one_that_joins():
    """As for an engine of a fleet whose drafter is on another host."""
    joined = ServeSettings(draft_backend="ngram", ngrams=False, workers_endpoint="tcp://127.0.0.1:0", mode="ssd")
    assert joined.can_work_ahead


def test_settings_convert_paths_texts_and_numpy_values():
    converted = ServeSettings(
        model=Path("m"),
        draft_model="d",
        trace="t.json",
        threads=np.int64(2),
        ngrams=np.bool_(False),
        head=Path("h"),
    )
    plain = ServeSettings(model="m", draft_model="d", trace=Path("t.json"), threads=2, ngrams=False, head=("h",))
    assert converted == plain
    assert all(type(getattr(converted, f.name)) is type(getattr(plain, f.name)) for f in fields(converted))


def test_local_cluster_keywords_match_settings_and_are_documented():
    keywords, known = get_type_hints(Settings), [field.name for field in fields(ServeSettings)]
    assert list(keywords) == known, f"Settings must have these, in this order: {keywords.keys() ^ set(known) or known}"
    documentation = LocalCluster.__doc__ or ""
    assert not [field.name for field in fields(ServeSettings) if f"`{field.name}`" not in documentation]


@pytest.mark.parametrize(
    ("size", "count"),
    [("2GB", 2 * 10**9), ("512mb", 512 * 10**6), ("1.5 GiB", 3 * 2**29), ("7", 7), (np.int64(9), 9), ("3B", 3)],
)
def test_memory_sizes_are_parsed_to_bytes(size, count):
    assert ServeSettings(kv_memory=size).kv_memory == count


def test_every_setting_round_trips_through_flags():
    various = ServeSettings(
        model="m", draft_model="d", draft_backend="coreml", num_draft_tokens=7, branches=3, fan_out="uniform",
        branch_depth="full", ngrams=False, trees=True,
        mode="sd", endpoint="tcp://127.0.0.1:5", threads=2, max_active=3,
        trace=Path("t.json"), log_level="debug", log_format="json", keys=Path("-k"),
        worker_timeout=5, max_waiting=6, kv_memory=7, prompt_cache=False,
        memory=False, shards=2, drafters=3, pin_cores=False, cpu_kernels="mlx",
        workers_endpoint="tcp://127.0.0.1:6", keyed=True,
        advertise=True, gguf_keep_precision=True,
    )  # fmt: skip
    colocated = ServeSettings(model="m", draft_model="d", colocate=True)
    waiting = ServeSettings(await_target=True, ngram_table="-t")
    read = ServeSettings(prefill_workers=2, prefill_from=9, prefill_backend="coreml")
    by_head = ServeSettings(model="m", draft_model="d", draft_backend="eagle3")
    by_own_head = ServeSettings(model="m", draft_backend="mtp", head=("mtp", "-x"))
    assert by_own_head.colocate and by_head.colocate and not by_head.has_draft_worker
    prefilled = ServeSettings(model="m", draft_model="d", draft_prefill="coreml", draft_device="cpu")
    packaged = ServeSettings(model="m", draft_model="d", draft_prefill="package", draft_backend="coreml")
    ahead = ServeSettings(model="m", draft_model="d", draft_backend="eagle3", head_in="draft-worker", mode="ssd")
    assert ahead.has_draft_worker and not ahead.colocate
    every_case = (various, colocated, prefilled, packaged, waiting, read, by_head, by_own_head, ahead)
    default = ServeSettings()
    names = [f.name for f in fields(default)]
    untried = [n for n in names if all(getattr(s, n) == getattr(default, n) for s in every_case)]
    assert not untried, f"{untried}: give each setting another value than its default above"
    parser = Parser(prog="x")
    serve.add_flags(parser)
    for settings in every_case:
        assert ServeSettings(**flags.settings_of(parser.parse_args(as_flags(settings)))) == settings
    assert as_flags(ServeSettings()) == []
