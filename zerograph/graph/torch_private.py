"""The private names of torch that reading FX graphs needs, where no public name exists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._inductor.inductor_prims
import torch._prims.rng_prims
from torch import fx
from torch._dynamo.eval_frame import skip_code
from torch._functorch.partitioners import get_default_op_list
from torch._higher_order_ops.effects import with_effects

OpOverload = torch._ops.OpOverload
"""The class of ``torch.ops.aten.add.Tensor``: the operators are public, their class is not. Seen in 2.11, 2.13."""

WITH_EFFECTS = with_effects
"""The operator that AOTAutograd wraps around those that must run in order. Seen in 2.11, 2.13."""
MAKE_TOKEN = torch.ops.prims._make_token.default
"""What :data:`WITH_EFFECTS` takes first, and gives first. Seen in 2.11, 2.13."""
SINK_TOKENS = torch.ops.prims._sink_tokens.default
"""Keeps the operators that gave its tokens. Seen in 2.11, 2.13."""

SEEDS = frozenset({torch.ops.prims.inductor_seed.default, torch.ops.prims.inductor_seeds.default})
"""Inductor's operators that draw seeds; importing a private module registers them. Seen in 2.11, 2.13."""
RANDOM = frozenset({torch.ops.prims.inductor_random.default, torch.ops.prims.inductor_randint.default})
"""Inductor's operators that make random numbers of a seed. Seen in 2.11, 2.13."""
LOOKUP_SEED = torch.ops.prims.inductor_lookup_seed.default
"""Takes one of :data:`SEEDS` apart. Seen in 2.11, 2.13."""


SAVES_GENERATOR = torch.ops.higher_order.run_and_save_rng_state
"""Calls an operator, and gives the generator's state from before too. Seen in 2.11, 2.13."""


def behind_generator(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The operator that a node calls, and its arguments.

    The partitioner calls a recomputed operator that draws random numbers (attention may) through others, which save the
    generator's state and restore it. Only importing a private module registers those. Seen in 2.11, 2.13.
    """
    operators = torch.ops.higher_order
    if target in (operators.run_and_save_rng_state, operators.graphsafe_run_with_rng_state):
        return args[0], args[1:]
    if target is operators.run_with_rng_state:
        return args[1], args[2:]
    return target, args


_FUNCTIONAL = {"_c10d_functional", "_c10d_functional_autograd", "_dtensor"}


def place_of_group(target: Any) -> int | None:
    """The place among the arguments of a functional collective where its group's name is; None of other operators.
    Those of other libraries may look for the group in more than torch's table of names. Seen in 2.13."""
    if not isinstance(target, OpOverload) or target.namespace not in _FUNCTIONAL:
        return None
    names = [argument.name for argument in target._schema.arguments]
    return names.index("group_name") if "group_name" in names else None


def named_arguments(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the operator ``target`` by name, as its schema has them, which is private.
    Seen in 2.11, 2.13."""
    names = (argument.name for argument in target._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def is_recomputable(node: fx.Node) -> bool:
    """Whether the partitioner may compute ``node`` again, by its own lists of operators; it publishes none of them.
    Seen in 2.11, 2.13."""
    return bool(_operator_lists().is_recomputable(node))


_operator_lists = functools.cache(get_default_op_list)


def skip_frame(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling ``function`` as a frame of its own, while it is still inlined into other frames.

    ``torch.compiler.disable`` would break the graph of the frame that calls it. Seen in 2.11, 2.13.
    """
    skip_code(function.__code__)
