"""Checkpoints of ``torch.distributed.checkpoint``: what is done when one is saved or loaded.

Every rank writes its shards to one path. Where that is another folder on each host, nothing fails until the checkpoint
is loaded, and then other hosts' shards are missing on all: the rank that writes the metadata warns. Where it holds an
older checkpoint, ranks write over its shards one by one: its metadata goes first, as a mix of both would load.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from torch import nn

from zerograph.runtime import delayed
from zerograph.sharding.torch_private import before, files_written, metadata_file

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemWriter

log = logging.getLogger(__name__)


def watch_checkpoints() -> None:
    """From now on do so. Idempotent; for the process."""
    from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter  # late: it takes 0.1 s
    from torch.distributed.checkpoint import state_dict as whole_models

    for writer in (FileSystemWriter, HuggingFaceStorageWriter):
        before(writer, "finish", _tell_what_is_elsewhere)
    before(FileSystemWriter, "prepare_global_plan", _drop_old_metadata)
    before(whole_models, "_load_model_state_dict", _settle)


def _drop_old_metadata(writer: FileSystemWriter, plans: Any) -> None:
    """On the rank that plans, before any writes."""
    if (path := metadata_file(writer)) is not None:
        path.unlink(missing_ok=True)


def _settle(model: nn.Module, *_: Any) -> None:
    """Of a whole checkpoint that one rank has read, values are written into parameters before their modules load."""
    delayed.settle(model.parameters())


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
