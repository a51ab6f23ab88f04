"""Models that broke earlier systems: each trains like plain PyTorch, at every stage, or is refused clearly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numerics.compare import (
    ALL,
    Case,
    Result,
    Values,
    assert_same,
    check,
    full,
    full_values,
    mean_over_ranks,
    mine,
    normal,
    seeded,
    sgd,
    snapshot,
    stages,
)
from ranks import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerograph
from zerograph.core.errors import CollectiveMismatch, UnsupportedError


def tokens(length: int, vocab: int) -> Callable[[torch.Generator, int], tuple[Tensor, ...]]:
    return lambda g, rows: (torch.randint(0, vocab, (rows, length), generator=g),)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


class TiedAcrossBreak(nn.Module):
    """Embedding and head share a weight; a graph break lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mid(self.embed(ids))
        torch._dynamo.graph_break()
        return self.head(torch.tanh(h))


def tied_across_break() -> Case:
    return Case(TiedAcrossBreak(), tokens(5, 33), next_token)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        x = torch.tanh(self.layers[1](x))
        print("", end="")
        return self.layers[2](x)


def graph_breaks() -> Case:
    return Case(Breaks(), normal(6))


def frozen() -> Case:
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return Case(model, normal(6))


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def lora() -> Case:
    model = nn.Sequential(
        nn.Embedding(11, 6).requires_grad_(False), LoRA(nn.Linear(6, 9), 1), nn.Tanh(), LoRA(nn.Linear(9, 11), 2)
    )
    return Case(model, tokens(4, 11), next_token)


class UsedTwice(nn.Module):
    """Weights read twice, once through a view, and a layer applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(x @ self.weight))
        return self.shared(h) @ self.weight.t() + self.weight[0] * self.weight.sum()


def used_twice_and_never() -> Case:
    return Case(UsedTwice(), normal(6))


class Uneven(nn.Module):
    """Rows that do not divide, fewer rows than ranks, one row, a scalar, an empty last shard (5 rows on 4 ranks)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.token = nn.Parameter(torch.randn(1, 1, 5))
        self.three = nn.Linear(5, 3)
        self.five = nn.Linear(3, 5)
        self.seven = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * self.scale + self.row + self.token
        return self.seven(torch.tanh(self.five(torch.tanh(self.three(x))))) * self.one


def uneven() -> Case:
    return Case(Uneven(), normal(5))


def checkpointed() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False)
            return x

    return Case(Model(), normal(6))


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(6, 6) / 3 for _ in range(3))
        self.dict = nn.ParameterDict({"scale": torch.ones(6), "shift": torch.zeros(6)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        x = x @ self.list[0] * self.dict["scale"]
        for name in ("shift",):
            x = x + self.dict[name]
        return x


def containers() -> Case:
    return Case(Containers(), normal(6))


class Recurrent(nn.Module):
    """Dynamo compiles no recurrent module unless told to; the frame is skipped and the model runs eagerly."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(5, 7, num_layers=2, batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def attention() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.attn(x, x, x, need_weights=False)[0])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x).square().mean()

    return Case(Model(), normal(5, 8), loss)


def decoder() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.model(x, x, tgt_mask=mask, tgt_is_causal=True)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x).square().mean()

    return Case(Model(), normal(5, 8), loss)


def channels_last() -> Case:
    convolutions = nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3, bias=False), nn.GroupNorm(2, 4)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 2)).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    return Case(model, lambda g, rows: (torch.randn(rows, 3, 8, 8, generator=g).to(memory_format=torch.channels_last),))


def transposed_parameter() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 6).t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t().contiguous().t()

    return Case(Model(), normal(6))


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 6).double()
        self.narrow = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.table = nn.Parameter(torch.arange(12).view(6, 2), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, False, True]), requires_grad=False)
        self.single = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x.double()).float() + self.narrow(x.bfloat16()).float()
        h = h * self.mask + self.table.sum(1)
        return self.single(torch.tanh(h))


def mixed_dtypes() -> Case:
    return Case(MixedDtypes(), normal(6))


def weight_norm() -> Case:
    parametrize = nn.utils.parametrizations.weight_norm
    return Case(nn.Sequential(parametrize(nn.Linear(6, 7)), nn.Tanh(), parametrize(nn.Linear(7, 3))), normal(6))


def spectral_norm() -> Case:
    parametrize = nn.utils.parametrizations.spectral_norm
    return Case(nn.Sequential(parametrize(nn.Linear(6, 7)), nn.Tanh(), parametrize(nn.Linear(7, 3))), normal(6))


def shared_module() -> Case:
    layer = nn.Linear(6, 6)
    return Case(nn.Sequential(layer, nn.Tanh(), nn.Sequential(nn.Linear(6, 6), layer)), normal(6))


class RootParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))
        self.b = nn.Parameter(torch.randn(4))
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        assert self.absent is None
        return x @ self.w + self.b


def root_parameters() -> Case:
    return Case(RootParameters(), normal(6))


def returned_parameters() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)
            self.extra = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.lin(x), "weight": self.lin.weight, "view": self.lin.weight.t()[1:], "extra": self.extra}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        assert out["weight"].shape == (6, 6)
        return out["out"].square().mean() + out["weight"].norm() + out["view"].sin().sum() + out["extra"].square().sum()

    return Case(Model(), normal(6), loss)


def regularizer_outside() -> Case:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        norms = (layer.weight.norm() for layer in layers)  # of DTensors
        whole = (n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms)
        return model(x).square().mean() + 0.1 * sum(whole)

    return Case(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), normal(6), loss)


def regularizer_over_parameters() -> Case:
    """Over ``parameters()``, that is over shards: DTensor arithmetic, whose gradients are not averaged over ranks."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        penalty = penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty
        return model(x).square().mean() + 0.1 * penalty

    return Case(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), normal(6), loss)


def padding_idx() -> Case:
    model = nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 11))
    return Case(model, tokens(4, 11), next_token)


