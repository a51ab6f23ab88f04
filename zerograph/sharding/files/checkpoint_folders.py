"""Checkpoints of ``torch.distributed.checkpoint`` on hosts that share no folder: a warning when one is saved.

Every rank writes its shards to one path. Where that is another folder on each host, nothing fails until the checkpoint
is loaded, and then other hosts' shards are missing on all.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from zerograph.sharding.torch_private import before, files_written

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemWriter

log = logging.getLogger(__name__)


def watch_checkpoints() -> None:
    """From now on look, when all ranks have written, whether all files are there. Idempotent; for the process."""
    from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter  # late: it takes 0.1 s

    for writer in (FileSystemWriter, HuggingFaceStorageWriter):
        before(writer, "finish", _tell_what_is_elsewhere)


def _tell_what_is_elsewhere(writer: FileSystemWriter, metadata: Any, results: Any) -> None:
    """On the rank that writes the metadata, with what each rank says that it has written."""
    written = files_written(writer, results)
    missing = [path for path in written if not path.exists()]
    if missing:
        log.warning(
            "%d of the %d files of the checkpoint in %s, %s for one, are not there on host %s, whose rank wrote the "
            "metadata: the hosts share no such folder, and none of them can load the checkpoint\n\n"
            "hint: save to a folder that all hosts mount, or bring the files of all hosts into one before loading",
            len(missing), len(written), writer.path, missing[0].name, os.uname().nodename,
        )  # fmt: skip
