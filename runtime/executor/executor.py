"""Run a program: segments, collectives, and the memory in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from zerograph.core.errors import RankError
from zerograph.core.instructions import (
    Accumulate,
    BeginUpdate,
    Compute,
    Free,
    Gather,
    Instruction,
    Move,
    Place,
    Reduce,
    Scale,
    View,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zerograph.core.plan import ParamTile
from zerograph.core.program import Program
from zerograph.core.slots import LEAVING
from zerograph.runtime.buffers import padded, torch_dtype
from zerograph.runtime.comm.communicator import Communicator, HostGathers
from zerograph.runtime.comm.entry import Entry, reason_of
from zerograph.runtime.comm.wires import finish_gather, host_parts, start_gather, start_gather_inside
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.early import EarlyUpdates
from zerograph.runtime.executor.residency import GatheredCache
from zerograph.runtime.executor.telemetry import Telemetry, label
from zerograph.runtime.offload.saved import Returning
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import closed_connection, is_held_alone

Callee = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Runtime:
    """The state that the programs of one frame share.

    Attributes:
        frame: number of the frame, for telemetry.
        comm: the transport; None where programs hold no collectives.
        cache: buckets that stay resident between programs.
        accumulation: gradients kept back by ``no_sync``, shared by all frames of the backend.
        store: where shards live, of all frames of the backend.
        device: where segments run.
        code: the user's function that was compiled, for messages.
        early: parameters that are updated inside of backwards, of all frames of the backend.
        beside: whether ranks of another axis run the programs too, with collectives inside of segments.
    """

    frame: int
    comm: Communicator | None
    cache: GatheredCache
    accumulation: GradientAccumulation
    telemetry: Telemetry
    store: ShardStore
    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    code: str = "the model"
    early: EarlyUpdates = field(default_factory=lambda: EarlyUpdates({}, lambda: ()))
    beside: bool = False


class Executor:
    """One program, ready to be called with a list of inputs, which it clears (AOTAutograd's boxed convention)."""

    def __init__(self, program: Program, segments: Sequence[Callee], runtime: Runtime) -> None:
        # AOTAutograd hands over its only references, so inputs die as early as they can. On the instance, because
        # Dynamo's wrapper of the backward copies only those attributes.
        self._boxed_call = True
        self.program, self.segments = program, segments
        self.runtime, self.frame = runtime, runtime.frame
        self.comm: Communicator = runtime.comm  # type: ignore[assignment]  # None where programs have no collectives
        self.cache, self.accumulation, self.telemetry = runtime.cache, runtime.accumulation, runtime.telemetry
        self.store, self.early = runtime.store, runtime.early
        self.trims, self.unread, self.names = program.trims, program.unread, program.names
        self.synchronizes = runtime.device.type != "cpu"
        self._arriving: list[Callable[[], None]] = []  # waits of the next gather for copies
        # 60 bits: it travels in a signed 64-bit integer. 0 stands for no collectives, where ranks need not meet.
        meets = runtime.beside or any(program.collectives())
        self.sequence = int(program.digest[:15], 16) if meets else 0
        self.name = f"{program.kind} of {runtime.code}"
        # Looked up once, not for every instruction of every step.
        self.instructions = [(i, getattr(self, _method(i)), i.dead) for i in program.instructions]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the program once: on all ranks to its end, or on none (:mod:`zerograph.runtime.comm.rendezvous`)."""
        program = self.program
        # A new list: the caller's is cleared, so that inputs die where the program says.
        registers: list[Any] = args + [None] * (program.registers - program.inputs)
        args.clear()
        for register in self.unread:
            registers[register] = None
        held = self.accumulation.state
        if program.kind == "inference":
            self.store.settle_updates(self.names)
        elif program.kind == "backward":
            self.store.end_forward_updates()
        try:
            self.early.enter(program.kind, self.names)
            self._enter()
            self.store.refuse_half_done()
            if program.kind != "backward":
                self.store.drop_pages()
            elif not self.accumulation.active:
                self.store.slots.read_ahead()
            self.cache.enter(program.kind, self.comm.generation if self.sequence else 0)
            if self.trims and self.sequence:
                self.comm.trim()
            for instruction, run, dead in self.marked if self.telemetry.recording else self.instructions:
                run(instruction, registers)
                for register in dead:
                    registers[register] = None
            self.store.gradients.wait()
            self.store.saved.wait()
            self.store.wait_for_parameters()
            if self.sequence:
                self.comm.leave()
            self.early.leave(program.kind, self.names)
            if program.kind == "backward":
                self.store.slots.stamp()
        # Ctrl-C too: the others wait for this rank, and a bucket that is half gathered must not count as unsharded.
        except BaseException as error:
            self.cache.clear()
            self.store.abandon()
            self.accumulation.state = held
            if self.comm is not None:
                self.comm.abort(reason_of(error))
            self.early.abandon(reason_of(error))
            self._arriving = []
            self.telemetry.failed()
            registers.clear()  # which the traceback holds
            raise
        self.telemetry.finished(program.kind)
        return [None if r is None else registers[r] for r in program.outputs]

    def _enter(self) -> None:
        if self.sequence:
            try:
                self.comm.enter(Entry(self.name, self.sequence, self.cache.steps))
            except RankError:
                # Else whoever loads a checkpoint now would hear of it. Of one that fails later he does.
                self.store.tell_failed()
                raise

    @cached_property
    def marked(self) -> list[tuple[Instruction, Callable[..., None], tuple[int, ...]]]:
        """``instructions`` for a recording, made when there is one."""
        return [
            (instruction, self._marked(i, run), dead) for i, (instruction, run, dead) in enumerate(self.instructions)
        ]

    def _marked(self, index: int, run: Callable[..., None]) -> Callable[..., None]:
        """``run`` as a span that torch's profiler sees; on an accelerator it then waits for what it started."""
        name = label(self.frame, self.program.kind, index)

        def marked(instruction: Instruction, registers: list[Any]) -> None:
            with record_function(name):
                run(instruction, registers)
                if self.synchronizes:
                    torch.accelerator.synchronize()

        return marked

    def _begin_update(self, instruction: BeginUpdate, registers: list[Any]) -> None:
        self.early.start(instruction.bucket)

    def _compute(self, instruction: Compute, registers: list[Any]) -> None:
        args = [registers[r] for r in instruction.reads]
        for register in instruction.dead:
            registers[register] = None  # the segment's list is the last to know them
        try:
            values = self.segments[instruction.segment](args)
        except RuntimeError as error:
            if self.runtime.beside:
                self._refuse_closed(error)
            raise
        for register, value in zip(instruction.writes, values, strict=True):
            registers[register] = value

    def _refuse_closed(self, error: RuntimeError) -> None:
        """Raises:
        RankError: a rank that failed has closed a connection, which ``error`` says alone.
        """
        rendezvous, closed = self.comm.rendezvous if self.comm is not None else None, closed_connection(error)
        if rendezvous is not None and closed:
            raise rendezvous.disconnected(f"in the {self.name}", closed) from error

    def _view(self, instruction: View, registers: list[Any]) -> None:
        length = instruction.end - instruction.begin
        registers[instruction.out] = registers[instruction.source].narrow(instruction.dim, instruction.begin, length)

    def _place(self, instruction: Place, registers: list[Any]) -> None:
        tile: Tensor = registers[instruction.terms[0]]
        if instruction.first:
            sizes = zip(instruction.shape, tile.shape, strict=True)
            registers[instruction.out] = tile.new_empty([own if size < 0 else size for size, own in sizes])
        full: Tensor = registers[instruction.out]
        # Behind the end lies what pads the last shards.
        length = min(tile.shape[instruction.dim], full.shape[instruction.dim] - instruction.begin)
        place = full.narrow(instruction.dim, instruction.begin, length)
        place.copy_(tile.narrow(instruction.dim, 0, length))

    def _accumulate(self, instruction: Accumulate, registers: list[Any]) -> None:
        terms: list[Tensor] = [registers[r] for r in instruction.terms]
        total: Tensor | None = None if instruction.first else registers[instruction.out]
        registers[instruction.out] = added(total, terms, torch_dtype(instruction.dtype))

    def _scale(self, instruction: Scale, registers: list[Any]) -> None:
        by = registers[instruction.by]
        # A backward with retain_graph=True finds it again.
        ours = instruction.source in instruction.dead and is_held_alone(registers, instruction.source)
        source: Tensor = registers[instruction.source]
        registers[instruction.out] = source.mul_(by) if ours else source * by

    def _gather(self, instruction: Gather, registers: list[Any]) -> None:
        shards = [registers[r] for r in instruction.reads]
        arriving, self._arriving = self._arriving, []
        cached = self.cache.lookup(instruction.bucket, instruction.params)
        if cached is None:
            self.telemetry.gathering(self.frame, instruction.bucket, instruction.tile)
            # Also of an earlier micro-batch, where nobody can have changed a parameter since.
            parts = self.cache.in_host.lookup(instruction.bucket, instruction.params)
            if parts is not None:
                pending = start_gather_inside(cast(HostGathers, self.comm), instruction.params, parts)
            else:
                if not instruction.fetched:
                    shards = self.store.fetches.finish(self.store.fetches.start(instruction.params, shards))
                shards = [padded(p, shard) for p, shard in zip(instruction.params, shards, strict=True)]
                pending = start_gather(self.comm, instruction.params, shards, arriving)
            registers[instruction.out] = (instruction.params, pending)
            if instruction.ended and not self.accumulation.holding:
                self.cache.in_host.drop(instruction.bucket)
        else:
            for wait in arriving:  # for nobody reads what came, and its memory is let go of
                wait()
            registers[instruction.out] = (None, cached)

    def _wait_gather(self, instruction: WaitGather, registers: list[Any]) -> None:
        params, pending = registers[instruction.pending]
        full = pending
        if params is not None:
            full = finish_gather(self.comm, pending)
            if instruction.resident:
                self.cache.store(instruction.bucket, params, full)
            if instruction.kept:
                parts = host_parts(cast(HostGathers, self.comm), pending)
                self.cache.in_host.store(instruction.bucket, params, parts)
        for register, tensor in zip(instruction.writes, full, strict=True):
            registers[register] = tensor

    def _free(self, instruction: Free, registers: list[Any]) -> None:
        for register in instruction.reads:
            registers[register] = None
        if instruction.ends:
            self.cache.drop(instruction.bucket)
        if not self.cache.holds(instruction.bucket):
            self.telemetry.freed(self.frame, instruction.bucket, instruction.tile)
        if instruction.ends:
            self.comm.trim()  # it would wait for the next forward

    def _fetch(self, instruction: Move, registers: list[Any]) -> None:
        (out,) = instruction.writes
        if instruction.staged:  # on its way from NVMe
            registers[out] = registers[instruction.reads[0]]
        else:
            resident = self.cache.lookup(instruction.bucket, instruction.params) is not None
            shards = [registers[r] for r in instruction.reads]
            registers[out] = None if resident else self.store.fetches.start_read(instruction.params, shards)
        if instruction.kept and registers[out] is not None and not self.accumulation.active:
            self.early.keep(instruction.bucket, instruction.params, registers[out].runs)
        if instruction.target == "device" and registers[out] is not None:
            registers[out] = self.store.fetches.copy_up(registers[out])

    def _wait_fetch(self, instruction: WaitFetch, registers: list[Any]) -> None:
        pending = registers[instruction.pending]
        found: Sequence[Tensor | None] = [None] * len(instruction.writes)
        if isinstance(pending, Returning):
            found = self.store.saved.finish(pending)
        elif pending is not None and instruction.by_gather:
            found = pending.shards
            self._arriving += [copy.wait for copy in pending.copies]
        elif pending is not None:
            found = self.store.fetches.finish(pending)
        for register, tensor in zip(instruction.writes, found, strict=True):
            registers[register] = tensor

    def _spill_saved(self, instruction: Move, registers: list[Any]) -> None:
        offloaded = self.store.saved.spill(
            [registers[r] for r in instruction.reads], instruction.target, instruction.label
        )
        for register, tensor in zip(instruction.writes, offloaded, strict=True):
            registers[register] = tensor

    def _fetch_saved(self, instruction: Move, registers: list[Any]) -> None:
        (out,) = instruction.writes
        if instruction.staged:  # on its way from NVMe
            registers[out] = self.store.saved.copy_up(registers[instruction.reads[0]], instruction.label)
        else:
            offloaded = [registers[r] for r in instruction.reads]
            registers[out] = self.store.saved.fetch(offloaded, instruction.source, instruction.label)

    def _spill(self, instruction: Move, registers: list[Any]) -> None:
        there: list[Tensor | None] = [registers[r] for r in instruction.reads[: len(instruction.params)]]
        first = instruction.params[0]
        if isinstance(first, ParamTile) and not instruction.staged:
            there = [self._with_tile(instruction, first, there[0], registers)]
        elif not self.accumulation.active:
            gradients = self.store.gradients
            there = (gradients.stage if instruction.staged else gradients.spill)(instruction.params, there)
        # What no_sync holds back is whole, and here; autograd gets marks in its place.
        if not self.accumulation.active and instruction.complete:
            if instruction.target == "host":
                arrived = self.store.locations.hosted.arrival()
                there = self.early.take(instruction.bucket, instruction.params, there, arrived)
            else:
                self.early.wait(LEAVING)
        for register, tensor in zip(instruction.writes, there, strict=True):
            registers[register] = tensor

    def _with_tile(
        self, instruction: Move, tile: ParamTile, grad: Tensor | None, registers: list[Any]
    ) -> Tensor | None:
        """The tensor for autograd in place of a gradient, as one more of its tiles moves."""
        into: Tensor | None = None if tile.begin == 0 else registers[instruction.writes[0]]
        if not self.accumulation.active:
            assert grad is not None
            return self.store.gradients.spill_tile(tile, grad, into)
        return self.accumulation.mark(tile.name) if tile.begin == 0 else into

    def _reduce(self, instruction: Reduce, registers: list[Any]) -> None:
        grads: list[Tensor] = [registers[r] for r in instruction.reads]
        if self.accumulation.active:
            registers[instruction.out] = (None, self.accumulation.hold(instruction.params, grads, self.comm))
        else:
            registers[instruction.out] = (
                instruction.params,
                self.comm.start_reduce(instruction.params, self.accumulation.take(instruction.params, grads)),
            )

    def _wait_reduce(self, instruction: WaitReduce, registers: list[Any]) -> None:
        params, pending = registers[instruction.pending]
        results: list[Tensor | None] = pending
        if params is not None:
            results = list(self.comm.finish_reduce(pending))
            if not instruction.leaves and self.store.gradients.left_behind(params):
                results = self.store.gradients.spill(params, results)
                if instruction.tiles > 1:
                    self.store.gradients.wait()  # before a tile is put in its place
            else:
                here = instruction.updatable
                left = self.early.take(instruction.bucket, [params[k] for k in here], [results[k] for k in here])
                for k, grad in zip(here, left, strict=True):
                    results[k] = grad
        for register, tensor in zip(instruction.writes, results, strict=True):
            registers[register] = tensor


_METHODS: dict[type, str] = {
    Compute: "_compute",
    View: "_view",
    Place: "_place",
    Accumulate: "_accumulate",
    Scale: "_scale",
    Gather: "_gather",
    WaitGather: "_wait_gather",
    Free: "_free",
    Reduce: "_reduce",
    WaitReduce: "_wait_reduce",
    WaitFetch: "_wait_fetch",
    BeginUpdate: "_begin_update",
}


def _method(instruction: Instruction) -> str:
    """The name of the executor's method that runs it."""
    if isinstance(instruction, Move):
        return ("_fetch" if instruction.rises else "_spill") + "_saved" * (instruction.what == "activations")
    return _METHODS[type(instruction)]


def added(total: Tensor | None, terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``total``, in place, plus the one term, or the matrix product of two; the first sum, in ``dtype``, where there is
    none yet."""
    if len(terms) == 2 and total is not None and total.dtype == terms[0].dtype:
        return torch.addmm(total, *terms, out=total)
    term = torch.mm(*terms) if len(terms) == 2 else terms[0]
    if total is not None:
        return total.add_(term)
    # What is computed in 16 bits is rounded once per tile, and not once more with each sum.
    return term.to(dtype, copy=len(terms) == 1)
