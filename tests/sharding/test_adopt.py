"""Finding what owns and holds parameters, and pointing optimizers and lists at the ones that replace them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import zerograph
from zerograph.core.errors import UnsupportedError
from zerograph.sharding import adopt


class Marked(nn.Linear):
    """A class of this test alone."""


class MarkedTwice(Marked):
    """And a subclass."""


def test_live_objects_are_found_by_class_and_subclass() -> None:
    kept = [Marked(1, 1), MarkedTwice(1, 1)]
    assert set(map(id, adopt.live(Marked))) == set(map(id, kept))
    assert adopt.live(MarkedTwice) == kept[1:]


def test_an_optimizer_whose_init_raised_is_none() -> None:
    """The error's traceback keeps it alive, as one in a notebook does."""
    held: list[BaseException] = []
    for make in (torch.optim.AdamW, zerograph.optim.AdamW):
        with pytest.raises(ValueError, match="Invalid learning rate") as caught:
            make(nn.Linear(2, 2).parameters(), lr=-1.0)
        held.append(caught.value)
    assert all(hasattr(optimizer, "param_groups") for optimizer in adopt.live(torch.optim.Optimizer))
    zerograph.materialize(zerograph.shard(nn.Linear(2, 2, device="meta"), zerograph.backend()))


def test_all_owners_of_a_parameter_are_found() -> None:
    """Tied weights may live in a module outside of the model; what is no module is not asked."""
    first, second, other = (nn.Linear(2, 2) for _ in range(3))
    second.weight = first.weight
    objects = [object(), first, second, other, nn.Sequential(first)]
    assert adopt.modules_holding([first.weight], objects) == [first, second]
    assert adopt.modules_holding([nn.Parameter(torch.ones(1))], objects) == []


def replaced(*old: nn.Parameter) -> dict[int, tuple[Tensor, Tensor]]:
    return {id(p): (p, nn.Parameter(p.detach() + 1)) for p in old}


def test_lists_of_parameters_hold_the_new_ones_in_place() -> None:
    w, v, other = (nn.Parameter(torch.full((2,), float(i))) for i in range(3))
    mine, mixed, alien = [w, other, v, w], [w, "text"], [other]
    pairs = replaced(w, v)
    new_w, new_v = (new for _, new in pairs.values())
    adopt.replace_everywhere(pairs, None)
    assert [id(p) for p in mine] == [id(p) for p in (new_w, other, new_v, new_w)]
    assert mixed[0] is w, "what is no list of parameters is left alone"
    assert alien[0] is other


def test_optimizers_go_on_with_the_new_ones_and_their_states() -> None:
    w, v, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.Adam([{"params": [w, other], "lr": 0.5}, {"params": [v]}])
    untouched = torch.optim.SGD([other])
    for p in (w, v, other):
        p.grad = torch.ones(2)
    optimizer.step()
    kept = optimizer.state[other]
    pairs, converted = replaced(w, v), []
    new_w, new_v = (new for _, new in pairs.values())

    def convert(value: Tensor, new: Tensor) -> Tensor:
        converted.append(id(new))
        return value + 10

    adopt.replace_everywhere(pairs, convert)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(new_w), id(other)],
        [id(new_v)],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]
    assert {id(p) for p in optimizer.state} == {id(new_w), id(new_v), id(other)}
    assert optimizer.state[other] is kept
    assert optimizer.state[new_w]["exp_avg"].tolist() == pytest.approx([10.1] * 2)
    assert optimizer.state[new_w]["step"] == 1.0, "a counter is no shard of anything"
    assert sorted(converted) == sorted([id(new_w), id(new_v)] * 2)
    assert untouched.param_groups[0]["params"] == [other]


def _wrapped() -> str:
    with pytest.raises(UnsupportedError) as caught:
        adopt.refuse_wrapped([None, nn.Linear(2, 2), nn.parallel.DistributedDataParallel(nn.Linear(2, 2))])
    return str(caught.value)


def test_what_something_else_distributes_is_refused_by_its_name() -> None:
    adopt.refuse_wrapped([None, nn.Linear(2, 2)])
    (message,) = run(1, _wrapped)
    assert message.startswith("the model is wrapped by DistributedDataParallel") and "stage=0 is DDP" in message


def _meshes() -> None:
    """Equal meshes become one object; those of other names over the same ranks do not, nor are in the way."""
    group = dist.new_group(backend="gloo")
    made = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,)) for name in ("x", "y", "x", "y")]
    x, y, equal, equal_y = made
    assert equal == x != y
    assert [adopt.one_mesh(mesh) for mesh in made] == made
    assert adopt.one_mesh(equal) is (one := adopt.one_mesh(x)) and adopt.one_mesh(equal_y) is adopt.one_mesh(y)
    param = DTensor.from_local(torch.ones(2), equal, [Shard(0)])
    adopt.move_to_one_mesh(param)
    assert param.device_mesh is one
    adopt.move_to_one_mesh(None)
    adopt.move_to_one_mesh(torch.ones(2))


def test_equal_meshes_are_one() -> None:
    run(2, _meshes)
