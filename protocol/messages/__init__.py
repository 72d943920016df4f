"""All messages. Each is a frozen dataclass; the types of its fields say what they may hold (`protocol.schema`)."""

from __future__ import annotations

from outrider.protocol.messages.clients import *  # noqa: F403
from outrider.protocol.messages.clients import ClientMessage
from outrider.protocol.messages.rounds import *  # noqa: F403
from outrider.protocol.messages.rounds import RoundMessage
from outrider.protocol.messages.workers import *  # noqa: F403
from outrider.protocol.messages.workers import RankMessage, WorkerMessage

Message = WorkerMessage | RoundMessage | ClientMessage | RankMessage
