"""Files that are read are those that this user wrote, whole; the oldest make room for new ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zerograph.core.files.private_folder import PrivateFolder


@pytest.fixture
def folder(tmp_path: Path) -> PrivateFolder:
    found = PrivateFolder(tmp_path / "below" / "folder")
    found.write("one", b"first")
    return found


def test_what_was_written_is_read(folder: PrivateFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.write("two", b"second")
    folder.write("one", b"again")
    assert (folder.read("one"), folder.read("two"), folder.read("three")) == (b"again", b"second", None)
    assert PrivateFolder(folder.path / "nowhere").read("one") is None
    assert sorted(os.listdir(folder.path)) == ["one", "two"]
    assert not caplog.records


def test_nobody_else_may_look(folder: PrivateFolder) -> None:
    assert (folder.path.stat().st_mode & 0o777, (folder.path / "one").stat().st_mode & 0o777) == (0o700, 0o600)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _shared(path: Path) -> None:
    path.chmod(0o620)


def _in_a_shared_folder(path: Path) -> None:
    path.parent.chmod(0o702)


@pytest.mark.parametrize("spoil", [_cut, _changed, _emptied, _linked, _shared, _in_a_shared_folder])
def test_a_file_that_may_be_anothers_is_not_read(
    folder: PrivateFolder, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(folder.path / "one")
    assert folder.read("one") is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(folder.path) in caplog.text


def test_a_folder_of_another_user_is_not_used(
    folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: folder.path.stat().st_uid + 1)
    folder.write("two", b"second")
    assert folder.read("one") is None
    assert os.listdir(folder.path) == ["one"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_what_cannot_be_written_leaves_nothing(
    folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    folder.write("one", b"again")
    monkeypatch.undo()
    assert "no space left" in caplog.text
    assert os.listdir(folder.path) == ["one"]
    assert folder.read("one") == b"first"


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "folder", limit=350)
    for age, name in enumerate(("old", "older", "oldest")):
        folder.write(name, bytes(68))  # 100 with its digest
        os.utime(folder.path / name, (1000 - age, 1000 - age))
    assert folder.read("oldest") is not None  # which makes it the youngest
    folder.write("new", bytes(68))
    assert sorted(os.listdir(folder.path)) == ["new", "old", "oldest"]
    folder.write("large", bytes(400))
    assert os.listdir(folder.path) == []
