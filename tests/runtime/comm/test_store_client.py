"""Whoever asks a store that does not answer is told so in time: behind a link that is cut, and after its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from links import Link

from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.comm.store_client import StoreClient, StoreLost


def behind(link: Link) -> dist.Store:
    return dist.TCPStore("127.0.0.1", link.port, 2, is_master=False, timeout=timedelta(seconds=20))


def served() -> tuple[dist.Store, Link]:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    return store, Link(store.port)


def test_questions_and_answers(tmp_path: Path) -> None:
    store = StoreClient(dist.FileStore(str(tmp_path / "store"), 1), "test", 0, 5.0)
    store.set("key", "value")
    assert (store.get("key"), store.has("key"), store.has("other")) == ("value", True, False)
    assert (store.first("won", "mine"), store.first("won", "theirs")) == ("mine", "mine")
    assert (store.count("beats", 2), store.count("beats")) == (2, 2)
    store.delete(["key", "won"])
    assert not store.has("key") and store.first("won", "theirs") == "theirs"
    assert store.say_goodbye("left") and store.has("left")


QUESTIONS: dict[str, Callable[[Rendezvous], object]] = {
    "check": lambda rendezvous: rendezvous.check("in a test"),
    "wait": lambda rendezvous: rendezvous.wait({0: "came/0"}, "for a test"),
    "report": lambda rendezvous: rendezvous.reports([0]) and rendezvous.check("in a test"),
    "meet": lambda rendezvous: rendezvous.meet(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_cut_link_is_an_error_after_the_timeout(question: str) -> None:
    server, link = served()
    rendezvous = Rendezvous(behind(link), "test", 1, 2, 1.0)
    rendezvous.report("is here")
    link.cut()
    start = time.monotonic()
    with pytest.raises(StoreLost, match="does not answer rank 1: "):
        QUESTIONS[question](rendezvous)
    assert 0.9 < time.monotonic() - start < 10
    start = time.monotonic()
    rendezvous.fail("ValueError: boom")  # which another error is on its way to say
    with pytest.raises(StoreLost, match="a question has waited for more than 1 s"):
        rendezvous.check("in a test")
    assert time.monotonic() - start < 0.5, "nobody waits again for what is known to be lost"
    link.mend()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            rendezvous.check("in a test")
            break
        except StoreLost:
            time.sleep(0.05)
    else:
        pytest.fail("a link that was mended is used again")
    del server


ENDS = """
import sys, torch.distributed as dist
from datetime import timedelta
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.comm.store_client import StoreLost
rendezvous = Rendezvous(dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=False), "test", 1, 2, 0.5)
rendezvous.report("is here")
print("ready", flush=True)
sys.stdin.readline()
try:
    rendezvous.check("in a test")
except StoreLost:
    print("lost", flush=True)
"""


def test_a_process_ends_although_its_store_does_not_answer() -> None:
    server, link = served()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, str(link.port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    link.cut()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "lost\n"
    assert process.wait(20) == 0
    del server
