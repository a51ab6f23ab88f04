"""Inside of a forward of an adopted model weights are whole; outside they are DTensors, and reading gathers nothing."""

from __future__ import annotations

import copy
import inspect
import io
import threading
import typing
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from toy import Toy, adamw, build, compiled, train

import zerograph
from zerograph.core.errors import RankError
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.sharding.unsharded import FORWARDS, _breaks


def sharded(model: nn.Module, stage: int = 3, **options: Any) -> Any:
    return zerograph.shard(model, zerograph.backend(stage=stage, compute="eager", **options))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(ours: nn.Module, plain: nn.Module) -> None:
    """Gradients of the two; every rank had the same batch."""
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(full(mine.grad), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")


def copies(make: Callable[[], nn.Module], stage: int = 3) -> tuple[nn.Module, nn.Module]:
    """A sharded model that nothing compiles, and a plain one with its values."""
    torch.manual_seed(0)
    plain = make()
    return sharded(copy.deepcopy(plain), stage), plain


# Outside.


def _outside(stage: int) -> None:
    model = build()
    compiled(model, stage)
    model(torch.arange(4)).sum().backward()
    weight, seen = model.get_parameter("up.weight"), []
    if dist.get_rank() == 0:  # no collective hides in any of these
        assert model.up.weight is weight and isinstance(weight, DTensor) == (stage > 0)
        assert model.up.weight.shape == (8, 4) and model.up.weight.grad is weight.grad is not None
        assert "Linear(in_features=4, out_features=8" in repr(model) and "8" in repr(weight)
        assert getattr(model.up, "weight").dtype == torch.float32  # noqa: B009  as loops over names do
        assert model.head.weight is model.embed.weight
        assert get_model_state_dict(model)["up.weight"].shape == (8, 4)  # DCP finds parameters by reading attributes
    model.up.weight.grad = None
    assert weight.grad is None
    handle = model.up.weight.register_hook(lambda grad: seen.append(grad.shape))
    model(torch.arange(4)).sum().backward()
    assert seen == [weight.shape]
    handle.remove()
    model.up.weight.requires_grad = False
    model.down.weight.requires_grad_(False)
    model.zero_grad()
    model(torch.arange(4)).sum().backward()
    assert weight.grad is model.down.weight.grad is None and model.down.bias.grad is not None


@pytest.mark.parametrize("stage", [3, 0])
def test_outside_a_weight_is_the_parameter(stage: int) -> None:
    run(2, _outside, stage)


def _fill(weight: Tensor) -> None:
    with torch.no_grad():
        weight.fill_(0.5)


def _transposed(weight: Tensor) -> None:
    with torch.no_grad():
        weight.t().mul_(2)


def _data(weight: Tensor) -> None:
    weight.data.mul_(2)


def _inference(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.add_(1)


EDITS = (_data, _transposed, nn.init.zeros_, _inference, _fill)


def _edits(stage: int) -> None:
    model, plain = build(), build()
    compiled(model, stage)
    tokens = torch.arange(4)
    for edit in EDITS:
        before = model(tokens).detach()
        for each in (model, plain):
            edit(each.up.weight)
        after = model(tokens)
        assert not torch.equal(before, after), edit
        torch.testing.assert_close(after, plain(tokens))
    train(model, adamw(model), range(1))


@pytest.mark.parametrize("stage", [3, 0])
def test_edits_outside_act_on_the_shards(stage: int) -> None:
    run(2, _edits, stage)


def _mixed() -> None:
    model = build()
    compiled(model)
    model(torch.arange(4))
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
        model.up.weight * torch.ones(8, 4)


def test_plain_tensors_do_not_mix_with_weights() -> None:
    run(2, _mixed)


# Inside, uncompiled.


class Reads(nn.Module):
    """Has no parameter of its own and reads those of its children."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.child, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.child.weight
        assert type(weight) in (Tensor, nn.Parameter)
        return linear(torch.tanh(linear(x, weight, self.child.bias)), self.other.weight)


class Breaks(Reads):
    """Dynamo skips it for its break in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = super().forward(x)
        return x


class Disables(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.uncompiled(torch.sin(x)).cos()

    @torch.compiler.disable
    def uncompiled(self, x: Tensor) -> Tensor:
        return linear(x, self.child.weight) + super().forward(x)


def step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def _uncompiled(kind: type[Reads], form: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    backend = zerograph.backend(stage=3, compute="eager")
    if form == "shard":
        zerograph.shard(model, backend)
    if form == "method":
        model.compile(backend=backend)
    called = torch.compile(model, backend=backend) if form in ("function", "shard") else model
    if form == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    call = torch.compile(step, backend=backend) if form == "step" else step
    for seed in range(3):  # the first call adopts, and is inside of a forward that nothing counted
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(call(called, x), step(plain, x))
        assert not FORWARDS.running
        assert isinstance(model.child.weight, DTensor)
        compare(model, plain)


@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, form) for kind in (Reads, Breaks, Disables) for form in ("method", "function", "shard", "forward", "step")][
        :-1
    ],
)  # the last one compiles nothing that reads a parameter, and so is not adopted
def test_forwards_that_are_not_compiled_read_full_tensors(kind: type[Reads], form: str) -> None:
    run(2, _uncompiled, kind, form)


def _alone() -> None:
    model, plain = build(), build()
    compiled(model)
    model(torch.arange(4))
    x = torch.ones(2, 4)
    assert torch.equal(model.head(x), plain.head(x)) and torch.equal(
        model.embed(torch.arange(3)), plain.embed.weight[:3]
    )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model.forward(torch.arange(4)), plain(torch.arange(4)))
    model.head(x).sum().backward()
    plain.head(x).sum().backward()
    compare(model, plain)


