"""Context parallel as in DeepSpeed-Ulysses (arXiv:2309.14509): each rank has some tokens of every sequence, and in
attention all tokens of some heads.

Only attention mixes tokens, so the rest of a model runs on a rank's own. Parameters are sharded over all ranks, those
of one sequence too: every rank has a term of each gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from zerograph.core.arguments import require, require_flag, require_kind
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.core.units import is_number
from zerograph.integrations.torch_private import all_gather, all_to_all, assert_on_all_ranks

Attention = Callable[..., Tensor]
_REFUSED = {
    "position_bias": "context parallel takes models that turn or embed positions, such as Llama's",
    "cu_seq_lens_q": "leave cu_seq_lens out: position_ids say where documents begin, with packed=True",
}
"""What models of transformers give their attention beside the three, and change it by; and what to do."""
_NOT_MADE = "and Ulysses cannot make such a mask of shared sequences"
_WHOLE = "give each rank the mask of all tokens: attention_mask of booleans [batch, 1, all tokens, all tokens]"


class _Heads(NamedTuple):
    """Stands for the module in an eager attention of transformers, which asks it for no more."""

    training: bool
    sinks: Tensor | None
    num_key_value_groups: int = 1


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
        options: for it, such as ``is_causal=True``. A mask is of all tokens: see :func:`whole_mask`.

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


def whole_mask(
    positions: Tensor, group: dist.ProcessGroup, padding: Tensor | None = None, window: int | None = None
) -> Tensor:
    """What each token sees, of all tokens of sequences that ranks share: ``attn_mask=`` of :func:`ulysses`.

    A token sees itself and those before it in its document. Make one mask for all layers of a forward: a rank sends
    ``positions`` and ``padding`` in it.

    Args:
        positions: ``[batch, tokens]`` of this rank's tokens, in their documents. A token begins a document if its
            position is not one more than that of the token before, which may be another rank's.
        group: the ranks that share a sequence.
        padding: ``[batch, tokens]`` of this rank's tokens: 0 or false are those that none may see.
        window: how many tokens a token sees at most, itself included.

    Returns:
        Booleans ``[batch, 1, all tokens, all tokens]``: as many bytes.

    Raises:
        ConfigError: shapes are others, ``window`` is no positive number, or ``group`` is none.
    """
    require_kind(group, dist.ProcessGroup, "whole_mask", 'the ranks of a sequence: mesh["cp"].get_group()')
    for name, piece in (("positions", positions), ("padding", positions if padding is None else padding)):
        if not isinstance(piece, Tensor) or piece.ndim != 2 or piece.shape[1] != positions.shape[1]:
            raise ConfigError(
                f"{name} must be a tensor [batch, tokens] of this rank's tokens, got {_shape(piece)}",
                "each rank gives its piece: ranks send them to each other",
            )
    require(
        window is None or (is_number(window, int) and window > 0),
        f"window must be a number of tokens, got {window!r:.80}",
        "1 sees itself alone; None is for no window",
    )
    seen = _of_documents(all_gather(positions, group), window)
    return seen if padding is None else seen & _unpadded(padding, group)


def ulysses_attention(group: dist.ProcessGroup, packed: bool = False) -> str:
    """Make :func:`ulysses` known to transformers; returns the name for ``attn_implementation=``.

    A model of it gets this rank's ``input_ids``, with ``position_ids`` of where they are in the sequence and
    ``shift_labels``, the tokens behind each: a rank does not have that behind its last one. Other positions are a
    ``RuntimeError`` on all ranks of the sequence. Windows are the model's own. Where it caps scores or has sinks, its
    own eager attention runs, which holds a score for each pair of tokens and each of a rank's heads. An
    ``attention_mask`` of two dimensions is this rank's piece, and one of four booleans for all tokens,
    ``[batch, 1, all tokens, all tokens]``.

    Args:
        group: the ranks that share a sequence.
        packed: ``position_ids`` begin anew with each document, and a token sees its own alone. The mask of that has a
            byte for each pair of tokens of a sequence.

    Raises:
        ConfigError: ``group`` is none, or ``packed`` no bool.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    require_kind(group, dist.ProcessGroup, "ulysses_attention", 'the ranks of a sequence: mesh["cp"].get_group()')
    require_flag("packed", packed, "True for several documents in a sequence, whose position_ids begin anew")

    name = f"ulysses over {group.group_name}" + packed * " of packed documents"
    made = _Ulysses(group, packed)
    AttentionInterface.register(name, made.attention)
    AttentionMaskInterface.register(name, made.mask)
    return name


