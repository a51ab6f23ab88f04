"""The step that all native optimizers share: gather, decide, update.

A step gathers the gradients' addresses, decides by which factor they are multiplied and whether to skip them, and
hands everything that lies on the host to one call of the native core, which reads gradients, parameters and states
once and writes what changed. Tensors on a device go to torch's kernels meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

import zerograph._core as _core
from zerograph.core.arguments import number
from zerograph.core.errors import UnsupportedError
from zerograph.optim.algorithm import Algorithm, OnDevice, RanksOf
from zerograph.optim.clip import (
    groups_in,
    groups_of,
    our_group,
    over_our_ranks,
    over_ranks,
    over_stages,
    power_sum,
    require_stages,
)
from zerograph.optim.delayed import DelayedSteps, ForwardSteps
from zerograph.optim.factor import CLIP_HINT, Asked, Factor
from zerograph.optim.joint import JointUpdate
from zerograph.optim.options import Options
from zerograph.optim.overlap import EarlySteps
from zerograph.optim.parts import GroupParts, Part, UpdateRow
from zerograph.optim.states import States, restore_precision
from zerograph.optim.stream import Stored, Stream
from zerograph.optim.tensors import TAGS, Gradients, GroupLayout, sum_of
from zerograph.optim.through_device import ThroughDevice
from zerograph.optim.torch_private import hooked_step, register_failed_step_hook, tell_failed_step
from zerograph.optim.update import PendingUpdate, update_arrived
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.dtensors import Groups
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.early import Arrival
from zerograph.runtime.executor.residency import Pipeline, StepCount, moving_groups
from zerograph.runtime.offload.fetches import FetchedRun
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import local_tensor

log = logging.getLogger(__name__)


class HostOptimizer(Optimizer):
    """Base of the native optimizers, mixed into torch's own ones, whose groups and state dicts they have.

    Attributes:
        early: updates inside of backwards; None without ``overlap=True``.
        late: updates that end after their step: inside of the next forward with ``overlap="forward"``, or seen by
            programs a step later with ``delayed``; else None.
        algorithm: what distinguishes it from the others.
        communicator, store, steps: of the backend whose sharded parameters these are, which sets them before each step.
        accumulation: likewise, of gradients that the backend holds back.
        pipelines: likewise, ranks that have other stages, by their group.
        takes_local_gradients: whether it averages something else than gradients, from some step on.
    """

    communicator: Callable[[], Communicator | None] = staticmethod(lambda: None)
    store: ShardStore | None = None
    steps: StepCount | None = None
    accumulation: GradientAccumulation | None = None
    pipelines: Mapping[ProcessGroup, Pipeline] | None = None
    takes_local_gradients: ClassVar[bool] = False
    late: DelayedSteps | ForwardSteps | None = None

    _stages: ProcessGroup | None = None
    _skipped_there: Tensor | None  # on a device, and not read yet
    _grad_norm: float | Tensor

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf on the optimizer

    algorithm: ClassVar[Algorithm]

    def __init__(self, params: Any, options: Options, *torchs: Any, **named: Any) -> None:
        """``torchs`` and ``named`` are the arguments of the optimizer of torch.optim.

        Raises:
            UnsupportedError: ``differentiable=True``.
        """
        self.master, self.moments, self.delayed = options.master, options.moments, options.delayed
        self.skip_nonfinite, self.overlap = options.skip_nonfinite, options.overlap
        self._skipped, self._skipped_there, self._grad_norm = 0, None, math.nan
        super().__init__(params, *torchs, **named)
        if options.delayed:
            self.defaults["warmup"] = options.warmup
            for group in self.param_groups:
                group["warmup"] = options.warmup
        self._begin_anew()
        self._refuse_differentiable()

    def _begin_anew(self) -> None:
        """Know nothing of parameters, states and updates."""
        _forget_scales_of_failed_steps()
        self._layouts: dict[tuple[int, ...], GroupLayout] = {}
        self._streams: dict[tuple[int, ...], Stream] = {}  # by ``id`` of their parts
        self._states = States(self, self.algorithm_of, self.master, self.moments, self._streams.clear)
        self._running: PendingUpdate | None = None
        self.early = EarlySteps(self) if self.overlap is True else None
        self.late = DelayedSteps(self) if self.delayed else ForwardSteps(self) if self.overlap == "forward" else None

    @classmethod
    def algorithm_of(cls, group: Mapping[str, Any]) -> Algorithm:
        """The algorithm that updates ``group``."""
        return cls.algorithm

    @property
    def skipped(self) -> int:
        """How many steps were skipped because a gradient was not finite. A device that decides is asked when you do."""
        there, self._skipped_there = self._skipped_there, None
        self._skipped += int(there) if there is not None else 0
        return self._skipped

    @skipped.setter
    def skipped(self, steps: int) -> None:
        self._skipped, self._skipped_there = steps, None

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients, unscaled and before clipping, in the last step that took it (one with ``clip`` or with
        ``skip_nonfinite``); the same on every rank, in a pipeline of one stage, unless ``stages`` is set. A device that
        took it is asked when you do."""
        self._grad_norm = float(self._grad_norm)
        return self._grad_norm

    @property
    def stages(self) -> ProcessGroup | None:
        """The ranks that have the other stages of a pipeline, as ``mesh["pp"].get_group()``; None unless you set it.
        Then ``clip``, ``skip_nonfinite`` and ``grad_norm`` are of the gradients of all stages. All of these need as
        many native optimizers, with the same arguments, stepped in one order. Copies have None.

        Raises:
            ConfigError: it is set to something else; or, in a step, to a group with several ranks that one stage's
                gradients are split over. Whole ones on each, as at stage 0, count several times.
        """
        return self._stages

    @stages.setter
    def stages(self, group: ProcessGroup | None) -> None:
        require_stages(group)
        self._stages = group

    # The step.

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float | Tensor | None = None,
        clip: float | None = None,
    ) -> Any:
        """Update the parameters that have gradients; all ranks call it together.

        With ``overlap="forward"`` it returns once the update has begun, and the next forward waits for it. With
        ``delayed`` programs see it after the next step.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scale: what the loss was multiplied by; gradients are divided by it as they are read.
            clip: the largest norm of all gradients together, after that division.

        Returns:
            The result of ``closure``.

        Raises:
            UnsupportedError: a parameter or gradient that cannot be updated; nothing has changed then.
            ConfigError: ``clip`` is not positive, or ``grad_scale`` is zero; with ``delayed``, nothing can be updated
                beside programs.
        """
        self.settle()
        loss = None
        if closure is not None:
            if self.early is not None:
                self.early.refuse("a closure")
            if self.late is not None and self.delayed:
                self.late.refuse("a closure", "call backward() yourself, then step()")
            with torch.enable_grad():
                loss = closure()
        if self.late is not None and moving_groups(self.param_groups):
            self.late.step(grad_scale, clip)
        else:
            self.start(grad_scale, clip).wait()
        return loss

    @hooked_step
    @torch.no_grad()
    def start_step(self, *, grad_scale: float | Tensor | None = None, clip: float | None = None) -> PendingUpdate:
        """As :meth:`step`, without waiting for the kernels on the host.

        Until ``wait()`` of what it returns, nothing may read the parameters or change the gradients. The optimizer
        itself waits before it does anything else.
        """
        if self.late is not None:
            self.late.refuse("start_step()", "call step(), which does not wait for its update either")
        self._wait_for_update()
        self._opt_called = True  # learning rate schedulers ask for it, and see only calls of step()
        self._running = self.start(grad_scale, clip)
        self._running.failed = functools.partial(tell_failed_step, self)
        return self._running

    def settle(self) -> None:
        """Return when every update that has begun has ended, and the model computes with its values.

        With ``overlap="forward"`` or ``delayed`` call it before you read or change parameters; state dicts, evaluations
        and ``zerograph.gathered`` do it by themselves. All ranks call it alike.

        Raises:
            Exception: what an update failed with.
        """
        self._wait_for_update()
        if self.late is not None:
            self.late.settle()

    def _wait_for_update(self) -> None:
        if self._running is not None:
            self._running.wait()
            self._running = None
        if self.early is not None:
            self.early.settle()

    def start(self, grad_scale: float | Tensor | None, clip: float | None) -> PendingUpdate:
        """Begin an ordinary step."""
        if self.store is not None:
            self.store.refuse_half_done()
        given = {"clip": clip, "grad_scale": grad_scale, "GradScaler": self.__dict__.get("found_inf")}
        done = self.early.end([what for what, value in given.items() if value is not None]) if self.early else set()
        rows = [row for i in range(len(self.param_groups)) for row in self._rows(i, done)]
        factor = self.factor(rows, grad_scale, clip)
        if factor is None:
            self.skipped += 1
            return PendingUpdate(None, ())
        pending = self.update(rows, factor)
        if self.early is not None:
            self.early.stepped()
        return pending

    def _rows(self, index: int, done: Container[int]) -> list[UpdateRow]:
        """The rows of a group that a step updates: all that backwards have not ``done``, by ``id``."""
        group = self.param_groups[index]
        params = [p for p in group["params"] if id(p) not in done] if done else group["params"]
        layout = self.layout((index,), group, params)
        grads = layout.gradients()
        return [UpdateRow((index,), group, layout, grads)] if not done or any(grads.addresses) else []

    def layout(self, key: tuple[int, ...], group: Mapping[str, Any], params: Sequence[Tensor]) -> GroupLayout:
        """The layout of some ``params`` of a group, kept under ``key``."""
        layout = self._layouts.get(key)
        if layout is None or not layout.describes(params):
            layout = self._layouts[key] = GroupLayout(group, params)
        return layout

    def factor(
        self,
        rows: Sequence[UpdateRow],
        grad_scale: float | Tensor | None,
        clip: float | None,
    ) -> Factor | None:
        """The factor of the gradients; None to skip the step."""
        scales = [s for s in (self.__dict__.get("grad_scale"), grad_scale) if s is not None]
        clip = None if clip is None else number("clip", clip, CLIP_HINT)
        found_inf = self.__dict__.get("found_inf")  # by GradScaler, whose sum over no gradients is the number 0
        found_inf = None if found_inf is None else torch.as_tensor(found_inf)
        asked = Asked(scales, clip, self.skip_nonfinite, found_inf)
        if self._decides_there(rows, asked):
            return self._factor_there(rows, asked)
        skips = asked.found_inf is not None and bool(float(asked.found_inf))
        if skips and self.stages is None:
            return None
        scale = float(asked.scale())
        if not asked.takes_norm:
            return None if skips else Factor(1.0 / scale)
        split, replicated = self._sums_of_squares(rows, asked)
        self._grad_norm = norm = math.sqrt(float(split) + float(replicated)) / scale
        return None if skips else asked.decided(norm, scale)  # not before: other stages wait for the norm of this

    def _decides_there(self, rows: Sequence[UpdateRow], asked: Asked) -> bool:
        """Whether a device has all that is updated, and can skip the update: it is then not waited for. First steps,
        which make states, are decided on the host."""
        devices = set[torch.device]().union(*(row.layout.devices for row in rows))
        known = [self._states.known.get(row.key) for row in rows]
        return (
            len(devices) == 1
            and all(row.layout.is_elsewhere for row in rows)
            and all(p is not None and p.is_complete(r.layout, r.grads) for p, r in zip(known, rows, strict=True))
            and (not asked.may_skip or all(self.algorithm_of(row.group).skips_on_device for row in rows))
            and (asked.found_inf is None or asked.found_inf.device in devices)
        )

    def _factor_there(self, rows: Sequence[UpdateRow], asked: Asked) -> Factor:
        scale, norm = asked.scale(there=True), None
        if asked.takes_norm:
            split, replicated = self._sums_of_squares(rows, asked)
            self._grad_norm = norm = (split + replicated).sqrt() / scale
        factor = asked.decided_there(norm, scale)
        if factor.nonfinite is not None:
            before = self._skipped_there
            self._skipped_there = factor.nonfinite if before is None else before + factor.nonfinite
        return factor

    def _sums_of_squares(self, rows: Sequence[UpdateRow], asked: Asked) -> tuple[Tensor, Tensor]:
        """The sums of squares of all ranks' split gradients, and of their replicated ones, in one pass over this rank's
        and one scalar reduction along each axis; with other stages, all in the first."""
        split: dict[Groups, Tensor] = {}
        for row in rows:
            split = {**row.layout.split, **split}
        groups_of(list(split.values()))  # refuses several meshes
        # To the device over which its group communicates; a number of the host's is none to wait for.
        squares = {over: _on(local_tensor(like).device, self._squares(rows, over)) for over, like in split.items()}
        groups = groups_in(squares)
        ours = our_group(groups, split.values())
        squares = over_ranks(squares, 2.0, [group for group in groups if group is not ours])
        replicated = self._squares(rows, ())
        rest = [value for over, value in squares.items() if ours not in over]
        own = [value for over, value in squares.items() if ours in over]
        total = sum(own[1:], own[0]) if own else torch.zeros((), dtype=torch.float64, device="cpu")
        if own:
            total = over_our_ranks(total, self.communicator(), ours, f"update by {type(self).__name__}")
        replicated = sum(rest, replicated.to(rest[0].device) if rest else replicated)
        if self.stages is None or self._makes_states(asked, total + replicated):
            return total, replicated
        pipeline = self.pipelines.get(self.stages) if self.pipelines is not None else None
        both = over_stages(total + replicated, self.stages, groups, pipeline=pipeline)
        return both, both.new_zeros(())

    def _makes_states(self, asked: Asked, squares: Tensor) -> bool:
        """Whether this is DCP's first step, of zeros, perhaps on the ranks of one stage alone: not the first one of a
        warm-up, whose norm other stages wait for."""
        return not (self.state or asked.scales or asked.clip or moving_groups(self.param_groups) or float(squares))

    def _squares(self, rows: Sequence[UpdateRow], over: Groups) -> Tensor:
        """Sum of squares of this rank's gradients, of those that are split ``over`` these ranks."""
        pieces = [piece for row in rows for piece in row.layout.pieces(row.grads, over)]
        known: list[float] = []
        if self.store is not None and self.store.gradients.on_nvme.is_used:
            there = {piece: self.store.gradients.on_nvme.squares(piece[0]) for piece in pieces}
            known = list(itertools.chain.from_iterable(s for s in there.values() if s is not None))
            pieces = [piece for piece in pieces if there[piece] is None]
        total = torch.tensor(sum_of([*known, *_core.squares(pieces)]), dtype=torch.float64, device="cpu")
        elsewhere = [grad for row in rows for grad in row.layout.elsewhere(row.grads, over)]
        return power_sum(elsewhere, 2.0).double() + total if elsewhere else total

    def prepare(self, rows: Sequence[UpdateRow]) -> list[GroupParts]:
        """The parts of ``rows``, with states where some were missing; nothing is updated where it raises."""
        return self._states.parts(rows, self.store)

    def update(
        self,
        rows: Sequence[UpdateRow],
        factor: Factor,
        arrival: Arrival | None = None,
        kept: Sequence[FetchedRun] = (),
    ) -> PendingUpdate:
        """Begin to update; where there is an ``arrival``, gradients are read after it, by what waits. Of parameters on
        NVMe those ``kept`` are in memory, too."""
        plans = self.prepare(rows)
        joint = JointUpdate(self._joint_parts(plans, rows, factor), self._ranks(), self.store)
        calls, touched, stored, sources, passing = [], [], [], [], []
        for plan, row in zip(plans, rows, strict=True):
            algorithm = self.algorithm_of(row.group)
            for part in plan.parts if algorithm.joint is None else ():
                own = row.grads.of(part.indices)
                part.follow_copies()
                touched.append((part, own))
                if part.stored:
                    stored.append(Stored(part, plan.slots))
                    sources.append((algorithm.rule(row.group), own))
                elif part.through_device:
                    passing.append((part, row.group, algorithm.rule(row.group), own))
                elif part.tensors is None:
                    self._on_device(row.group, part, own, factor)
                else:
                    tag = TAGS[part.grad_dtype]
                    calls.append((algorithm.rule(row.group), part.tensors, own.addresses, tag, part.fresh))
        joint.run(self.leave_half_done)  # before a stream reads what lies beside it on NVMe
        if calls or stored:
            _tell_target()
        streams = []
        if stored and self.store is not None:
            streams.append(self._streamed(self.store, stored, sources, factor.number, kept))
        if passing and self.store is not None:
            streams.append(ThroughDevice(self, self.store, passing, factor, self._on_device).run)
        if arrival is not None:
            streams = [functools.partial(update_arrived, arrival, calls, factor.number, streams)]
            return PendingUpdate(None, touched, streams, self._tell_updated)
        ticket = _core.update(calls, factor.number) if calls else None
        return PendingUpdate(ticket, touched, streams, self._tell_updated)

    def _joint_parts(
        self, plans: Sequence[GroupParts], rows: Sequence[UpdateRow], factor: Factor
    ) -> Iterator[tuple[Algorithm, OnDevice, Gradients]]:
        for plan, row in zip(plans, rows, strict=True):
            algorithm = self.algorithm_of(row.group)
            for part in plan.parts if algorithm.joint is not None else ():
                own = row.grads.of(part.indices)
                pairs = [(m, g) for m, g in zip(part.members, own.tensors, strict=True) if g is not None]
                params = [row.layout.params[m.index] for m, _ in pairs]
                given = OnDevice(row.group, part, [m for m, _ in pairs], [g for _, g in pairs], factor, params)
                yield algorithm, given, own

    def _ranks(self) -> RanksOf:
        host = self.store.locations.host if self.store is not None else None
        device = host.memory.device if host is not None else None
        return RanksOf(self.communicator(), f"update by {type(self).__name__}", device)

    def leave_half_done(self, why: str) -> None:
        """An update ended half done: nothing goes on before a checkpoint is loaded."""
        if self.store is not None:
            self.store.half_done[self] = why

    def _tell_updated(self, params: Sequence[Tensor]) -> None:
        if self.store is not None:
            self.store.copies.updated(params)
            self.store.slots.updated(params)

    def _streamed(
        self,
        store: ShardStore,
        stored: list[Stored],
        sources: list[tuple[_core.Rule, Gradients]],
        factor: float,
        kept: Sequence[FetchedRun],
    ) -> Callable[[], None]:
        """The function that updates parts whose states are on NVMe."""
        key = tuple(id(s.part) for s in stored)
        if key not in self._streams:
            self._streams[key] = Stream(self, store, stored)
        stream = self._streams[key]
        stream.asked()
        return functools.partial(stream.run, [r for r, _ in sources], [own for _, own in sources], factor, [*kept])

    def _on_device(self, group: Mapping[str, Any], part: Part, grads: Gradients, factor: Factor) -> None:
        pairs = [(m, g) for m, g in zip(part.members, grads.tensors, strict=True) if g is not None]
        if not pairs:
            return
        members, first = [m for m, _ in pairs], pairs[0][0]
        algorithm = self.algorithm_of(group)
        kernel = algorithm.kernel_for(first.local, first.target.dtype)
        if kernel is not None:
            kernel(OnDevice(group, part, members, [g for _, g in pairs], factor))
            return
        assert algorithm.on_device is not None  # it is not joint
        algorithm.on_device(OnDevice(group, part, members, [g.to(m.target.dtype) for m, g in pairs], factor))
        if part.mastered:
            torch._foreach_copy_([m.local for m in members], [m.target for m in members])

    # Checkpoints and copies.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, after an update that is under way."""
        self._wait_for_update()
        if isinstance(self.late, ForwardSteps) and not set_to_none:
            self.late.settle()  # it reads the gradients
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, after an update that is under way."""
        if self.late is not None:
            self.late.settle()
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after an update that is under way."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict, one of the same algorithm of torch.optim too.

        torch would round all state to the parameter's dtype; what a checkpoint keeps in float32 stays so.
        """

        def seen(_: Optimizer, final: dict[str, Any]) -> None:
            self.__dict__["_loading"] = final

        self.settle()
        handle = self.register_load_state_dict_pre_hook(seen)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        pickled = ("master", "moments", "skip_nonfinite", "overlap", "delayed")
        read = {"_skipped": self.skipped, "_skipped_there": None, "_grad_norm": self.grad_norm}
        return super().__getstate__() | {name: getattr(self, name) for name in pickled} | read

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_anew()
        self._refuse_differentiable()
        # torch calls this at the end of load_state_dict, when it has rounded the states, and for copies and pickles.
        loading = self.__dict__.get("_loading")
        if loading is not None:
            restore_precision(self, loading)

    def _refuse_differentiable(self) -> None:
        if any(group.get("differentiable") for group in self.param_groups):
            raise UnsupportedError(
                f"{type(self).__name__}(differentiable=True): autograd cannot look into native kernels",
                "use the optimizer of torch.optim to differentiate through its steps",
            )


def _on(device: torch.device, value: Tensor) -> Tensor:
    if value.device == device:
        return value
    return torch.full_like(value, float(value), device=device) if value.is_cpu else value.to(device)


@functools.cache
def _forget_scales_of_failed_steps() -> None:
    """Drop what ``GradScaler`` sets for a step that fails or is refused: it would multiply its next scale by that."""

    def forget(optimizer: Optimizer, _: BaseException) -> None:
        for name in ("grad_scale", "found_inf") if isinstance(optimizer, HostOptimizer) else ():
            optimizer.__dict__.pop(name, None)

    register_failed_step_hook(forget)


@functools.cache
def _tell_target() -> None:
    log.info("optimizer kernels for %s on %d threads", _core.simd_target(), _core.pool_threads())
