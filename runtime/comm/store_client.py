"""The key-value store of a process group, asked in a way that ends.

A ``TCPStore`` waits for its server without a timeout: on a host whose link is cut, a question has no answer for a
quarter of an hour or for ever, and whoever asked hangs. Here a thread asks, and its caller gives up in time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from zerograph.core.errors import RankError

T = TypeVar("T")


class StoreLost(RankError):
    """The store of the process group does not answer: the process that serves it ended, or the link to it is cut."""


class StoreClient:
    """A store under a prefix; every call raises :class:`StoreLost` where no answer comes within ``timeout`` seconds.

    One thread asks one question after another, as the connection does. It is a daemon: a question without an answer
    keeps no process from ending.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, timeout: float) -> None:
        self.raw = dist.PrefixStore(prefix, store)
        self.rank, self.timeout = rank, timeout
        self._pid = 0  # of the process whose thread asks
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]
        self._overdue: Future[Any] | None = None  # what somebody has given up

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.raw.set(key, value))

    def get(self, key: str) -> str:
        return self._ask(lambda: self.raw.get(key)).decode()

    def has(self, key: str) -> bool:
        return self._ask(lambda: self.raw.check([key]))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask(lambda key=key: self.raw.delete_key(key))  # type: ignore[misc]

    def first(self, key: str, value: str) -> str:
        """Set ``key`` unless it is set; returns what it holds."""
        return self._ask(lambda: self.raw.compare_set(key, "", value)).decode()

    def count(self, key: str, more: int = 0) -> int:
        """A counter that ranks share, raised by ``more``."""
        return self._ask(lambda: self.raw.add(key, more))

    def say_goodbye(self, key: str) -> bool:
        """Set ``key`` at the end of the process, unless the store is lost; returns whether it was set."""
        if self._is_stuck:
            return False
        try:
            self.raw.set(key, "")
        except RuntimeError:  # it ended with rank 0, and then there is nobody to tell
            return False
        return True

    @property
    def _is_stuck(self) -> bool:
        return self._overdue is not None and not self._overdue.done()

    def _ask(self, question: Callable[[], T]) -> T:
        if self._pid != os.getpid():  # threads do not outlive a fork
            self._pid, self._questions = os.getpid(), queue.SimpleQueue()
            threading.Thread(target=_answer, args=(self._questions,), name="zerograph-store", daemon=True).start()
        elif self._is_stuck:
            raise self._lost(f"a question has waited for more than {self.timeout:.0f} s")
        answer = Future[T]()
        self._questions.put((answer, question))
        try:
            return answer.result(self.timeout)
        except TimeoutError as error:
            self._overdue = answer
            raise self._lost(f"no answer within {self.timeout:.0f} s") from error
        except RuntimeError as error:
            raise self._lost(str(error).partition("\n")[0]) from error

    def _lost(self, why: str) -> StoreLost:
        return StoreLost(
            f"the store of the process group does not answer rank {self.rank}: {why}",
            "it ends with the process that serves it, torchrun's or that of rank 0: look at their output, and at the "
            "link between this host and theirs",
        )


def _answer(questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        answer, question = questions.get()
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)
