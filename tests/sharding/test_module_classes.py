"""Generated classes: parameters that are properties, and what may not be done to a module that is sharded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zerograph.core.errors import ShardingError, UnsupportedError
from zerograph.sharding import module_classes
from zerograph.sharding.module_classes import present
from zerograph.sharding.spec import ShardSpec, default_reduce_dtype


def spec(name: str, dtype: torch.dtype = torch.float32) -> ShardSpec:
    return ShardSpec(name, "", dtype, dtype, False, follows=dtype is torch.float32)  # that of parameters here


def linear(dtype: torch.dtype = torch.float32, kind: Callable[[int, int], nn.Linear] = nn.Linear) -> nn.Linear:
    """As one rank holds it: parameters whole, computed with in ``dtype``."""
    module = kind(3, 2)
    for name, param in list(module._parameters.items()):
        assert param is not None
        present(module, name, param, spec(f"up.{name}", dtype))
    return module


class Seen(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight
        return super().forward(x)


def test_a_weight_is_the_parameter_outside_and_a_full_tensor_inside() -> None:
    module = Seen(3, 2)
    weight = module.weight
    present(module, "weight", weight, spec("weight", torch.bfloat16))
    present(module, "bias", module.bias, spec("bias", torch.bfloat16))
    assert module.weight is weight and isinstance(module, Seen)
    module(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert not isinstance(module.seen, nn.Parameter) and module.seen.dtype is torch.bfloat16
    assert module.weight is weight and weight.grad is not None and weight.grad.dtype is torch.float32


def test_one_class_for_all_modules_that_are_sharded_alike() -> None:
    one, other = linear(), linear()
    assert type(one) is type(other) is not nn.Linear
    assert module_classes.plain_class(one) is nn.Linear is module_classes.plain_class(nn.Linear(1, 1))
    assert (type(one).__name__, type(one).__module__) == ("Linear", nn.Linear.__module__)
    assert type(type(one)(3, 2)) is nn.Linear, "nobody has sharded what is made by type(module)(...)"


PARAMETER = nn.Parameter(torch.ones(2, 3))
REFUSED: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
    "another parameter": (lambda m: setattr(m, "weight", PARAMETER), "cannot be replaced"),
    "registered anew": (lambda m: m.register_parameter("weight", PARAMETER), "cannot be replaced"),
    "deleted": (lambda m: delattr(m, "weight"), "cannot be removed"),
    "another name": (lambda m: m.register_parameter("weight_orig", m.weight), "cannot be kept as weight_orig instead"),
    "taken away first": (lambda m: (m._parameters.pop("weight"), m.register_parameter("w", PARAMETER)), "be removed"),
    "a tensor": (
        lambda m: m.register_parameter("w", torch.ones(2)),
        "up.weight or up.bias is sharded and cannot be kept",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_sharded_parameter_stays_the_modules(which: str) -> None:
    change, message = REFUSED[which]
    with pytest.raises(ShardingError, match=message) as caught:
        change(linear())
    assert "zerograph.gathered(module, writeback=True)" in caught.value.hint


def test_other_parameters_may_come_and_go() -> None:
    module = linear()
    module.scale = nn.Parameter(torch.ones(2))
    module.register_parameter("shift", None)
    del module.scale
    assert list(module._parameters) == ["weight", "bias", "shift"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_of_the_same_class(copied: Callable[[nn.Linear], nn.Linear]) -> None:
    module = linear()
    other = copied(module)
    assert type(other) is type(module) and other._zg_specs == module._zg_specs
    assert torch.equal(other.weight, module.weight) and other.weight is not module.weight
    x = torch.ones(1, 3)
    assert torch.equal(other(x), module(x))


def test_copies_of_parametrized_modules_are_of_the_same_class() -> None:
    """torch's classes of these have a ``__deepcopy__`` that asks for another instance of its class."""
    module = linear(kind=lambda *sizes: parametrizations.spectral_norm(nn.Linear(*sizes), "bias"))
    other = copy.deepcopy(module)
    assert type(other) is type(module) and other._zg_specs == module._zg_specs and "weight" in other._zg_specs
    assert torch.equal(other.weight, module.weight) and other.weight is not module.weight
    with torch.no_grad():
        other.weight.zero_()
    assert module.weight.any() and module(torch.ones(1, 3)).shape == (1, 2)


