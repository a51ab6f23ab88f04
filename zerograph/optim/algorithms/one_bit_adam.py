"""1-bit Adam (Tang et al., 2021, arXiv:2102.02888): after some steps of Adam the variance stays as it is, and ranks
average momenta, which travel as signs, in place of gradients.

The backend's backwards then hold gradients back as in ``no_sync``, and a step takes them from there
(:mod:`zerograph.runtime.executor.local_gradients`): nothing of a compiled program changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph.core.errors import UnsupportedError
from zerograph.core.layout import Layout
from zerograph.core.step import Param
from zerograph.optim.algorithms.adam import ADAM
from zerograph.optim.clip import power_sums
from zerograph.optim.host import HostOptimizer
from zerograph.optim.options import Options, refuse_beside_programs, require_ranges
from zerograph.optim.tensors import names_in
from zerograph.optim.update import PendingUpdate
from zerograph.runtime.comm.collectives import LoneCommunicator, together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, reason_of, sequence_of
from zerograph.runtime.comm.feedback import Errors, anywhere, average, no_errors, sent_as_signs
from zerograph.runtime.dtensors import is_sharded, own_slices, shared_by_us, split_dim, unfolded
from zerograph.runtime.executor.accumulation import are_marks
from zerograph.runtime.executor.local_gradients import HINT, LocalGradients
from zerograph.runtime.executor.residency import moving_groups, params_in
from zerograph.runtime.torch_private import local_tensor

log = logging.getLogger(__name__)

_PROGRAM = "update by OneBitAdam"


class _Row(NamedTuple):
    """A parameter in its group; ``name`` is the same on all ranks, and ``state`` empty before its first gradient."""

    name: str
    group: Mapping[str, Any]
    param: Tensor
    state: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Averaged:
    """A parameter whose momentum ranks average in this step.

    Attributes:
        param: as messages describe it; its name is that in the optimizer, the same on all ranks.
        outward: the parameter.
        grad: of this rank alone, whole, in float32; the loss was multiplied by ``scale``.
        group, state: of the optimizer. ``exp_avg`` is the whole momentum on each rank, ``exp_avg_sq`` the variance of
            the rows that this one has.
        own: the names in ``state`` of this rank's errors; checkpoints take what has one name for one thing.
    """

    param: Param
    outward: Tensor
    grad: Tensor
    scale: float
    group: Mapping[str, Any]
    state: dict[str, Any]
    own: tuple[str, str]

    @property
    def momentum(self) -> Tensor:
        """Of this rank, before it is averaged: whole."""
        grad = self.grad / self.scale if self.scale != 1 else self.grad
        return self.state["exp_avg"].lerp(grad, 1 - self.group["betas"][0])  # type: ignore[no-any-return]

    @property
    def errors(self) -> Errors:
        """As the state dict has them."""
        return Errors(*(self.state[name] for name in self.own))

    def update(self, momentum: Tensor) -> None:
        """Take the ranks' ``momentum``, and change this rank's rows by it: Adam's update with the variance as it is.

        An element whose gradients were all 0 has no variance, and stays as it is: signs give it a momentum.
        """
        group, state = self.group, self.state
        state["exp_avg"].copy_(momentum)
        state["step"] += 1
        rows, target = momentum[own_slices(self.outward)], local_tensor(self.outward)
        variance = local_tensor(state["exp_avg_sq"])
        roots = variance.sqrt().add_(group["eps"]).masked_fill_(variance == 0, math.inf)
        rate = float(group["lr"])
        target.mul_(1 - rate * group["weight_decay"])
        target.addcdiv_(rows, roots, value=-rate / (1 - group["betas"][0] ** float(state["step"])))


class OneBitAdam(HostOptimizer):
    """1-bit Adam, for slow links, at stages 0 and 1. Its inventors no longer keep theirs, in DeepSpeed.

    In its first ``freeze_step`` steps it is AdamW. From then on the variance stays as it is, backwards average nothing,
    and each step sends momenta as signs, with a scale for each block of 256 elements: 1/28 of the bytes of float32.
    Differences between momenta and their signs are added to the next ones. Bias corrections are Adam's; that of the
    variance is made when it is frozen. Stage 1 splits the variance over ranks, and its gathers of parameters send what
    they did before; each rank has whole momenta and errors.

    After ``freeze_step`` gradients stay on each rank, in memory of their own, until they are dropped: ``.grad`` is
    zeros, ``clip=`` and ``clip_grad_norm_`` are refused, and so is a GradScaler. A step in which a gradient of some
    rank is not finite changes nothing on all of them, and counts in ``skipped``.

    Args:
        params: parameters in float32, or groups of them: all that the model trains.
        lr: as AdamW's.
        freeze_step: steps of AdamW, skipped ones too, before the variance is frozen: 15 to 25% of all, and after the
            learning rate has warmed up. The same for all groups.
        betas: of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: decoupled, as AdamW's.
        overlap, delayed: False only, as an update needs the messages of all ranks.

    Raises:
        ConfigError: a value is out of its range, or updates shall run beside programs.
        UnsupportedError: in a step, parameters in other dtypes, stages 2 and 3, ``offload=``, a mesh of two axes,
            tensor parallelism, ``stages``, or not all parameters of the backend; after ``freeze_step``, clipping, a
            GradScaler, a new group, or the first gradient of a parameter.
    """

    algorithm = ADAM
    takes_local_gradients = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        freeze_step: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        overlap: bool | str = False,
        delayed: bool = False,
    ) -> None:
        refuse_beside_programs("OneBitAdam", overlap, delayed, "needs the momenta of all ranks")
        defaults: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step,
            "amsgrad": False, "maximize": False, "decoupled_weight_decay": True,
            "taken": 0,  # steps
            "corrected": False,  # for its bias, the variance, which is frozen then
        }  # fmt: skip
        super().__init__(params, Options(), defaults)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._local = LocalGradients(type(self).__name__, self._unreduced)

    @property
    def is_frozen(self) -> bool:
        """Whether the variance stays as it is, and backwards leave each rank its own gradients."""
        return any(group["taken"] >= group["freeze_step"] for group in self.param_groups)

    def _unreduced(self) -> Iterable[Tensor]:
        return params_in(self.param_groups) if self.is_frozen else ()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before ``freeze_step``.

        Raises:
            ConfigError: a value is out of its range.
            UnsupportedError: the variance is frozen, and new parameters have none.
        """
        groups = self.param_groups
        if groups and self.is_frozen:
            raise UnsupportedError(
                f"a group was added to OneBitAdam after its freeze_step={groups[0]['freeze_step']}",
                "add it before, or make a new optimizer",
            )
        super().add_param_group(param_group)
        added = groups[-1]
        try:
            _check(added, groups[0]["freeze_step"])
        except Exception:
            groups.pop()
            raise
        added["taken"] = groups[0]["taken"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients of this rank that are held go, too."""
        super().zero_grad(set_to_none)
        if self.accumulation is not None and self.is_frozen:
            self.accumulation.forget_dropped()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. One of AdamW has taken no step towards ``freeze_step``."""
        freeze_step = self.param_groups[0]["freeze_step"]
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in (("freeze_step", freeze_step), ("taken", 0), ("corrected", False)):
                group.setdefault(name, value)

    def start(self, grad_scale: float | Tensor | None, clip: float | None) -> PendingUpdate:
        """Begin a step of AdamW; or, once frozen, make a whole one."""
        self._refuse_dtypes()
        if self.stages is not None:
            raise UnsupportedError(
                "OneBitAdam with stages: behind freeze_step each stage skips by itself, and nobody knows a norm of all",
                "another optimizer of zerograph.optim for a pipeline",
            )
        moves = bool(moving_groups(self.param_groups))
        if not self.is_frozen:
            pending = super().start(grad_scale, clip)
        else:
            self._refuse_where_frozen(clip)
            pending = PendingUpdate(None, ())  # it is made before it is returned
            if moves:
                self._step_frozen(float(grad_scale) if grad_scale is not None else 1.0)
        for group in self.param_groups:
            group["taken"] += moves
        return pending

    def _step_frozen(self, scale: float) -> None:
        if self.store is not None:
            self.store.refuse_half_done()
        comm = self.communicator() or LoneCommunicator()
        members = list(self._members(comm, scale))
        if not members:
            return
        self._freeze(comm)
        if not self._average(members, comm):
            self.skipped += 1
            return
        changed = [member.outward for member in members]
        torch.autograd.graph.increment_version(changed)
        if self.store is not None:
            self.store.copies.touched(changed)

    def _average(self, members: Sequence[_Averaged], comm: Communicator) -> bool:
        """Let ranks average momenta, and update; False, and nothing is changed, where some gradient is not finite."""
        bad = ~power_sums([m.grad for m in members], math.inf).isfinite().all()
        params, errors = [m.param for m in members], [m.errors for m in members]
        begun = False
        try:
            with together(comm, Entry(_PROGRAM, sequence_of(p.name for p in params), comm.steps)):
                if anywhere(comm, bad):
                    return False
                begun = True
                momenta = average(comm, params, (m.momentum for m in members), errors)
                for member, momentum in zip(members, momenta, strict=True):
                    member.update(momentum)
        except BaseException as error:
            if begun:
                self.leave_half_done(reason_of(error))  # errors may be those of this step, and momenta those before it
            raise
        return True

    def _members(self, comm: Communicator, scale: float) -> Iterator[_Averaged]:
        held = self.accumulation.of_this_rank() if self.accumulation is not None else {}
        rows = [row for row in self._rows_of_all() if row.param.grad is not None]
        for row, is_mark in zip(rows, are_marks([row.param.grad for row in rows]), strict=True):
            group, param = row.group, row.param
            called = names_in(group).get(id(param), row.name)
            if "exp_avg_sq" not in row.state:
                raise UnsupportedError(
                    f"{called} has its first gradient after freeze_step={group['freeze_step']}, and no variance",
                    "a larger freeze_step, by which all parameters have had gradients",
                )
            grad = _whole_gradient(param, held.get(id(param)), is_mark, called)
            sent = sent_as_signs(row.name, param.shape, comm.world_size)
            yield _Averaged(sent, param, grad, scale, group, row.state, _names_of_errors(comm))

    def _rows_of_all(self) -> Iterator[_Row]:
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.numel():
                    yield _Row(f"parameter {index} of group {number}", group, param, self.state.get(param, {}))

    def _freeze(self, comm: Communicator) -> None:
        """Bring states into the form that frozen steps have; errors of another rank, or of none, are left out."""
        own, corrected = _names_of_errors(comm), self.param_groups[0]["corrected"]
        rows = [row for row in self._rows_of_all() if "exp_avg_sq" in row.state]
        _gather_momenta(rows, comm)
        # From here on nothing fails, so that no variance is corrected twice.
        lacking = [row for row in rows if own[0] not in row.state]
        if corrected and lacking:
            log.warning(
                "OneBitAdam begins without the errors of signs: the state dict has no %s, and adds nothing to momenta "
                "once\n\nhint: save and load a state dict on each rank of as many, with torch.save, to go on as if "
                "nothing was", own[0],
            )  # fmt: skip
        for row in lacking:
            param = sent_as_signs(row.name, row.param.shape, comm.world_size)
            errors = no_errors(param, comm.rank, row.state["exp_avg"].device)
            row.state.update(zip(own, (errors.sent, errors.averaged), strict=True))
        for row in rows:
            for name in [name for name in row.state if name.startswith(_ERRORS) and name not in own]:
                del row.state[name]
            if not corrected:
                local_tensor(row.state["exp_avg_sq"]).div_(1 - row.group["betas"][1] ** float(row.state["step"]))
        for group in self.param_groups:
            group["corrected"] = True

    def _refuse_dtypes(self) -> None:
        other = next((p.dtype for p in params_in(self.param_groups) if p.dtype != torch.float32), None)
        if other is not None:
            raise UnsupportedError(
                f"OneBitAdam got a parameter of {other}, and averages momenta in float32",
                "keep parameters in float32 and compute in less: zerograph.backend(dtype=torch.bfloat16)",
            )

    def _refuse_where_frozen(self, clip: float | None) -> None:
        """Raises:
        UnsupportedError: the step needs averages of gradients, or ranks that no backend has connected.
        """
        if clip is not None:
            raise UnsupportedError(
                "OneBitAdam.step(clip=) after freeze_step: each rank has its own gradients, of which no norm is known",
                HINT,
            )
        if self.__dict__.get("found_inf") is not None or self.__dict__.get("grad_scale") is not None:
            raise UnsupportedError(
                "OneBitAdam with a GradScaler after freeze_step: it looks for overflows in gradients that stay on "
                "other ranks, and would never lower its scale",
                "torch.bfloat16 needs no GradScaler",
            )
        alone = self.communicator() is None
        if alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UnsupportedError(
                "OneBitAdam has parameters of no backend, and does not know which ranks to average over",
                "model.compile(backend=zerograph.backend(stage=0))",
            )


def _whole_gradient(param: Tensor, held: Tensor | None, is_mark: bool, name: str) -> Tensor:
    """The gradient that this rank alone has of ``param``: the part that is ``held``, and ``.grad`` unless it is the
    mark of that.

    Raises:
        UnsupportedError: the rank has averages of its rows.
    """
    if held is not None and is_mark:
        return unfolded(held.to(torch.float32).view(_in_graphs(param)), param.shape, split_dim(param))
    if is_sharded(param):
        raise UnsupportedError(
            f"the gradient of {name} was averaged before freeze_step, at least in part, and the step is behind it",
            "optimizer.zero_grad() after each step, and load checkpoints before the backward",
        )
    # It is an average, of before freeze_step, or comes from code that is not compiled.
    assert param.grad is not None
    own = local_tensor(param.grad).to(torch.float32)
    return own if held is None else torch.add(own, held.view(own.shape))


_ERRORS = ("error of rank", "averaged error of rank")


def _names_of_errors(comm: Communicator) -> tuple[str, str]:
    sent, averaged = (f"{name} {comm.rank} of {comm.world_size}" for name in _ERRORS)
    return sent, averaged


def _in_graphs(param: Tensor) -> tuple[int, ...]:
    """The shape in which programs gather and reduce it."""
    return shared_by_us(param)[0] if isinstance(param, DTensor) else tuple(param.shape)


def _gather_momenta(rows: Sequence[_Row], comm: Communicator) -> None:
    """Give each rank the whole momenta, of which steps of AdamW and checkpoints may have left it its rows."""
    split = [row for row in rows if is_sharded(row.state["exp_avg"])]
    if split:
        home, single = Layout("rows", comm.world_size), "float32"
        params = [Param(row.name, _in_graphs(row.param), single, single, single, False, home) for row in split]
        shards = [local_tensor(row.state["exp_avg"]) for row in split]
        with together(comm, Entry(_PROGRAM, sequence_of(["momenta", *(p.name for p in params)]), comm.steps)):
            whole = [momentum.clone() for momentum in comm.finish_gather(comm.start_gather(params, shards))]
        for row, momentum in zip(split, whole, strict=True):
            row.state["exp_avg"] = unfolded(momentum, row.param.shape, split_dim(row.param))
    for row in rows:
        row.state["exp_avg"] = local_tensor(row.state["exp_avg"])


def _check(group: Mapping[str, Any], freeze_step: int) -> None:
    require_ranges(
        "OneBitAdam",
        group,
        hint=", freeze_step is a number of steps, at least 1 and the same for all groups",
        freeze_step=lambda value: type(value) is int and value > 0 and value == freeze_step,
    )
