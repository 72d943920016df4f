"""What a prefill worker hands over of a prompt: it becomes a text's own keys and values, in the order of the tokens.

Whatever does not fit costs time only: the target reads on by itself from where the text stands.
"""

from __future__ import annotations

import logging

from outrider.engine.handover import Layout
from outrider.engine.loading import LoadedModel
from outrider.engine.texts import FlatTexts, Texts
from outrider.protocol.errors import OutriderError
from outrider.protocol.guard import named_errors
from outrider.protocol.messages import PromptKv
from outrider.target_worker.running import Running

log = logging.getLogger(__name__)


class Handover:
    """For the `texts` of `model`."""

    def __init__(self, model: LoadedModel, texts: Texts) -> None:
        self._texts = texts if isinstance(texts, FlatTexts) else None
        self._layout = Layout.of(model.model) if self._texts is not None else None

    @property
    def is_possible(self) -> bool:
        """Whether the texts remember keys and values in this process, and nothing else."""
        return self._texts is not None

    def take(self, running: Running, message: PromptKv) -> None:
        """The text goes on with these, as far as it lacks them; after a gap, or a misfit, it waits for no more."""
        slot = running.slot
        skip = slot.fed - message.start
        if self._texts is None or self._layout is None or skip < 0:
            running.offered = False
            return
        count = min(message.count - skip, running.unread)
        if count <= 0:
            return
        try:
            with named_errors("receiving the prompt's keys and values"):
                layers = self._layout.unpack(message.data, message.count)
                own = tuple((k[..., skip : skip + count, :], v[..., skip : skip + count, :]) for k, v in layers)
                self._texts.extend(slot.text, own, count)
        except OutriderError as error:
            log.warning("%s; the target reads the prompt from token %d on", error, slot.fed)
            running.offered = False
