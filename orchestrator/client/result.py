"""What a client gets: chunks while a text grows, a result when it is done.

Knows numbers and words; knows nothing of sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.logprobs import NEVER, Logprobs
from outrider.protocol.messages import RoundRecord, Timings
from outrider.protocol.origins import Origin
from outrider.protocol.values import short_repr


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token's log-probability, and the likeliest tokens of its place with theirs, the likeliest first.

    The target's own, after penalties, bias and grammar, before temperature and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Chunk:
    """Text that became final, never cut inside a character, and the tokens committed since the last chunk.

    `logprobs`, `origins`: one a token, `rounds`: those that brought them, if the request asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[Origin, ...] | None = None
    rounds: tuple[RoundRecord, ...] | None = None

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """A finished completion.

    `token_ids` are the generated tokens, the one that ended the text included. `finish_reason` is eos, stop, length or
    cancelled. `mode` is what ran, `seed` what gives this text again. `notes` tell why speculation was off, if it was.
    `logprobs`, `origins`: one a token, if the request asked for them. The repr has no numbers by the token.
    """

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: str
    timings: Timings = field(repr=False)
    seed: int
    mode: str
    prompt_tokens: int
    model: str
    draft_model: str
    notes: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    origins: tuple[Origin, ...] | None = field(default=None, repr=False)

    __repr__ = short_repr

    def summary(self) -> str:
        """mlx-lm's statistics lines, one for speculation, and one for each reason why there was none."""
        times = self.timings
        prompt_rate = 1000.0 * times.prompt_n / times.prompt_ms if times.prompt_ms > 0 else 0.0
        lines = [
            f"Prompt: {self._prompt()}, {prompt_rate:.3f} tokens-per-sec",
            f"Generation: {plural(times.predicted_n, 'token')}, {times.predicted_per_second:.3f} tokens-per-sec",
            *([f"Peak memory: {times.peak_bytes / 1e9:.3f} GB"] if times.peak_bytes else []),
            f"Speculation: {speculation(times, self.mode)}",
        ]
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])

    def _prompt(self) -> str:
        """The rate beside it is of what was read; what was cached took no time."""
        cached, read = self.timings.cache_n, self.timings.prompt_n
        apart = f" ({cached} cached, {read} read)" if cached else ""
        return plural(cached + read, "token") + apart


def plural(count: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def token_logprobs(found: Logprobs) -> tuple[TokenLogprob, ...]:
    """One a row; what could not be said at all is left out of the likeliest."""
    rows = zip(found.ids.tolist(), found.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(ids[0], values[0], tuple((i, v) for i, v in zip(ids[1:], values[1:], strict=True) if v > NEVER))
        for ids, values in rows
    )


def speculation(times: Timings, mode: str) -> str:
    """Rounds, drafted, accepted, tokens per round and hits in words; `mode` is what ran."""
    # The prompt's own round, with its one token, is not of decoding and not made of drafts.
    rounds = max(times.rounds - 1, 0)
    if not times.draft_n:
        return "off" if mode == "ar" else f"nothing was drafted in {plural(rounds, 'round')}"
    looked_up = times.cache_hits + times.cache_misses
    per_round = (times.predicted_n - 1) / rounds if rounds else 0.0
    return (
        f"{plural(rounds, 'round')}, {times.draft_n} drafted, {times.draft_n_accepted} accepted"
        f" ({_share(times.draft_n_accepted, times.draft_n)}), {per_round:.2f} tokens per round,"
        f" {plural(times.cache_hits, 'hit')} ({_share(times.cache_hits, looked_up)})"
        + (f", {times.cache_late} late" if times.cache_late else "")
        + _by_name(times)
    )


def _by_name(times: Timings) -> str:
    """Whose tokens held, where several drafted."""
    held = times.draft_n_accepted_by
    return ", accepted by " + " and ".join(f"{one.name} {one.count}" for one in held) if len(held) > 1 else ""


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
