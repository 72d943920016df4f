"""Inputs and outputs of a bench: prompts, comma-separated flags, a JSON record, and pictures.

A class of prompts is a text file, with prompts separated by lines with one `%`. Those in `prompts/` are questions to a
chat model and pass its chat template; those in `prompts/tiny/` are texts for other models to continue. All were written
for this project, so no model was trained on them.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from outrider.orchestrator.cli.terminal import say
from outrider.orchestrator.machine import system
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import MODES, ServeSettings
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.process import cpu_fields, cpu_flags
from outrider.protocol.version import install_command, installed_release, missing_modules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUITE_FOLDER = Path(__file__).parents[1] / "prompts"
SUITE_CLASSES = ("chat", "code", "math", "summary", "extraction", "editing")
TINY_FOLDER = SUITE_FOLDER / "tiny"

REPORTED_LIBRARIES = ("mlx", "mlx-lm", "onnxruntime", "pyzmq", "numpy", "xllamacpp")

Tokens = tuple[int, ...]

N = TypeVar("N", int, float)


def write_results(path: Path, settings: ServeSettings, results: Mapping[str, Any]) -> None:
    """Writes the results as JSON, with a description of the machine.

    Raises:
        InvalidRequest: the file can't be written.
    """
    found = {"machine": describe_machine(settings), **results}
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    except OSError as error:
        raise InvalidRequest(f"the results can't be written to {path}: {error.strerror}") from error


def write_picture(path: Path, draw: Callable[[], Figure]) -> None:
    """Draws and writes a picture, and prints its path; without Matplotlib only a note.

    Raises:
        InvalidRequest: the file can't be written.
    """
    if missing_modules("bench"):
        say(f"Note: no picture was drawn, because Matplotlib is not installed ({install_command('bench')}).")
        return
    try:
        draw().savefig(path, dpi=110)
    except OSError as error:
        raise InvalidRequest(f"the picture can't be written to {path}: {error.strerror}") from error
    print(f"picture: {path}")


def describe_machine(settings: ServeSettings) -> dict[str, Any]:
    """Describes this machine. Kernels differ by the vector instructions of the CPU."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": cpu_fields().get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "vectors": [one for one in cpu_flags() if one.startswith(("avx", "amx"))],
        "versions": {name: installed_release(name) for name in REPORTED_LIBRARIES},
        "blas": system.blas_notes(),
        "threads": {role: system.threads_of(role, settings) for role in ("target", "draft")},
        "branches": settings.breadth,
    }


def add_flags(group: argparse._ArgumentGroup) -> None:
    kinds = "classes of prompts (default: all)"
    group.add_argument("--classes", metavar="C,C,...", help=kinds)
    folder = (
        "a folder of prompts, one CLASS.txt per class, prompts separated by lines with one %%; without DIR: Outrider's"
        " chat prompts (default: these, or texts to continue for a model without a chat template)"
    )
    group.add_argument("--suite", nargs="?", type=Path, const=SUITE_FOLDER, metavar="DIR", help=folder)


def load_prompts(folder: Path = SUITE_FOLDER, kinds: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Returns a suite's prompts by class: each `*.txt` of the folder is a class. `kinds`: the classes to load.

    Raises:
        InvalidRequest: the folder or a class has no prompts.
    """
    try:
        paths = {path.stem: path for path in sorted(folder.glob("*.txt"))}
        if not paths:
            raise InvalidRequest(f"{folder} has no prompts; expected files like chat.txt, prompts separated by % lines")
        ordered = [kind for kind in SUITE_CLASSES if kind in paths] + sorted(paths.keys() - set(SUITE_CLASSES))
        for kind in kinds or ():
            if kind not in paths:
                raise InvalidRequest(f"unknown class {kind!r}; expected one of {', '.join(ordered)}")
        texts = {kind: paths[kind].read_text(encoding="utf-8").removesuffix("\n") for kind in kinds or ordered}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the prompts in {folder} can't be read: {error}") from error
    prompts = {kind: [entry for entry in text.split("\n%\n") if entry.strip("%\n ")] for kind, text in texts.items()}
    for kind, entries in prompts.items():
        if not entries:
            raise InvalidRequest(f"{paths[kind]} has no prompts; expected texts, separated by lines with one %")
    return prompts


def load_prompt_tokens(options: argparse.Namespace, pair: ChosenPair) -> dict[str, list[Tokens]]:
    """Returns prompts as tokens, by class, through the model's chat template if it has one.

    Raises:
        InvalidRequest: there are no such prompts.
    """
    kinds = None if options.classes is None else options.classes.split(",")
    codec = load_codec(pair.target, template=True)
    found = load_prompts(options.suite or (TINY_FOLDER if codec.template is None else SUITE_FOLDER), kinds)
    return {kind: list(map(codec.encode_prompt, prompts)) for kind, prompts in found.items()}


def interleave(classes: Sequence[Sequence[Tokens]]) -> list[Tokens]:
    """Returns the prompts of all classes, interleaved: one of each class in turn."""
    return [tokens for tokens in chain.from_iterable(zip_longest(*classes)) if tokens is not None]


def parse_numbers(name: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """Parses comma-separated numbers, without duplicates.

    Raises:
        InvalidRequest: the text is something else.
    """
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise InvalidRequest(f"{name} is {text!r}; expected comma-separated numbers, like 2,3,4") from None


def parse_modes(text: str) -> list[str]:
    """Parses comma-separated modes, without duplicates.

    Raises:
        InvalidRequest: one is unknown.
    """
    return [values.check_choice("modes", mode, MODES) for mode in dict.fromkeys(text.split(","))]
