"""Errors that ranks catch: they meet again at the next program, and train on as if the batch had not been there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import pipeline_with
from numerics.compare import assert_same, full_values, mean_over_ranks, mine, seeded, sgd
from ranks import run, warned
from torch import Tensor, nn
from traced import TracedOnce

import zerograph
from zerograph.core.errors import CollectiveMismatch, RankError, ShardingError
from zerograph.runtime.comm import rendezvous as rendezvous_module
from zerograph.runtime.comm.collectives import GroupCommunicator
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.rendezvous import Rendezvous, timeout_of

TRANSPORTS = ["auto", "group"]


@dataclass
class Trap:
    """Raises ``error`` where ``place`` is computed: "forward 1" is the forward of the second layer."""

    place: str = ""
    error: BaseException = field(default_factory=lambda: ValueError("boom"))

    def pass_by(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            raise self.error


TRAP = Trap()


@torch.library.custom_op("zgtest::trapped", mutates_args=())
def trapped(x: Tensor, layer: int) -> Tensor:
    TRAP.pass_by(f"forward {layer}")
    return x.clone()


@torch.library.custom_op("zgtest::trapped_backward", mutates_args=())
def trapped_backward(grad: Tensor, layer: int) -> Tensor:
    TRAP.pass_by(f"backward {layer}")
    return grad.clone()


def _keep_layer(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.layer = inputs[1]


trapped.register_fake(lambda x, layer: torch.empty_like(x))
trapped_backward.register_fake(lambda grad, layer: torch.empty_like(grad))
trapped.register_autograd(
    lambda ctx, grad: (torch.ops.zgtest.trapped_backward(grad, ctx.layer), None), setup_context=_keep_layer
)

LAYERS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = trapped(torch.tanh(layer(x)), index)
        return x.square().mean()


class Training:
    """A model in training, ours, traced ``once`` for all or compiled as any model is; or (stage None) plain PyTorch's
    on the whole batch."""

    def __init__(self, stage: int | None, transport: str = "auto", once: bool = True) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = sgd(self.net)
        self.backend = None
        self.model: Callable[[Tensor], Tensor] = self.net
        if stage is not None:
            self.backend = zerograph.backend(stage=stage, compute="eager", bucket_size="200B")
            self.model = TracedOnce(self.net, self.backend) if once else torch.compile(self.net, backend=self.backend)
        self.losses: list[float] = []
        self.transport = transport

    @property
    def communicator(self) -> Communicator:
        """How the ranks of a backend communicate, once it has compiled a step."""
        return self.backend.frames[0].runtime.comm

    @property
    def rendezvous(self) -> Rendezvous:
        """Where they meet after an error."""
        return self.communicator.rendezvous

    def batch(self, seed: int) -> Tensor:
        whole = torch.randn(6, 8, generator=seeded(seed))
        return whole if self.backend is None else mine([whole])[0]

    def step(self, seed: int, micro: int = 1, without: int | None = None) -> None:
        """One optimizer step over ``micro`` micro-batches, all but the last without synchronizing."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ZEROGRAPH_TRANSPORT", self.transport)
            for part in range(micro):
                if part == without:
                    continue
                held = self.backend is not None and part < micro - 1
                with self.backend.no_sync() if held else nullcontext():
                    loss = self.model(self.batch(seed + 100 * part))
                    if TRAP.place == "python":
                        TRAP.pass_by("python")
                    loss.backward()
                self.losses.append((loss if self.backend is None else mean_over_ranks(loss)).item())
            self.optimizer.step()
            self.optimizer.zero_grad()