class _Ulysses:
    """What transformers asks of an implementation of attention, for the ranks ``group`` that share a sequence."""

    def __init__(self, group: dist.ProcessGroup, packed: bool) -> None:
        self._group, self._packed = group, packed

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        positions: Any = options.get("position_ids")
        _refuse(module, options, positions, causal, self._packed)
        if attention_mask is not None:
            _require_whole(attention_mask, query.shape[2] * self._group.size())
        if positions is not None and getattr(module, "layer_idx", 0) == 0:  # the same in all layers
            _check_positions(positions, self._group, self._packed)
        if self._packed:  # in each layer, as masks are made without positions; of equal nodes a graph keeps one
            documents = _of_documents(all_gather(positions, self._group))
            attention_mask = documents if attention_mask is None else attention_mask & documents
        if key.shape[1] % self._group.size():
            key, value = (_repeated(x, query.shape[1]) for x in (key, value))
        softcap, sinks = options.get("softcap"), options.get("s_aux")
        found = ulysses(
            query,
            key,
            value,
            self._group,
            _attend if softcap is None and sinks is None else _as_eagerly(module, self._group, softcap, sinks),
            attn_mask=attention_mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=causal and attention_mask is None,
        )
        return found.transpose(1, 2), None

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor],
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        use_vmap: bool = False,
        config: object = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Tensor | None:
        """Once in a forward for layers that are alike; None lets :meth:`attention` be causal, or see all."""
        causal = "allow_is_bidirectional_skip" not in options  # which transformers says of the others only
        tokens = q_length * self._group.size()
        window = local_size if local_size is not None and local_size < tokens else None
        if getattr(config, "attention_chunk_size", None) is not None:
            raise UnsupportedError(
                "the model attends in chunks, as Llama 4 does, whose attention is not told position_ids, and scales "
                "queries by their places among a rank's tokens, not in the sequence",
                "use ulysses(...) in an attention of your own",
            )
        if use_vmap or (window is not None and not causal):
            raise UnsupportedError(f"the model masks by more than a causal window, {_NOT_MADE}", _WHOLE)
        unpadded = None
        if attention_mask is not None:
            _check_padding(kv_length, q_length, self._packed)
            unpadded = _unpadded(attention_mask, self._group).expand(-1, -1, tokens, -1)
        if causal:
            _check_causal(mask_function, batch_size, q_length, device, self._group)
        if not causal or (window is None and unpadded is None):
            return unpadded
        seen = _before(tokens, window, device)[None, None]
        return seen if unpadded is None else seen & unpadded


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
    if attn_mask is not None:  # beside a mask GPUs have kernels for equal heads only
        key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=grouped, **options)


def _as_eagerly(
    module: torch.nn.Module, group: dist.ProcessGroup, softcap: float | None, sinks: Tensor | None
) -> Attention:
    """The attention that the model's own file has for ``attn_implementation="eager"``, of this rank's heads.

    ``scaled_dot_product_attention`` neither caps scores nor has sinks, and models differ in where they round."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedError(
            f"{type(module).__name__} caps scores or has sinks, without an eager_attention_forward in its file",
            "use ulysses(...) in the attention of the model, with an attention of yours",
        )
    own = None if sinks is None else sinks.chunk(group.size())[group.rank()]
    heads = _Heads(module.training, own)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        key, value = (_repeated(x, query.shape[1]) for x in (key, value))
        if is_causal:
            attn_mask = _before(query.shape[2], None, query.device)
        if attn_mask is not None:  # eager attentions add it, and know no booleans
            attn_mask = query.new_zeros(()).where(attn_mask, torch.finfo(query.dtype).min)
        found, _ = eager(heads, query, key, value, attn_mask, scaling=scale, dropout=dropout_p, softcap=softcap)
        return found.transpose(1, 2)

    return attend


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _before(tokens: int, window: int | None, device: torch.device | str) -> Tensor:
    """``[tokens, tokens]``: who is the token itself, or before it and in its window."""
    here = torch.arange(tokens, device=device)
    distance = here[:, None] - here
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _of_documents(positions: Tensor, window: int | None = None) -> Tensor:
    """:func:`_before` in one document, by the rule of transformers. ``positions`` are of all tokens."""
    document = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & _before(positions.shape[1], window, positions.device)


def _unpadded(padding: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[batch, 1, 1, all tokens]`` of each rank's piece."""
    return (all_gather(padding.long(), group) != 0)[:, None, None, :]  # of booleans Inductor makes wrong code


