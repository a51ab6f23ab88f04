"""Bytes of activations of a transformer, by published formulas.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), count what one layer saves
for its backward in 16 bit: ``s*b*h*(34 + 5*a*s/h)``. Of the 34, two are dropout masks of one byte; of the 5 (the
attention scores), one is. Other element sizes scale the rest.
"""

from __future__ import annotations

from zerograph.core.step import ITEM_SIZE
from zerograph.planner.sizes import ModelSize
from zerograph.planner.training import Training


def layer_bytes(size: ModelSize, training: Training) -> int:
    """What one layer saves for its backward: ``s*b*h*(34 + 5*a*s/h)`` in 16 bit; fused attention saves no scores."""
    item = ITEM_SIZE[training.dtype]
    per_token = size.hidden * (16 * item + 2)
    if training.attention == "whole":
        per_token += size.heads * training.seq * (2 * item + 1)
    return training.tokens * per_token


def checkpoint_bytes(size: ModelSize, training: Training) -> int:
    """What one layer keeps when it is recomputed: its input, ``2*s*b*h`` in 16 bit."""
    return training.tokens * size.hidden * ITEM_SIZE[training.dtype]


def logits_bytes(size: ModelSize, training: Training, tiles: int = 1) -> int:
    """Logits in the compute dtype, their float32 log-probabilities and the float32 gradient, at the loss.

    Megatron counts the float32 logits alone (``4*s*b*V``). ``tiles`` splits head and loss over tokens.
    """
    tokens = -(-training.tokens // tiles)
    return tokens * size.vocab * (ITEM_SIZE[training.dtype] + 4 + 4)