def embedding_bag() -> Case:
    model = nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 3))
    return Case(model, tokens(4, 11))


class Counting(nn.Module):
    """Buffers that forward changes, persistent or not."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale = self.scale * 0.5
        return self.lin(x) * self.scale + self.calls


def counting_buffers() -> Case:
    return Case(Counting(), normal(6))


def twice_before_backward() -> Case:
    """Two calls, one backward; the second with another shape."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - 0.5).square().mean() + model(x.repeat(2, 1) * 2).square().mean()

    return Case(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), normal(6), loss)


def unused_output() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int, None]:
            return self.a(x), self.b(x), x.shape[0], None

    return Case(Model(), normal(6), lambda model, x: model(x)[0].square().mean())


def gradient_of_input() -> Case:
    """The gradient of an input is this rank's own, not a mean over ranks."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        out = model(x).square().sum(1)
        (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        return (out * (1 + grad.square().sum(1))).mean()

    return Case(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), normal(6), loss)


def matmul_of_two_parameters() -> Case:
    """Compute on parameters alone, before any activation."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(6, 5) / 2)
            self.b = nn.Parameter(torch.randn(5, 8) / 2)
            self.c = nn.Parameter(torch.randn(8) / 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ (self.a @ self.b) + self.c.exp()) * self.c

    return Case(Model(), normal(6))


def stacked_parameters() -> Case:
    """Parameters of several buckets in one operator, sliced, chunked, flipped, complex inside."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
            self.qkv = nn.Linear(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.stack([head.weight for head in self.heads])
            h = torch.einsum("bi,hoi->bho", x, weight).mean(1)
            q, k, v = self.qkv.weight.chunk(3)
            h = h @ q.T + h @ k.flip(0) + h @ v
            w = self.qkv.weight
            turned = torch.view_as_complex(h.view(-1, 2, 2)) * w.unfold(0, 3, 3).sum().to(torch.cfloat)
            return torch.view_as_real(turned)

    return Case(Model(), normal(6))


def double_tied_names() -> Case:
    """One tensor under three names, two of them in one module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(6, 6) / 3)
            self.b = self.a
            self.lin = nn.Linear(6, 6)
            self.lin.weight = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(torch.tanh(x @ self.a) @ self.b)

    return Case(Model(), normal(6))


def swapped_in() -> Case:
    """Computed tensors in the places of parameters: a vector's gradient and a scalar's go on to what made them."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * self.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.makes, self.of = Scaled(), nn.Linear(4, 7), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            made = self.makes(self.of)
            return torch.func.functional_call(self.main, {"linear.bias": made[:6], "scale": made[6]}, (x,))

    return Case(Model(), normal(6))


def parts_of_ids() -> Case:
    """Two towers: each looks up a part of the tokens."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(33, 8), nn.Linear(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            (left, right), (first, *_) = ids.chunk(2, dim=1), ids.unbind(1)
            return self.head(torch.tanh(self.embed(left) * self.embed(right))) + self.head(self.embed(first))[:, None]

    return Case(Model(), tokens(6, 33))


