"""Other code that takes sharded parameters for plain tensors: answers, or our errors, with the line to write, before
torch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from zerograph.core.errors import CheckpointError, ShardingError, UnsupportedError
from zerograph.runtime.dtensors import groups_of_ranks
from zerograph.runtime.executor.late_gradients import refuse_reading
from zerograph.runtime.torch_private import local_tensor
from zerograph.sharding.adopt import wrapped_by
from zerograph.sharding.torch_private import AOTDispatchAutograd, before, handle_op, unscale


def explain_shards() -> None:
    """From now on have answers and errors of ours where other code meets shards. Idempotent; for the whole process."""
    c10d = torch.ops.c10d
    for op in (c10d.broadcast_, c10d.allreduce_, c10d.allreduce_coalesced_, c10d.reduce_):
        handle_op(op.default, _refuse_collective)
    handle_op(torch.ops.aten._is_any_true.default, _any_of_own_rows)
    handle_op(torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default, _unscale_most_split_first)
    handle_op(torch.ops.aten._foreach_lerp_.Scalar, _average_apart)
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel):
        before(wrapper, "__init__", _refuse_wrapper)
    before(safetensors.torch, "_find_shared_tensors", _refuse_in_file)
    before(AOTDispatchAutograd, "_raise_tangent_metadata_error", _refuse_sharded_tangent)
    explain_clipping()


def explain_clipping() -> None:
    """From now on have errors of ours where torch's clipping by norm would clip what is left of the gradients, or each
    rank's own. Idempotent; for the whole process."""
    before(clip_grad, "_clip_grads_with_norm_", _refuse_clipping)


def _refuse_clipping(params: Tensor | Iterable[Tensor], *_: Any) -> None:
    if not isinstance(params, Iterator):  # which torch reads, once
        refuse_reading([params] if isinstance(params, Tensor) else list(params))


def _refuse_collective(op: Any, *_: Any) -> None:
    """Loops that average gradients by hand call these with parameters."""
    raise UnsupportedError(
        f"a collective of torch.distributed ({op}) got a DTensor, of which each rank holds its own rows",
        "leave out what synchronizes ranks: ZeroGraph starts all from rank 0's values and averages gradients; "
        "param.to_local() is this rank's part",
    )


def _refuse_sharded_tangent(expected: type | None, _: Any, got: type, *__: Any) -> None:
    """A penalty on sharded parameters makes the loss that a model returned a DTensor.

    The gradients could be right; the loss could not: ``loss.item()`` is this rank's part of the sum.
    """
    if expected is Tensor and issubclass(got, DTensor):
        raise UnsupportedError(
            "the gradient of what compiled code returned is a DTensor: the loss was combined with sharded parameters "
            "outside of forward",
            "take whole numbers of the parameters, `term.full_tensor()` of each p.square().sum(), or compute the term "
            "in forward: docs/guide/parameters.md, Losses over parameters",
        )


def _any_of_own_rows(op: Any, args: tuple[DTensor], _: dict[str, Any]) -> Tensor:
    """Autograd's anomaly mode asks it of each gradient, of which DTensor has no rule. This rank looks at its rows, and
    raises if one is not a number; no other rank is asked, as each may be at another gradient."""
    return op(args[0].to_local())


def _unscale_most_split_first(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A gradient that ``GradScaler`` finds not finite on one rank: all ranks skip the step and lower the scale.

    torch's own handler of DTensors reduces what was found over ranks, but decides by the first gradient alone which
    ranks hold different parts. Where that belongs to a parameter that is unsharded on each, or to experts that few
    ranks divide, not all hear of it: some ranks step and others do not, and their scales differ from then on. So it
    gets the gradient first that most ranks split; their order means nothing to the operator.
    """
    grads, *others = args
    in_order = sorted(grads, key=lambda grad: -math.prod(group.size() for group in groups_of_ranks(grad)))
    unscale(op, (in_order, *others), kwargs)


def _average_apart(_: Any, args: tuple[Sequence[Tensor], Sequence[Tensor], float], __: dict[str, Any]) -> None:
    """Averages move all tensors of a model in one call, with its buffers among them, which are plain: DTensor takes
    lists of DTensors only. Neither needs the other's elements, and this rank's rows none of another rank's."""
    averages, values, weight = args
    pairs = list(zip(averages, values, strict=True))
    for average, value in pairs:  # first, as torch refuses before it writes
        if _placed(average) != _placed(value):
            average.lerp_(value, weight)  # torch moves the rows, or says that one is a plain tensor
    alike = [pair for pair in pairs if _placed(pair[0]) == _placed(pair[1])]
    if alike:
        own, others = zip(*(map(local_tensor, pair) for pair in alike), strict=True)
        torch._foreach_lerp_(own, others, weight)


def _placed(tensor: Tensor) -> tuple[Any, ...] | None:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _refuse_wrapper(wrapper: nn.Module, module: nn.Module, *_: Any, **__: Any) -> None:
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # how DDP is told, before it is made
    ours = {id(p) for m in module.modules() for n, p in m._parameters.items() if n in m.__dict__.get("_zg_specs", ())}
    if any(isinstance(p, DTensor) and id(p) in ours and n not in ignored for n, p in module.named_parameters()):
        raise wrapped_by(type(wrapper))


def _refuse_in_file(named: Mapping[str, Tensor]) -> None:
    """Files of safetensors have whole tensors; those of ``save_model`` and of libraries that call it, for example."""
    shards = [name for name, tensor in named.items() if isinstance(tensor, DTensor)]
    if shards:
        raise CheckpointError(
            f"{len(shards)} of {len(named)} tensors, {shards[0]} for one, are DTensors, of which each rank holds rows; "
            "a file has whole ones",
            "to save, all ranks enter `with zerograph.gathered(model):`, and one writes inside, or all call "
            "`zerograph.export(model, path)`; to load, `model.load_state_dict(safetensors.torch.load_file(path))`",
        )


def explained_methods(base: type[nn.Module]) -> dict[str, Any]:
    """Methods of ``base``, of transformers and its like, that want whole weights: as members of its sharded class."""
    return {name: explain(getattr(base, name)) for name, explain in _METHODS.items() if hasattr(base, name)}


def _save_pretrained(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        given = [value for value in (*args, options.get("state_dict")) if isinstance(value, Mapping)]
        _refuse_in_file(given[0] if given else dict(self.named_parameters()))
        return method(self, *args, **options)

    return save_pretrained


def _resize_token_embeddings(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def resize_token_embeddings(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except RuntimeError as error:  # nothing has changed yet
            if "DTensor" not in str(error):
                raise
            raise ShardingError(
                f"{type(self).__name__}.resize_token_embeddings: sharded embeddings cannot change their size",
                "call it before the model's first call, and before zerograph.shard; to resize a trained model, load "
                "the file of zerograph.export(model, path) into a plain one",
            ) from error

    return resize_token_embeddings


_METHODS = {"resize_token_embeddings": _resize_token_embeddings, "save_pretrained": _save_pretrained}
