"""Pipelines of torch.distributed.pipelining whose stages are compiled: two stages or four, each on two ranks, against
plain PyTorch in one process.

Tests ``integrations/pipelining.py``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics import compare
from numerics.compare import Values, assert_same, full, full_values, seeded, sgd
from ranks import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from traced import compile_once

import zerograph
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.integrations.pipelining import once_per_step
from zerograph.runtime.comm.shared_memory import SharedMemoryCommunicator

WORLD, WIDTH, VOCABULARY, LAYERS, MICROBATCHES = 4, 8, 12, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Part(nn.Module):
    """Some layers; the first part has the embedding, and the last one the head."""

    def __init__(self, number: int, parts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.head = nn.Linear(WIDTH, VOCABULARY)
        mine = range(number * LAYERS // parts, (number + 1) * LAYERS // parts)
        for i in set(range(LAYERS)) - set(mine):
            del self.layers[str(i)]
        if number > 0:
            self.embed = None
        if number < parts - 1:
            self.head = None

        self.skipped: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for name, layer in self.layers.items():
            x = self.after(layer(x), name) if name not in self.skipped else x
        return self.head(x) if self.head is not None else x

    def after(self, x: Tensor, name: str) -> Tensor:
        """What goes on from the layer of that name."""
        return x


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2 * MICROBATCHES, 6), generator=seeded(seed))


@functools.cache
def truth(steps: int = 3) -> tuple[list[float], Values]:
    """Of plain PyTorch in one process, on the whole batch."""
    model = Part(0, 1)
    optimizer = sgd(model)
    losses = [_trained(optimizer, loss_of(model(batch(seed)), batch(seed))) for seed in range(steps)]
    return losses, full_values(model)


def _trained(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@dataclass
class Case:
    """A schedule and its options."""

    schedule: type[Any] = Schedule1F1B
    chunks: int = 1  # parts of each rank
    once: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    scales: bool = True  # gradients by the number of microbatches, else the loss does it
    options: dict[str, Any] = field(default_factory=dict)
    shards: bool = True  # before the first call, which else does it
    part: type[Part] = Part
    traced_once: bool = True  # in a process for all like it, else compiled as any model is


class Training(compare.Steps):
    device = torch.device("cpu")

    def __init__(self, case: Case, stages: int = 2) -> None:
        """``stages`` are ranks of a pipeline."""
        if not case.traced_once:
            torch._dynamo.reset()
        self.mesh = init_device_mesh(self.device.type, (stages, WORLD // stages), mesh_dim_names=("pp", "dp"))
        place, parts = self.mesh.get_local_rank("pp"), stages * case.chunks
        numbers = [place + stages * i for i in range(case.chunks)]
        if case.schedule is ScheduleZBVZeroBubble:
            numbers = [place, parts - 1 - place]
        self.first, self.last = 0 in numbers, parts - 1 in numbers
        self.model = nn.ModuleList(case.part(number, parts) for number in numbers).to(self.device)
        options = {"stage": 3, "compute": "eager", "bucket_size": "1KB", **case.options}
        self.backend = zerograph.backend(mesh=self.mesh["dp"], **options)
        if case.shards:
            zerograph.shard(self.model, self.backend)
        mine = []
        for part, number in zip(self.model, numbers, strict=True):
            if case.traced_once:
                compile_once(part, self.backend, (number, parts))
            else:
                part.compile(backend=self.backend)
            group = self.mesh["pp"].get_group()
            mine.append(PipelineStage(part, number, parts, self.device, group=group))
        several = issubclass(case.schedule, PipelineScheduleMulti)
        rows = len(self.rows(0))
        loss = loss_of if case.scales else lambda logits, tokens: loss_of(logits, tokens) / rows
        self.schedule = case.schedule(mine if several else mine[0], rows, loss_fn=loss, scale_grads=case.scales)
        self.scale = 1 if case.scales else rows
        if case.once:
            once_per_step(self.schedule, self.backend)
        self.optimizer, self.losses = case.optimizer(self.model), list[float]()

    def rows(self, seed: int) -> Tensor:
        """This rank's, each a microbatch."""
        return batch(seed).to(self.device).chunk(self.mesh["dp"].size())[self.mesh.get_local_rank("dp")]

    def backward(self, seed: int) -> None:
        tokens, losses = self.rows(seed), list[Tensor]()
        inputs = (tokens,) if self.first else ()
        self.schedule.step(*inputs, **({"target": tokens, "losses": losses} if self.last else {}))
        if self.last:
            loss = torch.stack(losses).mean().detach()
            dist.all_reduce(loss, group=self.mesh["dp"].get_group())
            self.losses.append(self.scale * loss.item() / self.mesh["dp"].size())

    def values(self) -> Values:
        """Of all parts, by their names in the whole model."""
        mine = {name.partition(".")[2]: value for name, value in full_values(self.model).items()}
        all_parts: list[Values] = [{} for _ in range(WORLD)]
        dist.all_gather_object(all_parts, mine)
        return {name: value for values in all_parts for name, value in values.items()}


