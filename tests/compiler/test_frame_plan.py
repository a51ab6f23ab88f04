"""A plan that cannot be carried out is an error before any of it is, wherever the plan comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from graphs import fake_world
from torch import nn

import zerograph
from zerograph.compiler import frame_plan
from zerograph.core.errors import InvariantError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.instructions import Update
from zerograph.core.machine import machine_named
from zerograph.core.param_bytes import shard_bytes, update_bytes
from zerograph.core.plan import Plan
from zerograph.dryrun.forecast import plan_file
from zerograph.planner.estimate.estimate import RESERVE
from zerograph.planner.search.search import Search
from zerograph.sim.rates import Rates


def first_call(made: list[zerograph.Backend] | None = None, **options: Any) -> zerograph.Backend:
    """A backend after one call, in ``made`` also where that fails."""
    torch._dynamo.reset()
    with fake_world(rank=0, world_size=2):
        model = toy.Toy().train()
        backend = zerograph.backend(compute="eager", **options)
        model.compile(backend=backend)
        if made is not None:
            made.append(backend)
        model(torch.arange(4)).sum().backward()
        return backend


def test_a_gpu_offers_what_is_free_there_and_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB 10 are gone to a context and other processes, and 20 torch's, in which the model lies."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (50 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: 20 * 2**30)
    config = zerograph.backend(stage="auto", machine=machine_named("h100-80gb")).config
    planner = frame_plan.Planner(config, 1, {}, device)
    assert planner.budget() == int(70 * 2**30 * (1 - RESERVE))


def losing_a_parameter(plan: Plan) -> Plan:
    first = plan.buckets[0]
    return replace(plan, buckets=(replace(first, params=first.params[1:]), *plan.buckets[1:]))


def reached(call: Callable[[], object]) -> str:
    with pytest.raises(InvariantError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("how", ["rules", "search", "replay"])
def test_a_backend_refuses_what_it_cannot_carry_out(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    if how == "rules":
        made = frame_plan.plan_step
        monkeypatch.setattr(frame_plan, "plan_step", lambda *a, **k: losing_a_parameter(made(*a, **k)))
    elif how == "search":
        options = {"stage": "auto", "memory": "1GiB"}
        found = Search.within

        def within(search: Any, budget: int) -> Any:
            best = found(search, budget)
            return best and replace(best, plan=losing_a_parameter(best.plan))

        monkeypatch.setattr(Search, "within", within)
    else:
        options = {"plan": tmp_path / "plan.json"}
        file = plan_file("toy", lambda: (toy.Toy().train(), (torch.zeros(4, dtype=torch.int64),)),
                         machine_named("cpu"), world=2)  # fmt: skip
        options["plan"].write_text(file.to_json())
        monkeypatch.setattr(frame_plan, "replay", lambda given, step: losing_a_parameter(given.plan))
    seen: list[zerograph.Backend] = []
    text = reached(lambda: first_call(seen, **options))
    assert "is not in the plan" in text
    assert ("zerograph plan MODEL" in text) is (how == "replay")
    assert not seen[0].frames[0].programs


def test_a_tied_parameter_is_reported_as_one_of_several_names() -> None:
    backend = first_call()
    params = {p.name: p for p in backend.frames[0].step.params}
    assert params["embed.weight"].tied_to == ("head.weight",) and "head.weight" not in params
    assert all(not p.tied_to for name, p in params.items() if name != "embed.weight")
    assert Plan.from_json(backend.plan.to_json()) == backend.plan


def _dry(**options: Any) -> PlanFile:
    def make() -> tuple[nn.Module, tuple[torch.Tensor]]:
        return toy.Toy().train(), (torch.zeros(4, dtype=torch.int64),)

    return plan_file("toy", make, machine_named("cpu"), world=2, **options)


def test_an_optimizer_without_moments_moves_less() -> None:
    def moved(moments: int) -> str:
        file = _dry(moments=moments)
        (reason,) = [reason for reason in file.reasons if reason.subject == "optimizer"]
        assert reason.decision.endswith(" read and written")
        return reason.decision

    assert moved(0) != moved(2)


def test_updates_are_what_the_forecast_takes_time_for() -> None:
    backend = first_call()
    step, machine = backend.frames[0].step, machine_named("cpu")
    trained = [p for p in step.params if p.trainable]
    assert "up.bias" not in {p.name for p in trained}
    sizes = tuple(update_bytes(p, 2 * shard_bytes(p)) for p in trained)
    expected = sum(map(machine.update.seconds, sizes))
    assert expected == pytest.approx(Rates(machine, 2, "float32").seconds(Update((), sizes), ()))
    file = _dry()
    spans = [span for span in file.forecast.spans if span.name == "optimizer update"]
    assert [span.end - span.start for span in spans] == [pytest.approx(expected)]
    (reason,) = [reason for reason in file.reasons if reason.subject == "optimizer"]
    assert reason.decision.startswith(f"{len(trained)} parameters updated, ")
    assert any("embed.weight is also head.weight" in reason.decision for reason in file.reasons)
