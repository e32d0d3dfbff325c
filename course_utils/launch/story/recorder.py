"""Each rank's record of its calls, for the kernel to compare.

Ranks must make the same calls in the same order. When they do not, gloo hangs, aborts the process or, worst, adds up
the wrong bytes (float32 against int32 runs through). PyTorch can check that itself (TORCH_DISTRIBUTED_DEBUG=DETAIL),
but by messages of its own before each call, for which each rank waits: an asynchronous all-reduce no longer overlaps
with anything, small calls take about three times as long, every timeline of the course would show the check, and in
torch 2.14.1 the construction of DistributedDataParallel crashes under it. So a rank only notes what it is about to
call, which takes microseconds and sends nothing; the kernel reads all notes when nothing moves, when a rank has failed,
and at the end. They are in a file, which outlives the rank.

A program makes many calls of few kinds. So a call is described once, and then counted by a line with the description's
number: a record has no end and no horizon. The notes are taken where all calls pass (see `intercept`): also those that
DistributedDataParallel makes from C++.
"""

import contextlib
import functools
import inspect
import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent import futures

import torch.distributed as dist

from course_utils.comm import events, intercept, private
from course_utils.comm.collectives import OPERATORS, Operator, tensors_in
from course_utils.launch.story.calls import DESTROY, KEY, NEW_GROUP, WORLD, give_up
from course_utils.launch.story.frames import is_own, passes_through

_TOOL = 4  # of sys.monitoring: one that no debugger or profiler has


