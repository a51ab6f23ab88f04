"""Experts that ranks divide, against plain PyTorch in one process that has all of them.

Tests ``integrations/routed_experts.py``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from numerics.compare import Steps, Values, assert_same, close, full_values, load, mean_over_ranks, save, seeded
from ranks import run
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from traced import compile_once

import zerograph
from zerograph.compiler import driver, frame_cache
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.integrations.expert_parallel import _registered, as_expert, divide_experts, register_experts, routed
from zerograph.runtime.torch_private import local_tensor

WORLD, WIDTH, EXPERTS, CHOICES, TOKENS = 4, 8, 8, 2, 6


@functools.cache
def grid(dp: int, ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))


def computed(tokens: Tensor, expert: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Each token by its own copy of an expert's weights."""
    hidden = torch.einsum("nw,nwh->nh", tokens, up[expert]).relu()
    return torch.einsum("nh,nhw->nw", hidden, down[expert]) + bias[expert]


class Layer(nn.Module):
    """A router, experts of which the last one never has a token, and an expert that all tokens share."""

    def __init__(self, group: dist.ProcessGroup | None, experts: int) -> None:
        super().__init__()
        self.router, self.shared, self.group = nn.Linear(WIDTH, experts), nn.Linear(WIDTH, WIDTH), group
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.zeros(experts, WIDTH))
        nn.init.constant_(self.router.bias[-1:], -1e9)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(CHOICES)
        if self.group is None:
            each = computed(
                x.repeat_interleave(CHOICES, 0), index.flatten(), self.up, self.down, self.bias
            ).view(-1, CHOICES, WIDTH)  # fmt: skip
            found = (each * weights.unsqueeze(-1)).sum(1)
        else:
            found = routed(x, index, weights, [self.up, self.down, self.bias], "relu with a bias", self.group)
        return x + found + self.shared(x)


class Net(nn.Module):
    def __init__(self, axis: DeviceMesh | None = None, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        group = axis.get_group() if axis is not None else None
        self.layers = nn.ModuleList(Layer(group, experts) for _ in range(2))
        for layer in self.layers if axis is not None else ():
            for name in ("up", "down", "bias"):
                setattr(layer, name, as_expert(getattr(layer, name), axis))
        register_experts("relu with a bias", computed)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=True)


def native(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)


class Training(Steps):
    """Ours on a mesh of ``shape``, traced ``once`` for all of it, or without one plain PyTorch on the whole batch."""

    def __init__(
        self,
        shape: tuple[int, int] | None,
        optimizer: Optimizers = adamw,
        parts: int = 1,
        experts: int = EXPERTS,
        once: bool = True,
        **options: Any,
    ) -> None:
        self.shape, self.parts, self.losses = shape, parts, list[float]()
        self.model = Net(grid(*shape)["ep"] if shape is not None else None, experts)
        if shape is not None:
            self.backend = zerograph.backend(**{"compute": "eager", "bucket_size": "1KB"} | options)
            self.model.to(torch.float32)  # which keeps no marks of parameters
            if once:
                compile_once(self.model, self.backend, shape)
            else:
                torch._dynamo.reset()
                self.model.compile(backend=self.backend)
        self.optimizer = optimizer(self.model)

    def backward(self, seed: int) -> None:
        batch = torch.randn(WORLD * TOKENS * self.parts, WIDTH, generator=seeded(seed))
        own = batch if self.shape is None else batch.chunk(WORLD)[dist.get_rank()]
        loss = torch.zeros(())
        for part in own.chunk(self.parts):
            one = self.model(part).square().mean() / self.parts
            one.backward()
            loss = loss + one.detach()
        self.losses.append(loss.item() if self.shape is None else mean_over_ranks(loss).item())


def _trains(shape: tuple[int, int], options: list[dict[str, Any]], path: str) -> None:
    for one in options:
        given = {"optimizer": native, **one} | ({"path": path} if "offload" in one else {})
        training = Training(shape, **given)
        close(training.run(), Training(None, native, given.get("parts", 1), given.get("experts", EXPERTS)).run())
        assert len(training.backend.frames) == 1


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (
            (2, 2),
            [
                {"stage": 3, "once": False},
                {"stage": 0, "optimizer": foreach},
                {"stage": 1, "optimizer": adamw},
                {"stage": 2, "parts": 2},
            ],
        ),
        (
            (2, 2),
            [
                {"stage": 3, "offload": "parameters"},
                {"stage": 3, "recompute": "full", "compute": "inductor", "once": False},
            ],
        ),
        ((1, 4), [{"stage": 3, "optimizer": adamw}, {"stage": 3, "offload": "parameters"}]),
        ((4, 1), [{"stage": 3}]),
        ((2, 2), [{"stage": 3, "experts": 2}]),
    ],
)
def test_losses_are_those_of_one_process(shape: tuple[int, int], options: list[dict[str, Any]], tmp_path: Path) -> None:
    run(WORLD, _trains, shape, options, str(tmp_path))


