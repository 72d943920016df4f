"""Ratios by class of a suite, the runners of each setting, the llama.cpp peer, and the memory footprint."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from outrider.bench.commands import files, footprint
from outrider.bench.commands.files import SUITE_FOLDER
from outrider.bench.comparison import report
from outrider.bench.comparison import runners as runners_module
from outrider.bench.comparison.peers import DRAFT_SPECULATIONS, SPECULATIONS, ChosenPeers, choose_peers
from outrider.bench.comparison.runners import llama_cpp_name
from outrider.bench.comparison.runs import Run, Timed
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.version import install_command


def runs(*rates: float) -> list[Run]:
    return [Run((), Timed(100, 100 / rate)) for rate in rates]


CLASSES = ["chat", "editing", "chat", "editing"]
RUNS = {
    "ar": runs(50, 50, 50, 50),
    "sd model K=2": runs(40, 100, 40, 100),
    "sd n-gram K=3": runs(60, 60, 60, 60),
    "ssd K=5": runs(80, 150, 80, 150),
    "auto": runs(80, 120, 80, 120),
    llama_cpp_name(1): runs(40, 40, 40, 40),
    llama_cpp_name(2): runs(60, 60, 60, 60),
    llama_cpp_name(2, "ngram-simple size_n=3 size_m=4"): runs(50, 100, 50, 100),
    "mlx-lm": runs(8, 8, 8, 8),
    "mlx-lm sd K=2": runs(10, 10, 10, 10),
}


@pytest.mark.parametrize(
    ("name", "kind", "against", "value"),
    [
        ("ar over llama.cpp, same number of threads", "all", "llama.cpp, 1 thread", 50 / 40),
        ("ssd over ar", "editing", "ar", 3),
        ("ssd over the best sd", "chat", "sd n-gram K=3", 80 / 60),
        ("ssd over the best sd", "editing", "sd model K=2", 1.5),
        ("auto over the best mode", "editing", "ssd K=5", 0.8),
        ("auto over the best of llama.cpp, all cores", "chat", "llama.cpp, 2 threads", 80 / 60),
        (
            "auto over the best of llama.cpp, all cores",
            "editing",
            "llama.cpp ngram-simple size_n=3 size_m=4, 2 threads",
            1.2,
        ),
        ("auto over the best of mlx-lm", "all", "mlx-lm sd K=2", 9.6),
    ],
)
def test_each_ratio_is_against_the_best_of_its_class(name: str, kind: str, against: str, value: float) -> None:
    found = next(one for one in report.compare_families(RUNS, CLASSES, (1, 2)) if (one.name, one.kind) == (name, kind))
    assert found.against == against
    assert found.value.value == pytest.approx(value)


def test_a_ratio_without_runs_is_left_out() -> None:
    found = report.compare_families({"ar": RUNS["ar"], "auto": RUNS["auto"]}, CLASSES, (1, 2))
    assert {one.name for one in found} == {"auto over the best mode"}
    assert "| auto over the best mode | 1.92 [1.60, 2.40] | 1.60 | 2.40 | ar |" in report.format_ratios(found)


class SettingsOnlyCluster:
    """Checks a cluster's settings, and starts nothing."""

    notes = ("no draft model: it can't draft",)

    def __init__(self, progress: Any, **settings: Any) -> None:
        ServeSettings(**settings)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def client(self) -> Any:
        worker = SimpleNamespace(role="target", pid=os.getpid(), weight_bytes=1)
        return SimpleNamespace(stats=lambda: SimpleNamespace(workers=[worker]))