class Recorder:
    """In a rank: notes each call in a file before it is made."""

    def __init__(self, path: str, limit: float):
        self._limit = limit  # of the launch, in seconds
        self._called = None
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._lock = threading.RLock()  # a learner's threads may call too
        self._calls = 0
        self._descriptions = {}  # each with its number
        self._groups = {}  # what is known of a group, by its name
        self.seen = set()  # where exceptions were caught, by the function that runs
        self._newest = threading.local()  # the number of this thread's newest call
        self._world = None  # the default group of the newest note
        self._world_name = ""
        # A rank that destroys its groups is still connected: else the others would fail in words that differ from run
        # to run.
        self._kept = []

    def on_world(self, rank: int, world_size: int) -> None:
        """To be called before a script makes its world, for which all ranks are needed."""
        self._newest.number = self._write(WORLD, WORLD, tuple(range(world_size)), rank)

    def begin(self, called: Callable | None = None) -> None:
        """To be called when launch's own world is there. `called`, if it is given, gets the number of each
        call, its group's name and what it returned."""
        self._called = called
        self._world = dist.group.WORLD
        self._kept.append(self._world)
        intercept.listen(self.on_call, refused=self.on_refused)
        intercept.waits = self
        # Every way to make a group passes here: new_group, new_subgroups, a device mesh.
        make, signature = private.new_group.value, inspect.signature(private.new_group.value)

        def make_on_record(*args, **kwargs):
            self._note_group(signature.bind(*args, **kwargs).arguments)
            made = make(*args, **kwargs)
            self._kept.append(made)
            return made

        private.new_group.put(make_on_record)

        self._watch_exceptions()
        forget = private.end_groups.value

        def forget_on_record():  # what destroy_process_group does last
            with contextlib.suppress(Exception), self._lock:
                self._write(DESTROY, DESTROY)
            forget()

        private.end_groups.put(forget_on_record)

    def on_call(self, name: str, arguments: dict) -> Callable[[object], None] | None:
        """To be called before each call, as a listener of `intercept`."""
        if (operator := OPERATORS.get(name)) is None:
            return None
        # A call that PyTorch can make must not fail here.
        with contextlib.suppress(Exception), self._lock:
            group = dist.ProcessGroup.unbox(arguments["process_group"])
            number = self._newest.number = self._note(operator, arguments, group)
            if self._called:
                return functools.partial(self._called, number, group.group_name)
        return None

    def on_refused(self) -> None:
        """The newest call of this thread has raised: PyTorch did not make it."""
        number, self._newest.number = getattr(self._newest, "number", None), None
        if number is not None:
            self._add(f"!{number}")

    def _watch_exceptions(self):
        """Notes exceptions for which a call may be left out although the rank goes on: what ends a thread, what a
        pool keeps for whoever asks, and what the learner's code catches; of that Python can tell without a cost from
        3.12 on."""
        end, keep = threading.excepthook, futures.Future.set_exception

        def end_on_record(args):
            self._note_caught(args.exc_value, args.thread and args.thread.name)
            end(args)

        def keep_on_record(future, error):
            self._note_caught(error)
            keep(future, error)

        threading.excepthook, futures.Future.set_exception = end_on_record, keep_on_record
        if (monitoring := getattr(sys, "monitoring", None)) is None:
            return
        handled = monitoring.events.EXCEPTION_HANDLED
        monitoring.use_tool_id(_TOOL, "course_utils")
        monitoring.register_callback(_TOOL, handled, self._on_caught)
        monitoring.set_events(_TOOL, handled)

    def _on_caught(self, code, offset, error):
        if is_own(code.co_filename) and (code, offset) not in self.seen:  # once a line is enough
            self.seen.add((code, offset))
            self._note_caught(error)

    def _note_caught(self, error, *thread):
        with contextlib.suppress(Exception):
            kind, text, place = _handled(error)
            if (kind, place) not in self.seen:
                self.seen.add((kind, place))
                self._add("^" + json.dumps((kind, text, place, *thread)))

    # Of waits that are no calls, as `intercept.Waits` says.

    def on_key(self, key: str, seconds: float) -> Callable[[], None]:
        with contextlib.suppress(Exception), self._lock:
            number = self._write(KEY, key, limited=seconds < self._limit)
            return lambda: self._add(f".{number}")
        return lambda: None

    def on_given_up(self) -> None:
        self._add("?")

    def publish(self, pending: dict) -> None:
        """Notes what this rank's host waits behind, as `host_waits.follow` says it."""
        self._add("~" + json.dumps(pending))

    def _note(self, operator: Operator, given: dict, group) -> int:
        kind, alike, known = operator.function, operator.alike, self._known(group)
        members = known["members"]
        peer = next((given[name] for name in ("root_rank", "dst", "src") if name in given), None)
        splits = _splits(kind, given, len(members), known["nccl"])
        sent = _looks(given[operator.payload]) if splits else None
        # `monitored_barrier`, and what has a shorter timeout than its group, fail by themselves.
        limit = given.get("timeout", -1)
        return self._write(
            kind,
            group.group_name,
            members,
            known["me"],
            peer=None if peer is None else members[peer],
            tag=given.get("tag"),
            operation=_operation(given.get("reduce_op")),
            tensors=None if alike is None else _looks(given[alike]),
            splits=splits,
            dtype=sent[0][0] if sent else None,
            limited=(limit / 1000 if limit > 0 else known["seconds"]) < self._limit,
        )

    def _known(self, group):
        self._see_world()
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = {
                "members": tuple(dist.get_process_group_ranks(group)),
                "me": dist.get_rank(),
                "nccl": dist.get_backend(group) == "nccl",
                "seconds": _patience(group),
            }
        return self._groups[name]

    def _see_world(self):
        if dist.group.WORLD is not self._world:
            self._world, self._world_name = dist.group.WORLD, _agreed_name(self._calls)
            self._kept.append(self._world)
            self._groups.clear()

    def _note_group(self, given):
        if given.get("use_local_synchronization"):
            return  # only the members make such a group
        with contextlib.suppress(Exception), self._lock:
            self._see_world()
            everyone = tuple(range(dist.get_world_size()))
            asked = everyone if given.get("ranks") is None else tuple(sorted(given["ranks"]))
            self._write(NEW_GROUP, NEW_GROUP, everyone, dist.get_rank(), asked=asked)

    def _write(self, kind, group, members=(), me=0, **more) -> int:
        """Adds a call to the record, as `calls.NotedCall` describes it; returns its number."""
        where, through = _way(sys._getframe(1))
        note = {"world": self._world_name, "kind": kind, "group": group, "members": members}
        note |= {"me": me, **more, "where": where, "through": through}
        note["handling"] = _handled(sys.exception())
        key = tuple(note.values())
        if key not in self._descriptions:
            self._add(json.dumps({name: each for name, each in note.items() if each is not None}))
            self._descriptions[key] = len(self._descriptions)
        self._add(str(self._descriptions[key]))
        if not self._calls:
            file, line, _ = where or ("?", 0, "")
            about = f"rank {os.environ.get('RANK')}, {kind}, {os.path.basename(file)}:{line}"
            events.note("called", about)
        self._calls += 1
        return self._calls - 1

    def _add(self, line):
        try:
            os.write(self._file, line.encode() + b"\n")
        except OSError:  # a full disk, or a limit of the program's own
            give_up(self._file)


