"""What notices that something goes wrong: a thread of the host, because nothing on a GPU can be called off.

It looks at the connections (a dead or failed peer), at the word that a sum writes when ranks disagree, and at what has been under way for
long: at the tags in its slot, and past `timeout_s` at the words that it waits for. Device memory is read only then.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tide_comm.engine.base import WORD_BYTES
from tide_comm.engine.cuda.compile import Bound
from tide_comm.engine.cuda.library import check
from tide_comm.engine.host.shared import PeerGone
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.program import Program, Word

if TYPE_CHECKING:
    from tide_comm.engine.cuda.engine import CudaEngine

POLL_S = 0.1
SUSPECT_S = 0.5
"""What has been under way for longer has its tags compared. Ranks that gather different groups learn of it within about a second."""
PEEK_S = 3.0
"""How long reading device memory may take, the executor's own limit included: what asks the driver may hang in it."""
GRACE_S = 10.0
"""How long the caller may take to notice a failure before the process is ended: it may be waiting for the GPU, which waits for ever."""
BRING_PIECES = tuple(word(0).name for word in (names.arrived, names.head, names.tail))
"""Words that say that a peer's pieces have come."""
ADVICE = (
    "Every rank must use the same parameters in every step; for parameters that only some ranks use call "
    "set_reduce_scatter_unused_params(True) on the FSDP module"
)


@dataclass(eq=False)
class Under:
    """A launch that may still be under way. `values` are what its words must reach."""

    since: float
    program: Program
    bound: Bound
    slot: int
    tag: int
    values: np.ndarray

    def text(self, point: str) -> str:
        return f"{self.program.name}: point {point!r}" + (f" in slot {self.slot}" if self.slot >= 0 else "")


