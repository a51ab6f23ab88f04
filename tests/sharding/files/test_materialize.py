"""Models built on the meta device: initialized or loaded shard by shard.

Tests ``sharding/files/shard_files.py`` and ``sharding/files/room.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import llama
from ranks import run, warned
from safetensors.torch import save_file
from torch import nn
from toy import PeakMemory, Toy, adamw, build, compiled, differing, full, train

import zerograph
from zerograph.core.errors import CheckpointError, ShardingError
from zerograph.sharding.files import room, shard_files


def _meta(factory: Callable[[], nn.Module] = Toy, stage: int = 3) -> nn.Module:
    with torch.device("meta"):
        model = factory().train()
    return zerograph.shard(model, compiled(model, stage))


def _trains_like_the_plain_model(path: str, stage: int) -> None:
    plain = build()
    values = full(plain)
    compiled(plain, stage)
    expected = train(plain, adamw(plain), range(2))
    for files, optimizer_first in (((), True), ((path,), False)):
        with torch.device("meta"):
            model = Toy().train()
        optimizer = adamw(model) if optimizer_first else None
        zerograph.shard(model, compiled(model, stage))
        torch.manual_seed(0 if dist.get_rank() == 0 else 1)  # rank 0's generator decides
        assert zerograph.materialize(model, files=files or None) is model
        if not files:
            model.norm.running_mean.copy_(values["norm.running_mean"])
        assert differing(full(model), values) == []
        assert torch.equal(model.shift, torch.full((4,), 0.5))
        assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
        assert train(model, optimizer or adamw(model), range(2)) == expected


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("files") / "plain.safetensors")
    zerograph.export(build(), path)
    return path


@pytest.mark.parametrize(("world", "stage"), [(2, 3), (2, 0), (1, 3), (4, 3)])
def test_trains_like_the_plain_model(world: int, stage: int, plain_file: str) -> None:
    run(world, _trains_like_the_plain_model, plain_file, stage)


class Attention(nn.Module):
    """A module whose initialization reaches into a child's, and one for a function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.position = nn.Parameter(torch.zeros(3, 8))


def _attention(folder: str | None = None) -> dict[str, torch.Tensor]:
    def normal(module: nn.Module) -> None:
        if isinstance(module, Attention):
            module.position.data.normal_(std=0.5)

    room._LARGE = 0  # also of small tensors on NVMe what was written is let go of meanwhile
    offloaded = {"offload": "parameters", "tier": "nvme", "path": folder} if folder else {}
    with torch.device("meta"):
        model = Attention()
    zerograph.shard(model, zerograph.backend(stage=3, compute="eager", **offloaded), device="cpu")
    torch.manual_seed(3)
    return full(zerograph.materialize(model, init=normal))


