"""Do texts that share a forward get the logits each gets alone? A ragged few against plain forwards, once at load.

Catches models whose attention is not mlx-lm's common one, or whose layers mix the tokens of a row in another way.
"""

from __future__ import annotations

from outrider.engine.loading import LoadedModel
from outrider.engine.ort.flat import OrtFlat
from outrider.engine.selfcheck import Own
from outrider.engine.texts import Feed, FlatTexts

_LENGTHS = (9, 3, 6)


def agrees(model: LoadedModel, own: Own, cpu: OrtFlat | None = None) -> bool:
    """True if a prompt's piece, ragged chains, a rollback and a place given back leave every text its logits."""
    texts = FlatTexts(model.model, cpu=cpu)
    tokens = [[(7919 * i + 104729 * n + 13) % model.vocab_size for i in range(_LENGTHS[n] + 4)] for n in range(3)]
    places = [texts.open() for _ in tokens]

    def feed(*parts: tuple[int, int, bool]) -> bool:
        """Feeds text n up to `end`; whether all logits asked for are the model's own."""
        feeds = [Feed(places[n], tokens[n][places[n].length : end], 0 if cut else 1, cut) for n, end, cut in parts]
        logits = texts.forward(feeds)
        read = [(n, end) for n, end, cut in parts if not cut]
        return all(own.distance(tokens[n][:end], logits[i]) <= 1.0 for i, (n, end) in enumerate(read))

    feed((0, 5, True))
    found = feed((1, 3, False), (0, 9, True)) and feed((0, 10, False), (1, 6, False), (2, 6, False))
    places[1].roll_back(4)
    texts.close(places[0])
    found = found and feed((1, 5, False), (2, 9, False))
    texts.close(places[1])
    texts.close(places[2])
    return found
