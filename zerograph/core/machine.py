"""The machine a step runs on, as data: memories, how fast each computes, and the links between them. No torch in here.

Capacities are bytes, rates bytes or floating-point operations per second, times seconds. Presets give what vendors
publish times the share of it that training reaches; ``zerograph bench`` measures the machine at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from zerograph.core.errors import ConfigError
from zerograph.core.files.kinds import read_as, versioned
from zerograph.core.units import counted, is_number

VERSION = 3

OffloadTier = Literal["host", "nvme"]
OFFLOAD_TIERS: tuple[OffloadTier, ...] = ("host", "nvme")
"""The tiers that something may leave the device for, from near to far."""
Tier = Literal["device", OffloadTier]
TIERS: tuple[Tier, ...] = ("device", *OFFLOAD_TIERS)
DISKS: frozenset[Tier] = frozenset({"nvme"})
"""The tiers whose tensors lie in files, which the host alone reads and writes."""
TIER_NAMES: Mapping[Tier, str] = {"device": "device", "host": "host", "nvme": "NVMe"}
"""As people call them."""
Way = Literal["h2d", "d2h", "nvme_read", "nvme_write"]
LINKS: Mapping[tuple[Tier, Tier], Way] = {
    ("host", "device"): "h2d",
    ("device", "host"): "d2h",
    ("nvme", "host"): "nvme_read",
    ("host", "nvme"): "nvme_write",
}
"""The tiers between which bytes move at once, by the link of a :class:`Machine` that they take, which is also the name
of the stream that they occupy. On a CPU the host's memory is the device's."""
DTYPES = ("float32", "bfloat16", "float16")
Precision = Literal["highest", "high"]
PRECISIONS: tuple[Precision, ...] = ("highest", "high")
"""How float32 products are computed, in torch's words (``torch.set_float32_matmul_precision``)."""


def is_disk(tier: str | None) -> bool:
    """Whether ``tier`` is one of :data:`DISKS`."""
    return tier in DISKS


def memory_name(tier: Tier) -> str:
    """The memory of ``tier``, for people: "host memory" or "NVMe"."""
    return TIER_NAMES[tier] + ("" if is_disk(tier) else " memory")


def offload_tier(choice: object) -> Tier:
    """The tier that ``choice``, an argument that may name one, moves something to: the device where it names none."""
    return next((tier for tier in OFFLOAD_TIERS if tier == choice), "device")


