"""What papers say a step needs, by formula: the oracle of tests. The package counts by planning and simulating.

Sources: ZeRO (Rajbhandari et al. 2019) for model states by stage, ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity
(Rajbhandari et al. 2021) for what leaves the device, working memory and tiling; Korthikanti et al. ("Reducing
Activation Recomputation in Large Transformer Models", 2022) for activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerograph.core.machine import Tier
from zerograph.core.step import ITEM_SIZE
from zerograph.planner.estimate.preset import Need
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.strategy import Strategy
from zerograph.planner.estimate.training import Training


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes per parameter of the model states.

    Attributes:
        copy: of what kernels read.
        gradient: of its gradient.
        master: of a separate copy that the optimizer updates; 0 where it updates ``copy`` itself.
        moments: of Adam's two averages.
        resident: whether stage 3 keeps a shard of ``copy``. ZeroGraph keeps the master alone and casts as it gathers.
    """

    copy: int
    gradient: int
    master: int
    moments: int
    resident: bool

    @property
    def optimizer(self) -> int:
        """Bytes per parameter that live with the optimizer: 12 in mixed-precision Adam (K in the ZeRO paper)."""
        return self.master + self.moments


def layout_of(training: Training) -> Layout:
    """Bytes per parameter; 16 in "mixed" (16-bit dtype) and "fp32"."""
    item = ITEM_SIZE[training.dtype]
    if training.optimizer == "mixed":
        return Layout(copy=item, gradient=item, master=4, moments=8, resident=True)
    if training.optimizer == "fp32":
        return Layout(copy=4, gradient=4, master=0, moments=8, resident=True)
    return Layout(copy=item, gradient=4, master=4, moments=8, resident=False)


def layer_bytes(size: ModelSize, training: Training) -> int:
    """What one layer saves for its backward: ``s*b*h*(34 + 5*a*s/h)`` in 16 bit; fused attention saves no scores."""
    item = ITEM_SIZE[training.dtype]
    per_token = size.hidden * (16 * item + 2)
    if training.attention == "whole":
        per_token += size.heads * training.seq * (2 * item + 1)
    return training.tokens * per_token


def checkpoint_bytes(size: ModelSize, training: Training) -> int:
    """What one layer keeps when it is recomputed: its input, ``2*s*b*h`` in 16 bit."""
    return training.tokens * size.hidden * ITEM_SIZE[training.dtype]


