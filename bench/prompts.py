"""The prompts of all benchmarks: a text file per class, with prompts separated by lines with one `%`.

Prompts of the suite are questions to a chat model and pass its chat template. Prompts of the tiny pair, in
`prompts/tiny/`, are texts to continue. All were written for this project, so no model was trained on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.protocol.errors import InvalidRequest

SUITE_FOLDER = Path(__file__).parent / "prompts"
SUITE_CLASSES = ("chat", "code", "math", "summary", "extraction", "editing")
TINY_FOLDER = SUITE_FOLDER / "tiny"
TINY_CLASSES = ("code", "repeated", "prose", "json")


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
                raise InvalidRequest(f"unknown prompts {kind!r}; expected one of {', '.join(ordered)}")
        texts = {kind: paths[kind].read_text(encoding="utf-8").removesuffix("\n") for kind in kinds or ordered}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the prompts in {folder} can't be read: {error}") from error
    prompts = {kind: [entry for entry in text.split("\n%\n") if entry.strip("%\n ")] for kind, text in texts.items()}
    for kind, entries in prompts.items():
        if not entries:
            raise InvalidRequest(f"{paths[kind]} has no prompts; expected texts, separated by lines with one %")
    return prompts