def test_modules_are_called_alone() -> None:
    run(2, _alone)


def _errors() -> None:
    model = build()
    compiled(model)
    model(torch.arange(4))
    for call in (model, model.forward, model.up):
        with pytest.raises(Exception, match=r""):
            call(torch.ones(2, 3, 5))
        assert not FORWARDS.running and isinstance(model.up.weight, DTensor)


def test_an_exception_leaves_the_forward() -> None:
    run(2, _errors)


def _fails(*_: object) -> None:
    raise RankError("a rank is gone", "start again")


def _unopened() -> None:
    model, plain = copies(Reads, stage=2)
    x = torch.ones(2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UncompiledReads, "gather_all", _fails)
        with pytest.raises(RankError, match="a rank is gone"):
            model(x)
    assert not FORWARDS.running and isinstance(model.child.weight, DTensor)
    assert torch.equal(model(x), plain(x))


def test_a_forward_that_cannot_be_opened_is_left() -> None:
    run(2, _unopened)


class Waits(Reads):
    def forward(self, x: Tensor) -> Tensor:
        entered, look = self.events
        entered.set()
        assert look.wait(60)
        return super().forward(x)


def _threads() -> None:
    model, plain = copies(Waits)
    events = model.__dict__["events"] = plain.__dict__["events"] = threading.Event(), threading.Event()
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(torch.ones(2, 4))))
    thread.start()
    assert events[0].wait(60)
    assert isinstance(model.child.weight, DTensor)  # this thread runs no forward
    events[1].set()
    thread.join()
    assert torch.equal(found[0], plain(torch.ones(2, 4)))


def test_threads_are_inside_each_for_itself() -> None:
    run(2, _threads)


class Checkpointed(Reads):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        def plainly(x: Tensor) -> Tensor:
            return torch.sin(linear(x, self.child.weight, self.child.bias))

        x = checkpoint(self._inner, x, use_reentrant=self.reentrant)
        return checkpoint(plainly, x, use_reentrant=self.reentrant)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(self.other(x), self.child.weight))


class Reentrant(Checkpointed):
    reentrant = True


def _checkpointed(kind: type[Reads]) -> None:
    model, plain = copies(kind)
    seen = []
    model.child.weight.register_hook(lambda grad: seen.append(model.other.weight))
    model.other.weight.register_post_accumulate_grad_hook(lambda p: seen.append(model.child.weight))
    for each in (model, plain):
        each(torch.ones(3, 4, requires_grad=True)).square().sum().backward()
    compare(model, plain)
    assert {type(weight) for weight in seen} == {DTensor}  # hooks are outside


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_recomputation_in_the_backward_reads_full_tensors(kind: type[Reads]) -> None:
    run(2, _checkpointed, kind)


class Encodes(Toy):
    def encode(self, tokens: Tensor) -> Tensor:
        return self.up(self.embed(tokens))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


def _methods() -> None:
    model, plain = copies(Encodes)
    tokens = torch.arange(4)
    assert torch.equal(model.encode(tokens), plain.encode(tokens))
    assert isinstance(model.scale, DTensor)
    with pytest.raises(RuntimeError, match="mixed"):  # no forward calls it
        model.scaled(torch.ones(4, 4))


def test_other_methods_are_outside_and_what_they_call_is_inside() -> None:
    run(2, _methods)


