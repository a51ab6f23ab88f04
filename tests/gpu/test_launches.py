"""How many launches each bucket takes in a step, and that nothing takes one for each parameter.

A stand-in counts for each kernel of ours: that one launch of it gives torch's bits is tested in tests/runtime/kernels.
All-gathers of a bucket are coalesced, as NCCL's are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu.accelerator import here
from numerics.test_offload import Run, adamw
from ranks import run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zerograph.core.instructions import Compute, Instruction
from zerograph.runtime.comm import packing
from zerograph.runtime.comm.collectives import GroupCommunicator
from zerograph.runtime.executor.executor import _METHODS, Executor

pytestmark = pytest.mark.skipif(
    getattr(torch.accelerator.current_accelerator(), "type", "") != "fake", reason="needs --device=fake"
)

NO_LAUNCH = {"empty", "new_empty", "empty_like", "lift_fresh", "promote_types"}


class Layers(nn.Module):
    """Two layers, or more, a bucket each; shards are uneven, so that they are padded."""

    count = 2

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 40)
        layers = (nn.Sequential(nn.Linear(40, 91), nn.GELU(), nn.Linear(91, 40)) for _ in range(self.count))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(40, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


class More(Layers):
    count = 4


class _Launches(TorchDispatchMode):
    """The operators that the device is told inside of it, by name; one that works on a list counts as one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False  # of a stand-in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (self._inside or func.is_view or name in NO_LAUNCH or func.namespace == "profiler"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        """The names since this was last called."""
        names, self.names = self.names, []
        return names

    def pack(self, tensors: Sequence[Tensor], lengths: Sequence[int], offsets: Sequence[int], message: Tensor) -> None:
        """In the place of ``messages.pack``."""
        self.names.append("pack")
        self._inside = True
        message.zero_()
        for tensor, length, offset in zip(tensors, lengths, offsets, strict=True):
            for row, piece in zip(message, tensor.split(length), strict=False):
                row[offset : offset + len(piece)] = piece
        self._inside = False

    def divide(self, sums: Sequence[Tensor], number: int, outs: Sequence[Tensor]) -> None:
        """In the place of ``messages.divide``."""
        self.names.append("divide")
        self._inside = True
        for total, out in zip(sums, outs, strict=True):
            out.copy_(total / number)
        self._inside = False


Counted = dict[tuple[str, str], list[list[str]]]
"""Launches by instruction and kind of program: of each bucket."""


class _Watch:
    """What one step tells the device, by instruction, and besides its instructions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from fake_device import device

        self.library, self.launches = device.load(), _Launches()
        self.by_instruction: Counted = defaultdict(list)
        self.besides: list[str] = []
        for name in ("pack", "divide"):
            patch.setattr(packing, f"_{name}", getattr(self.launches, name))
        patch.setattr(packing, "_packs", lambda *_: True)
        begin = GroupCommunicator.__init__

        def coalesces(comm: GroupCommunicator, *args: Any, **kwargs: Any) -> None:
            begin(comm, *args, **kwargs)
            comm.coalesces = True

        patch.setattr(GroupCommunicator, "__init__", coalesces)
        for method in _METHODS.values():
            patch.setattr(Executor, method, self._watched(getattr(Executor, method)))

    def _watched(self, run: Any) -> Any:
        def watched(executor: Executor, instruction: Instruction, registers: list[Any]) -> None:
            self.look()
            if isinstance(instruction, Compute):
                run(executor, instruction, registers)
            else:
                with self.launches:
                    run(executor, instruction, registers)
                key = (type(instruction).__name__, executor.program.kind)
                self.by_instruction[key].append(self.launches.take())
            self.library.end_trace()
            self.library.begin_trace()

        return watched

    def forget(self) -> None:
        """Begin anew, with a step."""
        self.by_instruction.clear()
        self.library.end_trace()
        self.besides.clear()
        self.library.begin_trace()

    def look(self) -> None:
        """Note what the device was told since the last instruction."""
        told = [each.name for each in self.library.end_trace() if each.what == "kernel"]
        self.besides += [name for name in told if name != "the end of its life"]  # of memory, which is no kernel


def _step(net: type[nn.Module], options: dict[str, Any]) -> tuple[Counted, list[str], list[str], list[str]]:
    """The launches of a step: those of instructions, and of the forward and backward besides; of the update; and of
    zeroing."""
    Run.device = here()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "net", net)
        watch = _Watch(patch)
        training = Run(adamw, dtype=torch.bfloat16, **options)
        training.steps(2)
        tokens = training.tokens()
        watch.forget()
        training.compiled(tokens).backward()
        watch.look()
        with watch.launches:
            training.optimizer.step()
        update = watch.launches.take()
        with watch.launches:
            training.optimizer.zero_grad()
        return dict(watch.by_instruction), watch.besides, update, watch.launches.take()


GATHER, REDUCE = ["pack", "allgather_into_tensor_coalesced_"], ["pack", "_reduce_scatter_base_"]
Wanted = dict[tuple[str, str], list[str]]
AFTER: Wanted = {("WaitReduce", "backward"): ["divide"]}
CASES: dict[str, tuple[dict[str, Any], Wanted]] = {
    "stage 3": (
        {"stage": 3},
        {("Gather", "forward"): GATHER, ("Gather", "backward"): GATHER, ("Reduce", "backward"): REDUCE, **AFTER},
    ),
    "stage 2": ({"stage": 2}, {("Gather", "forward"): GATHER, ("Reduce", "backward"): REDUCE, **AFTER}),
    "stage 0": ({"stage": 0}, {("Reduce", "backward"): ["pack", "allreduce_"], **AFTER}),
}


@pytest.mark.parametrize(("options", "wanted"), CASES.values(), ids=CASES)
def test_each_bucket_takes_so_many(options: dict[str, Any], wanted: Wanted) -> None:
    """Gradients are left where the reduction has put them, and zeroing lets go of them."""
    for found, besides, _, zeroing in run(2, _step, Layers, options):
        for instruction, of_buckets in found.items():
            assert all(launches == wanted.get(instruction, []) for launches in of_buckets), instruction
        assert len(found["Reduce", "backward"]) == 4
        assert besides == ["aten::fill_"]  # the gradient of the loss
        assert zeroing == []


def test_an_update_takes_as_many_with_more_layers() -> None:
    few, more = (run(2, _step, net, {"stage": 3}) for net in (Layers, More))
    for (_, _, update, _), (found, besides, other, zeroing) in zip(few, more, strict=True):
        assert len(found["Reduce", "backward"]) == 6
        assert other == update
        assert (besides, zeroing) == (["aten::fill_"], [])
