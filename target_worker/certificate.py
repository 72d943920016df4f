"""`python -m outrider.target_worker.certificate`: replays an output and says which tokens are the target's own.

Reads one JSON object {model, tokens, generated, sampling, ends} from stdin, writes JSON lines: {stage} and {position,
of} as it goes, then the report, or {error, kind}. Each token is chosen by a single-step forward over all before it, as
plain decoding does it; what a difference means is `judgement`'s. Knows one text's tokens.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engine.loading import LoadedModel, load
from outrider.engine.open_texts import open_texts
from outrider.engine.slots import Slot
from outrider.engine.texts import SeparateTexts
from outrider.grammar.compiler import Compiler
from outrider.protocol.certificate import Difference, Report
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.judgement import is_tie, judge

PROGRESS_EVERY = 16


@dataclass(frozen=True, slots=True)
class Claim:
    """`generated` is said to be what `model` samples after `tokens` with `sampling`; one of `ends` ends a grammar."""

    model: str
    tokens: tuple[int, ...]
    generated: tuple[int, ...]
    sampling: SamplingParams
    ends: tuple[int, ...] = ()


def certify(model: LoadedModel, claim: Claim, progress: Callable[[int, int], None] | None = None) -> Report:
    """Replays the claim. `progress(done, total)` counts generated tokens.

    Raises:
        InvalidRequest: the claim has no tokens, or tokens the model doesn't have.
    """
    if claim.sampling.is_residual:
        raise InvalidRequest(
            "residual sampling can't be replayed: the text may differ each time; expected coupled sampling"
        )
    constraint = Compiler(model.folder).asked(claim.sampling, claim.ends, len(claim.tokens))
    texts = SeparateTexts(model.model) if model.cpu is None else open_texts(model)  # by the kernels that chose
    slot = Slot(model, texts, claim.tokens, claim.sampling, constraint)
    if any(not 0 <= token < model.vocab_size for token in claim.generated):
        raise InvalidRequest(f"a generated token is outside 0..{model.vocab_size - 1}, the model's vocabulary")
    slot.feed_all_but(1)
    ties: list[Difference] = []
    mismatches: list[Difference] = []
    for done, token in enumerate(claim.generated, start=1):
        difference = judge(slot.forward(slot.unfed)[-1:], slot.tokens, slot.sampler, token)
        if difference is not None:
            (ties if is_tie(difference) else mismatches).append(difference)
        slot.tokens.append(token)
        if progress is not None and done % PROGRESS_EVERY == 0:
            progress(done, len(claim.generated))
    identical = len(claim.generated) - len(ties) - len(mismatches)
    return Report(len(claim.generated), identical, tuple(ties), tuple(mismatches), model.context_length)


def _read_claim(text: str) -> Claim:
    """Raises InvalidRequest for anything but a claim."""
    try:
        fields = json.loads(text)
        sampling = dict(fields["sampling"])
        sampling["stop"] = tuple(sampling.get("stop", ()))
        sampling["logit_bias"] = tuple(tuple(pair) for pair in sampling.get("logit_bias", ()))
        return Claim(
            model=str(fields["model"]),
            tokens=_whole(fields["tokens"]),
            generated=_whole(fields["generated"]),
            sampling=SamplingParams(**sampling),
            ends=_whole(fields.get("ends", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"the claim can't be read ({error!r}); expected a JSON object with model, tokens, generated and sampling"
        ) from None


def _whole(tokens: Sequence[object]) -> tuple[int, ...]:
    if any(type(token) is not int for token in tokens):
        raise ValueError("tokens must be whole numbers")
    return tuple(token for token in tokens if isinstance(token, int))


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    try:
        claim = _read_claim(sys.stdin.read())
        model = load(claim.model, progress=lambda stage: _say({"stage": stage}))
        report = certify(model, claim, lambda done, total: _say({"position": done, "of": total}))
    except OutriderError as error:
        _say({"error": str(error), "kind": type(error).__name__})
        return error.exit_code
    _say(dataclasses.asdict(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
