"""``zerograph plan``: real models on the meta device, plan files that can be read, and clear errors.

Tests ``cli/model_source.py``, ``dryrun/forecast.py`` and ``dryrun/untraceable.py``.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerograph
from zerograph.cli import main
from zerograph.cli.plan import explanation
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.core.files.planfile import PlanFile, Reason
from zerograph.core.machine import TIERS, machine_named
from zerograph.core.plan import Placement, Plan
from zerograph.core.timeline import STREAMS
from zerograph.dryrun.compile_only import Compiled, compile_only
from zerograph.dryrun.forecast import plan_file
from zerograph.integrations.context_parallel import ulysses
from zerograph.integrations.expert_parallel import divide_experts
from zerograph.planner.explain.check_file import check_file
from zerograph.planner.explain.reasons import _FASTEST
from zerograph.planner.programs.rules import layer_of_param

pytestmark = pytest.mark.costly

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, width=256, layers=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

def small():
    return Net()

def shallow():
    return Net(layers=1)

def with_inputs():
    return nn.Linear(8, 8), (torch.empty(4, 8),)

def branches():
    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x
    return Branches(8, 8), torch.empty(4, 8)

def frozen():
    return nn.Linear(8, 8).requires_grad_(False), (torch.empty(4, 8),)

def nothing():
    return 3

def by_keyword():
    return Net(layers=1), {"ids": torch.zeros(2, 16, dtype=torch.int64)}

def needs(width):
    return Net(width)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "toy_model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced once for all runs of a test, which plan one model, and that ask for the same."""
    kept = dict[str, Compiled]()

    def once(make: Any, *, programs: bool, **options: Any) -> Compiled:
        assert not programs, "programs are made by a plan"
        key = repr(sorted(options.items()))
        if key not in kept:
            kept[key] = compile_only(make, programs=False, **options)
        return kept[key]

    monkeypatch.setattr("zerograph.dryrun.forecast.compile_only", once)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


@pytest.mark.parametrize("world", [1, 512])
def test_a_plan_file_of_a_traced_model(model: Path, tmp_path: Path, world: int) -> None:
    out = tmp_path / "plan.json"
    result = run(f"{model}:small", "--world", str(world), "--batch", "2", "--seq", "64", "-o", str(out), "--explain")
    assert result.exit_code == 0, result.stderr
    file = PlanFile.from_json(out.read_text())
    assert file.plan.world_size == world and file.tokens == 128
    assert {s.stream for s in file.forecast.spans} == ({"compute", "gather", "reduce"} if world > 1 else {"compute"})
    assert any(s.module == "blocks.1" for s in file.forecast.spans)
    assert any("toy_model.py:" in s.source for s in file.forecast.spans)
    products = 3 * 2 * 128 * (3 * 8 * 256**2 + 512 * 256)
    assert file.flops == pytest.approx(products, rel=0.05)
    assert "\nplan: stage 3, because" in result.stdout
    assert world == 1 or result.stdout.count("its second gather takes") == 3
    shown = CliRunner().invoke(main, ["show", str(out)]).stdout
    assert result.stdout.partition("\n\nplan: stage 3")[0] in shown  # one summary for both commands
    assert not torch.distributed.is_initialized()


def test_a_gpu_that_torch_does_not_find_is_not_traced(model: Path) -> None:
    result = run(f"{model}:small", "--device", "cuda")
    assert result.exit_code == 2 and "error: torch finds no GPU" in result.stderr


def test_replicas_share_a_host_and_average_between_them(model: Path, tmp_path: Path) -> None:
    files = []
    for replicas in ("1", "2"):
        out = tmp_path / f"{replicas}.json"
        given = ("--world", "4", "--replicas", replicas, "--batch", "2", "--seq", "64", "-o", str(out))
        result = run(f"{model}:small", *given, "--offload", "optimizer", "--machine", "a100-80gb")
        assert result.exit_code == 0, result.stderr
        files.append(PlanFile.from_json(out.read_text()))
    one, two = files
    assert (one.plan.ranks, two.plan.ranks, two.plan.world_size) == (4, 8, 4)
    assert two.budget["host"] == pytest.approx(one.budget["host"] / 2), "of the ranks of one host"
    seconds = [sum(s.end - s.start for s in file.forecast.spans if s.stream == "reduce") for file in files]
    assert seconds[1] > seconds[0]
    assert "4 ranks in each of 2 replicas" in result.stdout


