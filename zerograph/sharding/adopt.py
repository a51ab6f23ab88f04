"""Adoption: the first call of a compiled model turns its plain parameters into sharded ones.

Before Dynamo traces the first frame for a backend, the module that is called is the one to shard. Where there is none
(a compiled function), or it does not own all, Dynamo hands over a graph whose inputs are plain parameters: their
modules are found, and Dynamo traces the frame again. Parameters are sharded in place; optimizers and lists that hold
the old objects are pointed at the new ones.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerograph.core.arguments import require_kind
from zerograph.core.errors import UnsupportedError
from zerograph.graph.torch_private import skip_frame
from zerograph.runtime.comm.axes import axes_of
from zerograph.sharding.torch_private import (
    backend_given,
    called_model,
    forget_meshes,
    modules_read_through,
    original,
    place_on,
    running_modules,
)


def model_given(model: object, function: str) -> nn.Module:
    """The module that ``function``, one that users call, was given: of what torch.compile returned, the one inside.

    Raises:
        ConfigError: it is none.
    """
    require_kind(model, nn.Module, function, "give it the model itself; several of them one by one, or in a ModuleList")
    return original(model)  # type: ignore[arg-type]


def refuse_wrapped(roots: Iterable[nn.Module | None]) -> None:
    """Refuse models that something else already distributes, in them or around their call.

    Raises:
        UnsupportedError: naming the wrapper.
    """
    around = [m for m in dict.fromkeys(running_modules()) if isinstance(m, _WRAPPERS)]
    for root in [root for root in roots if root is not None]:
        inside = [m for m in root.modules() if isinstance(m, _WRAPPERS)]
        found = inside or [m for m in around if _takes_care_of(m, root)]
        if found:
            raise wrapped_by(type(found[0]))


def refuse_flattened(models: Iterable[nn.Module]) -> None:
    """Refuse ``models``, which nothing has sharded, where FSDP has put their parameters into flat ones of its own.

    Dynamo compiles nothing of such models, and asks no backend.

    Raises:
        UnsupportedError: naming the wrapper.
    """
    skipped = set(models)
    for wrapper in live(FullyShardedDataParallel) if skipped else ():
        if not skipped.isdisjoint(wrapper.modules()):
            raise wrapped_by(type(wrapper))


def wrapped_by(wrapper: type[nn.Module]) -> UnsupportedError:
    """The error for a model in, or under, a module of class ``wrapper``."""
    return UnsupportedError(
        f"the model is wrapped by {wrapper.__name__}, which synchronizes gradients itself",
        "leave the wrapper out, and compile and call the plain model: ZeroGraph does what the wrapper did "
        "(stage=0 is DDP)",
    )


_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)


def _takes_care_of(wrapper: nn.Module, model: nn.Module) -> bool:
    """Whether ``wrapper`` would synchronize parameters of ``model``, which sharding replaces.

    A part that is frozen, or that DDP was told to ignore, may be sharded inside of it.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        return any(module is model for module in wrapper.modules())
    ignored = wrapper.parameters_to_ignore
    averaged = {id(p) for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in ignored}
    return any(id(p) in averaged for p in model.parameters())


def parameters(gm: fx.GraphModule) -> list[nn.Parameter]:
    """The parameters among the graph's inputs."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        arg = node.meta.get("grapharg")  # Dynamo's link from a graph input to the object it came from
        example = getattr(arg, "example", None) if arg is not None else None
        if isinstance(example, nn.Parameter):
            found.append(example)
    return found


def roots_of_call(gm: fx.GraphModule, called: nn.Module | None) -> list[nn.Module]:
    """The outermost modules of the call being compiled: ``called``, if any, and those that own the graph's inputs."""
    return list(dict.fromkeys([*([called] if called is not None else []), *modules_read_through(gm)]))


def called_by(backend: object) -> nn.Module | None:
    """The module whose call is being compiled, when ``backend`` was given for a module and not for a function."""
    model, given = called_model() or (None, None)
    return model if given is backend else None


def live(*bases: type) -> list[Any]:
    """Every live instance of ``bases`` or their subclasses."""
    return instances(gc.get_objects(), *bases)


