"""Head and loss in tiles of tokens compute what they compute in one piece: losses and gradients, at any world size, for
every way in which people write a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Rank
from numerics.compare import seeded
from ranks import run
from torch import Tensor, nn

import zerograph
from zerograph.compiler.report import Report
from zerograph.core.instructions import Accumulate, Compute, Place, Scale
from zerograph.core.plan import Plan
from zerograph.core.program import Program

WORDS, WIDTH, BATCH, LENGTH = 97, 16, 3, 7
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]
Given = Callable[[Tensor], tuple[Tensor, ...]]


class GPT(nn.Module):
    """Two layers, a head and the loss that ``criterion`` computes of logits and targets."""

    def __init__(self, criterion: Loss, bias: bool = False, tied: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.norm, self.criterion = nn.Embedding(WORDS, width), nn.LayerNorm(width), criterion
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.criterion(self.head(self.norm(x)), targets)


def flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, WORDS), targets.reshape(-1)


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, targets))


def upcast(logits: Tensor, targets: Tensor) -> Tensor:
    """As transformers has it: logits in float32, divided by the number of items in the whole batch."""
    found, wanted = flat(logits.float(), targets)
    return F.cross_entropy(found, wanted, ignore_index=IGNORED, reduction="sum") / 17


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, targets), label_smoothing=0.1)


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        *flat(logits, targets), weight=torch.linspace(0.5, 1.5, WORDS, dtype=logits.dtype), label_smoothing=0.1
    )


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, targets), reduction="sum")


def per_token(logits: Tensor, targets: Tensor) -> Tensor:
    """Each token's loss counts by its place: gradients made in the forward for a mean would be wrong."""
    losses = F.cross_entropy(*flat(logits, targets), reduction="none")
    return (losses * torch.linspace(0, 1, losses.shape[0])).sum()


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


def capped(logits: Tensor, targets: Tensor) -> Tensor:
    """As Gemma 2 has it."""
    return plain(3 * torch.tanh(logits / 3), targets)


def by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """In three dimensions, batch and sequence apart."""
    return -logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).mean()


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    """The last token of each sequence has no label."""
    return plain(logits[:, :-1], targets[:, 1:])


def shifted_copy(logits: Tensor, targets: Tensor) -> Tensor:
    """As older models of transformers and many loops have it, behind a cast and a softcap."""
    logits = 3 * torch.tanh(logits.float() / 3)
    return upcast(logits[..., :-1, :].contiguous(), targets[..., 1:].contiguous())


def shifted_policy(logits: Tensor, targets: Tensor) -> Tensor:
    """As preference losses have it: likelihoods of each token behind a prompt, with a mask."""
    found = (logits[:, 2:-1] / 0.7).log_softmax(-1).gather(-1, targets[:, 3:].unsqueeze(-1)).squeeze(-1)
    mask = (targets[:, 3:] % 3 > 0).to(logits.dtype)
    return -(found * mask).sum() / mask.sum()


def few(logits: Tensor, targets: Tensor) -> Tensor:
    """Two tokens of each sequence count."""
    return plain(logits[:, -3:-1], targets[:, -2:])


def of_words(logits: Tensor, targets: Tensor) -> Tensor:
    """Words that pad the vocabulary are cut off."""
    return F.cross_entropy(logits[:, :-1, :90].flatten(0, 1), targets[:, 1:].clamp(max=89).flatten())


def transposed(logits: Tensor, targets: Tensor) -> Tensor:
    """Words in the second dimension, as cross_entropy asks for."""
    return F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1)


def transposed_and_shifted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none").mean()


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    """Each word is there or not: a mean over all numbers."""
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(targets, WORDS).to(logits.dtype))


def square(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.sigmoid() - F.one_hot(targets, WORDS)).square().mean((0, 1)).sum()


