"""fleet.yaml is parsed to a plan, or refused with a one-line error that names the key and the expected value."""

from __future__ import annotations

import argparse
import pickle
from dataclasses import fields

import pytest

from outrider.fleet.host import Resources, undetected_resources
from outrider.fleet.plan import DrafterPlan, FleetPlan, IngressPlan, Placed, Scale, parse_plan, read_plan
from outrider.orchestrator.cli import worker
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest

WHOLE = """
model: org/big                                    # outrider fleet run fleet.yaml
draft_model: org/small
engine: {max_active: 4, mode: auto}
placed: {replicas: 4, needs: {metal: 1}, drafter: {on: other-host, needs: {ane: 1}}}
attached: [tcp://10.0.0.11:7777, tcp://10.0.0.12:7777]
ingress: {count: 2, port: 8001, sessions: false, tries: 3, api_keys: [one]}
"""
ONE = {"attached": ["tcp://10.0.0.11:7777"]}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)

    def written(text):
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        return path

    return written


def test_every_key_is_read_into_the_plan(file):
    assert read_plan(file(WHOLE)) == FleetPlan(
        engine=ServeSettings(model="org/big", draft_model="org/small", max_active=4),
        placed=Placed(4, Resources(metal=1), DrafterPlan("other-host", Resources(ane=1))),
        attached=("tcp://10.0.0.11:7777", "tcp://10.0.0.12:7777"),
        ingress=IngressPlan(count=2, sessions=False, tries=3, port=8001, api_keys=("one",)),
    )


def test_a_key_without_a_value_has_its_defaults(file):
    assert read_plan(file("placed:\n")) == FleetPlan(placed=Placed())
    assert read_plan(file("placed: {drafter: same-host}\nscale: {max: 3}\n")) == FleetPlan(
        placed=Placed(), scale=Scale(max=3)
    )


def test_drafter_none_disables_drafting_unless_a_backend_is_given():
    assert parse_plan({"placed": {"drafter": "none"}}).engine.draft_backend == "none"
    assert (
        parse_plan({"placed": {"drafter": "none"}, "engine": {"draft_backend": "ngram"}}).engine.draft_backend
        == "ngram"
    )


