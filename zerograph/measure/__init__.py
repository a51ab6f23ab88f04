"""Measure this machine: :func:`measure` returns a :class:`~zerograph.core.machine.Machine` within seconds.

All ranks compute at once, as in training: cores that share a cache or a memory controller are slower together.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from zerograph.core.errors import ConfigError
from zerograph.core.machine import PRESETS, Link, Machine, published_rates
from zerograph.core.units import counted
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
) -> Machine | None:
    """This machine, with ``world_size`` ranks at work; None on all but the first of ranks that torchrun has started,
    which measure together.

    Args:
        path: folder whose disk is measured.
        world_size: ranks; one per GPU unless given, 2 on a CPU. Those of torchrun are what they are.
        effort: how long and how large.
        tell: called with what is being measured.

    Raises:
        ConfigError: ``path`` cannot be written, there are fewer GPUs than ranks, or ``world_size`` is given to ranks
            that torchrun has started.
        RankError: a rank failed or did not answer in time.
    """
    effort = effort or Effort()
    device, count = _devices()
    if is_launched():
        return _measure_together(path, world_size, device, effort, tell)
    world = world_size or (count if device == "cuda" else min(2, cores()))
    if device == "cuda" and world > count:
        raise ConfigError(
            f"{world} ranks were asked for, and there are {count} GPUs", f"--world {count}: one rank per GPU"
        )
    tell("measuring the disk")
    disk = measure_disk(path, effort.disk, effort.disk_seconds)
    others = Others()
    reports = run_ranks(Job(device, world, effort), tell)
    return _machine(device, reports, world, disk, _told(others.share()), host_memory())


def is_launched() -> bool:
    """Whether this process is one of several ranks that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def is_first() -> bool:
    """Whether this process is to show what was measured."""
    return not is_launched() or os.environ["RANK"] == "0"


def _measure_together(
    path: Path,
    world_size: int | None,
    device: Literal["cuda", "cpu"],
    effort: Effort,
    tell: Callable[[str], None],
) -> Machine | None:
    from zerograph.measure.rank import work_together  # imports torch

    if world_size is not None:
        raise ConfigError(
            f"{world_size} ranks were asked for, and torchrun has started {os.environ['WORLD_SIZE']}",
            "leave --world out: the ranks that there are measure together",
        )
    started: tuple[Disk, Others] | None = None

    def start() -> None:
        nonlocal started
        tell("measuring the disk")
        started = measure_disk(path, effort.disk, effort.disk_seconds), Others()

    found = work_together(device, effort, tell, start if is_first() else lambda: None)
    if started is None:
        return None
    disk, others = started
    share = _told(others.share(found.beside))
    return _machine(device, found.reports, found.of_each_host, disk, share, found.host_memory)


def _told(share: float) -> float:
    """``share``, after a warning where it is large."""
    if share > DISTURBED:
        log.warning(
            "other processes took %.0f%% of the processors: rates may be too low, by half where two share one\n\n"
            "hint: measure again when they are idle",
            100 * share,
        )
    return share


def _devices() -> tuple[Literal["cuda", "cpu"], int]:
    if may_have_gpu():
        import torch

        if torch.cuda.is_available():
            return "cuda", torch.cuda.device_count()
    return "cpu", 0


def _machine(
    device: Literal["cuda", "cpu"],
    reports: Sequence[RankReport],
    world: int,
    disk: Disk,
    others: float,
    memory: int,
) -> Machine:
    """``world`` ranks of each host, which has so many bytes of ``memory``, made the ``reports``."""
    like = PRESETS["cpu" if device == "cpu" else "a100-80gb"]
    # Nothing between ranks can be measured on one: the preset's figure stands in, and the notes say so.
    intra = _intra(reports, world) or like.intra
    inter = _inter(reports, world, intra)
    by_host = [reports[first : first + world] for first in range(0, len(reports), world)]
    return Machine(
        name=platform.node() or "measured",
        device=device,
        device_memory=memory // world if device == "cpu" else min(a.device_memory for a in reports),
        device_bandwidth=min(a.bandwidth for a in reports),
        matmul=_slowest([a.matmul for a in reports]),
        attention=_slowest([a.attention for a in reports]),
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
        inter=inter or Link(min(like.inter.rate, intra.rate), max(like.inter.latency, intra.latency)),
        inter_step=like.inter_step if inter is None else 0.0,
        update=Link(min(a.update.rate for a in reports), max(a.update.latency for a in reports)),
        cpu_optimizer=min(sum(a.optimizer for a in of_host) for of_host in by_host),
        published=published_rates(reports[0].gpu),
        disturbed=round(others, 2) if others > DISTURBED else 0.0,
        notes=_notes(reports, world, disk, others),
    )


def _slowest(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The rates of the rank that the others wait for."""
    return {dtype: min(rate[dtype] for rate in rates) for dtype in rates[0]}


def _slower(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.rate)


def _intra(reports: Sequence[RankReport], world: int) -> Link | None:
    """All-gathers as bus bandwidth: of the full tensor a rank receives what the other ranks hold."""
    if world == 1:
        return None
    return fit_link([(size * (world - 1) // world, seconds) for size, seconds in _slowest_gathers(reports, "gathers")])


def _inter(reports: Sequence[RankReport], world: int, intra: Link) -> Link | None:
    """The link between hosts; None where there is one host."""
    ranks = len(reports)
    if ranks == world:
        return None
    gathers = _slowest_gathers(reports, "between")
    if not reports[0].two_levels:
        return fit_link([(size * (ranks - 1) // ranks, seconds) for size, seconds in gathers])
    # What a host gets from the others, and then each of its ranks from the others of the host.
    hosts = ranks // world
    samples = []
    for size, seconds in gathers:
        inside = intra.seconds(size * (world - 1) / world)
        samples.append((size * (hosts - 1) // hosts, max(seconds - inside, seconds / 10)))
    return fit_link(samples)


def _slowest_gathers(reports: Sequence[RankReport], name: str) -> list[tuple[int, float]]:
    """Bytes of the full tensor, and seconds until all ranks had it, of the reports' gathers of that name."""
    samples = []
    for of_ranks in zip(*(getattr(a, name) for a in reports), strict=True):  # one size
        size, rounds = of_ranks[0][0], zip(*(rounds for _, rounds in of_ranks), strict=True)
        # Of a repetition the slowest rank's time, since a collective ends when all have ended; of a round the fastest
        # repetition, since all ranks wait for one that is disturbed.
        samples.append((size, median(min(map(max, zip(*of_round, strict=True))) for of_round in rounds)))
    return samples


def _notes(reports: Sequence[RankReport], world: int, disk: Disk, others: float) -> str:
    ranks, kind = len(reports), "O_DIRECT" if disk.direct else "through the page cache"
    over = f" on {ranks // world} hosts" if ranks > world else ""
    notes = [counted(ranks, "rank") + over, f"torch {reports[0].torch}", reports[0].transport]
    notes += [f"disk {disk.file_system}, {kind}"]
    notes += ["inter is a guess: one host was measured"] * (ranks == world) + ["so is intra: one rank"] * (ranks == 1)
    return "; ".join([*notes, f"other processes took {others:.0%} of the processors"])
