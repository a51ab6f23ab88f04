"""The private names of torch that compiling without running needs, where no public name exists."""

from __future__ import annotations

import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, TorchRuntimeError, Unsupported, UserError
from torch._subclasses import fake_tensor

FakeTensorMode = fake_tensor.FakeTensorMode
"""Inside of one, tensors have no memory; torch documents it under this private path. Seen in 2.11, 2.13."""

NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
"""Errors of fake tensors where a model needs values that they do not have. Seen in 2.11, 2.13."""

BackendFailed = BackendCompilerFailed
"""Dynamo's error around an exception of a backend. Seen in 2.11, 2.13."""


class Ended(ShortenTraceback):
    """Raised by a backend that has all it wants of a call: Dynamo hands exceptions of this class of its own on as they
    are. There is no public way to end there. Seen in 2.11, 2.13."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


Untraced = Unsupported | UserError | TorchRuntimeError
"""Dynamo's errors where it cannot trace a model; ``torch._dynamo.exc`` is documented in tutorials only. Seen in 2.11,
2.13."""


def breaks_graph(error: Exception) -> bool:
    """Whether ``error`` tells of a graph break, and not of an exception of the traced code, which Dynamo reports as a
    break of that name. Seen in 2.11, 2.13."""
    return isinstance(error, UserError) or (isinstance(error, Unsupported) and error.gb_type != "Observed exception")


def simulate_group(rank: int, world_size: int) -> None:
    """Make the default process group one of ``world_size`` ranks in this one process, whose collectives do nothing.
    Only torch's own tests have one. Seen in 2.11, 2.13."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend; slow to import

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
