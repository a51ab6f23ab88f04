"""The private names of Inductor by which segments and their kernels are compiled, patches of them included."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import SymInt, fx
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LOCK_TIMEOUT, CppPythonBindingsCodeCache, _worker_compile_cpp, get_lock_dir
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.runtime_utils import cache_dir
from torch._inductor.triton_bundler import TritonBundle, TritonBundler
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._filelock import FileLock

from zerograph.compiler.lowering.kernel_library import joined
from zerograph.compiler.torch_private import Uncacheable, fake_mode_of, float32_products

log = logging.getLogger(__name__)

# Segments


def compile_segment(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """``gm`` compiled by Inductor, without another round of AOTAutograd, as a function of a list that it may clear.

    ``torch._inductor.compile`` would trace again. It is no CUDA graph, whatever the user's settings: the outputs of one
    lie in its own pool, and the next replay writes over them. Seen in 2.11, 2.13.
    """
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    # Its own context: Dynamo's would check this segment's strides against the whole graph's outputs.
    sizes = (val.node.shape_env for val in inputs if isinstance(val, SymInt))  # all that an assertion may read
    context = TracingContext(fake_mode_of(inputs) or FakeTensorMode(shape_env=next(sizes, None)))
    with tracing(context), inductor_config.patch({"triton.cudagraphs": False}):
        return compile_fx_inner(gm, inputs, is_inference=True)  # type: ignore[return-value]


def wants_cuda_graphs() -> bool:
    """Whether the user has told Inductor to make CUDA graphs. Seen in 2.11, 2.13."""
    return bool(inductor_config.triton.cudagraphs)


def stored_segment(callee: object) -> Any:
    """The result of :func:`compile_segment`, fit for pickle. Seen in 2.13.

    Raises:
        Uncacheable: Inductor compiled nothing.
    """
    from torch._functorch._aot_autograd.aot_autograd_result import BundledCompiledForward

    if not isinstance(callee, CompiledFxGraph):
        raise Uncacheable("a part of it is not compiled by Inductor")
    stored = BundledCompiledForward(callee)
    stored.pre_save()
    return stored


def loaded_segment(stored: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """The callable of what :func:`stored_segment` gave. Seen in 2.13."""
    with tracing(TracingContext(FakeTensorMode())):  # as it was compiled
        settings = {"cudagraphs": BoxedBool(False), "is_backward": False}
        return stored.post_compile(stored.load([]), settings)  # type: ignore[no-any-return]


# Kernels


def kernel_settings() -> tuple[object, ...]:
    """All settings by which Inductor writes kernels. Its own have no public digest. Seen in 2.11, 2.13."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        float32_products(),
        inductor_config.get_hash(),  # type: ignore[attr-defined]
    )