def _refuse(
    module: torch.nn.Module, options: dict[str, Any], positions: Tensor | None, causal: bool, packed: bool
) -> None:
    name = type(module).__name__
    if getattr(module, "compressor", None) is not None:
        raise UnsupportedError(
            f"{name} attends to keys that it makes of several tokens each, of which each rank has its own only",
            "train DeepSeek V4 without context parallel",
        )
    for option, hint in _REFUSED.items():
        if options.get(option) is not None:
            raise UnsupportedError(f"{name} is given {option}, which Ulysses does not pass on", hint)
    if causal and positions is None:
        raise UnsupportedError(
            f"{name} is not told position_ids, by which it would be seen whether a rank has its own",
            "use ulysses(...) in the attention of the model",
        )
    if packed and not (causal and positions is not None and positions.ndim == 2):
        raise UnsupportedError(
            f"{name} is not causal, or its position_ids are not [batch, tokens]: they do not say where documents begin",
            _WHOLE,
        )


def _require_whole(mask: Tensor, tokens: int) -> None:
    if mask.ndim != 4 or mask.shape[1:] != (1, tokens, tokens) or mask.dtype != torch.bool:
        raise ConfigError(
            f"a mask of {_shape(mask)} {mask.dtype} is not of the {tokens} tokens of a whole sequence",
            f"booleans [batch, 1, {tokens}, {tokens}], or in two dimensions this rank's piece of the padding",
        )


def _check_padding(given: int, tokens: int, packed: bool) -> None:
    if given != tokens:
        raise ConfigError(
            f"attention_mask is of {given} tokens, and this rank has {tokens} of each sequence",
            "give each rank the piece of its tokens",
        )
    require(
        not packed,
        "attention_mask is given beside packed documents, of which transformers knows nothing then",
        "leave it out: padding behind the last document is one more, without labels",
    )


def _check_causal(
    sees: Callable[..., Tensor], batch: int, tokens: int, device: torch.device | str, group: dist.ProcessGroup
) -> None:
    """Tokens of an image may see those behind them: traced, the function for that looks like one for documents."""
    here = torch.arange(tokens - 1, device=device)[None]
    later = sees(torch.arange(batch, device=device)[:, None], torch.zeros_like(here), here, here + 1)
    assert_on_all_ranks(
        later.logical_not().all(),
        group,
        f"the model lets tokens see those behind them, {_NOT_MADE}: {_WHOLE}",
    )


def _check_positions(positions: Tensor, group: dist.ProcessGroup, packed: bool) -> None:
    """Without ``position_ids`` each rank's tokens would be the first ones, and packed documents would attend to each
    other."""
    tokens = positions.shape[-1]
    if packed:
        first = torch.arange(tokens, device=positions.device).repeat(group.size())
        holds = (all_gather(positions, group) != first).any() | (group.size() == 1)
        message = (
            "position_ids are the first ones on each rank of a sequence, as those that a model takes without them: "
            "give each rank those of its tokens in their documents"
        )
    else:
        here = torch.arange(group.rank() * tokens, (group.rank() + 1) * tokens, device=positions.device)
        holds = (positions == here).all()
        message = (
            "position_ids are not those of this rank's tokens in a sequence of one document: of n tokens on each rank, "
            "rank r of a sequence has those from r * n to (r + 1) * n - 1, padding included; "
            "ulysses_attention(group, packed=True) takes several documents"
        )
    assert_on_all_ranks(holds, group, message)


def _shape(value: object) -> str:
    """Only for an error that is raised: Dynamo cannot trace the text of sizes that vary."""
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
