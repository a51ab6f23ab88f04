"""The arguments of :func:`zerograph.backend`, validated once and immutable afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zerograph.core.arguments import paths, require, require_flag
from zerograph.core.errors import ConfigError
from zerograph.core.machine import OFFLOAD_TIERS, TIER_NAMES, Machine, OffloadTier, Tier, machine_from, offload_tier
from zerograph.core.plan import OFFLOADS, UPDATES, Bucket, GivenPlan, Offload, Update, level_at
from zerograph.core.units import parse_bytes
from zerograph.core.wire import GATHER_WIRES, REDUCE_WIRES, GatherWire, ReduceWire, Wires

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

STAGES = (0, 1, 2, 3)
Stage = Literal[0, 1, 2, 3, "auto"]
Recompute = Literal["auto", "none", "full"] | float
RECOMPUTE = ("auto", "none", "full")
COMPUTE = ("inductor", "eager")
DEFAULT_BUCKET_SIZE = 32 * 2**20
DEFAULT_PREFETCH = 1
DTYPES = ("float32", "float64", "bfloat16", "float16")
OFFLOAD = (*OFFLOADS, "auto")
ACTIVATIONS = ("auto", "keep", *OFFLOAD_TIERS)
FOLDERS: Mapping[Tier, str] = {"nvme": "path"}
ROOM: Mapping[Tier, str] = {"host": "host_memory", "nvme": "nvme"}
"""By tier, the arguments that say in which folders it is, and how many bytes of it a rank may use."""
CutBy = Literal["token", "sample"]
"""What a part of a layer's work may be of."""
TileOption = Literal["auto", "off"] | int | tuple[tuple[str, int], ...]
"""Tiles of parameters: a number, or numbers by patterns of names."""
_LEAVES = ("offload", "tier", "update", "activations")
PLANNED = (
    "stage",
    "bucket_size",
    "prefetch",
    "recompute",
    "tile",
    "loss_tiles",
    "token_tiles",
    "batch_tiles",
    "memory",
    "machine",
    *_LEAVES,
)
"""Arguments that say what a plan decides, and so have no place beside ``plan``."""


