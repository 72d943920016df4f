"""Who may say what of a request: the target its outcomes, its drafters branches and chains, all of its epoch.

The pool has checked by then that a message comes from the process that holds its sender's name (`places`).
"""

from __future__ import annotations

from outrider.orchestrator.core.request import Request
from outrider.protocol.messages import Branches, Drafted, Fault, Message, Outcome, Prefilled, Resync

TARGETS = (Outcome, Prefilled, Resync, Fault)
DRAFTERS = (Branches, Drafted, Prefilled, Resync, Fault)


def may_say(request: Request, is_target: bool, sender: str, message: Message) -> bool:
    """Whether `sender`, the target or not, may say this about the request as it stands."""
    if getattr(message, "epoch", request.epoch) != request.epoch:
        return False
    if is_target:
        return isinstance(message, TARGETS)
    return sender in request.drafters and isinstance(message, DRAFTERS)
