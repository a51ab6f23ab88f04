"""``zerograph.backend(plan=...)``: a plan file trains as the options that made it do, and no other model or run.

Tests ``planner/explain/replay.py``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from ranks import run
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import CollectiveMismatch, ConfigError
from zerograph.core.files.reading import read_plan
from zerograph.core.instructions import Reduce, WaitReduce
from zerograph.core.machine import machine_named
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.dryrun.forecast import plan_file

pytestmark = pytest.mark.costly


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(toy.Toy):
    """A toy with layers that repeat, and so can be recomputed."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(h + self.down(torch.relu(self.up(self.norm(h)))))


def planned(
    path: Path, model: type[nn.Module] = Deep, *, world: int = 2, dtype: str | None = None, **options: Any
) -> Path:
    """A file as ``zerograph plan -o`` writes it."""

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        return model().train(), (torch.zeros(4, dtype=torch.int64),)

    file = plan_file("tests", make, machine_named("cpu"), world=world, dtype=dtype, **options)
    path.write_text(file.to_json())
    return path


def _trained(**options: Any) -> tuple[list[float], dict[str, Tensor], zerograph.Backend]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep().train()
    backend = zerograph.backend(compute="eager", **options)
    model.compile(backend=backend)
    losses = toy.train(model, toy.adamw(model), range(2))
    backend_plan, programs = backend.plan, dict(backend.program)
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.arange(4)).sum().item())
    assert (backend.plan, backend.program) == (backend_plan, programs)  # evaluation leaves training's alone
    return losses, toy.full(model), backend


def _replays(path: Path, options: dict[str, Any]) -> None:
    same = {name: value for name, value in options.items() if name == "dtype"}
    losses, values, made = _trained(**options)
    again, replayed, backend = _trained(plan=path, **same)
    assert again == losses and not toy.differing(values, replayed)
    assert backend.plan == made.plan
    assert backend.program == made.program
    evaluations = [f.programs["inference"] for b in (made, backend) for f in b.frames if "inference" in f.programs]
    assert len(evaluations) == 2 and evaluations[0] == evaluations[1]
    report = backend.report()
    assert (report.stage, report.world_size) == (options["stage"], 2)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "bucket_size": 256, "prefetch": 2, "dtype": torch.bfloat16, "recompute": 0.5},
        {"stage": 1, "bucket_size": 512, "prefetch": 0, "recompute": "none"},
    ],
    ids=str,
)
def test_a_plan_trains_as_the_options_that_made_it(tmp_path: Path, options: dict[str, Any]) -> None:
    dtype = {"dtype": "bfloat16"} if "dtype" in options else {}
    path = planned(tmp_path / "plan.json", **{**options, **dtype})
    run(2, _replays, path, options)


def _gathers_later(early: Path, late: Path) -> None:
    """The same numbers from gathers in another order; what is kept whole ahead of its turn is less."""
    losses, values, first = _trained(plan=early)
    again, later_values, second = _trained(plan=late)
    assert again == losses and not toy.differing(values, later_values)
    assert second.report().peak_whole_buckets < first.report().peak_whole_buckets == 3
    assert first.program["forward"] != second.program["forward"]


@pytest.mark.slow
def test_each_bucket_may_be_gathered_later_than_prefetch_allows(tmp_path: Path) -> None:
    early, late = planned(tmp_path / "early.json", stage=3, bucket_size=256, prefetch=2), tmp_path / "late.json"
    file = read_plan(early)
    buckets = tuple(replace(bucket, ahead=bucket.index % 2) for bucket in file.plan.buckets)
    late.write_text(replace(file, plan=replace(file.plan, buckets=buckets)).to_json())
    run(2, _gathers_later, early, late)


def _under_way(program: Program) -> int:
    now = most = 0
    for step in program.instructions:
        now += isinstance(step, Reduce) - isinstance(step, WaitReduce)
        most = max(most, now)
    return most


def _several_reductions(one: Path, several: Path, transport: str) -> None:
    """The same numbers, however many reductions are under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", transport)
        losses, values, first = _trained(plan=one)
        again, others, second = _trained(plan=several)
    assert again == losses and not toy.differing(values, others)
    assert [_under_way(backend.program["backward"]) for backend in (first, second)] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "group"])
def test_several_reductions_may_be_under_way(tmp_path: Path, transport: str) -> None:
    one, several = planned(tmp_path / "one.json", stage=3, bucket_size=256), tmp_path / "several.json"
    file = read_plan(one)
    several.write_text(replace(file, plan=replace(file.plan, reductions=3)).to_json())
    run(2, _several_reductions, one, several, transport)


def _one_process(path: Path) -> None:
    model = Deep().train()
    backend = zerograph.backend(plan=path, compute="eager")
    torch.compile(model, backend=backend)(torch.arange(4)).sum().backward()
    assert backend.plan == Plan(3, 1, (), 1, ("blocks.0", "blocks.1"))


def test_a_plan_of_one_process(tmp_path: Path) -> None:
    _one_process(planned(tmp_path / "plan.json", world=1, recompute="full"))
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=r"is for 2 ranks, and this run has 1 rank\b") as caught:
        _one_process(planned(tmp_path / "other.json", world=2))
    assert caught.value.hint == "make one for this run: zerograph plan MODEL --world 1 -o plan.json"


def _error_of(path: Path, model: type[nn.Module], options: dict[str, Any]) -> str:
    made = model().train()
    made.compile(backend=zerograph.backend(plan=path, compute="eager", **options))
    with pytest.raises(ConfigError) as caught:
        made(torch.arange(4))
    assert str(path) in str(caught.value) and caught.value.hint
    return str(caught.value)


class Changed(Deep):
    """One parameter has another shape, two another dtype, one is trained, one is new, and one is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.blocks[1].norm.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.blocks[1].norm.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.extra = nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.extra.sum()