@dataclass(frozen=True, slots=True)
class Config:
    """The arguments of one backend, as :func:`zerograph.backend` explains them, once read: sizes are bytes, and None
    where the plan or the device decides.

    Attributes:
        given: names of the arguments that the user gave.
    """

    stage: Stage = 3
    mesh: DeviceMesh | None = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    gather_wire: GatherWire | None = None
    reduce_wire: ReduceWire | None = None
    bucket_size: int = DEFAULT_BUCKET_SIZE
    prefetch: int = DEFAULT_PREFETCH
    recompute: Recompute = "auto"
    tile: TileOption = "auto"
    offload: Offload | Literal["auto"] = "none"
    tier: OffloadTier | None = None
    update: Update | Literal["auto"] = "host"
    host_memory: int | None = None
    activations: Literal["auto", "keep", OffloadTier] = "auto"
    path: tuple[str, ...] = ()
    nvme: int | None = None
    loss_tiles: int | Literal["auto"] = "auto"
    token_tiles: int | Literal["auto"] = "auto"
    batch_tiles: int | Literal["auto"] = "auto"
    loss_only: bool = False
    compute: Literal["inductor", "eager"] = "inductor"
    plan: GivenPlan | None = None
    memory: int | None = None
    machine: Machine | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def wires(self) -> Wires:
        """What parameters and gradients are sent as."""
        return Wires(self.gather_wire, self.reduce_wire)

    @property
    def sharding(self) -> Literal[0, 1, 2, 3]:
        """The stage that says how parameters are held between steps: "auto" holds them as stage 3 does."""
        return 3 if self.stage == "auto" else self.stage

    @property
    def offloads(self) -> bool:
        """Whether shards live off the device between their uses."""
        return self.offload != "none" or any(bucket.placement.offload_tiers for bucket in self._buckets)

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        return self.plan.plan.buckets if self.plan is not None else ()

    @property
    def offload_tiers(self) -> frozenset[Tier]:
        """The tiers beside the device that something lives on between its uses."""
        return self._shards_on | self.saved_on

    @property
    def folders(self) -> dict[Tier, tuple[str, ...]]:
        """The folders of each disk that has some."""
        return {disk: folders for disk, name in FOLDERS.items() if (folders := getattr(self, name))}

    def room(self, tier: Tier) -> int | None:
        """Bytes of ``tier`` that a rank may use; None where that was not given."""
        return getattr(self, ROOM[tier])  # type: ignore[no-any-return]

    @property
    def _shards_on(self) -> frozenset[Tier]:
        replayed = [bucket.placement.offload_tiers for bucket in self._buckets]
        chosen = {self.target} if self.offload != "none" else set()
        # An accelerator, too, has a host between itself and the disk: whoever bounds its memory means it.
        if self.searches_tiers and (self.split or self.host_memory is not None):
            chosen.add("host")
        return frozenset[Tier]().union(*replayed, chosen) - {"device"}

    @property
    def saved_on(self) -> frozenset[Tier]:
        """The tiers beside the device on which what layers save waits for the backward."""
        saved = {tier for _, tier in self.plan.plan.offload} if self.plan is not None else {self.saved}
        return frozenset(saved) - {"device"}

    @property
    def saved(self) -> Tier:
        """Where what layers save waits for the backward, unless a plan says otherwise."""
        return offload_tier(self.activations)

    @property
    def target(self) -> Tier:
        """The farthest that ``offload`` moves what leaves: to ``tier``, or what a backend can run."""
        return self.tier or ("host" if self.split and not self.path else "nvme")

    @property
    def split(self) -> bool:
        """Whether a CPU counts as a device whose host has a memory of its own."""
        return self.machine is not None and self.machine.split

    @property
    def cut_by(self) -> tuple[CutBy, ...]:
        """What plans may run layers for some of at a time."""
        return self.cuts(self.searches)

    def cuts(self, searched: bool) -> tuple[CutBy, ...]:
        """The same, where plans are ``searched`` or not."""
        if self.plan is not None:
            found: tuple[CutBy, ...] = ("sample",) if self.plan.plan.by_sample else ("token",)
            return found if self.plan.plan.token_regions else ()
        if self.layer_tiles != "auto":
            found = ("sample",) if self.by_sample else ("token",)
            return found if self.layer_tiles > 1 else ()
        given: dict[CutBy, object] = {"token": self.token_tiles, "sample": self.batch_tiles}
        return tuple(by for by, tiles in given.items() if tiles == "auto" and searched)

    @property
    def by_sample(self) -> bool:
        """Whether the tiles of layers are fixed, and of whole samples."""
        return self.batch_tiles not in ("auto", 1)

    @property
    def layer_tiles(self) -> int | Literal["auto"]:
        """The tiles of layers, over tokens or samples; "auto" where a search may choose either."""
        given = (self.batch_tiles, self.token_tiles)
        return next((tiles for tiles in given if tiles not in ("auto", 1)), "auto" if "auto" in given else 1)

    @property
    def recomputed(self) -> Recompute:
        """The recomputation: of all layers where tiles of them were asked for, and nothing else was. Of parts of the
        batch a search may save what fits."""
        tiled = self.layer_tiles not in ("auto", 1) and not (self.by_sample and self.searches)
        return "full" if tiled and self.recompute == "auto" else self.recompute

    @property
    def casts(self) -> bool:
        """Whether 16 bits compute, of parameters that may have more."""
        return str(self.dtype).removeprefix("torch.") in ("bfloat16", "float16")

    @property
    def searches(self) -> bool:
        """Whether plans are searched under a budget, not made by rule."""
        return self.stage == "auto" or self.offload == "auto" or self.memory is not None

    @property
    def searches_tiers(self) -> bool:
        """Whether a search chooses the tiers of what leaves the device."""
        return self.searches and self.offload != "none" and self.tier is None

    def refuse_device(self, device: str) -> None:
        """Refuse a model on ``device``, a type of torch's, with which the arguments do not go together.

        Raises:
            ConfigError: nothing would leave the device.
        """
        if "host" in self.offload_tiers and device == "cpu" and not self.split:
            raise ConfigError(
                "the memory of a CPU's host is its device's: nothing would leave it",
                'tier="nvme" with path="/folder/on/a/disk"; for tests, machine= may be one with "split": true',
            )

    @classmethod
    def of(cls, **options: Any) -> Config:
        """A validated config from keyword arguments.

        ``plan`` is the path of a file that ``zerograph plan -o`` wrote.

        Raises:
            ConfigError: an unknown name, a value out of range, no such machine, or a plan file that cannot be replayed.
        """
        known = [name for name in cls.__dataclass_fields__ if name != "given"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"zerograph.backend has no argument {unknown[0]!r}", f"it takes {', '.join(known)}")
        chosen = {**_sizes(options), **_machine(options), **_folders(options), **_replayed(options), **_tiles(options)}
        # What was given stays as it is in a search, also where it equals the default.
        config = cls(**{**options, **chosen}, given=frozenset(options))
        config._validate()
        return config

    def _validate(self) -> None:
        require(
            # By type: True is an int, and would pass for stage 1.
            self.stage == "auto" or (type(self.stage) is int and self.stage in STAGES),
            f'stage must be 0, 1, 2, 3 or "auto", got {self.stage!r}',
            "3 shards parameters, gradients and optimizer states; 0 is data parallelism",
        )
        require(
            type(self.prefetch) is int and self.prefetch >= 0,
            f"prefetch must be a number of buckets >= 0, got {self.prefetch!r}",
            "1 gathers the next bucket while the current one computes",
        )
        require(
            _is_recompute(self.recompute),
            f'recompute must be "auto", "none", "full" or a share of layers from 0 to 1, got {self.recompute!r}',
            'recompute="full" saves the least memory, 0.5 does the same in every other layer',
        )
        require(
            self.loss_tiles == "auto" or (type(self.loss_tiles) is int and self.loss_tiles >= 1),
            f'loss_tiles must be "auto" or a number of tiles >= 1, got {self.loss_tiles!r}',
            "8 makes the logits of an eighth of the tokens at a time",
        )
        require(
            self.token_tiles == "auto" or (type(self.token_tiles) is int and self.token_tiles >= 1),
            f'token_tiles must be "auto" or a number of tiles >= 1, got {self.token_tiles!r}',
            "8 runs the MLPs of recomputed layers for an eighth of the tokens at a time",
        )
        require(
            self.token_tiles in ("auto", 1) or self.recompute not in ("none", 0),
            f"token_tiles={self.token_tiles!r} with recompute={self.recompute!r}: MLPs that are saved are whole",
            'only recomputed layers run for some tokens at a time: recompute="full"',
        )
        require(
            self.batch_tiles == "auto" or (type(self.batch_tiles) is int and self.batch_tiles >= 1),
            f'batch_tiles must be "auto" or a number of parts >= 1, got {self.batch_tiles!r}',
            "8 runs each layer for an eighth of the batch at a time",
        )
        require(
            not self.by_sample or self.token_tiles in ("auto", 1),
            f"batch_tiles={self.batch_tiles!r} and token_tiles={self.token_tiles!r}: a layer is divided in one way",
            "parts of the batch hold less than the same number of tiles of tokens: leave token_tiles out",
        )
        require_flag("loss_only", self.loss_only, "True has a training forward return None in place of logits")
        require(
            self.compute in COMPUTE,
            f"compute must be one of {COMPUTE}, got {self.compute!r}",
            '"eager" runs the same program without compiling its segments, for debugging',
        )
        require(
            isinstance(self.tile, str) or self.tile == 1 or self.sharding == 3,
            f"tile={self.tile!r} at stage {self.stage}, which keeps parameters whole",
            "stage 3 gathers them for each use",
        )
        self._validate_offload()
        for name in ("dtype", "reduce_dtype"):
            _require_dtype(name, getattr(self, name))
        for name, wires in (("gather_wire", GATHER_WIRES), ("reduce_wire", REDUCE_WIRES)):
            wire = getattr(self, name)
            require(
                wire is None or wire in wires,
                f"{name} must be one of {wires} or None, got {wire!r}",
                "they lose digits, for links that are slower than compute; None sends what is computed",
            )
        require(
            self.gather_wire is None or self.sharding > 0,
            f"gather_wire={self.gather_wire!r} at stage 0, which gathers nothing",
            "stage 1 to 3 gather parameters; gradients have reduce_wire=",
        )
        if self.mesh is not None:
            _require_mesh(self.mesh)

    def _validate_offload(self) -> None:
        require(
            self.offload in OFFLOAD,
            f"offload must be one of {OFFLOAD}, got {self.offload!r}",
            '"optimizer" moves optimizer states off the device, "gradients" those and gradients',
        )
        require(
            self.tier is None or self.tier in OFFLOAD_TIERS,
            f"tier must be one of {OFFLOAD_TIERS}, got {self.tier!r}",
            'offload="optimizer", tier="host" keeps optimizer states in host memory',
        )
        require(
            self.activations in ACTIVATIONS,
            f"activations must be one of {ACTIVATIONS}, got {self.activations!r}",
            '"nvme" moves what layers save for the backward to the folders of path=',
        )
        require(
            self.tier is None or self.offload != "none",
            f"tier={self.tier!r} is given, and offload is none",
            'say what goes there, for example offload="optimizer"',
        )
        # First what no stage could do, then what no backend does yet: the second error would hide the first.
        level_at(self.sharding, "optimizer" if self.offload == "auto" else self.offload)
        for disk, folders in FOLDERS.items():
            require(
                disk not in self.offload_tiers or disk in self.folders,
                f"tensors that go to {TIER_NAMES[disk]} need a folder to be kept in",
                f'{folders}="/folder/on/a/disk", or several in a list, over which it is striped',
            )
            given = [name for name in (folders, ROOM[disk]) if getattr(self, name)]
            require(
                disk in self.offload_tiers or not given,
                f"{' and '.join(given)} given, and nothing goes to {TIER_NAMES[disk]}",
                f'say what goes there: offload="optimizer", activations="{disk}", or offload="auto" with memory=',
            )
        require(
            self.update in (*UPDATES, "auto"),
            f"update must be one of {(*UPDATES, 'auto')}, got {self.update!r}",
            '"host" updates states on the host beside them, "device" has them pass through the device',
        )
        require(
            self.update != "auto" or (self.searches and "host" in self._shards_on),
            'update="auto" is for a search, and nothing that it may keep on the host is searched for',
            'offload="auto" with memory=, and tier="host" or host_memory=; or say which: update="device"',
        )
        require(
            self.update in ("host", "auto") or self._shards_on == {"host"},
            'update="device" has states of the host pass through the device, and nothing is kept on the host alone',
            'offload="optimizer", tier="host", which on a CPU needs a machine= with "split": true; or update="host"',
        )
        require(
            "host" in self.offload_tiers or self.host_memory is None,
            "host_memory given, and nothing goes to the host",
            "leave it out: memory= is the device's, which on a CPU is the host's",
        )


