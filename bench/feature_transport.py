"""What it costs a round that a head works ahead in another process: making features, telling them, hearing them.

`python -m outrider.bench.feature_transport HEAD [--target DIR]`, one process, processor time, so other load counts
little. Verifies of the target's own text by turns with nobody listening and with an ear; then the way of the features,
through the codec and the orchestrator's hands as it is without the sockets.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider.drafting.drafter import TokenTree
from outrider.drafting.heads.ahead import AheadHead
from outrider.drafting.heads.block_tree import BlockTree
from outrider.drafting.heads.checkpoint import read_config
from outrider.drafting.heads.head import BlockHead, StepHead
from outrider.drafting.heads.load import read as read_head
from outrider.drafting.heads.tree import HeadTree
from outrider.engine.loading import load
from outrider.engine.open_texts import open_texts
from outrider.engine.slots import Slot
from outrider.engine.taps import Taps
from outrider.engine.verify import Ask, begin
from outrider.orchestrator.pair.model_files import embedded_pair
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.heads import AHEAD, head_kind
from outrider.protocol.messages import Features, Message, Outcome, Span
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.telling import Teller

_DEPTH, _ROUNDS, _WARM_UP = 4, 60, 10
_PROMPT = list(range(40, 90))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("head", help="the folder of a head that can work ahead")
    parser.add_argument("--target", type=Path, default=Path(embedded_pair()[0]))
    options = parser.parse_args()
    model = load(options.target)
    kind = head_kind(read_config(Path(options.head)), model.config) or ""
    head = read_head(kind, options.head, model, lambda stage: None) if kind in AHEAD else None
    if not isinstance(head, StepHead | BlockHead):
        parser.error(f"{options.head} holds no head that works ahead")
    tree = AheadHead(head, kind, model.vocab_size).open(_PROMPT, SamplingParams())
    texts, teller = open_texts(model), Teller(head, "")
    reader = teller.reader
    texts.tap(Taps(model.model, reader.points, reader.fuse))
    slot, ear = Slot(model, texts, _PROMPT, SamplingParams()), teller.ear("r", 0)
    silent, heard, way = list[float](), list[float](), list[float]()
    text = _text(slot, _ROUNDS * (_DEPTH + 1))
    slot = Slot(model, texts, _PROMPT, SamplingParams())
    begin([Ask(slot)]).verdicts()
    for number in range(_ROUNDS):
        at = len(slot.tokens)
        chain = tuple(text[at : at + _DEPTH])
        slot.listener = ear.hear if number % 2 else None
        started = time.process_time()
        begin([Ask(slot, chain)]).verdicts()
        told = ear.told()
        (heard if number % 2 else silent).append(1000 * (time.process_time() - started))
        if told:
            outcome = Outcome("r", 0, number, at, _DEPTH, 1, Span(0, 1))
            way.append(_travel(told, outcome, tree) - _travel([], outcome, tree))
    verify, listened, travelled = (statistics.median(times[_WARM_UP // 2 :]) for times in (silent, heard, way))
    made = listened - verify
    rows = told[0].rows if told else np.zeros((0, 0), np.float16)
    sys.stdout.write(
        f"a verify of {_DEPTH + 1} rows {verify:.3f} ms; features made and told {made:+.3f} ms ({made / verify:+.1%});"
        f" their way {travelled:.3f} ms ({travelled / verify:.1%}); {rows.nbytes:,} bytes a round of {len(rows)} rows\n"
    )
    return 0


def _text(slot: Slot, length: int) -> list[int]:
    """What the target says alone."""
    while len(slot.tokens) < length + len(_PROMPT) + _DEPTH:
        begin([Ask(slot)]).verdicts()
    tokens = list(slot.tokens)
    slot.close()
    return tokens


def _travel(told: Sequence[Features], outcome: Outcome, tree: TokenTree) -> float:
    """From the target's bundle to the head's rows; milliseconds."""
    started = time.process_time()
    bundle: list[Message] = [*told, outcome]
    for here in _carried(bundle):
        for there in _carried([here]) if isinstance(here, Features) else ():
            if isinstance(there, Features) and isinstance(tree, HeadTree | BlockTree):
                tree.columns.hear(there.position, there.rows)
    return 1000 * (time.process_time() - started)


def _carried(messages: Sequence[Message]) -> list[Message]:
    return decode_all([bytes(frame) for frame in encode_all(messages)])


if __name__ == "__main__":
    raise SystemExit(main())
