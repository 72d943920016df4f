"""All messages. Each is a frozen record; the types of its fields say what they may hold (`protocol.schema`)."""

from __future__ import annotations

from outrider.protocol.messages.clients import *  # noqa: F403
from outrider.protocol.messages.rounds import *  # noqa: F403
from outrider.protocol.messages.workers import *  # noqa: F403
from outrider.protocol.schema import Message as Message
