"""Files that cannot be read or written, or hold something else, are errors that name the file.

Tests ``core/files/kinds.py`` too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import plan_file, run_of

from zerograph.core.errors import ConfigError
from zerograph.core.files.reading import check_writable, read_plan, read_run, stored_digest


def test_a_plan_that_was_changed_is_read_where_that_is_the_point(tmp_path: Path) -> None:
    path, file = tmp_path / "plan.json", plan_file()
    path.write_text(file.to_json().replace("model.py:make", "other.py:make"))
    with pytest.raises(ConfigError, match=r"plan\.json: the plan was changed"):
        read_plan(path)
    assert read_plan(path, verify=False).model == "other.py:make"
    assert stored_digest(path) == file.digest != read_plan(path, verify=False).digest


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = plan_file()
    (tmp_path / "plan.json").write_text(file.to_json())
    (tmp_path / "run.json").write_text(run_of(file).to_json())
    assert read_plan(tmp_path / "plan.json") == file
    assert stored_digest(tmp_path / "plan.json") == file.digest
    assert read_run(tmp_path / "run.json") == run_of(file)


@pytest.mark.parametrize("read", [read_plan, read_run])
@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'"text"', b"\xff\xfe\x00", b'{"digest', b"{}"])
def test_what_is_something_else_is_reported_with_its_name(tmp_path: Path, read: object, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)  # type: ignore[operator]
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("read", [read_plan, read_run, stored_digest])
def test_what_cannot_be_read(tmp_path: Path, read: object) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        read(tmp_path / "none.json")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path)  # type: ignore[operator]


def test_a_look_at_what_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    check_writable(new)
    check_writable(old)
    assert not new.exists() and old.read_text() == "kept"
    with pytest.raises(ConfigError, match=r"(?s)cannot write .*hint: -o FILE in a folder that exists"):
        check_writable(tmp_path / "none" / "file")
    with pytest.raises(ConfigError, match="Is a directory"):
        check_writable(tmp_path)
