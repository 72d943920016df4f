"""Plans an answer: the tokens of its prompts, sampling parameters, a grammar, and a state for each choice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.orchestrator.pairing.tokenizer import TextStream
from outrider.protocol.sampling import MAX_COUNT
from outrider.server.answers.parts import ChoiceState, Splitter
from outrider.server.mapping.generation_params import (
    OutputFormat,
    answer_grammar,
    resolve_output_format,
    sampling_params,
    seed_of,
)
from outrider.server.model.served import ServedModel, TemplateInput, TokenizedPrompt, Toolbox
from outrider.server.schemas import Generation


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The choices to generate, and what was requested of them.

    `prompt_tokens`: of all prompts. `is_chat`: the prompt is a conversation, whose tools are `box`. `form`: the output
    format. `speculation`: options of the client's `stream`. `timeout`: in seconds.
    """

    model: ServedModel
    prompt_tokens: int
    choices: list[ChoiceState]
    is_chat: bool = True
    box: Toolbox = field(default_factory=Toolbox)
    form: OutputFormat | None = None
    speculation: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def plan_answer(
    model: ServedModel,
    asked: Generation,
    source: TemplateInput | Sequence[TokenizedPrompt],
    form: OutputFormat | None,
    stop: str | Sequence[str] | None,
    max_tokens: int | None,
    logprobs: int | None = None,
    count: int = 1,
) -> AnswerPlan:
    """Plans `count` choices for a conversation, or for each prompt. It may take long: call it in a thread.

    The choices of a prompt differ in the seed. `max_tokens` None: what the context has room for.

    Raises:
        Refused, InvalidRequest, ModelError: a value is out of range, the template rejects the conversation, or the
            format or the tools can't be enforced.
    """
    if isinstance(source, TemplateInput):
        prompts, box, thinking = [model.prompt(source)], source.box, model.thinking
    else:
        prompts, box, thinking = list(source), Toolbox(), None
    form = resolve_output_format(model, form)
    grammar = answer_grammar(model, prompts[0], box, form)
    if max_tokens is None:
        length = model.context_length
        max_tokens = MAX_COUNT if length is None else max(length - len(prompts[0].tokens), 1)
    sampling = sampling_params(model, asked, max_tokens, stop, grammar, logprobs)
    speculation = asked.speculation.model_dump() if asked.speculation is not None else {}
    choices: list[ChoiceState] = []
    for prompt in prompts:
        for number in range(count):
            own = replace(sampling, seed=seed_of(sampling.seed or 0, number))
            splitter = Splitter(thinking, model.tools, box, prompt.thoughts, form is not None, grammar is not None)
            words = TextStream(model.codec, prompt.tokens, own.stop, model.ends(own))
            choices.append(
                ChoiceState(len(choices), prompt, own, splitter, words if speculation.get("origins") else None, box.one)
            )
    return AnswerPlan(
        model,
        sum(len(prompt.tokens) for prompt in prompts),
        choices,
        isinstance(source, TemplateInput),
        box,
        form,
        speculation,
        asked.timeout,
    )