def hops(source: Tier, target: Tier, staging: Tier) -> tuple[tuple[Tier, Tier], ...]:
    """The :data:`LINKS` that bytes take from ``source`` to ``target``, one behind another.

    Tiers that are no neighbours are linked by the host. Where buffers of disks are on the device (``staging``), the
    host's memory is the device's, and a disk is the device's neighbour.
    """
    if (source, target) in LINKS:
        return ((source, target),)
    through: tuple[tuple[Tier, Tier], ...] = ((source, "host"), ("host", target))
    return tuple(hop for hop in through if staging == "host" or "device" not in hop)


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes: ``latency`` seconds, then ``rate`` bytes per second."""

    rate: float
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """Time for ``size`` bytes; nothing takes no time."""
        return self.latency + size / self.rate if size else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of node, and how nodes are connected. Rates are those of one rank unless said otherwise.

    Attributes:
        name: of the preset, or of the host that was measured.
        device: "cuda" or "cpu".
        device_memory: bytes a rank may use on its device. On a CPU this is the host's memory over its ranks.
        context: of these, bytes that the driver's context takes, with the kernels that torch loads; 0 where
            ``device_memory`` are those that were free beside it.
        communicator: of these, bytes that one of NCCL's communicators takes for its buffers; 0 likewise.
        device_bandwidth: bytes per second that element-wise kernels read and write. Such code counts as the bytes that
            it moves once fused: its operations are not known before a compiler has fused it, and on GPUs they come
            second. Where they do not (long chains of exp or erf on a CPU), a run's own times tell.
        matmul: floating-point operations per second of large matrix products, by dtype. Where there is "tf32" too, it
            is what "float32" products come to once torch may round them so (:meth:`with_precision`).
        attention: floating-point operations per second of fused attention, causal, forward and backward, by dtype, if
            all pairs of positions count, as they do in steps. A dtype that is not there has the rate of ``matmul``.
        launch: seconds that a kernel costs however small it is.
        ranks_per_node: devices that share a host.
        host_memory: bytes per node.
        nvme_capacity: bytes per node; 0 where there is none.
        nvme_read, nvme_write: per node.
        nvme_both: bytes per second and node that reads and writes come to while both go on; 0 where that was not
            measured, and they are taken not to disturb each other.
        h2d, d2h: host to device and back; on a CPU, a copy.
        intra, inter: collectives inside a node, and between nodes: bytes per second of the full tensor that a rank
            sends or receives (bus bandwidth), and the latency of one collective.
        intra_step, inter_step: seconds that each further rank of a node, and each further node, adds to that latency: a
            ring passes every piece on from rank to rank. 0 where the latency was measured with all ranks.
        update: torch's AdamW as it comes, over sharded parameters on the device: bytes per second, where a parameter,
            its gradient and states are counted once each way, and seconds for each parameter, however small. It runs
            several kernels per parameter, or per group of them, and DTensors cost the host more than that.
        cpu_optimizer: bytes of states per second and node that an Adam update on the host reads and writes.
        published: floating-point operations per second of dense products that the vendor publishes, by the same names
            as ``matmul``; empty where nobody does. MFU is relative to it.
        split: of a CPU: its host counts as a second memory, as if the device had one of its own. It lets programs that
            move between the two run where there is no GPU.
        disturbed: the share of the processors that other processes took while the rates were measured, if that was
            enough to make them too low; else 0.
    """

    name: str
    device: Literal["cuda", "cpu"]
    device_memory: int
    device_bandwidth: float
    matmul: Mapping[str, float] = field(hash=False)
    launch: float
    ranks_per_node: int
    host_memory: int
    nvme_capacity: int
    nvme_read: Link
    nvme_write: Link
    h2d: Link
    d2h: Link
    intra: Link
    inter: Link
    update: Link
    cpu_optimizer: float
    published: Mapping[str, float] = field(default_factory=dict, hash=False)
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)
    context: int = 0
    communicator: int = 0
    intra_step: float = 0.0
    inter_step: float = 0.0
    nvme_both: float = 0.0
    split: bool = False
    disturbed: float = 0.0
    notes: str = field(default="", compare=False)

    @property
    def has_host(self) -> bool:
        """Whether the host's memory is another one than the device's."""
        return self.device != "cpu" or self.split

    @property
    def staging(self) -> Tier:
        """The tier of the buffers that disks read and write: the host's memory, which on a CPU is the device's."""
        return "host" if self.has_host else "device"

    @property
    def title(self) -> str:
        """The name, and a word where the rates are not to be trusted."""
        return f"{self.name} (measured while others took {self.disturbed:.0%} of it)" if self.disturbed else self.name

    def with_precision(self, precision: Precision) -> Machine:
        """This machine where torch computes float32 products so: "high" is TF32 where the device has it."""
        if precision == "highest" or "tf32" not in self.matmul:
            return self
        # Without a published rate of TF32 none is published of such products; other dtypes keep theirs.
        published = {dtype: rate for dtype, rate in self.published.items() if dtype != "float32"}
        if "tf32" in published:
            published["float32"] = published["tf32"]
        return replace(self, matmul={**self.matmul, "float32": self.matmul["tf32"]}, published=published)

    def peak_rate(self, dtype: str) -> tuple[float, Literal["published", "measured"]]:
        """Operations per second that utilization of products in ``dtype`` is relative to, and where they are from: the
        published rate, or where none is published, the measured one."""
        if dtype in self.published:
            return self.published[dtype], "published"
        return self.matmul.get(dtype, 0.0), "measured"

    def product_rate(self, dtype: str) -> float:
        """Operations per second of products in ``dtype``; of one that is not known those of float32."""
        return self.matmul.get(dtype, self.matmul["float32"])

    def attention_rate(self, dtype: str) -> float:
        """Operations per second of fused attention in ``dtype``."""
        return self.attention.get(dtype, self.product_rate(dtype))

    def collective(self, ranks: int, stride: int = 1) -> Link:
        """The link that bounds a collective over so many ranks, each ``stride``-th of all, in a ring."""
        nodes = min(ranks, self.nodes(ranks * stride))
        link = self.intra if ranks * stride <= self.ranks_per_node else self.inter
        steps = (ranks - nodes) * self.intra_step + (nodes - 1) * self.inter_step
        return replace(link, latency=link.latency + steps)

    def nodes(self, world_size: int) -> int:
        """Nodes that ``world_size`` ranks need."""
        return -(-world_size // self.ranks_per_node)

    def hosts(self, world_size: int) -> int:
        """Nodes whose ranks communicate in two levels, between nodes and inside of each through its memory: those of
        CPUs, full of ranks; else 1."""
        full = self.device == "cpu" and world_size % self.ranks_per_node == 0
        return self.nodes(world_size) if full and self.ranks_per_node > 1 else 1

    def per_host(self, world_size: int) -> int | None:
        """Ranks of each of :meth:`hosts`, where there are several; else None."""
        return self.ranks_per_node if self.hosts(world_size) > 1 else None

    def describe_hosts(self, world_size: int, replicas: int = 1) -> str:
        """The hosts that so many CPU ranks need, for people: "2 hosts of 2 ranks"; empty for one host, and for GPUs,
        whose hosts are NCCL's to know."""
        ranks = world_size * replicas
        nodes, here = self.nodes(ranks), self.ranks_per_node
        if self.device != "cpu" or nodes == 1:
            return ""
        of = counted(here, "rank")
        if ranks % here:
            return f"{nodes} hosts of up to {of}, which communicate in one level"
        return f"{nodes} hosts of {of}" + (", which communicate in two levels" if self.hosts(world_size) > 1 else "")

    def capacity(self, tier: Tier, world_size: int) -> int:
        """Bytes that one of ``world_size`` ranks may use on ``tier``."""
        if tier == "device":
            return self.device_memory
        ranks = min(world_size, self.ranks_per_node)
        if tier == "host":
            # On a CPU the host's memory is the device's: offloading there frees nothing.
            return self.host_memory // ranks if self.has_host else 0
        return self.nvme_capacity // ranks

    def link(self, source: Tier, target: Tier, *, both: bool = False) -> Link:
        """The link from ``source`` to its neighbour ``target``; ``both`` while as many bytes go the other way."""
        link: Link = getattr(self, LINKS[source, target])
        shared = self.nvme_both if both and (is_disk(source) or is_disk(target)) else 0.0
        return replace(link, rate=min(link.rate, shared / 2)) if shared else link

    def outside(self, world_size: int, replicas: int = 1) -> dict[str, int]:
        """Bytes of a rank's device that torch's allocator cannot have, by what takes them: gathers, reductions and
        averages over replicas have a communicator each."""
        communicators = 2 * (world_size > 1) + (replicas > 1)
        takes = {"driver's context": self.context, "NCCL's buffers": communicators * self.communicator}
        return {what: size for what, size in takes.items() if size}

    def budget(self, world_size: int, reserve: float = 0.0) -> dict[Tier, int]:
        """:meth:`capacity` of every tier, without the share ``reserve``, of the device at least without what is
        :meth:`outside` of torch's allocator."""
        found = {tier: int(self.capacity(tier, world_size) * (1 - reserve)) for tier in TIERS}
        most = self.device_memory - sum(self.outside(world_size).values())
        return {**found, "device": max(0, min(found["device"], most))}

    def with_memory(self, device_memory: int | None) -> Machine:
        """This machine where a rank may use so many bytes of its device for tensors, beside all that is outside of
        torch's allocator; itself where None are given."""
        if device_memory is None:
            return self
        return replace(self, device_memory=device_memory, context=0, communicator=0)

    def to_json(self) -> str:
        """Indented JSON with the format's version."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The machine that :meth:`to_json` wrote.

        Raises:
            ConfigError: another version, or not a machine.
        """
        hint = f"give a preset ({', '.join(PRESETS)}), or a file: {_MADE}"
        data = versioned(text, "a machine", VERSION, hint, "measure it again")
        del data["version"]
        try:
            data |= {name: Link(**data[name]) for name in _LINKS}
            machine = cls(**data)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the machine is incomplete: {error}", "measure it again") from None
        wrong = next(machine._mistakes(), None)
        if wrong is not None:
            raise ConfigError(f"the machine is wrong: {wrong}", "mend the file, or measure the machine again")
        return machine

    def _mistakes(self) -> Iterator[str]:
        """The mistakes in a machine: rates and sizes that are no numbers, nothing, or less than nothing."""
        if self.device not in ("cuda", "cpu"):
            yield f"device is {self.device!r}, not cuda or cpu"
        if self.split is not False and not (self.split is True and self.device == "cpu"):
            yield f"split is {self.split!r} of a {self.device}: only a CPU can be told so, with true"
        least = dict.fromkeys(("device_memory", "ranks_per_node"), 1)
        least |= dict.fromkeys(("host_memory", "nvme_capacity", "context", "communicator"), 0)
        for name, number in least.items():
            value = getattr(self, name)
            if not (is_number(value, int) and value >= number):
                yield f"{name} is {value!r}, not a whole number of at least {number}"
        rates = {"device_bandwidth": self.device_bandwidth, "cpu_optimizer": self.cpu_optimizer}
        if isinstance(self.matmul, Mapping) and set(DTYPES) <= set(self.matmul):
            rates |= {f"matmul of {dtype}": rate for dtype, rate in self.matmul.items()}
        else:
            yield f"matmul has not one rate for each of {', '.join(DTYPES)}"
        for name, text in (("published", "published rate"), ("attention", "attention")):
            by_dtype = getattr(self, name)
            if isinstance(by_dtype, Mapping):
                rates |= {f"{text} of {dtype}": rate for dtype, rate in by_dtype.items()}
            else:
                yield f"{name} is {by_dtype!r}, not rates by dtype"
        if not (is_number(self.disturbed) and 0 <= self.disturbed <= 1):
            yield f"disturbed is {self.disturbed!r}, not a share from 0 to 1"
        may_be_0 = {"nvme_both": self.nvme_both, "intra_step": self.intra_step, "inter_step": self.inter_step}
        for name in _LINKS:
            link = getattr(self, name)
            # A machine without NVMe says 0 for its rates.
            if self.nvme_capacity or not name.startswith("nvme"):
                rates[f"rate of {name}"] = link.rate
            may_be_0[f"latency of {name}"] = link.latency
        for name, value in may_be_0.items():
            if not (is_number(value) and value >= 0):
                yield f"{name} is {value!r}, not a number of at least 0"
        for name, rate in rates.items():
            if not (is_number(rate) and rate > 0):
                yield f"{name} is {rate!r}, not a rate above 0"


_MADE = "`zerograph bench -o machine.json` writes a machine"
_LINKS = ("nvme_read", "nvme_write", "h2d", "d2h", "intra", "inter", "update")
GB, TB, GIB = 10**9, 10**12, 2**30
_REACHED = 0.6
"""Share of the published matrix rate that large transformer layers reach (ZeRO-Infinity and Megatron report 0.4 to
0.6 for whole steps, of which products are the larger part)."""
_REACHED_BY_A100 = 230 / 312
"""Large products of an A100 in 16 bits were measured at so many TFLOP/s of those published (Li, 2022,
"transformers-benchmarks"); its power does not bound them as that of an H100 does."""

_FOREACH = 7 / 21
"""The tensors that AdamW has to move at least (7), over those that its multi-tensor kernels move (21): decay 2, first
moment 3, second moment 5, its root 2, bias correction 2, eps 2, and the step itself 5."""
_PER_DTENSOR = 6e-5
"""Seconds of the host per parameter of a multi-tensor update of DTensors; measured on a CPU, which it is bound by."""

_RING, _STEP, _NODE_STEP = 8.4e-6, 3.4e-6, 1.4e-5
"""Seconds of a collective on NCCL's rings: of any, per step between GPUs behind NVLink, and per step between nodes. Its
own model of the protocol for large messages has these ("Simple", src/graph/tuning.cc of NCCL 2.18 to 2.28)."""


_CONTEXT = 426 * 2**20
"""Bytes that a process takes on a GPU before it has a tensor there: torch 2.10 with CUDA 13.0, on an RTX 6000 Ada, with
kernels loaded as they are needed (unsloth-zoo, pull request 1053). Others report 400 MB (pytorch, issue 109888)."""
_CHANNEL = 12 * 2**20
"""Bytes of one channel of a ring. A rank receives into 4 MiB (``NCCL_BUFFSIZE``), 0.5 MiB and 4.7 MiB for the protocols
Simple, LL and LL128, in allocations of whole 2 MiB, which are 10 MiB, and sends from 2 MiB more: so counted in NCCL's
log of 8 H100 (nccl, issue 1685). Since NCCL 2.22 other algorithms are connected where they are used, and gathers and
reductions over shards use rings. NVLink SHARP, where NCCL chooses it, has more buffers, which are not counted."""


def _gpu(
    name: str, memory: int, bandwidth: float, tflops_16: float, tflops_32: float, *, link: float, inter: float,
    pcie: float, host: int, ranks: int = 8, nvme: int = 28 * TB, nvme_rate: float = 25 * GB,
    tf32: float | None = None, bf16: bool = True, cpu_bandwidth: float = 150 * GB, reached: float = _REACHED,
    channels: int = 24,
) -> Machine:  # fmt: skip
    # NCCL's logs of 8 A100 or H100 behind NVSwitch have 24 channels, those of a DGX-2 12.
    # V100 has no units for bfloat16, which then runs at the rate of float32.
    published = {"float32": tflops_32, "bfloat16": tflops_16 if bf16 else tflops_32, "float16": tflops_16}
    published = {dtype: 1e12 * rate for dtype, rate in (published | ({"tf32": tf32} if tf32 else {})).items()}
    return Machine(
        name=name,
        device="cuda",
        device_memory=memory,
        device_bandwidth=0.8 * bandwidth,
        matmul={dtype: rate * reached for dtype, rate in published.items()},
        launch=5e-6,
        ranks_per_node=ranks,
        host_memory=host,
        nvme_capacity=nvme,
        nvme_read=Link(nvme_rate, 1e-4),
        nvme_write=Link(0.8 * nvme_rate, 1e-4),
        h2d=Link(0.8 * pcie, 1e-5),
        d2h=Link(0.8 * pcie, 1e-5),
        intra=Link(link, _RING),
        inter=Link(inter, _RING),
        intra_step=_STEP,
        inter_step=_NODE_STEP,
        update=Link(0.8 * bandwidth * _FOREACH, _PER_DTENSOR),
        cpu_optimizer=cpu_bandwidth,
        published=published,
        context=_CONTEXT,
        communicator=channels * _CHANNEL,
        notes="from published figures, times the share that training reaches",
    )


PRESETS: Mapping[str, Machine] = {
    m.name: m
    for m in (
        # 16 GPUs behind NVSwitch, PCIe 3.0; ZeRO-Infinity's machine: 1.5 TB host, 28 TB NVMe at 25 GB/s read.
        _gpu(
            "v100-32gb-dgx2", 32 * GIB, 900 * GB, 125, 15.7, link=120 * GB, inter=40 * GB,
            pcie=12.8 * GB, host=int(1.5 * TB), ranks=16, bf16=False, cpu_bandwidth=100 * GB, channels=12,
        ),
        _gpu(
            "a100-40gb", 40 * GIB, 1555 * GB, 312, 19.5, link=230 * GB, inter=160 * GB,
            pcie=32 * GB, host=TB, tf32=156, reached=_REACHED_BY_A100,
        ),
        _gpu(
            "a100-80gb", 80 * GIB, 2039 * GB, 312, 19.5, link=230 * GB, inter=160 * GB,
            pcie=32 * GB, host=2 * TB, tf32=156, reached=_REACHED_BY_A100,
        ),
        _gpu(
            "h100-80gb", 80 * GIB, 3350 * GB, 989, 67, link=360 * GB, inter=320 * GB,
            pcie=64 * GB, host=2 * TB, tf32=495, cpu_bandwidth=300 * GB,
        ),
        _gpu(
            "h200-141gb", 141 * GB, 4800 * GB, 989, 67, link=360 * GB, inter=320 * GB,
            pcie=64 * GB, host=2 * TB, tf32=495, cpu_bandwidth=300 * GB,
        ),
        # One GPU and 480 GB of LPDDR5 behind NVLink-C2C: 450 GB/s each way.
        _gpu(
            "gh200", 96 * GB, 4000 * GB, 989, 67, link=40 * GB, inter=40 * GB,
            pcie=450 * GB, host=480 * GB, ranks=1, tf32=495, nvme=4 * TB, nvme_rate=6 * GB, cpu_bandwidth=300 * GB,
        ),
        Machine(
            name="cpu",
            device="cpu",
            device_memory=12 * GIB,
            device_bandwidth=8 * GB,
            matmul={"float32": 9e10, "bfloat16": 9e10, "float16": 9e10},
            launch=5e-6,
            ranks_per_node=2,
            host_memory=24 * GIB,
            nvme_capacity=100 * GB,
            nvme_read=Link(2 * GB, 1e-4),
            nvme_write=Link(GB, 1e-4),
            h2d=Link(8 * GB),
            d2h=Link(8 * GB),
            intra=Link(3 * GB, 1e-4),
            inter=Link(GB, 1e-3),
            update=Link(3 * GB, 7e-4),
            cpu_optimizer=10 * GB,
            notes="two ranks of one thread each on a small server; measure yours with `zerograph bench`",
        ),
    )
}  # fmt: skip


def machine_named(name: str, device_memory: int | None = None) -> Machine:
    """The preset ``name``, with another ``device_memory`` when that is given.

    Raises:
        ConfigError: no preset of that name.
    """
    if name not in PRESETS:
        meant = ", ".join(get_close_matches(name, PRESETS)) or f"one of {', '.join(PRESETS)}"
        raise ConfigError(
            f"no machine {name!r}, and no file of that name", f"{meant}, or a file from `zerograph bench`"
        )
    return PRESETS[name].with_memory(device_memory)


def machine_from(name: str, device_memory: int | None = None) -> Machine:
    """The preset ``name``, or what ``zerograph bench`` wrote to that file; with another memory when that is given.

    Raises:
        ConfigError: neither a preset nor a machine file.
    """
    path = Path(name)
    if name in PRESETS or not path.exists():
        return machine_named(name, device_memory)
    return read_as(path, Machine.from_json, _MADE).with_memory(device_memory)


def preset_for(device: str, name: str = "") -> Machine:
    """The preset closest to a device: ``name`` is what a GPU calls itself.

    A GPU that no preset is for counts as an H100: the search then weighs compute against collectives as there.
    """
    return PRESETS["cpu"] if device == "cpu" else _preset_of(name) or PRESETS["h100-80gb"]


def published_rates(name: str) -> Mapping[str, float]:
    """The rates that the vendor of a GPU called ``name`` publishes for its products, by dtype; empty if no preset is
    for it."""
    found = _preset_of(name)
    return found.published if found is not None else {}


def _preset_of(name: str) -> Machine | None:
    return next((PRESETS[preset] for word, preset in _GPUS if word in name.upper()), None)


_GPUS = (
    ("GH200", "gh200"),
    ("H200", "h200-141gb"),
    ("H100", "h100-80gb"),
    ("A100", "a100-80gb"),
    ("V100", "v100-32gb-dgx2"),
)