def test_values_depend_neither_on_the_world_size_nor_on_where_they_are_made(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = nn.MultiheadAttention(8, 2)
    for world, *folder in ((1,), (2,), (1, str(tmp_path)), (2, str(tmp_path))):
        values = run(world, _attention, *folder)[0]
        assert 0.2 < values.pop("position").std() < 0.8
        assert differing({n.removeprefix("attention."): v for n, v in values.items()}, plain.state_dict()) == []


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.a)
        nn.init.uniform_(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a @ self.b


def _transposed(module: nn.Module) -> None:
    module.a.data = module.a.data.t()


def _expanded(module: nn.Module) -> None:
    module.a.data = module.a.data[:1].expand(64, 64)


def _swapped(module: nn.Module) -> None:
    module.a.data, module.b.data = module.b.data, module.a.data


def _put_elsewhere(folder: str) -> None:
    for init in (_transposed, _expanded, _swapped):
        found = []
        for offloaded in ({}, {"offload": "parameters", "tier": "nvme", "path": folder}):
            with torch.device("meta"):
                model = Square()
            zerograph.shard(model, zerograph.backend(stage=3, compute="eager", **offloaded), device="cpu")
            torch.manual_seed(3)
            found.append(full(zerograph.materialize(model, init=init)))
        assert differing(*found) == [], init.__name__


def test_initializations_may_put_other_memory_in_a_parameter(tmp_path: Path) -> None:
    run(1, _put_elsewhere, str(tmp_path))


def _tried_again(folder: str) -> None:
    def fails(module: nn.Module) -> None:
        raise RuntimeError("no values")

    offloaded = {"offload": "parameters", "tier": "nvme", "path": folder}
    backend = zerograph.backend(stage=3, compute="eager", **offloaded)
    with torch.device("meta"):
        model = Square()
    zerograph.shard(model, backend, device="cpu")
    store, rooms = backend._store, set[int]()
    for _ in range(3):
        with pytest.raises(ShardingError, match="no values"):
            zerograph.materialize(model, init=fails)
        rooms.add(store.room.arena.free_bytes)
    zerograph.materialize(model)
    rooms.add(store.room.arena.free_bytes)
    assert len(rooms) == 1
    assert not any(p.isnan().any() for p in full(model).values())


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_try_takes_the_room_of_the_first(world: int, tmp_path: Path) -> None:
    run(world, _tried_again, str(tmp_path))


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.gain


class Reaches(NoReset):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.ones_(self.first.weight)


def _init_failures() -> list[str]:
    messages = []

    def attempt(model: nn.Module, **options: object) -> None:
        with pytest.raises(ShardingError, match="hint: ") as caught:
            zerograph.materialize(model, **options)
        messages.append(str(caught.value))

    attempt(_meta(NoReset))
    attempt(_meta(NoReset), init=lambda module: None)
    attempt(_meta(Reaches))
    with torch.device("meta"):
        unknown = NoReset()
    attempt(unknown)
    model = _meta(NoReset)
    with pytest.raises(ShardingError, match="8 of the 8 parameters"):
        _meta()(torch.arange(4))
    with pytest.raises(ShardingError, match=r"first.weight is on the meta device"):
        model.forward(torch.ones(4))
    assert nn.init.zeros_(model.first.weight).is_meta
    return messages


def test_a_lone_rank_owns_nothing_of_what_it_makes() -> None:
    """Another parameter may come to have the ``id`` of one that is gone."""
    with torch.device("meta"):
        model = Toy()
    backend = zerograph.backend()
    zerograph.materialize(zerograph.shard(model, backend))
    assert not backend._adoption.known


def test_initializations_that_fail_name_the_module() -> None:
    first, second = run(2, _init_failures)
    assert "module at the root (NoReset) has no reset_parameters()" in first[0]
    assert "the given init function did not fill all of gain" in first[1]
    assert "first.weight is on the meta device" in first[2]
    assert "belongs to no backend" in first[3]
    assert all(there.removeprefix("on rank 0: ") == here for here, there in zip(first, second, strict=True))


class Ordered(nn.Module):
    """A weight, and what is in no checkpoint: whole numbers, and whether they count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("order", torch.arange(4), persistent=False)
        self.register_buffer("counts", torch.ones(4, dtype=torch.bool), persistent=False)
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def _fill_order(module: nn.Module) -> None:
    """Of buffers alone: weights come from a file."""
    module.order.copy_(torch.arange(4))
    module.counts = torch.ones(4, dtype=torch.bool)


def _integers(path: str) -> None:
    with pytest.raises(ShardingError, match=r"reset_parameters\(\) did not fill all of order in module at the root"):
        zerograph.materialize(_meta(Ordered))
    with pytest.raises(ShardingError, match="the given init function did not fill all of counts"):
        zerograph.materialize(_meta(Ordered), init=lambda module: module.order.zero_())
    model = zerograph.materialize(_meta(Ordered), init=_fill_order, files=path)
    assert model.order.tolist() == [0, 1, 2, 3] and model.counts.all()
    assert full(model)["weight"].tolist() == [2.0] * 4


def test_buffers_that_nothing_fills_are_reported_also_of_whole_numbers(tmp_path: Path) -> None:
    save_file({"weight": torch.full((4,), 2.0)}, tmp_path / "weight.safetensors")
    run(1, _integers, str(tmp_path / "weight.safetensors"))


def _llama_from_file(path: str) -> tuple[str, list[str]]:
    """Its rotary frequencies are in no checkpoint: the error says what computes them, and that does."""
    plain, _ = llama()
    with pytest.raises(ShardingError, match=r"fill model\.rotary_emb\.inv_freq") as caught:
        zerograph.materialize(_meta(lambda: llama()[0]), files=path)
    model = _meta(lambda: llama()[0])
    with warned() as notices:
        zerograph.materialize(model, init=model._init_weights, files=path)
    assert differing(full(model), full(plain)) == []
    names = {name for name, _ in plain.named_buffers()}
    assert names == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    assert all(torch.equal(value, plain.get_buffer(name)) for name, value in model.named_buffers())
    return caught.value.hint, notices


def test_a_model_of_transformers_is_loaded_as_the_error_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = str(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    zerograph.export(llama()[0], path)
    for hint, notices in run(2, _llama_from_file, path):
        assert hint == "no file holds it: zerograph.materialize(model, init=model._init_weights, files=...)"
        assert notices == []


def _file_failures(folder: str) -> list[str]:
    messages = []
    for name in ("missing", "shape", "dtype", "absent", "fp8"):
        # Only rank 1 looks for a file that is not there: all ranks must hear of it.
        absent = name == "absent" and dist.get_rank() == 0
        path = f"{folder}/{'plain' if absent else name}.safetensors"
        with pytest.raises(CheckpointError, match="hint: ") as caught:
            zerograph.materialize(_meta(), files=[path])
        messages.append(str(caught.value))
    with warned() as notices:
        partly = zerograph.materialize(_meta(), init="reset_parameters", files=[f"{folder}/partly.safetensors"])
    assert [t.partition(" (")[0] for t in notices] == ["the files lack 9 parameters or buffers"] * (
        dist.get_rank() == 0
    )
    assert torch.equal(full(partly)["up.weight"], build().up.weight)
    half = zerograph.materialize(_meta(), files=[f"{folder}/{part}.safetensors" for part in ("one", "two")])
    assert torch.equal(full(half)["up.weight"], build().up.weight.bfloat16().float())
    return messages


def test_files_that_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    values = {n: v.clone() for n, v in build().state_dict().items()}
    del values["embed.weight"]  # the tied weight under its other name

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / f"{name}.safetensors")

    write("plain", values)
    write("missing", {n: v for n, v in values.items() if not n.startswith("up.")} | {"odd": torch.zeros(1)})
    write("shape", values | {"up.bias": torch.zeros(3)})
    write("dtype", values | {"up.bias": values["up.bias"].double()})
    write("fp8", values | {"up.bias": values["up.bias"].to(torch.float8_e4m3fn)})
    write("partly", {n: v for n, v in values.items() if n.startswith("up.")})
    names = list(values)
    write("one", {n: values[n].bfloat16() if values[n].is_floating_point() else values[n] for n in names[:5]})
    write("two", {n: values[n].bfloat16() if values[n].is_floating_point() else values[n] for n in names[5:]})
    first, second = run(2, _file_failures, str(tmp_path))
    assert [message.removeprefix("on rank 1: ") for message in first] == second
    assert "2 missing (up.weight, up.bias); 1 unexpected (odd)" in first[0]
    assert "up.bias has shape [3] in the files and [8] in the model" in first[1]
    assert "up.bias is F64 in the files and torch.float32 in the model" in first[2]
    assert "absent.safetensors" in first[3] and first[3].startswith("on rank 1: ")
    assert "up.bias is F8_E4M3 in the files and torch.float32 in the model: values have scales" in first[4]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"it is a folder[^$]*hint: files=sorted.*glob"):
        shard_files._open_all([str(tmp_path)], stack)


def _one_name_in_two_files(folder: str) -> str:
    files = [f"{folder}/{name}.safetensors" for name in ("model", "part")]
    with pytest.raises(CheckpointError) as caught:
        zerograph.materialize(_meta(), init="reset_parameters", files=files)
    return str(caught.value)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    """Else the order of the files decides, as where an old whole file lies beside new parts."""
    values = {n: v.clone() for n, v in build().state_dict().items() if n != "embed.weight"}
    save_file(values, tmp_path / "model.safetensors")
    save_file({"up.bias": values["up.bias"] + 1}, tmp_path / "part.safetensors")
    (message,) = run(1, _one_name_in_two_files, str(tmp_path))
    assert f"up.bias is in {tmp_path}/model.safetensors and in {tmp_path}/part.safetensors" in message
    assert "hint: give the files of one checkpoint" in message


def _part_of_a_download(folder: str) -> list[str]:
    messages = []
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            zerograph.materialize(_meta(), init="reset_parameters", files=sorted(Path(folder).glob("*.safetensors")))
        messages.append(str(caught.value))
        Path(folder, "model.safetensors.index.json").write_text('{"weight')
    return messages


def test_a_download_that_lacks_files_of_its_index_is_refused(tmp_path: Path) -> None:
    """Else init= fills the rest, as if no file were to hold it."""
    values = build().state_dict()
    save_file({"up.bias": values["up.bias"]}, tmp_path / "model-1-of-2.safetensors")
    index = {"weight_map": {"up.bias": "model-1-of-2.safetensors", "up.weight": "model-2-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (messages,) = run(1, _part_of_a_download, str(tmp_path))
    assert "model.safetensors.index.json has 1 parameters or buffers (up.weight) in files that were not" in messages[0]
    assert "hint: add model-2-of-2.safetensors" in messages[0]
    assert "cannot read" in messages[1] and "hint: download it again" in messages[1]


LAYERS, WIDTH = 12, 1024
LAYER = 4 * WIDTH**2


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def _memory(path: str) -> tuple[int, int]:
    peaks = []
    zerograph.materialize(_meta())  # what the first collective allocates once
    for files in ((), (path,)):
        model = _meta(Deep)
        with PeakMemory() as peak, pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_files, "_read", _measured(shard_files._read, peak))
            zerograph.materialize(model, files=files or None)
        del model
        peaks.append(peak.private if files else peak.bytes)
    return peaks[0], peaks[1]


def _measured(function: Callable[..., None], peak: PeakMemory) -> Callable[..., None]:
    def measured(*args: object) -> None:
        function(*args)
        peak.look()

    return measured


def test_no_rank_holds_the_unsharded_model(tmp_path: Path) -> None:
    path = tmp_path / "deep.safetensors"
    zerograph.export(Deep(), path)
    for rank, (initialized, loaded) in enumerate(run(2, _memory, str(path), fresh=True)):
        shards = LAYERS * LAYER // 2
        # Memory freed earlier and used again does not show: the lower bound only says that the measurement sees shards.
        seen = 0.9 * shards
        # Besides, rank 0 holds a layer and the rows it sends.
        assert seen <= initialized < shards + 2 * LAYER, f"rank {rank}"
        # Without the pages of the mapped file, which the system takes back when it needs them.
        assert seen <= loaded < shards + 2 * LAYER, f"rank {rank}"
