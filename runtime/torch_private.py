"""The private names of torch that running programs needs, where no public name exists."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import _MultiDeviceReplicator
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``: the very object, at no cost. ``to_local()`` takes part in autograd, and then
    makes a new tensor each time. Seen in 2.11, 2.13."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]


@cache
def scales_reach_host() -> None:
    """Let ``GradScaler`` wait until its scale has come to the host, for gradients that are there.

    torch copies it into page-locked memory without waiting, and reads it at once: gradients are multiplied by whatever
    was there before, or count as not finite. Seen in 2.13.
    """
    get = _MultiDeviceReplicator.get

    def waits(self: _MultiDeviceReplicator, device: torch.device) -> Tensor:
        copied = get(self, device)
        if copied.is_cpu and not self.master.is_cpu:
            torch.accelerator.current_stream(self.master.device).synchronize()
        return copied

    _MultiDeviceReplicator.get = waits  # type: ignore[method-assign]


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Let ``tensor`` have ``local``, of the same shape and strides, as this rank's part: ``.data`` of a DTensor takes
    another tensor and ignores its memory. Seen in 2.13."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = local  # type: ignore[attr-defined]
    else:
        tensor.data = local


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A DTensor of which this rank has ``local``, wherever that is. ``DTensor.from_local`` moves it to the mesh's
    device. Seen in 2.13."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)  # type: ignore[arg-type, call-arg]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """How ``fully_shard`` places what ranks of a later axis, ``split_factor`` of them, have split along ``dim``.
    Seen in 2.13."""
    return _StridedShard(dim, split_factor=split_factor)


def concatenated(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """The mesh of the axes of ``mesh`` and then of ``other``, as ``fully_shard`` makes it. Seen in 2.13.

    Raises:
        RuntimeError: they are not different axes of one mesh.
    """
    if not (mesh.mesh_dim_names and other.mesh_dim_names):
        raise RuntimeError("axes without names have no place in a mesh of both")
    return DeviceMesh._concatenate([mesh, other])


def placed_as(local: Tensor, param: Tensor) -> Tensor:
    """``local``, this rank's part of something of the shape of ``param``, as a tensor that is placed as that is."""
    if not isinstance(param, DTensor):
        return local
    return as_dtensor(local, param.device_mesh, param.placements, param.shape, param.stride())


def versions(tensor: Tensor) -> tuple[int, int]:
    """How often ``tensor`` was written to: an operation on a DTensor counts in one of the two, whichever it writes to.
    Seen in 2.11, 2.13."""
    return tensor._version, local_tensor(tensor)._version


class Untouched:
    """Tensors that nobody else may write to while an update is under way."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._versions = tensors, list(map(versions, tensors))

    @property
    def changed(self) -> list[Tensor]:
        """Those that somebody has written to."""
        return [t for t, seen in zip(self._tensors, self._versions, strict=True) if versions(t) != seen]


def memory_is_unshared(tensor: Tensor) -> bool:
    """Whether ``tensor`` alone refers to its memory: no view of it is alive. Python counts references to tensors, and
    nothing public those to memory. Seen in 2.11, 2.13."""
    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return bool(users == 2)  # the tensor, and the storage object that is made to ask


def is_held_alone(holder: Sequence[Any], index: int) -> bool:
    """Whether nobody but ``holder`` knows the tensor at ``index``, or its memory: no saved tensor of a graph that is
    kept, which C++ holds, or, with hooks on it, Python. Nothing public counts those in C++. Seen in 2.13."""
    alone = _references(holder, index) == _ONE_REFERENCE and holder[index]._use_count() == 1
    return alone and memory_is_unshared(holder[index])


def _references(holder: Sequence[Any], index: int) -> int:
    return sys.getrefcount(holder[index])


_ONE_REFERENCE = _references([object()], 0)


# Autograd


def current_backward() -> int:
    """A number for the backward that runs in this thread, which hooks are not told. Seen in 2.11, 2.13."""
    return torch._C._current_graph_task_id()


Open = weakref.ref[Callable[[], None]]
"""Dead when a backward has ended, or failed."""


def after_backward(action: Callable[[], None]) -> Open:
    """Have ``action`` called when the backward that runs in this thread ends, unless it fails; returns whether it goes
    on, also where others run inside of it. DistributedDataParallel uses it; the documented hooks end with a tensor or a
    node. Only the backward keeps its actions. Seen in 2.11, 2.13."""
    kept = partial(action)
    torch.autograd.Variable._execution_engine.queue_callback(kept)
    return weakref.ref(kept)


Goes = Literal["added", "returned", "dropped"]
"""Where a gradient goes: to ``.grad``, to who called ``torch.autograd.grad``, or nowhere."""


def gradient_goes(param: Tensor, direct: Mapping[int, Node]) -> Goes:
    """Where the backward that runs in this thread takes the gradient of ``param``, given :func:`accumulated_directly`.
    If a function stands between the gradient and ``param``, "returned" may be "dropped" too: nobody can tell which of
    that function's inputs are asked for. The nodes are public, and what the engine will do is not. Seen in 2.13."""
    if not param.requires_grad:  # any more
        return "dropped"
    # A gradient's edge takes 0.1 ms for a DTensor.
    node = direct.get(id(param)) or torch.autograd.graph.get_gradient_edge(param).node
    try:
        adds = torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # what torch.autograd.grad runs cannot be asked about the leaves that it returns
        return "returned"
    return "added" if adds else "dropped" if id(param) in direct else "returned"


