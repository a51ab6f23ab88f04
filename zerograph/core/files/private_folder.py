"""A folder of files that one user keeps between runs. No torch in here.

A file that is read may be unpickled, which runs code. So nothing is read that another user could have written, and
nothing that is not, byte for byte, what was written.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

LIMIT = 2**30
"""Bytes of one folder, by default."""
_DIGEST = hashlib.sha256().digest_size


class PrivateFolder:
    """The files in ``path``, made when the first is written. Beyond ``limit`` bytes, those go that were read or written
    longest ago."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.path, self.limit = path, limit

    def read(self, name: str) -> bytes | None:
        """The bytes that were written as ``name``. None without a file, and with a warning where it is damaged or
        cannot be trusted."""
        path = self.path / name
        try:
            # The open file is asked whose it is: by its path another user could exchange it in between.
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                _refuse_others(self.path, os.lstat(self.path))
                _refuse_others(path, os.fstat(file.fileno()))
                digest, data = file.read(_DIGEST), file.read()
            if hashlib.sha256(data).digest() != digest:
                raise OSError(f"{path} is damaged")
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("not read: %s", error)
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        """Keep ``data`` as ``name``, whole or not at all; with a warning where the folder cannot be used."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_others(self.path, os.lstat(self.path))
            # For this user alone, and under its name only once it is complete: ranks write the same file.
            handle, unfinished = tempfile.mkstemp(dir=self.path)
            try:
                with open(handle, "wb") as file:
                    file.write(hashlib.sha256(data).digest())
                    file.write(data)
                os.replace(unfinished, self.path / name)
            except BaseException:
                os.unlink(unfinished)
                raise
            self._prune()
        except OSError as error:
            log.warning("not written: %s", error)

    def _prune(self) -> None:
        found = []
        for entry in os.scandir(self.path):
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another rank's, finished or pruned meanwhile
            found.append((facts.st_mtime, facts.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit:
                return
            Path(path).unlink(missing_ok=True)
            total -= size


def _refuse_others(path: Path, facts: os.stat_result) -> None:
    """Raise OSError where another user owns what ``facts`` tell of, or may write to it."""
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{path} belongs to another user, or others may write to it")
