"""An output and all that is said of it: model, prompt, sampling, tokens, text and why it ends there.

Knows which text tokens spell and where a text must end; whether the tokens are the target's is `certify`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.pair.chat import Message
from outrider.orchestrator.pair.tokenizer import TextCodec
from outrider.protocol.sampling import SamplingParams

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