def close(ours: tuple[list[float], Values], theirs: tuple[list[float], Values]) -> None:
    """Losses are the last stage's."""
    compare.close((ours[0] or theirs[0], ours[1]), theirs, 1e-5)


def native(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return zerograph.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def inside(model: nn.Module) -> torch.optim.Optimizer:
    return native(model, overlap=True, skip_nonfinite=False)


def in_forward(model: nn.Module) -> torch.optim.Optimizer:
    return native(model, overlap="forward")


def _trains(cases: list[Case]) -> None:
    for case in cases:
        close(Training(case).run(), truth())


def test_schedules_and_stages() -> None:
    cases = [
        Case(ScheduleGPipe, once=True, options={"stage": 0}),
        Case(Schedule1F1B, options={"stage": 3, "compute": "inductor"}, traced_once=False),
        Case(Schedule1F1B, once=True, options={"stage": 3}),
        Case(ScheduleInterleaved1F1B, 2, True, options={"stage": 2}, traced_once=False),
        Case(ScheduleLoopedBFS, 2, options={"stage": 1, "recompute": "full"}),
    ]
    run(WORLD, _trains, cases)


@pytest.mark.slow
def test_zero_bubble_trains_though_backwards_run_twice(tmp_path: Path) -> None:
    nvme = {"offload": "parameters", "path": str(tmp_path)}
    compiled = Case(ScheduleInterleavedZeroBubble, 2, traced_once=False)
    cases = [compiled, Case(ScheduleZBVZeroBubble, 2, optimizer=native, options=nvme)]
    run(WORLD, _trains, cases)


def test_offloaded_stages(tmp_path: Path) -> None:
    nvme = {"offload": "parameters", "path": str(tmp_path)}
    cases = [
        Case(optimizer=native, once=True, options=nvme | {"activations": "nvme"}),
        Case(ScheduleInterleaved1F1B, 2, True, in_forward, options=nvme),
        Case(ScheduleInterleaved1F1B, 2, True, inside, False, nvme),
    ]
    run(WORLD, _trains, cases)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often parameters are in gathers and reductions."""
    found = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_gather", "start_reduce"):

            def counting(self: Any, params: Any, *rest: Any, name: str = name, of: Any = None) -> Any:
                found.update(f"{name} {param.name}" for param in params)
                return of(self, params, *rest)

            of = getattr(SharedMemoryCommunicator, name)
            patch.setattr(SharedMemoryCommunicator, name, functools.partialmethod(counting, of=of))
        yield found


def _counts() -> None:
    wanted = {(3, False): {"gather": 2 * MICROBATCHES, "reduce": MICROBATCHES}, (2, True): {"gather": 1, "reduce": 1}}
    for (stage, once), numbers in wanted.items():
        training = Training(Case(ScheduleInterleaved1F1B, 2, once, options={"stage": stage}))
        training.step(0)  # which asks each stage for shapes, by a forward and a backward of their own
        with counted() as found:
            training.step(1)
        weights = [n for n, _ in training.model.named_parameters() if n.endswith(("up.weight", "down.weight"))]
        for verb, number in numbers.items():
            assert {found[f"start_{verb} {name}"] for name in weights} == {number}, (stage, verb, found)


def test_gathered_once_and_reduced_once_per_step() -> None:
    run(WORLD, _counts)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Values of groups by parameter: a group's number means others on another stage."""


def _skips() -> None:
    """The last microbatch reads only the first layer of each stage."""
    alone, skipped = Part(0, 1), ("1", "3")
    for row in range(2 * MICROBATCHES):
        alone.skipped = skipped if row % MICROBATCHES == MICROBATCHES - 1 else ()
        tokens = batch(0)[row : row + 1]
        (loss_of(alone(tokens), tokens) / (2 * MICROBATCHES)).backward()
    wanted = {name: param.grad for name, param in alone.named_parameters()}
    training = Training(Case(once=True, traced_once=False))
    (part,), stage = training.model, training.schedule._stage
    forward = stage.forward_one_chunk

    def forward_of(number: int, *args: Any, **kwargs: Any) -> Any:
        part.skipped = skipped if number == MICROBATCHES - 1 else ()
        return forward(number, *args, **kwargs)

    stage.forward_one_chunk = forward_of
    training.backward(0)
    for name, param in part.named_parameters():
        assert param.grad is not None, name
        torch.testing.assert_close(
            full(param.grad), wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_layer_that_the_last_microbatch_skips() -> None:
    run(WORLD, _skips)


def _saves(path: str) -> tuple[list[float], Values]:
    training = Training(Case(once=True))
    training.run(range(2))
    states, moments = get_state_dict(training.model, training.optimizer, options=FLAT)
    dcp.save({"model": states, "optimizer": moments}, checkpoint_id=path)
    return training.run(range(2, 4))


def _saves_parts(path: str) -> Values:
    training = Training(Case(ScheduleInterleaved1F1B, 2, True))
    training.step(0)
    merged = {name: value for part in training.model for name, value in part.state_dict().items()}
    dcp.save({"model": merged}, checkpoint_id=path)
    return training.values()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_of_a_rank_are_saved_together(tmp_path: Path) -> None:
    values = run(WORLD, _saves_parts, str(tmp_path))[0]
    alone = Part(0, 1)
    dcp.load({"model": alone.state_dict()}, checkpoint_id=str(tmp_path))
    assert_same(dict(alone.state_dict()), values)


def _resumes(path: str, stages: int) -> tuple[list[float], Values]:
    training = Training(Case(), stages)
    states, moments = get_state_dict(training.model, training.optimizer, options=FLAT)
    dcp.load({"model": states, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(training.model, training.optimizer, model_state_dict=states, optim_state_dict=moments, options=FLAT)
    return training.run(range(2, 4))


@pytest.mark.slow
def test_saved_by_stages_and_resumed_without(tmp_path: Path) -> None:
    path = str(tmp_path / "dcp")
    results = run(WORLD, _saves, path)
    for stages in (2, 1):
        for found, wanted in zip(run(WORLD, _resumes, path, stages), results, strict=True):
            if wanted[0]:
                assert found[0] == pytest.approx(wanted[0][2:], rel=1e-6)
            close(([], found[1]), ([], wanted[1]))


def _clips() -> None:
    alone = Part(0, 1)
    loss_of(alone(batch(0)), batch(0)).backward()
    training = Training(Case())
    training.backward(0)
    group = training.mesh["pp"].get_group()
    for order in (2.0, float("inf")):
        norm = zerograph.clip_grad_norm_(training.model.parameters(), 1e9, order, stages=group)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e9, order)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_norm_over_all_stages() -> None:
    run(WORLD, _clips)


def _refuses() -> None:
    training = Training(Case(ScheduleInterleavedZeroBubble, 2))
    with pytest.raises(UnsupportedError, match="divides each backward in two"):
        once_per_step(training.schedule, training.backend)
    with pytest.raises(ConfigError):
        once_per_step(training.schedule, [training.backend])  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="needs a schedule"):
        once_per_step(training.model, training.backend)  # type: ignore[arg-type]
    training = Training(Case(once=True))
    with pytest.raises(ConfigError, match="no_sync"), training.backend.no_sync():
        training.backward(0)
    training = Training(Case(ScheduleInterleaved1F1B, 2, True, inside, shards=False, traced_once=False))
    with pytest.raises(ConfigError, match="before the schedule divides gradients"):
        training.backward(0)


def test_schedules_that_cannot_are_refused() -> None:
    run(WORLD, _refuses)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=VOCABULARY, use_cache=False, **sizes))


