"""All drafters: who of them prepares which outcomes of a round, who is asked for a chain, and what each knows.

Each has books of its own: in a request its `Part`, over all requests its `Tempo`. Who missed something, or comes later,
is told the whole text; the others hear nothing of that. Who is not asked for a while hears nothing either, and with its
next task what became final meanwhile. Sends OPEN, COMMIT and CLOSE; decides nothing about what is verified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from outrider.orchestrator.core.dispatch import Workers, opening
from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.learning.tempo import Tempo, dealt, evenly, quickest
from outrider.orchestrator.core.part import NO_RANKS
from outrider.orchestrator.core.proposals.merging import worth_telling
from outrider.orchestrator.core.request import Request
from outrider.orchestrator.core.told import Told
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.fields import MAX_COMMIT
from outrider.protocol.messages import Branches, Close, Commit, Drafted, Features, Open


class Crew:
    """`told`: where it is noted what they are told. `evenly_dealt`: no measurement decides who does what, so rounds are
    reproducible."""

    def __init__(self, workers: Workers, told: Told, estimates: Estimates, evenly_dealt: bool) -> None:
        self._workers = workers
        self._told = told
        self._estimates = estimates
        self._evenly = evenly_dealt
        self._tempos: defaultdict[str, Tempo] = defaultdict(Tempo)

    def tempo(self, drafter: str) -> Tempo:
        """How soon its work comes."""
        return self._tempos[drafter]

    # --- what they are told ---------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """All read the committed tokens, and prepare the round's outcomes, if it has any to prepare for."""
        ranks = self._deal(request) if _verifying(request) is not None else {}
        request.cache.start(_counts(ranks))
        for name in request.drafters:
            self._open(request, name, ranks.get(name, NO_RANKS))

    def join(self, request: Request, name: str) -> None:
        """This one reads the committed tokens; alone, it prepares the outcomes of the round under way, too."""
        alone = len(request.drafters) == 1 and _verifying(request) is not None
        ranks = range(request.branches) if alone else NO_RANKS
        if ranks:
            request.cache.start({name: len(ranks)})
        self._open(request, name, ranks)

    def open_again(self, request: Request, name: str) -> None:
        """This one has missed something: it reads the committed tokens, and does what it was asked for."""
        part = request.drafters[name]
        asked, round_, ranks, depth = not part.done, part.round, part.ranks, part.depth
        self._open(request, name, ranks if asked and round_ == request.round else NO_RANKS)
        if part.done:
            request.cache.lost(name)
        if asked and round_ > request.round:
            self._commit(request, name, round_, None, NO_RANKS, depth, 0)

    def prepare(self, request: Request, now_ns: int) -> None:
        """The target has its round: each is told what became final, and which of its outcomes to prepare."""
        ranks = self._deal(request)
        self._missed(request, now_ns)
        request.cache.start(_counts(ranks))
        for name in ranks:
            self._commit(request, name, request.round, request.proposal.line, ranks[name], request.depth, now_ns)

    def ask(self, request: Request, depth: int, now_ns: int) -> None:
        """The quickest is asked for what follows the committed text; who was not asked for long is tried beside it.

        One, for the answer of the quickest is the first one: more would only keep the others from the next round.
        """
        tempos = self._of(request)
        first, *others = sorted(tempos) if self._evenly else quickest(tempos, depth)
        self._missed(request, now_ns)
        for name in [first] + [name for name in others if tempos[name].is_due and not self._evenly]:
            self._commit(request, name, request.round + 1, None, NO_RANKS, depth, now_ns)
            tempos[name].left_out = 0
        for name in others:
            tempos[name].left_out += 1

    def hear(self, request: Request, message: Features) -> None:
        """What the target tells of its rows goes to those that read them."""
        for name in request.drafters:
            if self._workers.features(name):
                self._workers.send_drafter(name, message)

    def leave(self, request: Request, name: str) -> None:
        """It drafts for this request no longer; it may only have slept, and would work on."""
        del request.drafters[name]
        request.cache.lost(name)
        self._workers.send_drafter(name, Close(request.id))

    def close(self, request: Request) -> None:
        """The request is over."""
        for name in request.drafters:
            self._workers.send_drafter(name, Close(request.id))
        self._told.over(request.id)

    # --- what they say --------------------------------------------------------------------------------------------

    def branches(self, request: Request, name: str, message: Branches, now_ns: int) -> None:
        """A push of one that was asked for it."""
        part = request.drafters[name]
        if len(request.drafters) == 1:  # nobody to compare it with
            part.done = message.final
            part.pushes += 1
            return
        tempo = self._tempos[name]
        part.pushes += bool(message.entries)
        if message.entries and part.pushes == 1 and part.asked_ns:
            tempo.began((now_ns - part.asked_ns) / MILLISECOND_NS)
        elif message.entries and part.pushes > 1:
            tempo.grew((now_ns - part.heard_ns) / MILLISECOND_NS)
        part.heard_ns, part.done = now_ns, message.final

    def late(self, request: Request, name: str, message: Branches, now_ns: int) -> None:
        """A push for a round that has ended: how late it comes is all that it says."""
        part = request.drafters[name]
        if message.entries and message.round == part.round and part.asked_ns and not part.pushes:
            self._tempos[name].began((now_ns - part.asked_ns) / MILLISECOND_NS)
            part.pushes = 1

    def drafted(self, request: Request, name: str, message: Drafted, now_ns: int) -> None:
        """The chain of one that was asked for it, whether it is still waited for or not."""
        part = request.drafters[name]
        if part.asked_ns:
            self._tempos[name].drafted(len(message.chain), (now_ns - part.asked_ns) / MILLISECOND_NS)
        part.done = True

    def overdue(self, request: Request, now_ns: int) -> None:
        """A wait for them has ended with nothing."""
        self._missed(request, now_ns)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _of(self, request: Request) -> Mapping[str, Tempo]:
        return {name: self._tempos[name] for name in request.drafters}

    def _deal(self, request: Request) -> dict[str, range]:
        """What each prepares; the first leads. With one there is nothing to decide."""
        names, branches = request.drafters, request.branches
        if len(names) == 1 or not names:
            self._estimates.part = 1.0
            return dict.fromkeys(names, range(branches))
        if self._evenly:
            return evenly(sorted(names), branches)
        tempos, within_ms = self._of(request), self._estimates.verify_ms(request.depth + 1)
        models = {name: self._workers.model(name) for name in names}
        ranks = dealt(tempos, models, request.cache.lead, branches, request.depth, within_ms)
        for name, tempo in tempos.items():
            if name not in ranks:
                tempo.left_out += 1
            elif tempo.left_out:
                tempo.tried_again()
        self._estimates.part = len(ranks[next(iter(ranks))]) / max(branches, 1)
        return ranks

    def _missed(self, request: Request, now_ns: int) -> None:
        """What was asked for before and has not begun to come is overdue; nobody waits for it any more."""
        for name, part in request.drafters.items():
            if not part.done and not part.pushes and part.asked_ns:
                self._tempos[name].overdue((now_ns - part.asked_ns) / MILLISECOND_NS)
            part.done = True

    def _open(self, request: Request, name: str, ranks: range) -> None:
        part, verifying = request.drafters[name], _verifying(request) if ranks else None
        least = worth_telling(self._estimates, request.takes_trees)
        self._tell(name, opening(request, verifying, ranks, least))
        part.is_asked(request.round, ranks, request.depth, len(request.tokens), 0)
        part.done = verifying is None

    def _commit(
        self,
        request: Request,
        name: str,
        round_: int,
        verifying: tuple[int, ...] | None,
        ranks: range,
        depth: int,
        now_ns: int,
    ) -> None:
        """COMMIT; a drafter that was not told for longer than a message holds is opened anew first."""
        part = request.drafters[name]
        if len(request.tokens) - part.known_len > MAX_COMMIT:
            self._open(request, name, NO_RANKS)
            now_ns = 0
        message = Commit(
            request=request.id,
            epoch=request.epoch,
            round=round_,
            base_len=len(request.tokens),
            tokens=tuple(request.tokens[part.known_len :]),
            verifying=verifying,
            depth=depth,
            branches=len(ranks),
            skip=ranks.start,
            least=worth_telling(self._estimates, request.takes_trees),
        )
        part.is_asked(round_, ranks, depth, len(request.tokens), now_ns)
        self._tell(name, message)

    def _tell(self, drafter: str, message: Open | Commit) -> None:
        self._told.note(drafter, message)
        self._workers.send_drafter(drafter, message)


def _counts(ranks: Mapping[str, range]) -> dict[str, int]:
    return {name: len(share) for name, share in ranks.items()}


def _verifying(request: Request) -> tuple[int, ...] | None:
    """The chain whose outcomes a drafter is to prepare; None: it only reads, as where the round has ended."""
    under_way = request.base_len == len(request.tokens) and not request.proposal.going_on
    return request.proposal.line if request.mode == "ssd" and under_way else None