class Watchdog:
    """One an engine. The engine's `issued` says what is under way: event number -> (launch, point), written before the launch."""

    def __init__(self, engine: CudaEngine) -> None:
        self.engine = engine
        self.closed = threading.Event()
        self.raised = False
        """The caller has seen the error."""
        self._done: dict[int, Under] = {}
        self._last_heard = (0.0, "nothing yet")
        self._blind = False
        self._thread = threading.Thread(target=self._run, name="tide-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self.engine.device)
        while not self.closed.wait(POLL_S):
            try:
                self.look()
            except Exception as caught:
                # Whatever it is: without a watchdog the next failure would be a hang.
                error = (
                    caught if isinstance(caught, TideError) else TideError(f"the watchdog itself failed: {caught!r}")
                )
                self.engine.fail(error)
                if not self.closed.wait(GRACE_S) and not self.raised:
                    print(f"TIDE: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
                return

    def look(self) -> None:
        """Raises `TideError` if a peer is gone, if ranks have disagreed, or if something is under way for longer than timeout_s."""
        try:
            self.engine.arena.check()
        except PeerGone as gone:
            raise self._without(gone) from None
        if self.engine.rail is not None:
            self.engine.rail.check()
        self._sums_agree()
        pending = self._pending(SUSPECT_S)
        self._gathers_agree([(number, under) for number, under, _ in pending if under.bound.tags])
        if pending and self.engine.arena.has_left():
            self._nobody_left_early([under for _, under, _ in pending])
        timeout_s = self.engine.timeout_s
        late = [(under, point) for _, under, point in pending if time.monotonic() - under.since > timeout_s]
        if late:
            raise TideError(
                f"{self.engine.place(self.engine.rank)} waited longer than timeout_s = {timeout_s:g} for {self._what(late)}; "
                f"last heard: {self._last_heard[1]}. A rank that got no gradient at all, or is much slower, looks like this"
            )

    def _pending(self, older_than_s: float) -> list[tuple[int, Under, str]]:
        """Points that have not been reached, the oldest launch first. Also notes what was reached last."""
        found = []
        for number, (under, point) in list(self.engine.issued.items()):
            if self._done.get(number) is under or time.monotonic() - under.since < older_than_s:
                continue
            busy = self.engine.library.tide_event_busy(self.engine.handle, number)
            if busy > 1:
                check(busy, under.text(point))
            if self.engine.issued.get(number) != (under, point):
                continue  # launched again: the event may stand for that one
            if busy:
                found.append((number, under, point))
            else:
                self._done[number] = under
                self._last_heard = max(self._last_heard, (under.since, under.text(point)))
        return sorted(found, key=lambda entry: entry[1].since)

    # What ranks disagree on

    def _sums_agree(self) -> None:
        report = self.engine.library.tide_report(self.engine.handle)
        if report[0]:
            raise self._disagreement(
                "a reduce-scatter", report[1], report[2], report[3], "no gradient of it was written"
            )

    def _gathers_agree(self, pending: list[tuple[int, Under]]) -> None:
        """Launches whose pieces have come, but with another tag. Their slots are not used again before they end: words and tags stand."""
        peeked = self._peek() if pending else None
        for number, under in pending:
            if peeked is None or self.engine.issued[number][0] is not under:
                continue
            missing = {word.key for word, _, _ in self._unmet(under, peeked[0]) if word.name in BRING_PIECES}
            for peer, offset in under.bound.tags.items():
                theirs = int(peeked[1][(offset - self._tags_at()) // 4])
                if peer not in missing and theirs != under.tag:
                    what = f"{under.program.name} in slot {under.slot}"
                    raise self._disagreement(what, peer, theirs, under.tag, "nothing that it gathered was used")

    def _disagreement(self, what: str, peer: int, theirs: int, ours: int, effect: str) -> TideError:
        engine = self.engine
        return TideError(
            f"{what}: {engine.place(peer)} runs something else here than {engine.place(engine.rank)} (tag {theirs:#x}, expected "
            f"{ours:#x}; {effect}): ranks disagree on the order of collectives or on which parameters got gradients. {ADVICE}"
        )

    # What is awaited

    def _without(self, gone: PeerGone) -> TideError:
        """A peer's end, with what this rank was doing."""
        text = re.sub(r"^rank (\d+) has", lambda found: f"{self.engine.place(int(found[1]))} has", str(gone))
        time.sleep(POLL_S)  # what does not need the peer comes to its end
        pending = [(under, point) for _, under, point in self._pending(0.0)]
        doing = f"waited for {self._what(pending)}" if pending else "waited for nothing"
        return PeerGone(f"{text}; {self.engine.place(self.engine.rank)} {doing}; last heard: {self._last_heard[1]}")

    def _nobody_left_early(self, pending: list[Under]) -> None:
        """A peer's engine ends its streams before it leaves, so what has not come by then never comes."""
        peeked = self._peek()
        for under in pending if peeked is not None else ():
            assert peeked is not None
            for word, _, _ in self._unmet(under, peeked[0]):
                if word.key in self.engine.arena.has_left():
                    place = self.engine.place(word.key)
                    raise self._without(PeerGone(f"{place} has left: its process ended or its engine was closed"))

    def _what(self, pending: list[tuple[Under, str]]) -> str:
        """Of what is pending, the oldest that waits for a peer, with the words that have not come."""
        peeked = self._peek()
        if peeked is not None:
            for under, point in pending:
                if unmet := self._unmet(under, peeked[0]):
                    words = ", ".join(
                        f"word {word.name!r} from {self.engine.place(word.key)} (at {value}, needs {target})"
                        for word, value, target in unmet
                    )
                    return f"{under.text(point)}: {words}"
        under, point = pending[0]
        why = (
            "the GPU cannot be asked for which word"
            if peeked is None
            else "no word is missing, the GPU is busy with it"
        )
        return f"{under.text(point)} ({why})"

    def _unmet(self, under: Under, words: np.ndarray) -> list[tuple[Word, int, int]]:
        """Words that have not come, once each: (word, its value, the first value it lacks)."""
        first = self._words_at()
        lacking: dict[Word, tuple[Word, int, int]] = {}
        for word, offset, index in under.bound.awaited:
            value, target = int(words[(offset - first) // WORD_BYTES, 0]), int(under.values[index]) & 0xFFFFFFFF
            if (value - target) & 0xFFFFFFFF >= 1 << 31:
                lacking.setdefault(word, (word, value, target))
        return list(lacking.values())

    def _words_at(self) -> int:
        return next(iter(self.engine.spec.words.values()))

    def _tags_at(self) -> int:
        return self.engine.spec.slot_tag(0, 0)

    def _peek(self) -> tuple[np.ndarray, np.ndarray] | None:
        """This rank's words and tags as they are now; None if the GPU does not answer in time."""
        if self._blind:
            return None
        engine, spec = self.engine, self.engine.spec
        words = np.zeros((len(spec.words), WORD_BYTES // 4), np.uint32)
        tags = np.zeros((spec.slots + spec.stage.ring) * spec.topology.world, np.uint32)
        answered: list[bool] = []

        def read() -> None:
            torch.cuda.set_device(engine.device)
            for array, at in ((words, self._words_at()), (tags, self._tags_at())):
                if engine.library.tide_peek(engine.handle, engine.base[engine.rank] + at, array):
                    return
            answered.append(True)

        reader = threading.Thread(target=read, name="tide-peek", daemon=True)
        reader.start()
        reader.join(PEEK_S)
        self._blind = not answered
        return (words, tags) if answered else None


_failed = threading.Event()


def note_failure() -> None:
    """From here on the process may not be able to end by itself."""
    _failed.set()


@atexit.register
def _end_in_time() -> None:
    """Streams that wait for ever may keep a process from ending: an alarm ends it then, with a status that is not 0."""
    if _failed.is_set() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(GRACE_S))