def _hooks() -> None:
    model, plain = copies(Reads)
    seen: dict[str, Any] = {}
    for name, module in {"root": model, "child": model.child}.items():
        module.register_forward_pre_hook(lambda m, _, n=name: seen.update({n: type(model.child.weight)}))
    model.child = model.child  # as users move modules about
    for each in (model, plain):
        each.forward = lambda x, each=each: each.other(each.child(x))
    assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert seen == {"root": DTensor, "child": DTensor}
    sharded(model)  # a forward that was assigned later is counted from then on
    model(torch.ones(2, 4))
    assert seen == {"root": DTensor, "child": Tensor}


def test_hooks_are_part_of_what_calls_their_module() -> None:
    run(2, _hooks)


def _first_call_of_a_part() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Breaks(), Breaks())
    model = copy.deepcopy(plain)
    model[1].compile(backend=zerograph.backend(stage=3, compute="eager"))
    for seed in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(model(x), plain(x))
    assert isinstance(model[1].child.weight, DTensor) and type(model[0].child.weight) is nn.Parameter


def test_a_part_of_a_model_is_adopted() -> None:
    run(2, _first_call_of_a_part)


class Skipped(nn.Module):
    """Its full weights are inputs of the frames that Dynamo does compile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = _times(x, self.weight)
        return x


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def _inputs() -> None:
    model, plain = Skipped(), Skipped()
    backend = zerograph.backend(stage=3, compute="eager")
    zerograph.shard(model, backend)
    model.compile(backend=backend)
    for each in (model, plain):
        each(torch.ones(2, 4)).sum().backward()
    assert backend.frames and torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    compare(model, plain)


def test_a_full_weight_may_be_an_input_of_a_compiled_frame() -> None:
    run(2, _inputs)


def test_weights_are_read_in_functorch_as_elsewhere() -> None:
    model = sharded(nn.Linear(4, 4), dtype=torch.bfloat16)
    x = torch.ones(4, dtype=torch.bfloat16)
    expected = model.weight.detach().bfloat16().sum(0)
    assert torch.equal(torch.func.grad(lambda x: model(x).sum())(x), expected)


# Modules that are special.


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.rnn = nn.LSTM(8, 4, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.encoder(self.attention(x, x, x)[0]))[0]


def _special() -> None:
    model, plain = copies(Attends)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for each in (model.eval(), plain.eval()):
            each.zero_grad()
        with mode():
            for name in ("attention", "encoder", "rnn"):
                args = (x, x, x) if name == "attention" else (x,)
                for ours, theirs in zip(getattr(model, name)(*args), getattr(plain, name)(*args), strict=True):
                    if isinstance(ours, Tensor):
                        assert torch.equal(ours, theirs), name
            assert torch.equal(model(x), plain(x))
    for each in (model.train(), plain.train()):
        each(x).square().sum().backward()
    compare(model, plain)
    assert all(isinstance(w, DTensor) for w in model.rnn._flat_weights)
    model.rnn.flatten_parameters()


def test_modules_of_torch_with_ways_of_their_own() -> None:
    run(2, _special)


def _frames(form: str) -> int:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 4), Reads()))
    model, backend = copy.deepcopy(plain), zerograph.backend(stage=3, compute="eager")
    if form != "adopted":
        zerograph.shard(model, backend)
    called = torch.compile(copy.deepcopy(model) if form == "copied" else model, backend=backend, fullgraph=True)
    for each in (called, plain):
        each(torch.ones(2, 4)).sum().backward()
    compare(called._orig_mod, plain)
    return len(backend.frames)


@pytest.mark.parametrize("form", ["adopted", "sharded", "copied"])
def test_modules_of_torch_are_compiled_whole(form: str) -> None:
    assert run(2, _frames, form) == [1, 1]


def _transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32, **none)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def make() -> Any:
        if name == "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dropout, vocab_size=64))
        model = transformers.GPT2LMHeadModel(gpt)
        if name == "lora":
            peft = pytest.importorskip("peft")
            config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
            return peft.get_peft_model(model, config)
        return model

    models: Any = copies(make)
    tokens = torch.arange(12).reshape(2, 6)
    for model in models:
        model.gradient_checkpointing_enable()
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
    compare(*models)
    head = models[0].get_output_embeddings().weight
    assert isinstance(head, DTensor) and head is models[0].get_input_embeddings().weight
    if name == "lora":
        for model in models:
            model.merge_adapter()
    logits = [model.eval()(input_ids=tokens).logits for model in models]
    torch.testing.assert_close(*logits)
    if name != "bert":
        texts = [model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False) for model in models]
        assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["bert", "gpt2", "lora"])
def test_transformers(name: str) -> None:
    run(2, _transformers, name)


def _checkpointing_layers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))
    model.gradient_checkpointing_enable()
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = torch.arange(12).reshape(2, 6)
    backend = zerograph.backend(stage=3, compute="eager")
    zerograph.shard(model, backend)
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    assert len(calls) == 4  # each layer runs again in the backward
    for layer in model.model.layers:
        layer.mlp._forward_pre_hooks.clear()
    torch.compile(model, backend=backend)(input_ids=tokens, labels=tokens).loss.backward()
    assert any(op.again for frame in backend.frames for op in frame.step.ops)


@pytest.mark.slow
def test_layers_of_transformers_checkpoint_when_asked_to() -> None:
    run(2, _checkpointing_layers)


def _saved_plain() -> None:
    model = sharded(Attends())
    with zerograph.gathered(model):
        assert not [m for m in model.modules() if "zerograph" in str(type(m).__mro__)]
        file = io.BytesIO()
        torch.save(model, file)
    assert b"zerograph" not in file.getvalue() and "zerograph" in str(type(model).__mro__)


def test_gathered_shows_the_classes_of_the_user() -> None:
    run(2, _saved_plain)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.child.weight) + self.child(x)


def _graph_module() -> None:
    torch.manual_seed(0)
    plain = fx.symbolic_trace(Functional())
    model = sharded(copy.deepcopy(plain))
    x = torch.ones(2, 4)
    assert torch.equal(model(x), plain(x))
    other = copy.deepcopy(model)  # made from the graph, with a class anew
    assert torch.equal(sharded(other)(x), plain(x)) and torch.equal(sharded(model)(x), plain(x))


def test_graph_modules() -> None:
    run(2, _graph_module)


def converted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As Accelerate wraps a forward for mixed precision."""

    def convert(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs).double()

    convert.__wrapped__ = function  # type: ignore[attr-defined]
    return convert