def test_what_differs_is_named(tmp_path: Path) -> None:
    path = planned(tmp_path / "plan.json")
    for message in run(2, _error_of, path, Deep, {"dtype": torch.bfloat16}):
        assert "parameter blocks.0.up.weight: compute dtype float32 in the plan, bfloat16 here" in message
        assert re.search(r"and \d+ more differences", message)
    for message in run(2, _error_of, path, Changed, {}):
        assert "is not one of this model" in message
        for difference in (
            "blocks.1.norm.weight: dtype float32 in the plan, float64 here; compute dtype float32 in the plan",
            "up.weight: shape (8, 4) in the plan, (6, 4) here",
            "up.bias: shape (8,) in the plan, (6,) here; trainable False in the plan, True here",
            "down.bias is in the plan, and the model does not read it",
        ):
            assert difference in message


def test_activations_that_are_not_made_here_are_named(tmp_path: Path) -> None:
    path = planned(tmp_path / "plan.json", world=1, dtype="float32")
    file = read_plan(path)
    offloaded = (("blocks.7", "nvme"), ("blocks.0", "nvme"), ("blocks.0.up:relu#9", "nvme"))
    path.write_text(replace(file, plan=replace(file.plan, offload=offloaded)).to_json())
    (message,) = run(1, _error_of, path, Deep, {"dtype": torch.float32, "path": str(tmp_path)})
    assert "blocks.7 leaves the device in the plan, and the step has no such layer" in message
    assert "blocks.0.up:relu#9 leaves the device in the plan, and the step has no such activation" in message
    assert "blocks.0 leaves" not in message


def _different_plans(paths: list[Path | None]) -> str:
    path = paths[dist.get_rank()]
    backend = zerograph.backend(compute="eager") if path is None else zerograph.backend(plan=path, compute="eager")
    model = Deep().train()
    model.compile(backend=backend)
    with pytest.raises(CollectiveMismatch) as caught:
        model(torch.arange(4))
    assert type(model) is Deep  # nothing was sharded yet
    return str(caught.value)


def test_ranks_with_different_plans_all_get_an_error(tmp_path: Path) -> None:
    one = planned(tmp_path / "one.json", stage=3)
    other = planned(tmp_path / "other.json", stage=0)  # it would not even shard alike
    for message in run(2, _different_plans, [one, other], timeout=30):
        assert f"rank 0 replays {one} (digest" in message and f"rank 1 replays {other} (digest" in message
    for message in run(2, _different_plans, [one, None], timeout=30):
        assert "rank 1 replays none" in message and "on every rank, or on none" in message


def test_wrong_ranks_in_a_file_are_refused_before_anything_is_sharded(tmp_path: Path) -> None:
    path = planned(tmp_path / "plan.json", world=4)
    for message in run(2, _error_of, path, Deep, {}):
        assert "is for 4 ranks, and this run has 2 ranks" in message


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match=r"cannot read .*plan\.json: No such file"):
        zerograph.backend(plan=path)
    for text, message in (
        ("{}", "holds no plan"),
        ("torch", "holds no plan"),
        ('{"version": 99, "plan": {}, "spans": {}, "digest": ""}', "version 99"),
    ):
        with pytest.raises(ConfigError, match=rf"plan\.json: .*{message}"):
            zerograph.backend(plan=_written(path, text))
    data = json.loads(planned(path).read_text())
    data["plan"]["prefetch"] = 7
    with pytest.raises(ConfigError, match=r"plan\.json: the plan was changed"):
        zerograph.backend(plan=_written(path, json.dumps(data)))


@pytest.mark.parametrize(
    "beside",
    [{"stage": 3}, {"bucket_size": "1MiB"}, {"prefetch": 1}, {"recompute": "auto"}, {"stage": 1, "prefetch": 2}],
)
def test_what_a_plan_decides_cannot_be_given_beside_it(beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{', '.join(beside)} given beside plan='plan.json'"):
        zerograph.backend(plan="plan.json", **beside)


@pytest.mark.parametrize("plan", [3, True, {}, Plan(3, 1, (), 1)])
def test_a_plan_is_given_as_a_path(plan: Any) -> None:
    with pytest.raises(ConfigError, match="plan must be the path of a plan file"):
        zerograph.backend(plan=plan)


def test_none_is_no_plan() -> None:
    assert zerograph.backend(plan=None, stage=1).config.stage == 1


def _by_name(path: Path) -> list[float]:
    torch.manual_seed(0)
    model = Deep().train()
    model.compile(backend="zerograph", options={"plan": str(path), "compute": "eager"})
    losses = toy.train(model, toy.adamw(model), range(2))
    assert zerograph.backend_of(model).plan.prefetch == 2
    return losses


def test_a_plan_for_the_backend_by_name(tmp_path: Path) -> None:
    losses = run(2, _by_name, planned(tmp_path / "plan.json", prefetch=2))
    assert losses[0] == losses[1]
