"""A recorded step is the step that was forecast, and makes a better forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import profile
from toy import Toy, adamw, compiled

import zerograph
from zerograph.compiler.recording import Recording
from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Measured, Run, move_key
from zerograph.core.instructions import Update
from zerograph.core.machine import machine_named
from zerograph.dryrun.forecast import plan_file
from zerograph.planner.explain.retime import retimed, tasks_of
from zerograph.runtime.executor.telemetry import LABEL
from zerograph.sim.rates import Rates

pytestmark = pytest.mark.costly


class Stack(nn.Module):
    """Large enough that tensors, not allocator granules, are what is counted."""

    def __init__(self, layers: int = 8, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def recorded_step(
    backend: zerograph.Backend, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]
) -> Recording:
    """The third step of a loop."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with backend.record() as recording:
        step()
    return recording


def _record(stage: int, path: str) -> tuple[dict[str, float], list[str], str]:
    model = Stack()
    backend = zerograph.backend(stage=stage, bucket_size="70kB")
    model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    recording = recorded_step(backend, optimizer, lambda: model(torch.randn(512, 128)))
    found = recording.predicted(machine_named("cpu"))
    if dist.get_rank() == 0:
        recording.save(path)
        assert Run.from_json(Path(path).read_text()).plan == backend.plan.digest
    recorded = backend.report().recorded
    assert recorded is not None
    assert recorded.peak == recording.forecast.peaks["device"].bytes
    return (
        {
            "measured": recorded.peak,
            "forecast": found.forecast.peaks["device"].bytes,
            "seconds": found.forecast.seconds,
        },
        [span.name for span in recording.forecast.spans],
        str(backend.report()),
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_the_recorded_peak_is_the_forecast_one(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    ran = run(2, _record, stage, str(path))
    for peaks, names, report in ran:
        assert peaks["forecast"] == pytest.approx(peaks["measured"], rel=0.05)
        assert names[-1] == "optimizer update"
        gathers = [name for name in names if name.startswith("gather")]
        again = 7 if stage == 3 else 0  # in the backward; the first layer passes no gradient on
        assert len(gathers) == 2 * (8 + again)  # start and wait
        assert "recorded step" in report
        assert "the process grows by about" in report
    read = Run.from_json(path.read_text())
    assert [span.name for span in read.forecast.spans] == ran[0][1]
    _check_retimed(planned(stage), read, ran[0][0])


class Tied(nn.Module):
    """A language model whose logits are large beside all else, and returned with the loss."""

    def __init__(self, vocab: int = 4096, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


def _tied(rows: int, budgets: list[float]) -> list[tuple[int, int, int]]:
    """Forecast and recorded peak at stage 3, and with budgets of so many times that peak, which come third."""
    found: list[tuple[int, int, int]] = []
    for times in (0.0, *budgets):
        torch._dynamo.reset()
        model = Tied()
        budget = int(times * found[0][1]) if found else 0
        options: dict[str, Any] = {"stage": "auto", "memory": budget} if budget else {"stage": 3}
        backend = zerograph.backend(**options, machine=machine_named("cpu"))
        model.compile(backend=backend)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(4096, (rows, 32))
        recording = recorded_step(backend, optimizer, lambda: model(tokens)[0])  # noqa: B023  called at once
        forecast = recording.predicted(machine_named("cpu")).forecast.peaks["device"].bytes
        found.append((forecast, recording.forecast.peaks["device"].bytes, budget))
    return found


@pytest.mark.parametrize("rows", [4, 16])
def test_large_logits_are_forecast_and_budgets_kept(rows: int) -> None:
    """With few rows the peak is where gradients of the tied weight are added, with many in the loss's backward."""
    for found in run(2, _tied, rows, [1.08, 1.4]):
        for forecast, recorded, budget in found:
            assert forecast == pytest.approx(recorded, rel=0.05)
            assert not budget or recorded <= budget


STEPS: dict[str, dict[str, Any]] = {
    "behind": {},
    "inside": {"overlap": True, "skip_nonfinite": False},
    "beside the next forward": {"overlap": "forward"},
}


@pytest.mark.parametrize("kind", STEPS)
def test_what_moves_to_and_from_nvme_is_recorded(kind: str, tmp_path: Path) -> None:
    model = Stack(layers=4, width=256)
    backend = zerograph.backend(offload="parameters", path=str(tmp_path), nvme="64MiB", bucket_size="300kB")
    model.compile(backend=backend)
    optimizer = zerograph.optim.AdamW(model.parameters(), **STEPS[kind])

    def step() -> None:
        model(torch.randn(64, 256)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with backend.record() as recording:
        step()
        optimizer.settle()
    waits = {(span.name, span.phase) for span in recording.forecast.spans if span.what == "wait"}
    own = {(f"wait for the update of layers.{bucket}", "forward") for bucket in range(4)}
    assert waits == (own if kind == "beside the next forward" else set())
    named = [span for span in recording.forecast.spans if span.what and span.what != "wait"]
    moved: dict[str, set[tuple[int, str]]] = {}
    for span in named:
        assert span.end > span.start >= 0 and span.label == f"layers.{span.bucket}"
        moved.setdefault(f"{span.operation} {span.what}", set()).add((span.bucket, span.phase))
    updated = {(bucket, "update") for bucket in range(4)}
    assert moved.pop("read states") == moved.pop("update states") == moved.pop("write states") == updated
    # The first layer passes no gradient on, and is not gathered again.
    assert moved.pop("read shard") == {*((b, "forward") for b in range(4)), *((b, "backward") for b in (1, 2, 3))}
    if kind != "inside":  # there updates take gradients before they leave
        assert moved.pop("write gradient") == {(bucket, "backward") for bucket in range(4)}
    assert not moved

    measured, found = recording.measured, recording.predicted(machine_named("cpu")).forecast
    assert {f"update states {b}" for b in range(4)} <= measured.moves.keys()
    spans = [span for span in found.spans if span.what]
    for span in spans:
        seconds = measured.moves[move_key(span.operation, span.what, span.bucket, span.label)]
        assert span.end - span.start == pytest.approx(seconds)
    last = max(span.task for span in found.spans if span.operation == "compute")
    began = [span.task < last for span in spans if span.operation == "update"]
    assert len(began) == 4 and any(began) is (kind == "inside")
    path = tmp_path / "run.json"
    recording.save(path)
    assert Run.from_json(path.read_text()).measured == measured


def test_a_gather_that_waits_for_an_update_begins_behind_that(tmp_path: Path) -> None:
    """Of parameters in memory, whose gather waits itself."""
    model = Stack(layers=4, width=256)
    backend = zerograph.backend(offload="optimizer", path=str(tmp_path), nvme="64MiB", bucket_size="300kB")
    model.compile(backend=backend)
    optimizer = zerograph.optim.AdamW(model.parameters(), overlap="forward")
    recording = recorded_step(backend, optimizer, lambda: model(torch.randn(64, 256)))
    for bucket in range(4):
        spans = [s for s in recording.forecast.spans if s.bucket == bucket and s.phase == "forward"]
        (wait,) = (span for span in spans if span.what == "wait")
        first = next(span for span in spans if span.operation == "gather")
        assert wait.start < wait.end <= first.start + 1e-6
        assert not any(key.startswith("update wait") for key in recording.measured.moves)


ON_HOST: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "on the host": ({"update": "host", "activations": "host"}, {"spill activations": "forward"}),
    "through the device": ({"update": "device"}, {"fetch states": "update", "spill states": "update"}),
}


@pytest.mark.parametrize("where", ON_HOST)
def test_copies_between_device_and_host_are_recorded(where: str) -> None:
    """Of a split machine, whose copies a thread makes: on an accelerator tests/gpu/test_train.py does the same."""
    options, more = ON_HOST[where]
    model = Stack(layers=4, width=256)
    split = replace(machine_named("cpu"), split=True)
    backend = zerograph.backend(offload="parameters", tier="host", machine=split, bucket_size="300kB", **options)
    model.compile(backend=backend)
    optimizer = zerograph.optim.AdamW(model.parameters())
    recording = recorded_step(backend, optimizer, lambda: model(torch.randn(64, 256)))
    moved: dict[str, set[tuple[int, str]]] = {}
    for span in recording.forecast.spans:
        if span.what:
            assert span.end > span.start >= 0 and span.stream == ("h2d" if span.operation == "fetch" else "d2h")
            moved.setdefault(f"{span.operation} {span.what}", set()).add((span.bucket, span.phase))
    assert moved.pop("fetch shard") == {*((b, "forward") for b in range(4)), *((b, "backward") for b in (1, 2, 3))}
    assert moved.pop("spill gradient") == {(bucket, "backward") for bucket in range(4)}
    for key, phase in more.items():
        assert {found for _, found in moved.pop(key)} == {phase}
    moved.pop("fetch activations", None)
    assert not moved

    measured, found = recording.measured, recording.predicted(split).forecast
    spans = [span for span in found.spans if span.operation in ("fetch", "spill")]
    assert {f"{span.operation} {span.what}" for span in spans} >= {"fetch shard", "spill gradient"}
    for span in spans:
        seconds = measured.moves[move_key(span.operation, span.what, span.bucket, span.label)]
        assert span.end - span.start == pytest.approx(seconds)
    (update,) = (span for span in recording.forecast.spans if span.name == "optimizer update")
    assert measured.update == pytest.approx(update.end - update.start)  # one number, with the copies inside of it


def _groups() -> None:
    """Two optimizers with several groups: the update of the recorded step is theirs."""
    model = Stack(layers=6)
    model.layers[4].requires_grad_(False)
    backend = zerograph.backend(stage=3, bucket_size="70kB")
    model.compile(backend=backend)
    plain = [*model.layers[1].parameters(), *model.layers[4].parameters()]
    optimizers = [
        torch.optim.SGD([{"params": model.layers[0].parameters(), "momentum": 0.9}, {"params": plain}], lr=0.1),
        zerograph.optim.AdamW(model.layers[5].parameters(), moments=torch.bfloat16),
        torch.optim.AdamW(nn.Linear(4, 4).parameters()),
    ]

    def step() -> None:
        model(torch.randn(512, 128)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    step()
    with backend.record() as recording:
        step()
    assert [span.name for span in recording.forecast.spans].count("optimizer update") == 2
    weight, bias = 128 * 128 // 2, 128 // 2
    states = {0: 4, 1: 0, 5: 2 * 2}  # bytes per element by layer; 2 and 3 are in no group, and 4 is not trained
    recording.measured = Measured()
    found = recording.predicted(machine_named("cpu"))
    held = {h.name: h.bytes for h in found.holdings if h.kind == "state"}
    assert held == {f"states of layers.{i}": (weight + bias) * size for i, size in states.items() if size}
    sizes = tuple(count * (3 * 4 + 2 * size) for size in states.values() for count in (weight, bias))
    update = found.forecast.spans[-1]
    seconds = Rates(machine_named("cpu"), 2, "float32").seconds(Update((), sizes), ())
    assert update.name == "optimizer update" and update.end - update.start == pytest.approx(seconds)


def test_the_update_of_a_recorded_step_is_that_of_the_optimizers() -> None:
    run(2, _groups)


class WithDevice(profile):
    """Sees what a profile of a GPU has besides: each label once more, on the device, a little later."""

    def stop(self) -> None:
        super().stop()
        results = self.profiler.kineto_results
        on_device = [OnDevice(event) for event in results.events() if LABEL.fullmatch(event.name())]
        self.profiler.kineto_results = SimpleNamespace(events=lambda: [*results.events(), *on_device])


class OnDevice:
    def __init__(self, event: Any) -> None:
        self.name, self.start_ns, self.duration_ns = event.name, lambda: event.start_ns() + 500, event.duration_ns

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA


def _recorded_with_device() -> int:
    model = Toy().train()
    backend = compiled(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerograph.compiler.recording.profile", WithDevice)
        recording = recorded_step(backend, adamw(model), lambda: model(torch.arange(4)).sum())
    return [span.name for span in recording.forecast.spans].count("optimizer update")


def test_what_a_gpu_tells_of_each_label_counts_once() -> None:
    assert run(2, _recorded_with_device) == [1, 1]


def planned(stage: int, batch: int = 512) -> PlanFile:
    """The same step, from a dry run that knows nothing of the real one."""
    return plan_file(
        "stack",
        lambda: (Stack(), (torch.zeros(batch, 128),)),
        machine_named("cpu"),
        world=2,
        stage=stage,
        bucket_size="70kB",
    )


def _check_retimed(file: PlanFile, read: Run, predicted: dict[str, float]) -> None:
    """A saved plan with a saved run's seconds is the forecast that the run's own programs give."""
    again = retimed(file, read)
    assert again.seconds == pytest.approx(predicted["seconds"])
    assert again.peaks["device"].bytes == predicted["forecast"]
    assert again.seconds != file.forecast.seconds
    assert set(tasks_of(file, read)) == {span.task for span in file.forecast.spans}
    with pytest.raises(ConfigError, match=r"operations in the plan and .* it was of another batch"):
        retimed(planned(file.plan.stage, batch=256), read)


def _record_wrongly(what: str) -> str:
    model = Toy().train()
    backend = compiled(model)
    optimizer = adamw(model)

    def step() -> None:
        model(torch.arange(4)).sum().backward()
        optimizer.step()

    def record(*steps: Any) -> None:
        with backend.record():
            for each in steps:
                each()

    if what != "nothing compiled":
        step()
    bodies = {"two steps": (step, step), "forward only": (lambda: model(torch.arange(4)),), "nothing compiled": ()}
    with pytest.raises(ZeroGraphError) as caught:
        record(*bodies[what])
    if what != "nothing compiled":
        record(step)  # still works
    return str(caught.value)


def test_memory_of_a_cpu_is_refused(tmp_path: Path) -> None:
    """And before anything is recorded: tests/gpu/test_train.py records that of an accelerator."""
    model = Stack(layers=2)
    backend = zerograph.backend(offload="optimizer", path=str(tmp_path), nvme="64MiB")
    model.compile(backend=backend)
    optimizer = zerograph.optim.AdamW(model.parameters())
    for memory, message in (("yes", "memory must be True or False, got 'yes'"), (True, "no history of allocations")):
        model(torch.randn(64, 128)).backward()
        with pytest.raises(ConfigError, match=message), backend.record(memory=memory):  # type: ignore[arg-type]
            pass
    recording = recorded_step(backend, optimizer, lambda: model(torch.randn(64, 128)))
    with pytest.raises(ZeroGraphError, match="no snapshot of memory"):
        recording.save_memory(tmp_path / "memory.pickle")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("two steps", "one step"),
        ("forward only", "one forward and one backward"),
        ("nothing compiled", "nothing was"),
    ],
)
def test_a_recording_is_of_one_step(what: str, message: str) -> None:
    for text in run(2, _record_wrongly, what):
        assert message in text


def _record_with_logits(kind: str) -> tuple[int, int]:
    """Peaks of a step, recorded and forecast, of a model of transformers whose logits are most of its memory."""
    import transformers

    sizes = {"vocab_size": 8000, "hidden_size": 64, "intermediate_size": 128}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers))
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, **layers, num_key_value_heads=2, num_local_experts=2)
        model = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **layers))
    backend = zerograph.backend(stage=3)
    model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(8000, (8, 64))  # so that the gradient of the head, which is counted beside them, is small
    recording = recorded_step(backend, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)
    forecast = recording.predicted(machine_named("cpu")).forecast
    return recording.forecast.peaks["device"].bytes, forecast.peaks["device"].bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral", "bert"])
def test_gradients_of_logits_that_the_loss_does_not_need_are_forecast(kind: str) -> None:
    for measured, forecast in run(2, _record_with_logits, kind):
        assert forecast == pytest.approx(measured, rel=0.05)
