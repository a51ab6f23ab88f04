"""Compile a model without running it or holding it, for any number of simulated ranks.

The model is built on the meta device, sharded there, and traced with fake tensors that claim to be on a device: kernels
are chosen by device, and the meta device has few. Dynamo hands over its graph as in training, where its work ends; the
programs are made from the joint graph.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from zerograph.compiler.compilation import Compilation
from zerograph.compiler.driver import compile_joint, plan_joint, trace
from zerograph.compiler.frame import Frame, traced_function
from zerograph.compiler.frame_plan import Planner, plain
from zerograph.compiler.lowering.segments import SegmentCache
from zerograph.compiler.repetition.repeat import Joint
from zerograph.core.config import Config
from zerograph.core.errors import ConfigError, UnsupportedError, ZeroGraphError
from zerograph.core.garbage import without_gc
from zerograph.core.machine import Machine
from zerograph.core.param_bytes import Plain
from zerograph.core.step import Dimension
from zerograph.dryrun.inputs import Arguments, arguments, sizes_of
from zerograph.dryrun.torch_private import BackendFailed, Ended, FakeTensorMode, simulate_group
from zerograph.dryrun.untraceable import explain_failure
from zerograph.graph.costs import traced_size
from zerograph.runtime.torch_private import as_dtensor
from zerograph.sharding import adopt
from zerograph.sharding.adoption import Adoption
from zerograph.sharding.ranks import Ranks
from zerograph.sharding.torch_private import errors_reach_users, map_tensors, tensors_of
from zerograph.sharding.unsupported_modules import refuse_lazy


@dataclass(frozen=True, slots=True)
class Compiled:
    """One training step of a model, compiled.

    Attributes:
        frame: its plan, its programs, and what passes did.
        config: the arguments of :func:`zerograph.backend`.
        tokens: that the model was given; samples, where these are no sequences.
        unit: "tokens" or "samples".
        searched: bytes that the plan was predicted to need, where it was searched for.
        states: bytes on the device between steps, per rank.
        plain: the model's parameters where none is sharded: one rank keeps its own.
    """

    frame: Frame
    config: Config
    tokens: int
    searched: int
    states: int
    plain: tuple[Plain, ...] = ()
    unit: str = "tokens"


def device_to_trace(asked: str | None, machine: Machine) -> str:
    """The device whose operators a step on ``machine`` is traced with: if that has GPUs, a GPU where torch finds one,
    and Triton to compile for it.

    Args:
        asked: "cpu" or "cuda", where somebody has said so.

    Raises:
        ConfigError: torch finds no GPU to trace for.
    """
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ConfigError(
            "torch finds no GPU, whose operators it would trace",
            "run this where torch.cuda.is_available(), or leave --device out: attention is then as on a CPU",
        )
    compiles = there and machine.device != "cpu" and find_spec("triton") is not None
    return f"cuda:{torch.cuda.current_device()}" if asked == "cuda" or (asked is None and compiles) else "cpu"


def compile_only(
    make: Callable[[], Any],
    *,
    world_size: int,
    replicas: int = 1,
    batch: int = 1,
    seq: int = 1024,
    sizes: Mapping[Dimension, int] | None = None,
    repeat_layers: bool = True,
    programs: bool = True,
    searched: bool = False,
    moments: int = 2,
    device: str = "cpu",
    per_host: int | None = None,
    **options: Any,
) -> Compiled:
    """Compile forward and backward of what ``make`` returns, as rank 0 of ``world_size`` would.

    Args:
        make: returns a model, or a model and its inputs: a tuple, or a dict of keyword arguments. Called under
            ``torch.device("meta")``, so that nothing of any size is allocated.
        replicas: such groups of ranks, with equal shards.
        batch, seq: shape of the token ids that a model without inputs gets.
        sizes: other sizes of the inputs, those that the model brings too.
        repeat_layers: make the joint graph from that of a few of many layers, where Dynamo's graph shows that they are
            alike.
        programs: make the programs too. Else the frames end with their plans, made by rule unless options say more.
        searched: somebody searches a plan of the step afterwards, which may run layers for a part of the batch.
        moments: tensors that the optimizer keeps per parameter, for a plan that is searched.
        device: that the tensors of the call claim to be on; torch has to have operators for it.
        per_host: ranks of each host, where several are joined in two levels; else None.
        options: arguments of :func:`zerograph.backend`.

    Raises:
        UnsupportedError: the model needs values (data-dependent control flow), breaks into several graphs, or does not
            train.
        ConfigError: the model's own code raises.
        RuntimeError: a process group exists already: this process trains.
    """
    # Kernels are never needed: the programs are all that is asked for.
    config, there = Config.of(**{"compute": "eager", **options}), torch.device(device)
    if dist.is_initialized():
        raise RuntimeError("a dry run simulates its ranks and cannot share a process with a process group")
    with without_gc(), simulated_rank(0, world_size):
        model, given = on_meta(make)
        refuse_lazy([model])
        # Constants of the model's code are real tensors.
        params, mode = plain(model.parameters()), FakeTensorMode(allow_non_fake_inputs=True)
        adoption = _adopted(model, config, there)
        planner = Planner(
            config, world_size, adoption.params, there, moments=moments, replicas=replicas, per_host=per_host
        )
        compilation = Compilation(
            world_size=world_size,
            segments=SegmentCache(config.compute),
            plan_for=lambda code, step, _: planner.plan(code, step, params),
            device=there,
            tied=adoption.tied,
            repeats_layers=repeat_layers,
            loss_only=config.loss_only,
            cut_by=config.cuts(searched or config.searches),
            wires=config.wires,
            staging=planner.staging,
            text_of=lambda gm: str(gm.graph),
        )
        fake_inputs = functools.partial(_fake_arguments, batch=batch, seq=seq, sizes=sizes, mode=mode, device=there)
        inputs = fake_inputs(given)

        def call(module: Callable[..., Any], inputs: Arguments = inputs) -> None:
            with mode:
                module(*inputs[0], **inputs[1])

        def uncompiled() -> None:
            again, brought = on_meta(make)
            _fake(again, mode, there)
            call(again, fake_inputs(brought))

        # The meta device has too few kernels to trace on.
        adoption.replace(_fake(model, mode, there))
        frame, joint = _traced(model, adoption, compilation, call, uncompiled)
        (compile_joint if programs else plan_joint)(frame, joint)
        states, own = planner.states(frame.step, params), () if adoption.params else params
        came = sizes_of(inputs)
        tokens, unit = prod(came.values()) if came else 0, "tokens" if "seq" in came else "samples"
        return Compiled(frame, config, tokens, planner.searched, states, own, unit)


def tracing(config: Config) -> dict[str, Any]:
    """The arguments of :func:`compile_only` that shape the step, for a plan that is searched for afterwards: the
    others of ``config`` are the search's."""
    names = ("token_tiles", "batch_tiles", "gather_wire", "reduce_wire", "loss_only")
    return {"stage": config.sharding, **{name: getattr(config, name) for name in names}}


