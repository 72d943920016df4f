"""Quantises matrices in MLX's affine format with PyTorch: w = scale * q + bias, with a scale and a bias per group."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE, BITS = 32, 4
_MAX = 2**BITS - 1
_CLIPS = (1.0, 0.95, 0.9, 0.85)  # shares of a group's range to try: clipping may cost less than larger steps


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [N, K] (0 to 15), scales and biases [N, K / 32] float16, nearest to `weight` by squared error."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP_SIZE))
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    middle, radius = (high + low) / 2, (high - low).clamp(min=1e-7) / 2
    tried = [_quantise_clipped(groups, middle, clip * radius) for clip in _CLIPS]
    choice = torch.stack([error for error, *_ in tried]).argmin(dim=0)
    _, *parts = zip(*tried, strict=True)
    q, scale, bias = (torch.stack(part).take_along_dim(choice[None], dim=0)[0] for part in parts)
    return q.flatten(1).to(torch.uint8), scale[..., 0].half(), bias[..., 0].half()


def _quantise_clipped(groups: Tensor, middle: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns squared error, q, scale and bias with each group's range clipped to middle +- radius."""
    scale = (2 * radius / _MAX).half().float().clamp(min=6e-8)
    bias = (middle - radius).half().float()
    q = ((groups - bias) / scale).round().clamp(0, _MAX)
    return ((q * scale + bias - groups) ** 2).sum(dim=-1, keepdim=True), q, scale, bias


def fake_quantise(weight: Tensor) -> Tensor:
    """Returns `weight` rounded to the values that it has after quantisation, in its own type."""
    return _scale(*quantise(weight)).to(weight.dtype)


def pack(q: Tensor) -> Tensor:
    """Packs q [N, K] of 4 bits as MLX does: uint32 [N, K / 8], the first in the lowest bits."""
    octets = q[:, 0::2] | (q[:, 1::2] << 4)
    return octets.contiguous().view(torch.uint32)


def dequantise(packed: Tensor, scales: Tensor, biases: Tensor, bits: int = BITS) -> Tensor:
    """Returns the float32 matrix [N, K] of packed q of 4 or 8 bits, with scales and biases [N, K / group size]."""
    octets = packed.view(torch.uint8)
    q = octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    return _scale(q, scales, biases)


def _scale(q: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
    groups = q.unflatten(1, (scales.shape[1], -1)).float()
    return (groups * scales.float()[..., None] + biases.float()[..., None]).flatten(1)
