"""A thread beside the caller's."""

from __future__ import annotations

import threading

import pytest
import torch

from zerograph.runtime.offload.background import Background


def test_works_one_after_another_and_waits_for_all() -> None:
    background, go, done = Background("test"), threading.Event(), list[int]()

    def first() -> None:
        go.wait()
        done.append(1)

    futures = [background.start(first), background.start(lambda: done.append(2))]
    assert not background.is_idle and not done
    go.set()
    background.wait()
    assert done == [1, 2] and background.is_idle
    assert [future.result() for future in futures] == [None, None]


def test_an_error_is_for_who_asks_for_the_result() -> None:
    background = Background("test")

    def fails() -> None:
        raise MemoryError("no room")

    future = background.start(fails)
    background.wait()
    with pytest.raises(MemoryError, match="no room"):
        future.result()


def test_work_does_not_wait_for_itself() -> None:
    background = Background("test")
    assert background.start(background.wait).result(timeout=10) is None


def test_a_thread_is_on_the_device_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without two accelerators cannot show where a thread is, but it can show where it was sent."""
    sent = list[tuple[str, torch.device]]()
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda device: sent.append((threading.current_thread().name, device))
    )
    for name, device in (("third", torch.device("cuda", 3)), ("host", torch.device("cpu")), ("any", None)):
        background = Background(name)
        for _ in range(2):
            background.start(lambda: None, device).result(timeout=10)
    assert sent == [("third_0", torch.device("cuda", 3))]
