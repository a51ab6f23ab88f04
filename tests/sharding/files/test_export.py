"""Checkpoints: torch.distributed.checkpoint as it is, plain state dicts, and the exported file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from toy import PeakMemory, Toy, adamw, build, compiled, differing, full, train

import zerograph
from zerograph.core.errors import CheckpointError

Saved = tuple[str, list[float], dict[str, torch.Tensor]]


def _gathers(profile: torch.profiler.profile) -> list[str]:
    wanted = ("zg::unshard", "_c10d_functional::all_gather_into_tensor")
    return [event.key for event in profile.key_averages() if event.key in wanted]


def _save(path: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train at stage 3, save, and go on; the losses and values after the save are what a resumed run must give."""
    model = build()
    optimizer = adamw(model)
    compiled(model)
    train(model, optimizer, range(2))
    with torch.profiler.profile() as profile:
        states, moments = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": moments}, checkpoint_id=path)
    assert _gathers(profile) == []
    assert list(states) == list(Toy().state_dict())
    return train(model, optimizer, range(2, 4)), full(model)


def _resume(path: str, stage: int, shard_first: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(seed=1)
    optimizer = adamw(model)
    backend = compiled(model, stage)
    if shard_first:
        zerograph.shard(model, backend)
    with torch.profiler.profile() as profile:
        states, moments = get_state_dict(model, optimizer)
        dcp.load({"model": states, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)
    assert _gathers(profile) == []
    return train(model, optimizer, range(2, 4)), full(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = str(tmp_path_factory.mktemp("dcp"))
    return path, *run(2, _save, path)[0]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "stage", "shard_first"), [(2, 3, True), (2, 1, True), (2, 3, False), (1, 3, True), (4, 3, True)]
)
def test_resume_from_dcp(saved: Saved, world: int, stage: int, shard_first: bool) -> None:
    path, losses, values = saved
    resumed, ours = run(world, _resume, path, stage, shard_first)[0]
    if world == 2:
        assert resumed == losses
        assert differing(ours, values) == []
    assert resumed == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(ours[n], values[n], atol=1e-5) for n in values)


def _state_dicts() -> None:
    plain, model = build(seed=1), build()
    compiled(model)
    model(torch.arange(4))
    assert model.load_state_dict(plain.state_dict()) == ([], [])
    assert differing(full(model), full(plain)) == []
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        model.get_submodule("up")._parameters["weight"].zero_()
    file.seek(0)
    assert model.load_state_dict(torch.load(file)) == ([], [])
    assert differing(full(model), full(plain)) == []
    with pytest.raises(RuntimeError, match=r"size mismatch for up.weight"):
        model.load_state_dict(plain.state_dict() | {"up.weight": torch.zeros(3, 3)})
    wrapper = torch.compile(model, backend=zerograph.backend(stage=3, compute="eager"))
    assert list(get_model_state_dict(wrapper)) == list(plain.state_dict())
    assert next(iter(wrapper.state_dict())) == "_orig_mod.scale"


def test_plain_and_saved_state_dicts_load() -> None:
    run(2, _state_dicts)


def _export(path: str, form: str) -> dict[str, torch.Tensor]:
    model = build()
    if form == "wrapper":
        wrapper = torch.compile(model, backend=zerograph.backend(stage=3, compute="eager"))
        wrapper(torch.arange(4))
        zerograph.export(wrapper, path)
    else:
        if form != "plain":
            compiled(model, int(form))
            model(torch.arange(4))
        zerograph.export(model, path)
    return full(model)


@pytest.mark.parametrize(
    ("world", "form"), [(2, "3"), (2, "1"), (2, "0"), (2, "plain"), (2, "wrapper"), (1, "3"), (4, "3")]
)
def test_export_restores_a_plain_model(world: int, form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = run(world, _export, str(path), form)[0]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert set(file.keys()) == values.keys() - {"head.weight"}
    by_load_model, by_state_dict = build(seed=1), build(seed=1)
    assert load_model(by_load_model, path) == (set(), [])
    missing, unexpected = by_state_dict.load_state_dict(load_file(path), strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    for restored in (by_load_model, by_state_dict):
        assert differing(full(restored), values) == []


def test_export_keeps_the_mode_of_a_file_and_writes_through_links(tmp_path: Path) -> None:
    path, link = tmp_path / "there" / "model.safetensors", tmp_path / "link.safetensors"
    path.parent.mkdir()
    path.touch(mode=0o600)
    link.symlink_to(path)
    zerograph.export(build(), link)
    assert link.is_symlink() and load_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def _exports_that_fail(folder: str) -> list[str]:
    model, messages = build(), []
    compiled(model)
    model(torch.arange(4))
    for path in (f"{folder}/missing/model", folder, f"{folder}/{'x' * 300}"):
        with pytest.raises(CheckpointError, match="hint: ") as caught:
            zerograph.export(model, path)
        messages.append(str(caught.value))
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"odd is torch\.complex128"):
        zerograph.export(model, f"{folder}/odd")
    return messages


def test_export_failures_reach_every_rank(tmp_path: Path) -> None:
    first, second = run(2, _exports_that_fail, str(tmp_path))
    assert "cannot write" in first[0] and "No such file" in first[0]
    assert [f"on rank 0: {m}" for m in first] == second
    assert list(tmp_path.iterdir()) == []


def _export_to_full_disk(path: str) -> str:
    model = build()
    compiled(model)
    model(torch.arange(4))
    Path(path).write_text("before")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        # A small RLIMIT_FSIZE is a full disk without privileges; fallocate would notice before the first tensor.
        import resource
        import signal

        patch.setattr("zerograph.sharding.files.export._reserve", lambda *_: None)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            with pytest.raises(CheckpointError) as caught:
                zerograph.export(model, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    messages = run(2, _export_to_full_disk, str(tmp_path / "model"))
    assert all("File too large" in message for message in messages)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]


class Deep(nn.Sequential):
    def __init__(self, layers: int = 12, width: int = 1024) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _export_memory(path: str) -> int:
    backend = zerograph.backend(stage=3)
    zerograph.export(zerograph.shard(Deep(layers=1), backend), path)  # the transport's pages are touched, once
    model = zerograph.shard(Deep(), backend)
    with PeakMemory() as peak:
        zerograph.export(model, path)
    return peak.bytes


def test_export_holds_one_parameter_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    peaks = run(2, _export_memory, str(path), fresh=True)
    parameter, size = 4 * 1024**2, path.stat().st_size
    assert size > 12 * parameter
    assert max(peaks) < 3 * parameter  # one whole, and what the transport sends and stages
    head = int.from_bytes(path.read_bytes()[:8], "little")
    assert "__metadata__" in json.loads(path.read_bytes()[8 : 8 + head])
