"""What can be asked for text: `generate` and `stream`, whoever answers. Knows wishes and dialogues; no socket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Unpack

from outrider.orchestrator.client.dialogue import Dialogue
from outrider.orchestrator.client.result import Chunk, GenerationResult
from outrider.orchestrator.client.wish import Prompt, Wish, Wishes
from outrider.protocol.sampling import SamplingParams


class Asker(ABC):
    """`sources`: with how many servers a text may go on; see `Dialogue`."""

    sources: int

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **wishes: Unpack[Wishes]
    ) -> GenerationResult:
        """The completion of `prompt`: text, or token ids as a list, a tuple or a numpy array.

        Keywords:
            mode: ar, sd, ssd, or auto, the default: the server's own.
            num_draft_tokens, branches: K and B; None, the default: the server's own.
            chat_template: False: a model's is not applied to text.
            origins: True: tell where each token came from.
            drafter: the name of the only one that is to draft (draft, ngram, or a head's, as eagle3).
            client: for whom it is, where a program asks for many people: they take turns at the server as if each asked
                alone.

        Raises:
            InvalidRequest: something is out of range; the message says what was expected.
            EndpointError: nothing answers.
            WorkerError: a worker was lost on the way.
        """
        stream = self.stream(prompt, sampling, **wishes)
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        rounds: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **wishes: Unpack[Wishes],
    ) -> Stream:
        """The completion of `prompt` as it grows; see `generate`. Leaving the loop cancels.

        `rounds`: chunks tell of each round, when it has ended. `progress(done, total)` hears how much of a long prompt
        has been read.
        """
        return Stream(self, Dialogue(Wish.of(prompt, sampling, rounds, wishes), progress, self.sources))

    @abstractmethod
    def exchange(self, dialogue: Dialogue) -> Iterator[Chunk]:
        """Runs one dialogue to its end; cancels it when the caller leaves early."""


class Stream:
    """A completion that grows: iterate once for its chunks, then ask for the `result`.

    A second loop, over a finished or a broken-off stream, is an InvalidRequest.
    """

    def __init__(self, asker: Asker, dialogue: Dialogue) -> None:
        self._asker = asker
        self._dialogue = dialogue

    def __iter__(self) -> Iterator[Chunk]:
        self._dialogue.begin()
        return self._asker.exchange(self._dialogue)

    @property
    def result(self) -> GenerationResult:
        """The finished completion.

        Raises:
            InvalidRequest: the stream was not read to its end.
        """
        return self._dialogue.result()