def _convert(model: nn.Module) -> None:
    model.forward = MethodType(converted(model.forward.__func__), model)


def _assigned(order: list[Callable[[nn.Module], Any]]) -> None:
    x, plain = torch.ones(2, 4), Reads()
    model = copy.deepcopy(plain)
    for act in order:
        act(model)
    found = model(x)
    assert found.dtype == torch.float64 and torch.equal(found.float(), plain(x))
    other = copy.deepcopy(model)
    nn.init.zeros_(other.child.weight)
    assert not torch.equal(other(x), found) and torch.equal(model(x), found)


@pytest.mark.parametrize("order", [[_convert, sharded], [sharded, _convert]], ids=["before", "after"])
def test_a_forward_that_was_assigned_to_the_module(order: list[Callable[[nn.Module], Any]]) -> None:
    run(2, _assigned, order)


def _signatures() -> None:
    model = sharded(build())
    for kind in (Toy, nn.Linear):
        module = model if kind is Toy else model.up
        for look in (inspect.signature, typing.get_type_hints, inspect.getsource):
            assert look(type(module).forward) == look(kind.forward)  # type: ignore[attr-defined]
        assert (
            list(inspect.signature(module.forward).parameters) == list(inspect.signature(kind.forward).parameters)[1:]
        )
    fixed = type(model.up).forward.__code__
    assert fixed.co_filename == nn.Linear.forward.__code__.co_filename  # what torch.compile asks


def test_forwards_look_as_they_did() -> None:
    run(2, _signatures)


def _patched() -> None:
    model, plain = copies(Reads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reads, "forward", lambda self, x: linear(x, self.other.weight))
        assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


def test_a_patched_class_is_followed() -> None:
    run(2, _patched)


@torch.compiler.allow_in_graph
class _Decorated(nn.Linear):
    """As diffusers decorates classes of its attention and its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight).relu()


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Decorated(4, 4), _Decorated(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _in_graphs() -> None:
    torch.manual_seed(0)
    model = _Two()
    ours = copy.deepcopy(model)
    backend = compiled(ours)
    x = torch.ones(2, 4)
    assert torch.equal(ours(x), model(x))
    model(x).sum().backward()
    ours(x).sum().backward()
    compare(ours, model)
    assert not backend.report().graph_breaks


def test_classes_that_dynamo_writes_into_graphs_break_none() -> None:
    run(2, _in_graphs)


def test_code_without_a_hash_is_asked_whether_it_breaks() -> None:
    """Dynamo makes such code behind a graph break; in Python 3.11 a slice among its constants has no hash."""
    code = (lambda: 0).__code__
    assert not _breaks(nn.Linear(2, 2), code.replace(co_consts=(*code.co_consts, slice(0, 1))))