def _agreed_name(number):
    """A name for the present world that no other world has, and that all its ranks find without waiting for each
    other: the first that comes writes it into the world's store."""
    mine = f"{os.getpid()}-{number}"
    return private.default_store().compare_set("course_utils/world", "", mine).decode()


def _patience(group):
    """How long the calls of a group wait at most, in seconds, as far as its backend tells."""
    with contextlib.suppress(AttributeError, ImportError, RuntimeError):
        backend = private.backend(group, private.device_types.of(group)[0])
        return private.timeout.of(backend.options).total_seconds()
    return math.inf


def _operation(boxed):
    return None if boxed is None else dist.ReduceOp.RedOpType(boxed.op()).name


def _handled(error):
    """The exception that this rank is handling: its type, its text and the learner's line."""
    if error is None:
        return None
    own = [line for at in traceback.walk_tb(error.__traceback__) if (line := _line(*at))]
    text = ", which was caused by ".join(
        "".join(traceback.format_exception_only(each)).strip()[:200]
        for each in (error, error.__cause__)
        if each
    )
    return type(error).__name__, text, own[-1] if own else None


def _looks(tensors):
    """Data type and shape of each tensor; a long list is cut."""
    return tuple((str(t.dtype)[len("torch.") :], tuple(t.shape)) for t in tensors_in(tensors)[:8])


def _splits(kind, given, ranks, nccl):
    """What goes to each rank, and what is expected from each; None where that need not fit, or where PyTorch refuses
    it by itself, since it does not add up."""
    if kind == "all_to_all" or (kind == "all_gather" and nccl):  # which takes parts of any sizes
        sent, expected = _numbers(given["input_tensors"]), _numbers(given["output_tensors"])
        sent *= ranks if kind == "all_gather" else 1
        return (sent, expected) if len(sent) == len(expected) == ranks else None
    if kind != "all_to_all_single":
        return None
    sides = []
    for side in "input", "output":
        rows, sizes = len(given[side]), tuple(given[f"{side}_split_sizes"])
        sides.append(sizes or (rows // ranks,) * ranks)
        if sum(sides[-1]) != rows:
            return None
    return tuple(sides)


def _numbers(tensors):
    return tuple(tensor.numel() for tensor in tensors_in(tensors))


def place() -> tuple | None:
    """The learner's line that makes a call just now: file, line, function. A call from a thread that is not Python's,
    such as autograd's, belongs to the line at which the main thread waits."""
    return _way(sys._getframe(1))[0]


def _way(frame) -> tuple[tuple | None, str]:
    """The learner's line, as `place`, and the function of PyTorch's through which a call has come from it:
    "full_tensor", "backward", "forward" of DistributedDataParallel; "" if there is none but the call."""
    frame, through = _to_own(frame)
    if line := _line(frame, frame.f_lineno):
        return line, through
    if frame.f_code.co_filename != threading.__file__:
        frame, _ = _to_own(sys._current_frames()[threading.main_thread().ident])
    return _line(frame, frame.f_lineno), through or "backward"


def _to_own(frame):
    """The learner's innermost frame, else the outermost one; and what the frames before it tell."""
    through = ""
    while not is_own(frame.f_code.co_filename):
        through = passes_through(frame.f_code.co_filename, frame.f_code.co_name) or through
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame, through


def _line(frame, number):
    """None where it is not the learner's."""
    code = frame.f_code
    return (code.co_filename, number, code.co_name) if is_own(code.co_filename) else None
