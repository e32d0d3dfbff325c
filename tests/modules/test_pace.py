"""Ranks that keep a pace, on a device whose calls return before it has done them."""

from contextlib import contextmanager

from course_utils.lesson import pace


class Device:
    """Has a queue: what is put there is done when the host waits, and not before."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.queue = events, []

    def settle(self) -> None:
        self.events += self.queue
        self.queue.clear()

    @contextmanager
    def span(self, name: str):
        self.events.append(f"{name} begins")
        yield
        self.events.append(f"{name} ends")


def test_a_slot_begins_and_ends_when_the_device_is_there(monkeypatch):
    """`wait()` holds only the device's stream: without the first wait what arrives would count as
    work, without the second the rank would sleep beside its work and run ahead of its device."""
    events = []
    device = Device(events)
    monkeypatch.setattr(pace.hardware, "settle", device.settle)
    monkeypatch.setattr(pace.time, "sleep", lambda seconds: events.append("sleeps"))
    device.queue.append("the message is here")
    with pace.paced(device, "F0", slots=1):
        device.queue.append("the work is done")
    assert events == [
        "the message is here",
        "F0 begins",
        "the work is done",
        "sleeps",
        "F0 ends",
    ]


def test_an_op_lasts_as_many_slots_as_its_kind_takes(monkeypatch):
    asked = []
    monkeypatch.setattr(pace, "paced", lambda trace, name, slots: asked.append((name, slots)))
    during = pace.at_pace(None, {"F": 1, "B": 2})
    for op in (pace.Op("B", 3), pace.Op("F", 0)):
        during(op)
    assert asked == [("B3", 2), ("F0", 1)]
