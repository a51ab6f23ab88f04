"""Parts of a step that were planned in tiles, and cannot run so behind Inductor's passes: plans and reports tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config as inductor

import zerograph
from zerograph.api import Backend
from zerograph.graph.layers import module_of
from zerograph.graph.nodes import aten, backward_nodes, computed

WIDTH, WORDS, TOKENS = 8, 64, 14


class Layer(nn.Module):
    def __init__(self, ones: bool) -> None:
        super().__init__()
        self.norm, self.ones = nn.LayerNorm(WIDTH), ones
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(times_one(self.up(self.norm(x)), self.ones)))


class Net(nn.Module):
    """A model of two layers and a head; Inductor drops products by ``ones``, and what they scaled takes their name."""

    def __init__(self, ones: str = "") -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers, self.ones = nn.ModuleList(Layer("layers" in ones) for _ in range(2)), "loss" in ones

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(times_one(self.head(x), self.ones), ids)


def times_one(x: Tensor, scaled: bool) -> Tensor:
    return x * torch.ones(()) if scaled else x


def trained(model: Net, **options: object) -> Backend:
    """The backend that has trained ``model`` for one step, with the right gradients."""
    torch._dynamo.reset()
    ids = torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(0))
    truth = torch.autograd.grad(model(ids), list(model.parameters()))
    backend = zerograph.backend(compute="eager", **options)
    model.compile(backend=backend)
    model(ids).backward()
    for param, wanted in zip(model.parameters(), truth, strict=True):
        torch.testing.assert_close(param.grad, wanted)
    return backend


def edits(backend: Backend, name: str) -> int:
    """The number of edits of one pass in all graphs."""
    return sum(record.edits for frame in backend._frames for record in frame.passes if record.name == name)


@pytest.mark.parametrize("ones", ["", "loss", "layers", "loss and layers"])
def test_a_report_tells_which_tiles_run(ones: str, caplog: pytest.LogCaptureFixture) -> None:
    backend = trained(Net(ones), loss_tiles=4, recompute="full", token_tiles=4)
    plan, report = backend._frames[0].plan, str(backend.report())
    of_loss = edits(backend, "differentiate_loss") > 0
    runs = {"loss": of_loss, "layers": edits(backend, "tile_tokens") > 4 * of_loss}
    assert runs == {part: part not in ones for part in runs}
    assert runs == {"loss": plan.loss_tiles == 4, "layers": plan.token_tiles == 4}
    assert runs == {"loss": "head and loss in 4 tiles" in report, "layers": "MLPs of 2 layers in 4 tiles" in report}
    why = "because Inductor's passes left no product of that name"
    message = f"4 tiles of the loss were planned, and logits exist for all tokens at once, {why} (head:mm)"
    assert (message in caplog.text) == ("loss" in ones)
    message = f"4 tiles of tokens were planned, and the MLPs of 2 layers run whole, layers.0.up:mm {why}"
    assert (message in caplog.text) == ("layers" in ones)
    assert ("logits are whole: Inductor's passes" in report) == ("loss" in ones)


@pytest.fixture
def mixed() -> Iterator[list[str]]:
    """The modules whose product in the forward a pass of the user's mixes along both dimensions, and orders again."""
    modules: list[str] = []

    def mixes(graph: fx.Graph) -> None:
        products = graph.find_nodes(op="call_function", target=aten.mm.default)
        for node in [n for n in products if module_of(n) in modules and n not in backward_nodes(graph)]:
            with graph.inserting_after(node):
                there = computed(graph, aten.flip.default, (node, [0, 1]), node)
            with graph.inserting_after(there):
                back = computed(graph, aten.flip.default, (there, [0, 1]), node)
            node.replace_all_uses_with(back, delete_user_cb=lambda user, own=there: user is not own)

    with inductor.patch(joint_custom_post_pass=mixes):
        yield modules


def test_what_a_pass_of_the_users_mixes_runs_whole(mixed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    mixed += ["head", "layers.1.up"]
    backend = trained(Net(), loss_tiles=4, recompute="full", token_tiles=4)
    plan = backend._frames[0].plan
    assert (plan.loss_tiles, plan.token_tiles, plan.token_regions) == (1, 4, ("layers.0.up:mm",))
    assert edits(backend, "tile_tokens") == 8  # forward and backward of one layer
    assert "the MLPs of 1 layers run whole, layers.1.up:mm because aten.flip.default is not known to" in caplog.text
    assert "logits are whole: aten.flip.default is not known to treat every token by itself" in str(backend.report())