def _norms(shape: tuple[int, int], stage: int) -> None:
    """Over parameters of all ranks, and of those that have the same experts; also of those that one rank has alone."""
    ours, inside, truth = Training(shape, stage=stage), Training(shape, native, stage=stage), Training(None)
    for seed in range(2):
        for training in (ours, inside, truth):
            training.backward(seed)
        assert zerograph.norms(ours.model).gradient == pytest.approx(zerograph.norms(truth.model).gradient, rel=1e-4)
        largest = [zerograph.norms(each.model, float("inf")).gradient for each in (ours, truth)]
        assert largest[0] == pytest.approx(largest[1], rel=1e-4)
        norm = zerograph.clip_grad_norm_(truth.model.parameters(), 0.1).item()
        assert zerograph.clip_grad_norm_(ours.model.parameters(), 0.1).item() == pytest.approx(norm, rel=1e-4)
        for training in (ours, inside, truth):
            training.optimizer.step(**({"clip": 0.1} if training is inside else {}))
            training.optimizer.zero_grad()
        assert float(inside.optimizer.grad_norm) == pytest.approx(norm, rel=1e-4)
    for training in (ours, inside):
        close((training.losses, full_values(training.model)), (truth.losses, full_values(truth.model)))


@pytest.mark.parametrize(("shape", "stage"), [((2, 2), 3), ((2, 2), 0), ((1, 4), 2)])
def test_norms_and_clipping(shape: tuple[int, int], stage: int) -> None:
    run(WORLD, _norms, shape, stage)


