"""Whether the code that runs a stack of layers could tell them apart by position.

A trace of a few layers numbers them from 0: ``if i < 6`` or ``len(self.layers) > 6`` takes one side of its decision
there and both in the whole model. So a stack is folded only where all code that names it does nothing but run through
all of it, ``for layer in self.layers``, or call it, and counts nothing beside. Code is read, not run: what is reached
from the forwards by name, in functions and in methods of the model's modules.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from zerograph.graph.repeated_layers import Stack

_COUNTS = frozenset({"enumerate", "range", "len", "zip", "iter", "next", "count", "islice"})


def position_dependence(model: nn.Module, stack: Stack) -> str:
    """Why what the code around ``stack`` does may depend on a layer's position; empty where it cannot."""
    inside = {m for layer in stack.layers for m in layer.modules()}
    outer = [m for m in model.modules() if m not in inside]
    if any(child in inside for m in outer if m is not stack.container for child in m.children()):
        return "one of them can be reached in another way"
    owner, _, name = stack.path.rpartition(".")
    named = model.get_submodule(owner)
    if type(stack.container) not in (nn.ModuleList, nn.Sequential):
        return f"{type(stack.container).__name__} runs them in a way of its own"
    running = type(named).forward is nn.Sequential.forward
    for function in _reached({type(m) for m in outer}):
        if name in _names(function.__code__):
            running = True
            reason = _counted(function, name, named, len(stack.layers))
            if reason:
                return f"{reason} in {function.__qualname__} may decide by position"
    return "" if running else "no code was found that runs them"


def _reached(types: set[type[nn.Module]]) -> Iterator[FunctionType]:
    """Functions that the forwards of ``types`` may call, by name, torch's own left out."""
    queue = [f for kind in types for name in ("__call__", "forward") for f in _functions(getattr(kind, name))]
    seen: set[CodeType] = set()
    while queue:
        function = queue.pop()
        if function.__code__ in seen or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(function.__code__)
        yield function
        for name in _names(function.__code__):
            queue += _functions(function.__globals__.get(name))
            for kind in types:
                queue += _functions(inspect.getattr_static(kind, name, None))


def _functions(value: Any) -> list[FunctionType]:
    """The functions of Python behind a function, method or property, through its decorators."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    found: list[FunctionType] = []
    queue = [value]
    while queue:
        function = queue.pop()
        if isinstance(function, FunctionType) and function not in found:
            found.append(function)
            queue += [getattr(function, "__wrapped__", None)]
            # Decorators without functools.wraps keep the function in a closure only.
            queue += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return found


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: CodeType) -> set[str]:
    """Names that ``code`` reads, of attributes and as text too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return found


def _counted(function: FunctionType, name: str, owner: nn.Module, layers: int) -> str:
    """What in ``function``, which names the stack, may know a layer's position or how many there are; or nothing."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return "code that cannot be read"
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _COUNTS:
            return f"{node.id}()"
        if isinstance(node, ast.Attribute) and node.attr == name and not _runs_all(node, parents, owner, layers):
            return f"{ast.unparse(parents[node]).partition(chr(10))[0][:60]!r}"
        if isinstance(node, ast.AugAssign | ast.Assign) and _steps_on(node):
            return f"{ast.unparse(node)!r}"
        # `getattr(self, "layers")` reaches the stack, too.
        if isinstance(node, ast.Constant) and node.value == name:
            return f"{name!r} as text"
    return ""


def _runs_all(node: ast.expr, parents: dict[ast.AST, ast.AST], owner: nn.Module, layers: int) -> bool:
    """Whether ``node``, the stack, is run through, or called, as a whole."""
    parent = parents[node]
    if isinstance(parent, ast.Subscript) and parent.value is node and _is_all(parent.slice, owner, layers):
        node, parent = parent, parents[parent]
    if isinstance(parent, ast.For | ast.comprehension):
        return parent.iter is node
    return isinstance(parent, ast.Call) and parent.func is node


def _is_all(index: ast.expr, owner: nn.Module, layers: int) -> bool:
    """Whether ``index`` is ``[:self.config.num_layers]`` or the like, as long as the stack is or longer."""
    if not isinstance(index, ast.Slice) or index.lower is not None or index.step is not None:
        return False
    end: Any = index.upper
    path: list[str] = []
    while isinstance(end, ast.Attribute):
        path.append(end.attr)
        end = end.value
    if end is None:
        return True
    if not isinstance(end, ast.Name) or end.id != "self":
        return False
    value: Any = owner
    for part in reversed(path):
        value = getattr(value, part, None)
    return isinstance(value, int) and value >= layers


def _steps_on(node: ast.AugAssign | ast.Assign) -> bool:
    """Whether ``node`` counts by hand: ``i += 1``."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.value, ast.Constant)
    value = node.value
    return (
        isinstance(value, ast.BinOp)
        and isinstance(value.left, ast.Name)
        and isinstance(value.right, ast.Constant)
        and any(isinstance(target, ast.Name) and target.id == value.left.id for target in node.targets)
    )