@contextmanager
def kernels_in_background() -> Iterator[None]:
    """Patch Inductor so that its compilers work beside what goes on inside; the end waits for them.

    By itself Inductor waits for the kernels of each graph, and has no setting for it: the modules that it generates
    call ``AsyncCompile.wait`` with their globals, which hold what is to come. Segments are many small graphs, of which
    none is needed before all exist, and several C++ kernels are compiled as one. Inductor keeps binaries of Triton with
    their graph: they are given to it at the end. Entries of its own cache, which it writes before, are without them,
    and find them in Triton's. Seen in 2.13.
    """
    loaded, compiled = list[_Wait](), list[_Wait]()
    of_graphs = list[tuple[CompiledFxGraph, TritonBundle, list[_Wait]]]()
    wait = AsyncCompile.wait
    groups = _KernelGroups(AsyncCompile.submit)

    def waits(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
        if str(getattr(V.graph, "name", None)).startswith("benchmark_"):
            wait(compiler, scope)  # a way of computing a product, which is timed at once
        else:
            # Inductor has no bundle open while it loads a graph that it has compiled before.
            (loaded if TritonBundler._entries is None else compiled).append((compiler, scope))

    def end_of_graph(graph: CompiledFxGraph, bundle: TritonBundle) -> None:
        of_graphs.append((graph, bundle, compiled.copy()))
        compiled.clear()

    # Kernels that are asked for inside only queue up; nothing else calls one before the end.
    with (
        patch.object(AsyncCompile, "wait", waits),
        patch.object(AsyncCompile, "submit", groups.submit),
        patch.object(CompiledFxGraph, "set_triton_bundle", end_of_graph),
    ):
        try:
            yield
        finally:
            groups.begin()
    # Not after an error: the segments that lack kernels are forgotten (SegmentCache.kernels_in_background).
    for graph, bundle, own in of_graphs:
        TritonBundler.begin_compile()
        try:
            for compiler, scope in own:
                wait(compiler, scope)
            late, _ = TritonBundler.collect()
        finally:
            TritonBundler.end_compile()
        # Kernels that no process of Inductor's was ready for were there before.
        artifacts = [*bundle.kernel_artifacts, *late.kernel_artifacts]
        graph.set_triton_bundle(TritonBundle(artifacts, [*bundle.static_autotuners, *late.static_autotuners]))
    for compiler, scope in loaded:
        wait(compiler, scope)


_Wait = tuple[AsyncCompile, dict[str, Any]]
"""What a generated module waits by, and its globals."""

_KERNELS_AT_ONCE = 8
"""An empty source takes 0.4 s of CPU, and each kernel in it 0.1: more at once would save little and begin late."""


class _KernelGroups:
    """Takes the builds of C++ kernels that are submitted to Inductor's threads, and submits several as one.

    Each build still runs, behind that of its group, and builds what is missing then. Seen in 2.13; a version that
    submits something else has its kernels built one by one.
    """

    def __init__(self, submit: Callable[[Callable[[], Any]], Any]) -> None:
        self._submit = submit
        self._waiting: list[_Kernel] = []

    def submit(self, task: Callable[[], Any]) -> Any:
        """The future of ``task``, as Inductor's own method has it."""
        builder = _builder_of(task)
        if builder is None:
            return self._submit(task)
        kernel = _Kernel(task, builder)
        self._waiting.append(kernel)
        if len(self._waiting) == _KERNELS_AT_ONCE:
            self.begin()
        return kernel.built

    def begin(self) -> None:
        """Have those built that are waiting."""
        waiting, self._waiting = self._waiting, []
        try:
            if waiting:
                self._submit(functools.partial(_build_kernels, waiting))
        except BaseException as error:  # no thread, Ctrl-C: nobody may wait for these
            for kernel in waiting:
                kernel.built.set_exception(error)
            raise


@dataclass
class _Kernel:
    """One that is to be built."""

    build: Callable[[], Any]
    builder: CppBuilder
    built: Future[None] = field(default_factory=Future)


def _builder_of(task: Callable[[], Any]) -> CppBuilder | None:
    """The builder of the kernel, where ``task`` builds one."""
    if not isinstance(task, functools.partial) or task.func is not _worker_compile_cpp:
        return None
    _, builders = task.args
    return builders[0] if len(builders) == 1 else None


def _build_kernels(waiting: Sequence[_Kernel]) -> None:
    alike: dict[str, list[CppBuilder]] = {}
    for kernel in waiting:
        options = CppBuilder(name="o", sources="i", BuildOption=kernel.builder._build_option)
        alike.setdefault(options.get_command_line(), []).append(kernel.builder)
    for builders in alike.values():
        try:
            _build_library({_key_of(builder): builder for builder in builders})
        except Exception:  # of any kind: what is wrong with one its own build will say
            log.warning("could not compile C++ kernels together; they are compiled one by one", exc_info=True)
    for kernel in waiting:
        try:
            kernel.built.set_result(kernel.build())
        except BaseException as error:
            kernel.built.set_exception(error)


def _key_of(builder: CppBuilder) -> str:
    return Path(builder.get_target_file_path()).name.partition(".")[0]


def _build_library(builders: Mapping[str, CppBuilder]) -> None:
    """Build these kernels, which have the same options, by their keys, where no other process has or does."""
    with ExitStack() as locks:
        for key in sorted(builders):  # in an order: processes whose groups overlap wait for one another
            path = os.path.join(get_lock_dir(), f"{key}.group.lock")
            locks.enter_context(FileLock(path, timeout=LOCK_TIMEOUT))
        libraries = {key: Path(builder.get_target_file_path()) for key, builder in builders.items()}
        missing = {key: path for key, path in libraries.items() if not path.exists()}
        if len(missing) < 2:
            return
        sources = {key: path.with_suffix(".cpp").read_text() for key, path in missing.items()}
        options = next(iter(builders.values()))._build_option
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="zerograph-") as folder:
            source = Path(folder, "kernels.cpp")
            source.write_text(joined(sources))
            library = CppBuilder(name="kernels", sources=str(source), BuildOption=options, output_dir=folder)
            library.build()
            for target in missing.values():
                _place(Path(library.get_target_file_path()), target)


def _place(library: Path, target: Path) -> None:
    """Have ``target`` be ``library`` at once, for whoever reads it meanwhile."""
    try:
        target.hardlink_to(library)
    except FileExistsError:
        pass  # a process that builds one by one was faster
    except OSError:  # a file system without links
        os.replace(shutil.copyfile(library, library.with_name(f"{target.name}.copy")), target)


def prepare_kernels() -> Future[None]:
    """Check the CPU's instruction sets and precompile the header of kernels, in a thread, once in a process.

    Inductor does both when it meets the first kernel, and everything waits for the C++ compiler: here it is asked for a
    kernel that is never built. Other processes of the host wait for Inductor's file locks and find the files. A step
    that fails here fails again with the first kernel, which does all that is missing. Seen in 2.13 and in older
    sources.
    """
    return _prepared(os.getpid())


@functools.cache
def _prepared(process: int) -> Future[None]:
    """By process: a fork has no threads."""

    def prepare() -> None:
        _check_when_read()
        CppPythonBindingsCodeCache.load_pybinding_async([], 'extern "C" void kernel() {}', submit_fn=lambda _: None)

    thread = ThreadPoolExecutor(1, "zerograph-headers")
    try:
        return thread.submit(prepare)
    finally:
        thread.shutdown(wait=False)


def vector_instructions() -> str:
    """Those that Inductor writes C++ for, which its own keys leave out. Seen in 2.11, 2.13."""
    _check_when_read()  # else all would be checked, where the first one is taken
    return str(pick_vec_isa())


def _check_when_read() -> None:
    """Patch Inductor to check only those instruction sets of an x86 CPU that it asks for; idempotent.

    Each check compiles and loads a program, for 1.5 to 3 seconds of CPU. Inductor checks all that the CPU has, and then
    takes the first. It has no setting for it but one that checks none. Seen in 2.13 and in older sources.
    """
    sets = cpu_vec_isa.x86_isa_checker()
    if sys.platform == "linux" and sets:
        known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= set(sets)]
        cpu_vec_isa.valid_vec_isa_list = lambda: _Valid(known)  # type: ignore[assignment]


class _Valid:
    """Those of ``sets`` that pass their check, which torch caches, in order: as much of a list as Inductor uses."""

    def __init__(self, sets: Sequence[Any]) -> None:
        self._sets = sets

    def __iter__(self) -> Iterator[Any]:
        return filter(None, self._sets)

    def __bool__(self) -> bool:
        return any(self)

    def __getitem__(self, index: int) -> Any:
        return next(itertools.islice(self, index, None))
