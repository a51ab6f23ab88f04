"""The ranks that a model is sharded over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerograph.compiler.agreement import Agreement
from zerograph.core.config import Config
from zerograph.runtime.comm import Communicator, LoneCommunicator, connect
from zerograph.sharding.grad_scaler import find_inf_on_all_ranks
from zerograph.sharding.parametrization import resolve_mesh


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that a model is sharded over, and how this one reaches the others.

    Attributes:
        device: where this rank's shards live.
        size: how many ranks there are.
        mesh: the mesh of them; None without a process group.
        communicator: the transport; None before there is a model.
        agreement: how they agree on what they compile; None where there is one rank, and where ranks are simulated.
    """

    device: torch.device
    size: int = 1
    mesh: DeviceMesh | None = None
    communicator: Communicator | None = None
    agreement: Agreement | None = None

    @classmethod
    def connect(cls, config: Config, device: torch.device) -> Ranks:
        """Find the mesh and connect to the other ranks, who all call this."""
        mesh = resolve_mesh(config, device.type)
        if mesh is None or mesh.size() == 1:
            return cls(device, mesh=mesh, communicator=LoneCommunicator())
        group = mesh.get_group()
        find_inf_on_all_ranks()
        agreement = Agreement.open(group, device, config.plan)
        communicator = connect(group, device, agreement.meeting if agreement is not None else None)
        return cls(device, mesh.size(), mesh, communicator, agreement)


def expected(config: Config) -> int:
    """How many ranks there will be, known before they are connected."""
    if config.mesh is not None:
        return config.mesh.size()
    return dist.get_world_size() if dist.is_initialized() else 1
