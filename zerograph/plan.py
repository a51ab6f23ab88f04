"""The planner's decisions as plain data: what passes carry out and the runtime obeys. No torch in here."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from zerograph.errors import ZeroGraphError
from zerograph.ir import Param

__all__ = ["VERSION", "Bucket", "GivenPlan", "Param", "Plan", "Residency"]

VERSION = 2

Residency = Literal["use", "backward", "step"]
"""How long a gathered bucket stays whole: until its last use in a graph, until its use in the backward, or until
the next forward whose shards may have changed."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        index: position in :attr:`Plan.buckets`.
        name: the module or parameters it holds, for people.
        params: in order of first use.
        residency: how long it stays gathered.
    """

    index: int
    name: str
    params: tuple[Param, ...]
    residency: Residency

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the bucket's parameters when whole."""
        return sum(p.gathered_bytes for p in self.params)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided for one frame.

    Attributes:
        stage: the ZeRO stage the plan is a preset of.
        world_size: ranks the parameters are sharded over.
        buckets: in order of first use in the forward.
        prefetch: buckets gathered ahead of the one in use.
        recompute: layers (``blocks.3``) of which the forward saves the inputs only; their backward computes the rest
            again.
        save_others: whether every other activation that the backward reads is saved; else the partitioner computes
            again what it finds cheaper than to save.
    """

    stage: int
    world_size: int
    buckets: tuple[Bucket, ...]
    prefetch: int
    recompute: tuple[str, ...] = ()
    save_others: bool = False

    def bucket_of(self) -> dict[str, Bucket]:
        """The bucket of every parameter, by name."""
        return {p.name: bucket for bucket in self.buckets for p in bucket.params}

    @property
    def compute_dtype(self) -> str:
        """The dtype that most parameters compute in; float32 when there are none."""
        dtypes = Counter(p.compute_dtype for bucket in self.buckets for p in bucket.params)
        return max(dtypes, key=dtypes.__getitem__, default="float32")

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
        if version != VERSION:
            raise ZeroGraphError(f"plan has version {version}, this ZeroGraph reads {VERSION}", "make the plan again")
        try:
            buckets, layers = tuple(_bucket(**b) for b in data["buckets"]), tuple(data["recompute"])
            return cls(**{**data, "buckets": buckets, "recompute": layers})
        except (KeyError, TypeError) as error:
            raise ZeroGraphError(f"the plan is incomplete: {error}", "give what Plan.to_json wrote") from None


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A plan that the user gave, to be replayed, and the file that it came from."""

    path: str
    plan: Plan

    def __str__(self) -> str:
        return f"{self.path} (digest {self.plan.digest})"


def _bucket(params: list[dict[str, Any]], **rest: Any) -> Bucket:
    return Bucket(params=tuple(Param(**{**p, "shape": tuple(p["shape"])}) for p in params), **rest)
