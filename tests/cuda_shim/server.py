"""Runs scripts of this folder, each in a process that is forked from this one, which has imported torch, Triton and the
models of transformers: that takes longer than most scripts do.

`python server.py`, in a process with the shim loaded. A line that is read is JSON: a module, the environment that it is
to have, and the arguments of its `main`. The answer is a line of JSON: what `main` returns, or null after an error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from typing import TextIO

import pretend  # noqa: F401  # for all scripts
import segments
import torch
from torch._inductor.async_compile import shutdown_compile_workers
from torch._inductor.fx_passes import joint_graph, post_grad

import zerograph.dryrun.compile_only  # noqa: F401


def prepare() -> None:
    """Have all here that no script changes: models are imported when they are made, and patterns traced when needed."""
    os.environ.pop("LD_PRELOAD", None)  # with which each ptxas loads torch, which takes longer than what it assembles
    with torch.device("meta"):
        for make in segments.MODELS.values():
            make()
    for module in (joint_graph, post_grad):
        module.lazy_init(torch.device("cpu"))
    gc.collect()
    gc.freeze()


def serve(requests: TextIO, answers: TextIO) -> None:
    """Until nobody asks any more."""
    for request in requests:
        module, environment, arguments = json.loads(request)
        child = os.fork()
        if not child:
            os.environ |= environment
            print(json.dumps(importlib.import_module(module).main(*arguments)), file=answers, flush=True)
            shutdown_compile_workers()  # which outlive a process that just ends
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print("null", file=answers, flush=True)


if __name__ == "__main__":
    told, sys.stdout = sys.stdout, sys.stderr  # where scripts write what nobody reads
    prepare()
    serve(sys.stdin, told)