def accumulated_directly() -> dict[int, Node]:
    """By ``id``, the parameters to whose ``.grad`` the gradients go that the node of autograd returns that runs in this
    thread, and the nodes that add them: as they are, or wrapped in DTensors. A function that computes its inputs from
    parameters (``functional_call`` of scaled ones) stands in between. Seen in 2.13."""
    node = torch._C._current_autograd_node()
    nodes = [one for one, _ in node.next_functions if one is not None] if node is not None else []
    wrapped = (inner for one in nodes if one.name() == "_RowsBackward" for inner, _ in one.next_functions)
    return {id(one.variable): one for one in (*nodes, *wrapped) if one is not None and hasattr(one, "variable")}


def has_gradient_hooks(param: Tensor) -> bool:
    """Whether the user has hooks on the gradient of ``param``, which can be registered and not asked for; that of
    ``GradientAccumulation`` does not count. Seen in 2.11, 2.13."""
    accumulated = (param._post_accumulate_grad_hooks or {}).values()  # type: ignore[attr-defined]
    return bool(param._backward_hooks or any(not hasattr(hook, FOLLOWS) for hook in accumulated))


FOLLOWS = "_zg_follows"
"""Attribute of the hook of ``GradientAccumulation``, by which it is told from those of users."""


class Memory:
    """Whether memory is alive: that which ``tensor`` refers to, and views of it. It keeps nothing alive. Python's weak
    references see tensors, of which autograd makes new ones over the same memory. Seen in 2.11, 2.13."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()._weak_ref()

    def __bool__(self) -> bool:
        return not torch.UntypedStorage._expired(self._storage)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._storage)


# Process groups


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that carries tensors of ``group`` on ``device``, public from 2.14 on. Seen in 2.11, 2.13, 2.14.

    Raises:
        RuntimeError: the group does not reach the device.
    """
    public = getattr(dist, "get_backend_impl", None)
    return public(group, device) if public is not None else group._get_backend(device)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """ "gloo", "nccl", ...: what carries tensors on ``device``. A group made without a name has one per device, and
    ``dist.get_backend`` says "undefined" of it. Seen in 2.11, 2.13."""
    return str(_backend_of(group, device).name())


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where ``group`` communicates from: the current accelerator if it can, else the host. Seen in 2.13."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type not in {device.type for device in group._device_types}:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that collectives of ``group`` wait for another rank: ``init_process_group(timeout=...)``, which cannot be
    asked. Seen in 2.11, 2.13."""
    try:
        return float(_backend_of(group, device).options._timeout.total_seconds())
    except (RuntimeError, AttributeError):  # a backend without options
        return float(dist.constants.default_pg_timeout.total_seconds())


def default_store() -> dist.Store:
    """The store through which the default group's ranks met, which cannot be asked for. Seen in 2.11, 2.13."""
    return c10d._get_default_store()


_ENDLESS = timedelta(days=365)


def gloo_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, waits: timedelta = _ENDLESS
) -> dist.ProcessGroup:
    """A group over gloo, for the CPU and ``device``, that is in none of torch's tables. ``dist.new_group`` needs all
    ranks of the default group, and would take up the connections of one that failed.

    ``timeout`` is that of connecting, and ``waits`` that of collectives: none, as whoever waits for one ends that. Seen
    in 2.13."""
    group = dist.ProcessGroup(store, rank, world_size)
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    backend._set_default_timeout(waits)
    for kind in {"cpu", device.type}:
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. Graphs carry names, and torch's functional collectives take them; nothing public
    leads back from one to its group. Seen in 2.11, 2.13."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


