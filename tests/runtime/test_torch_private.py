"""Private names of torch that running programs needs: there, and of use, on the installed torch."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from zerograph.runtime import torch_private
from zerograph.runtime.comm.collectives import _all_gather

CPU = torch.device("cpu")


def test_memory_is_shared_with_views() -> None:
    tensor = torch.zeros(4)
    assert torch_private.memory_is_unshared(tensor)
    view = tensor[:2]
    assert not torch_private.memory_is_unshared(tensor)
    del view
    assert torch_private.memory_is_unshared(tensor)


def test_the_local_tensor_is_one_object(group: dist.ProcessGroup) -> None:
    plain = torch.zeros(4)
    sharded = DTensor.from_local(plain, init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
    assert torch_private.local_tensor(plain) is plain
    assert torch_private.local_tensor(sharded) is torch_private.local_tensor(sharded)


def test_the_end_of_a_backward() -> None:
    seen: list[object] = []

    def hook(grad: torch.Tensor) -> None:
        seen.append(torch_private.current_backward())
        torch_private.after_backward(lambda: seen.append("end"))

    for _ in range(2):
        a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        a.register_hook(hook)
        b.register_post_accumulate_grad_hook(lambda _: seen.append("b"))
        (a + b).sum().backward()
    first, second = seen[:3], seen[3:]
    assert first[-1] == second[-1] == "end" and "b" in first
    numbers = [n for n in seen if isinstance(n, int)]
    assert len(set(numbers)) == 2 and torch_private.current_backward() not in numbers


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_is_open_until_it_ends_or_fails(fails: bool) -> None:
    """Also while another one runs inside of it, which has another number."""
    opened: list[torch_private.Open] = []
    numbers = set[int]()

    def begins(_: torch.Tensor) -> None:
        opened.append(torch_private.after_backward(lambda: None))
        numbers.add(torch_private.current_backward())

    def inside(_: torch.Tensor) -> None:
        with torch.enable_grad():
            inner = torch.ones(2, requires_grad=True)
            inner.register_hook(begins)
            inner.sum().backward()
        begins(_)
        assert [each() is None for each in opened] == [False, True, False] and len(numbers) == 2
        if fails:
            raise ZeroDivisionError

    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    between = first * 1
    between.register_hook(inside)
    end = between * second
    end.register_hook(begins)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        end.sum().backward()
    assert all(each() is None for each in opened)


def _interrupted(group: dist.ProcessGroup) -> None:
    with torch_private.coalescing(group):
        _all_gather(torch.zeros(2), torch.ones(2), group=group)
        raise ZeroDivisionError


def test_a_group_by_its_name(group: dist.ProcessGroup) -> None:
    assert torch_private.resolve_group(group.group_name) is group


def test_a_group_that_functional_collectives_alone_find(group: dist.ProcessGroup) -> None:
    store, functional = dist.PrefixStore("named", torch_private.default_store()), torch.ops._c10d_functional
    own = torch_private.gloo_group(store, 0, 1, timedelta(seconds=5), CPU, timedelta(seconds=6))
    assert torch_private.timeout_of(own, CPU) == 6
    torch_private.name_group("ours", own)
    summed = functional.all_reduce.default(torch.ones(2), "sum", "ours")
    assert functional.wait_tensor.default(summed).tolist() == [1, 1]
    assert own not in dist.distributed_c10d._world.pg_map
    torch_private.unname_group("ours")
    torch_private.unname_group("ours")  # nothing happens
    with pytest.raises(RuntimeError, match="ours"):
        functional.all_reduce.default(torch.ones(2), "sum", "ours")


def test_errors_of_closed_connections(group: dist.ProcessGroup) -> None:
    """Real ones are in tests/numerics/test_tensor_parallel_errors.py."""
    closed = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:132."
    assert torch_private.closed_connection(RuntimeError(f"{closed}\nmore")) == closed
    late = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:85] Timed out waiting 1800000ms"
    )
    for other in (late, ValueError(closed), KeyboardInterrupt()):
        assert torch_private.closed_connection(other) == ""


def test_process_groups(group: dist.ProcessGroup) -> None:
    assert torch_private.backend_name(group, CPU) == "gloo"
    assert torch_private.timeout_of(group, CPU) == 77
    store = torch_private.default_store()
    own = torch_private.gloo_group(dist.PrefixStore("own", store), 0, 1, timedelta(seconds=5), torch.device("cuda"))
    assert torch_private.backend_name(own, torch.device("cuda")) == torch_private.backend_name(own, CPU) == "gloo"
    value = torch.ones(2)
    own.allreduce([value]).wait()
    assert value.tolist() == [1, 1] and own is not group
    with pytest.raises(ZeroDivisionError):
        _interrupted(group)
    gathered = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    with torch_private.coalescing(group):
        for each in gathered:
            _all_gather(each, torch.ones_like(each), group=group)
        assert not any(each.any() for each in gathered)
    assert all(each.eq(1).all() for each in gathered)


def test_a_tensor_is_placed_as_another_where_it_is(group: dist.ProcessGroup) -> None:
    like = DTensor.from_local(torch.zeros(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    local = torch.ones(4, 3, dtype=torch.bfloat16)
    placed = torch_private.placed_as(local, like)
    assert isinstance(placed, DTensor) and torch_private.local_tensor(placed) is local
    assert (placed.shape, placed.stride(), placed.dtype) == (like.shape, like.stride(), torch.bfloat16)
    assert torch.equal((placed + like).full_tensor(), torch.ones(4, 3))
    assert torch_private.placed_as(local, torch.zeros(4, 3)) is local


def _reaches_host() -> list[float]:
    import torch.testing._internal.distributed.fake_pg  # a backend that is not gloo's, as NCCL's is not

    group, ones = dist.new_group(backend="cuda:fake"), torch.ones(3)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(ones, group=group)
    for _ in range(2):
        torch_private.reach_host(group)
    dist.all_reduce(ones, group=group)
    return ones.tolist()


def test_a_group_reaches_the_host() -> None:
    assert run(2, _reaches_host) == [[2.0] * 3] * 2


def test_allocators_remember_on_devices_that_have_one() -> None:
    """What is called with these arguments needs a device; that CUDA's function takes them can be seen without."""
    assert torch_private.allocator_history(CPU) is None
    taken = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks", "clear_history"} <= taken.keys() and torch.cuda.memory._snapshot