@pytest.mark.parametrize(
    "asked", [(), ("--memory", "64MiB"), ("--offload", "optimizer")], ids=["rule", "within", "off"]
)
def test_hosts_of_cpus_are_known_and_said(model: Path, tmp_path: Path, asked: tuple[str, ...]) -> None:
    out = tmp_path / "plan.json"
    given = (f"{model}:shallow", "--batch", "2", "--seq", "64", "--machine", "cpu", "-o", str(out), *asked)
    result = run(*given, "--world", "4")
    assert result.exit_code == 0, result.stderr
    plan = PlanFile.from_json(out.read_text()).plan
    assert (plan.hosts, plan.reductions) == (2, 3)
    assert re.search(r"^hosts +2 hosts of 2 ranks, which communicate in two levels$", result.stdout, re.MULTILINE)
    assert json.loads(CliRunner().invoke(main, ["show", str(out), "--json"]).stdout)["hosts"] == 2
    if asked:
        return
    assert "hosts" not in run(*given, "--world", "2").stdout
    assert (plan_of(out).hosts, plan_of(out).reductions) == (1, 1)
    # A host has each replica: only averages cross the network.
    assert "2 hosts of 2 ranks\n" in run(*given, "--world", "2", "--replicas", "2").stdout
    assert (plan_of(out).hosts, plan_of(out).reductions) == (1, 2)
    assert "hosts" not in run(*given, "--world", "16", "--machine", "a100-80gb").stdout
    assert plan_of(out).hosts == 1, "NCCL knows them"


def plan_of(file: Path) -> Plan:
    return PlanFile.from_json(file.read_text()).plan


