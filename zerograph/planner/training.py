"""How a model is trained: batch, dtypes, and how many bytes every parameter costs. One rank's view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerograph.core.errors import ConfigError
from zerograph.core.machine import DTYPES
from zerograph.core.step import ITEM_SIZE

Optimizer = Literal["zerograph", "mixed", "fp32"]
OPTIMIZERS: tuple[Optimizer, ...] = ("zerograph", "mixed", "fp32")
Attention = Literal["fused", "whole"]
ATTENTIONS: tuple[Attention, ...] = ("fused", "whole")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Bytes per parameter of the model states.

    Attributes:
        copy: of what kernels read.
        gradient: of its gradient.
        master: of a separate copy that the optimizer updates; 0 where it updates ``copy`` itself.
        moments: of Adam's two averages.
        resident: whether stage 3 keeps a shard of ``copy``. ZeroGraph keeps the master alone and casts as it gathers.
    """

    copy: int
    gradient: int
    master: int
    moments: int
    resident: bool

    @property
    def optimizer(self) -> int:
        """Bytes per parameter that live with the optimizer: 12 in mixed-precision Adam (K in the ZeRO paper)."""
        return self.master + self.moments

    @property
    def update_traffic(self) -> int:
        """Bytes per parameter that an update reads and writes: gradient, optimizer states twice, and the copy."""
        return self.gradient + 2 * self.optimizer + self.copy * (1 if self.master else 2)


@dataclass(frozen=True, slots=True)
class Training:
    """One step of one rank.

    Attributes:
        batch: sequences per rank and micro-batch.
        seq: tokens per sequence.
        dtype: what kernels compute in, by name.
        optimizer: the layout of the model states. "mixed": mixed-precision Adam of the ZeRO papers, 2+2+12 bytes.
            "fp32": AdamW on float32 parameters, 4+4+8. "zerograph": float32 master 4, Adam 8, float32 gradient 4, and
            a copy in ``dtype`` that is gathered where needed.
        attention: "fused" never stores the scores (FlashAttention, SDPA), "whole" does.
        accumulate: micro-batches per step; each costs its passes, the update comes once.
        prefetch: buckets gathered ahead of the one in use.
        bucket_size: bytes of gathered parameters per collective, at most, unless one operator is larger.
    """

    batch: int = 1
    seq: int = 1024
    dtype: str = "bfloat16"
    optimizer: Optimizer = "zerograph"
    attention: Attention = "fused"
    accumulate: int = 1
    prefetch: int = 1
    bucket_size: int = 32 * 2**20

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "accumulate", "bucket_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"no compute dtype {self.dtype!r}", f"one of {', '.join(DTYPES)}")
        if self.optimizer not in OPTIMIZERS or self.attention not in ATTENTIONS:
            raise ConfigError(
                f"no optimizer {self.optimizer!r} with attention {self.attention!r}",
                f"optimizer is one of {', '.join(OPTIMIZERS)}; attention one of {', '.join(ATTENTIONS)}",
            )

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-batch."""
        return self.batch * self.seq

    @property
    def layout(self) -> StateLayout:
        """Bytes per parameter; 16 in "mixed" (16-bit dtype) and "fp32"."""
        item = ITEM_SIZE[self.dtype]
        if self.optimizer == "mixed":
            return StateLayout(copy=item, gradient=item, master=4, moments=8, resident=True)
        if self.optimizer == "fp32":
            return StateLayout(copy=4, gradient=4, master=0, moments=8, resident=True)
        return StateLayout(copy=item, gradient=4, master=4, moments=8, resident=False)
