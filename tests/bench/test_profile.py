"""A latency profile is read completely or refused in a sentence, and gives the time of a forward of any size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.protocol.errors import InvalidRequest
from tools.latency import Latency
from tools.simulation.profile import PROFILES, Profile, Published

GOOD: dict[str, Any] = {
    "name": "a machine",
    "sources": ["a page"],
    "target_ms": {"1": 18.3, "8": 19.0},
    "draft_ms": {"1": 1.8},
    "link_ms": 0.5,
    "acceptance": [0.9, 0.8],
    "bonus_ranks": [0.6, 0.2],
}
PUBLISHED = {"ar": 54.7, "sd": 161.8, "ssd": 255.8, "sd_depth": 6, "ssd_depth": 7, "branches": 24}
SHIPPED = sorted(PROFILES.glob("*.json"))


@pytest.fixture
def write(tmp_path):
    def write(content: object) -> Path:
        path = tmp_path / "machine.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_a_profile_is_read_from_json(write):
    profile = Profile.read(write(GOOD | {"notes": ["guessed"]}))
    assert profile.target == Latency(((1, 18.3), (8, 19.0)))
    assert profile.draft == Latency(((1, 1.8),))
    assert (profile.link_ms, profile.acceptance, profile.bonus_ranks) == (0.5, (0.9, 0.8), (0.6, 0.2))


def test_published_rates_are_read_from_the_same_file(write):
    profile = Profile.read(write(GOOD | {"published": PUBLISHED}))
    assert profile.published == Published(54.7, 161.8, 255.8, 6, 7, 24)
    assert Profile.read(write(GOOD)) == replace(profile, published=None)


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_field_is_named(write, name):
    with pytest.raises(InvalidRequest, match=rf"missing required field `{name}`; see docs/simulation\.md") as raised:
        Profile.read(write({key: value for key, value in GOOD.items() if key != name}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_ms": {"1": -1.0}}, r"Expected `float` >= 0.0 - at `\$.target_ms"),
        ({"target_ms": {"1": None}}, r"Expected `float`, got `null` - at `\$.target_ms"),
        ({"target_ms": {"1": True}}, r"Expected `float`, got `bool` - at `\$.target_ms"),
        ({"target_ms": {"0": 1.0}}, r"Expected `int` >= 1 - at `key` in `\$.target_ms`"),
        ({"target_ms": {"one": 1.0}}, r"Expected `int`, got `str` - at `key` in `\$.target_ms`"),
        ({"target_ms": {"1": 1.0, "01": 2.0}}, r"Expected `int`, got `str` - at `key` in `\$.target_ms`"),
        ({"draft_ms": {}}, r"Expected `object` of length >= 1 - at `\$.draft_ms`"),
        ({"draft_ms": 3.0}, r"Expected `object`, got `float` - at `\$.draft_ms`"),
        ({"link_ms": -0.1}, r"Expected `float` >= 0.0 - at `\$.link_ms`"),
        ({"link_ms": "fast"}, r"Expected `float`, got `str` - at `\$.link_ms`"),
        ({"acceptance": []}, r"Expected `array` of length >= 1 - at `\$.acceptance`"),
        ({"acceptance": [1.5]}, r"Expected `float` <= 1.0 - at `\$.acceptance\[0\]`"),
        ({"acceptance": 0.9}, r"Expected `array`, got `float` - at `\$.acceptance`"),
        ({"bonus_ranks": [0.6, 0.6]}, "add up to 1.2"),
        ({"sources": "a page"}, r"Expected `array`, got `str` - at `\$.sources`"),
        ({"name": ""}, r"Expected `str` of length >= 1 - at `\$.name`"),
    ],
)
def test_out_of_range_profile_value_is_refused(write, change, words):
    with pytest.raises(InvalidRequest, match=words) as raised:
        Profile.read(write(GOOD | change))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("published", "words"),
    [
        ([1], r"Expected `object.*, got `array`"),
        (PUBLISHED | {"sd_depth": 0}, r"Expected `int` >= 1 - at `\$.published.sd_depth`"),
        ({"ar": 1.0}, "missing required field `sd`"),
    ],
)
def test_published_rates_out_of_range_are_refused(write, published, words):
    with pytest.raises(InvalidRequest, match=words):
        Profile.read(write(GOOD | {"published": published}))


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"name": NaN'])
def test_file_that_is_not_a_profile_is_refused(write, content):
    with pytest.raises(InvalidRequest, match=r"machine\.json can't be used"):
        Profile.read(write(content))


def test_nan_and_infinite_times_are_refused(write):
    for word in ("NaN", "Infinity"):
        with pytest.raises(InvalidRequest, match="link_ms"):
            Profile.read(write(json.dumps(GOOD).replace("0.5", word)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"none\.json can't be read: No such file"):
        Profile.read(tmp_path / "none.json")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_have_sources_and_notes(path):
    profile = Profile.read(path)
    assert profile.sources and profile.notes


def test_latency_interpolates_linearly_between_its_points():
    latency = Latency(((1, 10.0), (5, 12.0), (9, 20.0)))
    assert [latency(rows) for rows in (1, 5, 9)] == [10.0, 12.0, 20.0]
    assert latency(3) == pytest.approx(11.0)
    assert latency(7) == pytest.approx(16.0)


def test_latency_extrapolates_linearly_but_never_below_its_points():
    rising, falling = Latency(((2, 10.0), (4, 14.0))), Latency(((1, 5.0), (2, 4.0)))
    assert rising(6) == pytest.approx(18.0)
    assert rising(1) == 10.0
    assert falling(9) == 4.0


def test_latency_with_one_point_is_constant():
    assert {Latency(((4, 3.0),))(rows) for rows in (1, 4, 99)} == {3.0}


@given(st.dictionaries(st.integers(1, 64), st.floats(0, 1000), min_size=1), st.integers(1, 200))
def test_latency_is_never_below_its_least_point(points, rows):
    latency = Latency(tuple(sorted(points.items())))
    assert latency(rows) >= min(points.values()) - 1e-9
