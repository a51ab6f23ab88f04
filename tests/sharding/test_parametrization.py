"""Sharded modules as Python objects: copies, pickles, and what may not be done to them.

Tests ``sharding/model_copies.py``.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from ranks import run
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import Toy, adamw, build, compiled, differing, full, train

import zerograph
from zerograph.core.errors import ShardingError, UnsupportedError


def _copies(stage: int) -> None:
    model = build()
    optimizer = adamw(model)
    backend = compiled(model, stage)
    train(model, optimizer, range(1))
    before, tokens = full(model), torch.arange(4)
    by_copy, by_pickle = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    by_file = torch.load(file, weights_only=False)
    for other in (by_copy, by_pickle, by_file):
        assert isinstance(other, Toy) and type(other) is type(model)
        assert differing(full(other), before) == []
        assert other.get_parameter("head.weight") is other.get_parameter("embed.weight")
        assert all(o is not p for o, p in zip(other.parameters(), model.parameters(), strict=True))
        assert torch.allclose(other(tokens), model(tokens), atol=1e-6)  # uncompiled
    expected = train(model, optimizer, range(1, 3))
    # A copy trains on its own: uncompiled, or with a backend of its own.
    for other, compile_it in ((by_copy, False), (by_pickle, True)):
        own = compiled(other, stage) if compile_it else None
        frames = len(backend.frames)
        losses = train(other, adamw(other), range(1, 3))
        assert losses[0] == pytest.approx(expected[0], rel=1e-5)
        assert len(backend.frames) == frames
        assert own is None or (own.plan.buckets and own.program)
    assert differing(full(by_file), before) == []
    assert differing(full(by_copy), before) != []


@pytest.mark.parametrize("stage", [3, 0])
def test_copies_train_on_their_own(stage: int) -> None:
    run(2, _copies, stage)


def test_a_new_module_of_a_generated_class_is_one_of_the_user() -> None:
    layer = zerograph.shard(torch.nn.Linear(4, 8), zerograph.backend(dtype=torch.bfloat16))
    other = type(layer)(4, 8)
    assert type(other) is torch.nn.Linear is not type(layer)
    assert other(torch.ones(1, 4)).dtype == torch.float32


def _wrapper_copies() -> None:
    model = build()
    wrapper = torch.compile(model, backend=zerograph.backend(stage=3, compute="eager"))
    wrapper(torch.arange(4))
    other = copy.deepcopy(wrapper)
    assert torch.equal(other(torch.arange(4)), wrapper(torch.arange(4)))
    train(other, adamw(other), range(2))
    assert differing(full(model), full(build())) == []


def test_compiled_wrappers_are_copied_with_a_backend_of_their_own() -> None:
    run(2, _wrapper_copies)


def _averages() -> None:
    model, reference = build(), build()
    optimizer, plain = adamw(model), adamw(reference)
    compiled(model, 3)
    compiled(reference, 0)
    train(model, optimizer, range(1))
    train(reference, plain, range(1))
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=False) for m in (model, reference)]
    for step in range(1, 3):
        train(model, optimizer, range(step, step + 1))
        train(reference, plain, range(step, step + 1))
        for average, source in zip(averages, (model, reference), strict=True):
            average.update_parameters(source)
    ours, theirs = (full(a) for a in averages)
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-6) for n in theirs)
    assert differing(ours, {f"module.{n}": v for n, v in full(model).items()}) != []
    assert torch.allclose(averages[0](torch.arange(4)), averages[1](torch.arange(4)), atol=1e-5)


def test_moving_averages() -> None:
    run(2, _averages)


def _averages_of_parts() -> None:
    model = build()
    part, other = AveragedModel(model.up), AveragedModel(build())
    compiled(model, 3)
    train(model, adamw(model), range(1))
    part.update_parameters(model.up)
    assert all(
        torch.equal(a.full_tensor(), p.full_tensor())
        for a, p in zip(part.parameters(), model.up._parameters.values(), strict=True)
    )
    other.module.up = torch.nn.Linear(3, 3)
    with pytest.raises(ShardingError, match="in the copy that is to be sharded alike"):
        other.update_parameters(model)
    assert type(other) is not AveragedModel  # it still waits for its model


def test_averages_of_a_part_follow_it_and_errors_say_what_differs() -> None:
    run(2, _averages_of_parts)


def _early_averages(wrap: bool, stage: int) -> None:
    """Against averages made after the first call, of a reference that trains alike."""
    models, ema = (build(), build()), get_ema_multi_avg_fn(0.5)
    early = AveragedModel(torch.compile(models[0]) if wrap else models[0], multi_avg_fn=ema)
    other = AveragedModel(build())  # of a model that stays plain
    optimizers = [adamw(m) for m in models]
    for m, optimizer in zip(models, optimizers, strict=True):
        compiled(m, stage)
        train(m, optimizer, range(1))
    late = AveragedModel(models[1], multi_avg_fn=ema)
    early = copy.deepcopy(early)  # waits as the original does
    for step in range(1, 4):
        for average, m, optimizer in zip((early, late), models, optimizers, strict=True):
            train(m, optimizer, range(step, step + 1))
            average.update_parameters(m)
    names = {n.replace("_orig_mod.", ""): v for n, v in full(early).items()}
    assert differing(names, full(late)) == []
    assert type(early) is AveragedModel
    for ours, theirs in zip(early.parameters(), models[0].parameters(), strict=True):
        assert type(ours) is type(theirs) and ours.device_mesh is theirs.device_mesh
        assert ours.placements == theirs.placements
    assert torch.allclose(early(torch.arange(4)), late(torch.arange(4)))
    other.update_parameters(build())
    assert all(type(p) is torch.nn.Parameter for p in other.parameters())


class _Ema(torch.nn.Module):
    """As timm's ``ModelEmaV2`` and ``ModelEmaV3`` keep, update and set an average."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: torch.nn.Module, weight: float = 0.5) -> None:
        for ours, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, weight)

    def set(self, model: torch.nn.Module) -> None:
        self.update(model, weight=1.0)