def _scaled(training: Training, first: str) -> tuple[float, bool]:
    """An infinity in a part of one rank, where the gradient of parameter ``first`` comes first in the optimizer."""
    params = dict(training.model.named_parameters())
    training.optimizer = torch.optim.SGD([params.pop(first), *params.values()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full_values(training.model)
    scaler.scale(training.model(torch.ones(TOKENS, WIDTH)).square().mean()).backward()
    if dist.get_rank() == WORLD - 1:
        local_tensor(training.model.layers[0].router.weight.grad).fill_(float("inf"))
    scaler.step(training.optimizer)
    scaler.update()
    after = full_values(training.model)
    return scaler.get_scale(), all(torch.equal(before[name], after[name]) for name in before)


def _overflows() -> list[tuple[float, bool]]:
    found = []
    for first in ("layers.0.bias", "layers.0.up", "layers.0.shared.weight"):
        training = Training((2, 2), experts=2, stage=3)
        training.step(0)
        found.append(_scaled(training, first))
    return found


def test_an_infinity_skips_the_step_on_all_ranks() -> None:
    assert run(WORLD, _overflows) == [[(2.0, True)] * 3] * WORLD


def _held() -> None:
    """Gradients that ``no_sync`` holds, of experts and of all else, are reduced with the last."""
    ours, truth = Training((2, 2), stage=3), Training(None)
    for _ in range(2):
        with ours.backend.no_sync():
            ours.backward(0)
        ours.backward(1)
        for seed in range(2):
            truth.backward(seed)
        for training in (ours, truth):
            training.optimizer.step()
            training.optimizer.zero_grad()
    close((ours.losses, full_values(ours.model)), (truth.losses, full_values(truth.model)))


def test_held_gradients() -> None:
    run(WORLD, _held)


def _placed_and_moved(path: str) -> None:
    few = Training((2, 2), experts=2, stage=3)
    few.step(0)
    up = few.model.layers[0].up
    assert up.placements == (Shard(1), Shard(0)) and up.to_local().shape == (1, WIDTH // 2, 2 * WIDTH)
    training = Training((2, 2), stage=3)
    training.step(0)
    model = training.model
    layer, mesh = model.layers[0], grid(2, 2)
    assert isinstance(layer.up, DTensor) and layer.up.device_mesh == mesh and layer.up.placements[1] == Shard(0)
    assert layer.up.to_local().shape == (EXPERTS // WORLD, WIDTH, 2 * WIDTH)
    assert layer.router.weight.device_mesh.ndim == 1 and layer.router.weight.to_local().shape == (2, WIDTH)
    values = full_values(model)
    zerograph.export(model, path)
    dist.barrier()
    assert_same(values, load_file(path))
    with zerograph.gathered(model):
        assert_same({name: param.detach() for name, param in model.named_parameters()}, values)
    model.load_state_dict(load_file(path))
    assert_same(full_values(model), values)
    with pytest.raises(ConfigError, match="does not divide by experts"):
        as_expert(torch.zeros(EXPERTS + 1, 2), mesh["ep"])


def test_values_go_in_and_out(tmp_path: Path) -> None:
    run(WORLD, _placed_and_moved, str(tmp_path / "model.safetensors"))


def _saved(path: str) -> tuple[list[float], Values]:
    training = Training((2, 2), stage=3)
    training.run(range(2))
    save(training, path)
    return training.run(range(2, 4))


def _resumed(path: str, shape: tuple[int, int]) -> tuple[list[float], Values]:
    training = Training(shape, stage=3)
    load(training, path)
    return training.run(range(2, 4))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saved_at_two_by_two_and_resumed_at_one_by_four(tmp_path: Path) -> None:
    path = str(tmp_path / "dcp")
    losses, values = run(WORLD, _saved, path)[0]
    ours, theirs = run(WORLD, _resumed, path, (1, 4))[0]
    assert ours == pytest.approx(losses[2:], rel=1e-5)
    for name, value in values.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-5, atol=1e-5)


def _started(path: str) -> tuple[int, float]:
    with (
        patch.object(frame_cache, "frame_folder", lambda: Path(path) / str(dist.get_rank())),
        patch.object(driver, "_compile", side_effect=driver._compile) as frames,
    ):
        training = Training((2, 2), stage=3, compute="inductor", once=False)
        training.step(0)
    return frames.call_count, training.losses[0]


@pytest.mark.costly
def test_a_second_start_loads_what_the_first_has_compiled(tmp_path: Path) -> None:
    # In fresh processes, whose groups have the same names.
    ((_, loss), *_) = first = run(WORLD, _started, str(tmp_path), fresh=True)
    assert first == [(1, loss)] * WORLD and run(WORLD, _started, str(tmp_path), fresh=True) == [(0, loss)] * WORLD


def _uncompiled() -> None:
    """A forward that Dynamo is told to leave alone reads experts and all else from ranks, and reduces both."""
    ours, truth = Training((2, 2), stage=3, once=False), Training(None)
    with torch.compiler.set_stance("force_eager"):
        zerograph.shard(ours.model, ours.backend)
        close(ours.run(range(2)), truth.run(range(2)))


def test_an_uncompiled_forward() -> None:
    run(WORLD, _uncompiled)


def _transformers(kind: str) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "num_experts_per_tok": 2, "use_cache": False,
    }  # fmt: skip
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=EXPERTS))
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=24, num_experts=EXPERTS, head_dim=8)
    return Qwen3MoeForCausalLM(config)


def _divided(states: Values, model: nn.Module) -> Values:
    """``states`` as ``model`` has them, whose experts are this rank's."""
    mine = dict(model.named_parameters())
    axes = {name: p.device_mesh for name, p in mine.items() if isinstance(p, DTensor)}
    return {name: as_expert(value, axes[name]) if name in axes else value for name, value in states.items()}


