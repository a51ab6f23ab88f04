"""A frame that is loaded is the one that was compiled; whatever else would be compiled gets another name.

Processes are those of a first start and of a second one.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT
from ranks import run
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import zerograph
from zerograph import api
from zerograph.compiler import driver, frame_cache
from zerograph.compiler.frame import Frame
from zerograph.compiler.frame_cache import FrameFile
from zerograph.compiler.frame_plan import Planner
from zerograph.compiler.lowering import segments
from zerograph.core.files.private_folder import PrivateFolder

pytestmark = pytest.mark.costly

IDS = torch.arange(32).view(2, 16)


@dataclass(frozen=True)
class Trained:
    """What three steps came to, how many frames and segments were compiled for them, and what the backend says."""

    losses: list[float]
    state: dict[str, Tensor]
    frames: int
    segments: int
    backend: zerograph.Backend
    step: Callable[[], float]

    @property
    def result(self) -> list[object]:
        return [self.losses, *(value.tolist() for value in self.state.values())]


def train(
    folder: Path, make: Callable[[], nn.Module], *, ids: Tensor = IDS, evaluates: bool = False, **options: Any
) -> Trained:
    """Train for three steps as a process does that has just started, with its frames in ``folder``."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    backend = zerograph.backend(**options)
    model.compile(backend=backend)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()

    def step() -> float:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with (
        patch.object(frame_cache, "frame_folder", lambda: folder),
        patch.object(driver, "_compile", side_effect=driver._compile) as frames,
        patch.object(segments, "compile_segment", side_effect=segments.compile_segment) as compiled,
    ):
        for _ in range(3):
            losses.append(step())
            if evaluates:
                with torch.no_grad():
                    losses.append(model(ids).item())
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in model.state_dict().items()}
    return Trained(losses, state, frames.call_count, compiled.call_count, backend, step)


def small() -> nn.Module:
    return GPT(loss=True)


def with_dropout() -> nn.Module:
    return GPT(loss=True, dropout=0.5)


class Counting(nn.Module):
    """Writes to buffers; computes again in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(self.embed(ids.flatten()))
        x = checkpoint(lambda x: self.head(x.sin()), x, use_reentrant=False)
        return F.cross_entropy(x, ids.flatten())


@pytest.mark.parametrize("make", [small, with_dropout, Counting])
def test_what_is_loaded_is_what_was_compiled(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    first, second = (train(tmp_path, make, evaluates=True) for _ in range(2))
    assert (first.frames, second.frames, second.segments) == (2, 0, 0)
    assert second.result == first.result
    for fresh, loaded in zip(first.backend.frames, second.backend.frames, strict=True):
        assert (loaded.programs, loaded.plan, loaded.step) == (fresh.programs, fresh.plan, fresh.step)
        assert loaded.passes == fresh.passes
    fresh, loaded = first.backend.report(), second.backend.report()
    assert (loaded.programs, loaded.segments, loaded.runs) == (fresh.programs, fresh.segments, fresh.runs)


def test_gradients_twice_over_one_graph(tmp_path: Path) -> None:
    """AOTAutograd refuses ``retain_graph`` where a backward may write into what the forward saved."""
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = small()
        with patch.object(frame_cache, "frame_folder", lambda: tmp_path):
            model.compile(backend=zerograph.backend())
            loss = model(IDS)
        loss.backward(retain_graph=True)
        once = model.head.weight.grad.clone()
        loss.backward()
        assert torch.equal(model.head.weight.grad, 2 * once)


# Names


def name(make: Callable[[], nn.Module] = small, ids: Tensor = IDS, within: Sequence[Any] = (), **options: Any) -> str:
    """Under which name the frame of a model is stored; empty where it is not."""
    found = list[FrameFile]()

    def named(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any], planner: Planner) -> Callable[..., Any]:
        found.append(FrameFile.of(planner, frame, gm, inputs))
        return gm

    torch._dynamo.reset()
    model = make()
    model.compile(backend=zerograph.backend(**options))
    with ExitStack() as stack:
        stack.enter_context(patch.object(frame_cache, "frame_folder", lambda: Path("unused")))
        stack.enter_context(patch.object(api, "compile_frame", named))
        for context in within:
            stack.enter_context(context)
        model(ids)
    assert len(found) == 1
    return found[0].name


class Outer(nn.Module):
    """The same operators in modules of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