class Narrow(nn.Linear):
    """As metrics of torchmetrics and old modules: the second argument is another one."""

    def _apply(self, fn: Callable[[Tensor], Tensor], excluded: Sequence[str] = "") -> Narrow:
        assert "weight" not in excluded
        return super()._apply(fn)


def test_modules_convert_themselves_in_their_own_way() -> None:
    module = nn.Sequential(linear(kind=Narrow))
    assert module.to(torch.bfloat16)[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("computes", [torch.float32, torch.float16])
def test_a_module_changes_its_dtype_and_stays_the_object_that_optimizers_hold(computes: torch.dtype) -> None:
    """What computes in the parameter's own dtype follows it; what was told another one keeps it."""
    module = linear(computes)
    before = dict(module._parameters)
    before["weight"].grad = torch.ones(2, 3)  # type: ignore[union-attr]
    module.to(torch.bfloat16)
    assert all(module._parameters[name] is param for name, param in before.items())
    assert list(module._parameters) == ["weight", "bias"]
    assert module.weight.dtype is module.weight.grad.dtype is torch.bfloat16  # type: ignore[union-attr]
    follows = computes is torch.float32
    assert module._zg_specs["weight"].dtype is (torch.bfloat16 if follows else computes)
    assert module._zg_specs["weight"].reduce_dtype is (torch.float32 if follows else computes)


def test_a_module_does_not_move_to_another_kind_of_device() -> None:
    with pytest.raises(ShardingError, match=r"up\.weight is sharded on cpu and cannot move to meta"):
        linear().to("meta")


@pytest.mark.parametrize("around", [nn.Sequential, torch.compile])
def test_shards_do_not_move_to_shared_memory(around: Callable[[nn.Module], nn.Module]) -> None:
    """Which torch does without looking at a DTensor's storage: the process ends."""
    with pytest.raises(ShardingError, match=r"up\.weight is sharded and cannot move to shared memory[^$]*hint: "):
        around(linear()).share_memory()


def test_full_values_are_loaded() -> None:
    module, values = linear(), {"weight": torch.full((2, 3), 5.0), "bias": torch.zeros(2)}
    held = module.weight
    module.load_state_dict(values)
    assert module.weight is held and torch.equal(held, values["weight"])
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({**values, "weight": torch.ones(4, 3)})


class Hooked(nn.Linear):
    def __init_subclass__(cls, *, needed: str) -> None:
        raise AssertionError("no subclass of the user's")


def test_hooks_for_subclasses_do_not_hear_of_generated_ones() -> None:
    module: Any = Hooked(3, 2)
    present(module, "weight", module.weight, spec("weight"))
    assert isinstance(module, Hooked) and type(module) is not Hooked


class Final(type):
    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("final")
        return super().__new__(cls, name, bases, members)


class Sealed(nn.Linear, metaclass=Final):
    pass


def test_a_class_that_cannot_be_inherited_from_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"class Sealed is part of the model and cannot be inherited from \(final\)"
    ):
        module_classes.sharded_class(Sealed, frozenset({"weight"}))


def test_a_parameter_without_values_cannot_be_read_in_a_forward() -> None:
    module = nn.Linear(3, 2, device="meta")
    present(module, "weight", module.weight, spec("up.weight"))
    assert module.weight.is_meta
    with pytest.raises(
        ShardingError, match=r"(?s)up.weight is on the meta device.*zerograph.materialize\(model\) first"
    ):
        module(torch.ones(1, 3, device="meta"))


@pytest.mark.parametrize(
    ("computes", "reduced"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_gradients_are_summed_in_no_less_than_float32(computes: torch.dtype, reduced: torch.dtype) -> None:
    assert default_reduce_dtype(computes) is reduced
    assert spec("w").computing_in(computes) == ShardSpec("w", "", computes, reduced, False)


def test_a_reduce_dtype_that_the_user_gave_stays() -> None:
    given = spec("w", torch.float64)._replace(reduce_dtype=torch.float32, keeps_reduce_dtype=True)
    assert given.computing_in(torch.bfloat16).computing_in(torch.float64) == given


@pytest.mark.parametrize("follows", [True, False])
def test_modules_of_a_tied_parameter_compute_alike_after_a_change_of_its_dtype(follows: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = weight = model[0].weight
    for module in model:
        present(module, "weight", weight, spec("0.weight")._replace(follows=follows))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model.to(dtype)
        computes = {module._zg_specs["weight"].dtype for module in model}
        assert computes == {dtype if follows else torch.float32} and weight.dtype is dtype