def rotated() -> Case:
    """Operators with effects: each layer turns by Cayley's map of a weight, and ``torch.linalg`` checks its result."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            turn, one = self.linear.weight - self.linear.weight.T, torch.eye(6)
            return torch.tanh(x @ torch.linalg.solve(one - turn, one + turn) + self.linear.bias)

    return Case(nn.Sequential(Layer(), Layer()), normal(6))


CASES = [
    tied_across_break, graph_breaks, frozen, lora, used_twice_and_never, uneven, containers,
    attention, decoder, channels_last, transposed_parameter, mixed_dtypes, weight_norm, spectral_norm, shared_module,
    root_parameters, returned_parameters, regularizer_outside, padding_idx, embedding_bag, counting_buffers,
    twice_before_backward, unused_output, gradient_of_input, matmul_of_two_parameters,
    double_tied_names, swapped_in, parts_of_ids,
]  # fmt: skip


FEW = (1, 3)
"""Stages 2 and 3 run the same reductions, 1 and 2 the same gathers, and 0 none: all four run in a few cases only."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_trains_like_plain_pytorch(case: Callable[[], Case]) -> None:
    """At stage 3, which does all that the others do; that they agree to the bit is seen on a few."""
    more = {uneven: ALL, tied_across_break: ALL, lora: FEW, swapped_in: (0, 3)}
    check(run(2, stages, case, more.get(case, (3,)), {})[1])


def test_rows_that_do_not_divide_on_four_ranks() -> None:
    check(run(4, stages, uneven, (3,), {})[3])


@pytest.mark.parametrize("case", [checkpointed, stacked_parameters, rotated], ids=lambda case: case.__name__)
def test_compiled_by_inductor(case: Callable[[], Case]) -> None:
    check(run(2, stages, case, FEW, {"compute": "inductor"})[0])


# What Dynamo skips: recurrent modules, and functions with a graph break in a loop.


class BreakInLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return x


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def _skipped(make: Callable[[], nn.Module], stage: int | None) -> Result:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = make()
    optimizer, model, losses = sgd(module), module, []
    if stage is not None:
        backend = zerograph.backend(stage=stage, compute="eager")
        model = torch.compile(zerograph.shard(module, backend), backend=backend)
    for step in range(3):
        batch = torch.randn(6, 4, 5, generator=seeded(step))
        loss = model(batch if stage is None else mine([batch])[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss if stage is None else mean_over_ranks(loss)).item())
    return Result(losses, full_values(module))


def _skips(make: Callable[[], nn.Module]) -> tuple[dict[int | None, Result], str]:
    results = {stage: _skipped(make, stage) for stage in (None, *FEW)}
    module = make()
    optimizer = sgd(module)
    model = torch.compile(module, backend=zerograph.backend(stage=3, compute="eager"))
    model(torch.ones(2, 4, 5)).sum().backward()
    try:
        optimizer.step()
    except UnsupportedError as error:
        return results, str(error)
    return results, "no error"


@pytest.mark.parametrize("make", [lstm, BreakInLoop], ids=lambda make: make.__name__)
def test_what_dynamo_skips_runs_eagerly_once_sharded_and_is_an_error_otherwise(make: Callable[[], nn.Module]) -> None:
    results, message = run(2, _skips, make)[0]
    check(results)
    assert "never sharded" in message and "zerograph.shard(model, backend)" in message


# Batch statistics: every rank sees the same rows, so that its statistics are those of one process.


