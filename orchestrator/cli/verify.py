"""Proves that an output is the target's own, and all of it: replays it teacher-forced through the target alone.

Takes the file that `generate --json` printed, with model, prompt and sampling from there (flags given beside it take
their place), or generates first, with the same flags as `outrider generate`. Certified are the tokens, that no more
and no fewer belong to it, and the text. A tie is a difference that rounding explains; any other is a mismatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.generate import add_generation_flags, checked, generate, prompt_of, request_of
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import Message, TextCodec, load_text
from outrider.protocol.errors import InvalidRequest, WorkerError, as_error
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import Difference, Report

# Asks the target itself whether an output is its own: runs `target_worker.certificate` as a process. Knows the claim
# and the report; the replay, and MLX with it, stay in the other process.

THREADS = 1


def certify(
    folder: Path,
    tokens: Sequence[int],
    generated: Sequence[int],
    sampling: SamplingParams,
    progress: Callable[[str], None],
    ends: Iterable[int] = (),
) -> Report:
    """Replays `generated`, said to follow `tokens`, through the model in `folder`. `progress` hears the stages.

    `ends` are the tokens that may end a grammar's text.

    Raises:
        OutriderError: of the class the process named; WorkerError when it ends without a word.
    """
    claim = {
        "model": os.fspath(folder),
        "tokens": list(tokens),
        "generated": list(generated),
        "sampling": dataclasses.asdict(sampling),
        "ends": list(ends),
    }
    environment = system.environment(child_environment(), THREADS)
    command = python("-m", "outrider.target_worker.certificate")
    with (
        tempfile.TemporaryFile("w+") as stdin,
        subprocess.Popen(
            command, stdin=_written(stdin, claim), stdout=subprocess.PIPE, env=environment, text=True,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            report = _listen(process.stdout or (), progress)
        finally:
            process.kill()  # it has said all it had to say, or nobody listens any more
    if report is None:
        raise WorkerError(f"the replay ended with code {process.returncode} before its report; its stderr tells why")
    return report


def _written(file: IO[str], claim: dict[str, Any]) -> IO[str]:
    json.dump(claim, file)
    file.seek(0)
    return file


def _listen(lines: Iterable[str], progress: Callable[[str], None]) -> Report | None:
    return next((report for line in lines if (report := _take(json.loads(line), progress)) is not None), None)


def _take(told: dict[str, Any], progress: Callable[[str], None]) -> Report | None:
    if "error" in told:
        raise as_error(told["kind"], told["error"])
    if "positions" in told:
        ties, mismatches = (tuple(Difference(**one) for one in told[name]) for name in ("ties", "mismatches"))
        return Report(told["positions"], told["identical"], ties, mismatches, told["context_length"])
    progress(told.get("stage") or f"replaying: {told['position']} of {told['of']} tokens")
    return None


# An output and all that is said of it: model, prompt, sampling, tokens, text and why it ends there. Knows which text
# tokens spell and where a text must end; whether the tokens are the target's is `certify`'s to say.

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Output:
    """`sampling` has the seed it was made with; `prompt_tokens` counts the tokens that `prompt` stood for."""

    model: str
    prompt: str | tuple[Message, ...]
    chat_template: bool
    prompt_tokens: int
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def faults(output: Output, codec: TextCodec, prompt: tuple[int, ...], context_length: int) -> tuple[str, ...]:
    """What its tokens, were they the target's, do not bear out: that they are all, the text, the reason to end."""
    sampling = output.sampling
    eos = frozenset() if sampling.ignore_eos else codec.eos
    stream = TextStream(codec, prompt, sampling.stop, eos)
    room = min(sampling.max_tokens, context_length - len(prompt))
    text, reason, count = "", "", 0
    for count, token in enumerate(output.token_ids, start=1):
        piece = stream.feed((token,))
        text += piece.text
        reason = "stop" if piece.stopped else "eos" if token in eos else "length" if count == room else ""
        if reason:
            break
    last = stream.finish()
    text, reason = text + last.text, "stop" if last.stopped else reason
    found = []
    if not reason:
        found.append(f"it stops after {count} tokens without an end token or stop string, but {room} were requested")
    elif count < len(output.token_ids):
        found.append(f"it continues past its end: {len(output.token_ids)} tokens, but {reason} ends it after {count}")
    elif reason != output.finish_reason:
        found.append(f"it ended with {reason} but claims {output.finish_reason}")
    if text != output.text:
        found.append(_first_difference(text, output.text))
    return tuple(found)


def _first_difference(spelled: str, said: str) -> str:
    pairs = enumerate(zip(spelled, said, strict=False))
    at = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(spelled), len(said)))
    return (
        f"its text is not what its tokens spell: from character {at} on they say {spelled[at : at + SHOWN]!r}"
        f" and the text {said[at : at + SHOWN]!r}"
    )


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
    request = request_of(options, prompt)
    _require_coupled(request.sampling)
    result = generate(options, request, screen, show_text=False)
    return Output(
        model=options.model or result.model,
        prompt=prompt,
        chat_template=request.chat_template,
        prompt_tokens=result.prompt_tokens,
        sampling=dataclasses.replace(request.sampling, seed=result.seed),
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
            prompt=prompt if isinstance(prompt, str) else checked(prompt, str(path)),
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
        found = json.loads(flags.read_text_file(path, EXPECTED))
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
