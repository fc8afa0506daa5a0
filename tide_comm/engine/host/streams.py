"""Threads as streams: each runs its items in order; events order one behind another as on a GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from tide_comm.errors import TideError


class HostEvent:
    """Done once, waited for by any thread."""

    __slots__ = ("_done",)

    def __init__(self, done: bool = False) -> None:
        self._done = threading.Event()
        if done:
            self._done.set()

    def set(self) -> None:
        self._done.set()

    def is_set(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float, between: Callable[[], None]) -> bool:
        """False when time is up; `between` is called now and then and may raise."""
        deadline = time.monotonic() + timeout_s
        while not self._done.wait(0.05):
            between()
            if time.monotonic() > deadline:
                return False
        return True


class HostStream:
    """A daemon thread that runs callables in order. After the first failure it runs nothing more and `on_failure` has been told."""

    def __init__(self, name: str, on_failure: Callable[[TideError], None]) -> None:
        self.name = name
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=f"tide-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Callable[[], None]) -> None:
        self._items.put(item)

    def _run(self) -> None:
        failed = False
        while True:
            item = self._items.get()
            if item is None:
                return
            try:
                if not failed:
                    item()
            except TideError as error:
                failed = True
                self._on_failure(error)
            except BaseException as error:
                failed = True
                wrapped = TideError(f"stream {self.name!r} failed: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                self._on_failure(wrapped)
            del item  # it holds its launch's buffers, and get() may block for long

    def close(self) -> None:
        """Run what was put, then end."""
        self._items.put(None)
        self._thread.join(timeout=10)