def name_group(name: str, group: dist.ProcessGroup) -> None:
    """Let torch's functional collectives find ``group`` by ``name`` as long as it lives, and nothing else of torch.
    Seen in 2.13."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def unname_group(name: str) -> None:
    """Let them no longer find it; nothing happens where torch has forgotten all groups. Seen in 2.13."""
    with suppress(RuntimeError):
        torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]


def closed_connection(error: BaseException) -> str:
    """The first line of ``error`` where a collective of torch's own over gloo has ended because another rank's
    connection did; else empty. Its type is RuntimeError. Seen in 2.13."""
    line = str(error).partition("\n")[0]
    return line if type(error) is RuntimeError and "gloo/transport/tcp/pair.cc" in line else ""


def allocator_history(device: torch.device) -> Any | None:
    """The module that remembers what torch's allocator of ``device`` hands out, as torch's own documentation has it for
    pytorch.org/memory_viz; None where nothing does. Seen in 2.13."""
    memory = getattr(torch.get_device_module(device), "memory", None)
    return memory if hasattr(memory, "_record_memory_history") else None


def remember_allocations(memory: Any) -> None:
    """Let ``memory``, an :func:`allocator_history`, forget what it knows and remember from here on, with the lines of
    Python that allocate. Seen in 2.13."""
    # C++ frames take minutes to be given names, and say nothing of the model.
    memory._record_memory_history("all", context="all", stacks="python", clear_history=True)


def allocations(memory: Any) -> dict[str, Any]:
    """The snapshot of what ``memory`` remembers. Seen in 2.13."""
    snapshot: dict[str, Any] = memory._snapshot()
    return snapshot


def forget_allocations(memory: Any) -> None:
    """Let ``memory`` remember nothing more. Seen in 2.13."""
    memory._record_memory_history(None)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` is one of torch's, and was not destroyed. Seen in 2.13."""
    return group in c10d._world.pg_map


def group_among(
    ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device, description: str
) -> dist.ProcessGroup:
    """A new group of ``ranks`` of the job over the backend that the group ``like`` has for ``device``, connected now.
    Its ranks call this, no others.

    From a default group that is bound to a device (``init_process_group(device_id=...)``) torch splits communicators,
    in which all ranks of the job take part. So it is unbound meanwhile. And torch names a group by how many its ranks
    are in (2.13), or have asked for (2.14). Where these numbers differ, ranks wait for each other's names: here, or
    where all of the job make the next group. So it gets a name of ours, and is not counted. Seen in 2.13, 2.14."""
    everyone = dist.group.WORLD
    assert everyone is not None
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    count, name = c10d._world.group_count, _next_name(everyone, ranks, description)
    try:
        with patch.object(c10d, "_hash_ranks_to_str", lambda _: name):
            return dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_of(like, device)),
                backend=backend_name(like, device),
                use_local_synchronization=True,
                group_desc=description,
                device_id=device if device.type != "cpu" else None,
            )
    finally:
        everyone.bound_device_id, c10d._world.group_count = bound, count


_GROUPS = weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]]()


def _next_name(everyone: dist.ProcessGroup, ranks: Sequence[int], description: str) -> str:
    """The name of the next group of ``ranks``, the same on all of them."""
    name = f"{description} of ranks {'-'.join(map(str, ranks))}"
    number = _GROUPS.setdefault(everyone, Counter())
    number[name] += 1
    return hashlib.sha256(f"{name} #{number[name]}".encode()).hexdigest()


def reach_host(group: dist.ProcessGroup) -> None:
    """Let ``group`` communicate what is on the host, over gloo, if it cannot; all its ranks call this. Which devices a
    group reaches is said when it is made, and NCCL's alone has no CPU. Seen in 2.13."""
    if not _reaches_host(group):
        store = dist.PrefixStore(f"zerograph/host/{group.group_name}", default_store())
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), dist.constants.default_pg_timeout)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)


def _reaches_host(group: dist.ProcessGroup) -> bool:
    try:
        _backend_of(group, torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def device_for_host(group: dist.ProcessGroup) -> torch.device:
    """Where ``group`` communicates what is on the host: there, or from the current accelerator if it reaches no host.
    The name of its backend does not say: NCCL's is "nccl", "cuda:nccl" or "undefined"."""
    return torch.device("cpu") if _reaches_host(group) else group_device(group)


@contextmanager
def coalescing(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, collectives of ``group`` become one, in the current stream; functional collectives have that, and no
    buffers of their own. With a device torch puts a second NCCL group around that one. Seen in 2.11, 2.13."""
    try:
        with dist._coalescing_manager(group):
            yield
    except BaseException:
        c10d._world.pg_coalesce_state.pop(group, None)  # else the next one finds it
        raise
