"""The ranks that a model is sharded over."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerograph.compiler.agreement import Agreement
from zerograph.core.arguments import require
from zerograph.core.config import Config
from zerograph.core.errors import ConfigError
from zerograph.runtime.comm.axes import Axes, axes_of, axes_of_experts
from zerograph.runtime.comm.collectives import LoneCommunicator
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.connecting import connect_axes, keeps_to_group
from zerograph.runtime.comm.paired import PairedCommunicator, SpanningCommunicator
from zerograph.runtime.comm.roster import Roster
from zerograph.runtime.comm.shared_memory import SharedMemoryCommunicator
from zerograph.runtime.dtensors import shard_ranks
from zerograph.runtime.joined import everyone_on, other_axis
from zerograph.runtime.offload.host import AcceleratorHost, HostMemory
from zerograph.runtime.torch_private import reach_host, scales_reach_host
from zerograph.sharding.adopt import one_mesh
from zerograph.sharding.files.checkpoint_folders import watch_checkpoints
from zerograph.sharding.foreign_code import explain_shards
from zerograph.sharding.parallel import mesh_beside, mesh_with_experts
from zerograph.sharding.shards import default_group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that a model is sharded over, and how this one reaches the others.

    Attributes:
        device: where this rank's shards live.
        size: how many ranks split a parameter.
        mesh: the mesh of all; None where one rank communicates with nobody.
        communicator: the transport; None before there is a model.
        agreement: how they agree on what they compile; None where there is one rank, and where ranks are simulated.
        host: of an accelerator, for what leaves it; None where nothing does, and on a CPU.
        replicas: how many have the same part of a parameter.
        per_host: how many are on each host, where all share memory or are joined in two levels; else None.
        experts: the mesh of the ranks that have the same experts, and then of those that have other ones; None where
            all ranks share all.
    """

    device: torch.device
    size: int = 1
    mesh: DeviceMesh | None = None
    communicator: Communicator | None = None
    agreement: Agreement | None = None
    host: HostMemory | None = None
    replicas: int = 1
    per_host: int | None = None
    experts: DeviceMesh | None = None

    @property
    def beside(self) -> bool:
        """Whether ranks of another axis run the same programs, with collectives of the user's among themselves."""
        return isinstance(self.communicator, SpanningCommunicator)

    @property
    def groups(self) -> Mapping[str, str]:
        """The group that graphs are to use instead of each of the user's, by name."""
        return self.communicator.groups if isinstance(self.communicator, SpanningCommunicator) else {}

    @classmethod
    def connect(cls, config: Config, device: torch.device, params: Sequence[Tensor] = ()) -> Ranks:
        """Find the mesh and connect to the other ranks, who all call this.

        Args:
            params: of the model, which may have experts that ranks have some of each.

        Raises:
            ConfigError: the mesh lies on another device type than the model, or the model beside the current device.
            UnsupportedError: experts lie on an axis that is none of the mesh's.
        """
        _refuse_beside_current(device)
        mesh = resolve_mesh(config, device.type)
        if config.mesh is not None:
            _tell_of_other_ranks(config.mesh)
        host = AcceleratorHost(device) if config.offload_tiers and device.type != "cpu" else None
        if host is not None:
            scales_reach_host()
        if mesh is None:
            return cls(device, communicator=LoneCommunicator(), host=host)
        experts, axes = mesh_with_experts(params, mesh), axes_of(mesh)
        if experts is not None:
            axes = axes_of_experts(axes, experts.get_group(0), experts.size(1))
        else:
            axes = _beside_others(axes, mesh_beside(params, mesh))
        if host is not None:
            for group in (*axes.groups, *(experts.get_all_groups() if experts is not None else ())):
                reach_host(group)
        explain_shards()
        watch_checkpoints()
        peers = axes.places(axes.shards) if axes.beside is not None else None
        agreement = Agreement.open(axes.everyone, device, config.plan, peers)
        communicator = connect_axes(axes, device, agreement.rendezvous if agreement is not None else None)
        split = shard_ranks(mesh)
        per_host = _ranks_of_a_host(communicator)
        if agreement is not None and axes.everyone is not axes.shards:
            # Ranks along another axis may lie on hosts otherwise, and all take one plan.
            per_host = per_host if len(set(agreement.gather("ranks of each host", per_host))) == 1 else None
        return cls(device, split, mesh, communicator, agreement, host, mesh.size() // split, per_host, experts)


def _beside_others(axes: Axes, both: DeviceMesh | None) -> Axes:
    """``axes`` with the ranks of the other axis of ``both``, where it has several."""
    other = other_axis(both) if both is not None else None
    if both is None or other is None or other.size() == 1:
        return axes
    return replace(axes, everyone=everyone_on(both), beside=other.get_group())


def _refuse_beside_current(device: torch.device) -> None:
    """Streams, events and collectives are those of the current device, whatever device a tensor is on."""
    if device.type == "cpu":
        return
    current = torch.accelerator.current_device_index()
    if device.index != current:
        raise ConfigError(
            f"the model is on {device}, and the current device is {device.type}:{current}",
            f"torch.{device.type}.set_device({device.index}) before the model is made; under torchrun "
            f'torch.{device.type}.set_device(int(os.environ["LOCAL_RANK"]))',
        )


def will_be_alone(config: Config) -> bool:
    """Whether one rank will communicate with nobody, known before ranks are connected."""
    group = config.mesh if config.mesh is not None else default_group()
    return group is None or (group.size() == 1 and not keeps_to_group())


def _tell_of_other_ranks(mesh: DeviceMesh) -> None:
    """Warn, on the first rank of ``mesh``, where that is a part of the job: copies of a model drift apart unseen."""
    ranks, world = mesh.mesh.flatten().tolist(), dist.get_world_size()
    if len(ranks) < world and dist.get_rank() == ranks[0]:
        log.warning(
            "mesh= has %s of the job's %d: other ranks that train this model are not synchronized with these, neither "
            "their first values nor their gradients\n\n"
            "hint: this is right where the others split the model by tensor parallelism or have other stages of a "
            "pipeline; else leave mesh= out to train one model on all ranks, or let the loop average between meshes",
            Roster().named(ranks), world,
        )  # fmt: skip


def resolve_mesh(config: Config, device_type: str) -> DeviceMesh | None:
    """The mesh to shard over: the user's, or a 1-D one over the default process group; None for one rank, unless it is
    to keep to the process group.

    Raises:
        ConfigError: the mesh lies on another device type than the model, or there is no group to keep to.
    """
    if default_group() is None and keeps_to_group():
        raise ConfigError(
            "ZEROGRAPH_TRANSPORT='group' keeps to a process group, and there is none",
            "torch.distributed.init_process_group() first, under torchrun --nproc-per-node 1 too; or unset it",
        )
    if config.mesh is not None:
        if config.mesh.device_type != device_type:
            raise ConfigError(
                f"mesh is on {config.mesh.device_type!r}, the model on {device_type!r}",
                f'make it with init_device_mesh("{device_type}", (world_size,))',
            )
        if config.mesh.get_coordinate() is None:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the mesh, which has ranks {config.mesh.mesh.flatten().tolist()}",
                "run the model only on ranks of its mesh, or make a mesh of all ranks",
            )
        _refuse_descending(config.mesh)
        return None if will_be_alone(config) else one_mesh(config.mesh)
    group = default_group()
    if group is None or will_be_alone(config):
        return None
    # Not init_device_mesh, which makes another group where the default one is gloo's and there is a GPU.
    return one_mesh(DeviceMesh.from_group(group, device_type))


