"""Log lines for what may take long: none if it was quick, one now and then while it lasts, one at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUICK_S = 1.0
"""What took no longer is not worth a line."""
EVERY_S = 15.0


def clock_text(seconds: float) -> str:
    """Minutes and seconds: 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def progress(logger: logging.Logger, what: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Log "TIDE: still at it" lines while the body runs, and how long it took if that was more than QUICK_S."""
    ended = threading.Event()
    began_s = time.monotonic()

    def tell() -> None:
        while not ended.wait(every_s):
            logger.info("TIDE: still %s (%s)", what, clock_text(time.monotonic() - began_s))

    teller = threading.Thread(target=tell, name="tide-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
    if (took_s := time.monotonic() - began_s) > QUICK_S:
        logger.info("TIDE: %s took %.1f s", what, took_s)
