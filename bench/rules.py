"""How often each rule of verification accepts and foresees the bonus token.

Reads one JSON object a line from stdin, {tokens, max_tokens, temp, seed, fan_out, saguaro: [C, ...], q_width}: the
target writes `max_tokens` tokens after the prompt, then every place of that text is drafted and judged once by each
rule, with the engine's own draws and rulings. Answers {rule: {places, accepted, foreseen, foreseen_full}}.

A prefix that was accepted is a text of the target's, so places of such a text stand for all chain positions. A bonus
token is foreseen when it is among the `fan_out` best of the drafter, the rejected one left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.bench.helper import answer_all
from outrider.engine.draws import Draws, Keys, draw
from outrider.engine.loading import LoadedModel, load
from outrider.engine.noise import Purpose, gumbel_numpy, stream
from outrider.engine.residual import Floats, ResidualSampler
from outrider.engine.slots import open_slots
from outrider.engine.verify import verify
from outrider.orchestrator.cli import run_as_program
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.sparse import SparseQ

# The draft's stream of sample-match: noise that neither the target nor coupling knows.
OWN = 1 << 40


@dataclass(slots=True)
class Tally:
    """Of `places`, `accepted` drafts held. `foreseen` bonus tokens after the others, and `foreseen_full` at all places
    as if the place came after a chain that held whole."""

    places: int = 0
    accepted: int = 0
    foreseen: int = 0
    foreseen_full: int = 0

    def add(self, held: bool, foreseen: bool, foreseen_full: bool) -> None:
        self.places += 1
        self.accepted += held
        self.foreseen += foreseen and not held
        self.foreseen_full += foreseen_full


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token is chosen: its position, and what both models think there, log-probabilities [V]."""

    position: int
    log_p: Floats
    log_q: Floats


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of one text."""

    sampling: SamplingParams
    fan_out: int
    saguaro: tuple[float, ...]


def places(target: LoadedModel, draft: LoadedModel, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Place]:
    """The places of a text that the target writes after `prompt`."""
    slot = open_slots(target, [prompt], [sampling])[0]
    text = [*prompt, *(verify(slot).bonus for _ in range(sampling.max_tokens))]
    temp = sampling.temp or 1.0
    p, q = (_log_softmax(np.array(model.model(mx.array([text[:-1]]))[0] / temp)) for model in (target, draft))
    for position in range(len(prompt), len(text)):
        yield Place(position, p[position - 1], q[position - 1])


def tallies(found: Sequence[Place], case: Case) -> dict[str, Tally]:
    """Every rule over the same places."""
    if case.sampling.temp == 0:
        return {"greedy": _by_equality(found, case, noisy=False)}
    rules = {"coupled": _by_equality(found, case), "sample-match": _by_matching(found, case)}
    for saguaro in case.saguaro:
        rules["residual" if saguaro == 1 else f"residual, C = {saguaro:g}"] = _by_residual(found, case, saguaro)
    return rules


def _by_equality(found: Sequence[Place], case: Case, *, noisy: bool = True) -> Tally:
    """Coupled: both choose with the same noise; greedy: with none."""
    tally = Tally()
    for place in found:
        noise = _noise(case.sampling.seed or 0, place) if noisy else 0.0
        target, scores = int((place.log_p + noise).argmax()), place.log_q + noise
        drafted = int(scores.argmax())
        best = _best(scores, case.fan_out + 1)
        tally.add(target == drafted, _among(target, best, case, drafted), _among(target, best, case))
    return tally


def _by_matching(found: Sequence[Place], case: Case) -> Tally:
    """mlx-lm's: both sample by themselves, and the draft holds when they agree."""
    tally = Tally()
    for place in found:
        seed = case.sampling.seed or 0
        target = int((place.log_p + _noise(seed, place)).argmax())
        drafted = int((place.log_q + _noise(stream(seed, Purpose.DRAFT, OWN), place)).argmax())
        best = _best(place.log_q, case.fan_out + 1)
        tally.add(target == drafted, _among(target, best, case, drafted), _among(target, best, case))
    return tally


def _by_residual(found: Sequence[Place], case: Case, saguaro: float) -> Tally:
    """Leviathan-Chen, with the engine's sparse q and rulings."""
    params, tally = case.sampling, Tally()
    sampler = ResidualSampler(params, len(found[0].log_p))
    draws = Draws(params.seed or 0, params.q_width, saguaro, case.fan_out)
    for place in found:
        keys = Keys([stream(draws.seed, Purpose.DRAFT, place.position - 1)], [place.position])
        drawn = draw(np, draws, keys, place.log_q[None])
        drafted, q = int(drawn.chosen[0]), SparseQ(drawn.ids.astype(np.int32), drawn.probs)
        held = sampler.accepted(place.log_p[None], [place.position], [drafted], q) == 1
        best = _best(place.log_q, case.fan_out + 1)
        instead, bonus = (sampler.instead(place.log_p, place.position, left) for left in (q, None))
        tally.add(held, _among(instead, best, case, drafted), _among(bonus, best, case))
    return tally


def _noise(seed: int, place: Place) -> Floats:
    noise: Floats = gumbel_numpy(seed, [place.position], len(place.log_p))[0]
    return noise


def _best(scores: Floats, count: int) -> list[int]:
    """Best first."""
    top = np.argpartition(-scores, count)[:count]
    return [int(token) for token in top[np.argsort(-scores[top])]]


def _among(token: int, best: Sequence[int], case: Case, rejected: int | None = None) -> bool:
    return token in [other for other in best if other != rejected][: case.fan_out]


def _log_softmax(scores: Floats) -> Floats:
    below = scores - scores.max(axis=-1, keepdims=True)
    normalised: Floats = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return normalised


def answer(target: LoadedModel, draft: LoadedModel, asked: dict[str, Any]) -> dict[str, Any]:
    sampling = SamplingParams(
        max_tokens=asked["max_tokens"], temp=asked["temp"], seed=asked["seed"], q_width=asked["q_width"]
    )
    case = Case(sampling, asked["fan_out"], tuple(asked["saguaro"]))
    found = list(places(target, draft, asked["tokens"], sampling))
    return {rule: asdict(tally) for rule, tally in tallies(found, case).items()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)


def run(options: argparse.Namespace) -> int:
    target, draft = load(options.model), load(options.draft_model)
    answer_all(lambda asked: answer(target, draft, asked))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