# Where a batch fails: by rank the place, and what each rank says. A rank without a place hears of the other's.
FAULTS: list[dict[int, tuple[str, type[BaseException]]]] = [
    {0: ("forward 0", ValueError), 1: ("forward 0", ValueError)},
    {0: ("python", ValueError), 1: ("python", ValueError)},
    {0: ("forward 2", MemoryError), 1: ("forward 2", MemoryError)},
    {1: ("forward 1", MemoryError)},
    {0: ("forward 2", ValueError)},
    {1: ("forward 0", KeyboardInterrupt)},
    {0: ("forward 2", ValueError), 1: ("forward 0", MemoryError)},
    {0: ("backward 2", ValueError), 1: ("backward 2", ValueError)},
    {1: ("backward 1", ValueError)},
    {0: ("backward 0", MemoryError)},
    {0: ("backward 2", ValueError), 1: ("backward 0", ValueError)},
]


@contextmanager
def fault(places: dict[int, tuple[str, type[BaseException]]]) -> Iterator[None]:
    """The block fails on all ranks: with their own error, or the one that names the other rank and its error."""
    rank = dist.get_rank()
    if rank in places:
        TRAP.place, kind = places[rank]
        TRAP.error = kind(f"boom on {rank}")
        with pytest.raises((kind, RankError)) as caught:
            yield
        TRAP.place = ""
        own = isinstance(caught.value, kind)
    else:
        with pytest.raises(RankError) as caught:
            yield
        own = False
    if not own:
        other = 1 - rank
        assert f"rank {other} failed: {places[other][1].__name__}: boom on {other}" in str(caught.value)


def _every_fault(stage: int, transport: str) -> None:
    once = stage == 2 or transport == "group"  # what Dynamo makes of errors depends on neither
    ours, spared, truth = Training(stage, transport, once), Training(stage, transport), Training(None)
    for training in (spared, ours, truth):  # to trace the first ends what Dynamo knows of others
        training.step(0)
    for seed, places in enumerate(FAULTS, start=1):
        with fault(places):
            ours.step(1000 + seed)
        ours.optimizer.zero_grad()
        for training in (ours, spared, truth):
            training.step(seed)
    # A micro-batch fails while gradients are held, in its forward and in its backward; the others count.
    for seed, places in ((50, {1: ("forward 2", ValueError)}), (60, {1: ("backward 1", ValueError)})):
        for training in (spared, truth):
            training.step(seed, micro=3, without=1)
        with ours.backend.no_sync():
            ours.model(ours.batch(seed)).backward()
            with fault(places):
                ours.model(ours.batch(seed + 100)).backward()
        ours.model(ours.batch(seed + 200)).backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
    # Evaluation fails too.
    with torch.no_grad(), fault({1: ("forward 1", ValueError)}):
        ours.model(ours.batch(70))
    for training in (ours, spared, truth):
        training.step(71)
    assert_same(full_values(ours.net), full_values(spared.net))
    for name, value in full_values(truth.net).items():
        torch.testing.assert_close(full_values(ours.net)[name], value, rtol=1e-5, atol=1e-5)
    assert ours.losses[: len(FAULTS) + 1] == spared.losses[: len(FAULTS) + 1]
    assert ours.losses[-1] == spared.losses[-1]
    assert spared.losses == pytest.approx(truth.losses, rel=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_after_errors_that_all_ranks_catch(stage: int, transport: str) -> None:
    run(2, _every_fault, stage, transport)


def _one_skips(transport: str) -> None:
    ours, spared = Training(3, transport, once=False), Training(3, transport)
    for training in (spared, ours):
        training.step(0)
    if dist.get_rank() == 0:
        loss = ours.model(ours.batch(1))
        with pytest.raises((CollectiveMismatch, RankError)) as caught:
            loss.backward()
    else:
        ours.model(ours.batch(1))  # and then an error of the user's own
        with pytest.raises((CollectiveMismatch, RankError)) as caught:
            ours.model(ours.batch(2))
    text = str(caught.value)
    assert "about to run different programs" in text
    assert "the forward of" in text and "the backward of" in text
    for training in (ours, spared):
        training.step(3)
    assert ours.losses == spared.losses

    # A step on one rank alone cannot be mended, and is said at every program.
    if dist.get_rank() == 1:
        ours.model.zero_grad()
        ours.optimizer.step()
    for _ in range(2):
        with pytest.raises(CollectiveMismatch) as caught:
            ours.step(4)
        steps = (2, 3) if dist.get_rank() == 0 else (3, 2)
        assert f"rank {dist.get_rank()} has taken {steps[0]} optimizer steps" in str(caught.value)
        assert f"rank {1 - dist.get_rank()} {steps[1]}:" in str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_stop_at_different_places_are_all_reported(transport: str) -> None:
    run(2, _one_skips, transport)


def _one_never_returns(transport: str) -> str:
    ours = Training(3, transport, once=False)  # traced once it is let go of at the end, which waits for rank 1
    ours.step(0)
    ours.rendezvous.timeout = 1.0
    with fault({1: ("forward 1", ValueError)}):
        ours.step(1)
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    with pytest.raises(RankError) as caught:
        ours.step(2)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_back_is_an_error_on_the_others(transport: str) -> None:
    text, _ = run(2, _one_never_returns, transport)
    assert "waited 1 s" in text and "and rank 1 did not come" in text
    assert "rank 1 last reported:" in text and "failed: ValueError: boom on 1" in text


def _compilation_fails_on_one(transport: str) -> list[float]:
    ours = Training(3, transport, once=False)
    if dist.get_rank() == 1:

        def broken(*_: Any) -> int:
            raise ValueError("no compiler here")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zerograph.compiler.rewrite.PIPELINE", pipeline_with("recompute", broken))
            with pytest.raises(Exception, match="no compiler here"):
                ours.step(0)
    else:
        with pytest.raises(Exception, match=r"rank 1 failed: while compiling .* no compiler here"):
            ours.step(0)
    ours.step(1)
    return ours.losses


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_compilation_that_fails_on_one_rank(transport: str) -> None:
    first, second = run(2, _compilation_fails_on_one, transport)
    assert first == second


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left(x) if left else self.right(x)).square().mean()


