"""``torch.distributed.pipelining``: compiled stages of a pipeline gather and reduce once per step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from zerograph.api import Backend, refuse_other_backends
from zerograph.core.arguments import require
from zerograph.core.errors import RankError, UnsupportedError
from zerograph.integrations.neighbours import Neighbours
from zerograph.integrations.torch_private import forget_step, send_through, vote_by
from zerograph.optim.overlap import overlapping
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.entry import Entry, reason_of
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.torch_private import backend_name


def once_per_step(schedule: PipelineScheduleSingle | PipelineScheduleMulti, backend: Backend) -> None:
    """Let a step of ``schedule`` reduce each gradient once, and gather each parameter once where its bucket stays
    gathered, as at stages 1 and 2.

    Gradients of all microbatches but the last stay on their rank, whole. Without this each microbatch's backward
    reduces, and its forward gathers, which takes less memory and sends more.

    A step raises the error of a stage by its own class, with the text of torch's RuntimeError around it as a note. Over
    gloo it raises on all ranks of all stages. There this function is a collective of the group of the stages: all their
    ranks call it, in one order where there are several schedules.

    Args:
        schedule: whose stages are compiled, before its first step.
        backend: that all stages of this rank are compiled by.

    Raises:
        ConfigError: ``schedule`` is none of torch's, or ``backend`` none of ours. Its steps raise it inside of
            ``no_sync``, and where an optimizer updates inside of backwards, before the schedule divides gradients.
        UnsupportedError: the schedule divides backwards into one for inputs and one for weights (zero bubble). Each
            would run the whole compiled backward.
    """
    refuse_other_backends(backend, "once_per_step")
    require(
        isinstance(schedule, PipelineScheduleSingle | PipelineScheduleMulti),
        f"once_per_step needs a schedule of torch.distributed.pipelining, got {type(schedule).__name__}",
        "once_per_step(Schedule1F1B(stage, n_microbatches, loss_fn=loss_fn), backend)",
    )
    _refuse_divided_backwards(schedule)
    stages: list[Any] = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
    neighbours = _connected(stages, backend)
    if neighbours is not None:
        vote_by(schedule, neighbours.total)
    for stage in stages:
        stage.backward_maybe_with_nosync = _reducing_last(stage, backend)
    schedule.step = _one_schedule(schedule, stages, backend, neighbours)  # type: ignore[method-assign]


def _reducing_last(stage: PipelineStage, backend: Backend) -> Callable[..., Any]:
    backward = stage.backward_maybe_with_nosync

    def run(kind: str, arguments: dict[str, Any], last_backward: bool = False) -> Any:
        if not last_backward:
            with backend.no_sync():
                return backward(kind, arguments, last_backward)
        result = backward(kind, arguments, last_backward)
        own = set(map(id, stage.submod.parameters()))
        backend._accumulation.reduce_held(lambda param: id(param) in own)  # that the last microbatch did not read
        return result

    return run


def _connected(stages: Sequence[Any], backend: Backend) -> Neighbours | None:
    """The neighbours that ``stages`` of this rank send to and receive from from now on, where they do so over gloo."""
    first = stages[0]
    group: Any = first.group or dist.group.WORLD
    if group.size() == 1 or backend_name(group, torch.device(first.device)) != "gloo":
        return None
    known = backend._steps.pipelines
    neighbours = known.get(group)
    if not isinstance(neighbours, Neighbours):  # else another schedule has connected it
        neighbours = known[group] = Neighbours(group, torch.device(first.device))
    backend._steps.parts.update(stage.submod for stage in stages)
    for stage in stages:
        if getattr(stage, _SENDS_THROUGH, None) is not neighbours:
            send_through(stage, neighbours)
            setattr(stage, _SENDS_THROUGH, neighbours)
    return neighbours


_SENDS_THROUGH = "_zg_neighbours"


def _one_schedule(
    schedule: Any, stages: Sequence[PipelineStage], backend: Backend, neighbours: Neighbours | None
) -> Callable[..., Any]:
    step = schedule.step

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        with backend._accumulation.one_schedule():
            try:
                with _together(stages, backend, neighbours):
                    if schedule._has_backward:
                        _refuse_beside(schedule, stages, backend)
                    return step(*args, **kwargs)
            except BaseException as error:
                forget_step(schedule)
                own = _unwrapped(error)
                if own is error:
                    raise
            try:
                raise own  # not inside of the handler: the two errors would each be the reason of the other
            finally:
                del own  # whose traceback has this frame

    return run


@contextlib.contextmanager
def _together(stages: Sequence[PipelineStage], backend: Backend, neighbours: Neighbours | None) -> Iterator[None]:
    """Inside, an error of one rank is one of all ranks: along the pipeline, and of those that have the same stages."""
    if neighbours is None:
        yield
        return
    try:
        comm = backend._adoption.communicator
        _refuse_failed(comm.rendezvous if comm is not None else None, neighbours)
        neighbours.begin()
        yield
        comm, steps = backend._adoption.communicator, backend._steps.own
        if comm is not None:  # of its stage, who run no program any more where one fails behind the last
            with together(comm, Entry("end of a schedule", 0, steps)):
                pass
        trains = any(param.requires_grad for stage in stages for param in stage.submod.parameters())
        neighbours.end(steps, trains, comm.generation if comm is not None else 0)
    except BaseException as error:
        reason, comm = reason_of(_unwrapped(error)), backend._adoption.communicator
        try:
            neighbours.fail(reason)
        finally:
            if comm is not None:
                comm.abort(reason)
        _abandon_updates(stages)
        raise


def _abandon_updates(stages: Sequence[PipelineStage]) -> None:
    """What last backwards have updated (``overlap=True``) cannot be taken back, where other stages have not come to
    theirs: nothing goes on before a checkpoint is loaded."""
    own = {id(param) for stage in stages for param in stage.submod.parameters()}
    for early in overlapping():
        if not own.isdisjoint(early.updated):
            early.abandon("a step of the pipeline failed after a backward in it had updated parameters")


def _refuse_failed(stage: Rendezvous | None, pipeline: Neighbours) -> None:
    """Raises:
    RankError: this rank, or its ``stage``, knows of an error that those along the ``pipeline`` may not. All drop this
        batch, so that first and last stage have the same one in the next step.
    """
    if pipeline.stopped or (stage is not None and stage.failed and not pipeline.rendezvous.failed):
        pipeline.takes_steps = True  # its first one may be what failed
        raise RankError(
            "this rank, or one that it waited for, failed outside of the schedule, as in the step of an optimizer, of "
            "which other stages may hear only now: no rank takes this step",
            "see the error before this one",
        )


def _unwrapped(error: BaseException) -> BaseException:
    """The error that a stage raised, where ``error`` is torch's RuntimeError around it, whose text becomes a note."""
    own, place = error.__cause__, None
    for place, _ in traceback.walk_tb(error.__traceback__):  # noqa: B007
        pass
    by_torch = place is not None and place.f_globals["__name__"].startswith("torch.distributed.pipelining.")
    if own is None or not by_torch:
        return error
    note = inspect.cleandoc(str(error))
    if note not in getattr(own, "__notes__", ()):
        own.add_note(note)
    return own


