"""Who holds which slot: the same answer on all ranks, because it is driven by FSDP's own order alone and never by garbage collection."""

from __future__ import annotations

import hashlib
from collections import deque


class Ledger:
    """`slots` slots of one arena. Free slots are taken in the order in which they became free, or all-gathers would serialise.

    `hash` runs over every event; ranks whose hashes differ do not agree on who is in which slot.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free: deque[int] = deque(range(slots))
        self.holder: dict[int, str] = {}
        self.sequence = 0
        self.hash = 0

    def acquire(self, group: str) -> int | None:
        """The slot that `group` gets, or None when all are held: then that all-gather runs on stock communication, on all ranks."""
        slot = self.free.popleft() if self.free else None
        if slot is not None:
            self.holder[slot] = group
        self._note("acquire", group, slot)
        return slot

    def release(self, slot: int) -> None:
        """The slot's holder needs it no more. Raises `KeyError` for a slot that nobody holds."""
        group = self.holder.pop(slot)
        self.free.append(slot)
        self._note("release", group, slot)

    def note(self, event: str, group: str) -> int:
        """Let an event without a slot (a reduce-scatter) run into the hash; returns the hash as a tag of 31 bits."""
        self._note(event, group, None)
        return self.hash

    def _note(self, event: str, group: str, slot: int | None) -> None:
        self.sequence += 1
        text = f"{self.hash} {self.sequence} {event} {group} {slot}"
        self.hash = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
