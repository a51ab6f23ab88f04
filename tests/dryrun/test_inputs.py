"""The inputs of a dry run: which dimensions are batch and sequence, and what is resized with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerograph.core.errors import UnsupportedError
from zerograph.dryrun.inputs import arguments, sizes_of


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [
        ([], {}),
        ([3, "text"], {}),
        ([torch.zeros(())], {}),
        ([torch.zeros(()), ids(2, 7)], {"batch": 2, "seq": 7}),
        ([ids(2)], {"batch": 2}),
        ([ids(2, 7)], {"batch": 2, "seq": 7}),
        ([ids(2, 7, 5)], {"batch": 2, "seq": 7}),
        ([torch.zeros(2, 7)], {"batch": 2}),
        ([torch.zeros(2, 7, 5)], {"batch": 2, "seq": 7}),
        ([torch.zeros(2, 3, 8, 8)], {"batch": 2}),
        ([ids(2, 3, 8, 8)], {"batch": 2}),
        ([None, ids(4, 9), torch.zeros(2, 7, 5)], {"batch": 4, "seq": 9}),
    ],
)
def test_the_first_tensor_tells_batch_and_sequence(inputs: list[Any], sizes: dict[str, int]) -> None:
    assert sizes_of(inputs) == sizes


def test_without_inputs_of_its_own_a_model_is_given_token_ids() -> None:
    (tokens,), named = arguments(None, 2, 7, {})
    assert (tokens.shape, tokens.dtype, tokens.device.type, named) == ((2, 7), torch.int64, "meta", {})
    assert arguments(None, 2, 7, {"seq": 9})[0][0].shape == (2, 9)


def test_inputs_come_by_position_or_by_name() -> None:
    x, y = ids(2, 7), ids(2)
    assert arguments(x, 1, 1, {}) == ((x,), {})
    assert arguments([x, y], 1, 1, {}) == arguments((x, y), 1, 1, {}) == ((x, y), {})
    assert arguments({"x": x, "flag": True}, 1, 1, {}) == ((), {"x": x, "flag": True})


def test_every_tensor_follows_where_its_sizes_are_the_same() -> None:
    """The batch is a first dimension, a sequence any later one; a mask has two of them."""
    given = {
        "tokens": ids(2, 7), "mask": torch.zeros(2, 1, 7, 7), "positions": ids(7), "table": torch.zeros(7, 2),
        "labels": torch.zeros(2, 7, 3, dtype=torch.bfloat16, requires_grad=True), "heads": 7,
    }  # fmt: skip
    _, found = arguments(given, 1, 1, {"batch": 5, "seq": 9})
    assert {name: tuple(x.shape) if isinstance(x, torch.Tensor) else x for name, x in found.items()} == {
        "tokens": (5, 9), "mask": (5, 1, 9, 9), "positions": (7,), "table": (7, 2), "labels": (5, 9, 3), "heads": 7,
    }  # fmt: skip
    assert found["labels"].dtype is torch.bfloat16 and found["labels"].requires_grad
    assert found["table"] is given["table"], "what keeps its size is handed on as it is"


def test_tensors_in_lists_and_dicts_are_resized() -> None:
    tokens = ids(2, 7)
    (images, named), _ = arguments(([torch.zeros(2, 3, 8), tokens], {"ids": tokens, "flag": True}), 1, 1, {"batch": 5})
    assert [x.shape for x in images] == [(5, 3, 8), (5, 7)]
    assert named["ids"] is images[1] and named["flag"] is True


def test_a_tensor_that_is_given_twice_stays_one() -> None:
    tokens = ids(2, 7)
    (x,), named = (
        arguments((tokens,), 1, 1, {"seq": 9})[0],
        arguments({"x": tokens, "labels": tokens}, 1, 1, {"seq": 9})[1],
    )
    assert x.shape == (2, 9) and named["x"] is named["labels"]


@pytest.mark.parametrize(
    ("given", "sizes", "name"), [(torch.zeros(2, 7), {"seq": 9}, "seq"), (3, {"batch": 2}, "batch")]
)
def test_what_cannot_be_resized_is_refused(given: Any, sizes: dict[Any, int], name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no dimension that is taken for {name}") as caught:
        arguments(given, 1, 1, sizes)
    assert "batch is the first dimension of the first tensor" in caught.value.hint
