"""One C++ source for several of Inductor's kernels: what it computes, and that one compilation serves all."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder

from zerograph.compiler.lowering import torch_private
from zerograph.compiler.lowering.kernel_library import joined

aten = torch.ops.aten
X = torch.linspace(0.1, 0.9, 33)
OPERATORS = [aten.sin, aten.cos, aten.exp, aten.log, aten.sqrt, aten.tanh, aten.reciprocal, aten.rsqrt, aten.abs]


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The sources that are compiled for kernels, in an empty cache."""
    built: list[str] = []
    build = CppBuilder.build

    def noted(builder: CppBuilder) -> None:
        if builder.get_target_file_path().endswith(".so"):
            built.append(Path(builder.get_target_file_path()).name)
        build(builder)

    torch_private.prepare_kernels().result()
    monkeypatch.setattr(CppBuilder, "build", noted)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch({"compile_threads": 2}):
        CppPythonBindingsCodeCache.cache_clear()
        AsyncCompile.pool.cache_clear()
        yield built
    AsyncCompile.pool.cache_clear()
    CppPythonBindingsCodeCache.cache_clear()


def compiled(operator: torch._ops.OpOverloadPacket, size: int = 33) -> torch_private.Callable[..., object]:
    with torch_private.FakeTensorMode():
        fake = torch.ones(size)
    graph = fx.Graph()
    x = graph.placeholder("x")
    value = graph.call_function(operator.default, (x,))
    x.meta["val"], value.meta["val"] = fake, fake
    graph.output((value,))
    with torch._inductor.config.patch({"fx_graph_cache": False}):
        return torch_private.compile_segment(fx.GraphModule({}, graph))


def check(segments: dict[torch._ops.OpOverloadPacket, torch_private.Callable[..., object]]) -> None:
    for operator, run in segments.items():
        (result,) = run([X.clone()])  # type: ignore[misc, attr-defined]
        torch.testing.assert_close(result, operator(X))


def libraries(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in folder.glob("*/*.main.so")}


def test_kernels_of_one_block_are_one_library(builds: list[str], tmp_path: Path) -> None:
    with torch_private.kernels_in_background():
        segments = {operator: compiled(operator) for operator in OPERATORS[:3]}
    assert builds == ["kernels.so"]
    check(segments)
    found = libraries(tmp_path)
    assert len(found) == 3 and len({*found.values()}) == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("zerograph-")]


def test_kernels_begin_to_be_compiled_before_the_block_ends(builds: list[str], tmp_path: Path) -> None:
    """Nine: eight, and the last one by Inductor itself."""
    with torch_private.kernels_in_background():
        segments = {operator: compiled(operator) for operator in OPERATORS}
    check(segments)
    # Two threads build them, and either may begin.
    (other,) = set(builds) - {"kernels.so"}
    assert len(builds) == 2 and other.endswith(".main.so")
    assert sorted(map([*libraries(tmp_path).values()].count, {*libraries(tmp_path).values()})) == [1, 8]


def test_a_kernel_that_is_there_is_not_compiled_again(builds: list[str]) -> None:
    for known in (OPERATORS[:2], OPERATORS[:4], OPERATORS[:4]):
        CppPythonBindingsCodeCache.cache_clear()  # as another process finds the folder
        with torch_private.kernels_in_background():
            segments = {operator: compiled(operator) for operator in known}
        check(segments)
    assert builds == ["kernels.so"] * 2


def test_kernels_that_cannot_be_joined_are_compiled_one_by_one(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_private, "joined", lambda sources: joined(sources) + "\n#error no")
    with caplog.at_level(logging.WARNING, "zerograph"), torch_private.kernels_in_background():
        segments = {operator: compiled(operator) for operator in OPERATORS[:2]}
    check(segments)
    assert "one by one" in caplog.text
    assert builds[0] == "kernels.so" and len(builds) == 3


def test_a_file_system_without_links_gets_copies(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    with torch_private.kernels_in_background():
        segments = {operator: compiled(operator) for operator in OPERATORS[:2]}
    check(segments)
    assert builds == ["kernels.so"] and len({*libraries(tmp_path).values()}) == 2


def test_nobody_waits_for_kernels_that_no_thread_builds(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "submit", full)
        with pytest.raises(RuntimeError, match="new thread"), torch_private.kernels_in_background():
            compiled(aten.sin)
    CppPythonBindingsCodeCache.cache_clear()
    with torch_private.kernels_in_background():
        run = compiled(aten.sin)
    check({aten.sin: run})


def test_kernels_of_a_block_that_fails_are_built_when_they_are_asked_for_again(builds: list[str]) -> None:
    def fails() -> None:
        compiled(aten.sin)
        compiled(aten.cos)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), torch_private.kernels_in_background():
        fails()
    with torch_private.kernels_in_background():
        segments = {operator: compiled(operator) for operator in OPERATORS[:2]}
    check(segments)
    assert builds == ["kernels.so"]


def test_processes_compile_a_kernel_once(builds: list[str], tmp_path: Path) -> None:
    """A process that comes while another one compiles waits for it, and takes what it made."""
    child = os.fork()
    AsyncCompile.pool.cache_clear()  # a fork has no threads
    CppPythonBindingsCodeCache.cache_clear()
    failed = 1
    try:
        with torch_private.kernels_in_background():
            segments = {operator: compiled(operator) for operator in OPERATORS[:3]}
        check(segments)
        (tmp_path / f"{os.getpid()}.builds").write_text(str(len(builds)))
        failed = 0
    finally:
        if child == 0:
            os._exit(failed)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert sorted(path.read_text() for path in tmp_path.glob("*.builds")) == ["0", "1"]


def test_a_library_says_which_kernels_it_lacks(builds: list[str], tmp_path: Path) -> None:
    with torch_private.kernels_in_background():
        segments = {operator: compiled(operator) for operator in OPERATORS[:2]}
    check(segments)
    library = next(iter(libraries(tmp_path)))
    with pytest.raises(ImportError, match=r"no kernel of this library is called other\.kernel"):
        CppPythonBindingsCodeCache._load_library(str(library), "other")


def test_includes_come_first_and_once() -> None:
    text = joined({"a": "#include <x.h>\n  #include <y.h>\nint one;", "b": "#include <x.h>\nint two;"})
    assert text.count("<x.h>") == 1 and text.index("<x.h>") < text.index("<y.h>") < text.index("int one;")
