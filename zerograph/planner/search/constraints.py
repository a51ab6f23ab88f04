"""The arguments of a search that the user fixed, and the tiers and placements that they leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zerograph.core.config import DEFAULT_PREFETCH, Config, Recompute, TileOption
from zerograph.core.errors import ConfigError
from zerograph.core.machine import OFFLOAD_TIERS, Machine, OffloadTier, Tier, is_disk
from zerograph.core.plan import Offload, Overlap, Placement, Update, level_at

PREFETCHES = (0, DEFAULT_PREFETCH, 2, 4)
EXACT: tuple[Overlap, ...] = ("none", "forward", "backward")
"""Places of updates that change no number, the one that asks least of the user's loop first."""


def _with_states_on(tier: Tier) -> tuple[Placement, ...]:
    between = (Placement("host", "host", tier),) if is_disk(tier) else ()
    return Placement("device", "device", tier), Placement("device", tier, tier), *between, Placement(tier, tier, tier)


PLACEMENTS: tuple[Placement, ...] = (
    Placement(),
    *(placement for tier in OFFLOAD_TIERS for placement in _with_states_on(tier)),
)
"""The placements that the search looks at, from near to far."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """The arguments that the user fixed; None and "auto" leave the choice to the search.

    Attributes:
        stage: 0 to 3 fix every bucket's residency; "auto" shards parameters and chooses it per bucket.
        world_size: ranks to shard over.
        replicas: ranks that hold the same shards.
        hosts: between which the ranks that shard over each other communicate in a level of its own.
        bucket_size: bytes of gathered parameters per bucket, at most.
        prefetch: buckets gathered ahead, at most.
        recompute: as in :class:`~zerograph.core.config.Config`; "auto" chooses per layer.
        offload: what leaves the device. "none"; "optimizer", "gradients" or "parameters", each with those before it;
            or "auto", per bucket. Unless it is none, saved activations may leave too, per layer, and parameters larger
            than a bucket may be tiled.
        tier: where it goes; None leaves that open.
        saved: where what repeated layers save waits for the backward; None leaves that open where something may leave.
        tile: whether large parameters may be tiled; None as ``offload`` has it.
        loss: tiles of the loss; "auto" looks at some, None too where ``tile`` does and the plan need not be
            executable.
        tokens: tiles of tokens in layers, all of which are then recomputed; "auto" looks at some, None at none.
        by_sample: whether tiles whose number is fixed are of whole samples.
        tiling: of which parameters the number of tiles is fixed, as in :class:`~zerograph.core.config.Config`.
        update: where states on the host are updated; on the device only what the host has can be. "auto" leaves it
            open.
        overlap: what updates of states off the device run beside, by the optimizer's argument of that name; "auto" is
            any of :data:`EXACT`.
        executable: the tiers beside the device that the one who runs the plan can use; nothing else is searched. None
            searches all.
    """

    stage: Literal[0, 1, 2, 3, "auto"]
    world_size: int
    bucket_size: int | None = None
    prefetch: int | None = None
    recompute: Recompute = "auto"
    offload: Offload | Literal["auto"] = "none"
    tier: Tier | None = None
    saved: Tier | None = None
    tile: bool | None = None
    loss: int | Literal["auto"] | None = None
    tokens: int | Literal["auto"] | None = None
    by_sample: bool = False
    tiling: TileOption = "auto"
    update: Update | Literal["auto"] = "host"
    overlap: Overlap | Literal["auto"] = "none"
    executable: tuple[Tier, ...] | None = None
    replicas: int = 1
    hosts: int = 1

    @property
    def ranks(self) -> int:
        """All that train together."""
        return self.world_size * self.replicas

    @classmethod
    def of(cls, config: Config, world_size: int, **fixed: Any) -> Constraints:
        """The arguments that were given to ``config``; ``fixed`` are further fields, or other values of them."""
        given = {
            "bucket_size": config.bucket_size if "bucket_size" in config.given else None,
            "prefetch": config.prefetch if "prefetch" in config.given else None,
            "recompute": config.recomputed,
            "offload": config.offload,
            "tier": config.tier,
            "saved": None if config.activations == "auto" else config.saved,
            "loss": None if config.loss_tiles == "auto" else config.loss_tiles,
            "tokens": None if config.layer_tiles == "auto" else config.layer_tiles,
            "by_sample": config.by_sample,
            "update": config.update,
            "tile": None if config.tile == "auto" else False,
            "tiling": config.tile,
        }
        return cls(config.stage, world_size, **given | fixed)

    @property
    def sharding(self) -> int:
        """The stage that says what is sharded."""
        return 3 if self.stage == "auto" else self.stage

    @property
    def tiles(self) -> bool:
        """Whether tilings are looked at: only what is gathered for each use can be tiled."""
        wanted = self.offload != "none" if self.tile is None else self.tile
        return wanted and self.sharding == 3

    @property
    def tiles_loss(self) -> bool:
        """Whether the loss is looked at in tiles. Who runs the plan asks for them, where nothing fits without."""
        return self.tiles and self.executable is None if self.loss is None else self.loss != 1

    @property
    def activations(self) -> bool:
        """Whether the search chooses which saved activations leave the device, where something may."""
        return self.saved is None and (self.executable != ())

    def with_updates(self, machine: Machine) -> list[Constraints]:
        """These constraints for each way in which updates may run, where that is open."""
        overlaps = EXACT if self.overlap == "auto" else (self.overlap,)
        update: Update = "host" if self.update == "auto" else self.update
        found = [replace(self, overlap=overlap, update=update) for overlap in overlaps]
        there = machine.capacity("host", self.ranks) and (self.executable is None or "host" in self.executable)
        may_leave = self.offload != "none" and self.tier in (None, "host") and there
        # Updates on the device run behind the backward.
        if self.update == "auto" and may_leave and "none" in overlaps:
            found.append(replace(self, overlap="none", update="device"))
        return found

    def tiers(self, machine: Machine) -> tuple[Tier, ...]:
        """Where something may go that leaves the device.

        Raises:
            ConfigError: offloading was asked for, and the machine has no such tier, or nobody carries it out there.
        """
        tier = "host" if self.update == "device" else self.tier
        found = open_tiers(machine, self.ranks, self.offload, tier)
        if self.executable is None or self.offload == "none":
            return found
        run = tuple(tier for tier in found if tier in self.executable)
        if not run:
            raise ConfigError(
                f"on {machine.name} nothing can leave the device yet",
                "give path=, a folder on a disk; on a GPU shards may be on the host, too",
            )
        return run

    def placements(self, tiers: Sequence[Tier]) -> tuple[Placement, ...]:
        """Where shards may be, of which some may go to ``tiers``."""
        return open_placements(self.offload, tiers, self.sharding)


def open_tiers(
    machine: Machine, world_size: int, offload: Offload | Literal["auto"], tier: Tier | None
) -> tuple[OffloadTier, ...]:
    """The tiers that something may be offloaded to: those that exist, or the one that was asked for.

    Raises:
        ConfigError: offloading was asked for, and the machine has no such tier.
    """
    if offload == "none":
        return ()
    there = tuple(t for t in OFFLOAD_TIERS if machine.capacity(t, world_size))
    found = there if tier is None else tuple(t for t in there if t == tier)
    if not found and (offload != "auto" or tier is not None):
        raise ConfigError(
            f"{machine.name} has no {tier or ' or '.join(OFFLOAD_TIERS)} memory to offload to",
            f"it has {' and '.join(there)}" if there else "offload='none', or a machine that has some",
        )
    return found


def open_placements(offload: Offload | Literal["auto"], tiers: Sequence[Tier], stage: int) -> tuple[Placement, ...]:
    """Those of :data:`PLACEMENTS` that ``offload`` leaves open on ``tiers`` at ``stage``.

    "auto" leaves all open; "optimizer", "gradients" and "parameters" fix what leaves the device: that and what comes
    before it, and nothing else.
    """
    least = 0 if offload == "auto" else level_at(stage, offload)
    open_ = [p for p in PLACEMENTS if p.offload_tiers <= set(tiers) and p.least_stage <= stage]
    if offload in ("none", "auto"):
        return tuple(open_)
    # What leaves was given: neither less nor more may.
    return tuple(p for p in open_ if p.least_stage == least)
