"""Tensor parallelism of transformers' models along an axis of a mesh, beside the axis that ZeroGraph shards over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from zerograph.core.arguments import require, require_kind
from zerograph.core.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split ``model`` along an axis of a mesh, in place, by the plan that transformers has of it (``model.tp_plan``).

    transformers itself applies that plan where ``from_pretrained`` gets a ``DistributedConfig``, and FSDP along its
    data axis. Call this before the optimizer is made and before the model is compiled.

    Args:
        mesh: the axis, such as ``mesh["tp"]`` of a mesh that has ``"dp"`` too. Its ranks give models of equal values.

    Raises:
        ConfigError: ``mesh`` is no axis, transformers has no plan of the model, or heads do not divide by the ranks.
        UnsupportedError: the plan splits something that is not split here, such as experts.
    """
    require_kind(mesh, DeviceMesh, "tensor_parallel", 'an axis of a mesh: mesh["tp"]')
    name, config = type(model).__name__, model.config.get_text_config()
    require(mesh.ndim == 1, f"a mesh of {mesh.ndim} axes is given to split {name} along", 'give one axis: mesh["tp"]')
    plan = model.tp_plan
    require(plan, f"transformers has no plan to split {name} by", "give parallelize_module of torch a plan of your own")
    heads = [config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads]
    require(
        not any(count % mesh.size() for count in heads),
        f"heads of queries and keys of {name}, {heads}, do not divide by the {mesh.size()} ranks of the axis",
        "use fewer ranks along this axis",
    )
    styles = _styles()
    left = {module: style for module, style in plan.items() if style not in styles}
    if left:
        module, style = next(iter(left.items()))
        raise UnsupportedError(
            f"transformers' plan of {name} splits {module} as {style!r}, which ZeroGraph does not",
            "divide experts with zerograph.integrations.expert_parallel, without an axis of tensor parallelism; else "
            "give parallelize_module of torch a plan of your own",
        )
    parallelize_module(model, mesh, {module: styles[style] for module, style in plan.items()})
    model.tie_weights()  # a head that shares the embedding's weight has got one of its own


def _styles() -> dict[str, ParallelStyle]:
    """Torch's styles, by their names in transformers."""
    return {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        # Norms of a rank's own heads, which are one more dimension: any but the last may be the one that is split.
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=1, use_local_output=True),
    }