def test_a_model_that_is_given_by_its_sizes(tmp_path: Path) -> None:
    """The transformer that is traced has the parameters and the operations of the formulas of `zerograph estimate`."""
    out = tmp_path / "plan.json"
    given = ("--params", "300k", "--layers", "2", "--hidden", "96", "--vocab", "800", "--heads", "4")
    result = run(*given, "--world", "4", "--seq", "64", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    assert "300k asked: whole layers and heads make it 298k" in result.stderr
    file = PlanFile.from_json(out.read_text())
    count = 2 * 12 * 96**2 + 800 * 96
    assert sum(prod(p.shape) for bucket in file.plan.buckets for p in bucket.params) == count
    assert file.model == "transformer of 298k parameters"
    assert file.flops == 6 * count * 64 + (4 + 10) * 2 * 64**2 * 96  # attention computes its scores again


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "there is nothing to plan"),
        (["--layers", "2"], "the size of the model is open"),
        (["toy.py:small", "--layers", "2", "--vocab", "1k"], "toy.py:small has its own sizes, and --layers, --vocab"),
        (["--layers", "2", "--hidden", "100", "--heads", "3"], "hidden 100 does not divide into 3 heads"),
    ],
)
def test_sizes_that_tell_no_model(arguments: list[str], printed: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and printed in result.stderr and "hint: " in result.stderr, result.stderr


def test_one_rank_alone_has_parameters_and_states_and_updates_them(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    values = 4 * sum(p.numel() for p in _made(model, "small").parameters())
    for moments, loops in ((2, 1), (0, 1), (2, 2)):
        given = ("--moments", str(moments), "--accumulate", str(loops), "-o", str(out))
        result = run(f"{model}:small", "--seq", "64", *given)
        assert result.exit_code == 0, result.stderr
        file = PlanFile.from_json(out.read_text())
        held = {h.kind: h.bytes for h in file.holdings if h.first == h.last == -1}
        wanted = {"param": values, "state": moments * values, "gradient": (loops - 1) * values}
        assert held == {kind: size for kind, size in wanted.items() if size}
        update, rate = file.forecast.spans[-1], machine_named("h100-80gb").update
        count = sum(1 for _ in _made(model, "small").parameters())
        assert update.name == "optimizer update"
        assert update.end - update.start == pytest.approx(
            count * rate.latency + (3 + 2 * moments) * values / rate.rate, rel=1e-6
        )
        assert not check_file(file)
    kinds = CliRunner().invoke(main, ["show", str(out), "--by", "kind"]).stdout
    assert re.search("\nparam +", kinds) and re.search("\nstate +", kinds)


def _made(model: Path, name: str) -> nn.Module:
    return runpy.run_path(str(model))[name]()  # type: ignore[no-any-return]


def test_what_does_not_fit_exits_with_1(model: Path) -> None:
    result = run(f"{model}:small", "--memory", "4MiB")
    assert result.exit_code == 1
    assert "error: the step needs" in result.stderr and "hint: what would help: " in result.stderr


@pytest.mark.slow
def test_stage_auto_fills_the_memory_or_says_what_is_missing(model: Path) -> None:
    arguments = (f"{model}:shallow", "--world", "4", "--batch", "8", "--stage", "auto", "--explain")
    found = run(*arguments, "--memory", "8GiB")
    assert found.exit_code == 0, found.stderr
    assert "because stage auto shards all of it" in found.stdout
    missing = run(*arguments, "--memory", "4MiB")
    assert missing.exit_code == 1
    assert "error: the step needs" in missing.stderr and "hint: what would help: " in missing.stderr


def test_whole_traces_every_layer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def traced(*_: object, repeat_layers: bool, **options: object) -> None:
        asked.append(repeat_layers)
        raise UnsupportedError("enough is known")

    monkeypatch.setattr("zerograph.dryrun.forecast.compile_only", traced)
    for arguments in ([], ["--whole"], ["--whole", "--offload", "auto"]):
        run(f"{model}:small", *arguments)
    assert asked == [True, False, False]


def test_what_holds_of_many_layers_is_explained_once() -> None:
    file = plans.plan_file(12)
    lines = [line for line in explanation(file) if line.startswith("blocks")]
    assert lines == ["blocks.0 to blocks.11: use, because stage 3 frees parameters after each use"]


@pytest.mark.slow
def test_largest_fills_the_memory(model: Path, tmp_path: Path) -> None:
    """The next batch is refused by the very planner that a backend with that memory asks."""
    out = tmp_path / "plan.json"
    arguments = (f"{model}:shallow", "--world", "4", "--seq", "32", "--memory", "64MiB")
    result = run(*arguments, "--largest", "batch", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    found = re.match(
        r"largest batch: (\d+); (\d+) needs [\d.]+ MiB of device memory per rank, of 60.2 MiB\n", result.stdout
    )
    assert found is not None and int(found[2]) == int(found[1]) + 1
    assert PlanFile.from_json(out.read_text()).tokens == 32 * int(found[1])
    assert run(*arguments, "--stage", "auto", "--batch", found[1]).exit_code == 0
    missing = run(*arguments, "--largest", "batch", "--batch", "7", "--memory", "1MiB")
    assert missing.exit_code == 1 and "error: the step needs" in missing.stderr


def test_a_loop_of_micro_batches_is_priced(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "loop.json"
    result = run(f"{model}:small", "--world", "2", "--accumulate", "4", "-o", str(out))
    assert re.search(r"of it +3 of 4 micro-batches take .+ each, and the last .+, with the update", result.stdout)
    file = PlanFile.from_json(out.read_text())
    html = tmp_path / "loop.html"
    shown = json.loads(CliRunner().invoke(main, ["show", str(out), "--json", "--html", str(html)]).stdout)
    assert (shown["micro_batches"], shown["earlier"]) == (4, file.earlier)
    assert "3 of 4 micro-batches take" in html.read_text()
    refused = run(f"{model}:small", "--accumulate", "4", "--largest", "batch")
    assert "--accumulate is given with --largest batch" in refused.stderr


def test_largest_resizes_the_inputs_that_a_model_brings(model: Path) -> None:
    result = run(f"{model}:by_keyword", "--world", "4", "--memory", "32MiB", "--largest", "seq", "--json")
    assert result.exit_code == 0, result.stderr
    found = re.search(r"largest seq: (\d+); ", result.stderr)
    assert found is not None and PlanFile.from_json(result.stdout).tokens == 2 * int(found[1])
    refused = run(f"{model}:with_inputs", "--largest", "seq")
    assert refused.exit_code == 2 and "no dimension that is taken for seq" in refused.stderr


def test_a_model_may_bring_its_inputs(model: Path) -> None:
    samples = run(f"{model}:with_inputs", "--world", "2")
    assert samples.exit_code == 0 and " samples/s" in samples.stdout
    for given in (("--batch", "8"), ("--batch", "1", "--seq", "64"), ("--seq", "64", "--offload", "auto")):
        refused = run(f"{model}:with_inputs", *given)
        assert refused.exit_code == 2 and "brings its inputs" in refused.stderr and given[0] in refused.stderr
    result = run(f"{model}:by_keyword", "--world", "2", "--json")
    assert result.exit_code == 0 and PlanFile.from_json(result.stdout).tokens == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{model}:absent", "absent is not there in"),
        ("{model}:torch", "torch is not a callable"),
        ("{model}", "names no model"),
        ("nowhere.py:small", "there is no file nowhere.py"),
        ("no_such_module:small", "there is no module no_such_module"),
        ("{model}:nothing", "returned int"),
        ("{model}:needs", "cannot be called without arguments: missing a required argument: 'width'"),
        ("{model}:branches", "does not trace into one graph"),
        ("{model}:frozen", "has no backward"),
    ],
)
def test_errors_name_the_next_thing_to_do(model: Path, name: str, message: str) -> None:
    result = run(name.format(model=model))
    assert result.exit_code == 2
    assert message in result.stderr and "hint: " in result.stderr


class Shared(nn.Module):
    """Attention over sequences that the ranks of ``group`` share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.three = group, nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.three(x).unflatten(2, (12, 4)).transpose(1, 2).chunk(3, dim=1)
        return ulysses(*heads, self.group, is_causal=True).square().mean()


def _shared() -> Any:
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"].get_group()
    return Shared(group), (torch.zeros(2, 8, 16),)


def _divided() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, use_cache=False, **sizes)
    axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["ep"]
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return divide_experts(MixtralForCausalLM(config), axis), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize(
    ("make", "said"),
    [(_shared, "8 collectives of the model's own, of 8 KiB together"), (_divided, "experts that ranks divide")],
)
def test_what_a_model_sends_itself_is_said_to_be_left_out(make: Any, said: str, offload: Any) -> None:
    file = plan_file("model", make, machine_named("h100-80gb"), world=4, offload=offload)
    assert [text for text in file.forecast.not_counted if said in text] == [file.forecast.not_counted[-1]]


OFFLOAD = ("--world", "4", "--batch", "4", "--seq", "64", "--stage", "auto", "--offload")


def test_a_plan_that_offloads_is_forecast_from_its_schedule_and_shown(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run(f"{model}:small", *OFFLOAD, "parameters", "--tier", "nvme", "-o", str(out), "--explain")
    assert result.exit_code == 0, result.stderr
    file = PlanFile.from_json(out.read_text())
    assert {b.placement for b in file.plan.buckets} == {Placement("nvme", "nvme", "nvme")}
    assert {s.stream for s in file.forecast.spans} == set(STREAMS)
    assert set(file.forecast.peaks) == set(TIERS) and file.tokens == 4 * 64
    assert any("not a program" in text for text in file.forecast.not_counted)
    assert "because it frees" in result.stdout
    shown = CliRunner().invoke(main, ["show", str(out)]).stdout
    for word in ("h2d", "d2h", "nvme_read", "nvme_write", "cpu_update", "\nhost ", "\nnvme ", "on nvme: it frees"):
        assert word in shown
    assert CliRunner().invoke(main, ["check", str(out)]).exit_code == 0
    with pytest.raises(ConfigError, match="need a folder"):
        zerograph.backend(plan=out)
    zerograph.backend(plan=out, path=str(tmp_path))


def test_offload_auto_takes_to_the_host_what_the_device_has_no_room_for(model: Path, tmp_path: Path) -> None:
    files = []
    for memory in ("8GiB", "10MiB"):
        out = tmp_path / f"{memory}.json"
        result = run(f"{model}:small", *OFFLOAD, "auto", "--memory", memory, "--bucket-size", "1MiB", "-o", str(out))
        assert result.exit_code == 0, result.stderr
        files.append(PlanFile.from_json(out.read_text()))
    assert (
        any("host" in bucket.placement.offload_tiers for bucket in files[1].plan.buckets)
        and files[0].forecast.seconds <= files[1].forecast.seconds
    )
    assert files[0].forecast.peaks["device"].bytes > files[1].budget["device"]
    assert files[1].forecast.peaks["device"].bytes <= files[1].budget["device"]
    printed = CliRunner().invoke(main, ["diff", *(str(tmp_path / f"{m}.json") for m in ("8GiB", "10MiB"))]).stdout
    assert "placement " in printed and "on host" in printed


def test_one_rank_offloads_too_and_says_what_is_missing(model: Path) -> None:
    one = (f"{model}:small", "--batch", "2", "--seq", "64", "--stage", "1", "--offload", "optimizer", "--tier", "host")
    result = run(*one, "--json")
    assert result.exit_code == 0, result.stderr
    assert {b.placement for b in PlanFile.from_json(result.stdout).plan.buckets} == {Placement(optimizer="host")}
    missing = run(*one, "--memory", "2MiB")
    assert missing.exit_code == 1
    assert "error: the step needs" in missing.stderr and "of device memory per rank at least" in missing.stderr
    assert 'offload="optimizer", tier="nvme"' not in missing.stderr  # it saves nothing
    nowhere = run(*one, "--machine", "cpu")
    assert nowhere.exit_code == 2 and "cpu has no host memory to offload to" in nowhere.stderr


def test_what_cannot_be_offloaded_is_refused_before_tracing(model: Path) -> None:
    """A model that is not there would be the next complaint, were it looked at."""
    for arguments, message in (
        (("--tier", "nvme"), "tier nvme is given, and offload is none"),
        (("--offload", "parameters", "--stage", "1"), "stage 1 cannot offload parameters"),
        (("--offload", "optimizer", "--tier", "host", "--machine", "cpu"), "cpu has no host memory to offload to"),
        (("--overlap", "forward"), "overlap forward is given, and offload is none"),
        (("--offload", "optimizer", "--machine", "cpu", "--overlap", "backward"), "no forecast tells how they share"),
        (("--offload", "gradients", "--overlap", "delayed"), "where the next backward writes"),
    ):
        result = run(f"{model}:branches", *arguments)
        assert result.exit_code == 2 and message in result.stderr, result.stderr


@pytest.mark.usefixtures("traced_once")
def test_a_plan_has_updates_beside_what_the_optimizer_says(model: Path) -> None:
    seconds = {}
    for overlap, printed in {
        "none": "so it waits for the whole backward",
        "backward": "inside of the backward, by buckets",
        "forward": "beside the next forward",
        "delayed": "beside the next step, which computes with copies from before",
    }.items():
        result = run(f"{model}:small", *OFFLOAD, "optimizer", "--tier", "host", "--overlap", overlap, "--json")
        assert result.exit_code == 0, result.stderr
        file = PlanFile.from_json(result.stdout)
        assert file.plan.overlap == overlap and check_file(file) == []
        assert any(printed in f"{reason.decision} {reason.why}" for reason in file.reasons)
        seconds[overlap] = file.forecast.seconds
    assert seconds["none"] > seconds["backward"] and seconds["none"] > seconds["delayed"]

    result = run(f"{model}:small", *OFFLOAD, "optimizer", "--tier", "host", "--overlap", "auto", "--json")
    file = PlanFile.from_json(result.stdout)
    exact = {overlap: seconds[overlap] for overlap in ("none", "forward", "backward")}
    assert file.forecast.seconds == min(exact.values()) and file.plan.overlap == min(exact, key=exact.__getitem__)
    assert Reason("plan", "an optimizer with overlap=True", _FASTEST) in file.reasons

    result = run(f"{model}:small", *OFFLOAD, "optimizer", "--tier", "host", "--overlap", "auto", "--memory", "20KiB")
    assert result.exit_code == 1 and "of device memory per rank" in result.stderr


@pytest.mark.usefixtures("traced_once")
def test_where_states_are_updated_is_searched_or_said(model: Path) -> None:
    seconds = {}
    for update in ("host", "device", "auto"):
        result = run(f"{model}:small", *OFFLOAD, "optimizer", "--tier", "host", "--update", update, "--json")
        assert result.exit_code == 0, result.stderr
        file = PlanFile.from_json(result.stdout)
        seconds[update] = file.forecast.seconds
        decision = f"states of the host are updated on the {file.plan.update}"
        named = [reason.why for reason in file.reasons if reason.decision == decision]
        assert named == {"host": [], "device": ["it was asked for"], "auto": [_FASTEST]}[update]
        assert update == "auto" or file.plan.update == update
    assert seconds["auto"] == min(seconds["host"], seconds["device"])
    result = run(f"{model}:small", "--update", "device")
    assert result.exit_code == 2 and "error: update device is given, and offload is none" in result.stderr


def test_memory_is_not_dropped_beside_offload() -> None:
    with pytest.raises(ConfigError, match="memory cannot be given with offload"):
        plan_file("any", lambda: None, machine_named("h100-80gb"), offload="auto", memory=2**30)


@pytest.mark.slow
def test_largest_is_larger_where_more_may_leave_the_device(model: Path, tmp_path: Path) -> None:
    """Solved over all tiers: the plan at that size fits them, and none does at the next."""
    arguments = (f"{model}:shallow", "--world", "4", "--seq", "32", "--memory", "16MiB", "--largest", "batch")
    stays = re.match(r"largest batch: (\d+); ", run(*arguments).stdout)
    out = tmp_path / "plan.json"
    result = run(*arguments, "--offload", "auto", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    found = re.match(
        r"largest batch: (\d+); (\d+) needs [\d.]+ MiB of device memory per rank, of 15 MiB", result.stdout
    )
    assert stays is not None and found is not None and int(found[1]) > int(stays[1])
    file = PlanFile.from_json(out.read_text())
    assert file.tokens == 32 * int(found[1]) and any(bucket.placement.offload_tiers for bucket in file.plan.buckets)
    assert all(peak.bytes <= file.budget[tier] for tier, peak in file.forecast.peaks.items())
    offload = (f"{model}:shallow", "--world", "4", "--seq", "32", "--memory", "16MiB", "--offload", "auto")
    assert run(*offload, "--batch", found[1]).exit_code == 0
    whole = ("--loss-tiles", "1", "--token-tiles", "1", "--batch-tiles", "1")
    missing = run(*offload, "--batch", found[2], *whole)  # in tiles, which --largest leaves out, it may fit
    assert missing.exit_code == 1 and "error: the step needs" in missing.stderr
    refused = run(*arguments, "--offload", "parameters", "--stage", "2")
    assert refused.exit_code == 2 and "stage 2 cannot offload parameters" in refused.stderr


def test_what_cannot_be_written_is_said_before_anything_is_traced(model: Path, tmp_path: Path) -> None:
    result = run(f"{model}:small", "-o", str(tmp_path / "none" / "plan.json"))
    assert result.exit_code == 2
    assert "error: cannot write" in result.stderr and "tracing" not in result.stderr


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("def made(:", "raises SyntaxError"),
        ("import nothing_of_that_name", "raises ModuleNotFoundError"),
        ("def made():\n    raise RuntimeError('too early')", "raises RuntimeError: too early"),
    ],
    ids=["syntax", "import", "call"],
)
def test_a_model_that_raises_is_an_error_with_its_line(tmp_path: Path, text: str, printed: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    result = run(f"{tmp_path}/broken.py:made")
    assert result.exit_code == 2 and printed in result.stderr, result.stderr
    assert "hint: mend " in result.stderr


def test_recomputed_layers_count_once_in_the_models_flops(model: Path) -> None:
    none, full = (
        json.loads(run(f"{model}:small", "--recompute", how, "--json").stdout)["flops"] for how in ("none", "full")
    )
    assert none == full > 0


@pytest.mark.slow
def test_memory_is_searched_within_at_any_stage_and_without_moments_more_fits(model: Path) -> None:
    given = (f"{model}:small", "--world", "4", "--batch", "8", "--seq", "256", "--stage", "3")
    found = run(*given, "--memory", "64MiB")
    assert found.exit_code == 0, found.stderr
    given += ("--token-tiles", "1", "--batch-tiles", "1")  # with which it fits in half
    with_moments, without = (run(*given, "--memory", "30MiB", "--moments", n) for n in ("2", "0"))
    needs = [re.search(r"the step needs ([\d.]+) MiB", result.stderr) for result in (with_moments, without)]
    assert with_moments.exit_code == 1 and needs[0] is not None
    assert without.exit_code == 0 or (needs[1] is not None and float(needs[1][1]) < float(needs[0][1]))


FORWARDS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

def given(forward, *inputs):
    Net.forward = forward
    return Net(), (inputs or (torch.empty(4, 8),))

def value():
    def forward(self, x):
        raise ValueError(f"at most {x.shape[0] - 1} rows,\\nnot {x.shape[0]}")
    return given(forward)

def helper():
    def width_of(x):
        assert x.shape[1] == 3, f"width is {x.shape[1]}"
    def forward(self, x):
        width_of(x)
        return F.linear(x, self.weight)
    return given(forward)

def missing():
    def forward(self, x):
        return self.nothing(x)
    return given(forward)

def name():
    def forward(self, x):
        return undefined + x
    return given(forward)

def shape():
    def forward(self, x):
        return F.linear(x.T, self.weight)
    return given(forward)

def arguments():
    def forward(self, x, labels):
        return x
    return given(forward)

def breaks():
    def forward(self, x):
        x = F.linear(x, self.weight)
        torch._dynamo.graph_break()
        return x
    return given(forward)

def prints():
    def forward(self, x):
        print("x has", x.shape)
        return F.linear(x, self.weight)
    return given(forward)

def values():
    def forward(self, x):
        x = F.linear(x, self.weight)
        return x if x.sum().item() > 0 else -x
    return given(forward)

def numpy():
    def forward(self, x):
        return F.linear(x, self.weight).tolist()
    return given(forward)

def talks():
    print("hello from the function")
    return Net(), (torch.empty(4, 8),)

def leaves():
    raise SystemExit("no arguments given")

def three():
    return Net(), torch.empty(4, 8), 3

def a_class():
    return Net
"""


@pytest.fixture(scope="module")
def forwards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forwards") / "forwards.py"
    path.write_text(FORWARDS)
    return path


@pytest.mark.parametrize(
    ("name", "printed", "line"),
    [
        ("value", "raises ValueError: at most 3 rows, not 4", "raise ValueError("),
        ("helper", "raises AssertionError: width is 8", "assert x.shape[1] == 3"),
        ("missing", "raises AttributeError: 'Net' object has no attribute 'nothing'", "return self.nothing(x)"),
        ("name", "raises NameError: name 'undefined' is not defined", "return undefined + x"),
        ("shape", "raises RuntimeError: a and b must have same reduction dim", "return F.linear(x.T, self.weight)"),
        ("arguments", "forward() missing 1 required positional argument: 'labels'", ""),
        (
            "breaks",
            "does not trace into one graph on the meta device: Call to `torch._dynamo.graph_",
            "torch._dynamo.g",
        ),
        ("prints", "does not know how to trace builtin operator `print`", 'print("x has"'),
        ("values", "data-dependent", "return x if x.sum().item() > 0"),
        ("numpy", "does not trace into one graph", ".tolist()"),
        ("leaves", "forwards.py:leaves ends the process (SystemExit: no arguments given)", ""),
        ("three", "returned tuple of Net, Tensor, int", ""),
        ("a_class", "returned the class Net, not an instance of it", ""),
    ],
)
def test_what_is_wrong_with_a_model_is_reported_with_its_own_exception_and_line(
    forwards: Path, name: str, printed: str, line: str
) -> None:
    result = run(f"{forwards}:{name}", "--machine", "cpu", "--world", "2", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    error = result.stderr.partition("error: ")[2]
    assert printed in error and "Traceback" not in result.stderr and "torch/_" not in result.stderr
    if line:
        number = 1 + next(i for i, text in enumerate(FORWARDS.splitlines()) if line in text)
        assert f"\n  at {forwards}:{number}, in " in error and line in error


@pytest.mark.slow
def test_torchs_log_is_off_where_the_model_is_the_first_to_import_torch(forwards: Path) -> None:
    """Importing torch gives its loggers levels."""
    command = [sys.executable, "-m", "zerograph", "plan", f"{forwards}:shape", "--machine", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "the model raises RuntimeError" in result.stderr
    assert "fake_tensor" not in result.stderr and "Traceback" not in result.stderr


def test_the_traceback_of_a_models_error_is_there_for_the_asking(forwards: Path) -> None:
    result = run(f"{forwards}:shape", "--machine", "cpu", "-v")
    assert result.exit_code == 2 and "Traceback (most recent call last)" in result.stderr


def test_what_a_model_prints_is_not_among_the_data(forwards: Path) -> None:
    result = run(f"{forwards}:talks", "--machine", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["model"] == f"{forwards}:talks"
    assert "hello from the function" in result.stderr


@pytest.mark.parametrize("hidden", ["queue", "sympy"])
def test_a_file_that_hides_a_module_is_named(tmp_path: Path, hidden: str) -> None:
    """In a process of its own: torch is imported after the model's folder has come first."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / f"{hidden}.py").write_text("mine = 1\n")
    command = [sys.executable, "-m", "zerograph", "plan", f"{tmp_path}/model.py:small", "--machine", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert f"{tmp_path}/{hidden}.py hides the module {hidden} of " in result.stderr
    assert result.stderr.endswith(f"hint: rename {tmp_path}/{hidden}.py, which whoever imports its name gets\n")


def test_a_model_file_may_have_the_name_of_a_module(tmp_path: Path) -> None:
    import random

    (tmp_path / "random.py").write_text(MODEL)
    result = run(f"{tmp_path}/random.py:with_inputs", "--machine", "cpu")
    assert result.exit_code == 0, result.stderr
    assert sys.modules["random"] is random


def test_activations_leave_without_a_search() -> None:
    sized = ("--layers", "2", "--hidden", "64", "--vocab", "128", "--seq", "64", "--activations", "nvme", "--json")
    for machine in ("cpu", "h100-80gb"):
        result = run(*sized, "--machine", machine)
        assert result.exit_code == 0, result.stderr
        file = PlanFile.from_json(result.stdout)
        assert file.plan.offload == (("layers.0", "nvme"), ("layers.1", "nvme"))
        assert not file.unexecuted and file.forecast.peaks["nvme"].bytes > 0


RETURNING = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 8), nn.Linear(8, 4096)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

def make():
    return Model()
"""


def test_logits_that_a_model_returns_can_be_planned_in_tiles(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(RETURNING)
    peaks = []
    for given in ([], ["--loss-tiles", "8"], ["--loss-tiles", "8", "--loss-only"]):
        ran = CliRunner().invoke(
            main, ["plan", f"{source}:make", "--seq", "512", "--world", "2", "--machine", "cpu", "--json", *given]
        )
        assert ran.exit_code == 0, ran.output
        file = PlanFile.from_json(ran.stdout)
        peaks.append(file.forecast.peaks["device"].bytes)
        assert file.plan.loss_tiles == (8 if "--loss-only" in given else 1)
    assert peaks[0] == peaks[1] > 2 * peaks[2]


def test_every_way_to_plan_leaves_logits_out(tmp_path: Path) -> None:
    """Where only the loss is returned it can be computed in tiles: by an offloaded plan, and by the largest batch."""
    source = tmp_path / "model.py"
    source.write_text(RETURNING)
    tiled = (f"{source}:make", "--seq", "64", "--world", "2", "--loss-tiles", "8", "--loss-only")
    ran = run(*tiled, "--offload", "optimizer", "--machine", "cpu", "--json")
    assert ran.exit_code == 0 and PlanFile.from_json(ran.stdout).plan.loss_tiles == 8
    largest = (run(*given, "--memory", "16MiB", "--largest", "batch").stdout for given in (tiled[:-1], tiled))
    whole, left = (int(re.match(r"largest batch: (\d+); ", told)[1]) for told in largest)  # type: ignore[index]
    assert left > 2 * whole


@pytest.mark.parametrize("offload", [[], ["--offload", "optimizer"]], ids=["of programs", "of a schedule"])
def test_a_plan_that_contradicts_its_tasks_is_found(offload: list[str], tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(RETURNING.replace(", logits", ""))
    given = ["--seq", "64", "--world", "2", "--machine", "cpu", "--loss-tiles", "4", "--json", *offload]
    ran = CliRunner().invoke(main, ["plan", f"{source}:make", *given])
    assert ran.exit_code == 0, ran.output
    file = PlanFile.from_json(ran.stdout)
    assert check_file(file) == [] and PlanFile.from_json(file.to_json()) == file
    for plan in (replace(file.plan, loss_tiles=2), replace(file.plan, loss_tiles=1, head="")):
        assert {violation.check for violation in check_file(replace(file, plan=plan))} == {"tokens"}


@pytest.mark.parametrize(
    "given", [["--tile", "some"], ["--loss-tiles", "off"], ["--loss-tiles", "0"], ["--token-tiles", "0"]]
)
def test_tiles_that_make_no_sense(given: list[str], tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(RETURNING)
    ran = CliRunner().invoke(main, ["plan", f"{source}:make", "--machine", "cpu", *given])
    assert ran.exit_code != 0 and ("tile" in ran.output or "tile" in str(ran.exception))


@pytest.mark.parametrize(
    "given", [[], ["--offload", "optimizer", "--machine", "v100-32gb-dgx2"]], ids=["here", "offloaded"]
)
def test_tokens_of_layers_can_be_planned_in_tiles(given: list[str]) -> None:
    sizes = ["--params", "50M", "--layers", "4", "--hidden", "512", "--vocab", "512", "--seq", "2048", "--world", "2"]
    peaks = []
    for tiles in ("1", "8"):
        options = ["--recompute", "full", "--token-tiles", tiles, "--json", *given]
        ran = CliRunner().invoke(main, ["plan", *sizes, *(["--machine", "cpu"] if not given else []), *options])
        assert ran.exit_code == 0, ran.output
        file = PlanFile.from_json(ran.stdout)
        assert file.plan.token_tiles == int(tiles)
        assert len(file.plan.token_regions) == (4 if tiles == "8" else 0)
        peaks.append(file.forecast.peaks["device"].bytes)
    assert "MLPs of 4 layers in 8 tiles of tokens" in [reason.decision for reason in file.reasons]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    "given",
    [["--machine", "cpu"], ["--offload", "optimizer", "--machine", "v100-32gb-dgx2"]],
    ids=["here", "offloaded"],
)
def test_layers_can_be_planned_in_parts_of_the_batch(given: list[str], tmp_path: Path) -> None:
    sizes = ["--params", "50M", "--layers", "4", "--hidden", "512", "--vocab", "512", "--batch", "8", "--world", "2"]
    peaks = []
    for parts in ("1", "4"):
        options = ["--recompute", "full", "--batch-tiles", parts, "--loss-tiles", "4", "--json", *given]
        ran = CliRunner().invoke(main, ["plan", *sizes, *options])
        assert ran.exit_code == 0, ran.output
        file = PlanFile.from_json(ran.stdout)
        assert (file.plan.token_tiles, file.plan.by_sample) == (int(parts), parts == "4")
        assert len(file.plan.token_regions) == (4 if parts == "4" else 0)
        assert check_file(file) == []
        peaks.append(file.forecast.peaks["device"].bytes)
    layers = {layer_of_param(p.name) for bucket in file.plan.buckets for p in bucket.params} - {""}
    assert sum(any(layer_of_param(p.name) for p in b.params) for b in file.plan.buckets) == len(layers) == 4
    assert "4 layers in 4 tiles of whole samples" in [reason.decision for reason in file.reasons]
    assert peaks[1] < peaks[0]
    refused = CliRunner().invoke(main, ["plan", *sizes, "--batch-tiles", "4", "--token-tiles", "4", *given])
    assert refused.exit_code == 2 and "a layer is divided in one way" in refused.output


@pytest.mark.slow
def test_the_trillion_parameters_that_the_documentation_times() -> None:
    shape = "--layers 128 --hidden 25600 --vocab 51200 --world 1024 --machine v100-32gb-dgx2 --dtype float16"
    result = run(*shape.split(), "--stage", "auto", "--offload", "auto")
    assert result.exit_code == 0, result.stderr
    assert "activations of layers.127" in result.stdout
