"""The call itself: check, start, watch, explain, clean up; and ranks that stay for several."""

import os
import pickle
import threading
import weakref
from contextlib import AbstractContextManager, ExitStack

from course_utils.comm.events import note
from course_utils.comm.interrupts import uninterrupted
from course_utils.launch.keepers import server
from course_utils.launch.ranks import arguments, elsewhere, job, live, packing, rank
from course_utils.launch.ranks.process import RankProcess
from course_utils.launch.story import diagnosis, frames
from course_utils.launch.story.failure import RankFailure
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.supervise import Supervision

_STILL, _WHOLE = 60.0, 600.0  # seconds: a launch's limits by default
_LIVE_ON = "The ranks live on, with what they keep."
_ENDED = "The ranks have been ended, and what they kept is gone; Ranks(...) makes others."


def launch(
    fn,
    nprocs: int,
    *args,
    timeout: float | None = None,
    rules: str | None = None,
    backend: str | None = None,
    debug: bool = False,
    **kwargs,
) -> list:
    """Runs fn(rank, *args, **kwargs) in `nprocs` fresh processes that form a process group.

    fn may be defined in a cell. Returns the list of what the ranks returned, indexed by rank; tensors come back on the
    CPU. With at least `nprocs` GPUs each rank has one, and NCCL; with fewer they share them, where NCCL can; otherwise
    ranks run on the CPU with gloo. What ranks print appears marked with their number, and so do the figures that they
    show. JupyterLab and a terminal also show what each rank's newest line is meanwhile, and after 3 s who is ready and
    has called what.

    timeout, rules, backend and debug are launch's own; any other keyword is passed to fn.

    rules="nccl" replays NCCL where ranks run on the CPU: what a GPU with NCCL refuses is refused, in its words. Left
    out, the environment's COURSE_RULES counts.

    backend="gloo" is for programs about gloo itself, its words and what it refuses: all ranks run on the CPU with gloo,
    whatever GPUs there are and whatever COURSE_RULES says.

    debug=True holds a rank that raises, or that calls breakpoint(), and pdb talks through the cell: one rank at a time,
    with the rank's number in its prompt. The others wait as long as that takes. `c`, or `q`, lets it go.

    Each rank of each launch begins with a random state of its own (torch, numpy, random), as under
    torchrun: ranks that have to draw the same numbers call torch.manual_seed.

    A script for torchrun runs in a rank as it is: its own init_process_group takes over the group, and RANK,
    WORLD_SIZE, MASTER_ADDR and the like are set.

    Raises RankFailure when a rank raises, exits, is killed, waits for ever or is still busy `timeout` seconds after all
    have begun, when collective calls do not match or lack their partner, or when something cannot be pickled; TypeError
    or ValueError for arguments that make no sense; OSError when the temporary folder cannot be written. A failure's
    traceback(rank) and locals(rank) tell more than its message; in the next cell it is sys.last_value. The stop button
    and Ctrl-C end the ranks, too.

    Without a `timeout` ranks may stand still for a minute: none makes a call, and not all that are left compute. Those
    that go on have ten minutes. Time in which a busy machine had no processor for them, or was asleep, does not count.
    """
    options = {"timeout": timeout, "rules": rules, "backend": backend, "debug": debug}
    arguments.check_call(fn, args, kwargs, options)
    try:
        with Ranks(nprocs, **options) as ranks:
            return ranks._run(fn, args, kwargs, elsewhere.starts())
    except KeyboardInterrupt:
        pass  # where in this package it arrived tells a learner nothing
    raise KeyboardInterrupt("launch was interrupted, and its ranks have ended.")


