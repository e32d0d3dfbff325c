"""Where the host of a rank waits, on a device whose collectives are only queued by their calls.

NCCL's calls return at once: what stands in a communicator's queue runs later, and the host stops
where it reads a value. So a rank that waits for others is found in `x.item()`, ten lines below the
call that has no partner, and there a GPU's driver spins in C. This module keeps the calls that have
not ended, and lets the host wait in Python, where a stack shows it and next to no processor time is
used. `launch` reads both.

The strict device waits here, and so do ranks on GPUs (`read_here`).
"""

import functools
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils.comm import intercept

# What an error says of a result that is read too early, where something replays a device's order.
USED_EARLY = "is used before anybody has waited for it"
_NAPS = (0.0002, 0.0005, 0.001, 0.002, 0.005)  # seconds between two looks, longer and longer
_READERS = (
    *("item", "tolist", "cpu", "equal", "allclose", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
)
_completed = dist.Work.is_completed  # the strict device's asks, and joins

_lock = threading.RLock()  # autograd's threads call and wait too
_units: list["_Unit"] = []  # what was called and has not been seen to end, in order
_publish: Callable[[dict], None] | None = None
_place: Callable[[], object] | None = None
_last_published: dict = {}


class _Unit:
    """What ends as one: a call, or a batch of messages.

    group: its name; numbers: of the calls in the rank's record; awaited: what the device does next
    waits for it, and so does the host where it reads; after: what has to end before it begins, all
    before it in its queue and all that is awaited; where: the line that has called wait().
    """

    def __init__(self, group: str, work: dist.Work, numbers: list[int], awaited: bool):
        self.group, self.work, self.numbers, self.awaited = group, work, numbers, awaited
        self.after = [unit for unit in _units if unit.awaited or unit.group == group]
        self.where = None

    def ended(self) -> bool:
        if not _completed(self.work):
            return False
        self.after.clear()  # else each would hold all before it
        return True

    def begun(self) -> bool:
        self.after = [unit for unit in self.after if not unit.ended()]
        return not self.after


def follow(publish: Callable[[dict], None], place: Callable[[], object]) -> None:
    """From now on keeps the calls of which `called` is told. While the host waits behind one of them,
    `publish` has got {"begun": the numbers of the calls that have begun and not ended, a list for
    those that end as one, "queued": of those that have not begun, "behind": the first that the host
    needs, "where": what place() has told in its wait()}; {} when it goes on."""
    global _publish, _place
    _publish, _place = publish, place
    _notice_waits()


def called(number: int, group: str, result: object) -> None:
    """To be told what an operator of c10d has returned for the call with this number."""
    awaited = intercept.python_caller() is None  # C++ waits, unseen
    intercept.hand_work(result, lambda work: _keep(number, group, work, awaited))


def until(ended: Callable[[], bool]) -> None:
    """Returns when ended() is true. The host waits for the device."""
    naps = iter(_NAPS)
    while not ended():
        nap = next(naps, _NAPS[-1])
        if nap == _NAPS[-1] and _publish_pending():
            behind_a_collective(lambda: ended() or not _publish_pending())
        else:
            time.sleep(nap)
    _publish_change({})


def behind_a_collective(goes_on: Callable[[], bool]) -> None:
    """Returns when goes_on() is true, which the other ranks' hosts bring about. A stack that has this in
    it says what its rank waits for, also while the rank looks whether it goes on."""
    while not goes_on():
        time.sleep(_NAPS[-1])


def all_awaited() -> None:
    """Whoever synchronises with the whole device waits for all that was called."""
    with _lock:
        for unit in _units:
            unit.awaited = True


def read_here(ended: Callable[[], bool], is_there: Callable[[Tensor], bool]) -> None:
    """From now on the host waits `until` ended() where Python reads a value of a tensor for which
    is_there(tensor). What C++ reads by itself is not seen: it waits as it always does."""
    for name in _READERS:
        setattr(Tensor, name, _after(ended, is_there, getattr(Tensor, name)))
    torch.equal = _after(ended, is_there, torch.equal)
    torch.allclose = _after(ended, is_there, torch.allclose)
    move = Tensor.to

    @functools.wraps(move)
    def to(tensor, *args, **kwargs):
        if _to_cpu(*args, **kwargs) and is_there(tensor):
            until(ended)
        return move(tensor, *args, **kwargs)

    Tensor.to = to


def _after(ended, is_there, read):
    @functools.wraps(read)
    def wait_and_read(tensor, *args, **kwargs):
        if is_there(tensor):
            until(ended)
        return read(tensor, *args, **kwargs)

    return wait_and_read


def _to_cpu(*args, **kwargs):
    named = (*args[:1], kwargs.get("device"))
    return any(str(to) == "cpu" for to in named if isinstance(to, (str, torch.device)))


def _keep(number, group, work, awaited):
    if work is None:
        return
    with _lock:
        _units[:] = [unit for unit in _units if not unit.ended()]
        if _units and _units[-1].work is work:  # one more of a batch
            _units[-1].numbers.append(number)
        else:
            _units.append(_Unit(group, work, [number], awaited))


def _publish_pending() -> bool:
    """Publishes what has not ended; returns whether the host waits behind any of it."""
    with _lock:
        _units[:] = [unit for unit in _units if not unit.ended()]
        behind = next((unit for unit in _units if unit.awaited), None)
        begun = [unit.numbers for unit in _units if unit.begun()]
        queued = [n for unit in _units if unit.after for n in unit.numbers]
    if behind is None:
        _publish_change({})
        return False
    about = {"behind": behind.numbers[0], "where": behind.where}
    _publish_change(about | {"begun": begun, "queued": queued})
    return True


def _publish_change(pending):
    global _last_published
    if _publish is not None and pending != _last_published:
        _publish(pending)
        _last_published = pending


def _notice_waits():
    usually = dist.Work.wait

    @functools.wraps(usually)
    def wait(work, *args, **kwargs):
        with _lock:
            place = next((n for n, unit in enumerate(_units) if unit.work is work), None)
            if place is not None:
                _units[place].where = _place()
                for unit in _units[: place + 1]:  # and so for all before it in its queue
                    unit.awaited = unit.awaited or unit.group == _units[place].group
        return usually(work, *args, **kwargs)

    dist.Work.wait = wait
