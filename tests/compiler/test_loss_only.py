"""A training forward returns its loss and None in place of logits; evaluation returns all."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph
from zerograph.core.instructions import Accumulate


@dataclass
class Output:
    """As models of transformers return it."""

    loss: Tensor | None
    logits: Tensor
    accuracy: Tensor | None = None


class Model(nn.Module):
    def __init__(self, losses: int = 1) -> None:
        super().__init__()
        self.losses, self.layers = losses, nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Output | tuple[Tensor, ...]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return Output(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.losses == 2:
            return loss, loss + 1, logits
        return Output(loss, logits, (logits.argmax(-1) == labels).float().mean(-1))


IDS = torch.arange(12).reshape(2, 6)


def compiled(model: Model, **options: object) -> zerograph.api.Backend:
    torch._dynamo.reset()
    backend = zerograph.backend(compute="eager", **options)
    model.compile(backend=backend)
    return backend


def test_logits_are_none_in_training_and_there_in_evaluation() -> None:
    model = Model()
    truth = model(IDS, IDS)
    backend = compiled(model, loss_only=True, loss_tiles=3)
    found = model(IDS, IDS)
    torch.testing.assert_close(found.loss, truth.loss)
    assert found.logits is None
    found.loss.backward()
    torch.testing.assert_close(model.head.weight.grad, torch.autograd.grad(truth.loss, model.head.weight)[0])
    # No gradient reaches an accuracy, and logits are whole for it.
    assert found.accuracy is not None and "argmax" not in str(backend.report().whole_logits)
    with torch.no_grad():
        assert model(IDS, IDS).logits.shape == model(IDS).logits.shape == (2, 6, 50)


def test_who_evaluates_with_gradients_is_told_how_to_get_logits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zerograph")
    model = Model().eval()
    compiled(model, loss_only=True)
    for _ in range(2):
        assert model(IDS, IDS).logits is None
    assert caplog.text.count("None in place of 1 output beside its loss; call the model under torch.no_grad()") == 1
    with torch.no_grad():
        assert model(IDS, IDS).logits is not None


def test_the_report_says_which_argument_helps() -> None:
    model = Model()
    backend = compiled(model)
    model(IDS, IDS).loss.backward()
    assert "frame 0: logits are whole: the forward returns them beside the loss; backend(loss_only=True)" in str(
        backend.report()
    )
    backend = compiled(again := Model(), loss_only=True)
    again(IDS, IDS).loss.backward()
    assert not backend.report().whole_logits


def test_logits_of_a_loss_that_is_computed_outside_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    backend = compiled(model, loss_only=True, loss_tiles=2)
    F.cross_entropy(model(IDS).logits.flatten(0, 1), IDS.flatten()).backward()
    assert not any(isinstance(i, Accumulate) for p in backend.program.values() for i in p.instructions)
    assert "compute it in the forward" in caplog.text


class Broken(nn.Module):
    """A loss of hidden states, a graph break, and logits of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 50)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(x)
        aux = hidden.square().mean()
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(hidden), labels) + aux


class Routed(nn.Module):
    """A loss of its own beside logits, whose loss the user computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 50)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return hidden.square().mean(), self.head(hidden)


def test_what_the_users_code_goes_on_with_stays() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(4, 8), torch.arange(4)
    broken, routed = Broken(), Routed()
    wanted = broken(x, labels)
    compiled(broken, loss_only=True)  # type: ignore[arg-type]
    torch.testing.assert_close(broken(x, labels), wanted)
    compiled(routed, loss_only=True)  # type: ignore[arg-type]
    assert routed(x)[1].shape == (4, 50)


def test_of_two_losses_nobody_knows_which_one_is_meant() -> None:
    model = Model(losses=2)
    compiled(model, loss_only=True)
    assert model(IDS, IDS)[2].shape == (2, 6, 50)