def instances(objects: Iterable[object], *bases: type) -> list[Any]:
    """Those of ``objects`` that are of ``bases`` or their subclasses."""
    # A process has millions of objects: looking a type up in a set costs a tenth of isinstance().
    types: set[type] = set()
    new: set[type] = set(bases)
    while new:
        types |= new
        subclasses: set[type] = set().union(*(type.__subclasses__(cls) for cls in new))
        new = subclasses - types
    return [obj for obj in objects if type(obj) in types and not _is_half_made(obj)]


def _is_half_made(obj: Any) -> bool:
    """Whether it is an optimizer whose ``__init__`` raised, which the error's traceback keeps alive."""
    return isinstance(obj, Optimizer) and not hasattr(obj, "param_groups")


def modules_holding(params: Iterable[Tensor], objects: Iterable[Any]) -> list[nn.Module]:
    """The modules among ``objects`` that own one of ``params`` (tied weights may live outside the compiled model)."""
    wanted = {id(p) for p in params}
    return [
        obj
        for obj in objects
        if isinstance(obj, nn.Module) and any(id(p) in wanted for p in obj.__dict__.get("_parameters", {}).values())
    ]


def modules_given_to(backend: object) -> list[nn.Module]:
    """Every live module that torch.compile or module.compile() gave to ``backend``, called or not."""
    return [original(module) for module in live(nn.Module) if backend_given(module) is backend]


def replace_everywhere(
    pairs: Mapping[int, tuple[Tensor, Tensor]],
    convert_state: Any,
    everything: Callable[[], list[Any]] = gc.get_objects,
) -> None:
    """Point optimizers, and lists of parameters, that hold an old parameter at its new one.

    A list is what a loop clips that takes ``params = list(model.parameters())``, or those that need gradients, before
    the first call. The old parameters never get gradients again: clipping them would do nothing, in silence
    (``clip_torch`` in tests/numerics/test_loop.py). Refusing such a list would refuse the loops that pass it to an
    optimizer and forget it.

    Args:
        pairs: old and new parameter by ``id(old)``.
        convert_state: function of (state tensor of an old parameter, new parameter) that shards optimizer state.
        everything: returns the objects among which these are looked for.
    """
    objects = everything()
    holders = [held for held in objects if type(held) is list and not pairs.keys().isdisjoint(map(id, held))]
    optimizers = instances(objects, Optimizer)
    del objects  # states that are replaced are to go one by one
    for holder in holders:
        if all(isinstance(p, Tensor) for p in holder):
            holder[:] = [pairs[id(p)][1] if id(p) in pairs else p for p in holder]
    for optimizer in optimizers:
        _point_optimizer(optimizer, pairs, convert_state)


def _point_optimizer(optimizer: Optimizer, pairs: Mapping[int, tuple[Tensor, Tensor]], convert_state: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [pairs[id(p)][1] if id(p) in pairs else p for p in group["params"]]
    for key in [k for k in optimizer.state if id(k) in pairs]:
        new = pairs[id(key)][1]
        state = optimizer.state.pop(key)
        optimizer.state[new] = {n: v if n in _COUNTERS else convert_state(v, new) for n, v in state.items()}


# State of torch.optim that is 0-d for every parameter, so that its shape says nothing about a 0-d parameter.
_COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})


def one_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The first mesh equal to ``mesh`` that was seen, of the same process group.

    DTensor's caches take equal meshes for the same, AOTAutograd tells them apart by identity: a graph that holds both
    cannot be lowered. Copies and pickles of a DTensor bring a mesh of their own.
    """
    axes = axes_of(mesh)
    key = axes.name, hash(mesh)
    first = _MESHES.setdefault(key, mesh)
    # Of a group that was destroyed: names are used again, and this process may be another rank than in a dry run.
    if axes_of(first) != axes or first.get_coordinate() != mesh.get_coordinate():
        forget_meshes()
        first = _MESHES[key] = mesh
    return first if first == mesh else mesh


_MESHES: weakref.WeakValueDictionary[tuple[str, int], DeviceMesh] = weakref.WeakValueDictionary()


def move_to_one_mesh(param: Tensor | None) -> None:
    """Let ``param`` lie on :func:`one_mesh` of its own mesh."""
    if isinstance(param, DTensor):
        place_on(param, one_mesh(param.device_mesh))


def skip_getters(cls: type) -> None:
    """Keep Dynamo from compiling the generated properties as frames of their own, at graph breaks."""
    for member in vars(cls).values():
        if isinstance(member, property) and member.fget is not None:
            skip_frame(member.fget)
