"""Optimizers of torch.optim over states on NVMe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from optim.test_stream import params_of, stored

from zerograph.core.errors import CheckpointError, UnsupportedError
from zerograph.optim.algorithms.stock import make_states


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        (torch.optim.AdamW, {}, {"exp_avg", "exp_avg_sq"}),
        (torch.optim.AdamW, {"fused": True}, {"exp_avg", "exp_avg_sq"}),
        (torch.optim.Adam, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, {"sum"}),
        (torch.optim.SGD, {}, set()),
    ],
)
def test_they_compute_the_same(kind: type, options: dict, states: set[str], tmp_path: Path) -> None:  # type: ignore[type-arg]
    here, there = params_of([500, 2000]), params_of([500, 2000])
    store = stored(there, 1, tmp_path)
    mine, theirs = kind(here.values(), **options), kind(there.values(), **options)
    for step in range(3):
        for name in here:
            grad = torch.randn(here[name].shape, generator=torch.Generator().manual_seed(step))
            here[name].grad, there[name].grad = grad, grad.clone()
        make_states(theirs, store)
        mine.step()
        theirs.step()
    places = store.locations.places()
    for name, param in there.items():
        assert torch.equal(param, here[name])
        found = {n for n, v in theirs.state[param].items() if store.states.holds(theirs, places[id(param)], n, v)}
        assert found == states
        assert all(torch.equal(mine.state[here[name]][n], theirs.state[param][n]) for n in states)


def test_others_are_refused_with_what_to_use(tmp_path: Path) -> None:
    params = params_of([10])
    store = stored(params, 1, tmp_path)
    params["p0"].grad = torch.ones(10)
    for optimizer in (torch.optim.RMSprop(params.values()), torch.optim.SGD(params.values(), momentum=0.9)):
        with pytest.raises(UnsupportedError, match=f"{type(optimizer).__name__} cannot keep its states on NVMe"):
            make_states(optimizer, store)


@pytest.mark.parametrize(("named", "name"), [(True, "p1"), (False, "1 of its group")])
def test_a_state_of_another_shape_is_told_with_its_parameter(named: bool, name: str, tmp_path: Path) -> None:
    params = params_of([10, 20])
    store = stored(params, 1, tmp_path)
    optimizer = torch.optim.AdamW(params.items() if named else params.values())
    optimizer.state[params["p1"]] = {"exp_avg": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=rf"exp_avg of parameter {name} has shape \(3,\), its parameter \(20,\)"):
        make_states(optimizer, store)
