"""Dry runs that trace a few of many layers, against dry runs that trace them all.

Tests ``compiler/repetition/shorten.py``, ``compiler/repetition/layer_nodes.py`` and ``compiler/repetition/repeat.py``.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zerograph
from zerograph.compiler.repetition.layer_nodes import NotRepeated
from zerograph.compiler.repetition.repeat import Joint
from zerograph.compiler.repetition.shorten import LEAST, Shortened, few_layers, joint_of, shorten
from zerograph.core.machine import machine_named
from zerograph.dryrun.compile_only import Compiled, compile_only
from zerograph.dryrun.forecast import forecast_file
from zerograph.graph.layers import module_of

pytestmark = pytest.mark.costly

DEPTH, WIDTH, VOCAB = LEAST, 64, 100
TRACED = f"traced 4 of {DEPTH} layers"


class Layer(nn.Module):
    """``number`` says which layer it is, as transformers' layers know it."""

    def __init__(self, number: int, dropout: float = 0.0, wide: int = 2) -> None:
        super().__init__()
        self.number = number
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, wide * WIDTH), nn.Linear(wide * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int = WIDTH, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, width), nn.LayerNorm(width)
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(width, VOCAB, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def small() -> nn.Module:
    return Model([Layer(i) for i in range(DEPTH)])


def tied() -> nn.Module:
    """Under ``torch.utils.checkpoint``, and with one weight at both ends."""
    model = Model([Layer(i) for i in range(DEPTH)], checkpointed=True)
    model.head.weight = model.embed.weight
    return model


def frozen() -> nn.Module:
    """With dropout; no gradient reaches the first layer's input, and none the weights of any layer's second product."""
    model = Model([Layer(i, dropout=0.1) for i in range(DEPTH)])
    model.embed.requires_grad_(False)
    for layer in model.layers:
        layer.down.requires_grad_(False)  # type: ignore[union-attr]
    return model


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="the optional extra transformers is not installed")
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=DEPTH, num_key_value_heads=2, use_cache=False)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def compiled(make: Callable[[], Any], repeat_layers: bool, **options: Any) -> tuple[Compiled, Any]:
    found = compile_only(make, **{"world_size": 4, "batch": 1, "seq": 32, "repeat_layers": repeat_layers, **options})
    return found, forecast_file("model", found, machine_named("h100-80gb"))


@contextmanager
def compiler_says() -> Iterator[list[str]]:
    """What the compiler logs of layers. Not by caplog, which would have torch format all of its own debugging."""
    log, found, handler = logging.getLogger("zerograph.compiler.repetition.shorten"), list[str](), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def facts(compiled: Compiled) -> dict[str, Any]:
    """What a frame is, but for names of nodes and the digests of segments, which know some constants by identity."""
    frame = compiled.frame
    step, programs = frame.step, frame.programs
    place = {value.name: i for i, value in enumerate(step.values)}
    found: dict[str, Any] = {
        "plan": frame.plan.to_json(),
        "params": step.params,
        "ops": [
            replace(op, name="", reads=tuple(place[r] for r in op.reads), writes=tuple(place[w] for w in op.writes))  # type: ignore[arg-type]
            for op in step.ops
        ],
        "values": [(v.bytes, v.kind, place.get(v.alias_of)) for v in step.values],
        "outputs": [place[name] for name in step.outputs],
        "passes": [(p.graph, p.name, p.edits) for p in frame.passes],
    }
    for kind, program in programs.items():
        found[f"{kind} instructions"] = program.instructions
        found[f"{kind} outputs"] = program.inputs, program.outputs
        found[f"{kind} segments"] = [replace(segment, digest="") for segment in program.segments]
        found[f"{kind} registers"] = [replace(register, name="") for register in program.contents]
    return found


class Numbered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


