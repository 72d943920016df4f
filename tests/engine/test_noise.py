"""The noise is a pure function of three integers, equal in both libraries, and standard Gumbel."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import scipy

from outrider.engine import noise
from outrider.engine.noise import Purpose, derive_seed, gumbel

KNOWN = [
    # seed, position, token, 24-bit integer, G
    (0, 0, 0, 10806436, 0.82125354),
    (0, 0, 1, 3719531, -0.4097387),
    (0, 1, 0, 1218158, -0.9641972),
    (1, 0, 0, 4297921, -0.30887356),
    (7, 100, 4095, 7244431, 0.17460501),
    (2**32, 0, 0, 328025, -1.369831),
    (2**63 - 1, 2**31, 151935, 7132833, 0.1562876),
]


def integers(seed: int, positions: list[int], vocab_size: int) -> np.ndarray:
    first, second = noise.noise_keys(seed, positions)
    return noise.hash_tokens(np, np.arange(vocab_size, dtype=np.uint32), first, second)


@pytest.mark.parametrize(("seed", "position", "token", "integer", "value"), KNOWN)
def test_noise_matches_known_values(seed: int, position: int, token: int, integer: int, value: float) -> None:
    assert integers(seed, [position], token + 1)[0, token] == integer
    assert gumbel(np, seed, [position], token + 1)[0, token] == np.float32(value)
    assert gumbel(mx, seed, [position], token + 1)[0, token].item() == np.float32(value)


def test_numpy_and_mlx_agree_on_every_integer() -> None:
    for start in range(0, 2**24, 2**21):
        x = np.arange(start, start + 2**21, dtype=np.uint32)
        ours = noise.gumbel_of(np, x)
        assert np.array_equal(ours, np.array(noise.gumbel_of(mx, mx.array(x))))
        u_above = (2**24 - x[::16].astype(np.float64) - 0.5) / 2**24  # 1 - u, exact
        exact = -np.log(-np.log1p(-u_above))
        assert np.abs(ours[::16] - exact).max() < 1e-6


def test_numpy_and_mlx_agree_on_keys_of_all_sizes() -> None:
    rng = np.random.default_rng(0)
    for seed in [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, *rng.integers(0, 2**63 - 1, 5)]:
        positions = [0, 1, 255, 2**20, *rng.integers(0, 2**24, 4).tolist()]
        assert np.array_equal(gumbel(np, int(seed), positions, 1000), np.array(gumbel(mx, int(seed), positions, 1000)))


def test_noise_does_not_depend_on_vocabulary_or_batch() -> None:
    wide = gumbel(np, 3, range(20), 4224)
    assert np.array_equal(wide[:, :4096], gumbel(np, 3, range(20), 4096))
    assert np.array_equal(wide[13:14], gumbel(np, 3, [13], 4224))
    assert np.array_equal(wide[[5, 2, 5]], gumbel(np, 3, [5, 2, 5], 4224))


def test_integers_are_uniform() -> None:
    for seed in (0, 1, 2**40 + 3):
        x = integers(seed, list(range(64)), 4096).ravel()
        for shift, bits in ((16, 8), (8, 8), (0, 8), (12, 12)):
            counts = np.bincount((x >> shift) & (2**bits - 1), minlength=2**bits)
            assert scipy.stats.chisquare(counts).pvalue > 1e-4
        assert scipy.stats.kstest((x + 0.5) / 2**24, "uniform").pvalue > 1e-4


def test_values_are_standard_gumbel() -> None:
    values = gumbel(np, 11, range(256), 4096).ravel()
    assert scipy.stats.kstest(values[::4], "gumbel_r").pvalue > 1e-4
    assert abs(values.mean() - np.euler_gamma) < 5 * 1.2825 / 1024
    assert np.isfinite(noise.gumbel_of(np, np.array([0, 2**23 - 1, 2**23, 2**24 - 1], dtype=np.uint32))).all()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson correlation in standard errors."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * a.size**0.5)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 16, 64, 256, 1024])
def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated(step: int) -> None:
    x = integers(5, list(range(64 + step)), 4096 + step).astype(np.float64)
    assert abs(correlation(x[:64, :4096], x[:64, step:])) < 5  # tokens
    assert abs(correlation(x[:64, :4096], x[step:, :4096])) < 5  # positions
    assert abs(correlation(x[:64, :4096], x[step:, step:])) < 5  # both at once
    for seed in (5 + step, 5 + (step << 32), 5 ^ (step << 52)):
        other = integers(seed, list(range(64)), 4096).astype(np.float64)
        assert abs(correlation(x[:64, :4096], other)) < 5


def test_no_row_is_a_permutation_of_another_row() -> None:
    """Keys that only permute the tokens would give rows that share values; random rows share about V^2/2^24."""
    rows = integers(9, list(range(200)), 4096)
    shared = [len(np.intersect1d(rows[0], row)) for row in rows[1:]]
    assert np.mean(shared) < 1.2 and max(shared) < 12


def test_changing_either_half_of_a_key_changes_the_row() -> None:
    """Rows whose keys have one equal half share no more values than by chance, and are uncorrelated."""
    tokens = np.arange(4096, dtype=np.uint32)
    same, others = np.full((64, 1), 12345, dtype=np.uint32), np.arange(64, dtype=np.uint32)[:, None]
    for first, second in ((same, others), (same, others << 20), (others << 20, same)):
        rows = noise.hash_tokens(np, tokens, first, second)
        shared = [len(np.intersect1d(rows[0], row)) for row in rows[1:]]
        assert np.mean(shared) < 1.6 and max(shared) < 12
        assert all(abs(correlation(rows[0].astype(float), row.astype(float))) < 5 for row in rows[1:])


def test_argmax_draws_from_the_softmax() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5])
    draws = np.argmax(logits + np.concatenate([gumbel(np, s, range(500), 5) for s in range(100)]), axis=-1)
    expected = np.exp(logits) / np.exp(logits).sum() * draws.size
    assert scipy.stats.chisquare(np.bincount(draws, minlength=5), expected).pvalue > 1e-4
    pairs = np.bincount(draws[::2] * 5 + draws[1::2], minlength=25)
    joint = np.outer(expected, expected).ravel() / draws.size**2 * pairs.sum()
    assert scipy.stats.chisquare(pairs, joint).pvalue > 1e-4


# --- residual sampling ----------------------------------------------------------------------------------------------

STREAMS = {
    (0, Purpose.DRAFT, 0): 0x4289826BB1E5A369,
    (0, Purpose.ACCEPT, 0): 0xD3E38B270F5E4FE0,
    (0, Purpose.RESAMPLE, 0): 0x9B7CC0E6DE81B16F,
    (0, Purpose.DRAFT, 1): 0x495FA4D64A7ED870,
    (7, Purpose.DRAFT, 0): 0x30841657D9F477A9,
}


def test_streams_match_known_values() -> None:
    assert {which: derive_seed(*which) for which in STREAMS} == STREAMS


def test_streams_are_uncorrelated_with_each_other_and_coupled_noise() -> None:
    rows = [gumbel(np, seed, range(64), 512).ravel() for seed in (0, *(derive_seed(*which) for which in STREAMS))]
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / np.sqrt(64 * 512)


def test_noise_of_selected_tokens_equals_that_of_the_full_row() -> None:
    seeds, positions = [3, derive_seed(5, Purpose.DRAFT, 9)], [12, 4]
    tokens = np.array([[0, 4095, 7], [9, 9, 1]], np.int32)
    found = np.array(noise.gumbel_at(seeds, positions, tokens))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert np.array_equal(found[row], gumbel(np, seed, [position], 4096)[0, tokens[row]])


def test_exponential_noise_is_standard_and_never_0() -> None:
    clocks = noise.exponential_numpy(5, range(20000))
    assert scipy.stats.kstest(clocks, "expon").pvalue > 1e-3
    assert noise._exponential(np, np.array([2**24 - 1], np.uint32))[0] > 0
    assert clocks[7] == noise.exponential_numpy(5, [7])[0]
