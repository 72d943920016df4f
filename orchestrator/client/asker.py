"""What can be asked for text: `generate` and `stream`, whoever answers. Knows wishes and dialogues; no socket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from outrider.orchestrator.client.dialogue import Dialogue, Prompt, Wish
from outrider.orchestrator.client.result import Chunk, GenerationResult
from outrider.protocol.sampling import SamplingParams


class Asker(ABC):
    """`sources`: with how many servers a text may go on; see `Dialogue`."""

    sources: int

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        mode: str = "auto",
        num_draft_tokens: int | None = None,
        branches: int | None = None,
        chat_template: bool = True,
        origins: bool = False,
        drafter: str = "",
        client: str = "",
    ) -> GenerationResult:
        """The completion of `prompt`: text, or token ids as a list, a tuple or a numpy array.

        `mode` is ar, sd, ssd, or auto: the server's own; so is None for `num_draft_tokens` and `branches`. A model's
        chat template is applied to text unless `chat_template` is False. `origins`: tell where each token came from.
        `drafter`: the name of the only one that is to draft (draft, ngram, or a head's, as eagle3). `client`: for whom
        it is, where a program asks for many people: they take turns at the server as if each asked alone.

        Raises:
            InvalidRequest: something is out of range; the message says what was expected.
            EndpointError: nothing answers.
            WorkerError: a worker was lost on the way.
        """
        stream = self.stream(
            prompt,
            sampling,
            mode=mode,
            num_draft_tokens=num_draft_tokens,
            branches=branches,
            chat_template=chat_template,
            origins=origins,
            drafter=drafter,
            client=client,
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        mode: str = "auto",
        num_draft_tokens: int | None = None,
        branches: int | None = None,
        chat_template: bool = True,
        origins: bool = False,
        rounds: bool = False,
        drafter: str = "",
        client: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Stream:
        """The completion of `prompt` as it grows; see `generate`. Leaving the loop cancels.

        `rounds`: chunks tell of each round, when it has ended. `progress(done, total)` hears how much of a long prompt
        has been read.
        """
        sampling = sampling or SamplingParams()
        wish = Wish(prompt, sampling, mode, num_draft_tokens, branches, chat_template, origins, rounds, drafter, client)
        return Stream(self, Dialogue(wish, progress, self.sources))

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