_SIZES = (("bucket_size", "32MiB"), ("memory", "70GiB"), ("host_memory", "100GiB"), ("nvme", "500GiB"))
"""Arguments that are bytes, with an example."""


def _sizes(options: dict[str, Any]) -> dict[str, int]:
    return {
        name: _size(name, options[name], example)
        for name, example in _SIZES
        if name in options and (name == "bucket_size" or options[name] is not None)
    }


def _tiles(options: dict[str, Any]) -> dict[str, TileOption]:
    wanted = options.get("tile", "auto")
    by_name = wanted.items() if isinstance(wanted, dict) else ()
    counts = [count for _, count in by_name] if isinstance(wanted, dict) else [wanted]
    if wanted not in ("auto", "off") and not (
        counts
        and all(isinstance(pattern, str) for pattern, _ in by_name)
        and all(type(count) is int and count >= 1 for count in counts)
    ):
        raise ConfigError(
            f'tile must be "auto", "off", a number of tiles >= 1 or such numbers by patterns of names, got {wanted!r}',
            'tile={"*.mlp.*": 4} has weights whose names fit in 4 tiles',
        )
    return {"tile": tuple(by_name)} if isinstance(wanted, dict) else {}


def _folders(options: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    given = {name: options[name] for name in FOLDERS.values() if name in options}
    return {
        name: () if folder is None else paths(name, folder, "a folder", f'{name}="/mnt/nvme"')
        for name, folder in given.items()
    }


def _size(name: str, size: object, example: str) -> int:
    try:
        if not isinstance(size, (int, str)) or isinstance(size, bool):
            raise ValueError(f"{size!r} is not a size")
        found = parse_bytes(size)
        if found == 0:
            raise ValueError("it must be positive")
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", f"for example {name}='{example}'") from None
    return found


def _machine(options: dict[str, Any]) -> dict[str, Machine]:
    match options.get("machine"):
        case None:
            return {}
        case Machine() as machine:
            return {"machine": machine}
        case str(name):
            return {"machine": machine_from(name)}
        case other:
            raise ConfigError(
                f"machine must be the name of a preset or a file, got {other!r}",
                "for example machine='machine.json', which `zerograph bench -o machine.json` writes",
            )


def _replayed(options: dict[str, Any]) -> dict[str, Any]:
    """The plan in the file that ``plan`` names, with the stage and prefetch distance that it fixes."""
    path = options.get("plan")
    if path is None:
        return {}
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"plan must be the path of a plan file, got {path!r}", "plan='plan.json'")
    if beside := [name for name in PLANNED if name in options]:
        raise ConfigError(
            f"{', '.join(beside)} given beside plan={os.fspath(path)!r}, which decides that",
            f"leave {'it' if len(beside) == 1 else 'them'} out, or give them to `zerograph plan` and replay its file",
        )
    from zerograph.core.files.reading import read_plan  # late: few replay a plan

    file = read_plan(Path(path))
    plan, unexecuted = file.plan, file.unexecuted
    require(
        not unexecuted,
        f"the plan {os.fspath(path)} has {unexecuted}, which no backend runs yet",
        "make one that can be run: `zerograph plan MODEL` without --offload; or have the backend plan what it can run, "
        'with offload="auto" and memory=',
    )
    machine = {"machine": file.machine} if file.machine.split else {}
    return {"plan": GivenPlan(os.fspath(path), plan), "stage": plan.stage, "prefetch": plan.prefetch, **machine}


def _is_recompute(value: object) -> bool:
    if isinstance(value, str):
        return value in RECOMPUTE
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def _require_dtype(argument: str, dtype: object) -> None:
    name = str(dtype).removeprefix("torch.")
    require(
        # By name: this floor must not import torch.
        dtype is None or (type(dtype).__name__ == "dtype" and name in DTYPES),
        f"{argument} must be a floating torch.dtype ({', '.join(DTYPES)}) or None, got {dtype!r}",
        f"for example {argument}=torch.bfloat16",
    )


def _require_mesh(mesh: Any) -> None:
    # By name: this floor must not import torch.
    is_mesh = any(cls.__name__ == "DeviceMesh" for cls in type(mesh).__mro__)
    require(is_mesh, f"mesh must be a torch DeviceMesh, got {type(mesh).__name__}", "see init_device_mesh")
    require(
        mesh.ndim in (1, 2),
        f"mesh has {mesh.ndim} dimensions; ZeroGraph shards over the last of two, and replicates along the first",
        'pass the data-parallel slice, for example mesh["dp"] or mesh["dp_replicate", "dp_shard"]',
    )