class OneOdd(Layer):
    """One layer, which no trace of a few holds, computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() if self.number == 2 else super().forward(x)


class Returning(Model):
    """All hidden states, as transformers return them when they are asked to."""

    def forward(self, tokens: Tensor) -> Any:
        states = [self.embed(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return nn.functional.cross_entropy(self.head(states[-1]).flatten(0, 1), tokens.flatten()), states


class Caching(Layer):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, x * x, x.detach() + 1


class Cached(Model):
    """Keys and values of every layer, as transformers returns them by default; the values need no gradient."""

    def __init__(self) -> None:
        super().__init__([Caching(i) for i in range(DEPTH)])

    def caches(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, kept = self.embed(tokens), []
        for layer in self.layers:
            x, key, value = layer(x)
            kept.append((key, value))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()), kept

    def forward(self, tokens: Tensor) -> Any:
        loss, kept = self.caches(tokens)
        return kept, loss


class CachedByKind(Cached):
    """All keys, then all values."""

    def forward(self, tokens: Tensor) -> Any:
        loss, kept = self.caches(tokens)
        return loss, [key for key, _ in kept], [value for _, value in kept]


class Collecting(Model):
    """Something of every layer is read after the last."""

    def forward(self, tokens: Tensor) -> Any:
        x, sums = self.embed(tokens), []
        for layer in self.layers:
            x = layer(x)
            sums.append(x.sum())
        return self.head(x).sum() + torch.stack(sums).sum()


class OtherName(Model):
    """Its first argument is not called ``self``, which is what Dynamo names modules by."""

    def forward(this, tokens: Tensor) -> Tensor:  # noqa: N805
        x = this.embed(tokens)
        for layer in this.layers:
            x = layer(x)
        return this.head(x)


def test_layers_are_repeated_whatever_the_model_calls_itself() -> None:
    with compiler_says() as messages:
        short, _ = compiled(lambda: OtherName([Layer(i) for i in range(DEPTH)]), True)
    assert [TRACED in m for m in messages] == [True]
    assert {f"layers.{i}.up" for i in range(DEPTH)} <= {op.module for op in short.frame.step.ops}
    assert not any("[" in op.module for op in short.frame.step.ops)


class Positioned(Model):
    """Does something else after the last layer, which it knows by its position."""

    def __init__(self) -> None:
        super().__init__([Layer(i) for i in range(DEPTH)])
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.rates = [0.1 * i for i in range(DEPTH)]

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = self.mid(layer(x)) if i == DEPTH - 1 else layer(x)
        return self.head(x).sum()


def first_six_checkpointed(self: Positioned, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        x = checkpoint(layer, x, use_reentrant=False) if i < 6 else layer(x)
    return x


def every_sixth(self: Positioned, x: Tensor) -> Tensor:
    for i in range(0, DEPTH, 6):
        x = self.layers[i](x)
    return x


def rated(self: Positioned, x: Tensor) -> Tensor:
    for layer, rate in zip(self.layers, self.rates, strict=True):
        x = layer(x) * rate
    return x


def looping(loop: Callable[..., Tensor]) -> Positioned:
    class Looping(Positioned):
        run = loop

        def forward(self, tokens: Tensor) -> Any:
            return self.head(self.run(self.embed(tokens))).sum()

    return Looping()


CASES: list[tuple[str, Callable[[], Any], dict[str, Any], str]] = [
    (
        "frozen with dropout, half recomputed at stage 1 in bfloat16",
        frozen,
        {"stage": 1, "dtype": torch.bfloat16, "recompute": 0.5, "bucket_size": "64KiB"},
        TRACED,
    ),
    ("tied and checkpointed, within a budget", tied, {"stage": "auto", "memory": "1GiB"}, TRACED),
    ("one rank within a budget", small, {"stage": "auto", "memory": "4MiB", "world_size": 1}, TRACED),
    ("Llama, several layers a bucket", llama, {"bucket_size": "512KiB"}, TRACED),
    ("states of all layers returned", lambda: Returning([Layer(i) for i in range(DEPTH)]), {}, TRACED),
    ("something behind the last layer, by its position", Positioned, {}, TRACED),
    ("one layer, many times", lambda: Model([Layer(0)] * DEPTH), {}, TRACED),
    ("one odd layer", lambda: Model([OneOdd(i) for i in range(DEPTH)]), {}, "tracing all layers"),
]
"""The last column: what the compiler says of layers."""


@pytest.mark.parametrize(("make", "options", "said"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_dry_run_of_repeated_layers_finds_what_a_full_one_does(
    make: Callable[[], Any], options: dict[str, Any], said: str
) -> None:
    with compiler_says() as messages:
        short, forecast = compiled(make, True, **options)
    assert [said in m for m in messages] == [True]
    full, expected = compiled(make, False, **options)
    found, wanted = facts(short), facts(full)
    for name in wanted:
        assert found[name] == wanted[name], name
    assert forecast.forecast.seconds == pytest.approx(expected.forecast.seconds, rel=1e-12)
    assert forecast.forecast.peaks == expected.forecast.peaks
    assert [replace(h, name="") for h in forecast.holdings] == [replace(h, name="") for h in expected.holdings]
    assert (forecast.reasons, forecast.flops) == (expected.reasons, expected.flops)


class Normalized(nn.Module):
    """Writes into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.up(x).flatten(0, 1)).view_as(x)


def sharing() -> nn.Module:
    model = small()
    model.layers[3].up.weight = model.layers[5].up.weight  # type: ignore[index, union-attr]
    return model


