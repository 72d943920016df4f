"""The order of training windows: each window once per epoch, and the same order after an interruption."""

from __future__ import annotations

import numpy as np
import pytest

from models.training import windows
from outrider.protocol.errors import InvalidRequest

STREAM = np.arange(1000, dtype=np.uint16)


def test_an_epoch_draws_every_window_once_and_epochs_differ() -> None:
    draws = windows.draw(10, seed=3, first=0, size=30).reshape(3, 10)
    assert np.array_equal(np.sort(draws), np.tile(np.arange(10), (3, 1)))
    assert not np.array_equal(draws[0], draws[1])


def test_draws_do_not_depend_on_where_a_batch_begins() -> None:
    whole = windows.training_batch(STREAM, 32, 3, 0, 90)
    pieces = [windows.training_batch(STREAM, 32, 3, first, 9) for first in range(0, 90, 9)]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_windows_are_unbroken_pieces_of_the_stream_with_the_token_that_follows() -> None:
    batch = windows.training_batch(STREAM, 32, 3, 0, 200)
    assert batch.shape == (200, 33)
    assert np.array_equal(batch, batch[:, :1] + np.arange(33))


def test_the_shortest_stream_that_fits_is_read_to_its_last_token() -> None:
    batch = windows.training_batch(STREAM[:64], 32, 3, 0, 500)
    assert batch.min() >= 0
    assert batch.max() == 63


def test_a_stream_too_short_for_a_window_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="63 tokens, expected at least 64"):
        windows.training_batch(STREAM[:63], 32, 3, 0, 1)