def _batch_norm(stage: int | None) -> tuple[list[float], Values]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    module(torch.zeros(2, 3, 5, 5))
    optimizer = sgd(module)
    model = module if stage is None else torch.compile(module, backend=zerograph.backend(stage=stage, compute="eager"))
    losses = []
    for step in range(3):
        model.train()
        loss = model(torch.randn(4, 3, 5, 5, generator=seeded(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [loss.item(), model(torch.ones(2, 3, 5, 5)).sum().item()]
    return losses, full_values(module)


def _batch_norms() -> dict[int | None, Result]:
    return {stage: Result(*_batch_norm(stage)) for stage in (None, *FEW)}


def test_batch_norm_keeps_its_running_statistics() -> None:
    check(run(2, _batch_norms)[0])


# Dropout.


def _dropout(stage: int, compute: str) -> tuple[list[float], Values, bool]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Dropped()
    torch.manual_seed(dist.get_rank())
    optimizer = sgd(module)
    model = torch.compile(module, backend=zerograph.backend(stage=stage, compute=compute))
    losses, consistent = [], True
    for _ in range(3):
        kept = model(torch.ones(8, 16))
        loss = kept.mean()
        loss.backward()
        (scale,) = module.parameters()
        # d loss / d scale says how many elements the backward believes were kept.
        believed = full(scale.grad).sum() * 8 * 16
        consistent &= torch.allclose(believed, mean_over_ranks((kept / full(scale)).sum()), rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_values(module), bool(consistent)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, F.dropout(x, 0.5), use_reentrant=False)

    def part(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.5)


def _dropouts(compute: str) -> dict[int, tuple[list[float], Values, bool]]:
    return {stage: _dropout(stage, compute) for stage in (ALL if compute == "eager" else FEW)}


@pytest.mark.parametrize("compute", ["eager", "inductor"])
def test_dropout_is_the_same_at_every_stage_and_in_the_backward(compute: str) -> None:
    first, second = run(2, _dropouts, compute)
    for rank in (first, second):
        assert all(consistent for _, _, consistent in rank.values())
        assert all(losses == rank[3][0] for stage, (losses, *_) in rank.items() if stage > 0)
        assert_same(rank[1][1], rank[3][1])
    assert first[3][0] != second[3][0], "the ranks drew the same masks"


# Shapes that change.


def _changing_shapes() -> tuple[int, list[int]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(33, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 33))
    reference = snapshot(module)
    backend = zerograph.backend(stage=3, compute="eager")
    model, rank, frames = torch.compile(module, backend=backend), dist.get_rank(), []
    for step in range(6):
        shapes = [(3 + step, 7 + 2 * step), (4 + 3 * step, 5 + step)]  # every rank has its own
        batches = [torch.randint(0, 33, shape, generator=seeded(step)) for shape in shapes]
        next_token(model, batches[rank]).backward()
        sum(next_token(reference, b) / len(batches) for b in batches).backward()
        for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-6, msg=name)
        module.zero_grad()
        reference.zero_grad()
        frames.append(len(backend.frames))
    return len(backend.frames), frames


def test_ranks_with_their_own_changing_shapes_do_not_recompile() -> None:
    for frames, history in run(2, _changing_shapes):
        assert frames <= 3, f"compiled again and again: {history}"


# Two models in one process.


def _gan(stage: int | None) -> tuple[list[float], Values]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (generator, critic)]
    make, judge = generator, critic
    if stage is not None:
        make = torch.compile(generator, backend=zerograph.backend(stage=stage, compute="eager"))
        judge = torch.compile(critic, backend=zerograph.backend(stage=max(stage - 1, 1), compute="eager"))
    losses = []
    for step in range(3):
        batch = torch.randn(8, 4, generator=seeded(step)), torch.randn(8, 6, generator=seeded(9 + step))
        noise, real = batch if stage is None else mine(batch)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean()
        loss.backward()
        optimizers[1].step()
        losses.append((loss if stage is None else mean_over_ranks(loss)).item())
        loss = F.softplus(-judge(make(noise))).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        losses.append((loss if stage is None else mean_over_ranks(loss)).item())
    return losses, full_values(nn.ModuleList([generator, critic]))


def _gans() -> dict[int | None, Result]:
    return {stage: Result(*_gan(stage)) for stage in (None, 1, 3)}


@pytest.mark.slow
def test_two_models_with_two_backends() -> None:
    check(run(2, _gans)[0])


# Paths that only some ranks take.


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.b(self.a(x)) if second else self.a(x)


def _forked(compute: str) -> str:
    backend = zerograph.backend(stage=3, compute=compute)
    model = zerograph.shard(Forked(), backend)
    try:
        torch.compile(model, backend=backend)(torch.ones(2, 4), dist.get_rank() == 1).sum().backward()
    except CollectiveMismatch as error:
        return str(error)
    return "no error"


def test_a_parameter_that_some_ranks_never_use_is_an_error_and_no_hang() -> None:
    for message in run(2, _forked, "eager", timeout=60):
        assert "would run different collectives" in message
        assert "b.weight" in message


# What cannot be sharded.


class Renormalizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(9, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, max_norm=0.5)


def _refused(which: str) -> str:
    module: nn.Module = nn.Linear(4, 4)
    if which == "complex":
        module.spectrum = nn.Parameter(torch.ones(4, dtype=torch.cfloat))
    elif which == "sparse":
        module.matrix = nn.Parameter(torch.eye(4).to_sparse())
    elif which == "sparse gradients":
        module = nn.Embedding(9, 4, sparse=True)
    elif which == "max_norm":
        module = nn.Embedding(9, 4, max_norm=0.5)
    elif which == "max_norm of a function":
        module = Renormalizing()
    model = torch.compile(module, backend=zerograph.backend(stage=3, compute="eager"))
    try:
        model(torch.ones(2, 4, dtype=torch.float if isinstance(module, nn.Linear) else torch.long)).sum().backward()
    except UnsupportedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("which", ["complex", "sparse", "sparse gradients", "max_norm", "max_norm of a function"])
def test_refuses(which: str) -> None:
    for message in run(2, _refused, which):
        assert "hint:" in message
        assert which.split()[0] in message or "changes parameter table in place (embedding)" in message