def frozen() -> nn.Module:
    model = small()
    model.head.weight.requires_grad_(False)
    return model


class Activated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.activation = nn.Embedding(64, 8), activation

    def forward(self, ids: Tensor) -> Tensor:
        return self.activation(self.embed(ids)).sum()


def _threads() -> Any:
    return patch.object(torch, "get_num_threads", lambda: 64)


OTHERS: dict[str, dict[str, Any]] = {
    "a dtype": {"dtype": torch.bfloat16},
    "a bucket size": {"bucket_size": 1000},
    "a prefetch distance": {"prefetch": 2},
    "recomputation": {"recompute": "full"},
    "a budget": {"memory": "1GiB"},
    "another budget": {"memory": "2GiB"},
    "a budget and what is given": {"memory": "1GiB", "prefetch": 1},
    "a budget and offload": {"memory": "1GiB", "offload": "auto", "path": "/tmp"},
    "another machine": {"memory": "1GiB", "machine": "h100-80gb"},
    "more tokens": {"ids": torch.arange(34).view(2, 17)},
    "other strides": {"ids": torch.arange(32).view(16, 2).t()},
    "another offset": {"ids": torch.arange(33)[1:].view(2, 16)},
    "another width": {"make": lambda: GPT(width=64, loss=True)},
    "a frozen parameter": {"make": frozen},
    "modules of other names": {"make": Outer},
    "no gradients": {"within": [torch.no_grad()]},
    "autocast": {"within": [torch.autocast("cpu", torch.bfloat16)]},
    "attention": {"within": [sdpa_kernel(SDPBackend.MATH)]},
    "threads": {"within": [_threads()]},
    "settings of Inductor": {"within": [inductor_config.patch({"epilogue_fusion": False})]},
    "settings of AOTAutograd": {"within": [functorch_config.patch({"ban_recompute_used_far_apart": False})]},
    "versions": {"within": [patch.object(frame_cache, "_versions", lambda: ("another",))]},
}


def test_what_is_alike_has_one_name() -> None:
    assert name() == name() != ""
    assert name(within=[nullcontext()]) == name(ids=IDS + 1)


@pytest.mark.slow
def test_what_would_be_compiled_to_something_else_has_another_name() -> None:
    names = {"nothing": name()} | {what: name(**changes) for what, changes in OTHERS.items()}
    assert "" not in names.values()
    same = {what: [other for other in names if names[other] == names[what]] for what in names}
    assert same == {what: [what] for what in names}


def test_operators_make_names() -> None:
    functions = [torch.sin, torch.cos, lambda x: x * 2, lambda x: x * 2.0, lambda x: x * 3]
    assert len({name(lambda f=f: Activated(f)) for f in functions}) == len(functions)


def test_names_hold_the_source() -> None:
    """A pass that is changed makes other graphs of the same one."""
    assert frame_cache._versions() == frame_cache._versions.__wrapped__()
    read = Path.read_bytes

    def changed(path: Path) -> bytes:
        return read(path) + b" " * (path.name == "hoist.py")

    with patch.object(Path, "read_bytes", changed):
        assert frame_cache._versions() != frame_cache._versions.__wrapped__()


@torch.library.custom_op("warm_start::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return 2 * x


double.register_fake(torch.empty_like)
double.register_autograd(lambda _, grad: 2 * grad)


@pytest.mark.parametrize("how", ["eager", "operators", "dynamic"])
def test_what_names_cannot_tell_is_not_stored(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zerograph")
    if how == "eager":
        assert name(compute="eager") == ""
    elif how == "operators":
        assert name(lambda: Activated(double)) == ""
        assert "operators of warm_start may change unseen" in caplog.text
    else:
        ids = IDS.clone()
        torch._dynamo.mark_dynamic(ids, 1)
        assert name(lambda: Activated(torch.sin), ids) == ""
        assert "is not stored: an input is a SymInt" in caplog.text


class Weighted(Activated):
    def __init__(self) -> None:
        super().__init__(lambda x: (x * torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5])).square())


