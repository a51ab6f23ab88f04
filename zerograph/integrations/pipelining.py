"""``torch.distributed.pipelining``: compiled stages of a pipeline gather and reduce once per step."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from zerograph.api import Backend, refuse_other_backends
from zerograph.core.arguments import require
from zerograph.core.errors import UnsupportedError
from zerograph.optim.overlap import overlapping


def once_per_step(schedule: PipelineScheduleSingle | PipelineScheduleMulti, backend: Backend) -> None:
    """Let a step of ``schedule`` reduce each gradient once, and gather each parameter once where its bucket stays
    gathered, as at stages 1 and 2.

    Gradients of all microbatches but the last stay on their rank, whole. Without this each microbatch's backward
    reduces, and its forward gathers, which takes less memory and sends more.

    A step raises the error of a stage by its own class, with the text of torch's RuntimeError around it as a note.

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
    for stage in stages:
        stage.backward_maybe_with_nosync = _reducing_last(stage, backend)
    schedule.step = _one_schedule(schedule, stages, backend)  # type: ignore[method-assign]


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


def _one_schedule(schedule: Any, stages: Sequence[PipelineStage], backend: Backend) -> Callable[..., Any]:
    step = schedule.step

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        if schedule._has_backward:
            _refuse_beside(schedule, stages, backend)
        with backend._accumulation.one_schedule():
            try:
                return step(*args, **kwargs)
            except BaseException as error:
                schedule._internal_losses.clear()  # else the next step takes them for its own
                own = _unwrapped(error)
                if own is error:
                    raise
            try:
                raise own  # not inside of the handler: the two errors would each be the reason of the other
            finally:
                del own  # whose traceback has this frame

    return run


def _unwrapped(error: BaseException) -> BaseException:
    """The error that a stage raised, where ``error`` is torch's RuntimeError around it, whose text becomes a note."""
    own, place = error.__cause__, None
    for place, _ in traceback.walk_tb(error.__traceback__):  # noqa: B007
        pass
    by_torch = place is not None and place.f_globals["__name__"].startswith("torch.distributed.pipelining.")
    if own is None or not by_torch:
        return error
    own.add_note(inspect.cleandoc(str(error)))
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
