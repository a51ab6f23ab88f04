"""The private names of torch that integrations need, where no public name exists."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from torch.distributed.pipelining import PipelineStage, _utils

_all_gather = getattr(_functional_collectives, "all_gather_single", None) or _functional_collectives.all_gather_tensor


def all_to_all(x: Tensor, group: dist.ProcessGroup, *, scattered: int, gathered: int) -> Tensor:
    """``x`` split along dimension ``scattered`` over the ranks of ``group``, whose parts are joined along ``gathered``.

    An operator of graphs, with a backward. Public collectives write into a tensor, and those of
    ``torch.distributed.nn`` are functions that Dynamo cannot trace. Seen in 2.13.
    """
    ranks = group.size()
    sent = torch.stack(x.chunk(ranks, dim=scattered))
    each = [sent.shape[1]] * ranks
    received = all_to_all_single_autograd(sent.flatten(0, 1), each, each, group)
    return torch.cat(received.view(sent.shape).unbind(0), dim=gathered)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of all ranks of ``group``, joined along dimension 1. An operator of graphs, without a backward."""
    return _all_gather(x.contiguous(), 1, group)


def assert_on_all_ranks(holds: Tensor, group: dist.ProcessGroup, message: str) -> None:
    """Raise a ``RuntimeError`` on every rank of ``group`` if ``holds`` is false on one: alone that one would let the
    others wait for it. A part of graphs, where no public name asserts what a tensor says. Seen in 2.13."""
    failed = all_reduce(holds.logical_not().int(), "max", group)
    torch._assert_async(failed == 0, message)


def send_through(stage: Any, group: Any) -> None:
    """Let a ``stage`` of a pipeline send and receive by ``group``, which has ``send`` and ``recv`` of a process group,
    and is in none of torch's tables: activations, gradients, and what stages tell each other of shapes in their first
    step. torch asks stages for operations, and nothing public says over which group. Seen in 2.13."""
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        setattr(stage, name, functools.partial(_through, group, getattr(stage, name)))
    if hasattr(stage, "_send_meta"):  # not of a stage that torch has split from a model, which knows its shapes
        # Schedules assign other ranks to stages than these had.
        stage._send_meta = lambda meta, to: _send_object(group, meta, stage.stage_index_to_group_rank[to])
        stage._recv_meta = lambda whose: _receive_object(group, stage.stage_index_to_group_rank[whose])


def vote_by(schedule: Any, total: Callable[[list[int]], list[int]]) -> None:
    """Let the stages of a ``schedule`` agree by ``total``, of numbers over all ranks of the pipeline, on whether they
    tell each other shapes. torch does it in the group of the stages, where nobody hears of an error, before the first
    step and wherever steps follow evaluations or these follow steps. Seen in 2.13; a torch without this name is left as
    it is."""
    if hasattr(schedule, "_warmup_p2p"):
        schedule._warmup_p2p = functools.partial(_vote, total)


def _vote(total: Callable[[list[int]], list[int]], stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    voting = [stage for stage in stages if isinstance(stage, PipelineStage)]  # others know all shapes
    mode = _utils.InferenceMode
    (dynamic,) = total([any(mode.needs_dynamic(stage._user_meta, has_backward) for stage in voting)])
    for stage in voting:
        stage._inference_mode = mode.DYNAMIC if dynamic else mode.STATIC


def _through(group: Any, operations: Callable[[int], list[dist.P2POp]], microbatch: int) -> list[dist.P2POp]:
    found = operations(microbatch)
    for each in found:
        each.group = group
    return found


def _send_object(group: Any, value: Any, rank: int) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)  # on the CPU
    for message in (torch.tensor([data.numel()], device="cpu"), data):
        group.send([message], rank, 0).wait()


def _receive_object(group: Any, rank: int) -> Any:
    size = torch.empty(1, dtype=torch.int64, device="cpu")
    group.recv([size], rank, 0).wait()
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    group.recv([data], rank, 0).wait()
    return pickle.loads(data.numpy().tobytes())


def forget_step(schedule: Any) -> None:
    """Let a ``schedule`` of a pipeline forget a step that raised: losses, which the next one would take for its own,
    receives, and what stages have told each other in the first step, which some may not have heard. Seen in 2.13."""
    schedule._internal_losses.clear()
    for name in ("fwd_recv_ops", "bwd_recv_ops"):
        getattr(schedule, name, {}).clear()
    for name in [n for n in vars(schedule) if n.startswith("_stage") and n.endswith("ward_initialized")]:
        setattr(schedule, name, False)