def test_constants_are_distinguished_in_one_process_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zerograph")
    first, second = (train(tmp_path, Weighted) for _ in range(2))
    assert (first.frames, second.frames) == (1, 1)
    assert first.result == second.result
    assert "frame 0 is not stored: a segment has constants or dynamic sizes" in caplog.text


# Files


def test_what_cannot_be_loaded_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name.startswith("zerograph") and r.levelno > logging.INFO]

    first = train(tmp_path, small)
    (path,) = tmp_path.iterdir()
    PrivateFolder(tmp_path).write(path.name, b"no pickle")
    spoiled = train(tmp_path, small)
    assert (spoiled.frames, spoiled.result) == (1, first.result)
    (warning,) = warnings()
    assert warning.startswith(f"frame 0 is compiled, as it cannot be loaded from {path}: ")
    path.write_bytes(b"not whole")
    damaged = train(tmp_path, small)
    assert (damaged.frames, damaged.result) == (1, first.result)
    assert warnings() == [warning, f"not read: {path} is damaged"]
    assert train(tmp_path, small).frames == 0


# Ranks


def _start(
    folder: str, separate: bool, tokens: list[int], options: dict[str, Any]
) -> tuple[int, int, list[object], str]:
    """Frames and segments that this rank compiles in training, what it trains to, and the digest of its plan.

    Args:
        separate: each rank has a folder of its own.
        tokens: of each rank's batch.
    """
    rank = dist.get_rank()
    ids = torch.arange(rank, rank + tokens[rank]).view(2, -1) % 64
    trained = train(Path(folder) / str(rank * separate), small, ids=ids, **options)
    with trained.backend.record():
        trained.step()
    assert "recorded step" in str(trained.backend.report())
    return trained.frames, trained.segments, trained.result, trained.backend.plan.digest


def start(
    folder: Path, *, separate: bool = True, tokens: Sequence[int] = (32, 32), fresh: bool = False, **options: Any
) -> tuple[list[int], list[int], list[object], list[str]]:
    """The same by rank, and in ``fresh`` processes."""
    found = run(2, _start, str(folder), separate, [*tokens], options, fresh=fresh)
    frames, compiled, results, plans = ([*values] for values in zip(*found, strict=True))
    return frames, compiled, results, plans


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"stage": "auto", "memory": "1GiB"}, marks=pytest.mark.slow),
        {"stage": "auto", "memory": "1GiB", "offload": "optimizer"},
        pytest.param({"tile": 3, "bucket_size": "4KiB"}, marks=pytest.mark.slow),
    ],
    ids=["rules", "search", "offload", "tiles"],
)
def test_ranks_load_and_disagree(options: dict[str, Any], tmp_path: Path) -> None:
    if "offload" in options:
        options = {**options, "path": str(tmp_path)}
    first = start(tmp_path, **options)
    assert first[0] == [1, 1]
    second = start(tmp_path, fresh=True, **options)
    assert second[:2] == ([0, 0], [0, 0])
    assert second[2:] == first[2:]
    shutil.rmtree(tmp_path / "1")
    third = start(tmp_path, **options)
    assert third[0] == [0, 1]
    assert third[2:] == first[2:]


def test_ranks_share_what_one_of_them_stored(tmp_path: Path) -> None:
    start(tmp_path, separate=False)
    assert len([*(tmp_path / "0").iterdir()]) == 1
    assert start(tmp_path, separate=False)[0] == [0, 0]


@pytest.mark.slow
def test_a_plan_that_ranks_do_not_take_again_is_not_loaded(tmp_path: Path) -> None:
    """The plan is that of the rank that needs the most: another batch there is another plan here."""
    options = {"stage": "auto", "memory": "2.9MiB"}
    before = start(tmp_path, **options)
    expected = start(tmp_path / "other", tokens=(32, 1024), **options)
    assert expected[3] != before[3]
    found = start(tmp_path, tokens=(32, 1024), **options)
    assert found[0] == [1, 1]
    assert found[2:] == expected[2:]
