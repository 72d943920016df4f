"""The noise of sampling: G(seed, position, token), standard Gumbel, a pure function of three integers.

It is a counter-based hash, so it has no state and no order of drawing, and does not depend on vocabulary size, batch
shape, device or library. It uses only exactly rounded operations (integer arithmetic, float32 add and multiply), and
not the libraries' logarithms: numpy and MLX return the same bits.

    key(seed, position)  two 64-bit finalisers (Stafford's mix 13)          on the host, once for each position
    h(key, token)        two 32-bit finalisers (lowbias32), keyed twice     once for each token
    u = (x + 1/2) / 2^24 with x the high 24 bits of h;  G = -log(-log u)    float32, G in [-2.9, 17.4]
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

_MASK64 = 2**64 - 1
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is log 2; the first has few bits, so e * high is exact
_TWO_THIRDS_BITS = 0x3F2AAAAB  # the bits of 2/3 as a float32
# log(1 + f) / f on [-1/3, 1/3], highest power first; Chebyshev fit, relative error 3e-8.
_LOG1P = (
    0.13748309016227722,
    -0.15394271910190582,
    0.140558123588562,
    -0.16414520144462585,
    0.20007233321666718,
    -0.25007930397987366,
    0.33333271741867065,
    -0.49999934434890747,
    1.0,
)

MIN_NOISE, MAX_NOISE = -2.9, 17.4
"""The bounds of the noise."""


class Purpose(IntEnum):
    """The purposes of residual sampling's draws. The draws at a position are independent, so each has its own noise."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def derive_seed(seed: int, purpose: Purpose, part: int = 0) -> int:
    """Returns the seed of a request's noise for one purpose, and for a part of it (0 or more)."""
    return _mix64(_mix64(_mix64(seed + 0x8CB92BA72F3D8DD7) + purpose) + part)


def gumbel(xp: Any, seed: int, positions: Sequence[int], vocab_size: int) -> Any:
    """Returns G for `positions` (absolute, 0 or more) and tokens 0 to vocab_size - 1: float32 [P, V].

    `xp`: numpy or mlx.core (lazy).
    """
    first, second = map(xp.array, noise_keys(seed, positions))
    return gumbel_of(xp, hash_tokens(xp, xp.arange(vocab_size, dtype=xp.uint32), first, second))


def gumbel_at(seeds: Sequence[int], positions: Sequence[int], tokens: np.ndarray[Any, Any]) -> Any:
    """Returns G for some tokens of each row, by numpy: float32 [P, m] for P seeds and tokens [P, m]."""
    first, second = np.concatenate(
        [noise_keys(*row) for row in zip(seeds, ([p] for p in positions), strict=True)], axis=1
    )
    return gumbel_of(np, hash_tokens(np, tokens.astype(np.uint32), first, second))


def exponential_numpy(seed: int, positions: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns a standard exponential for each position, token 0's noise before its second logarithm: float32 [P]."""
    first, second = noise_keys(seed, positions)
    drawn: np.ndarray[Any, np.dtype[np.float32]] = _exponential(
        np, hash_tokens(np, np.zeros(1, np.uint32), first, second)
    )
    return drawn[:, 0]


def hash_tokens(xp: Any, tokens: Any, first: Any, second: Any) -> Any:
    """Returns the 24-bit integers of the noise: uint32 [P, V] for tokens [V] and keys [P, 1]. `xp`: numpy or mlx.core.

    From here on numpy's arrays are written in place, which is a fifth faster than a new one for each step.
    """
    return _mix32(xp, _mix32(xp, tokens ^ first) + second) >> 8


def noise_keys(seed: int, positions: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns the two keys of each position: uint32 [P, 1]."""
    mixed = _mix64(seed + 0x9E3779B97F4A7C15)
    keys = [_mix64(mixed + _mix64(position + 0xD1B54A32D192ED03)) for position in positions]
    first = np.array([key >> 32 for key in keys], dtype=np.uint32)
    second = np.array([key & 0xFFFFFFFF for key in keys], dtype=np.uint32)
    return first[:, None], second[:, None]


def _mix64(x: int) -> int:
    x &= _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _mix32(xp: Any, x: Any) -> Any:
    """Mixes in place."""
    x ^= x >> 16
    x *= xp.array(0x7FEB352D, dtype=xp.uint32)
    x ^= x >> 15
    x *= xp.array(0x846CA68B, dtype=xp.uint32)
    x ^= x >> 16
    return x


def gumbel_of(xp: Any, x: Any) -> Any:
    """Returns G for integers of `hash_tokens`: float32."""
    return -_log(xp, _exponential(xp, x), None)


def _exponential(xp: Any, x: Any) -> Any:
    """Returns -log u, never 0."""
    u = (x.astype(xp.float32) + 0.5) * 2.0**-24
    return -_log(xp, u, (x.astype(xp.int32) - 2**24).astype(xp.float32) * 2.0**-24 + 2.0**-25)


def _log(xp: Any, z: Any, minus_one: Any) -> Any:
    """Returns log z for normal float32 z > 0, by exactly rounded operations only. `minus_one`: z - 1, not rounded."""
    bits = z.view(xp.int32)
    exponent = bits - _TWO_THIRDS_BITS
    exponent >>= 23
    f = (bits - (exponent << 23)).view(xp.float32)
    f -= 1.0
    if minus_one is not None:
        f = xp.where(exponent == 0, minus_one, f)
    e = exponent.astype(xp.float32)
    total = f * _LOG1P[0]
    for coefficient in _LOG1P[1:]:
        total += coefficient
        total *= f
    total += e * _LN2_LOW
    e *= _LN2_HIGH
    e += total
    return e
