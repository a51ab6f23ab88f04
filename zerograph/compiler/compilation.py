"""The context in which frames are compiled: all that the compiler knows of the backend of a model, or of a dry run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zerograph.compiler.agreement import Agreement
from zerograph.compiler.lowering.segments import SegmentCache
from zerograph.core.config import CutBy
from zerograph.core.machine import Tier
from zerograph.core.param_bytes import Plain
from zerograph.core.plan import Plan
from zerograph.core.step import Step
from zerograph.core.wire import Wires
from zerograph.runtime.executor.executor import Runtime


@dataclass(frozen=True, slots=True)
class Compilation:
    """The same for all frames of one model.

    Attributes:
        world_size: ranks that parameters are sharded over.
        segments: compiled segments, of which frames share those that are alike.
        plan_for: the plan for a step, which the user's function of this name performs on these plain parameters.
        device: where segments run.
        runtime_for: what the programs of a frame share when they run, by number, name and plan; None where none runs.
        agreement: how ranks agree on programs; None where there is one rank, and where ranks are simulated.
        tied: of each parameter that the model has several names for, the other ones.
        repeats_layers: whether a few of many layers that are alike are traced in place of all.
        loss_only: whether a forward that trains returns None in place of logits.
        cut_by: whether plans may run layers for some tokens or some samples at a time.
        wires: what parameters and gradients are sent as.
        groups: the group that graphs use instead of each of the user's, by name.
        staging: the tier whose memory NVMe reads and writes: the host's, where that is not the device's.
        text_of: a graph as text, to show what passes did to it; empty where nobody reads it.
    """

    world_size: int
    segments: SegmentCache
    plan_for: Callable[[str, Step, Sequence[Plain]], Plan]
    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    runtime_for: Callable[[int, str, Plan], Runtime] | None = None
    agreement: Agreement | None = None
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    repeats_layers: bool = True
    loss_only: bool = False
    cut_by: tuple[CutBy, ...] = ()
    wires: Wires = Wires()  # noqa: RUF009  immutable
    groups: Mapping[str, str] = field(default_factory=dict)
    staging: Tier = "device"
    text_of: Callable[[fx.GraphModule], str] = lambda _: ""
