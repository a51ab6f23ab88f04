"""Private names of torch that reading graphs needs: there, and of use, on the installed torch."""

from __future__ import annotations

import torch
from torch import fx

from zerograph.graph import torch_private

aten = torch.ops.aten


def test_operators() -> None:
    assert isinstance(aten.add.Tensor, torch_private.OpOverload)
    assert torch_private.WITH_EFFECTS.name() == "with_effects"
    assert torch_private.LOOKUP_SEED not in torch_private.SEEDS


def test_where_collectives_name_their_group() -> None:
    functional = torch.ops._c10d_functional
    assert torch_private.place_of_group(functional.all_reduce.default) == 2
    assert torch_private.place_of_group(functional.reduce_scatter_tensor.default) == 3
    for other in (functional.wait_tensor.default, aten.add.Tensor, len):
        assert torch_private.place_of_group(other) is None


def test_the_partitioners_lists() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cheap, dear = graph.call_function(aten.relu.default, (x,)), graph.call_function(aten.mm.default, (x, x))
    assert torch_private.is_recomputable(cheap)
    assert not torch_private.is_recomputable(dear)


def test_operators_behind_those_that_keep_the_generator() -> None:
    operators, found = torch.ops.higher_order, (aten.rand.default, ([2],))
    for keeps in (operators.run_and_save_rng_state, operators.graphsafe_run_with_rng_state):
        assert torch_private.behind_generator(keeps, (aten.rand.default, [2])) == found
    assert torch_private.behind_generator(operators.run_with_rng_state, ("state", aten.rand.default, [2])) == found
    assert torch_private.behind_generator(aten.rand.default, ([2],)) == found


def test_a_skipped_function_is_inlined_and_no_frame_of_its_own() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        graphs.append(gm)
        return gm

    def skipped(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    torch_private.skip_frame(skipped)
    torch.compile(skipped, backend=backend)(torch.ones(2))
    assert not graphs
    torch.compile(lambda x: skipped(x).cos(), backend=backend, fullgraph=True)(torch.ones(2))
    assert len(graphs) == 1