def _early_averages_of_others() -> None:
    model = build()
    scripted = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))  # looked at too, and has its children elsewhere
    averages = [_Ema(model) for _ in range(3)]
    compiled(model, 3)
    train(model, adamw(model), range(1))
    averages.append(_Ema(model))  # sharded from the start
    averages[0].update(model)
    averages[1].update(model=model, weight=0.5)
    averages[2].set(model)
    before, now = build().state_dict(), full(model)
    for average, weight in zip(averages, (0.5, 0.5, 1.0, 1.0), strict=True):
        assert type(average) is _Ema
        found = full(average.module)
        assert all(torch.equal(found[n], before[n].lerp(now[n], weight)) for n, _ in model.named_parameters())
    assert scripted(torch.ones(2)).shape == (2,)


def test_averages_of_other_libraries_are_sharded_by_their_first_update() -> None:
    run(2, _early_averages_of_others)


@pytest.mark.parametrize(("wrap", "stage"), [(False, 3), (True, 1)])
def test_averages_made_before_the_first_call_are_sharded_by_their_first_update(wrap: bool, stage: int) -> None:
    run(2, _early_averages, wrap, stage)


def _target_network(when: str) -> None:
    model = build()
    target = copy.deepcopy(model)
    backend = compiled(model, 3)
    if when == "before":
        zerograph.shard(target, backend)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    if when == "after":
        zerograph.shard(target, backend)
    assert differing(full(target), full(build())) == []
    target.load_state_dict(model.state_dict())
    assert differing(full(target), full(model)) == []
    train(model, optimizer, range(1, 2))
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1.0)
    assert differing(full(target), full(model)) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_of_a_plain_model_are_sharded_alike_when_asked_to(when: str) -> None:
    run(2, _target_network, when)


def _other_settings() -> None:
    model = build()
    compiled(model, 3)
    model(torch.arange(4))
    other = copy.deepcopy(model)
    compiled(other, 3, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"dtype=torch.float32.*this one needs dtype=torch.bfloat16"):
        other(torch.arange(4))


def test_a_backend_with_other_settings_refuses_the_copy() -> None:
    run(2, _other_settings)