def _split_by_torch() -> None:
    alone, losses, ours = _llama(), list[float](), list[Tensor]()
    optimizer = sgd(alone)
    for seed in range(3):
        losses.append(_trained(optimizer, loss_of(alone(batch(seed)).logits, batch(seed))))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, data = mesh.get_local_rank("pp"), mesh["dp"]
    pipe = pipeline(_llama(), (batch(0)[:1],), split_spec={"model.layers.1": SplitPoint.BEGINNING})
    part = pipe.get_stage_module(place)
    part.compile(backend=(backend := zerograph.backend(stage=3, mesh=data)))
    stage = pipe.build_stage(place, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    once_per_step(schedule, backend)
    optimizer = sgd(part)
    for seed in range(3):
        tokens, found = batch(seed).chunk(2)[data.get_local_rank()], list[Tensor]()
        inputs = (tokens,) if stage.is_first else ()
        schedule.step(*inputs, **({"target": tokens, "losses": found} if stage.is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        ours += [torch.stack(found).mean().detach()] if found else []
    for mean in ours:
        dist.all_reduce(mean, group=data.get_group())
    assert [mean.item() / 2 for mean in ours] == (pytest.approx(losses, rel=1e-5) if stage.is_last else [])


@pytest.mark.slow
def test_a_model_of_transformers_that_torch_splits() -> None:
    run(WORLD, _split_by_torch)
