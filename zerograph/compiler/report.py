"""The decisions of a backend and the events of its run, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zerograph.compiler.frame import Frame
from zerograph.compiler.lowering.segments import SegmentCache
from zerograph.compiler.torch_private import graph_breaks
from zerograph.core.config import Stage
from zerograph.core.plan import Bucket
from zerograph.core.units import counted, format_bytes, format_ranks
from zerograph.core.wire import Wires
from zerograph.planner.profile.loss import why_untiled
from zerograph.planner.programs.process_memory import Resident
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.executor.telemetry import Telemetry
from zerograph.runtime.offload.shards import ShardStore


@dataclass(frozen=True, slots=True)
class BucketReport:
    """One bucket of one frame; ``bytes`` is its size when unsharded."""

    frame: int
    name: str
    params: tuple[str, ...]
    bytes: int
    residency: str
    tiles: int = 1

    @classmethod
    def of(cls, frame: int, bucket: Bucket) -> BucketReport:
        """What is decided for ``bucket`` of frame number ``frame``."""
        names, size = tuple(p.name for p in bucket.params), bucket.gathered_bytes
        return cls(frame, bucket.name, names, size, bucket.residency, bucket.tiles)


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """Tiles of tokens that head and loss run in, and that so many ``layers``, or their MLPs, run in."""

    loss: int
    layer: int
    layers: int
    by_sample: bool

    def __str__(self) -> str:
        loss = f"head and loss in {self.loss} tiles of tokens" if self.loss > 1 else ""
        layers = f"{counted(self.layers, 'layer')} in {self.layer}"
        layers = f"{layers} parts of the batch" if self.by_sample else f"MLPs of {layers} tiles of tokens"
        return ", ".join(part for part in (loss, layers if self.layer > 1 else "") if part)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step beside its forecasts.

    Attributes:
        seconds: of the step.
        forecast_seconds: by the rates of ``machine``, which plans go by.
        retimed_seconds: by the run's own seconds per segment and transfer: what is left is how they overlap.
        machine: name of the preset or of what was measured.
        peak, forecast_peak: bytes of this rank.
        resident: the forecast of what a process on CPU grows by.
    """

    seconds: float
    forecast_seconds: float
    retimed_seconds: float
    machine: str
    peak: int
    forecast_peak: int
    resident: Resident | None = None

    def __str__(self) -> str:
        return (
            f"recorded step {self.seconds:.3f} s; forecast {self._against(self.forecast_seconds)} by the rates of "
            f"{self.machine}, {self._against(self.retimed_seconds)} by its own seconds; "
            f"peak {format_bytes(self.peak)}, forecast {format_bytes(self.forecast_peak)} "
            f"({self.forecast_peak / self.peak - 1:+.0%})"
        )

    def _against(self, forecast: float) -> str:
        return f"{forecast:.3f} s ({forecast / self.seconds - 1:+.0%})"