def _differ_once() -> None:
    model = torch.compile(Branches(), backend=zerograph.backend(stage=3, compute="eager"), dynamic=False)
    x, rank = torch.ones(2, 8), dist.get_rank()
    with pytest.raises(Exception, match="would run different collectives"):
        model(x, rank == 0)
    time.sleep(rank)  # rank 0 looks for what rank 1 runs now, and may not find what it ran before
    model(x, False).backward()


def test_ranks_that_compiled_different_programs_compare_the_next_ones_anew() -> None:
    run(2, _differ_once)


def _interrupted_once_all_have_met(transport: str) -> list[float]:
    ours = Training(3, transport)
    ours.step(0)
    with fault({0: ("forward 1", ValueError), 1: ("forward 1", ValueError)}):
        ours.step(1)
    rendezvous = ours.rendezvous
    if dist.get_rank() == 1:

        def meet() -> None:
            del rendezvous.meet
            rendezvous.meet()
            raise KeyboardInterrupt("boom on 1")

        rendezvous.meet = meet
        with pytest.raises(KeyboardInterrupt):
            ours.step(2)
    else:
        with pytest.raises(RankError, match="rank 1 failed: KeyboardInterrupt: boom on 1"):
            ours.step(2)
    ours.step(3)
    return ours.losses


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_when_all_have_met_is_heard_by_all(transport: str) -> None:
    first, second = run(2, _interrupted_once_all_have_met, transport, timeout=60)
    assert first == second and len(first) == 2


