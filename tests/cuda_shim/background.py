"""When kernels for a GPU are submitted and waited for; for `server.py`."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pretend
import segments
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from zerograph.compiler.lowering import segments as lowering
from zerograph.compiler.lowering.torch_private import kernels_in_background
from zerograph.dryrun.compile_only import compile_only


def main(name: str, how: str) -> dict[str, Any]:
    """The seconds that a step of that model takes, the order of submissions and waits, and how many binaries each graph
    with kernels of Triton keeps; ``how`` is "background" or, as Inductor does by itself, "waiting"."""
    pretend.pretend((8, 0))
    config.compile_threads, config.worker_start_method = 2, "fork"
    events, graphs = list[str](), list[Any]()
    triton, wait, compiled = AsyncCompile.triton, AsyncCompile._wait_futures, lowering.compile_segment

    def submitted(self: AsyncCompile, *args: Any, **kwargs: Any) -> Any:
        events.append("submit")
        return triton(self, *args, **kwargs)

    def waited(self: AsyncCompile, scope: dict[str, Any]) -> None:
        events.append("wait")
        wait(self, scope)

    def kept(gm: torch.fx.GraphModule) -> Any:
        graphs.append(compiled(gm))
        return graphs[-1]

    AsyncCompile.triton, AsyncCompile._wait_futures = submitted, waited  # type: ignore[method-assign]
    lowering.compile_segment = kept
    AsyncCompile.wait_pool_ready()
    begin = time.perf_counter()
    with kernels_in_background() if how == "background" else contextlib.nullcontext():
        compile_only(
            lambda: (segments.MODELS[name](), segments.batch(name)), world_size=4, device="cuda:0",
            dtype=torch.bfloat16, bucket_size="1MB", stage=3, compute="inductor",
        )  # fmt: skip
    seconds = time.perf_counter() - begin
    binaries = [len(graph._triton_bundle.kernel_artifacts) for graph in graphs if ".run(" in graph.source_code]
    return {"seconds": seconds, "events": events, "binaries": binaries}