def test_api_keys_come_from_the_plan_the_key_file_and_the_environment(file, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("two\nthree\n")
    monkeypatch.setenv("OUTRIDER_API_KEY", "four")
    ingress = {"host": "0.0.0.0", "api_keys": ["one"], "api_key_file": str(tmp_path / "keys")}
    assert parse_plan({**ONE, "ingress": ingress}).ingress.api_keys == ("one", "two", "three", "four")


def test_relative_paths_are_those_of_the_command_that_reads_the_plan(tmp_path, monkeypatch):
    """Because Ray's processes run in the directory in which the head was started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    engine = parse_plan({**ONE, "model": "model", "draft_model": "org/name", "engine": {"keys": "keys"}}).engine
    assert (engine.model, engine.draft_model, engine.keys) == (f"{tmp_path}/model", "org/name", tmp_path / "keys")


def test_plan_round_trips_through_pickle():
    plan = parse_plan({"placed": {"needs": {"cuda": 1, "memory": "2GiB"}}})
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_drafter_on_another_host_may_take_the_draft_that_comes_with_a_model(model):
    plan = parse_plan({"placed": {"drafter": "other-host"}, "model": model})
    assert plan.engine.model == model and plan.placed.drafter.on == "other-host"


def test_resources_are_converted_to_rays_names():
    assert Resources(0.5, 0, 0, 2, "1KiB").as_ray() == {"metal": 0.5, "CPU": 2, "memory": 1024}
    assert undetected_resources(Resources(1, 1, 0, 8, 10**9)) == {"metal": 1, "ane": 1}
    assert str(Resources(metal=0.5, memory=2**31)) == "metal 0.5, memory 2.0 GiB"
    assert Placed(needs=Resources(cpu=1), drafter=DrafterPlan("same-host", Resources(cpu=2))).bundle() == Resources(
        cpu=3
    )


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({}, "the fleet has no engine; expected placed"),
        ([], "the fleet is []; expected keys"),
        ({**ONE, "modle": 1}, "the fleet has the key 'modle'; did you mean model?"),
        ({"placed": {"replica": 2}}, "placed has the key 'replica'; did you mean replicas?"),
        ({"placed": 5}, "placed is 5; expected keys"),
        ("a file of another kind " * 9, "the fleet is 'a file of an...another kind '; expected keys"),
        ({"placed": {"replicas": -1}}, "placed: replicas is -1; expected a whole number from 1"),
        ({"placed": {"needs": {"tpu": 1}}}, "placed.needs has the key 'tpu'"),
        ({"placed": {"needs": {"cpu": -1}}}, "placed.needs: cpu is -1; expected a number from 0"),
        ({"placed": {"needs": {"metal": 2}}}, "placed.needs: metal is 2; expected a number from 0 to 1"),
        ({"placed": {"needs": {"cuda": 1.5}}}, "placed.needs: cuda is 1.5; expected a whole number"),
        ({"placed": {"needs": {"metal": 1, "cuda": 1}}}, "placed.needs: cuda can't be combined with metal"),
        ({"placed": {"needs": {"metal": 1}, "drafter": {"needs": {"cuda": 1}}}}, "or use on: other-host"),
        ({"placed": {"drafter": "mars"}}, "placed.drafter: on is 'mars'; expected one of same-host"),
        ({"placed": {"drafter": "none"}, "model": "a", "draft_model": "b"}, "placed.drafter is none; leave out one"),
        ({"placed": {"drafter": {"on": "none", "needs": {"ane": 1}}}}, "on: none starts no drafter"),
        ({"placed": {"drafter": "other-host"}, "model": "a"}, "expected draft_model in addition to model"),
        ({"placed": {"drafter": "other-host"}, "model": "gemma3-270m"}, "expected draft_model in addition to model"),
        ({"placed": {"drafter": "other-host"}, "engine": {"draft_backend": "ngram"}}, "has no process of its own"),
        ({"placed": {"drafter": "other-host"}, "engine": {"drafters": 2}}, "engine.drafters is 2; expected 1"),
        (
            {"placed": {"drafter": "other-host"}, "engine": {"draft_backend": "auto", "head_in": "draft-worker"}},
            "engine.head_in is draft-worker; expected target",
        ),
        ({"placed": {"drafter": "none"}, "engine": {"mode": "ssd"}}, "drafter is none: mode ssd needs a drafter"),
        ({"placed": {}, "engine": {"max_actve": 1}}, "engine has the key 'max_actve'; did you mean max_active?"),
        ({"placed": {}, "engine": {"endpoint": "x"}}, "engine has the key 'endpoint'; the fleet sets it itself"),
        ({"placed": {}, "engine": {"mode": "fast"}}, "engine: mode is 'fast'; expected one of auto"),
        ({"placed": {"replicas": 1}, "scale": {}}, "scale replaces placed.replicas"),
        ({"placed": {}, "scale": {"min": 3, "max": 2}}, "scale: min is 3 and max is 2"),
        ({"placed": {}, "scale": {"upscale_delay_s": -1}}, "scale: upscale_delay_s is -1; expected a number from 0"),
        ({**ONE, "scale": {}}, "scale adds placed engines, but placed is missing"),
        ({"attached": "tcp://a:1"}, "attached is 'tcp://a:1'; expected a list of strings"),
        ({"attached": ["tcp://a"]}, "attached: 'tcp://a' has no port"),
        ({"attached": ["tcp://a:0"]}, "attached: tcp://a:0 is an address to listen on, not to connect to"),
        ({"attached": ["tcp://a:1", "tcp://a:1"]}, "attached names tcp://a:1 twice"),
        ({**ONE, "ingress": {"host": "0.0.0.0"}}, "expected one in api_keys (--api-key), api_key_file"),
        ({**ONE, "ingress": {"api_keys": [12]}}, "ingress.api_keys is [12]; expected a list of strings"),
        ({**ONE, "ingress": {"port": 70000}}, "ingress: port is 70000; expected a whole number from 0 to 65535"),
        ({**ONE, "ingress": {"host": 5}}, "ingress: host is 5; expected text"),
        ({**ONE, "ingress": {"api_key_file": 5}}, "ingress.api_key_file is 5; expected a path"),
        ({"placed": {"needs": {"memory": []}}}, "placed.needs: memory is []; expected a whole number"),
        ({"placed": {"needs": [1]}}, "placed.needs is [1]; expected keys"),
        ({"placed": {"drafter": ["none"]}}, "placed.drafter is ['none']; expected keys"),
        ({"placed": {"replicas": {}}}, "placed: replicas is {}; expected a whole number"),
        ({"placed": {}, "scale": {"max": None}}, "scale: max is None; expected a whole number"),
        ({"placed": {}, "engine": {"head": {}}}, "engine: head is {}; expected text"),
        ({"placed": {}, "model": 5}, "engine: model is 5; expected text"),
    ],
)  # fmt: skip
def test_error_of_an_invalid_value_names_its_key(found, sentence, monkeypatch):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    with pytest.raises(InvalidRequest) as refused:
        parse_plan(found)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("placed: {\n", "is not YAML"),
        ("placed: {}\nplaced: {}\n", "the key 'placed' is duplicated"),
        ("modle: a\n", "fleet.yaml: the fleet has the key 'modle'"),
        ("!!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)
def test_invalid_plan_file_is_a_one_line_error(file, text, sentence):
    with pytest.raises(InvalidRequest) as refused:
        read_plan(file(text))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_missing_plan_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"can't be read \(No such file or directory\); expected a fleet"):
        read_plan(tmp_path / "none.yaml")


@pytest.mark.fleet
def test_a_drafter_on_another_host_gets_every_setting_that_concerns_it() -> None:
    from outrider.fleet.engine import DRAFTER_SETTINGS

    parser = argparse.ArgumentParser()
    worker.add_flags(parser)
    taken = {action.dest for action in parser._actions} & {field.name for field in fields(ServeSettings)}
    others = {"head", "head_in", "ngram_table", "shards", "colocate", "prefill_backend"}  # for other workers
    assert set(DRAFTER_SETTINGS) == taken - others - {"keys"}  # it gets its own keys
