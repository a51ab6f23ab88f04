"""The native core: shared-memory collectives, kernels, file I/O (csrc/). Addresses are those of `Tensor.data_ptr()`."""

from collections.abc import Sequence
from enum import Enum

class DType(Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2
    float64 = 3
    raw1 = 4
    raw2 = 5
    raw4 = 6
    raw8 = 7

class ConnectError(OSError): ...
class MismatchError(RuntimeError): ...
class PeerError(RuntimeError): ...

class Mailbox:
    control_fd: int
    pid: int
    bytes: int
    def __init__(self, rank: int, world: int, token: int) -> None: ...
    def connect(self, ranks: Sequence[tuple[int, int]]) -> None: ...
    def start_gather(self, tag: int, pieces: Sequence[tuple[int, int, DType, DType]]) -> int: ...
    def finish_gather(self, ticket: int, outs: Sequence[tuple[int, int]], timeout: float) -> None: ...
    def start_reduce(self, tag: int, pieces: Sequence[tuple[int, int, int, DType]]) -> int: ...
    def finish_reduce(self, ticket: int, outs: Sequence[tuple[int, DType]], scale: float, timeout: float) -> None: ...
    def start_all_reduce(self, tag: int, pieces: Sequence[tuple[int, int, int, DType]]) -> int: ...
    def finish_all_reduce(
        self, ticket: int, outs: Sequence[tuple[int, DType]], scale: float, timeout: float
    ) -> None: ...
    def barrier(self, timeout: float) -> None: ...
    def abort(self, text: str) -> None: ...
    def aborted(self) -> bool: ...
    def missing(self, ticket: int) -> list[int]: ...
    def is_present(self, rank: int) -> bool: ...
    def recover(self, generation: int) -> None: ...
    def close(self, linger: float = 5.0) -> None: ...

def kernel_targets() -> list[str]: ...
def convert(target: str, src: int, src_dtype: DType, dst: int, dst_dtype: DType, count: int) -> None: ...
def reduce(
    target: str, sources: Sequence[int], dtype: DType, count: int, scale: float, out: int, out_dtype: DType
) -> None: ...

class Wire(Enum):
    fp8 = 0
    int8 = 1
    int4 = 2
    sign = 3

def encode(wire: Wire, src: int, dtype: DType, count: int, dst: int, target: str = "") -> None: ...
def decode(wire: Wire, src: int, count: int, dst: int, dtype: DType, target: str = "") -> None: ...

class Algorithm(Enum):
    adam = 0  # AdamW with decoupled=True
    sgd = 1
    adagrad = 2
    lion = 3

class Rule:
    """How the parameters of one group are updated; names as in torch. lion's weight decay is always decoupled."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        lr: float,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        amsgrad: bool = False,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        lr_decay: float = 0.0,
        maximize: bool = False,
    ) -> None: ...

class TensorSet:
    """Addresses and dtypes of the tensors of one group, which stay the same from step to step.

    ``params``: address, dtype (float32, bfloat16, float16) and number of elements of each. ``states``: for each state
    one address per parameter: adam's exp_avg, exp_avg_sq and, for amsgrad, max_exp_avg_sq; sgd's momentum_buffer;
    adagrad's sum; lion's exp_avg. Float32; adam's moments also bfloat16, not with amsgrad. ``copies``: where each
    updated parameter is written once more; may be empty. ``steps``: each parameter's count, one float32, which an
    update increments before it uses it; may be empty for sgd and lion.
    """

    def __init__(
        self,
        params: Sequence[tuple[int, DType, int]],
        states: Sequence[Sequence[int]],
        state_dtype: DType,
        copies: Sequence[int],
        copy_dtype: DType,
        steps: Sequence[int],
    ) -> None: ...

class Ticket:
    """A step that runs beside its caller. A ticket that is dropped waits as well."""

    @property
    def ended(self) -> int:
        """When it was done, in nanoseconds since 1970; 0 while it runs."""
    def done(self) -> bool: ...
    def wait(self) -> bool:
        """True if a gradient was not finite. RuntimeError in a process that was forked after the step began."""

def update(
    groups: Sequence[tuple[Rule, TensorSet, Sequence[int], DType, Sequence[bool]]],
    factor: float = 1.0,
    target: str | None = None,
) -> Ticket:
    """Starts a step and returns. Memory must live until the ticket was waited for.

    For each group: rule, tensors, addresses of the gradients (0: the parameter is left alone), their dtype, and for
    sgd whether this is each parameter's first step (may be empty: it is not). Gradients are multiplied by ``factor``
    as they are read. ``target``, here and below, is for tests.
    """

def squares(pieces: Sequence[tuple[int, DType, int]], target: str | None = None) -> list[float]:
    """Sums in float64 of the squares of every 65,536 elements of each piece, counted from its beginning, the same
    whatever the number of threads and whatever else is summed. Not finite if an element is not."""

def accumulate(
    dst: int, dst_dtype: DType, src: int, src_dtype: DType, count: int, target: str | None = None
) -> None: ...
def cast(src: int, src_dtype: DType, dst: int, dst_dtype: DType, count: int) -> None: ...
def stream(param: int, grad: int, grad_dtype: DType, exp_avg: int, exp_avg_sq: int, copy: int, count: int) -> None:
    """For benchmarks: the memory traffic of an AdamW step (``copy``: bfloat16, or 0) with one addition per state."""

def pool_threads() -> int: ...
def set_pool_threads(threads: int) -> None: ...
def simd_target() -> str:
    """The kernels in use. ValueError if ZEROGRAPH_SIMD names none that this processor runs."""

class Direction(Enum):
    read = 0
    write = 1

class Priority(Enum):
    now = 0
    soon = 1
    later = 2

class FaultPoint(Enum):
    read = 0
    write = 1
    submit = 2

class FaultEffect(Enum):
    error = 0
    cut = 1
    nothing = 2

class IoEngine:
    name: str
    notes: str
    stats: dict[str, int]
    def __init__(
        self,
        engine: str = "auto",
        *,
        depth: int = 32,
        threads: int = 8,
        block: int = 8388608,
        buffer: int = 4194304,
        buffers: int = 8,
        refuse: int = 0,
    ) -> None: ...
    def attach(self, fd: int, path: str, memory_alignment: int = 1, offset_alignment: int = 1) -> int: ...
    def detach(self, file: int) -> None: ...
    def register_memory(self, address: int, bytes: int) -> bool: ...
    def submit(
        self, direction: Direction, segments: Sequence[tuple[int, int, int, int, bool]], priority: Priority
    ) -> int: ...
    def wait(self, ticket: int, timeout: float = -1.0) -> tuple[int, int]:
        """When it began and ended to move bytes, in nanoseconds since 1970; both 0 where there were none."""

    def done(self, ticket: int) -> bool: ...
    def finished(self) -> list[int]: ...
    def inject(self, faults: Sequence[tuple[FaultPoint, int, int, FaultEffect, int]]) -> None: ...
    def close(self) -> None: ...

def has_uring() -> bool: ...
def probe_uring() -> int: ...

class Naming(Enum):
    automatic = 0
    unlinked = 1
    named = 2

class Slab:
    fd: int
    path: str
    bytes: int
    direct: bool
    notes: str
    memory_alignment: int
    offset_alignment: int
    def __init__(self, folder: str, bytes: int, direct: bool = True, naming: Naming = ...) -> None: ...
    def flush(self, offset: int, bytes: int) -> None: ...
    def drop(self, offset: int, bytes: int) -> None: ...

def remove_leftovers(folder: str) -> int: ...

class HugeMemory:
    address: int
    def __init__(self, bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class FileMapping:
    address: int
    def __init__(self, parts: Sequence[tuple[int, int, int]]) -> None: ...
    def drop(self, offset: int, bytes: int) -> None: ...
    def any_resident(self, offset: int, bytes: int) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
