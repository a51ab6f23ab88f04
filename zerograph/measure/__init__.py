"""Measure this machine: :func:`measure` returns a :class:`~zerograph.core.machine.Machine` within seconds.

All ranks compute at once, as in training: cores that share a cache or a memory controller are slower together.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from zerograph.core.errors import ConfigError
from zerograph.core.machine import PRESETS, Link, Machine, published_rates
from zerograph.measure.crew import run_ranks
from zerograph.measure.disk import Disk, measure_disk
from zerograph.measure.host import Others, cores, host_memory, may_have_gpu
from zerograph.measure.job import QUICK, Effort, Job, RankReport
from zerograph.measure.timing import fit_link

__all__ = ["QUICK", "Effort", "measure"]

log = logging.getLogger(__name__)
DISTURBED = 0.1
"""Share of the processors from which on what others take is printed: a rank that shares its core has half of it."""


def measure(
    path: Path,
    world_size: int | None = None,
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Machine:
    """This machine, with ``world_size`` ranks at work.

    Args:
        path: folder whose disk is measured.
        world_size: ranks; one per GPU unless given, 2 on a CPU.
        effort: how long and how large.
        tell: called with what is being measured.

    Raises:
        ConfigError: ``path`` cannot be written, or there are fewer GPUs than ranks.
        RankError: a rank failed or did not answer in time.
    """
    effort = effort or Effort()
    device, count = _devices()
    world = world_size or (count if device == "cuda" else min(2, cores()))
    if device == "cuda" and world > count:
        raise ConfigError(
            f"{world} ranks were asked for, and there are {count} GPUs", f"--world {count}: one rank per GPU"
        )
    tell("measuring the disk")
    disk = measure_disk(path, effort.disk, effort.disk_seconds)
    others = Others()
    reports = run_ranks(Job(device, world, effort), tell)
    share = others.share
    if share > DISTURBED:
        log.warning(
            "other processes took %.0f%% of the processors: rates may be too low, by half where two share one\n\n"
            "hint: measure again when they are idle",
            100 * share,
        )
    return _machine(device, reports, disk, share)


def _devices() -> tuple[Literal["cuda", "cpu"], int]:
    if may_have_gpu():
        import torch

        if torch.cuda.is_available():
            return "cuda", torch.cuda.device_count()
    return "cpu", 0


def _machine(device: Literal["cuda", "cpu"], reports: Sequence[RankReport], disk: Disk, others: float) -> Machine:
    world = len(reports)
    like = PRESETS["cpu" if device == "cpu" else "a100-80gb"]
    # Nothing between ranks can be measured on one: the preset's figure stands in, and the notes say so.
    intra = _intra(reports) or like.intra
    memory = host_memory()
    return Machine(
        name=platform.node() or "measured",
        device=device,
        device_memory=memory // world if device == "cpu" else min(a.device_memory for a in reports),
        device_bandwidth=min(a.bandwidth for a in reports),
        matmul=_slowest([a.matmul for a in reports]),
        vector=_slowest([a.vector for a in reports]),
        launch=max(a.launch for a in reports),
        ranks_per_node=world,
        host_memory=memory,
        nvme_capacity=disk.capacity,
        nvme_read=disk.read,
        nvme_write=disk.write,
        nvme_both=disk.both,
        h2d=_slower([a.h2d for a in reports]),
        d2h=_slower([a.d2h for a in reports]),
        intra=intra,
        inter=Link(min(like.inter.rate, intra.rate), max(like.inter.latency, intra.latency)),
        inter_step=like.inter_step,
        update=Link(min(a.update.rate for a in reports), max(a.update.latency for a in reports)),
        cpu_optimizer=sum(a.optimizer for a in reports),
        published=published_rates(reports[0].gpu),
        disturbed=round(others, 2) if others > DISTURBED else 0.0,
        notes=_notes(reports, disk, others),
    )


def _slowest(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The rates of the rank that the others wait for."""
    return {dtype: min(rate[dtype] for rate in rates) for dtype in rates[0]}


def _slower(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.rate)


def _intra(reports: Sequence[RankReport]) -> Link | None:
    """All-gathers as bus bandwidth: of the full tensor a rank receives what the other ranks hold."""
    world = len(reports)
    if world == 1:
        return None
    samples = []
    for of_ranks in zip(*(a.gathers for a in reports), strict=True):  # one size
        size, rounds = of_ranks[0][0], zip(*(rounds for _, rounds in of_ranks), strict=True)
        # Of a repetition the slowest rank's time, since a collective ends when all have ended; of a round the fastest
        # repetition, since all ranks wait for one that is disturbed.
        seconds = median(min(map(max, zip(*of_round, strict=True))) for of_round in rounds)
        samples.append((size * (world - 1) // world, seconds))
    return fit_link(samples)


def _notes(reports: Sequence[RankReport], disk: Disk, others: float) -> str:
    ranks, kind = len(reports), "O_DIRECT" if disk.direct else "through the page cache"
    notes = [f"{ranks} rank{'s' * (ranks > 1)}", f"torch {reports[0].torch}", reports[0].transport]
    notes += [f"disk {disk.file_system}, {kind}"]
    notes += ["inter is a guess: one host was measured"] + ["so is intra: one rank"] * (ranks == 1)
    return "; ".join([*notes, f"other processes took {others:.0%} of the processors"])
