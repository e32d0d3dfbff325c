"""What the threads of a rank can still do, read from their stacks and from their source.

Ranks are stuck only if no thread of any of them can ever move them on. So each thread has to be
shown to be one of these, and a thread of which nothing is known counts as one that may act:

* it waits in a communication, which only another rank can end;
* it waits, without a limit, for another thread of its own process to wake it: in a condition, an
  event or a queue, as an idle worker of an executor, or for the end of a thread. Threads that are
  all of this kind wake nobody. The main thread too may wait so, while one that waits in a
  communication is what it waits for: but only if no signal can wake it, because its handlers run
  there and may do anything;
* it belongs to a library and only serves it (a DataLoader's pinned memory, a progress bar);
* it runs a function of the learner in whose source nothing communicates and nothing wakes another
  thread: a heartbeat that sleeps and prints. `_PLAIN` is all that such a function may call.

Threads without a line of Python (autograd's, gloo's, OpenMP's) do nothing of their own accord:
while they work, the rank uses processor time or another rank communicates.
"""

import ast
import functools
import linecache
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import thread as executor

from course_utils.launch.story.frames import Frame, is_own
from course_utils.launch.story.stacks import Stacks, collective

_THREADING = threading.Thread.run.__code__.co_filename
_IDLE = {
    (_THREADING, "wait"): "waiter.acquire()",
    (_THREADING, "join"): "self._wait_for_tstate_lock()",  # until Python 3.12
    (executor._worker.__code__.co_filename, "_worker"): "work_item = work_queue.get(block=True)",
}
# From Python 3.13 on, only the line that calls join says whether there is a limit.
_JOINS = (_THREADING, "join", "self._handle.join(timeout)")
_JOIN_CALL = re.compile(r"\.join\(\)?")
_SERVING = tuple(
    os.path.join(*path)
    for path in (
        ("torch", "utils", "data", "_utils", "pin_memory.py"),
        ("multiprocessing", "resource_sharer.py"),
        ("tqdm", "_monitor.py"),
        ("course_utils", "comm", "serving.py"),
    )
)

# Calls after which nothing has been communicated and no thread of the process was woken.
_PLAIN = {
    "print", "len", "str", "repr", "int", "float", "round", "min", "max", "range", "sleep",
    "time.sleep", "time.time", "time.monotonic", "time.perf_counter", "time.strftime",
    "datetime.now", "datetime.datetime.now", "os.getpid", "os.getloadavg",
}  # fmt: skip
_PLAIN_METHODS = {"append", "is_set", "wait", "format", "write", "flush", "isoformat"}
_NUMBERS = ("time.time", "time.monotonic", "time.perf_counter")
_REFUSED = (
    ast.With, ast.AsyncWith, ast.Await, ast.Yield, ast.YieldFrom, ast.Import, ast.ImportFrom,
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda,
)  # fmt: skip


def resting(stacks: Stacks, finished: bool, handlers: bool) -> dict[str, list[Frame]] | None:
    """Returns the stacks of the threads that wait, by thread, if no thread of the rank can move
    it on; None otherwise. When the rank has `finished`, its main thread only waits for its end.
    `handlers`: the rank may handle signals."""
    found = {}
    for name, frames in stacks.threads.items():
        main = name == stacks.main_thread
        if not frames or (main and finished):
            continue
        if collective(frames) or (_idle(frames) and not (main and handlers)):
            found[name] = frames
        elif main or not (_serves(frames) or _cannot_act(frames)):
            return None
    if found and not any(map(collective, found.values())):
        return None if stacks.main_thread in found else found
    return found


def waited_for(stacks: Stacks) -> list[Frame]:
    """Returns the stack of the thread that waits in a communication while the main thread waits, as
    far as its stack says, for another thread to wake it; an empty one if there is none."""
    if not (stacks.main and _idle(stacks.main)):
        return []
    return next(filter(collective, stacks.threads.values()), [])


def _idle(frames):
    """True for a thread that waits without a limit for another thread of its process."""
    inner, *outer = frames
    if outer and (inner.file, inner.function) == (_THREADING, "_wait_for_tstate_lock"):
        inner = outer[0]  # whose line says whether there is a limit
    elif outer and (inner.file, inner.function, inner.source) == _JOINS:
        calls = _JOIN_CALL.findall(outer[0].source)
        return bool(calls) and all(call == ".join()" for call in calls)
    return _IDLE.get((inner.file, inner.function)) == inner.source


def _serves(frames):
    return any(frame.file.endswith(_SERVING) for frame in _work(frames))


def _work(frames) -> Iterator[Frame]:
    """What a thread was started for, outermost frame first, without what Thread does itself."""
    outside = True
    for frame in reversed(frames):
        outside = outside and frame.file == _THREADING
        if not outside:
            yield frame


def _cannot_act(frames):
    """True if the rest of this thread lies in functions of the learner that are plain."""
    work = list(_work(frames))
    mine = [is_own(frame.file) for frame in work]
    called = mine.index(False) if False in mine else len(mine)
    return called > 0 and not any(mine[called:]) and all(map(_is_plain, work[:called]))


def _is_plain(frame):
    tree = _tree(frame.file)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == frame.function
        and node.lineno <= frame.line <= node.end_lineno
    ]
    return len(around) == 1 and not _rebinds(tree) and all(map(_plain, _inside(around[0])))


@functools.lru_cache(maxsize=8)
def _tree(file):
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _inside(function):
    return (node for statement in function.body for node in ast.walk(statement))


def _rebinds(tree):
    """True if a name that `_PLAIN` begins with means something else in this source."""
    names = {name.split(".")[0] for name in _PLAIN}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known = node.module in ("time", "datetime")
            bound = {a.asname or a.name for a in node.names if not known or a.asname}
        elif isinstance(node, ast.Import):
            bound = {a.asname for a in node.names if a.asname and a.asname != a.name}
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound = {node.id}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound = {node.name}
        elif isinstance(node, ast.arg):
            bound = {node.arg}
        else:
            continue
        if bound & names:
            return True
    return False


def _plain(node):
    if isinstance(node, ast.Call):
        name = _dotted(node.func)
        method = isinstance(node.func, ast.Attribute) and node.func.attr in _PLAIN_METHODS
        return name in _PLAIN or method
    if isinstance(node, ast.BinOp):
        return _number(node.left) or _number(node.right)
    if isinstance(node, ast.AugAssign):
        return _number(node.value)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant)
    return not isinstance(node, _REFUSED)


def _number(node):
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.Call) and _dotted(node.func) in _NUMBERS
    )


def _dotted(node):
    """Returns "time.sleep" for that expression; "" for one that is not of names alone."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
