"""Proves that an output is the target's own, and all of it: replays it teacher-forced through the target alone.

Takes the file that `generate --json` printed, with model, prompt and sampling from there (flags given beside it take
their place), or generates first, with the same flags as `outrider generate`. Certified are the tokens, that no more and
no fewer belong to it, and the text. A tie is a difference that rounding explains; any other is a mismatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from outrider.orchestrator.certify import certify
from outrider.orchestrator.claim import Output, faults
from outrider.orchestrator.cli import conversation, flags, text_file
from outrider.orchestrator.cli.generate import add_generation_flags, generate, prompt_of, wish_of
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.pair.model_files import find_model
from outrider.orchestrator.pair.model_text import load_text
from outrider.orchestrator.pair.tokenizer import TextCodec
from outrider.protocol.certificate import Difference, Report
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

NOT_CERTIFIED = 1
EXPECTED = "the output of `outrider generate --json`"


COMMON = ("--json-file", "--json", "--prompt", "--model", "--draft-model", "--mode", "--max-tokens", "--temp", "--seed")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_generation_flags(parser, ("logprobs",))
    file = "the output of `outrider generate --json` (default: generate one first)"
    parser.add_argument("--json-file", type=Path, metavar="FILE", help=file)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    screen = Screen()
    output = _from_file(options) if options.json_file else _generated(options, screen)
    _require_coupled(output.sampling)
    model = find_model(output.model, keep_precision=bool(options.gguf_keep_precision))
    text = load_text(model, template=output.chat_template)
    codec, tokens = text.codec, text.tokens(output.prompt)
    if len(tokens) != output.prompt_tokens:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens and the output followed {output.prompt_tokens}; expected the prompt"
            " and the model it was made with"
        )
    report = certify(model.folder, tokens, output.token_ids, output.sampling, screen.show, codec.eos)
    found = faults(output, codec, tokens, report.context_length)
    holds = report.holds and not found
    screen.clear()
    if options.json:
        print(json.dumps({**dataclasses.asdict(report), "faults": found, "certified": holds}))
    else:
        print(_told(report, found, codec))
    return 0 if holds else NOT_CERTIFIED


def _generated(options: argparse.Namespace, screen: Screen) -> Output:
    if options.prompt is None and options.chat is None:
        raise InvalidRequest("nothing to verify; expected --json-file, or --prompt to generate from")
    prompt = prompt_of(options)
    wish = wish_of(options, prompt)
    _require_coupled(wish.sampling)
    result = generate(options, wish, screen, show_text=False)
    return Output(
        model=options.model or result.model,
        prompt=prompt,
        chat_template=wish.chat_template,
        prompt_tokens=result.prompt_tokens,
        sampling=dataclasses.replace(wish.sampling, seed=result.seed),
        token_ids=result.token_ids,
        text=result.text,
        finish_reason=result.finish_reason,
    )


def _from_file(options: argparse.Namespace) -> Output:
    path: Path = options.json_file
    found = _object(path)
    prompt = found.get("prompt") if options.prompt is None and options.chat is None else prompt_of(options)
    if prompt is None:
        raise InvalidRequest(f"{path} does not contain its prompt; expected --prompt and the sampling flags")
    try:
        return Output(
            model=options.model or _text(found["model"]),
            prompt=prompt if isinstance(prompt, str) else conversation.checked(prompt, str(path)),
            chat_template=bool(found.get("chat_template", True)) and not options.ignore_chat_template,
            prompt_tokens=int(found["prompt_tokens"]),
            sampling=SamplingParams(
                **{**found.get("sampling", {}), "seed": found["seed"], **flags.given_sampling(options)}
            ),
            token_ids=tuple(found["token_ids"]),
            text=_text(found["text"]),
            finish_reason=_text(found["finish_reason"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{path} can't be used ({error}); expected {EXPECTED}") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text_file.read(path, EXPECTED))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON ({error}); expected {EXPECTED}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path} is not a JSON object; expected {EXPECTED}")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} instead of text")
    return value


def _require_coupled(sampling: SamplingParams) -> None:
    if sampling.is_residual:
        raise InvalidRequest(
            "residual sampling can't be replayed: the text may differ each time; expected coupled sampling"
        )


def _told(report: Report, found: tuple[str, ...], codec: TextCodec) -> str:
    verdict = "certified" if report.holds and not found else "NOT the target's output"
    lines = [
        f"{report.positions} tokens replayed: {report.identical} identical, {len(report.ties)} ties"
        f" (rounding differences), {len(report.mismatches)} mismatches: {verdict}"
    ]
    lines += [f"  FAULT: {one}" for one in found]
    lines += [_line("tie", one, codec) for one in report.ties]
    lines += [_line("MISMATCH", one, codec) for one in report.mismatches]
    return "\n".join(lines)


def _line(what: str, one: Difference, codec: TextCodec) -> str:
    margin = "filtered out by the target" if one.margin is None else f"margin {one.margin:.3g} of {one.tolerance:.3g}"
    return (
        f"  {what} at {one.position}: the target generates {codec.decode((one.expected,))!r}"
        f" and the output {codec.decode((one.token,))!r}, {margin}"
    )
