"""Verifies that an output is exactly the target's, by a teacher-forced replay through the target alone.

Reads the output of `outrider generate --json`. Checks the tokens, where the output ends, and the text. A tie is a
difference within rounding; any other difference is a mismatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.generate import as_chat
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.dialogue import pluralize
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import MODELS_ONLY, child_environment, python
from outrider.orchestrator.pairing.chat_template import Message
from outrider.orchestrator.pairing.detokenizer import TextStream
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec
from outrider.protocol.errors import InvalidRequest, WorkerError, make_error
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import Claim, Difference, Report

REPLAY_THREADS = 1
MAX_QUOTED = 20
NOT_CERTIFIED_EXIT_CODE = 1
EXPECTED_OUTPUT = "the output of `outrider generate --json`"


def certify(claim: Claim, progress: Callable[[str], None], kernels: str | None = None) -> Report:
    """Replays a claim in a process that imports MLX. `progress` is called with each stage; `kernels`: see
    `blas_environment`.

    Raises:
        OutriderError: the error that the process reported, or WorkerError if it ended without a report.
    """
    environment = system.blas_environment(child_environment(), REPLAY_THREADS, kernels)
    command = python("-m", MODELS_ONLY, "outrider.target_worker.certificate")
    with tempfile.TemporaryFile() as stdin:
        stdin.write(msgspec.json.encode(claim))
        stdin.seek(0)
        with subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
        ) as process:
            try:
                report = _read_report(process.stdout or (), progress)
            finally:
                process.kill()  # the report has been read, or is no longer needed
    if report is None:
        raise WorkerError(f"the replay ended with code {process.returncode} before its report; see its stderr")
    return report


def _read_report(lines: Iterable[str], progress: Callable[[str], None]) -> Report | None:
    for fields in map(json.loads, lines):
        if "error" in fields:
            raise make_error(fields["kind"], fields["error"])
        if "positions" in fields:
            return msgspec.convert(fields, Report)
        progress(fields.get("stage") or f"replaying: {fields['position']} of {fields['of']} tokens")
    return None


# An output, and the checks that need no model: the text that the tokens decode to, and where the output has to end.


@dataclass(frozen=True, slots=True)
class Output:
    """An output to verify. `sampling` has the seed in use; `prompt_tokens` is the length of the prompt in tokens."""

    model: str
    prompt: str | tuple[Message, ...]
    chat_template: bool
    prompt_tokens: int
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def find_faults(output: Output, codec: TextCodec, prompt: tuple[int, ...], context_length: int) -> tuple[str, ...]:
    """Returns how the output's end, finish reason or text contradicts its tokens, which are taken as the target's."""
    sampling = output.sampling
    eos = codec.end_tokens(sampling)
    stream = TextStream(codec.spelling, prompt, sampling.stop, eos)
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
    sentences = []
    if not reason:
        sentences.append(f"it ends after {count} tokens without an end token or stop string, but {room} were requested")
    elif count < len(output.token_ids):
        sentences.append(f"it has {len(output.token_ids)} tokens, but ends with {reason} after {count}")
    elif reason != output.finish_reason:
        sentences.append(f"its finish_reason is {output.finish_reason}, but it ends with {reason}")
    if text != output.text:
        sentences.append(_first_difference(text, output.text))
    return tuple(sentences)


def _first_difference(decoded: str, text: str) -> str:
    pairs = enumerate(zip(decoded, text, strict=False))
    at = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(decoded), len(text)))
    return (
        f"its text differs from its tokens at character {at}: the tokens decode to {decoded[at : at + MAX_QUOTED]!r}"
        f" and the text has {text[at : at + MAX_QUOTED]!r}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=EXPECTED_OUTPUT)
    parser.add_argument("--model", metavar="ID|PATH", help="the target (default: the file's)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    for name in ("cpu_kernels", "gguf_keep_precision", "log_level", "log_format"):
        flags.add_setting(parser.add_argument, name)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    flags.settings_of(options)  # checks them
    screen, output = Screen(), _read_output(options)
    output.sampling.require_coupled()
    model = find_model(output.model, keep_precision=bool(options.gguf_keep_precision))
    codec = load_codec(model, template=output.chat_template)
    tokens = codec.encode_prompt(output.prompt)
    if len(tokens) != output.prompt_tokens:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens, and the output's prompt had {output.prompt_tokens}; expected the"
            " model that the output was generated with"
        )
    ends = tuple(codec.end_tokens(output.sampling))
    claim = Claim(str(model.folder), tokens, output.token_ids, output.sampling, ends)
    report = certify(claim, screen.show, options.cpu_kernels)
    own_faults = find_faults(output, codec, tokens, report.context_length)
    holds = report.holds and not own_faults
    screen.clear()
    if options.json:
        print(json.dumps({**dataclasses.asdict(report), "faults": own_faults, "certified": holds}))
    else:
        print(_format_report(report, own_faults, codec))
    return 0 if holds else NOT_CERTIFIED_EXIT_CODE


def _read_output(options: argparse.Namespace) -> Output:
    path: Path = options.file
    try:
        found = msgspec.json.decode(flags.read_text_file(path, EXPECTED_OUTPUT), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not a JSON object ({error}); expected {EXPECTED_OUTPUT}") from None
    try:
        if not isinstance(found["prompt"], str):
            as_chat(found["prompt"], str(path))
        found |= {
            "model": options.model or found["model"],
            "chat_template": found.get("chat_template", True),
            "sampling": SamplingParams(**{**found.get("sampling", {}), "seed": found["seed"]}),
        }
        return msgspec.convert(found, Output)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise InvalidRequest(f"{path} can't be used ({why}); expected {EXPECTED_OUTPUT}") from None


def _format_report(report: Report, own_faults: tuple[str, ...], codec: TextCodec) -> str:
    verdict = "certified" if report.holds and not own_faults else "NOT the target's output"
    different = len(report.mismatches)
    lines = [
        f"{pluralize(report.positions, 'token')} replayed: {report.identical:,} identical,"
        f" {pluralize(len(report.ties), 'tie')} (rounding differences),"
        f" {different:,} mismatch{'' if different == 1 else 'es'}: {verdict}"
    ]
    lines += [f"  FAULT: {fault}" for fault in own_faults]
    lines += [_format_difference("tie", tie, codec) for tie in report.ties]
    lines += [_format_difference("MISMATCH", mismatch, codec) for mismatch in report.mismatches]
    return "\n".join(lines)


def _format_difference(kind: str, at: Difference, codec: TextCodec) -> str:
    margin = "filtered out by the target" if at.margin is None else f"margin {at.margin:.3g} of {at.tolerance:.3g}"
    return (
        f"  {kind} at {at.position}: the target generates {codec.decode((at.expected,))!r}"
        f" and the output has {codec.decode((at.token,))!r}, {margin}"
    )
