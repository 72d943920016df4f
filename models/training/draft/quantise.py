"""Quantises matrices in MLX's affine format with PyTorch: 4 bits per number, w = scale * q + bias in groups of 32."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP, BITS = 32, 4
_TOP = 2**BITS - 1
_SHRINKS = (1.0, 0.95, 0.9, 0.85)  # of a group's range: clipping can cost less than larger steps


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns steps [N, K] (0..15), scales and biases [N, K / 32] float16, nearest to `weight` by squared error."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    middle, reach = (high + low) / 2, (high - low).clamp(min=1e-7) / 2
    found = [_cut(groups, middle, shrink * reach) for shrink in _SHRINKS]
    choice = torch.stack([error for error, *_ in found]).argmin(dim=0)
    steps, scale, bias = (
        torch.stack(parts).take_along_dim(choice[None], dim=0)[0] for parts in list(zip(*found, strict=True))[1:]
    )
    return steps.flatten(1).to(torch.uint8), scale[..., 0].half(), bias[..., 0].half()


def _cut(groups: Tensor, middle: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns squared error, steps, scale and bias with each group's range clipped to middle +- reach."""
    scale = (2 * reach / _TOP).half().float().clamp(min=6e-8)
    bias = (middle - reach).half().float()
    steps = ((groups - bias) / scale).round().clamp(0, _TOP)
    return ((steps * scale + bias - groups) ** 2).sum(dim=-1, keepdim=True), steps, scale, bias


def rounded(weight: Tensor) -> Tensor:
    """Returns `weight` rounded to 4 bits."""
    steps, scales, biases = quantise(weight)
    grouped = steps.unflatten(1, (-1, GROUP)).float()
    return (grouped * scales.float()[..., None] + biases.float()[..., None]).flatten(1).to(weight.dtype)


def packed(steps: Tensor) -> Tensor:
    """Packs steps [N, K] as MLX does: uint32 [N, K / 8], the first in the lowest bits."""
    octets = steps[:, 0::2] | (steps[:, 1::2] << 4)
    return octets.contiguous().view(torch.uint32)


def unpacked(words: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
    """Returns the matrix [N, K] that `packed` words [N, K / 8] stand for, with scales and biases [N, K / GROUP]."""
    octets = words.view(torch.uint8)
    steps = torch.stack((octets & _TOP, octets >> 4), dim=-1).flatten(1)
    grouped = steps.unflatten(1, (-1, GROUP)).float()
    return (grouped * scales.float()[..., None] + biases.float()[..., None]).flatten(1)
