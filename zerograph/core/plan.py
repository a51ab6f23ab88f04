"""The planner's decisions as plain data: what passes carry out and the runtime obeys. No torch in here."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.core.layout import Layout
from zerograph.core.machine import OFFLOAD_TIERS, TIERS, Tier, is_disk
from zerograph.core.step import Param, layer_of_activation
from zerograph.core.units import counted, is_number

__all__ = [
    "DEVICE",
    "OFFLOADS",
    "OVERLAPS",
    "UPDATES",
    "VERSION",
    "Bucket",
    "GivenPlan",
    "Offload",
    "Param",
    "ParamTile",
    "Placement",
    "Plan",
    "Residency",
    "Update",
    "compute_dtype",
    "level_at",
    "tile_label",
    "tile_params",
    "tile_rows",
    "token_tiles",
]

VERSION = 17

Residency = Literal["use", "host", "backward", "step"]
"""How long a gathered bucket stays resident: until its last use in a graph, until its use in the backward, or until
the next forward whose shards may have changed. With "host" it goes after its last use, and the ranks of each host keep
a part each of what came from others until the backward gathers it again (Wang et al., 2023, "ZeRO++")."""
_RESIDENCIES = ("use", "host", "backward", "step")


Offload = Literal["none", "optimizer", "gradients", "parameters"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "gradients", "parameters")
"""Tensors that leave the device, each with those before it. They are sharded: the optimizer can leave from stage 1 on,
gradients from stage 2, parameters from stage 3, so that the place in here is the least stage that each needs."""


Update = Literal["host", "device"]
UPDATES: tuple[Update, ...] = ("host", "device")
"""Where an update of states on the host computes."""
Overlap = Literal["none", "backward", "forward", "delayed"]
OVERLAPS: tuple[Overlap, ...] = ("none", "backward", "forward", "delayed")
"""What an update of states off the device runs beside."""


def level_at(stage: int, offload: Offload) -> int:
    """The place of ``offload`` in :data:`OFFLOADS`.

    Raises:
        ConfigError: ``stage`` does not shard it.
    """
    level = OFFLOADS.index(offload)
    if level > stage:
        raise ConfigError(
            f"stage {stage} cannot offload {offload}, which it does not shard", f"stage {level} or more can"
        )
    return level


@dataclass(frozen=True, slots=True)
class Placement:
    """The tiers that the shards of one bucket live on when nothing uses them.

    :data:`OFFLOADS` says what a stage lets leave the device. None of them lives farther away than the next: an update
    reads all three. The master copy lives with the optimizer; when that is off the device, ``parameters`` are a copy in
    the compute dtype.

    Attributes:
        parameters: shards of the parameters, as they are gathered.
        gradients: shards of the reduced gradients, until the update.
        optimizer: master copy and moments.
    """

    parameters: Tier = "device"
    gradients: Tier = "device"
    optimizer: Tier = "device"

    @property
    def in_order(self) -> bool:
        """Whether no tier is farther away than the next."""
        # An update reads all three on its way to the optimizer's tier, so that nothing may pass by that.
        near, middle, far = (TIERS.index(tier) for tier in (self.parameters, self.gradients, self.optimizer))
        return near <= middle <= far

    @property
    def spilled(self) -> Tier:
        """Where reduced gradients go as they are made: autograd keeps a gradient where its parameter is, and those that
        are updated on the host are there."""
        return "host" if self.optimizer == "host" else self.gradients

    @property
    def least_stage(self) -> int:
        """The lowest stage that shards everything that is off the device."""
        return max(level for level, kind in enumerate(OFFLOADS) if not level or getattr(self, kind) != "device")

    @property
    def on_one_tier(self) -> bool:
        """Whether all live together."""
        return self.parameters == self.gradients == self.optimizer

    @property
    def offload_tiers(self) -> frozenset[Tier]:
        """The tiers beside the device that something lives on."""
        return frozenset({self.parameters, self.gradients, self.optimizer} - {"device"})

    def __str__(self) -> str:
        kinds = (("parameters", self.parameters), ("gradients", self.gradients), ("optimizer", self.optimizer))
        tiers = dict.fromkeys(tier for _, tier in kinds if tier != "device")
        parts = (f"{' and '.join(k for k, t in kinds if t == tier)} on {tier}" for tier in tiers)
        return ", ".join(parts) or "all on device"


DEVICE = Placement()


def decided(kind: type[Plan] | type[Bucket]) -> dict[str, str]:
    """The decided fields of a plan or a bucket, with what people call them."""
    return {one.name: one.metadata["decided"] for one in fields(kind) if "decided" in one.metadata}


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        index: position in :attr:`Plan.buckets`.
        name: the module or parameters it holds, for people.
        params: in order of first use.
        residency: how long it stays gathered.
        placement: where its shards live.
        tiles: parts that its one parameter is gathered, used, reduced and updated in, one after another:
            ZeRO-Infinity's memory-centric tiling of an operator that is too large to be whole.
        ahead: intervals of buckets before its own at which its gathers begin, at most; None: as many as the plan's
            ``prefetch``, which is the most. Fewer where memory is short when it would be gathered.
    """

    index: int
    name: str
    params: tuple[Param, ...]
    residency: Residency = field(metadata={"decided": "residency"})
    placement: Placement = field(default=DEVICE, metadata={"decided": "placement"})
    tiles: int = field(default=1, metadata={"decided": "tiles"})
    ahead: int | None = field(default=None, metadata={"decided": "gathered ahead"})

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the bucket's parameters when unsharded."""
        return sum(p.gathered_bytes for p in self.params)


