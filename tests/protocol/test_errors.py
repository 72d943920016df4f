"""An error's message can be printed and sent, whatever names it contains."""

from __future__ import annotations

import pytest

from outrider.protocol.errors import ModelError


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\rb\x00c", r"a\rb\x00c"),
        ("a\x1cb\u2028c", r"a\x1cb\u2028c"),
        ("mod\udce8le", r"mod\udce8le"),
        ("modèle 模型 😀", "modèle 模型 😀"),
        ("a\n   ^", "a\n   ^"),
    ],
)
def test_only_what_cannot_be_printed_or_sent_is_escaped(name: str, shown: str) -> None:
    assert str(ModelError(f"{name} can't be read")) == f"{shown} can't be read"
