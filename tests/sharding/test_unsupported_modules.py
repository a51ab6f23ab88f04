"""Modules that adoption cannot take, or takes although they look as if it could not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerograph
from zerograph.core.errors import ShardingError, UnsupportedError


class Registered(nn.Module):
    """Its subclasses have to say what they are."""

    kinds: list[str] = []

    def __init_subclass__(cls, kind: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Registered.kinds.append(kind)


class Layer(Registered, kind="layer"):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class Final(type):
    """Classes that are not to be inherited from."""

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("this class is final")
        return super().__new__(mcs, name, bases, members)


class Sealed(nn.Linear, metaclass=Final):
    pass


def with_buffer(values: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_buffer("table", values)
    return model


OUTSIDE: list[nn.Module] = []


def tied_to_a_sealed_one() -> nn.Module:
    """A model whose second weight a module holds that is no part of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    OUTSIDE[:] = [Sealed(4, 4)]
    OUTSIDE[0].weight = model[1].weight
    return model


def sharing(parts: Callable[[Tensor], tuple[Tensor, ...]]) -> nn.Module:
    """Two layers whose weights are parts of one tensor."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, part in zip(model, parts(torch.randn(8, 8)), strict=True):
        layer.weight = nn.Parameter(part)
    return model


def made(which: str) -> nn.Module:
    torch.manual_seed(0)
    makers = {
        "sealed outside": tied_to_a_sealed_one,
        "sealed": lambda: nn.Sequential(nn.Linear(4, 4), Sealed(4, 4)),
        "coo": lambda: with_buffer(torch.eye(4).to_sparse()),
        "csr": lambda: with_buffer(torch.eye(4).to_sparse_csr()),
        "quantized": lambda: with_buffer(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        "tied by data": lambda: sharing(lambda whole: (whole[:4, :4], whole[:4, :4].detach())),
        "overlapping": lambda: sharing(lambda whole: (whole[:4, :4], whole[3:7, 2:6])),
        "scripted": lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))),
    }
    return makers[which]()


def _refused(which: str) -> str:
    model = made(which)
    before = tuple(model.parameters())
    with pytest.raises(UnsupportedError) as caught:
        zerograph.shard(model, zerograph.backend(stage=3))
    assert type(model[0]) is nn.Linear  # nothing was changed
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    return str(caught.value)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("sealed outside", "class Sealed is part of the model and cannot be inherited from (this class is final)"),
        ("sealed", "class Sealed is part of the model and cannot be inherited from (this class is final)"),
        ("coo", "buffer 0.table is torch.sparse_coo"),
        ("csr", "buffer 0.table is torch.sparse_csr"),
        ("quantized", "buffer 0.table is quantized"),
        ("tied by data", "0.weight and 1.weight are two tensors that share memory"),
        ("overlapping", "0.weight and 1.weight are two tensors that share memory"),
        ("scripted", "RecursiveScriptModule 1 is a ScriptModule"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_changed(which: str, message: str) -> None:
    for text in run(2, _refused, which):
        assert text.startswith(message) and "hint:" in text


def _taken() -> None:
    rank = float(dist.get_rank())
    model = nn.Sequential(Layer(), with_buffer(torch.full((1,), rank).expand(3, 4)))
    zerograph.shard(model, zerograph.backend(stage=3))
    assert type(model[0]) is not Layer and isinstance(model[0], Layer)
    assert Registered.kinds == ["layer"]  # the generated class is none of theirs
    table = model[1][0].table
    assert table.eq(0).all() and table.stride() == (0, 0)  # rank 0's, and still one value in memory


def test_classes_that_take_arguments_and_expanded_buffers_work() -> None:
    run(2, _taken)


def _parts() -> None:
    columns = sharing(lambda whole: (whole[:, :4], whole[:, 4:]))
    frozen = sharing(lambda whole: (whole[:4, :4], whole[:4, :4])).requires_grad_(False)
    for model in (columns, frozen):
        zerograph.shard(model, zerograph.backend(stage=3))
        assert isinstance(model[1].weight, DTensor)


def test_parts_of_one_tensor_without_a_common_element_and_frozen_ones_are_sharded() -> None:
    run(2, _parts)


def test_modules_that_wait_for_their_first_batch_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False))
    backend = zerograph.backend(dtype=torch.bfloat16)
    with pytest.raises(ShardingError, match=r"LazyBatchNorm1d 1 has no shapes(?s:.*)call the model once"):
        zerograph.shard(model, backend)
    model(torch.ones(2, 4))
    zerograph.shard(model, backend)
