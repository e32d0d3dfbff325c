"""In a rank: pdb, with the cell as its keyboard and screen (`launch(..., debug=True)`).

What pdb writes goes to the kernel when it wants a line, as a message with what to show; the answer comes
back over the same channel.
"""

import bdb
import os
import pdb  # noqa: T100
import sys
import threading
import traceback
from collections import Counter

import torch.distributed as dist

from course_utils.launch.ranks import packing
from course_utils.launch.story.frames import is_own

_cell = None  # where there is a debugger


def install(channel) -> None:
    """From now on breakpoint, pdb.set_trace and dist.breakpoint stop the rank; without a channel they raise."""
    global _cell
    _cell = channel and _Cell(channel)
    sys.breakpointhook = pdb.set_trace = _stop
    dist.breakpoint = _stop_one


def stop_tracing() -> None:
    """To be called when the learner's function has ended: a step may lead out of it."""
    if _cell:
        sys.settrace(None)


def post_mortem(error: BaseException) -> None:
    """Holds the rank that `error` ends, at the learner's innermost line, until the learner lets it go."""
    if isinstance(error, bdb.BdbQuit):
        error.args = ("the debugger was left with q",)
    elif _cell and not isinstance(error, SystemExit):
        debugger = _Pdb(_cell)
        debugger.reset()
        debugger.message("".join(traceback.format_exception_only(error)).strip())
        debugger.interaction(None, error.__traceback__)


def _stop(*_, **__):
    if _cell is None or _cell.process != os.getpid():  # a worker of a DataLoader has none
        raise RuntimeError(
            "a rank has no keyboard for a debugger: print what you want to know, or call the function "
            "in the cell without launch, or call launch(..., debug=True)"
        )
    frame = _caller()
    debugger = _Pdb(_cell)
    debugger.set_trace(frame)
    debugger.set_next(frame)  # not within what has called this


def _caller():
    frame = sys._getframe(1)
    while frame.f_back and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


_passed = Counter()


def _stop_one(rank: int = 0, skip: int = 0, timeout_s: float = 3600):
    """As dist.breakpoint: stops that rank, and the others wait for it."""
    frame = _caller()
    _passed[frame.f_code, frame.f_lineno] += 1
    if _passed[frame.f_code, frame.f_lineno] > skip:
        if dist.get_rank() == rank:
            _stop()
        dist.barrier()


class _Cell:
    """The cell as a file."""

    def __init__(self, channel):
        self.process = os.getpid()
        self._channel = channel
        self._text = ""
        self._lock = threading.Lock()  # a thread of the learner may stop as well

    def write(self, text):
        self._text += text

    def flush(self):
        pass  # what is written is sent when an answer is needed

    def readline(self):
        with self._lock:
            self._send("asks")
            return packing.unpack(packing.receive(self._channel))

    def leave(self):
        with self._lock:
            self._send("left")

    def _send(self, kind):
        packing.send(self._channel, packing.pack({"kind": kind, "text": self._text}))
        self._text = ""


class _Pdb(pdb.Pdb):
    def __init__(self, cell):
        # What lies between two lines of the learner, and what begins to trace.
        skip = ["course_utils.launch.*", "course_utils.comm.*", "bdb"]
        super().__init__(stdin=cell, stdout=cell, skip=skip, nosigint=True, readrc=False)
        self._cell = cell

    def get_stack(self, frame, tb):
        """Without launch's own frames; of an exception, at the learner's innermost line."""
        stack, at = super().get_stack(frame, tb)
        mine = [i for i, (each, _) in enumerate(stack) if is_own(each.f_code.co_filename)]
        if not mine:
            return stack, at
        return stack[mine[0] :], (mine[-1] if tb else at) - mine[0]

    def interaction(self, *args):
        super().interaction(*args)
        if self.quitting or self.stoplineno == -1:  # q, or c, which stops at no line
            self._cell.leave()
