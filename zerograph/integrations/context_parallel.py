"""Context parallel as in DeepSpeed-Ulysses (arXiv:2309.14509): each rank has some tokens of every sequence, and in
attention all tokens of some heads.

Only attention mixes tokens, so the rest of a model runs on a rank's own. Parameters are sharded over all ranks, those
of one sequence too: every rank has a term of each gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from zerograph.core.arguments import require, require_kind
from zerograph.core.errors import UnsupportedError
from zerograph.integrations.torch_private import all_to_all, assert_on_all_ranks

Attention = Callable[..., Tensor]
_BY_POSITION = ("sliding_window", "position_bias", "softcap", "s_aux")
"""What models of transformers give their attention beside the three, and change it by."""


def ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    attention: Attention = F.scaled_dot_product_attention,
    **options: Any,
) -> Tensor:
    """``attention`` over all tokens of sequences of which each rank of ``group`` has equally many, in order.

    Each of the three is sent, and the result, ``(n - 1) / n`` of it over n ranks; the backward does the same.

    Args:
        query, key, value: ``[batch, heads, tokens, width]`` of this rank's tokens. Keys and values may have fewer
            heads.
        group: the ranks that share a sequence, such as ``mesh["cp"].get_group()``.
        attention: takes the three with all tokens and some heads, and returns what has the shape of the first one.
        options: for it, such as ``is_causal=True``. A mask is of all tokens.

    Returns:
        ``[batch, heads, tokens, width]`` of this rank's tokens.

    Raises:
        ConfigError: the heads do not divide by the ranks, or ``group`` is none.
    """
    require_kind(group, dist.ProcessGroup, "ulysses", 'the ranks of a sequence: mesh["cp"].get_group()')
    heads, ranks = [x.shape[1] for x in (query, key, value)], group.size()
    require(
        not any(count % ranks for count in heads),
        f"heads of queries, keys and values, {heads}, do not divide by the {ranks} ranks of a sequence",
        "use fewer ranks along this axis; keys and values of fewer heads can be repeated before",
    )
    query, key, value = (all_to_all(x, group, scattered=1, gathered=2) for x in (query, key, value))
    return all_to_all(attention(query, key, value, **options), group, scattered=2, gathered=1)


def ulysses_attention(group: dist.ProcessGroup) -> str:
    """Make :func:`ulysses` known to transformers; returns the name for ``attn_implementation=``.

    A model of it gets this rank's ``input_ids``, with ``position_ids`` of where they are in the sequence and
    ``shift_labels``, the tokens behind each: a rank does not have that behind its last one. Other positions are a
    ``RuntimeError`` on all ranks of the sequence.

    Args:
        group: the ranks that share a sequence.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

    require_kind(group, dist.ProcessGroup, "ulysses_attention", 'the ranks of a sequence: mesh["cp"].get_group()')

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        kept = [name for name in _BY_POSITION if options.get(name) is not None]
        if kept:
            raise UnsupportedError(
                f"{type(module).__name__} has {', '.join(kept)}, which Ulysses does not pass on",
                "context parallel takes models whose attention sees all tokens before, such as Llama's",
            )
        positions = options.get("position_ids")
        if positions is not None and getattr(module, "layer_idx", 0) == 0:  # the same in all layers
            _check_positions(positions, group)
        if key.shape[1] % group.size():
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        found = ulysses(
            query,
            key,
            value,
            group,
            dropout_p=dropout,
            scale=scaling,
            is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return found.transpose(1, 2), None

    def mask(
        *_: Any,
        attention_mask: Tensor | None = None,
        mask_function: object = causal_mask_function,
        use_vmap: bool = False,
        config: object = None,
        **__: Any,
    ) -> None:
        if attention_mask is not None:
            raise UnsupportedError(
                "attention_mask is given, and Ulysses has none of sequences that are shared",
                "leave it out, and cut sequences to one length",
            )
        chunked = getattr(config, "attention_chunk_size", None) is not None
        # While it is traced transformers takes any positions for packed ones, so that a mask for these tells nothing.
        other = mask_function is not causal_mask_function and not torch.compiler.is_compiling()
        if chunked or use_vmap or other:
            raise UnsupportedError(
                "the model masks more than the tokens behind each, and Ulysses has no mask of shared sequences",
                "one document in each sequence, of a model whose attention sees all tokens before",
            )

    name = f"ulysses over {group.group_name}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def _check_positions(positions: Tensor, group: dist.ProcessGroup) -> None:
    """Without ``position_ids`` each rank's tokens would be the first ones, and packed documents would attend to each
    other."""
    tokens = positions.shape[-1]
    here = torch.arange(group.rank() * tokens, (group.rank() + 1) * tokens, device=positions.device)
    assert_on_all_ranks(
        (positions == here).all(),
        group,
        "position_ids are not those of this rank's tokens in a sequence of one document: of n tokens on each rank, "
        "rank r of a sequence has those from r * n to (r + 1) * n - 1",
    )
