"""Numbers that requests give, with the bounds that hold where they are used, so that the description tells them too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from outrider.orchestrator.http_settings import MOST_SECONDS
from outrider.orchestrator.settings import MAX_BRANCHES_ASKED, MAX_DRAFT_TOKENS
from outrider.protocol.sampling import MAX_SEED, MOST_BIAS, NUMBERS, WHOLE


def _within(name: str) -> Any:
    low, high = (WHOLE | NUMBERS)[name]
    return Field(ge=low, le=high)


Temperature = Annotated[float, _within("temp")]
TopP = Annotated[float, _within("top_p")]
MinP = Annotated[float, _within("min_p")]
TopK = Annotated[int, Field(ge=-1, le=WHOLE["top_k"][1], description="0 and -1 are off")]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
MaxTokens = Annotated[int, _within("max_tokens")]
MinTokens = Annotated[int, _within("min_tokens")]
Penalty = Annotated[float, _within("presence_penalty")]
RepetitionPenalty = Annotated[float, _within("repetition_penalty")]
ContextSize = Annotated[int, _within("repetition_context_size")]
TokenBias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
DraftTokens = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]
Branches = Annotated[int, Field(ge=1, le=MAX_BRANCHES_ASKED)]
Timeout = Annotated[float, Field(gt=0, le=MOST_SECONDS, description="seconds after which the answer is given up")]