def _one_has_a_batch_more(transport: str) -> tuple[str, list[str]]:
    """Rank 1 is done and waits in a barrier, of which rank 0 cannot know."""
    ours = Training(3, transport, once=False)
    ours.step(0)
    rendezvous, text = ours.rendezvous, ""
    rendezvous.timeout = 4.0
    if isinstance(ours.communicator, GroupCommunicator):  # gloo is told when ranks connect
        with fault({0: ("forward 1", ValueError), 1: ("forward 1", ValueError)}):
            ours.step(1)
        ours.optimizer.zero_grad()
        ours.step(1)
    rendezvous.notice_after = 0.2
    with warned() as logs:
        if dist.get_rank() == 0:
            with pytest.raises(RankError) as caught:
                ours.step(2)
            text = str(caught.value)
        dist.barrier()

    # Outside of programs, too, a rank that waits for the others says so.
    with warned() as also, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous_module, "NOTICE", 0.2)
        time.sleep(dist.get_rank())
        with zerograph.gathered(ours.net):
            pass
    return text, logs + also


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_with_a_batch_more_learns_that_it_is_alone(transport: str) -> None:
    (text, (waiting, gathering)), (_, others) = run(2, _one_has_a_batch_more, transport)
    assert "rank 0 has waited" in waiting and "for rank 1, and will wait up to 4 s" in waiting
    for logs in (waiting, text):
        assert "the forward of forward" in logs and "rank 1 last reported: " in logs and "py-spy dump --pid" in logs
        assert "evaluate" not in logs  # nobody knows what the other rank does
    assert "rank 0 waited 4 s" in text and "and rank 1 did not come" in text
    assert "rank 0 has waited 0 s to gather parameters in zerograph.gathered()" in gathering
    assert not others


def _evaluates_alone(transport: str) -> tuple[str, list[str]]:
    """Rank 0 evaluates, which needs a program of its own; rank 1 goes on training."""
    ours = Training(3, transport, once=False)
    ours.step(0)
    ours.rendezvous.notice_after = 0.2
    start, trains = time.monotonic(), dist.get_rank() == 1
    with warned() as logs, torch.set_grad_enabled(trains), pytest.raises(CollectiveMismatch) as caught:
        ours.model(ours.batch(1))
    assert time.monotonic() - start < 30, "both knew where they were, and waited for the timeout"
    dist.barrier()
    return str(caught.value), logs


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_wait_for_each_other_at_different_places_say_so(transport: str) -> None:
    (alone, logs), (other, also) = run(2, _evaluates_alone, transport)
    assert len(logs) == len(also) == 1  # one notice each
    assert "rank 0 has waited 0 s for rank 1 to compile forward" in logs[0] and "inference" in logs[0]
    assert "rank 1 has waited" in also[0] and "for rank 0" in also[0] and "the forward of" in also[0]
    assert "rank 0 last reported" in also[0] and "compile" in also[0].partition("last reported")[2]
    assert alone.splitlines()[0] == other.splitlines()[0]  # torch adds lines to what is raised in a compilation
    assert "wait for each other at different places" in alone and "one rank alone cannot evaluate" in alone
    assert "rank 0 waits for rank 1 to compile forward" in alone and "the forward of forward" in alone


def _timeouts() -> None:
    group = dist.new_group(timeout=timedelta(seconds=77))
    assert timeout_of(group, torch.device("cpu")) == 77
    assert Rendezvous.open(group, torch.device("cpu")).timeout == 77


def test_ranks_wait_as_long_as_their_process_group() -> None:
    run(2, _timeouts)


