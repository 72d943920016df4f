"""What a host offers and what an engine or a drafter needs of one, in Ray's words.

Ray finds CPUs, NVIDIA GPUs and memory by itself; `metal` and `ane` are names of ours that a host has to declare.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest

MOST = 1_000_000
ONE_A_HOST = ("metal", "ane")
"""A Mac has one of each; a part of it is what several engines share."""
RAY = {"metal": "metal", "ane": "ane", "cuda": "GPU", "cpu": "CPU", "memory": "memory"}
"""Our names and Ray's."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Parts of a host: of its Metal GPU and its neural engine, NVIDIA GPUs, CPU cores, bytes of memory.

    Raises:
        InvalidRequest: a number is out of range, or no host has all of this.
    """

    metal: float = 0
    ane: float = 0
    cuda: float = 0
    cpu: float = 0
    memory: int = 0

    def __post_init__(self) -> None:
        for name in ("metal", "ane", "cuda", "cpu"):
            values.number(name, getattr(self, name), 0, 1 if name in ONE_A_HOST else MOST)
        object.__setattr__(self, "memory", values.size("memory", self.memory) if self.memory else 0)
        if self.cuda > 1 and self.cuda != int(self.cuda):
            raise InvalidRequest(f"cuda is {self.cuda:g}; expected a whole number of GPUs, or a part of one below 1")
        if self.cuda and (self.metal or self.ane):
            raise InvalidRequest("no host has cuda beside metal or ane, which are a Mac's; expected one or the other")

    def as_ray(self) -> dict[str, float]:
        """What is not nothing by Ray's names, as a bundle of a placement group has them."""
        return {RAY[name]: many for name, many in asdict(self).items() if many}

    def __str__(self) -> str:
        told = {name: f"{many / 2**30:.1f} GiB" if name == "memory" else f"{many:g}" for name, many in self._some()}
        return ", ".join(f"{name} {many}" for name, many in told.items()) or "nothing"

    def _some(self) -> list[tuple[str, float]]:
        return [(name, many) for name, many in asdict(self).items() if many]


def offered() -> Resources:
    """What this host offers."""
    apple = int(sys.platform == "darwin" and platform.machine() == "arm64")
    return Resources(apple, apple, _nvidia_gpus(), os.cpu_count() or 1, psutil.virtual_memory().total)


def to_declare(host: Resources) -> dict[str, float]:
    """What Ray would not find there by itself."""
    return {name: many for name, many in host.as_ray().items() if name in ONE_A_HOST}


def _nvidia_gpus() -> int:
    devices = Path("/dev").iterdir() if sys.platform == "linux" else ()
    return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices)
