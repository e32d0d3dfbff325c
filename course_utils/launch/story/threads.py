"""What the threads of a rank can still do, as far as their stacks say.

Ranks are stuck only if no thread of any of them can ever move them on. So each thread waits in PyTorch for other
ranks; or, without a limit, for another thread of its process (a condition, an event, a queue, the end of a thread);
or it belongs to a library and only serves it (a DataLoader's pinned memory, a progress bar). Of any other thread, a
heartbeat that sleeps and prints for instance, nothing is proven: it may make a call, wake another thread, or end
while another waits for that. The handler of a signal, too, may do anything, in the main thread. Threads without a
line of Python (autograd's, gloo's, OpenMP's) do nothing of their own accord: while they work, the rank uses processor
time or another rank communicates.
"""

import re
import threading
from concurrent.futures import thread as executor
from typing import NamedTuple

from course_utils.comm import private
from course_utils.launch.story.frames import Frame
from course_utils.launch.story.stacks import Stacks, waits

_THREADING = threading.__file__
_IDLE = {
    (_THREADING, "wait"): "waiter.acquire()",
    (_THREADING, "join"): "self._wait_for_tstate_lock()",  # until Python 3.12
    (executor.__file__, "_worker"): "work_item = work_queue.get(block=True)",
}
# From Python 3.13 on, only the line that calls join says whether there is a limit.
_JOINS = (_THREADING, "join", "self._handle.join(timeout)")
_JOIN_CALL = re.compile(r"\.join\(\)?")
_SERVING = (
    *("/".join(private.PINNING_FILE), "multiprocessing/resource_sharer.py"),
    *("tqdm/_monitor.py", "course_utils/comm/serving.py"),
)


class Rest(NamedTuple):
    """A rank whose main thread cannot go on by itself.

    waiting: the stacks of its threads that wait, by thread
    proven:  no other thread can move it on
    """

    waiting: dict[str, list[Frame]]
    proven: bool


def rest(
    stacks: Stacks, finished: bool, handlers: bool, lacks: bool, at_socket: bool | None = None
) -> Rest | None:
    """Returns how a rank rests, or None if its main thread does something that may end.

    finished: its main thread only waits for its end; handlers: it may handle signals; lacks: its newest call lacks
    another rank, so that whatever waits in PyTorch waits for that; at_socket: as `view.at_sockets` says.
    """
    found, for_ranks, proven = {}, False, True
    for name, frames in stacks.threads.items():
        main = name == stacks.main_thread
        if not frames or (main and finished):
            continue
        inside = waits(frames)
        if inside or (lacks and inside is not None):
            found[name], for_ranks = frames, True
        elif idle(frames):
            found[name] = frames
            proven = proven and not (main and handlers)
        elif main and at_socket is None:
            return None
        elif main:
            proven = proven and at_socket
        else:
            proven = proven and any(frame.file.endswith(_SERVING) for frame in frames)
    if stacks.main_thread in found and not for_ranks:
        if not proven:
            return None  # it waits for a thread that does something of its own
        proven = False  # no thread of Python's can wake it; C code might
    return Rest(found, proven)


def idle(frames: list[Frame]) -> bool:
    """True for a thread that waits without a limit for another thread of its process."""
    if not frames:
        return False
    inner, *outer = frames
    if outer and (inner.file, inner.function) == (_THREADING, "_wait_for_tstate_lock"):
        inner = outer[0]  # whose line says whether there is a limit
    elif outer and (inner.file, inner.function, inner.source) == _JOINS:
        calls = _JOIN_CALL.findall(outer[0].source)
        return bool(calls) and all(call == ".join()" for call in calls)
    return _IDLE.get((inner.file, inner.function)) == inner.source
