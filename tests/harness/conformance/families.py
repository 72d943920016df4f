"""All cases by family, in the order of the table."""

from tests.harness.conformance import (
    chat,
    completions,
    errors,
    forms,
    messages,
    paths,
    probabilities,
    responses,
    sampling,
    streams,
    tools,
)

FAMILIES = tuple(
    room.cases
    for room in (chat, streams, completions, responses, messages, tools, forms, sampling, probabilities, paths, errors)
)