def brier(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss of probabilities, some of which are shifted away."""
    return (logits[:, :-1].softmax(-1) - F.one_hot(targets[:, 1:], WORDS)).square().sum(-1).mean()


def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
    """Each token's label is its place: what tiles are given of a constant is theirs alone."""
    places = torch.arange(targets.numel()).unsqueeze(1)
    return -logits.flatten(0, 1).log_softmax(-1).gather(-1, places).mean()


LOSSES: tuple[Loss, ...] = (
    plain, upcast, smoothed, weighted, summed, per_token, z_loss, capped, by_hand, shifted, shifted_copy,
    shifted_policy, few, of_words, transposed, transposed_and_shifted, binary, square, brier, contrastive,
)  # fmt: skip


def same(ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a model is called with: each token is its own target."""
    return ids, ids


def cloned(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids, ids.clone()


def made(criterion: Loss, given: Given = same, *shape: Any) -> tuple[nn.Module, Sequence[Tensor]]:
    return GPT(criterion, *shape), given(torch.zeros(BATCH, LENGTH, dtype=torch.int64))


@dataclass
class Trained:
    """What a few steps left on one rank: losses, the last gradients, and what they ran by, unless in plain PyTorch."""

    losses: Tensor
    grads: dict[str, Tensor]
    plan: Plan
    program: dict[str, Program]
    report: str


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def trains(words: int, shape: tuple[int, int], given: Given, rank: Rank) -> Trained:
    """A few steps on batches of tokens, whose ``shape`` is that of all ranks'."""
    losses, grads = [], dict[str, Tensor]()
    for step in range(3):
        ids = torch.randint(words, shape, generator=seeded(step))
        torch.manual_seed(step)
        loss = rank(*given(ids.chunk(rank.world_size)[rank.rank]))
        loss.backward()
        losses.append(loss.detach())
        grads = rank.gradients()
        rank.optimizer.step()
        rank.optimizer.zero_grad()
    ran = (by.plan, by.program, str(by.report())) if (by := rank.backend) is not None else (None, {}, "")
    return Trained(torch.stack(losses), grads, *ran)  # type: ignore[arg-type]


def trained(
    criterion: Loss, given: Given = same, *shape: Any, world_size: int = 1, run: Any = harness.run, **options: Any
) -> list[Trained]:
    """By rank."""
    script = partial(trains, WORDS, (BATCH * world_size, LENGTH), given)
    return run(world_size, script, made, criterion, given, *shape, optimizer=sgd, **options)


exact = partial(trained, run=harness.run_here, dtype=torch.float64)


def assert_alike(found: Sequence[Trained], truth: Sequence[Trained]) -> None:
    """All ranks together, as one with all of their tokens."""
    (untiled,) = truth
    losses = torch.stack([each.losses for each in found]).mean(0)
    assert_close(dict(enumerate(losses)), dict(enumerate(untiled.losses)), 1e-6)  # type: ignore[arg-type]
    rows = {name: [each.grads[name] for each in found] for name in found[0].grads}
    shared = {name for name, of in rows.items() if of[0].shape == untiled.grads[name].shape}
    assert_close({name: of[0] if name in shared else torch.cat(of) for name, of in rows.items()}, untiled.grads)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], most: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        scale = wanted[name].abs().max().clamp(min=1e-6)
        assert ((value - wanted[name]).abs().max() / scale).item() < most, name


def ends(backend: zerograph.api.Backend | Trained, kind: str) -> list[type]:
    return [type(i) for i in backend.program[kind].instructions if isinstance(i, Place | Accumulate)]


@pytest.mark.parametrize(
    ("criterion", "tiles"),
    [*((loss, 5) for loss in LOSSES), *((loss, 2) for loss in (plain, weighted, shifted_copy, transposed))],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_loss_is_the_same_in_tiles(criterion: Loss, tiles: int) -> None:
    found = trained(criterion, same, True, loss_tiles=tiles)
    assert ends(found[0], "forward").count(Accumulate) > tiles  # of weight and bias; few tokens make fewer tiles
    assert not ends(found[0], "backward")  # computes no logits
    assert_alike(found, exact(criterion, same, True))


@pytest.mark.parametrize(
    "criterion", [plain, z_loss, shifted_copy, of_words, transposed, binary], ids=lambda loss: loss.__name__
)
def test_compiled_and_tied(criterion: Loss) -> None:
    tied = (criterion, same, False, True)
    found = trained(*tied, run=harness.run_here, loss_tiles=3, compute="inductor")
    assert Accumulate in ends(found[0], "forward")
    assert_alike(found, exact(*tied))


@pytest.mark.parametrize("world_size", [1, 2])
def test_fewer_words_than_columns(world_size: int) -> None:
    shape = (plain, cloned, False, False, 128)
    found = trained(*shape, world_size=world_size, loss_tiles=3)
    assert Accumulate in ends(found[0], "forward")
    assert not ends(found[0], "backward")
    assert_alike(found, exact(*shape, world_size=world_size))


class Both(nn.Module):
    """Returns the loss, and each token's."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.gpt, self.plain = GPT(self.losses, bias=True), plain

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        found = F.cross_entropy(*flat(logits, targets), reduction="none")
        return found if self.plain else (found.mean(), found)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.gpt(ids, targets)


def grads_of(
    make: Callable[[], nn.Module], step: Callable[[nn.Module, Tensor], None]
) -> tuple[list[dict[str, Tensor]], zerograph.api.Backend]:
    """The gradients that a backend leaves, and plain PyTorch in float64; and the backend."""
    found, backend = list[dict[str, Tensor]](), zerograph.backend(compute="eager", loss_tiles=3)
    torch._dynamo.reset()
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = make().to(dtype)
        if dtype is torch.float32:
            model.compile(backend=backend)
        step(model, torch.randint(WORDS, (BATCH, LENGTH), generator=seeded(0)))
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return found, backend


def scaled_twice(model: nn.Module, ids: Tensor) -> None:
    """Micro-batches, whose losses are scaled outside, both forwards before both backwards."""
    losses = [model(each, each) * scale for each, scale in ((ids, 3.0), (ids.flip(0), -0.5))]
    for loss in losses:
        loss.backward()


def backward_twice(model: nn.Module, ids: Tensor) -> None:
    loss = model(ids, ids)
    (loss / 2).backward(retain_graph=True)
    loss.backward()


def with_hooks(model: nn.Module, ids: Tensor) -> None:
    """Hooks that keep what is saved as it is, so that Python alone knows of it."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = model(ids, ids)
    (loss * 2).backward(retain_graph=True)
    (loss * 3).backward()


def dropped(model: nn.Module, ids: Tensor) -> None:
    model(ids, ids)
    model(ids, ids).backward()


@pytest.mark.parametrize("step", [scaled_twice, backward_twice, with_hooks, dropped], ids=lambda f: f.__name__)
def test_the_forward_s_gradients_are_scaled_by_the_backward(step: Callable[[nn.Module, Tensor], None]) -> None:
    found, backend = grads_of(lambda: GPT(plain, bias=True), step)
    assert Scale in [type(i) for i in backend.program["backward"].instructions]
    assert_close(*found)


@pytest.mark.parametrize("each", [True, False], ids=["each token's", "both"])
def test_gradients_per_token_are_made_in_the_backward(each: bool) -> None:
    """The user weighs tokens outside: no one number scales the gradients."""

    def step(model: nn.Module, ids: Tensor) -> None:
        found = model(ids, ids)
        weights = torch.linspace(0, 1, ids.numel())
        (found @ weights.to(found) if each else found[0] + found[1] @ weights.to(found[1])).backward()

    found, backend = grads_of(lambda: Both(each), step)
    if not each:  # without a loss of one number nobody knows a head
        assert Accumulate in ends(backend, "backward") and Accumulate not in ends(backend, "forward")
    assert_close(*found)


class Clamped(torch.autograd.Function):
    """A backward of the user's own that is not linear."""

    @staticmethod
    def forward(ctx: object, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-2, 1e-2)


def clamped(logits: Tensor, targets: Tensor) -> Tensor:
    return 5 * plain(Clamped.apply(logits), targets)


def test_a_backward_that_is_not_linear_stays_where_it_is() -> None:
    found = trained(clamped, loss_tiles=3)
    assert Accumulate in ends(found[0], "backward")
    assert_alike(found, exact(clamped))


def all_ignored(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids, torch.full_like(ids, IGNORED)


def a_third_ignored(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids, torch.where(ids % 3 == 0, IGNORED, ids)


@pytest.mark.parametrize("given", [all_ignored, a_third_ignored])
def test_ignored_tokens(given: Given) -> None:
    assert_alike(trained(upcast, given, loss_tiles=4), exact(upcast, given))


def test_more_tiles_than_tokens_are_one_token_each() -> None:
    found = trained(plain, loss_tiles=1000)
    assert ends(found[0], "forward").count(Accumulate) == BATCH * LENGTH
    assert_alike(found, exact(plain))


def test_tiles_of_one_size_are_one_segment() -> None:
    """Compile time does not grow with their number."""
    found = trained(plain, loss_tiles=7)
    computes = [i.segment for i in found[0].program["forward"].instructions if isinstance(i, Compute)]
    assert max(map(computes.count, computes)) >= 3  # labels of 8 bytes: every other tile begins at 16


@pytest.mark.parametrize(
    ("run", "stage", "criterion"),
    [*((harness.run, *case) for case in ((0, upcast), (2, upcast), (3, upcast), (3, shifted), (2, shifted_copy),
     (3, transposed), (3, binary))), (harness.run_processes, 3, upcast)],
)  # fmt: skip
def test_on_two_ranks(run: Any, stage: int, criterion: Loss) -> None:
    train = partial(trained, criterion, cloned, world_size=2, stage=stage, bucket_size="4KB")
    for ours, theirs in zip(train(run=run, loss_tiles=3), train(loss_tiles=1), strict=True):
        assert ends(ours, "forward").count(Accumulate) >= 3
        assert_alike([ours], [theirs])


def test_bfloat16_sums_in_float32() -> None:
    """Weights' gradients are added up in float32, however many tiles there are."""
    (found,), (truth,) = trained(upcast, loss_tiles=7, dtype=torch.bfloat16), exact(upcast)
    assert_close(dict(enumerate(found.losses)), dict(enumerate(truth.losses)), 1e-2)  # type: ignore[arg-type]
    assert_close(found.grads, truth.grads, 3e-2)


class Wide(nn.Module):
    """A head of many words, beside which all else is small."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.shift = shift
        self.embed, self.head = nn.Embedding(4096, 8), nn.Linear(8, 4096)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if self.shift:
            logits, ids = logits[:, :-1].contiguous(), ids[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def planned_within(memory: str, shift: bool) -> tuple[int, int, int]:
    """Tiles of the loss, and bytes at the peak: recorded and forecast."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ids = torch.randint(4096, (1, 512), generator=seeded(dist.get_rank()))
    model = Wide(shift)
    backend = zerograph.backend(memory=memory, machine="cpu")
    model.compile(backend=backend)
    model(ids).backward()
    with backend.record():
        model(ids).backward()
    recorded = backend.report().recorded
    assert recorded is not None
    return backend.plan.loss_tiles, recorded.peak, recorded.forecast_peak


@pytest.mark.parametrize("shift", [False, True])
def test_a_budget_below_whole_logits_is_met_by_tiles(shift: bool) -> None:
    """Logits of 512 x 4096 numbers take 8 MiB; a plan without tiles holds two such tensors at least."""
    untiled, tiled = (run(2, planned_within, memory, shift)[0] for memory in ("64MiB", "9MiB"))
    assert untiled[0] == 1 and tiled[0] > 1
    assert tiled[1] < 9 * 2**20 < 16 * 2**20 < untiled[1]
    for _, peak, forecast in (untiled, tiled):
        assert 0.9 < forecast / peak < 1.1


class ByHand(nn.Module):
    """A model of transformers without labels, and the loss that its users write."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="the optional extra transformers is not installed")
        sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**sizes, intermediate_size=24, num_key_value_heads=1)
        self.lm = transformers.LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        return shifted_copy(self.lm(input_ids=ids, use_cache=False).logits, ids)


@pytest.mark.slow
def test_a_model_of_transformers_with_labels_shifted_by_hand() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = ByHand(), torch.randint(WORDS, (BATCH, LENGTH), generator=seeded(0))
    truth = model(ids)
    wanted = dict(zip(dict(model.named_parameters()), torch.autograd.grad(truth, model.parameters()), strict=True))
    backend = zerograph.backend(compute="eager", loss_tiles=3)
    model.compile(backend=backend)
    loss = model(ids)
    loss.backward()
    assert ends(backend, "forward").count(Accumulate) == 3 and not backend.report().whole_logits
    torch.testing.assert_close(loss, truth, rtol=1e-6, atol=0)
    assert_close({name: p.grad for name, p in model.named_parameters()}, wanted)  # type: ignore[misc]


def short(criterion: Loss, *shape: int) -> tuple[nn.Module, Sequence[Tensor]]:
    return GPT(criterion), same(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("criterion", [plain, shifted, transposed], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 5), (2, 2)])
def test_short_sequences(shape: tuple[int, int], criterion: Loss) -> None:
    script = partial(trains, WORDS, shape, same)
    (found,), (untiled,) = (
        harness.run(1, script, short, criterion, *shape, optimizer=sgd, loss_tiles=tiles) for tiles in (3, 1)
    )
    torch.testing.assert_close(found.losses, untiled.losses, equal_nan=True)  # shifted, one token is none
    if found.losses.isfinite().all():
        assert_close(found.grads, untiled.grads)


def test_other_sizes_of_batches_follow(caplog: pytest.LogCaptureFixture) -> None:
    """A graph of dynamic sizes has no number of tokens to cut: its logits are whole, and a warning says so."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(plain)
    model.compile(backend=zerograph.backend(compute="eager", loss_tiles=3))
    for length in (7, 5, 6):
        ids = torch.randint(WORDS, (2, length), generator=seeded(0))
        found = model(ids, ids)
        found.backward()
        with torch.no_grad():
            torch.testing.assert_close(found, model.forward(ids, ids))
    assert "a number of tokens that is not known before it runs" in caplog.text


def test_evaluation_keeps_logits_that_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = GPT(lambda logits, targets: plain(logits, targets) if targets is not None else logits)
    model.compile(backend=zerograph.backend(compute="eager", loss_tiles=4))
    ids = torch.randint(WORDS, (BATCH, LENGTH), generator=seeded(0))
    model(ids, ids).backward()
    with torch.no_grad():
        assert model(ids, None).shape == (BATCH, LENGTH, WORDS)
        torch.testing.assert_close(model(ids, ids), plain(model(ids, None), ids))
    assert "loss_tiles" not in caplog.text


class TwoHeads(GPT):
    """A second head predicts the token behind the next."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.second = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return plain(self.head(x), targets) + plain(self.second(x), targets.roll(-1))


class Broken(GPT):
    """A graph break between head and loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.layers[1](self.layers[0](self.embed(ids))))
        torch._dynamo.graph_break()
        return self.criterion(logits, targets)


def test_of_two_heads_one_is_in_tiles_and_the_report_says_so(caplog: pytest.LogCaptureFixture) -> None:
    found = said_of(TwoHeads(), "one head is in tiles, and the products of others are not", caplog)
    assert "test_tiled_loss.py:" in found.whole_logits[0]


def test_a_graph_break_in_front_of_the_loss_is_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    said_of(Broken(plain), "a graph break ends the graph in front of the loss", caplog)


def said_of(model: GPT, why: str, caplog: pytest.LogCaptureFixture) -> Report:
    """The report of a backend that trains ``model`` right, and says ``why`` logits are whole."""
    torch._dynamo.reset()
    ids = torch.randint(WORDS, (BATCH, LENGTH), generator=seeded(0))
    truth = model(ids, ids)
    wanted = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(truth, model.parameters(), allow_unused=True),
            strict=True,
        )
    )
    backend = zerograph.backend(compute="eager", loss_tiles=3)
    model.compile(backend=backend)
    loss = model(ids, ids)
    loss.backward()
    torch.testing.assert_close(loss, truth)
    assert_close(
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        {name: grad for name, grad in wanted.items() if grad is not None},
    )
    assert f"loss_tiles=3: logits exist for all tokens at once, because {why}" in caplog.text
    assert f"frame 0: logits are whole: {why}" in str(backend.report())
    return backend.report()