def _of_transformers(kind: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain = _transformers(kind)
    model = divide_experts(type(plain)(plain.config), grid(*shape)["ep"])  # a config that both have
    model.load_state_dict(_divided(plain.state_dict(), model))
    backend = zerograph.backend(**options)
    model.compile(backend=backend)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-4) for each in (model, plain)]
    here = slice(dist.get_rank(), dist.get_rank() + 1)
    for step in range(3):
        ids = torch.randint(0, 50, (WORLD, 17), generator=seeded(step))
        whole, part = plain(ids, labels=ids).loss, model(ids[here], labels=ids[here]).loss
        assert mean_over_ranks(part).item() == pytest.approx(whole.item(), rel=1e-5)
        for loss, optimizer in zip((part, whole), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(backend.frames) == 1 and not backend.report().graph_breaks
    assert_same(full_values(copy.deepcopy(model)), full_values(model))
    for name, value in full_values(model).items():
        torch.testing.assert_close(value, full_values(plain)[name], rtol=1e-4, atol=2e-5)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [("mixtral", (2, 2), {"stage": 3}), ("qwen", (1, 4), {"stage": 3})],
)
def test_models_of_transformers(kind: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    run(WORLD, _of_transformers, kind, shape, options)


class _Experts(nn.Module):
    """What ``divide_experts`` takes for experts of transformers."""

    _is_expert_parallel = False

    def __init__(self, act_fn: Any) -> None:
        super().__init__()
        self.act_fn, self.weight = act_fn, nn.Parameter(torch.ones(2, 2))


def _names() -> None:
    """Experts that compute alike have one name in graphs, and others another."""
    one, other = _registered(_Experts(torch.relu)), _registered(_Experts(torch.tanh))
    assert one != other and one == _registered(_Experts(torch.relu).eval())
    assert _registered(_Experts(nn.ReLU())) == _registered(_Experts(nn.ReLU()))
    assert _registered(_Experts(nn.ELU(1.0))) != _registered(_Experts(nn.ELU(2.0)))
    with pytest.raises(UnsupportedError, match="a function without a name"):
        _registered(_Experts(lambda x: x))
    with pytest.raises(UnsupportedError, match=r"act_fn\.weight, which its experts share"):
        _registered(_Experts(nn.PReLU()))


def test_names_of_experts() -> None:
    _names()


def _refused() -> None:
    axis = grid(2, 2)["ep"]
    with pytest.raises(UnsupportedError, match="Linear has no fused experts"):
        divide_experts(nn.Linear(2, 2), axis)
    with pytest.raises(ConfigError, match="2 axes"):
        divide_experts(nn.Linear(2, 2), grid(2, 2))
    with pytest.raises(ConfigError, match="have no name"):
        register_experts("", computed)
    first = Net(grid(2, 2)["dp"])  # an axis whose ranks are not next to each other
    with pytest.raises(UnsupportedError, match="not the last of two axes"):
        zerograph.shard(first, zerograph.backend(stage=3))
    backend = zerograph.backend(stage=3)
    zerograph.shard(nn.Linear(8, 8), backend)
    with pytest.raises(UnsupportedError, match="has known none"):
        zerograph.shard(Net(axis), backend)
    both = Net(axis)
    both.layers[0].shared.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH, WIDTH), axis, [Replicate()]))
    with pytest.raises(UnsupportedError, match="is a DTensor"):
        zerograph.shard(both, zerograph.backend(stage=3))
    with pytest.raises(UnsupportedError, match="no experts are known as 'unknown'"):
        routed(torch.ones(1, 2), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), [], "unknown", axis.get_group())


def test_refused() -> None:
    run(WORLD, _refused)


def _lopsided() -> None:
    """All tokens go to one expert: ranks send all, or have none to compute."""
    group = dist.group.WORLD
    assert group is not None
    register_experts("relu with a bias", computed)
    gen = seeded(3)
    up, down = torch.randn(4, 3, 5, generator=gen), torch.randn(4, 5, 3, generator=gen)
    bias, x = torch.randn(4, 3, generator=gen), torch.randn(2, 6, 3, generator=gen)
    rank, index = dist.get_rank(), torch.full((6, 1), 3)
    mine = [each[2 * rank : 2 * rank + 2].clone().requires_grad_() for each in (up, down, bias)]
    whole = [each.clone().requires_grad_() for each in (up, down, bias)]
    share = torch.full((2, 6, 1), 0.5).requires_grad_()
    own = x[rank].clone().requires_grad_(), share[rank].detach().clone().requires_grad_()
    found = routed(own[0], index, own[1], mine, "relu with a bias", group)
    everything = x.clone().requires_grad_()
    expected = computed(everything.flatten(0, 1), index.repeat(2, 1).flatten(), *whole).view(2, 6, 3) * share
    torch.testing.assert_close(found, expected[rank])
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own[0].grad, everything.grad[rank])
    torch.testing.assert_close(own[1].grad, share.grad[rank])
    for one, all_ in zip(mine, whole, strict=True):
        torch.testing.assert_close(one.grad, all_.grad[2 * rank : 2 * rank + 2])


def test_ranks_without_tokens() -> None:
    run(2, _lopsided)