@pytest.mark.parametrize(
    ("backend", "modes"),
    [
        ("ngram", ["ar", "sd n-gram K=2", "auto"]),
        ("mlx", ["ar", "sd model K=2", "sd n-gram K=2", "sd model + n-gram K=2", "ssd K=2", "auto"]),
    ],
)
def test_only_modes_the_pair_supports_are_compared(
    backend: str, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a draft model, only n-grams can draft."""
    monkeypatch.setattr(runners_module, "LocalCluster", SettingsOnlyCluster)
    monkeypatch.setattr(runners_module, "pin_process", lambda pid, core: None)
    drafts = {"draft_model": "draft"} if backend == "mlx" else {}
    given = {"model": "target", "draft_backend": backend, **drafts}
    with ExitStack() as stack:
        found = runners_module.RunnerFamilies(stack, given, ServeSettings(**given), [2], ChosenPeers(), lambda _: None)
        names = [name for family in found.families for name in family]
    assert [name for name in names if "colocated" not in name] == modes


@pytest.mark.parametrize("more", [{"drafters": 2}, {"draft_prefill": "coreml"}, {"ngram_table": "table"}])
def test_drafter_settings_are_not_passed_to_clusters_without_the_drafter(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that drafts with n-grams only, or without n-grams, would refuse some of these settings."""
    monkeypatch.setattr(runners_module, "LocalCluster", SettingsOnlyCluster)
    monkeypatch.setattr(runners_module, "pin_process", lambda pid, core: None)
    given = {"model": "target", "draft_model": "draft", **more}
    with ExitStack() as stack:
        found = runners_module.RunnerFamilies(stack, given, ServeSettings(**given), [2], ChosenPeers(), lambda _: None)
    assert {"sd model K=2", "sd n-gram K=2", "ssd K=2"} <= {name for family in found.families for name in family}
    assert list(found.notes) == ["no draft model: it can't draft"]  # without repetitions


def test_prompts_go_through_the_chat_template_or_are_texts_to_continue(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(find_model(str(TINY_TARGET)).folder).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0].content }} A:")
    (tmp_path / "chat.txt").write_text("Why?\n%\nHow?\n")
    pair: Any = SimpleNamespace(target=find_model(str(folder), weights=False))
    found = files.load_prompt_tokens(Namespace(classes=None, suite=tmp_path), pair)
    codec = load_codec(pair.target)
    assert found == {"chat": [codec.encode(text, special=False) for text in ("Q: Why? A:", "Q: How? A:")]}
    assert len(files.load_prompt_tokens(Namespace(classes="math", suite=None), pair)["math"]) == 20
    (folder / "chat_template.jinja").unlink()
    plain = files.load_prompt_tokens(Namespace(classes="json", suite=None), pair)["json"]
    assert plain == list(map(codec.encode, files.load_prompts(files.TINY_FOLDER)["json"]))
    assert len(files.load_prompt_tokens(Namespace(classes="math", suite=SUITE_FOLDER), pair)["math"]) == 20
    assert files.interleave([[(1,), (2,)], [(3,)]]) == [(1,), (3,), (2,)]


def test_gguf_file_is_recognised_by_its_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.comparison.peers.find_spec", lambda name: True)
    (tmp_path / "model").write_bytes(b"GGUF\x03")
    (tmp_path / "text").write_bytes(b"hello")
    found = choose_peers(None, str(tmp_path / "model"), str(tmp_path / "text"))
    assert (found.mlx_lm, found.gguf, found.draft, found.left_out) == (True, tmp_path / "model", None, ())
    with pytest.raises(InvalidRequest, match="it reads GGUF files"):
        choose_peers("llama.cpp", str(tmp_path / "text"), None)
    monkeypatch.setattr("outrider.bench.comparison.peers.pull", lambda model: tmp_path / "model")
    assert choose_peers(None, "smollm2", None).gguf == tmp_path / "model"


def test_peers_that_are_not_installed_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.comparison.peers.find_spec", lambda name: name if name == "mlx_lm" else None)
    found = choose_peers(None, "model.gguf", None)
    assert found.mlx_lm and found.gguf is None
    assert found.left_out == (f"llama.cpp is left out: xllamacpp is not installed; run {install_command('bench')}",)