@dataclass(frozen=True, slots=True)
class Report:
    """Returned by ``backend.report()``; ``print`` it.

    Attributes:
        stage: as the backend was given it.
        world_size: ranks that the model is sharded over.
        transport: how they exchange tensors.
        buckets: every bucket of every frame.
        programs: programs of all frames.
        segments: segments in all programs; ``distinct_segments`` of them were compiled.
        compile_seconds: time in passes, lowering and segment compilation (not in tracing).
        graph_breaks: reason and count of each graph break in this process since the backend was made, those of other
            backends included: Dynamo does not tell them apart.
        runs: executions per kind of program.
        peak_whole_buckets: most buckets that were unsharded at one time.
        on_nvme: bytes on NVMe, of this rank: parameters (masters, where these have copies), their copies in the compute
            dtype, gradients, optimizer states.
        slots: bytes of memory that updates stream them through.
        on_host: bytes in the memory of an accelerator's host, of this rank, which its allocator does not count:
            parameters, their copies in the compute dtype, gradients, slots; not optimizer states.
        token_tiles: by frame, tiles of tokens that head and loss run in, and those of the MLPs of some layers.
        whole_logits: by frame, why its logits, or those of a second head, exist for all tokens at once.
        recorded: the last step that ``backend.record()`` recorded.
        replicas: ranks that have the same shards.
        wires: what matrices are gathered as, and their gradients sent as.
    """

    stage: Stage
    world_size: int
    transport: str
    buckets: tuple[BucketReport, ...]
    programs: int
    segments: int
    distinct_segments: int
    compile_seconds: float
    graph_breaks: dict[str, int]
    runs: dict[str, int]
    peak_whole_buckets: int
    on_nvme: Mapping[str, int] = field(default_factory=dict)
    slots: int = 0
    on_host: Mapping[str, int] = field(default_factory=dict)
    token_tiles: Mapping[int, TokenTiles] = field(default_factory=dict)
    whole_logits: Mapping[int, str] = field(default_factory=dict)
    recorded: RecordedStep | None = None
    replicas: int = 1
    wires: Wires = Wires()  # noqa: RUF009  immutable

    @classmethod
    def of(
        cls,
        stage: Stage,
        world_size: int,
        replicas: int,
        communicator: Communicator | None,
        frames: Sequence[Frame],
        segments: SegmentCache,
        telemetry: Telemetry,
        store: ShardStore,
        breaks_before: Mapping[str, int],
        recorded: RecordedStep | None,
    ) -> Report:
        """The report of a backend with these ``frames``, before which the process had ``breaks_before``."""
        compiled = [f for f in frames if f.programs]
        return cls(
            stage=stage,
            world_size=world_size,
            replicas=replicas,
            transport=communicator.name if communicator is not None else "no communication",
            buckets=tuple(BucketReport.of(f.index, bucket) for f in compiled for bucket in f.plan.buckets),
            programs=sum(len(f.programs) for f in compiled),
            segments=segments.requested,
            distinct_segments=len(segments.callables),
            compile_seconds=sum(f.seconds for f in frames),
            graph_breaks=dict(Counter(graph_breaks()) - Counter(breaks_before)),
            runs=dict(telemetry.runs),
            peak_whole_buckets=telemetry.peak_unsharded,
            on_nvme=store.bytes(),
            slots=store.slots.bytes,
            on_host=store.on_host(),
            token_tiles={
                f.index: TokenTiles(f.plan.loss_tiles, f.plan.token_tiles, len(f.plan.token_regions), f.plan.by_sample)
                for f in compiled
            },
            whole_logits={f.index: why for f in compiled if (why := why_untiled(f.step, f.plan.loss_tiles))},
            recorded=recorded,
            wires=next((f.compilation.wires for f in compiled), Wires()),
        )

    def __str__(self) -> str:
        lines = [
            f"ZeroGraph stage {self.stage} on {format_ranks(self.world_size, self.replicas)}, {self.transport}",
            f"  {self.programs} programs, {self.segments} segments of which {self.distinct_segments} distinct, "
            f"compiled in {self.compile_seconds:.1f} s",
            f"  runs: {', '.join(f'{n} {kind}' for kind, n in self.runs.items()) or 'none yet'}; "
            f"at most {self.peak_whole_buckets} buckets whole at a time",
        ]
        if any(self.wires):
            gathered, reduced = (wire or "they are" for wire in self.wires)
            lines.append(f"  matrices are gathered as {gathered}; gradients of them are sent as {reduced}")
        if self.on_nvme:
            sizes = ", ".join(f"{what} {format_bytes(size)}" for what, size in self.on_nvme.items())
            lines.append(f"  on NVMe: {sizes}; updates stream through {format_bytes(self.slots)} of memory")
        if self.on_host:
            lines.append(f"  on the host: {', '.join(f'{what} {format_bytes(n)}' for what, n in self.on_host.items())}")
        lines += [f"  frame {frame}: {tiles}" for frame, tiles in self.token_tiles.items() if str(tiles)]
        lines += [f"  frame {frame}: logits are whole: {why}" for frame, why in self.whole_logits.items()]
        if self.recorded is not None:
            lines.append(f"  {self.recorded}")
            if self.recorded.resident is not None:
                lines.append(f"  {self.recorded.resident}")
        lines += [
            f"  frame {b.frame}  {b.name:32s} {len(b.params):4d} parameters  {format_bytes(b.bytes):>9s}  {b.residency}"
            + (f", in {b.tiles} tiles of {format_bytes(b.bytes // b.tiles)}" if b.tiles > 1 else "")
            for b in self.buckets
        ]
        lines += [
            f"  graph break x{n} in this process: {reason.splitlines()[0]}" for reason, n in self.graph_breaks.items()
        ]
        return "\n".join(lines)
