"""Export of a whole model as one plain safetensors file, streamed: :func:`export`.

Training checkpoints need nothing from here: ``torch.distributed.checkpoint`` saves and loads sharded models.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from zerograph.core.arguments import require
from zerograph.core.errors import CheckpointError
from zerograph.runtime.comm.rendezvous import noticed
from zerograph.sharding.adopt import model_given
from zerograph.sharding.gathered import group_of
from zerograph.sharding.shards import agree, gather_to_first, is_first

log = logging.getLogger(__name__)

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names safetensors gives to dtypes."""


def export(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the parameters and persistent buffers of ``model`` to ``path``, full and plain, as safetensors.

    All ranks call this together; rank 0 writes, and holds at most one full parameter at a time. Names are those of
    the plain model (``_orig_mod.`` is dropped). Tied tensors are stored once, under their first name; the file's
    metadata maps every other name to it, as ``safetensors.torch.save_model`` does, so that
    ``safetensors.torch.load_model`` and ``load_state_dict(load_file(path), strict=False)`` restore a plain model.
    ``path`` is replaced at once when all is written, and left as it was when something fails. A file that is there
    keeps its mode, and a link goes on to name it.

    Works the same for a model that is not sharded.

    Args:
        model: a sharded or plain model.
        path: the file to write.

    Raises:
        CheckpointError: on every rank, when rank 0 cannot write, or the format cannot hold a tensor of the model.
        ConfigError: ``model`` is no model, or ``path`` no path of a file.
    """
    model = model_given(model, "zerograph.export")
    named = isinstance(path, str | os.PathLike) and bool(Path(path).name)
    require(named, f"path must be the path of a file, got {path!r:.80}", 'for example "model.safetensors"')
    tensors, aliases = unique_tensors(model)
    group, file = group_of(model), _File(Path(path))
    try:
        agree(group, partial(file.open, tensors, aliases), CheckpointError, first=True)
        for name in _file_order(tensors):
            with noticed(group, f"to gather {name} in zerograph.export()"):
                pieces = gather_to_first(tensors[name])
            agree(group, partial(file.write, pieces), CheckpointError, first=True)
            pieces.clear()
        agree(group, file.commit, CheckpointError, first=True)
    finally:
        if is_first(group):
            file.discard()


def unique_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by plain name, each object once, and its other names: alias to first name."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = plain_name(key)
        if not isinstance(value, Tensor):
            log.warning("%s is a %s, which safetensors cannot hold: left out", name, type(value).__name__)
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value
    return tensors, aliases


def plain_name(key: str) -> str:
    """The name in the model as the user wrote it, without what ``torch.compile`` puts in front of modules."""
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def _file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide dtypes first, which keeps every tensor aligned to its element size."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def _header(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> tuple[bytes, int]:
    """The file's head, and the bytes of all tensors that follow it.

    Raises:
        CheckpointError: a tensor without values, or of a dtype that safetensors does not know.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name in _file_order(tensors):
        tensor, begin = tensors[name], end
        if tensor.is_meta:
            raise CheckpointError(f"{name} is on the meta device", "call zerograph.materialize(model) first")
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors cannot hold", "convert it first")
        end += tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # So that the data begins at a multiple of 8 bytes, and tensors can be mapped.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


class _File:
    """A file that appears under its name only when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Behind links, which stay. In the same folder: only within a file system does a rename replace a file at once.
        self._target = Path(os.path.realpath(path))
        self._partial = self._target.with_name(f".{self._target.name}.{os.getpid()}.partial")
        self._stream: IO[bytes] | None = None

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror or error}",
                "check the folder, its permissions and its free space; the old file, if any, is as it was",
            ) from error

    def open(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        head, size = _header(tensors, aliases)
        if os.path.isdir(self.path):  # a rename would say so, when all has been gathered and written
            raise CheckpointError(f"cannot write {self.path}: it is a folder", f"{self.path / 'model.safetensors'}")
        with self._named():
            self._stream = self._partial.open("wb")
            if self._target.exists():
                shutil.copymode(self._target, self._partial)  # before there is anything to read in it
            _reserve(self._stream.fileno(), len(head) + size)
            self._stream.write(head)

    def write(self, pieces: Iterable[Tensor]) -> None:
        assert self._stream is not None
        with self._named():
            for piece in filter(torch.numel, pieces):
                self._stream.write(piece.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)

    def commit(self) -> None:
        assert self._stream is not None
        with self._named():
            self._stream.flush()
            # Before the rename: after a crash of the machine the name could else stand for an empty file.
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._partial.replace(self._target)

    def discard(self) -> None:
        """Remove what was not committed."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # flushing to the disk that was full
                self._stream.close()
            self._partial.unlink(missing_ok=True)


def _reserve(descriptor: int, size: int) -> None:
    """Take the space now: a full disk shows before anything is gathered."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
