"""What ranks did and when."""

from collections import Counter
from dataclasses import dataclass, field, replace

from course_utils.comm.collectives import OPERATORS
from course_utils.trace.calls import Call


@dataclass(frozen=True)
class Span:
    """A stretch of time in seconds. `kind` is "compute", "communication" or "waiting".

    Foreground spans of one rank never overlap: the rank does one thing at a time, and a span that
    contains another is cut. `background` marks communication that runs beside them. `call` is the
    index of a communication span's call in the record's `calls`.
    """

    name: str
    kind: str
    start: float
    end: float
    background: bool = False
    call: int | None = None


@dataclass(frozen=True)
class Record:
    """What one rank did; it can be returned from `launch`."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def sent(self, op: str | None = None) -> int:
        """Returns the bytes that this rank handed over, in calls of `op` or in all. A message travels
        as it is; what a collective's algorithm makes travel for its payload is another number."""
        return sum(call.bytes for call in self._named(op) if call.sends)

    def count(self, op: str | None = None) -> int:
        """Returns how many calls of `op`, or of any kind, this rank made."""
        return len(self._named(op))

    def seconds(self, kind: str) -> float:
        """Returns the seconds in the foreground that were of `kind`."""
        spans = [span for span in self.spans if span.kind == kind and not span.background]
        return sum(span.end - span.start for span in spans)

    def _named(self, op: str | None) -> list[Call]:
        known = {operator.op for operator in OPERATORS.values()}
        if op is not None and op not in known:
            raise ValueError(
                f"There is no call named {op!r}; there are {', '.join(sorted(known))}."
            )
        return [call for call in self.calls if op in (None, call.op)]


def separate_waiting(records: list[Record]) -> list[Record]:
    """Splits communication where the last partner arrives: before it the rank waits.

    A collective can start only when the ranks that it needs have called it, and one rank alone
    cannot see that. Takes the records of all ranks and returns them with "waiting" spans added.
    """
    starts = _starts(records)
    result = []
    for record in records:
        keys, spans = _keys(record), []
        for span in record.spans:
            if span.kind != "communication" or span.call is None:
                spans.append(span)
                continue
            partners = _needed(record.calls[span.call], starts[keys[span.call]], record.rank)
            # Who arrived after this rank had finished was not waited for.
            arrivals = [start for start in partners if start < span.end]
            ready = max([span.start, *arrivals])
            if ready > span.start:
                spans.append(replace(span, kind="waiting", end=ready))
            spans.append(replace(span, start=ready))
        result.append(replace(record, spans=spans))
    return result


def cut(spans: list[Span]) -> list[Span]:
    """Turns nested spans into a sequence: a span is interrupted where a later one runs."""
    pieces, open_spans, now = [], [], 0.0

    def close(span: Span, until: float) -> None:
        if until > now:
            pieces.append(replace(span, start=now, end=until))

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while open_spans and open_spans[-1].end <= span.start:
            close(open_spans[-1], open_spans[-1].end)
            now = max(now, open_spans.pop().end)
        if open_spans:
            close(open_spans[-1], span.start)
        open_spans.append(span)
        now = max(now, span.start)
    while open_spans:
        close(open_spans[-1], open_spans[-1].end)
        now = max(now, open_spans.pop().end)
    return pieces


def _keys(record: Record) -> list[tuple]:
    """Names each call so that it has the same name on every rank that takes part in it."""
    seen: Counter = Counter()
    keys = []
    for call in record.calls:
        channel = ("message" if call.op in ("send", "recv") else "collective", call.ranks)
        keys.append((*channel, seen[channel]))
        seen[channel] += 1
    return keys


def _starts(records: list[Record]) -> dict[tuple, dict[int, float]]:
    """For each call the time at which each rank entered it."""
    starts: dict[tuple, dict[int, float]] = {}
    for record in records:
        for key in (keys := _keys(record)):
            starts.setdefault(key, {})
        for span in record.spans:
            if span.call is not None:
                entered = starts[keys[span.call]]
                entered[record.rank] = min(span.start, entered.get(record.rank, span.start))
    return starts


def _needed(call: Call, starts: dict[int, float], rank: int) -> list[float]:
    """The arrivals that this rank's part of `call` depends on."""
    if call.root is None or call.root == rank:
        return list(starts.values())
    return [start for other, start in starts.items() if other == call.root]
