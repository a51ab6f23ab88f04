"""What the server of ranks imports last: a small model is compiled, so that the first one of each rank finds patterns,
decompositions and caches, which torch makes once in a process. Nothing of it is distributed: ranks would take what is
cached of a group that was for their own. With a torch that was built for an accelerator nothing is, whether there is
one or not: autograd's first backward, which here is one of a pattern, starts threads for it, and refuses to run in a
fork."""

from __future__ import annotations

import gc
import os

import torch
from fake_device import device
from torch import nn
from torch._inductor.fx_passes import joint_graph

import zerograph.runtime.comm.two_level  # noqa: F401

if not os.environ.get(device.LIBRARY) and torch.accelerator.current_accelerator() is None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    torch.compile(model, backend="aot_eager")(torch.zeros(4, 8))
    torch.compiler.reset()
    joint_graph.lazy_init(torch.device("cpu"))
    gc.collect()
    gc.freeze()
