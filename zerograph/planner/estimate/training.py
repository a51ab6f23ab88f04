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
    def dtypes(self) -> tuple[str, str, str]:
        """The dtypes of a shard, of the parameter that is gathered, and of its gradient."""
        if self.optimizer == "mixed":
            return self.dtype, self.dtype, self.dtype
        return "float32", "float32" if self.optimizer == "fp32" else self.dtype, "float32"

    def moments(self, copies: bool) -> int:
        """Tensors like a shard that the optimizer keeps beside it.

        Mixed-precision Adam has a float32 master and two averages: six times the bytes of a 16-bit shard. Where the
        device holds another copy of the shard, for kernels to read, the shard itself (``copies``) is one of these: a
        16-bit or float32 parameter is then not held twice.
        """
        kept = 12 // ITEM_SIZE[self.dtype] if self.optimizer == "mixed" else 2
        return kept - (copies and self.optimizer != "zerograph")
