"""The ceiling of speculation in company: drafts where they are likeliest, as many as pay."""

from __future__ import annotations

from itertools import product

import pytest

from outrider.bench.ceiling import ceiling

SURE, UNSURE = (0.9, 0.8, 0.7), (0.3, 0.1, 0.0)


@pytest.mark.parametrize(("fixed", "each"), [(10.0, 0.5), (10.0, 4.0), (1.0, 1.0), (0.0, 1.0), (10.0, 0.0)])
def test_nobody_does_better(fixed: float, each: float) -> None:
    """Held against every number of drafts that each text could have."""
    texts = [SURE, UNSURE, SURE[:1]]

    def cost(rows: int) -> float:
        return fixed + each * rows

    rates = [
        (3 + sum(sum(text[:count]) for text, count in zip(texts, counts, strict=True))) / cost(3 + sum(counts))
        for counts in product(*(range(len(text) + 1) for text in texts))
    ]
    assert ceiling(texts, cost).gain == pytest.approx(max(rates) * cost(3) / 3)


def test_where_a_row_costs_as_much_as_a_step_nothing_pays() -> None:
    assert ceiling([SURE, UNSURE], lambda rows: float(rows)).gain == 1.0
    assert ceiling([SURE, UNSURE], lambda rows: float(rows)).drafts == 0.0
