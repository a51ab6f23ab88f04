"""The measurements of one rank while all others measure the same: compute, copies, collectives, the optimizer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from zerograph.core.errors import ConfigError
from zerograph.core.layout import Layout
from zerograph.core.machine import DTYPES, Link
from zerograph.core.step import Param
from zerograph.measure.crew import LIMIT
from zerograph.measure.host import host_memory, our_seconds
from zerograph.measure.job import Effort, Gathers, Job, RankReport
from zerograph.measure.timing import ROUNDS, median_of, seconds_of
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.connecting import connect, ranks_of_each, this_host
from zerograph.runtime.comm.paired import PairedCommunicator
from zerograph.runtime.comm.rendezvous import shared

ADAM_BYTES = 28
"""Per float32 element: parameter, gradient and two moments are read, all but the gradient written."""

_GPU_ELEMENTS, _GPU_MATMUL, _GPU_ATTENTION = 16, 8, 8  # a GPU needs larger tensors to be busy
_PARAMETERS = 20  # that share what one step costs beside them
_PIECE = 4 * 2**20  # bytes of collectives per sample
_GATHERS = 5  # samples per round


def work(job: Job, rank: int, store: str, tell: Callable[[str], None]) -> RankReport:
    """Join the group of ``job`` as ``rank``, measure, and leave; ``store`` is a file for the ranks to meet at."""
    torch.set_num_threads(job.threads)
    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" and job.world_size > 1 else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, job.world_size), rank=rank, world_size=job.world_size)
    try:
        assert dist.group.WORLD is not None
        communicator = connect(dist.group.WORLD, device) if job.world_size > 1 else None
        return Lab(device, job, tell, communicator).report()
    finally:
        dist.destroy_process_group()


def work_together(
    device_type: Literal["cuda", "cpu"], effort: Effort, tell: Callable[[str], None], start: Callable[[], None]
) -> Together:
    """Measure as one of the ranks that torchrun has started, on one host or several.

    Args:
        start: called once all ranks are there, which wait until it has ended on all.

    Raises:
        ConfigError: hosts have different numbers of ranks, ranks of several hosts are not numbered host by host, or
            a host has fewer GPUs than ranks.
    """
    local = int(os.environ["LOCAL_RANK"])
    if device_type == "cuda" and local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local} of this host has none of its {torch.cuda.device_count()} GPUs",
            f"torchrun --nproc-per-node {torch.cuda.device_count()}: one rank per GPU",
        )
    device = torch.device("cuda", local) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT))
    try:
        everyone = dist.group.WORLD
        assert everyone is not None
        hosts = shared(everyone, this_host())
        each = ranks_of_each(hosts)
        count = len(set(hosts))
        if each * count != len(hosts):
            raise ConfigError(
                f"{len(hosts)} ranks are not spread evenly over {count} hosts, one host after the other",
                "start as many ranks on each: torchrun --nproc-per-node N",
            )
        groups = [dist.new_group(range(first, first + each)) for first in range(0, len(hosts), each)]
        here = groups[dist.get_rank() // each]
        job = Job(device_type, each, effort)
        torch.set_num_threads(job.threads)
        inside = connect(here, device) if each > 1 else None
        between = connect(everyone, device) if count > 1 else None
        start()
        dist.barrier()
        before = our_seconds()
        report = Lab(device, job, tell if dist.get_rank() == 0 else lambda text: None, inside, between).report()
        mine = report, our_seconds() - before, host_memory()
        reports, seconds, memories = zip(*shared(everyone, mine), strict=True)
        first = dist.get_rank() - dist.get_rank() % each
        of_host = sum(seconds[first : first + each])
        return Together(list(reports), each, of_host - seconds[dist.get_rank()], min(memories))
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Together:
    """The reports of all ranks, how many of them each host has, the CPU seconds of the others of this host, and the
    memory of the host that has least."""

    reports: list[RankReport]
    of_each_host: int
    beside: float
    host_memory: int


@dataclass(frozen=True, slots=True)
class Lab:
    """The measurements on one device. Each begins when all ranks are there, so that they disturb one another."""

    device: torch.device
    job: Job
    tell: Callable[[str], None]
    communicator: Communicator | None  # of this host
    between: Communicator | None = None  # of several hosts

    @property
    def effort(self) -> Effort:
        """How long and how large."""
        return self.job.effort

    def report(self) -> RankReport:
        """The median of all rounds, and every all-gather of them."""
        rounds = []
        for number in range(1, ROUNDS + 1):
            self.tell(f"round {number} of {ROUNDS}")
            rounds.append(self.round())
        gathers, between = ([getattr(each, name) for each in rounds] for name in ("gathers", "between"))
        return replace(median_of(rounds), gathers=_by_size(gathers), between=_by_size(between))

    def seconds(self, call: Callable[[], object], share: float = 1.0) -> float:
        """Median seconds of ``call`` in this round, tried for that share of the seconds of a measurement."""
        return seconds_of(call, self.finish, share * self.effort.seconds / ROUNDS)

    def round(self) -> RankReport:
        """Everything once, in order."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else 0
        matmul = {dtype: self.matmul(dtype) for dtype in DTYPES}
        attention = {dtype: self.attention(dtype) for dtype in DTYPES}
        h2d, d2h = self.copies()
        furthest = self.between or self.communicator
        return RankReport(
            torch=torch.__version__,
            transport=furthest.name if furthest is not None else "no collectives",
            device_memory=free,
            bandwidth=self.bandwidth(),
            matmul=matmul,
            attention=attention,
            launch=self.launch(),
            h2d=h2d,
            d2h=d2h,
            gathers=self.gathers(self.communicator, "all-gathers"),
            between=self.gathers(self.between, "all-gathers between hosts"),
            two_levels=isinstance(self.between, PairedCommunicator),
            update=self.update(),
            optimizer=self.optimizer(),
            gpu=torch.cuda.get_device_name(self.device) if self.on_gpu else "",
        )

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    def matmul(self, dtype: str) -> float:
        """Operations per second of a large product; of a smaller one where ``dtype`` is emulated, and slow."""
        self.begin(f"matrix products in {dtype}")
        rows = self.effort.matmul * (_GPU_MATMUL if self.on_gpu else 1)
        seconds = self.seconds(self.product(rows // 4, dtype), 1 / 4)
        # A product of four times the rows takes 4**3 times as long.
        if 64 * seconds > self.effort.seconds:
            return 2 * (rows // 4) ** 3 / seconds
        return 2 * rows**3 / self.seconds(self.product(rows, dtype))

    def product(self, rows: int, dtype: str) -> Callable[[], object]:
        """Computes a product of square matrices."""
        a, b = (torch.rand(rows, rows, device=self.device).to(getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    def attention(self, dtype: str) -> float:
        """Operations per second of causal attention, forward and backward, as if it computed all pairs of positions."""
        self.begin(f"attention in {dtype}")
        tokens = self.effort.attention * (_GPU_ATTENTION if self.on_gpu else 1)
        shape = (1, *((16, tokens, 128) if self.on_gpu else (8, tokens, 64)))
        query, key, value = (
            torch.rand(shape, device=self.device).to(getattr(torch, dtype)).requires_grad_() for _ in range(3)
        )
        gradient = torch.ones_like(query)

        def attend() -> None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, (query, key, value), gradient)

        # Of all pairs two products forward, and five backward, as steps count them.
        return 14 * query.numel() * tokens / self.seconds(attend)

    def bandwidth(self) -> float:
        """Bytes per second that adding two large tensors reads and writes."""
        self.begin("memory bandwidth")
        a, b, out = (self.large() for _ in range(3))
        return 3 * a.nbytes / self.seconds(lambda: torch.add(a, b, out=out))

    def launch(self) -> float:
        """Seconds of the smallest operation."""
        self.begin("operations that do nothing")
        x = torch.zeros(1, device=self.device)
        return self.seconds(lambda: x.add_(1.0), 1 / 4)

    def copies(self) -> tuple[Link, Link]:
        """To the device and back, from pinned memory; on a CPU twice a plain copy."""
        self.begin("copies between host and device" if self.on_gpu else "memory copies")
        device = self.large()
        host = torch.zeros(device.numel(), pin_memory=self.on_gpu, device="cpu")
        up = self.copy(device, host)
        return up, self.copy(host, device) if self.on_gpu else up

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Link:
        """The rate of a large copy and the time of a tiny one."""
        tiny, tiny_source = to[:16], source[:16]
        seconds = self.seconds(lambda: to.copy_(source, non_blocking=True), 1 / 2)
        least = self.seconds(lambda: tiny.copy_(tiny_source, non_blocking=True), 1 / 8)
        return Link(to.nbytes / seconds, least)

    def gathers(self, communicator: Communicator | None, text: str) -> Gathers:
        """The seconds of this round's all-gathers."""
        if communicator is None:
            return ()
        self.begin(text)
        return tuple(self.gather(communicator, size) for size in self.effort.gathers)

    def gather(self, communicator: Communicator, size: int) -> tuple[int, tuple[tuple[float, ...]]]:
        """Bytes of the full tensor, and this round's seconds of all-gathers of it; the first ones are not counted.

        On a CPU each follows a product, as in training, whose operands are then in the caches. In a loop of nothing
        else 1 MiB takes 0.40 and 4 MiB 0.53 of the CPU time.
        """
        call, size = self.gathering(communicator, size)
        ready, _ = self.gathering(communicator, 4 * communicator.world_size)
        before = self.product(self.effort.matmul, "float32") if not self.on_gpu else lambda: None
        count = min(32, max(1, _PIECE // size)) if self.on_gpu else 1
        samples = []
        for _ in range(2 + _GATHERS):  # two to warm up
            before()
            dist.barrier()
            ready()  # ranks leave a barrier one after another, and this together
            self.finish()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            self.finish()
            samples.append((time.perf_counter() - begin) / count)
        return size, (tuple(samples[2:]),)

    def gathering(self, communicator: Communicator, size: int) -> tuple[Callable[[], object], int]:
        """Gathers a tensor of about ``size`` bytes, and how many they are."""
        world = communicator.world_size
        shard = torch.ones(size // 4 // world, device=self.device)
        param = Param(
            name="measured", shape=(shard.numel() * world,), dtype="float32", compute_dtype="float32",
            reduce_dtype="float32", trainable=False, home=Layout("rows", world),
        )  # fmt: skip
        call = lambda: communicator.finish_gather(communicator.start_gather([param], [shard]))  # noqa: E731
        return call, shard.nbytes * world

    def update(self) -> Link:
        """AdamW as it comes, over shards: what a tiny parameter costs, and the rate of large ones beyond that."""
        self.begin("AdamW on the device")
        least = self.updated(_PARAMETERS, 16) / _PARAMETERS
        large = self.effort.elements // 4 * (_GPU_ELEMENTS if self.on_gpu else 1)
        return Link(ADAM_BYTES * large / max(self.updated(1, large) - least, least), least)

    def updated(self, count: int, elements: int) -> float:
        """Seconds of one step over ``count`` parameters, of each of which this rank has ``elements``."""
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, self.device.type)
        params = []
        for _ in range(count):
            rows = [DTensor.from_local(torch.ones(elements, device=self.device), mesh, [Shard(0)]) for _ in range(2)]
            params.append(torch.nn.Parameter(rows[0]))
            # DTensors, as in training: they cost the host more than plain tensors.
            params[-1].grad = rows[1]
        return self.seconds(torch.optim.AdamW(params).step, 1 / 2)

    def optimizer(self) -> float:
        """Bytes per second that torch's fused AdamW reads and writes on the host, with this rank's threads."""
        self.begin("AdamW on the host")
        param = torch.nn.Parameter(torch.zeros(self.effort.elements, device="cpu"))
        param.grad = torch.ones_like(param)
        step = torch.optim.AdamW([param], fused=True).step
        return ADAM_BYTES * param.numel() / self.seconds(step)

    def large(self) -> torch.Tensor:
        """A float32 tensor that no cache holds."""
        return torch.zeros(self.effort.elements * (_GPU_ELEMENTS if self.on_gpu else 1), device=self.device)

    def begin(self, text: str) -> None:
        """Say what is measured, and wait for the others."""
        self.tell(f"measuring {text}")
        dist.barrier()

    def finish(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def _by_size(rounds: Sequence[Gathers]) -> Gathers:
    return tuple((same[0][0], tuple(each for _, (each,) in same)) for same in zip(*rounds, strict=True))