class Ranks(AbstractContextManager):
    """Processes that stay for several calls: `ranks = Ranks(4)`, or `with Ranks(4) as ranks:`.

    `ranks(fn, *args, **kwargs)` runs fn(rank, *args, **kwargs) as launch does, with the same promises, in
    the same processes and process group each time. They begin with the first call, in the environment and
    folder of that moment, and end with the block, `ranks.close()`, or when nobody has `ranks` any more.
    timeout (for each call), rules, backend and debug mean what they mean for launch.

    What a function puts on `kept` (`from course_utils.launch import kept`, `kept.model = ...`) stays in
    its rank for later calls, and so does the random state. What a cell defines comes anew with each call,
    globals too. A module that ranks have imported stays as it was: after a change to it, make new Ranks.

    Raises what launch raises. The message of a failure ends with what is left: if every rank has run the
    call to its end or has raised, no call of the group lacks its partner and no wait with a limit has
    failed, the ranks live on, with what they keep. Otherwise, as after the stop button, they have been
    ended, and further calls raise RuntimeError.
    """

    # What ends the ranks as soon as nobody has it; None where there are none any more.
    _opened = None

    def __init__(
        self,
        nprocs: int,
        *,
        timeout: float | None = None,
        rules: str | None = None,
        backend: str | None = None,
        debug: bool = False,
    ):
        _refuse_in_a_rank()
        still, whole = (_STILL, _WHOLE) if timeout is None else (timeout, timeout)
        nprocs = arguments.check_ranks(nprocs, still)
        self._nccl = rules is not None
        rules = arguments.check_rules(rules, backend)
        self._call = job.Launch(nprocs, still, whole, rules, backend, debug)
        self._ranks, self._meetings = [], Meetings([])  # until the first call
        self._opened = ExitStack()
        self._turn = threading.Lock()
        _all.add(self)

    def __call__(self, fn, *args, **kwargs) -> list:
        """Returns what fn(rank, *args, **kwargs) returns, by rank."""
        _refuse_in_a_rank()
        arguments.check_call(fn, args, kwargs, {})
        if elsewhere.starts():
            raise ValueError("Ranks(...) is for ranks on this machine, not on other hosts.")
        with self._turn:
            if self._opened is None:
                raise RuntimeError(f"these ranks take no more calls. {_ENDED}")
            try:
                return self._run(fn, args, kwargs)
            except RankFailure as error:
                if self._ranks:
                    error.args = (f"{error}\n{self._what_is_left()}",)
                failure = error.with_traceback(None)
            except BaseException as error:
                self.close()
                if not isinstance(error, KeyboardInterrupt):
                    raise
                failure = KeyboardInterrupt(f"the call was interrupted. {_ENDED}")
        del self, fn, args, kwargs  # sys.last_exc keeps this frame, and would keep the ranks
        raise failure

    def _run(self, fn, args, kwargs, start=None):
        packed = packed_calls(fn, arguments.of_ranks(args, kwargs, self._call.nprocs))
        name = getattr(fn, "__name__", type(fn).__name__)
        note("asked", f"{self._call.nprocs} ranks of {name}, {self._call.still:g} s")
        if start and self._call.debug:
            raise ValueError("launch(debug=True) is for ranks on this machine, not on other hosts.")
        if self._ranks:
            self._meetings.begin_call()
            for each, own in zip(self._ranks, packed, strict=True):
                each.call(own)
        else:
            self._ranks = (start or start_here)(self._opened, self._call, packed)
            self._meetings = Meetings([each.record for each in self._ranks])
        return watch(self._ranks, self._meetings, self._call, self._nccl)

    def _what_is_left(self):
        """Ends the ranks unless all wait for the next call, and none of their calls is on the way."""
        meetings = self._meetings
        if (
            all(each.joined and each.report and each.code is None for each in self._ranks)
            and meetings.complete
            and not meetings.mismatch()
            and not any(record.gave_up for record in meetings.records)
            and not any(meetings.lacking(each.number) for each in self._ranks)
        ):
            return _LIVE_ON
        self.close()
        return _ENDED

    def close(self) -> None:
        """Ends the ranks, and leaves nothing."""
        opened, self._opened = self._opened, None
        if opened:
            opened.close()

    __del__ = close  # while all of it is still there, also when the program ends

    def __exit__(self, *exception):
        self.close()

    def __reduce__(self):
        # A function may name ranks; they are refused where it uses them in a rank.
        return object.__new__, (Ranks,)


_all: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _in_a_fork():
    """They are the parent's: nothing may end them here, and no end of this process."""
    for each in _all:
        each._opened, each._turn = None, threading.Lock()


os.register_at_fork(after_in_child=_in_a_fork)


def _refuse_in_a_rank():
    if rank.inside:
        raise RuntimeError(
            "launch was called inside a rank; start all ranks with one launch, and form smaller "
            "groups among them with dist.new_group."
        )


def packed_calls(fn, of_ranks):
    """The call of each rank; what is the same for all is packed once."""
    sources = pickle.dumps(frames.cells())  # in no file: tracebacks in the ranks quote them
    packed = {}
    try:
        for given in of_ranks:
            packed[id(given)] = packed.get(id(given)) or [sources, *packing.pack((fn, *given))]
    except Exception as error:  # noqa: BLE001 - whatever an object's pickling raises is explained
        raise packing.failure(fn, *given, error) from None
    return [packed[id(given)] for given in of_ranks]


def start_here(opened, call, packed):
    """The ranks of a call on this machine, until `opened` is closed."""
    folder = job.temporary_folder(opened, range(call.nprocs))
    server.hold(opened)
    here = job.on_this_host(opened, call, call.placement(call.nprocs), folder)
    settings = packing.pack(call.for_ranks() | here)
    opened.callback(_end, ranks := [])
    for number, own in enumerate(packed):
        with uninterrupted():  # one that was started but is not in the list would stay
            ranks.append(RankProcess(number, folder))
        ranks[number].give(settings)  # it begins while the next one starts
        ranks[number].give(own)
    return ranks


@uninterrupted()
def _end(ranks):
    for r in ranks:
        r.kill()
    for r in ranks:
        r.close()
    note("ended", "all ranks, and what they had started")


def watch(ranks, meetings, call, nccl):
    """Returns what the ranks return; raises what has stopped them."""
    view = live.View(ranks, meetings)
    supervision = Supervision(ranks, meetings, call.still, call.whole, view.tick)
    try:
        reason = supervision.watch()
        note("over", reason)
        if reason == "failed" and any(host.orphaned() for host in {r.host for r in ranks}):
            reason = "orphaned"
        failure = diagnosis.explain(reason, ranks, meetings, supervision.limit, nccl)
    finally:
        view.close()
        for r in ranks:
            r.read_output()
            r.output.finish()
    if failure:
        raise failure
    return [r.report["result"] for r in ranks]
