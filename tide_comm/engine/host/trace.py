"""What the host engine's streams did and when, as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Span:
    """One operation, waiting included. Times in microseconds of the machine's monotonic clock, which its processes share."""

    stream: str
    what: str
    program: str
    start_us: float
    end_us: float


@dataclass
class Trace:
    """Spans of one rank."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, stream: str, what: str, program: str, item: Callable[[], None]) -> None:
        """Run `item` and note how long it took."""
        start = time.monotonic()
        try:
            item()
        finally:
            span = Span(stream, what, program, start * 1e6, time.monotonic() * 1e6)
            with self._lock:
                self.spans.append(span)

    def write(self, folder: str) -> Path:
        """Write `tide_trace_rank<r>_<pid>.json`, one row a stream."""
        rows = {stream: i for i, stream in enumerate(dict.fromkeys(span.stream for span in self.spans))}
        events: list[dict] = [
            {"ph": "M", "name": "thread_name", "pid": self.rank, "tid": row, "args": {"name": stream}}
            for stream, row in rows.items()
        ]
        events.append({"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}})
        events += [
            {
                "ph": "X",
                "name": span.what,
                "cat": span.program,
                "pid": self.rank,
                "tid": rows[span.stream],
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "args": {"program": span.program},
            }
            for span in self.spans
        ]
        path = Path(folder) / f"tide_trace_rank{self.rank}_{os.getpid()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events}))
        return path
