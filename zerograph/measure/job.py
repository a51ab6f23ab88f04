"""The job of the ranks of a measurement, and their answers. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zerograph.core.machine import Link
from zerograph.measure.host import cores

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how large.

    Attributes:
        seconds: per measurement, in all rounds together.
        elements: of a large tensor on a CPU; sixteen times that on a GPU.
        matmul: rows and columns of a large matrix on a CPU; eight times that on a GPU.
        attention: tokens of a sequence whose attention is computed on a CPU; eight times that on a GPU.
        gathers: bytes of the gathered tensor, for each size that is tried.
        disk: bytes of the temporary file.
        disk_seconds: for reading it, and for writing it, at most.
    """

    seconds: float = 0.25
    elements: int = 2**23
    matmul: int = 1024
    attention: int = 512
    gathers: tuple[int, ...] = (64 * 2**10, _MIB, 4 * _MIB, 16 * _MIB, 32 * _MIB)
    disk: int = 512 * _MIB
    disk_seconds: float = 1.0


QUICK = Effort(
    seconds=0.02, elements=2**18, matmul=128, attention=64, gathers=(2**16, 2**20), disk=32 * _MIB, disk_seconds=0.2
)
"""Rough figures in the time it takes to import torch."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job that every rank is given; ``world_size`` are those of a host."""

    device: Literal["cuda", "cpu"]
    world_size: int
    effort: Effort

    @property
    def threads(self) -> int:
        """CPU threads of a rank: one where ranks compute on the CPU, else its share of the processors."""
        return 1 if self.device == "cpu" else max(1, cores() // self.world_size)


Gathers = tuple[tuple[int, tuple[tuple[float, ...], ...]], ...]
"""Bytes, and round by round the seconds of each repetition."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The measurements of one rank: bytes, seconds and rates as in :class:`~zerograph.core.machine.Machine`.

    ``gathers`` holds, for every size of the full tensor, the seconds of the repetitions of each round, among the ranks
    of this host; ``between`` those among all ranks, where they are on several hosts, maybe in ``two_levels``;
    ``optimizer`` is this rank's part of the node's rate; ``transport`` is what carried the collectives; ``gpu`` is the
    device's name, empty on a CPU.
    """

    torch: str
    transport: str
    device_memory: int
    bandwidth: float
    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    launch: float
    h2d: Link
    d2h: Link
    gathers: Gathers
    between: Gathers
    two_levels: bool
    update: Link
    optimizer: float
    gpu: str