def _refuse_descending(mesh: DeviceMesh) -> None:
    """Process groups sort their ranks, and coordinates do not: rows would be another rank's."""
    ranks = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))
    if bool((ranks.diff(dim=0) <= 0).any()) or bool((ranks.diff(dim=1) <= 0).any()):
        raise ConfigError(
            f"mesh has the ranks {mesh.mesh.tolist()}: along each axis they must ascend",
            "make it with init_device_mesh, which numbers them row by row",
        )


def device_of(model: nn.Module, config: Config, device: object) -> torch.device:
    """The device that the shards of ``model`` belong on; ``device`` is the one that :func:`zerograph.shard` was given.

    Raises:
        ConfigError: that is none, or the model is elsewhere.
    """
    own = next((p.device for p in model.parameters() if not p.is_meta), None)
    given = _device_given(device) if device is not None else None
    require(
        given is None or own is None or given.type == own.type,
        f"zerograph.shard got device={str(given)!r}, and the model is on {own}",
        "device= is for a model on the meta device; move one that has values before: model.to(device)",
    )
    on_mesh = config.mesh.device_type if config.mesh is not None else None
    chosen = torch.device(given or own or on_mesh or _accelerator() or "cpu")
    if chosen.index is None and chosen.type != "cpu":
        chosen = torch.device(chosen.type, torch.accelerator.current_device_index())
    return chosen


def _ranks_of_a_host(communicator: Communicator) -> int | None:
    if isinstance(communicator, SharedMemoryCommunicator):
        return communicator.world_size
    return communicator.per_host if isinstance(communicator, PairedCommunicator) else None


def _accelerator() -> torch.device | None:
    """The kind of device that models belong on here: a torch that was built for CUDA names it without a GPU, too."""
    return torch.accelerator.current_accelerator(check_available=True)


def _device_given(device: Any) -> torch.device:
    hint = 'a device of this machine, such as "cpu" or "cuda"'
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"zerograph.shard got device={device!r:.80}, which is none", hint) from error
    here = ("cpu", *filter(None, [getattr(_accelerator(), "type", None)]))
    require(found.type in here, f"zerograph.shard got device={str(found)!r}; here there is {' and '.join(here)}", hint)
    return found
