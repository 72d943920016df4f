"""The prompts: enough of each class, short, and all different."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.commands.files import SUITE_CLASSES, TINY_FOLDER, load_prompts
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.protocol.errors import InvalidRequest
from tests.harness.default_model import TINY_CLASSES, mixed_prompts


@pytest.mark.parametrize("kind", TINY_CLASSES)
def test_each_class_has_enough_short_prompts(kind: str) -> None:
    codec = load_codec(find_model(str(TINY_TARGET)))
    prompts = load_prompts(TINY_FOLDER, [kind])[kind]
    assert len(prompts) >= (24 if kind == "code" else 12)
    assert all(30 <= len(codec.encode(prompt)) <= 200 for prompt in prompts)
    assert all(prompt == prompt.rstrip() and "%\n" not in prompt for prompt in prompts)


def test_no_prompt_occurs_twice() -> None:
    texts = [prompt for kind in TINY_CLASSES for prompt in load_prompts(TINY_FOLDER, [kind])[kind]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("count", [4, 8, 50])
def test_mixed_prompts_are_balanced_over_classes(count: int) -> None:
    kinds = [prompt.kind for prompt in mixed_prompts(count)]
    assert len(kinds) == count
    assert min(kinds.count(kind) for kind in TINY_CLASSES) >= count // 5


@pytest.mark.parametrize("count", [0, -1, 1000])
def test_invalid_prompt_count_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match="expected 1 to"):
        mixed_prompts(count)


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected one of code"):
        load_prompts(TINY_FOLDER, ["poems"])


def test_a_class_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.txt").write_text("%\n\n")
    with pytest.raises(InvalidRequest, match=r"chat\.txt has no prompts"):
        load_prompts(tmp_path)


@pytest.mark.parametrize("kind", SUITE_CLASSES)
def test_each_suite_class_has_twenty_distinct_prompts(kind: str) -> None:
    prompts = load_prompts()[kind]
    assert len(set(prompts)) == 20
    assert all(prompt == prompt.strip() for prompt in prompts)


@pytest.mark.parametrize("kind", ["summary", "extraction", "editing"])
def test_prompts_about_a_text_contain_it(kind: str) -> None:
    assert all(80 <= len(prompt.split()) <= 250 for prompt in load_prompts()[kind])


def test_a_folder_of_classes_is_read_as_a_suite(tmp_path: Path) -> None:
    (tmp_path / "poems.txt").write_text("One\ntwo\n%\nThree\n")
    (tmp_path / "chat.txt").write_text("Hello\n")
    found = load_prompts(tmp_path)
    assert list(found) == ["chat", "poems"]
    assert found["poems"] == ["One\ntwo", "Three"]
    assert list(load_prompts(tmp_path, ["poems"])) == ["poems"]


def test_a_suite_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no prompts"):
        load_prompts(tmp_path)
    (tmp_path / "chat.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="can't be read"):
        load_prompts(tmp_path)
    with pytest.raises(InvalidRequest, match="expected one of chat"):
        load_prompts(tmp_path, ["poems"])