def _fake_arguments(
    given: Any, batch: int, seq: int, sizes: Mapping[Dimension, int] | None, mode: FakeTensorMode, device: torch.device
) -> Arguments:
    """The arguments of a call, their tensors fake."""
    found = arguments(given, batch, seq, sizes or {})
    # A tensor that is given twice (ids that are labels too) stays one tensor.
    fakes = {id(x): _faked(x, mode, device) for x in tensors_of(found)}
    return cast(Arguments, map_tensors(lambda x: fakes[id(x)], found))


def _adopted(model: nn.Module, config: Config, device: torch.device) -> Adoption:
    """The model's parameters, sharded over the simulated ranks."""
    adopt.refuse_wrapped([model])

    def everything() -> list[Any]:
        # The model's modules, and what was made since the collector went off: a process has millions of others, and
        # looking through them took a third of a dry run.
        return [*gc.get_objects(generation=0), *model.modules()]

    adoption = Adoption(config, functools.partial(Ranks.connect, config), everything=everything)
    adoption.shard([model], device)
    return adoption


def _traced(
    model: nn.Module,
    adoption: Adoption,
    compilation: Compilation,
    call: Callable[[Callable[..., Any]], None],
    uncompiled: Callable[[], None],
) -> tuple[Frame, Joint]:
    """The frame that Dynamo makes of a call of ``model``, and its joint graph.

    Args:
        call: calls what it is given on the inputs.
        uncompiled: makes the same call of the model as it was.
    """
    found: list[tuple[Frame, Joint | None]] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with errors_reach_users():
            adoption.covers(gm, None)
            frame = Frame(compilation, 0, traced_function())
            found.append((frame, trace(frame, gm, inputs)))
        raise Ended  # else Dynamo would write guards, of a call whose values nobody looks at

    torch.compiler.reset()
    try:
        call(torch.compile(model, backend=compiler, fullgraph=True))
    except Ended:
        pass
    except (ZeroGraphError, BackendFailed):
        raise
    except Exception as error:
        explained = explain_failure(error, uncompiled)
        if explained is None:
            raise
        raise explained from explained.__cause__
    if not found:
        raise UnsupportedError("the model computes nothing that could be compiled", "give one with a forward")
    frame, joint = found[0]
    if joint is None:
        raise UnsupportedError(
            "the model has no backward: none of its outputs depends on a trainable parameter",
            "return the loss or the logits from forward",
        )
    return frame, joint


def _fake(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> dict[int, nn.Parameter]:
    """Put fake parameters and buffers in the places of those on the meta device; returns the parameters by old id."""
    new: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = new.setdefault(id(old), _faked(old, mode, device))  # type: ignore[assignment]
    return {key: value for key, value in new.items() if isinstance(value, nn.Parameter)}


def _faked(old: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A tensor like ``old`` that is fake, and on ``device``."""
    local = old.to_local() if isinstance(old, DTensor) else old
    with mode, torch.no_grad():
        shape, stride = map(traced_size, local.shape), map(traced_size, local.stride())
        new = torch.empty_strided([*shape], [*stride], dtype=local.dtype, device=device)
        if isinstance(old, DTensor):
            new = as_dtensor(new, old.device_mesh, old.placements, old.shape, old.stride())
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def on_meta(make: Callable[[], Any]) -> tuple[nn.Module, Any]:
    """The result of ``make``, called under ``torch.device("meta")``: a model, and its inputs or None.

    Raises:
        UnsupportedError: it returned something else.
    """
    with torch.device("meta"):
        found = make()
    match found:
        case nn.Module():
            return found, None
        case (nn.Module() as model, inputs):
            return model, inputs
    kind = (
        f"tuple of {', '.join(type(x).__name__ for x in found)}" if isinstance(found, tuple) else type(found).__name__
    )
    if isinstance(found, type):
        kind = f"the class {found.__name__}, not an instance of it"
    raise UnsupportedError(f"the model's function returned {kind}", "return an nn.Module, or (module, inputs)")


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    """A default process group of ``world_size`` ranks in this one process, whose collectives do nothing."""
    simulate_group(rank, world_size)
    try:
        yield
    finally:
        torch.compiler.reset()
        dist.destroy_process_group()
