"""Which transports connect the ranks of a group, or of a mesh: the fastest that they have."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerograph.core.errors import ConfigError
from zerograph.runtime.comm.axes import Axes
from zerograph.runtime.comm.collectives import GroupCommunicator, LoneCommunicator
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.experts import ExpertCommunicator
from zerograph.runtime.comm.hybrid import HybridCommunicator
from zerograph.runtime.comm.paired import OwnConnections, SpanningCommunicator
from zerograph.runtime.comm.rendezvous import Rendezvous, shared
from zerograph.runtime.torch_private import backend_name

log = logging.getLogger(__name__)


def keeps_to_group() -> bool:
    """Whether ``ZEROGRAPH_TRANSPORT=group`` asks for collectives of the process group, whatever else is faster: the
    shared memory of a CPU's ranks, and no communication in a group of one.

    Raises:
        ConfigError: it is neither "auto" nor "group".
    """
    wanted = os.environ.get("ZEROGRAPH_TRANSPORT", "auto")
    if wanted not in ("auto", "group"):
        raise ConfigError(f"ZEROGRAPH_TRANSPORT={wanted!r} names no transport", 'set it to "auto" or "group"')
    return wanted == "group"


def connect_axes(axes: Axes, device: torch.device, rendezvous: Rendezvous | None = None) -> Communicator:
    """The fastest transports along ``axes``, whose ranks all call this.

    Raises:
        ConfigError: ``ZEROGRAPH_TRANSPORT`` is neither "auto" nor "group".
    """
    places = axes.places(axes.shards)
    if axes.replicas is None and axes.experts == 1:
        shards = connect(axes.shards, device, rendezvous, places)
        return shards if axes.beside is None or rendezvous is None else _spanning(axes, shards, device, rendezvous)
    # A lone rank's shards are whole: a gather of them would be a copy.
    shards = connect(axes.shards, device, rendezvous, places) if len(places) > 1 else LoneCommunicator()
    if axes.replicas is None:
        return ExpertCommunicator(shards, connect(axes.everyone, device, rendezvous))
    replicas = connect(axes.replicas, device, rendezvous, axes.places(axes.replicas), gathers=False)
    return HybridCommunicator(shards, replicas)


def _spanning(axes: Axes, shards: Communicator, device: torch.device, rendezvous: Rendezvous) -> Communicator:
    assert axes.beside is not None
    places = axes.places(axes.beside)
    # Not shared memory: ranks there learn only from a message which program the others are in.
    beside = GroupCommunicator(axes.beside, device, rendezvous, places, gathers=False)
    own = OwnConnections(axes.beside, rendezvous, places, device) if beside.compares else None
    return SpanningCommunicator(shards, beside, own)


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    rendezvous: Rendezvous | None = None,
    ranks: Sequence[int] | None = None,
    gathers: bool = True,
) -> Communicator:
    """The fastest transport between the ranks of ``group``, who all call this; of a group of one, its collectives.

    CPU ranks of one host share memory, and those of several hosts do inside of each, unless :func:`keeps_to_group` says
    otherwise. Simulated ranks have no ``rendezvous``, which numbers those of ``group`` as ``ranks`` says; as the group
    does, unless given. ``gathers``: whether anything is gathered over them.

    Raises:
        ConfigError: ``ZEROGRAPH_TRANSPORT`` is neither "auto" nor "group".
    """
    shares = not keeps_to_group()
    if device.type == "cpu" and shares and backend_name(group, device) == "gloo":
        ranks = range(group.size()) if ranks is None else ranks
        rendezvous = rendezvous or Rendezvous.open(group, device)
        sharing = _sharing_memory(group, rendezvous, ranks)
        if sharing is not None:
            return sharing
    return GroupCommunicator(group, device, rendezvous, ranks, gathers)


def _sharing_memory(group: dist.ProcessGroup, rendezvous: Rendezvous, ranks: Sequence[int]) -> Communicator | None:
    """Through shared memory inside of each host; None where there is none, or hosts have ranks of no equal number."""
    from zerograph.runtime.comm.shared_memory import open_shared_memory  # needs the native core, as others do not
    from zerograph.runtime.comm.two_level import TwoLevelCommunicator

    hosts = shared(group, this_host())
    each, count = ranks_of_each(hosts), len(set(hosts))
    if each == 1 and count > 1:
        log.info("no shared memory between the ranks of %d hosts, using gloo", count)
        return None
    mailbox = open_shared_memory(group, rendezvous, ranks, of_each_host=each)
    if mailbox is None or count == 1:
        return mailbox
    peers = ranks[group.rank() % each :: each]
    found = TwoLevelCommunicator(mailbox, GroupCommunicator(group, torch.device("cpu"), rendezvous, peers))
    log.info("ranks communicate in two levels: %s", found.name)
    return found


def ranks_of_each(hosts: Sequence[str]) -> int:
    """How many ranks each host has, where they have equally many, one after the other; else 1.

    Args:
        hosts: of each rank.
    """
    each, rest = divmod(len(hosts), len(set(hosts)))
    if rest:
        return 1
    blocks = [set(hosts[first : first + each]) for first in range(0, len(hosts), each)]
    return each if all(len(block) == 1 for block in blocks) else 1


def this_host() -> str:
    """This host, and no other: names repeat, among containers for one, where the kernel's boot id does not."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{os.uname().nodename} {file.read().strip()}"
