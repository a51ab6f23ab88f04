"""Seconds of one step, by formula: compute, collectives, transfers and the update, on a given machine.

Two phases follow each other: the passes (forward and backward) and the update. Within a phase every stream runs
beside the others, so its longest stream is its time; what does not overlap in practice makes a step slower than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerograph.core.machine import Link, Machine
from zerograph.planner.activations import checkpoint_bytes, layer_bytes, logits_bytes
from zerograph.planner.sizes import ModelSize
from zerograph.planner.strategy import Strategy
from zerograph.planner.training import Training

Streams = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per stream in each phase. Streams: compute, collectives, h2d, d2h, nvme_read, nvme_write, optimizer."""

    passes: Streams
    update: Streams

    @property
    def seconds(self) -> float:
        """Time of a step: the longest stream of the passes, then the longest of the update."""
        return max(self.passes.values()) + max(self.update.values())

    @property
    def bound(self) -> str:
        """The stream that the longer phase waits for."""
        streams = (*self.passes.items(), *self.update.items())
        return max(streams, key=lambda stream: stream[1])[0]


def timing(size: ModelSize, training: Training, strategy: Strategy, world_size: int, machine: Machine) -> Timing:
    """How long a step of ``strategy`` takes on ``machine``."""
    return Timing(
        passes={
            "compute": compute(size, training, strategy, machine),
            "collectives": collectives(size, training, strategy, world_size, machine),
            **_fetches(size, training, strategy, world_size, machine),
        },
        update=_update(size, training, strategy, world_size, machine),
    )


def compute(size: ModelSize, training: Training, strategy: Strategy, machine: Machine) -> float:
    """Products, then what lies between them: neither overlaps the other on one device.

    A model too small to fill the device takes the launches of its kernels instead.
    """
    # A backward is two passes; recomputation is one more forward.
    passes = (4 if strategy.recomputes else 3) * training.accumulate
    products = products_flops(size, training) / machine.matmul[training.dtype]
    between = 2 * size.layers * layer_bytes(size, training) + 2 * logits_bytes(size, training)
    launches = _KERNELS * size.layers * machine.launch
    return passes * max(products + between / machine.device_bandwidth, launches)


def products_flops(size: ModelSize, training: Training) -> int:
    """Operations of matrix products in one pass: ``2*P`` per token and the scores' ``4*L*h*s`` (Megatron-LM).

    A step has three passes, four with recomputation: the well-known ``6*P`` and ``8*P`` per token.
    """
    return 2 * training.tokens * (size.parameters + 2 * size.layers * size.hidden * training.seq)


_KERNELS = 20
"""Kernels of one layer in one pass, after fusion: six products, attention, norms, and what is between.

Between the products, each activation that a backward needs is written once and read once in every pass.
"""


def collectives(size: ModelSize, training: Training, strategy: Strategy, world_size: int, machine: Machine) -> float:
    """ZeRO, section 7: 2*P elements at stages 0 to 2, 3*P at stage 3, times the share that other ranks hold.

    Micro-batches repeat what a stage does in the passes: reductions from stage 2 on, gathers at stage 3.
    """
    if world_size == 1:
        return 0.0
    layout, link, again = training.layout, machine.collective(world_size), training.accumulate
    gathers = (0, 1, 1, 2 * again)[strategy.stage]
    reduces = (2, 1, again, again)[strategy.stage]
    moved = size.parameters * (gathers * layout.copy + reduces * layout.gradient) * (world_size - 1) / world_size
    messages = (gathers + reduces) * max(size.layers, layout.copy * size.parameters / training.bucket_size)
    return moved / link.rate + messages * link.latency


def _fetches(
    size: ModelSize, training: Training, strategy: Strategy, world_size: int, machine: Machine
) -> dict[str, float]:
    """Transfers beside the passes: parameters in for forward and backward, gradients and checkpoints out.

    Gradients of further micro-batches are added to those that left before, which NVMe must read first.
    """
    layout, shard, again = training.layout, size.parameters / world_size, training.accumulate
    down = again * shard * layout.gradient if strategy.home("gradients") != "device" else 0.0
    up = again * 2 * shard * layout.copy if strategy.home("parameters") != "device" else 0.0
    saved = again * size.layers * checkpoint_bytes(size, training)
    out = saved if strategy.activations in ("host", "nvme") else 0.0
    states, kept = strategy.tier == "nvme", strategy.activations == "nvme"
    spilled = down * states + out * kept
    # All micro-batches but the first find gradients there, which they add to.
    read = (up + down * (again - 1) / again) * states + out * kept
    return {
        "h2d": machine.h2d.seconds(up + out),
        "d2h": machine.d2h.seconds(down + out),
        "nvme_read": _of_node(machine.nvme_read, read, world_size, machine),
        "nvme_write": _of_node(machine.nvme_write, spilled, world_size, machine),
    }


def _update(
    size: ModelSize, training: Training, strategy: Strategy, world_size: int, machine: Machine
) -> dict[str, float]:
    """Adam where its states live; gradients that stayed on the device go down first, new parameters come up."""
    layout = training.layout
    # At stage 0 every rank updates everything.
    mine = size.parameters / (world_size if strategy.stage else 1)
    traffic = mine * layout.update_traffic
    if strategy.home("optimizer") == "device":
        return {"optimizer": traffic / machine.update.rate}
    onto_device = strategy.home("parameters") == "device"
    nvme = strategy.tier == "nvme"
    read = layout.optimizer + (layout.gradient if strategy.home("gradients") == "nvme" else 0)
    write = layout.optimizer + (0 if onto_device else layout.copy)
    return {
        "optimizer": traffic * _sharers(world_size, machine) / machine.cpu_optimizer,
        "h2d": machine.h2d.seconds(mine * layout.copy if onto_device else 0.0),
        "d2h": machine.d2h.seconds(mine * layout.gradient if strategy.home("gradients") == "device" else 0.0),
        "nvme_read": _of_node(machine.nvme_read, mine * read * nvme, world_size, machine),
        "nvme_write": _of_node(machine.nvme_write, mine * write * nvme, world_size, machine),
    }


def _of_node(link: Link, size: float, world_size: int, machine: Machine) -> float:
    """Seconds for ``size`` bytes of every rank through what a node's ranks share."""
    return link.seconds(size * _sharers(world_size, machine))


def _sharers(world_size: int, machine: Machine) -> int:
    return min(world_size, machine.ranks_per_node)