class Parameters(SimpleNamespace):
    """llama.cpp's parameters, whose nested parts are created on access."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Parameters())
        return getattr(self, name)


class FakeServer:
    """A llama.cpp server that sends four tokens, of which the middle two arrive together."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def handle_completions(self, request: dict[str, Any], on_chunk: Any = None) -> Any:
        self.request = request
        if on_chunk is None:
            return {"timings": {"predicted_n": 4, "predicted_ms": 1500.0}}
        for count in (1, 3, 3, 4):
            assert on_chunk({"timings": {"predicted_n": count}}) is False
        assert on_chunk({"choices": []}) is False
        return None


@pytest.fixture
def peer_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the llama.cpp peer, with a fake llama.cpp."""
    names = [one.kind for one in (*SPECULATIONS, *DRAFT_SPECULATIONS)]
    kinds = SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{n.upper().replace('-', '_')}": n for n in names})
    fake = SimpleNamespace(Server=FakeServer, CommonParams=Parameters, common_speculative_type=kinds)
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    monkeypatch.delitem(sys.modules, "outrider.bench.comparison.llama_cpp_peer", raising=False)
    import outrider.bench.comparison.llama_cpp_peer as peer_module

    yield peer_module
    sys.modules.pop("outrider.bench.comparison.llama_cpp_peer")


def start_peer(peer_module: Any, **more: Any) -> Any:
    return peer_module.LlamaCpp(**{"model": "m.gguf", "draft_model": None, "threads": 2, "slots": 3, **more})


def test_llama_cpp_peer_uses_our_sampling_and_no_prompt_cache(peer_module: Any) -> None:
    peer = start_peer(peer_module)
    found = peer.run([1, 2], 4, 0.8, 7, False)
    assert (found["count"], found["decode_seconds"]) == (4, 1.5)
    request, given = peer._server.request, peer._server.given
    assert (request["temperature"], request["seed"], request["samplers"]) == (0.8, 7, ["temperature"])
    assert (request["cache_prompt"], request["ignore_eos"], request["max_tokens"]) == (False, False, 4)
    assert (given.model.path, given.n_parallel, given.cpuparams.n_threads, given.cpuparams_batch.n_threads) == (
        "m.gguf",
        3,
        2,
        2,
    )
    assert given.n_ctx == 3 * peer_module.SLOT_CONTEXT_TOKENS


def test_llama_cpp_tokens_are_counted_as_they_arrive(peer_module: Any) -> None:
    replies = start_peer(peer_module).batch([[1], [2]], 4, 0.0, 0)["replies"]
    assert [[count for _, count in reply["arrivals"]] for reply in replies] == [[1, 2, 1]] * 2
    assert all(reply["sent"] <= reply["arrivals"][0][0] for reply in replies)


@pytest.mark.parametrize("speculation", [*SPECULATIONS, *DRAFT_SPECULATIONS], ids=lambda one: one.name)
def test_each_kind_of_speculation_has_its_own_parameters(peer_module: Any, speculation: Any) -> None:
    given = start_peer(peer_module, **asdict(speculation), draft_model="d.gguf")._server.given
    assert given.speculative.types == [speculation.kind]
    part = {"ngram-cache": "draft", "draft-simple": "draft"}.get(speculation.kind, speculation.kind.replace("-", "_"))
    found = getattr(given.speculative, part)
    assert {name: getattr(found, name) for name in speculation.settings} == dict(speculation.settings)
    assert ("mparams" in vars(found)) is (speculation.kind == "draft-simple")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_footprint_includes_the_memory_of_child_processes() -> None:
    child = "import sys; kept = b'x' * (40 << 20); print('ready', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        found = footprint.peak_memory(process.pid, lambda: None)
        process.communicate()
    assert 40 << 20 < found < 40 << 22
    assert footprint.total_memory(process.pid) == 0 or os.name != "posix"


def test_footprint_on_a_mac_is_resident_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS only root may read how much memory another process does not share."""

    def deny(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(psutil.Process, "memory_full_info", deny)
    assert footprint.total_memory(os.getpid()) > 20 * footprint.MEBIBYTE


def test_footprint_prompts_begin_differently() -> None:
    pieces = footprint._cut_prompts(range(1000), 4, 1500)
    assert [len(piece) for piece in pieces] == [1500] * 4
    assert len({piece[0] for piece in pieces}) == 4
