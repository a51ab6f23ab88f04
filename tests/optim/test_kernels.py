"""Optimizer kernels and the pool of threads: against float64, against torch, and between targets."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph._core as _core
from zerograph._core import Algorithm, DType, Rule, TensorSet

F32, BF16, F16, F64 = DType.float32, DType.bfloat16, DType.float16, DType.float64
TORCH = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, F64: torch.float64}
TARGETS = _core.kernel_targets()
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-45, 1e-38, 3e38, -3e38, 6e-8, 65504.0]

RULES: dict[str, dict[str, Any]] = {
    "adam": {"algorithm": Algorithm.adam, "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "adam-decayed": {
        "algorithm": Algorithm.adam,
        "lr": 1e-2,
        "beta1": 0.4,
        "beta2": 0.99,
        "eps": 1e-6,
        "weight_decay": 0.1,
    },
    "adamw": {
        "algorithm": Algorithm.adam,
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled": True,
    },
    "amsgrad": {
        "algorithm": Algorithm.adam,
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.9,
        "eps": 1e-8,
        "amsgrad": True,
        "maximize": True,
    },
    "sgd": {"algorithm": Algorithm.sgd, "lr": 0.1, "weight_decay": 0.01, "maximize": True},
    "momentum": {"algorithm": Algorithm.sgd, "lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "nesterov": {"algorithm": Algorithm.sgd, "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adagrad": {"algorithm": Algorithm.adagrad, "lr": 0.1, "eps": 1e-10, "lr_decay": 0.01, "weight_decay": 0.01},
    "lion": {"algorithm": Algorithm.lion, "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
}


def slots(rule: dict[str, Any]) -> int:
    if rule["algorithm"] == Algorithm.adam:
        return 3 if rule.get("amsgrad") else 2
    return 0 if rule["algorithm"] == Algorithm.sgd and not rule.get("momentum") else 1


def place(values: Tensor, dtype: DType, offset: int) -> Tensor:
    """The values in memory that begins ``offset`` elements after a cache line."""
    memory = torch.zeros(values.numel() + offset + 64, dtype=TORCH[dtype])
    start = (-memory.data_ptr() % 64) // memory.element_size() + offset
    return memory[start : start + values.numel()].copy_(values)


@dataclass
class Problem:
    """One parameter with its states; ``step`` runs the kernel, ``expect`` the same in float64."""

    rule: dict[str, Any]
    param: Tensor
    states: list[Tensor]
    param_dtype: DType = F32
    state_dtype: DType = F32
    copy: Tensor | None = None
    copy_dtype: DType = BF16
    count: Tensor = field(default_factory=lambda: torch.zeros(()))

    def tensor_set(self) -> TensorSet:
        counted = self.rule["algorithm"] in (Algorithm.adam, Algorithm.adagrad)
        return TensorSet(
            [(self.param.data_ptr(), self.param_dtype, self.param.numel())],
            [[state.data_ptr()] for state in self.states],
            self.state_dtype,
            [] if self.copy is None else [self.copy.data_ptr()],
            self.copy_dtype,
            [self.count.data_ptr()] if counted else [],
        )

    def step(
        self, grad: Tensor, grad_dtype: DType, target: str | None = None, factor: float = 1.0, fresh: bool = False
    ):
        groups = [(Rule(**self.rule), self.tensor_set(), [grad.data_ptr()], grad_dtype, [fresh])]
        return _core.update(groups, factor, target).wait()


def problem(name: str, count: int, param_dtype: DType = F32, state_dtype: DType = F32, offset: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(count)
    draw = lambda: torch.randn(count, generator=generator)  # noqa: E731
    rule = RULES[name]
    param = place(draw(), param_dtype, offset)
    states = [place(draw() * 0.1, state_dtype, offset) for _ in range(slots(rule))]
    if rule["algorithm"] == Algorithm.adam:
        states[1:] = [state.abs_() for state in states[1:]]
    elif states and rule["algorithm"] == Algorithm.adagrad:
        states[0].abs_()
    return Problem(rule, param, states, param_dtype, state_dtype, place(torch.zeros(count), BF16, offset))


def expect(p: Problem, grad: Tensor, factor: float, step: int, fresh: bool) -> tuple[Tensor, list[Tensor]]:
    """The step in float64: parameter and states."""
    r = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "lr_decay": 0.0, "eps": 0.0, **p.rule}
    x, states = p.param.double(), [state.double() for state in p.states]
    g = grad.double() * (-factor if r.get("maximize") else factor)
    decoupled = r["algorithm"] == Algorithm.lion or r.get("decoupled", False)
    if decoupled:
        x = x * (1 - r["lr"] * r["weight_decay"])
    elif r["weight_decay"]:
        g = g + r["weight_decay"] * x
    if r["algorithm"] == Algorithm.adam:
        m = states[0] + (1 - r["beta1"]) * (g - states[0])
        v = states[1] * r["beta2"] + (1 - r["beta2"]) * g * g
        top = torch.maximum(states[2], v) if r.get("amsgrad") else v
        denominator = (top / (1 - r["beta2"] ** step)).sqrt() + r["eps"]
        x = x - r["lr"] / (1 - r["beta1"] ** step) * m / denominator
        return x, [m, v, top][: len(states)]
    if r["algorithm"] == Algorithm.sgd:
        if r["momentum"]:
            states = [g if fresh else states[0] * r["momentum"] + (1 - r["dampening"]) * g]
            g = g + r["momentum"] * states[0] if r.get("nesterov") else states[0]
        return x - r["lr"] * g, states
    if r["algorithm"] == Algorithm.adagrad:
        total = states[0] + g * g
        return x - r["lr"] / (1 + (step - 1) * r["lr_decay"]) * g / (total.sqrt() + r["eps"]), [total]
    direction = (r["beta1"] * states[0] + (1 - r["beta1"]) * g).sign()
    return x - r["lr"] * direction, [r["beta2"] * states[0] + (1 - r["beta2"]) * g]


def close(found: Tensor, wanted: Tensor, dtype: DType) -> None:
    tolerance = {F32: 2e-6, BF16: 2**-8, F16: 2**-10}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance / 4, equal_nan=True)


def bits(tensor: Tensor) -> Tensor:
    """As integers, and every NaN the same."""
    integers = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return integers.masked_fill(tensor.isnan(), 0x7FC0)


# ---- one step


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RULES)
def test_every_tail_and_alignment_is_a_float64_step(name: str, target: str) -> None:
    for count in range(68):
        p = problem(name, count, offset=count % 5)
        grad = place(torch.randn(count), F32, (count + 1) % 3)
        fresh = count % 2 == 0
        param, states = expect(p, grad, 0.5, 1, fresh)
        around = p.param.clone()
        assert not p.step(grad, F32, target, 0.5, fresh)
        close(p.param, param, F32)
        for found, wanted in zip(p.states, states, strict=True):
            close(found, wanted, F32)
        assert p.copy is not None
        assert torch.equal(p.copy, p.param.bfloat16())
        assert count == 0 or not torch.equal(around, p.param)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("param_dtype", "grad_dtype"), itertools.product([F32, BF16, F16], repeat=2))
def test_every_dtype_is_a_float64_step(param_dtype: DType, grad_dtype: DType, target: str) -> None:
    for name, offset in itertools.product(["adamw", "nesterov", "adagrad", "lion"], [0, 1, 7]):
        p = problem(name, 2500, param_dtype, offset=offset)
        p.copy_dtype = grad_dtype
        p.copy = place(torch.zeros(2500), grad_dtype, offset)
        grad = place(torch.randn(2500), grad_dtype, offset + 1)
        param, states = expect(p, grad, 1.0, 1, False)
        p.step(grad, grad_dtype, target)
        close(p.param, param, param_dtype)
        for found, wanted in zip(p.states, states, strict=True):
            close(found, wanted, F32)
        close(p.copy, param, BF16 if BF16 in (param_dtype, grad_dtype) else F16)


@pytest.mark.parametrize("target", TARGETS)
def test_adam_keeps_its_moments_in_bfloat16(target: str) -> None:
    p = problem("adamw", 3001, F32, BF16, offset=3)
    grad = place(torch.randn(3001), BF16, 1)
    param, states = expect(p, grad, 1.0, 1, False)
    p.step(grad, BF16, target)
    close(p.param, param, F32)
    for found, wanted in zip(p.states, states, strict=True):
        close(found, wanted, BF16)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("target", TARGETS[1:])
def test_targets_give_the_same_bits(target: str, name: str) -> None:
    special = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    for param_dtype, grad_dtype in itertools.product([F32, BF16, F16], repeat=2):
        results = []
        for chosen in ("baseline", target):
            p = problem(name, 1333, param_dtype, offset=1)
            p.param[: len(special)] = special[:, 0]
            grad = place(torch.randn(1333, generator=torch.Generator().manual_seed(1)), grad_dtype, 0)
            grad[: len(special)] = special[:, 1]
            noted = [p.step(grad, grad_dtype, chosen, 0.7) for _ in range(2)]
            assert noted == [True, True]
            assert p.copy is not None
            results.append([p.param, p.copy, *p.states])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_one_gradient_that_is_not_finite_is_noted(dtype: DType, target: str) -> None:
    largest = torch.finfo(TORCH[dtype]).max
    for where, value in itertools.product([0, 15, 16, 1023, 1024, 1099], [math.nan, math.inf, -math.inf, largest]):
        p = problem("adamw", 1100)
        grad = place(torch.ones(1100), dtype, 0)
        grad[where] = value
        assert p.step(grad, dtype, target) == (not math.isfinite(value))
        finite = p.param.isfinite()
        assert int((~finite).sum()) == (not math.isfinite(value))


# ---- many steps, against torch


def lion(param: Tensor, grads: Sequence[Tensor], lr: float, beta1: float, beta2: float, weight_decay: float) -> None:
    average = torch.zeros_like(param)
    for grad in grads:
        param.mul_(1 - lr * weight_decay)
        param.add_((average * beta1 + grad * (1 - beta1)).sign(), alpha=-lr)
        average.mul_(beta2).add_(grad, alpha=1 - beta2)


def torch_steps(rule: dict[str, Any], param: Tensor, grads: Sequence[Tensor]) -> None:
    options = {key: value for key, value in rule.items() if key != "algorithm"}
    if rule["algorithm"] == Algorithm.lion:
        return lion(param, grads, **options)
    if rule["algorithm"] == Algorithm.adam:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    decoupled = options.pop("decoupled", False)
    kinds: dict[Algorithm, Callable[..., torch.optim.Optimizer]] = {
        Algorithm.adam: torch.optim.AdamW if decoupled else torch.optim.Adam,
        Algorithm.sgd: torch.optim.SGD,
        Algorithm.adagrad: torch.optim.Adagrad,
    }
    weight = torch.nn.Parameter(param)
    optimizer = kinds[rule["algorithm"]]([weight], foreach=False, **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return None


@pytest.mark.parametrize("name", RULES)
def test_a_hundred_steps_follow_torch(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(5000, generator=generator)
    grads = [torch.randn(5000, generator=generator) for _ in range(100)]
    p = Problem(RULES[name], start.clone(), [torch.zeros(5000) for _ in range(slots(RULES[name]))])
    for index, grad in enumerate(grads):
        p.step(grad, F32, fresh=index == 0)
    wanted = start.clone()
    torch_steps(RULES[name], wanted, grads)
    assert float((p.param - wanted).norm() / wanted.norm()) < 1e-6
    assert float((p.param - wanted).abs().max() / wanted.abs().max()) < 1e-6
    assert float(p.count) == (100 if RULES[name]["algorithm"] in (Algorithm.adam, Algorithm.adagrad) else 0)


# ---- many tensors


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_cover_many_tensors_once(threads: int) -> None:
    before = _core.pool_threads()
    _core.set_pool_threads(threads)
    try:
        assert _core.pool_threads() == threads
        sizes = [0, 1, 63, 64, 65, 10_000, 65_535, 65_536, 65_537, 300_001, *([777] * 50)]
        params = [torch.zeros(n + 3)[3:] for n in sizes]
        grads = [torch.ones(n) for n in sizes]
        ours = TensorSet([(p.data_ptr(), F32, p.numel()) for p in params], [], F32, [], BF16, [])
        addresses = [g.data_ptr() if n != 65 else 0 for g, n in zip(grads, sizes, strict=True)]
        sgd = Rule(Algorithm.sgd, lr=1.0)
        assert not _core.update([(sgd, ours, addresses, F32, [])], factor=2.0).wait()
        for param, n in zip(params, sizes, strict=True):
            assert torch.equal(param, torch.full((n,), 0.0 if n == 65 else -2.0))
    finally:
        _core.set_pool_threads(before)


def test_large_copies_are_written_past_the_caches() -> None:
    count = 6_000_003
    param, grad, copy = torch.zeros(count), torch.randn(count), torch.zeros(count + 1, dtype=torch.bfloat16)[1:]
    tensors = TensorSet([(param.data_ptr(), F32, count)], [], F32, [copy.data_ptr()], BF16, [])
    _core.update([(Rule(Algorithm.sgd, lr=1.0), tensors, [grad.data_ptr()], F32, [])]).wait()
    assert torch.equal(param, -grad)
    assert torch.equal(copy, param.bfloat16())


def test_an_update_without_work_is_done() -> None:
    ticket = _core.update([])
    assert ticket.done()
    assert ticket.wait() is False


# ---- norms, sums, casts


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_squares_is_the_same_for_any_number_of_threads_and_target(dtype: DType) -> None:
    tensors = [place(torch.randn(n), dtype, n % 4) for n in [*range(40), 200_001]]
    pieces = [(t.data_ptr(), dtype, t.numel()) for t in tensors]
    wanted = sum(float(t.double().square().sum()) for t in tensors)
    before = _core.pool_threads()
    found = set()
    for threads in (1, 2, 5):
        _core.set_pool_threads(threads)
        found |= {math.fsum(_core.squares(pieces, target)) for target in TARGETS}
    _core.set_pool_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(wanted, rel=1e-12)


def test_squares_of_what_float32_cannot_square() -> None:
    large = torch.full((100,), 1e30)
    assert math.fsum(_core.squares([(large.data_ptr(), F32, 100)])) == pytest.approx(1e62, rel=1e-6)
    large[77] = math.inf
    assert math.fsum(_core.squares([(large.data_ptr(), F32, 100)])) == math.inf
    large[78] = math.nan
    assert math.isnan(math.fsum(_core.squares([(large.data_ptr(), F32, 100)])))
    assert _core.squares([]) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_accumulate_adds_in_float32(dtype: DType, target: str) -> None:
    for count in [*range(68), 70_000]:
        total, term = place(torch.randn(count), F32, count % 3), place(torch.randn(count), dtype, count % 5)
        wanted = total + term.float()
        _core.accumulate(total.data_ptr(), F32, term.data_ptr(), dtype, count, target)
        assert torch.equal(total, wanted)


@pytest.mark.parametrize(("src", "dst"), itertools.product([F32, BF16, F16, F64], repeat=2))
def test_cast_rounds_as_torch(src: DType, dst: DType) -> None:
    values = torch.cat([torch.randn(150_000), torch.tensor(SPECIAL)])
    a, b = place(values, src, 1), place(torch.zeros(values.numel()), dst, 3)
    _core.cast(a.data_ptr(), src, b.data_ptr(), dst, a.numel())
    torch.testing.assert_close(b, a.to(TORCH[dst]), rtol=0, atol=0, equal_nan=True)


# ---- what callers get wrong


def test_arguments_that_do_not_fit_are_named() -> None:
    x = torch.zeros(8)
    params = [(x.data_ptr(), F32, 8)]
    adam = Rule(**RULES["adam"])
    with pytest.raises(ValueError, match="2 states for 1 parameters"):
        TensorSet(params, [[x.data_ptr()] * 2], F32, [], BF16, [])
    with pytest.raises(ValueError, match="a parameter of float64"):
        TensorSet([(x.data_ptr(), F64, 4)], [], F32, [], BF16, [])
    with pytest.raises(ValueError, match="parameter 0 is at address"):
        TensorSet([(x.data_ptr() + 2, F32, 4)], [], F32, [], BF16, [])
    bare = TensorSet(params, [], F32, [], BF16, [])
    with pytest.raises(ValueError, match="2 states, and the tensors came with 0"):
        _core.update([(adam, bare, [x.data_ptr()], F32, [])])
    full = TensorSet(params, [[x.data_ptr()]] * 2, F32, [], BF16, [])
    with pytest.raises(ValueError, match="0 steps for 1 parameters"):
        _core.update([(adam, full, [x.data_ptr()], F32, [])])
    with pytest.raises(ValueError, match="0 gradients for 1 parameters"):
        _core.update([(Rule(Algorithm.sgd, lr=1.0), bare, [], F32, [])])
    with pytest.raises(ValueError, match="gradients of float64"):
        _core.update([(Rule(Algorithm.sgd, lr=1.0), bare, [x.data_ptr()], F64, [])])
    half = TensorSet(params, [[x.data_ptr()]], BF16, [], BF16, [])
    with pytest.raises(ValueError, match="states of bfloat16"):
        _core.update([(Rule(Algorithm.lion, lr=1.0), half, [x.data_ptr()], F32, [])])
    with pytest.raises(ValueError, match="a tensor of raw4"):
        _core.squares([(x.data_ptr(), DType.raw4, 8)])
    with pytest.raises(ValueError, match="a sum of bfloat16"):
        _core.accumulate(x.data_ptr(), BF16, x.data_ptr(), BF16, 8)
    with pytest.raises(ValueError, match="1 to 4096 threads, not 0"):
        _core.set_pool_threads(0)
    with pytest.raises(ValueError, match="'sse9' is no target"):
        _core.squares([], "sse9")


# ---- threads and processes


def test_a_ticket_may_be_waited_for_by_several_threads() -> None:
    p = problem("adamw", 2_000_000)
    grad = torch.full((2_000_000,), math.inf)
    groups = [(Rule(**p.rule), p.tensor_set(), [grad.data_ptr()], F32, [])]
    ticket = _core.update(groups)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(ticket.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert ticket.done()


def run_python(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    prelude = (
        "import ctypes, os, sys, threading\n"
        "import zerograph._core as _core\n"
        "from zerograph._core import *\n"
        "n = 3_000_000\n"
        "memory = (ctypes.c_float * n)()\n"
        "a = ctypes.addressof(memory)\n"
        "tensors = TensorSet([(a, DType.float32, n)], [], DType.float32, [], DType.bfloat16, [])\n"
        "def start(): return _core.update([(Rule(Algorithm.sgd, lr=1.0), tensors, [a], DType.float32, [])])\n"
    )
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("LOCAL_", "ZEROGRAPH_", "OMP_"))
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + body],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_fork_leaves_parent_and_child_with_a_pool_each() -> None:
    result = run_python(
        "tickets = []\n"
        "for _ in range(10):\n"
        "    tickets.append(start())\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try: tickets[-1].wait()\n"
        "        except RuntimeError as error: ok = 'before a fork' in str(error)\n"
        "        ok = ok and start().wait() is False and not any(_core.squares([(a, DType.float32, n)]))\n"
        "        del tickets\n"
        "        sys.exit(7 if ok else 1)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert not any(ticket.wait() for ticket in tickets)\n"
    )
    assert result.returncode == 0, result.stderr


def test_an_interpreter_ends_with_work_in_flight() -> None:
    body = "ticket = start()\nthreading.Thread(target=ticket.wait, daemon=True).start()\nother = start()\n"
    for _ in range(3):
        result = run_python(body)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "call",
    [
        "_core.pool_threads()",
        "_core.update([])",
        "_core.IoEngine('threads', depth=1, threads=1, buffers=1, buffer=65536, block=65536)",
        "box.bytes",
    ],
)
def test_an_interpreter_ends_while_a_thread_is_in_the_core(call: str) -> None:
    """CPython unwinds such a thread where it wants the interpreter back, which C++ in between does not survive."""
    body = f"import time\nbox = Mailbox(0, 1, 0)\ndef forever():\n    while True: {call}\n"
    body += "for _ in range(4): threading.Thread(target=forever, daemon=True).start()\ntime.sleep(0.2)\n"
    for _ in range(4):
        result = run_python(body)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_a_variable_forces_the_target(target: str) -> None:
    result = run_python("print(_core.simd_target(), start().wait())", ZEROGRAPH_SIMD=target)
    assert result.stdout == f"{target} False\n", result.stderr


def test_a_variable_that_names_no_target_is_an_error_at_first_use() -> None:
    for call in ("_core.simd_target()", "start()", "Mailbox(0, 1, 0)"):
        result = run_python(call, ZEROGRAPH_SIMD="sse9")
        assert "ValueError: ZEROGRAPH_SIMD=sse9" in result.stderr
        assert "hint: unset ZEROGRAPH_SIMD" in result.stderr


def test_the_pool_has_the_cores_of_this_rank() -> None:
    cores = len(os.sched_getaffinity(0))
    show = "start().wait(); print(_core.pool_threads(), sorted({tuple(sorted(os.sched_getaffinity(int(t)))) for t in "
    show += "os.listdir('/proc/self/task') if open(f'/proc/self/task/{t}/comm').read() == 'zerograph\\n'}))"
    alone = run_python(show, OMP_NUM_THREADS="1")
    assert 1 <= int(alone.stdout.split()[0]) <= cores, alone.stderr
    shares = [run_python(show, LOCAL_RANK=str(r), LOCAL_WORLD_SIZE="2").stdout.split(" ", 1) for r in range(2)]
    assert all(int(threads) == max(1, int(alone.stdout.split()[0]) // 2) for threads, _ in shares)
    if cores >= 2:
        assert shares[0][1] != shares[1][1]


def test_a_mask_is_divided_among_the_ranks_that_share_it() -> None:
    """The other rank is started as torchrun does, bound to the same processors or to one of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two processors")
    alone = int(run_python("print(_core.pool_threads())").stdout)
    names = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    for mask, threads in ((cores, max(1, alone // 2)), (cores[:1], alone)):
        with subprocess.Popen(["sleep", "60"], env={**os.environ, **names, "LOCAL_RANK": "1"}) as other:
            os.sched_setaffinity(other.pid, mask)
            found = run_python("print(_core.pool_threads())", **names, LOCAL_RANK="0")
            other.kill()
        assert int(found.stdout) == threads, found.stderr
