"""Which stop sequence ended a text: the orchestrator says that one did, and the tokens tell which."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.orchestrator.front.text import Detokenizer
from outrider.orchestrator.pair.tokenizer import TextCodec
from outrider.protocol.sampling import SamplingParams


def stop_that_ended(
    codec: TextCodec, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams
) -> str | None:
    """The stop string that begins first in the text of `tokens`; None when there is none."""
    detokenizer = Detokenizer(codec, prompt)
    ends = frozenset() if sampling.ignore_eos else codec.eos
    text = "".join(detokenizer.feed(token) for token in tokens if token not in ends) + detokenizer.finish()
    found = [(place, stop) for stop in sampling.stop if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None