def compute_dtype(params: Iterable[Param]) -> str:
    """The dtype that most of ``params`` compute in; float32 when there are none."""
    dtypes = Counter(p.compute_dtype for p in params)
    return max(dtypes, key=dtypes.__getitem__, default="float32")


def tile_rows(rows: int, tiles: int) -> tuple[tuple[int, int], ...]:
    """First and one-past-last row of each tile of shards of ``rows`` rows: the same slice of every rank's shard.

    A tile's gather then uses all ranks' links, with parameters sharded by rows as ever.
    """
    return tuple((i * rows // tiles, (i + 1) * rows // tiles) for i in range(tiles))


def tile_label(name: str, tile: int, tiles: int) -> str:
    """A tile of the bucket called ``name``, for people: ``"blocks.3 tile 2/4"``; the name of one that has no tiles."""
    return name if tiles == 1 else f"{name} tile {tile + 1}/{tiles}"


def token_tiles(count: int, tiles: int) -> tuple[tuple[int, int], ...]:
    """First and one-past-last token of each of at most ``tiles`` tiles; all have one size, but for the last."""
    size = -(-count // max(1, tiles))
    if size >= _LONG:
        # So that all tiles begin at whole cache lines, and run the very same kernels.
        size = -(-size // _ALIGNED) * _ALIGNED
    return tuple((begin, min(begin + size, count)) for begin in range(0, count, max(1, size)))


_LONG, _ALIGNED = 128, 16


@dataclass(frozen=True, slots=True)
class ParamTile(Param):
    """The same rows of every rank's shard, as a parameter of that shape: what moves in place of the whole parameter.
    Rows that the last shards lack are zeros.

    Attributes:
        begin, end: the rows of each shard.
    """

    begin: int = 0
    end: int = 0


def tile_params(param: Param, tiles: int) -> tuple[ParamTile, ...]:
    """The tiles of ``param``, in order."""
    facts = {one.name: getattr(param, one.name) for one in fields(Param)}
    return tuple(
        ParamTile(**facts | {"shape": (param.home.ranks * (end - begin), *param.shape[1:])}, begin=begin, end=end)
        for begin, end in tile_rows(param.chunk, tiles)
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided for one frame.

    Attributes:
        stage: the ZeRO stage the plan is a preset of.
        world_size: ranks the parameters are sharded over.
        replicas: ranks that hold the same shards, each with others beside it (HSDP): where there are several, gradients
            are averaged over these too.
        buckets: in order of first use in the forward.
        prefetch: buckets gathered ahead of the one in use, at most; each bucket may say fewer for itself.
        recompute: layers (``blocks.3``) of which the forward saves the inputs only; their backward computes the rest
            again.
        save: activations inside of these layers that are saved all the same, by their lasting names
            (``blocks.3.mlp:addmm``, :func:`~zerograph.core.step.activation_names`).
        save_others: whether every other activation that the backward reads is saved; else the partitioner computes
            again what it finds cheaper than to save.
        offload: layers, each with the tier that what its forward saves (its inputs only, where it is recomputed) is
            moved to until the backward needs it; and single activations, which go before their layer.
        reductions: that may be under way at a time: one starts as soon as its gradients exist, and the computation
            waits then for the one so many before it. More of them hold more full gradients.
        fetch_ahead: layers before its own in the backward at which what a layer offloaded begins to come back.
        update: where an update of states on the host computes: "host", beside them, or "device", through which they
            pass in slots and back.
        overlap: what updates run beside: "none"; "backward", where a bucket is updated as soon as the backward has done
            with it; "forward", that of the next step, where each gather waits for the update of its bucket off the
            device; or "delayed", where the next step computes with copies from before. The optimizer's ``overlap`` and
            ``delayed`` decide; a plan says what it was made for.
        loss_tiles: parts over tokens that the head and its loss run in, one after another, so that logits never exist
            whole; the backward computes each part again.
        head: lasting name of the logits that are cut so; empty where they are whole, or their step was never traced.
        token_tiles: parts over tokens that the MLPs of recomputed layers run in, one after another, with the norm and
            residual around them, forward and backward.
        by_sample: whether these parts are of whole samples of the batch. Then all of the layer runs in them, attention
            too, and its parameters share a bucket, so that they are gathered once for all parts.
        token_regions: lasting names of what these begin with, the widest that each makes.
        hosts: that share the ranks over which parameters are sharded equally, where a gather has a level between them
            and one inside of each; else 1.
    """

    stage: int = field(metadata={"decided": "stage"})
    world_size: int = field(metadata={"decided": "world size"})
    buckets: tuple[Bucket, ...] = field(metadata={"decided": "buckets"})
    prefetch: int = field(metadata={"decided": "prefetch"})
    recompute: tuple[str, ...] = field(default=(), metadata={"decided": "recomputed"})
    save: tuple[str, ...] = field(default=(), metadata={"decided": "saved"})
    save_others: bool = field(default=False, metadata={"decided": "everything else saved"})
    offload: tuple[tuple[str, Tier], ...] = field(default=(), metadata={"decided": "activations"})
    reductions: int = field(default=1, metadata={"decided": "reductions under way"})
    fetch_ahead: int = field(default=1, metadata={"decided": "layers fetched ahead"})
    loss_tiles: int = field(default=1, metadata={"decided": "tiles of the loss"})
    token_tiles: int = field(default=1, metadata={"decided": "tiles of tokens"})
    by_sample: bool = field(default=False, metadata={"decided": "tiles of whole samples"})
    update: Update = field(default="host", metadata={"decided": "where updates compute"})
    overlap: Overlap = field(default="none", metadata={"decided": "what updates run beside"})
    head: str = ""
    token_regions: tuple[str, ...] = ()
    replicas: int = field(default=1, metadata={"decided": "replicas"})
    hosts: int = 1

    @property
    def ranks(self) -> int:
        """All that run the plan together."""
        return self.world_size * self.replicas

    def ahead(self) -> tuple[int, ...]:
        """How many intervals ahead the gathers of each bucket begin, at most."""
        return tuple(self.prefetch if b.ahead is None else b.ahead for b in self.buckets)

    def updated_inside(self, bucket: Bucket) -> bool:
        """Whether the backward updates the shards of ``bucket``. Tiles of a gradient become one in the step, but where
        they go to the host."""
        return self.overlap == "backward" and (bucket.tiles == 1 or bucket.placement.spilled == "host")

    def placement_of(self, bucket: Bucket) -> Placement:
        """The placement of ``bucket`` while a step runs: gradients that the backward uses up go to no disk."""
        own = bucket.placement
        return replace(own, gradients="device") if self.updated_inside(bucket) and is_disk(own.spilled) else own

    @property
    def farthest(self) -> Placement:
        """The farthest tiers that anything has."""
        own = [bucket.placement for bucket in self.buckets]

        def far(tiers: Iterable[Tier]) -> Tier:
            return max(tiers, key=TIERS.index, default="device")

        return Placement(far(h.parameters for h in own), far(h.gradients for h in own), far(h.optimizer for h in own))

    def bucket_of(self) -> dict[str, Bucket]:
        """The bucket of every parameter, by name."""
        return {p.name: bucket for bucket in self.buckets for p in bucket.params}

    @property
    def compute_dtype(self) -> str:
        """The dtype that most parameters compute in; float32 when there are none."""
        return compute_dtype(p for bucket in self.buckets for p in bucket.params)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, one line, with the format's version."""
        return json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """Short hash of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ZeroGraphError: another version, or not a plan.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("version", None)
        except (ValueError, TypeError, AttributeError):
            raise ZeroGraphError("the text is no plan", "give what Plan.to_json wrote") from None
        if not is_number(version, int) or version != VERSION:
            raise ZeroGraphError(f"plan has version {version}, this ZeroGraph reads {VERSION}", "make the plan again")
        try:
            _require_types(cls, data)
            buckets = tuple(_bucket(**b) for b in data["buckets"])
            layers, save = tuple(map(_text, data["recompute"])), tuple(map(_text, data["save"]))
            offload = tuple((_text(name), tier) for name, tier in data["offload"])
            named = {"recompute": layers, "save": save, "token_regions": tuple(map(_text, data["token_regions"]))}
            plan = cls(**{**data, "buckets": buckets, "offload": offload, **named})
            wrong = next(plan.mistakes(), "")
        except (KeyError, TypeError, ValueError) as error:
            raise ZeroGraphError(f"the plan is incomplete: {error}", "give what Plan.to_json wrote") from None
        if wrong:
            raise ZeroGraphError(f"the plan makes no sense: {wrong}", "give what Plan.to_json wrote")
        return plan

    def mistakes(self) -> Iterator[str]:
        """The mistakes in a plan: placements that the stage does not shard, tiles of no rows, missing tiers."""
        if self.world_size < 1 or self.replicas < 1:
            yield f"world size {self.world_size}, {self.replicas} replicas"
            return
        if self.stage not in (0, 1, 2, 3):
            yield f"stage {self.stage}"
        if self.prefetch < 0:
            yield f"prefetch {self.prefetch}"
        if self.reductions < 1:
            yield f"{self.reductions} reductions under way"
        if self.fetch_ahead < 1:
            yield f"activations come back {self.fetch_ahead} layers ahead"
        if self.loss_tiles < 1:
            yield f"{self.loss_tiles} tiles of the loss"
        if self.head and self.loss_tiles == 1:
            yield f"{self.head} is cut in tiles, and the loss in none"
        if self.token_tiles < 1 or (self.token_tiles > 1) != bool(self.token_regions):
            yield f"{self.token_tiles} tiles of tokens of {counted(len(self.token_regions), 'layer')}"
        if self.by_sample and self.token_tiles == 1:
            yield "tiles of whole samples, of which there is one"
        yield from (f"{layer} is recomputed twice" for layer in _twice(self.recompute))
        yield from (f"{name} is saved twice" for name in _twice(self.save))
        layers = frozenset(self.recompute)
        yield from (f"{name} runs by token twice" for name in _twice(self.token_regions))
        # A whole layer may run by sample and be saved: its activations are put together, sample by sample.
        stray = (name for name in self.token_regions if not self.by_sample and layer_of_activation(name) not in layers)
        yield from (f"{name} runs by token, of a layer that is not recomputed" for name in stray)
        stray = (name for name in self.save if layer_of_activation(name) not in layers)
        yield from (f"{name} is saved, of a layer that is not recomputed" for name in stray)
        if self.update not in UPDATES:
            yield f"updates on {self.update!r}"
        if self.overlap not in OVERLAPS:
            yield f"updates beside {self.overlap!r}"
        if self.overlap != "none" and self.update == "device":
            yield f"updates on the device ({self.overlap}) of what left it, while it computes"
        if self.overlap == "delayed" and any(is_disk(bucket.placement.spilled) for bucket in self.buckets):
            yield "delayed updates by gradients on a disk"
        for bucket in self.buckets:
            yield from (f"bucket {bucket.name} {wrong}" for wrong in _mistakes(bucket, self))
        yield from (f"activations of {name} are offloaded twice" for name in _twice(name for name, _ in self.offload))
        off = ((layer, tier) for layer, tier in self.offload if tier not in OFFLOAD_TIERS)
        yield from (f"activations of {layer} are offloaded to {tier!r}" for layer, tier in off)


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A plan that the user gave, to be replayed, and the file that it came from."""

    path: str
    plan: Plan

    def __str__(self) -> str:
        return f"{self.path} (digest {self.plan.digest})"


def _bucket(**data: Any) -> Bucket:
    _require_types(Bucket, data)
    rest = {k: v for k, v in data.items() if k not in ("params", "placement")}
    params = tuple(map(_param, data["params"]))
    return Bucket(params=params, placement=Placement(**data["placement"]), **rest)


def _param(data: Mapping[str, Any]) -> Param:
    shape, tied_to = tuple(data["shape"]), tuple(data["tied_to"])
    return Param(**{**data, "shape": shape, "home": Layout(**data["home"]), "tied_to": tied_to})


def _require_types(kind: type[Plan] | type[Bucket], data: Mapping[str, Any]) -> None:
    """Every field and no other, numbers whole and no truths, lists no texts.

    Raises:
        TypeError: naming the field.
    """
    # Annotations are texts in this module (`from __future__ import annotations`), so that the check is by their text.
    types = {one.name: str(one.type) for one in fields(kind)}
    if data.keys() != types.keys():
        raise TypeError(f"it has {', '.join(sorted(data.keys() ^ types.keys()))}, or has not")
    for name, said in types.items():
        value = data[name]
        if said.startswith("tuple") and not isinstance(value, list):
            raise TypeError(f"{name} is {value!r}, no list")
        if said.startswith("int") and not is_number(value, int) and not (said.endswith("None") and value is None):
            raise TypeError(f"{name} is {value!r}, no whole number")
        if said == "bool" and type(value) is not bool:
            raise TypeError(f"{name} is {value!r}, neither true nor false")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def _twice(names: Iterable[str]) -> Iterator[str]:
    return (name for name, count in Counter(names).items() if count > 1)


def _mistakes(bucket: Bucket, plan: Plan) -> Iterator[str]:
    placement = bucket.placement
    if bucket.residency not in _RESIDENCIES:
        yield f"has residency {bucket.residency!r}"
    if not {placement.parameters, placement.gradients, placement.optimizer} <= set(TIERS):
        yield f"lives on {placement}"
    elif placement.least_stage > plan.stage:
        yield f"has {placement}, which stage {plan.stage} does not shard"
    elif not placement.in_order:
        yield f"has {placement}: none may live farther away than gradients, nor those farther than the optimizer"
    if plan.update == "device" and is_disk(placement.optimizer):
        yield f"has {placement}, and is updated on the device, where states come from the host alone"
    if bucket.ahead is not None and not 0 <= bucket.ahead <= plan.prefetch:
        yield f"is gathered {bucket.ahead} intervals ahead, and prefetch is {plan.prefetch}"
    if bucket.residency == "host" and (plan.hosts == 1 or placement.parameters != "device"):
        yield f"keeps parts of {placement} in hosts, of which there are {plan.hosts}"
    if any(p.home.ranks * p.experts != plan.world_size for p in bucket.params):
        yield f"has parameters of other ranks than {plan.world_size}"
    # The rest is about tiles, which share one parameter's rows.
    if bucket.tiles == 1:
        return
    if len(bucket.params) != 1 or not (bucket.params[0].sharded and bucket.params[0].shape):
        yield "is tiled, and is not one sharded parameter"
    elif not 1 < bucket.tiles <= bucket.params[0].chunk:
        yield f"has {bucket.tiles} tiles of {bucket.params[0].chunk} rows"
    elif bucket.residency != "use":
        yield "is tiled, and is to stay whole"
