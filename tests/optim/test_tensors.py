"""What native optimizers see of a group: local tensors, gradients laid out like them, and errors with a name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zerograph.core.errors import UnsupportedError
from zerograph.optim.tensors import NOTHING, GroupLayout, is_dense, on_host, pieces


def layout_of(*tensors: Tensor, names: tuple[str, ...] = ()) -> GroupLayout:
    return GroupLayout({"params": [nn.Parameter(t) for t in tensors], "param_names": names})


def given(layout: GroupLayout, *grads: Tensor | None) -> GroupLayout:
    for p, grad in zip(layout.params, grads, strict=True):
        p.grad = grad
    return layout


def test_addresses_tell_no_gradient_from_an_empty_one() -> None:
    layout = layout_of(torch.zeros(3), torch.zeros(0), torch.zeros(2))
    found = given(layout, torch.ones(3), torch.ones(0), None).gradients()
    assert not found.complete
    assert found.addresses == [layout.params[0].grad.data_ptr(), NOTHING, 0]  # type: ignore[union-attr]
    assert found.of([0, 1]).complete and not found.of([2]).complete and found.of([0, 1, 2]) is found
    assert [g is None for g in found.of([2, 0]).tensors] == [True, False]
    assert layout.pieces(found, over=("a group",)) == [] == layout.elsewhere(found, over=())  # type: ignore[arg-type]
    assert [count for _, _, count in layout.pieces(found, over=())] == [3, 0]


def test_what_moved_is_noticed() -> None:
    layout = layout_of(torch.zeros(3), torch.zeros(2))
    params = layout.params
    assert layout.describes(params)
    assert not layout.describes(params[:1]) and not layout.describes(params[::-1])
    params[0].data = torch.zeros(3)
    assert not layout.describes(params)


def test_a_change_of_dtype_is_counted_once() -> None:
    layout = layout_of(torch.zeros(3))
    for dtype, changes in ((torch.float32, 1), (torch.float32, 1), (torch.bfloat16, 2), (torch.bfloat16, 2)):
        layout.params[0].grad = None
        layout.params[0].grad_dtype = dtype
        found = given(layout, torch.ones(3, dtype=dtype)).gradients()
        assert (layout.changes, layout.dtypes) == (changes, [dtype])
        assert found.tensors[0] is layout.params[0].grad


def test_gradients_are_laid_out_as_their_parameters() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    layout = layout_of(turned, torch.zeros(1, 4).expand(1, 4))
    grad = torch.arange(6.0).view(3, 2)
    first, second = given(layout, grad, torch.ones(4, 1).t()).gradients().tensors
    assert first is not None and first.stride() == turned.stride() and torch.equal(first, grad)
    assert second is layout.params[1].grad, "strides of dimensions of one element say nothing"
    fits = grad.t().contiguous().t()
    layout.params[0].grad = fits
    assert layout.gradients().tensors[0] is layout.params[0].grad


WRONG: list[tuple[Tensor, Callable[[nn.Parameter], None], str]] = [
    (torch.empty(3, device="meta"), lambda p: setattr(p, "grad", torch.empty(3, device="meta")), "on the meta device"),
    (torch.zeros(3, dtype=torch.complex64), lambda p: setattr(p, "grad", torch.ones_like(p)), "is complex"),
    (torch.zeros(4, 4)[:, :2], lambda p: setattr(p, "grad", torch.ones(4, 2)), "it is a part of a larger tensor"),
    (
        torch.zeros(3, dtype=torch.float64),
        lambda p: setattr(p, "grad", torch.ones_like(p)),
        "is torch.float64, and the",
    ),
    (
        torch.zeros(3, 2),
        lambda p: setattr(p, "grad", torch.ones(3, 2).to_sparse()),
        "gradient of layout torch.sparse_coo",
    ),
]


@pytest.mark.parametrize(("value", "give", "message"), WRONG, ids=[message for *_, message in WRONG])
@pytest.mark.parametrize(("names", "who"), [((), "parameter 1 of its group"), (("a", "h.0.up"), "parameter h.0.up")])
def test_what_no_kernel_can_update_is_refused_by_name(
    value: Tensor, give: Callable[[nn.Parameter], None], message: str, names: tuple[str, ...], who: str
) -> None:
    layout = layout_of(torch.zeros(2), value, names=names)
    give(layout.params[1])
    with pytest.raises(UnsupportedError, match=message) as caught:
        layout.gradients()
    assert str(caught.value).startswith(who) and caught.value.hint


def test_a_parameter_that_changed_its_shape_is_refused() -> None:
    layout = given(layout_of(torch.zeros(3)), torch.ones(3))
    layout.gradients()
    layout.locals[0] = torch.zeros(4)
    with pytest.raises(UnsupportedError, match=r"has shape \(4,\) on this rank, its gradient \(3,\)"):
        layout._fitted(torch.ones(3), 0)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(4, 4)[::2], False),
        (torch.zeros(1, 3).expand(2, 3), False),
    ],
)
def test_dense_is_one_piece_of_memory_in_any_order(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


def test_what_the_kernels_can_read() -> None:
    x = torch.zeros(3, dtype=torch.bfloat16)
    assert on_host([]) and on_host([x]) and pieces([x])[0][::2] == (x.data_ptr(), 3)
    for other in (torch.zeros(3).double(), torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()):
        assert not on_host([x, other])