def half_frozen() -> nn.Module:
    model = small()
    for layer in model.layers[: DEPTH // 2]:  # type: ignore[index]
        layer.requires_grad_(False)
    return model


def tensors_in(returned: Any) -> list[Tensor]:
    return [returned] if isinstance(returned, Tensor) else [value for part in returned for value in tensors_in(part)]


def graph_of(model: nn.Module) -> Shortened:
    """``model``'s graph as Dynamo records it, shortened."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True, dynamic=False)(torch.zeros(1, 32, dtype=torch.int64))
    return shorten(found[0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (half_frozen, "of two layers differ"),
        (sharing, "of two layers differ|have 8 and 9 nodes|nodes"),
        (lambda: Model([Layer(i, dropout=0.1 * (i % 2)) for i in range(DEPTH)]), "of two layers differ"),
        (lambda: Model([Layer(i, wide=2 + (i == 4)) for i in range(DEPTH)]), "of two layers differ"),
        (lambda: Model([Layer(i) for i in range(LEAST - 1)]), "no deep stack"),
        (lambda: Model([OneOdd(i) for i in range(DEPTH)]), "have 18 and 19 nodes|have 8 and 9 nodes|nodes"),
        (lambda: Model([Numbered(i) for i in range(DEPTH)]), "of two layers differ"),
        (lambda: looping(rated), "of two layers differ"),
        (lambda: looping(first_six_checkpointed), "of two layers differ|nodes"),
        (lambda: looping(every_sixth), "no deep stack"),
        (lambda: Collecting([Layer(i) for i in range(DEPTH)]), "of a layer in the middle is read outside of it"),
        (CachedByKind, "the same of every layer, layer after layer"),
    ],
)
def test_graphs_in_which_layers_differ_are_not_shortened(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotRepeated, match=reason):
        graph_of(make())


def keeps_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def keeps_activations() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.gelu.default])


ASKED = count()


def keeps_products_of_every_second_layer() -> Any:
    return keeps_products() if next(ASKED) % 2 else keeps_activations()


class Selective(Model):
    def __init__(self, *policies: Callable[[], Any]) -> None:
        super().__init__([Layer(i) for i in range(DEPTH)])
        self.policies = policies

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            keeps = self.policies[i * len(self.policies) // DEPTH]
            x = checkpoint(layer, x, use_reentrant=False, context_fn=keeps)
        return self.head(self.norm(x)).mean()


class Partials(Selective):
    """Of each layer its own."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default])
            x = checkpoint(layer, x, use_reentrant=False, context_fn=keeps)
        return self.head(self.norm(x)).mean()


def kept(joint: Joint) -> Counter[tuple[str, str]]:
    """How many results of each operator the forward is to keep, of each layer."""
    nodes = [n for n in joint.gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    return Counter((re.findall(r"layers.\d+", module_of(n) or "")[0], str(n.target)) for n in nodes)


@pytest.mark.parametrize(
    ("make", "repeats"),
    [
        (lambda: Selective(keeps_products), True),
        (Partials, True),
        (lambda: Selective(keeps_products, keeps_activations, keeps_products), False),
        (lambda: Selective(keeps_products_of_every_second_layer), False),
    ],
    ids=["one policy", "one for each layer", "two policies", "a policy that counts"],
)
def test_layers_are_repeated_where_they_are_checkpointed_by_one_policy(
    make: Callable[[], nn.Module], repeats: bool
) -> None:
    found: list[tuple[Joint | None, Joint | None]] = []

    def trace(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append((few_layers(gm, inputs), joint_of(gm, inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(make(), backend=trace, fullgraph=True, dynamic=False)(torch.zeros(1, 32, dtype=torch.int64))
    ((few, joint),) = found
    assert joint is not None and (few is not None) == repeats
    if few is not None:
        assert kept(few) == kept(joint) and len({layer for layer, _ in kept(joint)}) == DEPTH


def test_a_shortened_graph_has_the_first_two_and_the_last_two_layers() -> None:
    model = small()
    short = graph_of(model)
    last = DEPTH - 1
    assert short.stack[:3] == ("layers", (0, 1, last - 1, last), tuple(range(DEPTH)))
    per_layer = len(list(model.layers[0].parameters()))  # type: ignore[index]
    assert len(short.inputs) == len(list(model.parameters())) + 1 - (DEPTH - 4) * per_layer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Model([Normalized() for _ in range(DEPTH)]), "tracing all layers"),
        (lambda: Returning([Layer(i) for i in range(DEPTH)]), TRACED),
        (Cached, TRACED),
    ],
    ids=["buffers", "states returned", "keys and values returned"],
)
def test_training_from_the_trace_of_a_few_layers_changes_no_bit(
    make: Callable[[], nn.Module], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    runs = []
    for repeats in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, backend = make(), zerograph.backend(stage=3, compute="eager")
        if not repeats:
            monkeypatch.setattr("zerograph.compiler.repetition.shorten.few_layers", lambda *_: None)
        model.compile(backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with compiler_says() as messages:
            for _ in range(3):
                returned = tensors_in(model(tokens))
                losses += returned
                # A gradient of its own for each output.
                sum(value.mean() / i for i, value in enumerate(returned, 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [said in m for m in messages] == [True] * repeats
        runs.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*runs, strict=True))
