"""Muon is torch's on one process, and on several ranks the same to the bit, wherever parameters and states live.

Tests ``optim/newton_schulz.py`` too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics.test_offload import (
    HOST,
    OFF,
    Run,
    _changed_outside,
    _clipping_and_skipping,
    _each_equal,
    _resumed,
    _same,
    _without_a_gradient,
)
from optim.training import assert_close, give_gradients, give_wide_gradients, parameters, train
from ranks import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import zerograph.optim as native
from zerograph.core.errors import ConfigError, RankError, StorageError, UnsupportedError
from zerograph.optim import matrices
from zerograph.optim.algorithms import muon as module
from zerograph.optim.newton_schulz import Iterations, orthogonalized
from zerograph.runtime.comm.collectives import LoneCommunicator
from zerograph.runtime.joined import joined

SHAPES = [(8, 6), (6, 8), (16, 16), (16, 16), (48, 33)]
JORDANS = Iterations((3.4445, -4.7750, 2.0315), 5, 1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
        {"lr": torch.tensor(0.01), "adjust_lr_fn": "match_rms_adamw"},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
    ],
    ids=["defaults", "plain momentum", "as AdamW", "other iterations"],
)
def test_the_trajectory_and_the_state_dicts_are_torchs(options: dict[str, Any]) -> None:
    mine, its = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    ours, theirs = native.Muon(mine, **options), torch.optim.Muon(its, **options)
    train(ours, 5)
    train(theirs, 5)
    assert_close(mine, its)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, theirs)]
    mine_is, its_is = (
        ([list(group) for group in state["param_groups"]], {k: list(v) for k, v in state["state"].items()})
        for state in states
    )
    assert mine_is == its_is
    ours.load_state_dict(states[1])
    theirs.load_state_dict(states[0])
    train(ours, 3, 5)
    train(theirs, 3, 5)
    assert_close(mine, its)


def test_a_result_does_not_depend_on_its_batch() -> None:
    many = [p.detach().bfloat16() for p in parameters(shapes=SHAPES * 3)]
    together = orthogonalized(many, JORDANS)
    assert all(torch.equal(one, orthogonalized([m], JORDANS)[0]) for one, m in zip(together, many, strict=True))
    spectrum = torch.linalg.svdvals(together[0].float())
    assert spectrum.min() > 0.5 and spectrum.max() < 1.5


def test_the_rest_is_adamws() -> None:
    shapes = [*SHAPES, (5,), (2, 3, 4), (7, 4)]
    mine, its = parameters(shapes=shapes), parameters(shapes=shapes)
    own = {"lr": 3e-3, "betas": (0.8, 0.9), "use_muon": False}
    ours = native.Muon([{"params": mine[:5]}, {"params": mine[5:], **own}], lr=0.02)
    theirs = torch.optim.Muon(its[:5], lr=0.02), torch.optim.AdamW(its[5:], lr=3e-3, betas=(0.8, 0.9))
    for step in range(5):
        for params in (mine, its):
            give_gradients(params, step)
        ours.step()
        for optimizer in theirs:
            optimizer.step()
    assert_close(mine, its)
    assert set(ours.state[mine[0]]) == {"momentum_buffer"} and "exp_avg_sq" in ours.state[mine[6]]
    assert "momentum" not in ours.param_groups[1] and "use_muon" not in ours.param_groups[0]
    other = native.Muon([{"params": its[:5]}, {"params": its[5:], "use_muon": False}], lr=0.1)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    again = copy.deepcopy(other)
    for optimizer in (ours, other, again):
        train(optimizer, 2, 5)
    assert_close(mine, its)
    assert_close([p for group in again.param_groups for p in group["params"]], mine)


def test_low_precision_with_and_without_masters() -> None:
    truth = parameters(shapes=SHAPES)
    with torch.no_grad():
        for p in truth:
            p.copy_(p.bfloat16())
    train_rounded = torch.optim.Muon(truth)
    mine = parameters(torch.bfloat16, SHAPES)
    ours = native.Muon(mine, master=torch.float32)
    for step in range(4):
        give_wide_gradients(mine, truth, step)
        ours.step()
        train_rounded.step()
    assert_close([ours.state[p]["master"] for p in mine], truth)
    assert all(torch.equal(p, ours.state[p]["master"].bfloat16()) for p in mine)
    plain = native.Muon(mine)
    train(plain, 1)
    assert plain.state[mine[0]]["momentum_buffer"].dtype is torch.float32


def test_scales_clipping_and_gradients_that_are_missing_or_not_finite() -> None:
    mine, its = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    ours, theirs = native.Muon(mine), torch.optim.Muon(its)
    for step in range(3):
        give_gradients(mine, step, 8.0)
        give_gradients(its, step)
        mine[step].grad = its[step].grad = None
        nn.utils.clip_grad_norm_(its, 0.5)
        ours.step(grad_scale=8.0, clip=0.5)
        theirs.step()
    assert_close(mine, its)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    before = [p.detach().clone() for p in mine]
    give_gradients(mine, 9)
    mine[0].grad[0, 0] = float("nan")
    ours.step()
    assert ours.skipped == 1 and all(map(torch.equal, mine, before))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overlap": True}, r"Muon\(overlap=True\)"),
        ({"overlap": "forward"}, "overlap='forward'"),
        ({"delayed": True}, r"Muon\(delayed=True\)"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"ns_steps": 100}, "ns_steps=100"),
        ({"adjust_lr_fn": "mine"}, "adjust_lr_fn='mine'"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        native.Muon(parameters(shapes=SHAPES), **options)


def test_wrong_groups() -> None:
    with pytest.raises(ConfigError, match=r"2 parameters are none, the first of shape \(17,\)"):
        native.Muon(parameters(shapes=[(3, 5), (17,), ()]))
    optimizer = native.Muon(parameters(shapes=SHAPES))
    for group in ({"use_muon": 0}, {"use_muon": False, "betas": (0.9, 1.0)}, {"ns_steps": -1}):
        with pytest.raises(ConfigError):
            optimizer.add_param_group({"params": parameters(shapes=[(2, 2)]), **group})
    assert len(optimizer.param_groups) == 1


# Several ranks.


def of(model: nn.Module, master: torch.dtype | None = None) -> Optimizer:
    """Matrices of layers, which have uneven shards, one that no two ranks split, and the rest, in the same buckets."""
    chosen = [p for n, p in model.named_parameters() if p.ndim == 2 and "embedding" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embedding" in n]
    groups = [{"params": chosen[:2]}, {"params": rest, "use_muon": False, "lr": 1e-2}, {"params": chosen[2:]}]
    return native.Muon(groups, lr=0.02, momentum=0.9, master=master)


def mastered(model: nn.Module) -> Optimizer:
    return of(model, torch.float32)


def _counted(training: Run, trains: Callable[[Run], None]) -> int:
    """How many matrices this rank orthogonalizes meanwhile."""
    found, real = list[int](), module.orthogonalized

    def counts(given: list[Tensor], iterations: Iterations) -> list[Tensor]:
        found.append(len(given))
        return real(given, iterations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "orthogonalized", counts)
        trains(training)
    return sum(found)


def _accumulates(training: Run) -> None:
    """Three steps of three micro-batches, two of which reduce nothing, and three of two that reduce each."""
    for _ in range(3):
        with training.backend.no_sync():
            training.backward()
            training.backward()
        training.steps(1)
    for _ in range(3):
        training.backward()
        training.steps(1)


def _as_whole_ones(size: int) -> tuple[list[int], list[float]]:
    """At stage 0 each rank updates whole matrices, as one process does; all stages have the same gradients."""
    matrices.AT_ONCE = size
    whole = Run(of, stage=0)
    counts = [_counted(whole, _accumulates)]
    for stage in (1, 2, 3):
        training = Run(of, stage=stage)
        counts.append(_counted(training, _accumulates))
        _same(whole.result(), training.result())
    return counts, whole.losses


@pytest.mark.parametrize(
    ("world", "size"), [(2, 2**27), pytest.param(4, 2**13, marks=pytest.mark.slow)], ids=["one round", "several rounds"]
)
def test_each_matrix_is_orthogonalized_once_a_step_and_the_same_to_the_bit(world: int, size: int) -> None:
    found = run(world, _as_whole_ones, size)
    # Six steps of four matrices of layers, and one of one row, which each rank has whole.
    assert [counts[0] for counts, _ in found] == [30] * world
    for stage in (1, 2, 3):
        counts = [counts[stage] for counts, _ in found]
        assert sum(counts) == 6 * 4 + 6 * world and max(counts) == 6 * (-(-4 // world) + 1)
    losses = found[0][1]
    assert losses[-1] < losses[0]


PLACES = [
    pytest.param({"stage": 2, "dtype": torch.bfloat16}, "gradients", of, marks=pytest.mark.slow),
    ({"stage": 3}, "parameters", of),
    pytest.param({"stage": 3, "model_dtype": torch.bfloat16}, "optimizer", mastered, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "offload", "make"), PLACES, ids=["gradients", "parameters", "masters"])
def test_on_the_host_and_on_nvme_it_is_the_same_to_the_bit(
    options: dict[str, Any], offload: str, make: Any, tmp_path: Path
) -> None:
    for found in run(2, _each_equal, [make], str(tmp_path), options, offload):
        assert all(states > 0 and size > 0 for states, size in found.values())


def _unusual(training: Run) -> None:
    for trains in (_clipping_and_skipping, _changed_outside, _without_a_gradient):
        trains(training)


def _unusual_everywhere(folder: str) -> None:
    """In memory, on the host, though ``update="device"`` asks for another place, and on NVMe."""
    everything = {"offload": "parameters"}
    here = Run(of, stage=3, dtype=torch.bfloat16)
    _unusual(here)
    for place in ({**HOST, "update": "device"}, {**OFF, "path": folder}):
        training = Run(of, stage=3, dtype=torch.bfloat16, **{**place, **everything})
        _unusual(training)
        _same(here.result(), training.result())


def test_unusual_steps_are_the_same_to_the_bit(tmp_path: Path) -> None:
    run(2, _unusual_everywhere, str(tmp_path))


@pytest.mark.slow
def test_checkpoints_load_at_either_tier(tmp_path: Path) -> None:
    run(2, _resumed, of, str(tmp_path), "dcp")


def _fails() -> str:
    """Rank 1 cannot orthogonalize: it is an error of that step on both ranks, and half of an update was made."""
    training, straight = Run(of, stage=3), Run(of, stage=3)
    straight.steps(3)
    training.steps(1)
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    batches = training.batches.get_state()

    def fails(given: list[Tensor], iterations: Iterations) -> list[Tensor]:
        if dist.get_rank() == 1 and len(given) > 1:
            raise ValueError("no memory")
        return orthogonalized(given, iterations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "orthogonalized", fails)
        with pytest.raises((ValueError, RankError)) as error:
            training.steps(1)
    with pytest.raises((StorageError, RankError), match="ended half done"):
        training.steps(1)
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    training.optimizer.zero_grad()
    training.batches.set_state(batches)
    training.losses = straight.losses[:1]
    training.steps(2)
    _same(training.result(), straight.result())
    return str(error.value)


def test_an_error_of_one_rank_is_one_of_the_step_on_all() -> None:
    first, second = run(2, _fails)
    assert "rank 1 failed" in first and "ValueError: no memory" in first and second == "no memory"


def _refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    both = joined(mesh["data"], mesh["tensor"])
    for placements, match in (
        ([Shard(0), Shard(1)], "tensor parallelism splits it too"),
        ([Shard(0)] * 2, "placed as"),
    ):
        param = nn.Parameter(DTensor.from_local(torch.ones(4, 4), both, placements, run_check=False))
        param.grad = torch.ones_like(param)
        optimizer = native.Muon([param], skip_nonfinite=False)
        optimizer.communicator = LoneCommunicator
        with pytest.raises(UnsupportedError, match=match):
            optimizer.step()
        assert not optimizer.state[param]["momentum_buffer"].to_local().any() and (param.to_local() == 1).all()
        optimizer.communicator = lambda: None
        with pytest.raises(UnsupportedError, match="by something else than ZeroGraph"):
            optimizer.step()


def test_matrices_that_no_rank_gets_whole_are_refused() -> None:
    run(2, _refused)


def _replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    whole, training = Run(of, stage=0), Run(of, stage=3, mesh=mesh)
    for one in (whole, training):
        one.batches = torch.Generator().manual_seed(0)  # a mean of equal gradients is exact in any order
        one.steps(4)
    _same(whole.result(), training.result())


@pytest.mark.slow
def test_on_replicas_of_shards() -> None:
    run(4, _replicas)


def _scaled() -> None:
    """``GradScaler`` skips on all ranks what is not finite on one alone."""
    straight, scaled = Run(of, stage=3), Run(of, stage=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        for training in (straight, scaled):
            training.backward(8.0 if training is scaled else 1.0)
        if step == 1:
            if dist.get_rank():
                scaled.model.layers[0][0].weight.grad.to_local()[0, 0] = float("inf")
        else:
            straight.optimizer.step()
        scaler.step(scaled.optimizer)
        scaler.update()
        for training in (straight, scaled):
            training.optimizer.zero_grad()
        scaler.update(8.0)
    _same(straight.result(), scaled.result())


def test_grad_scaler_on_shards() -> None:
    run(2, _scaled)


def _saved_at(folder: str) -> Any:
    training = Run(of, stage=3)
    training.steps(2)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return training.result()[1:]


def _loaded_at(folder: str) -> Any:
    training = Run(of, stage=3)
    training.steps(1)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return training.result()[1:]


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_checkpoints_go_to_other_world_sizes(world: int, tmp_path: Path) -> None:
    saved = run(2, _saved_at, str(tmp_path))[0]
    for loaded in run(world, _loaded_at, str(tmp_path)):
        _same((None, *saved), (None, *loaded))