def logits_bytes(size: ModelSize, training: Training, tiles: int = 1) -> int:
    """Logits in the compute dtype, their float32 log-probabilities and the float32 gradient, at the loss.

    Megatron counts the float32 logits alone (``4*s*b*V``). ``tiles`` splits head and loss over tokens.
    """
    tokens = -(-training.tokens // tiles)
    return tokens * size.vocab * (ITEM_SIZE[training.dtype] + 4 + 4)


STAGING = 64 * 2**20
"""Bytes of one staging buffer for NVMe, at least; there are three: being read, in use, being written."""


def total(needs: tuple[Need, ...], tier: Tier) -> int:
    """Bytes of all ``needs`` on ``tier``."""
    return sum(need.bytes for need in needs if need.tier == tier)


def needs(
    size: ModelSize, training: Training, strategy: Strategy, world_size: int, staging: Tier = "host"
) -> tuple[Need, ...]:
    """Everything that one of ``world_size`` ranks needs, the largest rank's share where it does not divide.

    Args:
        staging: where buffers for NVMe are; "device" where the device is the host's CPU.
    """
    found = (
        *model_states(size, layout_of(training), strategy, world_size),
        *working(size, training, strategy),
        *activations(size, training, strategy),
        Need(staging, "staging buffers", staging_bytes(size, layout_of(training), strategy, world_size)),
    )
    return tuple(need for need in found if need.bytes)


def model_states(size: ModelSize, layout: Layout, strategy: Strategy, world_size: int) -> tuple[Need, ...]:
    """Parameters, gradients and optimizer states between and within steps, without what is gathered for use.

    A stage divides by the number of ranks what it shards (ZeRO, section 5): (2 + 2 + 12)*P at stage 0,
    2*P + 2*P + 12*P/N, then 2*P + 14*P/N, then 16*P/N for mixed-precision Adam. The master copy lives with the
    optimizer.
    """

    def held(per_parameter: int, from_stage: int) -> int:
        parts = world_size if strategy.stage >= from_stage else 1
        # Rounded up: the largest rank's share.
        return -(-per_parameter * size.parameters // parts)

    return (
        Need(strategy.placement.parameters, "parameters", held(_copy(layout, strategy, world_size), 3)),
        Need(strategy.placement.spilled, "gradients", held(layout.gradient, 2)),
        Need(strategy.placement.optimizer, "optimizer states", held(layout.optimizer, 1)),
    )


def largest_operator(size: ModelSize) -> int:
    """Parameters of the largest single operator: the MLP's ``4*h*h`` (ZeRO-Infinity, section 3) or the head."""
    return min(size.parameters, max(4 * size.hidden**2, size.vocab * size.hidden))


def working(size: ModelSize, training: Training, strategy: Strategy) -> tuple[Need, ...]:
    """Device memory to use sharded states: gathered parameters (stage 3) and unreduced gradients (stages 2, 3).

    ZeRO-Infinity's model state working memory is that of the largest operator, ``(2 + 2) * h * 4h`` bytes. Prefetched
    buckets come on top, and ``tiles`` divides it down to the bucket size.
    """

    def unit(per_parameter: int) -> int:
        largest = -(-per_parameter * largest_operator(size) // strategy.tiles)
        return min(per_parameter * size.parameters, max(training.bucket_size, largest))

    layout = layout_of(training)
    gathered = unit(layout.copy) * (1 + training.prefetch) if strategy.stage == 3 else 0
    return (
        Need("device", "gathered parameters", min(gathered, layout.copy * size.parameters)),
        Need("device", "unreduced gradients", unit(layout.gradient) if strategy.stage >= 2 else 0),
    )


def activations(size: ModelSize, training: Training, strategy: Strategy) -> tuple[Need, ...]:
    """Saved activations at their peak, and the working set of one layer or of the loss, whichever is larger.

    Without recomputation the peak is at the loss. With it, a layer is recomputed after the logits are gone. Offloaded
    checkpoints leave two on the device: one in use, one in flight.
    """
    layer, kept = layer_bytes(size, training), checkpoint_bytes(size, training)
    logits = logits_bytes(size, training, strategy.tiles)
    if strategy.activations == "keep":
        return Need("device", "activations", layer * size.layers), Need("device", "logits", logits)
    peak = Need("device", "logits", logits) if logits > layer else Need("device", "one layer's activations", layer)
    if strategy.activations == "recompute":
        return Need("device", "checkpoints", kept * size.layers), peak
    return (
        Need("device", "checkpoints", kept * min(2, size.layers)),
        Need(strategy.activations, "checkpoints", kept * size.layers),
        peak,
    )


def staging_bytes(size: ModelSize, layout: Layout, strategy: Strategy, world_size: int) -> int:
    """Host memory that NVMe passes through: three buffers, each for this rank's share of the largest operator."""
    if strategy.tier != "nvme" and strategy.activations != "nvme":
        return 0
    per_parameter = layout.copy + layout.gradient + layout.optimizer
    return 3 * max(STAGING, -(-per_parameter * largest_operator(size) // (strategy.tiles * world_size)))


def _copy(layout: Layout, strategy: Strategy, world_size: int) -> int:
    """Bytes per parameter of the copy that kernels read and that outlives its use.

    A rank that holds the whole master reads that, or saves a cast of it for the backward: there is nothing to gather.
    """
    master_on_device = strategy.placement.optimizer == "device"
    if (
        not master_on_device
        and layout.copy == layout.master
        and strategy.placement.parameters == strategy.placement.optimizer
    ):
        return 0  # the master is what is gathered
    if master_on_device and (strategy.stage == 0 or world_size == 1):
        return 0 if layout.copy == layout.master else layout.copy
    return layout.copy if strategy.stage < 3 or layout.resident or not master_on_device else 0
