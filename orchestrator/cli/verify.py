"""Proves that an output is the target's own: replays it teacher-forced through the target alone, token by token.

Generates first, with the same flags as `outrider generate`, or takes the file that `generate --json` printed (give the
same prompt and sampling flags with it). A tie is a difference that rounding explains; any other is a mismatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from outrider.orchestrator.certify import certify
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.generate import add_generation_flags, generate, wish_of
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.front.admission import prompt_tokens
from outrider.orchestrator.pair.chat import chat_template
from outrider.orchestrator.pair.model_files import find_model, read_json
from outrider.orchestrator.pair.tokenizer import TextCodec, load_codec
from outrider.protocol.certificate import Difference, Report
from outrider.protocol.errors import InvalidRequest

NOT_CERTIFIED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What is to be proved: these tokens, by this model with this seed."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    model: str
    seed: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_generation_flags(parser)
    parser.add_argument("--json-file", type=Path, metavar="FILE", help="the output of `outrider generate --json`")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    screen = Screen()
    wish = wish_of(options)
    if wish.sampling.is_residual:
        raise InvalidRequest("residual sampling may give another text each time; expected coupled sampling")
    output = _from_file(options.json_file) if options.json_file else _generated(options, screen)
    model = find_model(options.model or output.model)
    codec = load_codec(model)
    tokens = prompt_tokens(codec, chat_template(model.folder) if wish.chat_template else None, str(wish.prompt))
    if len(tokens) != output.prompt_tokens:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens and the output followed {output.prompt_tokens}; expected the prompt"
            " and the model it was made with"
        )
    sampling = dataclasses.replace(wish.sampling, seed=output.seed)
    report = certify(model.folder, tokens, output.token_ids, sampling, screen.show)
    screen.clear()
    print(json.dumps(dataclasses.asdict(report)) if options.json else _told(report, codec))
    return 0 if report.holds else NOT_CERTIFIED


def _generated(options: argparse.Namespace, screen: Screen) -> Output:
    result = generate(options, screen, show_text=False)
    return Output(result.token_ids, result.prompt_tokens, result.model, result.seed)


def _from_file(path: Path) -> Output:
    if not path.is_file():
        raise InvalidRequest(f"no such file: {path}; expected the output of `outrider generate --json`")
    found: dict[str, Any] = read_json(path)
    try:
        return Output(tuple(found["token_ids"]), int(found["prompt_tokens"]), str(found["model"]), int(found["seed"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{path} is no output of `outrider generate --json` ({error!r})") from None


def _told(report: Report, codec: TextCodec) -> str:
    verdict = "certified" if report.holds else "NOT the target's own output"
    lines = [
        f"{report.positions} tokens replayed: {report.identical} identical, {len(report.ties)} ties"
        f" (what rounding may do), {len(report.mismatches)} mismatches: {verdict}"
    ]
    lines += [_line("tie", one, codec) for one in report.ties]
    lines += [_line("MISMATCH", one, codec) for one in report.mismatches]
    return "\n".join(lines)


def _line(what: str, one: Difference, codec: TextCodec) -> str:
    margin = "filtered out by the target" if one.margin is None else f"margin {one.margin:.3g} of {one.tolerance:.3g}"
    return (
        f"  {what} at {one.position}: the target says {codec.decode((one.expected,))!r}"
        f" and the output {codec.decode((one.token,))!r}, {margin}"
    )