def _refuse_beside(schedule: Any, stages: Sequence[PipelineStage], backend: Backend) -> None:
    require(
        not backend._accumulation.active,
        "a schedule inside of backend.no_sync(), or behind the freeze_step of OneBitAdam: its last backwards reduce, "
        "as once_per_step says",
        "more microbatches in one schedule; or several schedules with scale_grads=False, without no_sync()",
    )
    # By identity: the backend may not know its parameters yet.
    own = {id(p) for stage in stages for p in stage.submod.parameters()}
    for early in overlapping() if schedule.scale_grads else ():
        require(
            own.isdisjoint(map(id, early.params)),
            f"{early}(overlap=True) updates inside of the backward, before the schedule divides gradients by the "
            "number of microbatches",
            "scale_grads=False for the schedule, and divide the loss; or leave overlap out",
        )


def _refuse_divided_backwards(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> None:
    actions = [each for rank in (schedule.pipeline_order or {}).values() for each in rank if each is not None]
    if any(each.computation_type.name == "BACKWARD_INPUT" for each in actions):
        raise UnsupportedError(
            f"{type(schedule).__name__} divides each backward in two, and a compiled stage runs all of it both times",
            "a schedule with whole backwards: ScheduleInterleaved1F1B, ScheduleLoopedBFS, Schedule1F1B, ScheduleGPipe",
        )