def _optimizer(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    params = net.parameters()
    if kind == "torch":
        return torch.optim.AdamW(params, lr=0.1)
    return zerograph.optim.AdamW(params, lr=0.1, skip_nonfinite=kind == "with a norm")


def _update_fails(kind: str, place: str, transport: str) -> None:
    """On one rank the update fails, and then it runs no program: the other hears of it when it waits for this one."""
    ours = Training(3, transport)
    ours.optimizer = _optimizer(kind, ours.net)
    if place != "first step":
        ours.step(1)
    with fault({0: ("forward 0", ValueError), 1: ("forward 0", ValueError)}):
        ours.step(2)  # connections of a later generation are told as well
    ours.optimizer.zero_grad()
    ours.model(ours.batch(2)).backward()
    if dist.get_rank() == 1:
        if place == "hook":
            ours.optimizer.register_step_pre_hook(_raise)
        if place == "state":
            next(iter(ours.optimizer.state.values()))["exp_avg"] = None
        with pytest.raises((ValueError, TypeError, AttributeError)) as own:
            ours.optimizer.step(*([_raise] if place in ("closure", "first step") else []))
        text = f"{type(own.value).__name__}: {str(own.value).splitlines()[0]}"
    else:
        text = ""
        ours.optimizer.step()
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            ours.model(ours.batch(3))
        assert time.monotonic() - start < 10
    texts: list[str] = [text, text]
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        assert f"rank 1 failed: in AdamW.step(): {texts[1]}" in str(caught.value)
    for _ in range(2):
        with pytest.raises(CollectiveMismatch, match=r"rank [01] has taken [012] optimizer steps"):
            ours.model(ours.batch(3))


def _raise(*_: Any) -> None:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("place", "transport"), [("first step", "group"), ("closure", "auto"), ("hook", "auto"), ("state", "group")]
)
def test_an_update_of_torch_that_fails_on_one_rank_is_an_error_on_all(place: str, transport: str) -> None:
    run(2, _update_fails, "torch", place, transport)


@pytest.mark.parametrize("place", ["closure", "hook"])
def test_a_native_update_that_fails_on_one_rank_is_an_error_on_all(place: str) -> None:
    run(2, _update_fails, "native", place, "auto")


def _norm_waits(transport: str) -> None:
    """A rank that waits for the norm of all gradients hears that another one failed before; nobody has stepped."""
    ours, spared = Training(3, transport), Training(3, transport)
    for training in (ours, spared):
        training.optimizer = _optimizer("with a norm", training.net)
        training.step(1)
    ours.model(ours.batch(2)).backward()
    failing = ours.optimizer.register_step_pre_hook(_raise)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="boom"):
            ours.optimizer.step()
    else:
        failing.remove()
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 failed: in AdamW\.step\(\): ValueError: boom") as caught:
            ours.optimizer.step()
        assert time.monotonic() - start < 10
        assert "the update by AdamW" in str(caught.value)
    dist.barrier()  # torch's own group is as it was
    failing.remove()
    ours.optimizer.zero_grad()
    for training in (ours, spared):
        training.step(3)
    assert ours.losses == spared.losses
    assert_same(full_values(ours.net), full_values(spared.net))
    assert ours.optimizer.grad_norm == spared.optimizer.grad_norm > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_wait_for_a_norm_hear_of_one_that_failed(transport: str) -> None:
    run(2, _norm_waits, transport)


def _every_update_fails() -> None:
    ours, spared = Training(3), Training(3)
    for training in (ours, spared):
        training.optimizer = _optimizer("torch", training.net)
        training.step(1)
    ours.model(ours.batch(2)).backward()
    with pytest.raises(ValueError, match="boom"):
        ours.optimizer.step(_raise)
    ours.optimizer.zero_grad()
    for training in (ours, spared):
        training.step(3)
    assert_same(full_values(ours.net), full_values(spared.net))


def test_training_goes_on_after_updates_that_fail_on_all_ranks() -> None:
    run(2, _every_update_fails)


def _refused_on_one_rank() -> None:
    ours, spared = Training(3), Training(3)
    for training in (ours, spared):
        training.optimizer = _optimizer("torch", training.net)
        training.step(1)
        training.model(training.batch(2)).backward()
    if dist.get_rank() == 0:
        weight = next(iter(ours.net.parameters()))
        weight.data = weight.data.clone()
        with pytest.raises(ShardingError, match="data"):
            ours.optimizer.step()
    for training in (ours, spared):
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(3)
    assert_same(full_values(ours.net), full_values(spared.net))


def test_a_step_that_is_refused_on_one_rank_and_repeated_is_no_error_of_the_others() -> None:
    run(2, _refused_on_one_rank)
