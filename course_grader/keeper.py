"""Watches over the processes of one exercise: what they use, what comes out, that they all end.

    grader -> server -> keeper -> judge
                               -> first -> worker -> whatever the submission starts

The worker (worker.py) alone runs the submission's code, and the judge (judge.py) alone makes the
verdict and writes it: the pipe of the outcome is in no process of the submission's. The first process is there to be lost:
it is the worker's parent, and code may try to kill that. In a namespace of its own it cannot be
killed from inside, and with it everything there ends.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from multiprocessing.connection import Connection

import psutil

from course_grader import isolation, judge, tree, worker
from course_grader.limits import PATIENCE, Limits
from course_utils.launch.keepers import forks

_TICK = 0.1  # seconds between two looks at what the processes use
_LONGEST_OUTCOME = 1 << 20  # bytes
_FILES_IN_MEMORY = 4  # the folder, if it lies in memory, holds so many of the largest files


def main(grader: Connection, isolated: bool) -> None:
    """The whole life of a keeper. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the grader's to handle
        os.setsid()
        isolation.adopt_orphans()
        exercise = _Watched(grader, isolated)
        try:
            exercise.announce(grader)
            exercise.watch(grader)
        finally:
            exercise.end()
        grader.send_bytes(json.dumps(exercise.report).encode())
        code = 0
    except (EOFError, ConnectionError):
        code = 0  # the grader is gone
    finally:
        os._exit(code)


class _Watched:
    """The processes of one exercise.

    report: "outcome", what the judge has written; "status", the worker's wait status, None where
    it had to be ended; "broken", the limit that it broke, or None; "seconds", how long it took.
    """

    def __init__(self, grader: Connection, isolated: bool):
        job = json.loads(grader.recv_bytes())
        self.report = {"outcome": "", "status": None, "broken": None, "seconds": 0.0}
        self._limits = Limits(**job["limits"])
        self._started = self._looked = time.monotonic()
        self._used = self._counted = 0.0
        self._inherited = tree.own_memory(psutil.Process())
        self._written = b""
        self._outcome, outcome = os.pipe()
        self._ending, ending = os.pipe()
        reader, writer = os.pipe()
        niceness = _come_first()
        (judges, workers), (askers, homes) = socket.socketpair(), socket.socketpair()
        self._judge = os.fork()
        if self._judge == 0:
            isolation.die_with_parent()
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            forks.close_files_but({outcome, reader, judges.fileno(), askers.fileno()})
            lines = Connection(judges.detach()), Connection(askers.detach())
            judge.main(job["asked"]["id"], reader, *lines, outcome)
        if isolated:
            isolation.detach()
        self._first = os.fork()
        if self._first == 0:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            forks.close_files_but({workers.fileno(), homes.fileno(), ending})
            lines = Connection(workers.detach()), Connection(homes.detach())
            _first(job | {"isolated": isolated}, lines, ending)
        for own in (judges, workers, askers, homes):
            own.close()
        for fd in (outcome, ending, reader):
            os.close(fd)
        # Only now is the variant read: a worker's memory begins as a copy of this one's.
        with open(writer, "wb") as variant:
            variant.write(grader.recv_bytes())

    def announce(self, grader: Connection) -> None:
        """Tells the grader which processes to end if this one cannot do that any more."""
        grader.send_bytes(
            json.dumps({"processes": [os.getpid(), self._first, self._judge]}).encode()
        )

    def watch(self, grader: Connection) -> None:
        """Returns when the judge has spoken or a limit is broken. Raises EOFError without a grader.
        Where the worker has ended before the verdict, it waits for the worker's status too."""
        open_ends = {self._outcome, self._ending}
        while self.report["broken"] is None and not self._done(open_ends):
            ready = select.select([*open_ends, grader], [], [], _TICK)[0]
            if grader in ready:
                raise EOFError
            if self._outcome in ready and not self._read_outcome():
                open_ends.discard(self._outcome)
            if self._ending in ready:
                open_ends.discard(self._ending)
                self._read_ending()
            else:
                self.report["broken"] = self._broken_limit()

    def _done(self, open_ends):
        spoken = self._outcome not in open_ends
        return spoken and (b'"ended"' not in self._written or self._ending not in open_ends)

    def _read_ending(self):
        status = os.read(self._ending, 100)
        if status:
            self.report["status"] = int(status)
        else:
            self.report["broken"] = "parent"

    def _broken_limit(self):
        processes = [p for p in tree.below() if p.pid != self._judge]
        self._count_time(processes)
        if self._counted > self._limits.seconds:
            return "seconds"
        if time.monotonic() - self._started > PATIENCE * self._limits.seconds:
            return "patience"
        if len(processes) - 1 > self._limits.processes:  # the first is ours
            return "processes"
        limit, inherited = self._limits.memory, self._inherited
        # The exact count is slow, and while it goes on a fork storm grows: only where it decides.
        if tree.memory(processes, inherited) > limit < tree.exact_memory(processes, inherited):
            return "memory"
        return None

    def _count_time(self, processes):
        """Counts the time in which the code computes or waits, not that in which a busy machine has
        no processor for it: a right answer must not lose its points to somebody else's work."""
        self._reap_strays()
        now, used = time.monotonic(), tree.seconds_used(processes)
        passed, computed = now - self._looked, max(0.0, used - self._used)
        wants = any(tree.wants_processor(process) for process in processes)
        self._counted += min(passed, computed) if wants else passed
        self._looked, self._used = now, used

    def _reap_strays(self):
        """Ends the wait of those that were left to this process, so that their time counts."""
        with contextlib.suppress(ChildProcessError):
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while ended := os.waitid(os.P_ALL, 0, look):
                if ended.si_pid in (self._first, self._judge):
                    return
                os.waitpid(ended.si_pid, 0)

    def _read_outcome(self):
        data = os.read(self._outcome, 1 << 16)
        self._written = (self._written + data)[:_LONGEST_OUTCOME]
        return data

    def end(self) -> None:
        """Ends whatever still runs, and completes the report."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        tree.end(tree.below)
        while self._read_outcome():  # nobody can write any more
            pass
        self.report["outcome"] = self._written.decode("utf-8", "replace")
        self.report["seconds"] = self._counted


def _come_first() -> int:
    """Gives this process precedence over those that it watches, or the other way round: thousands
    may want the processor. Returns the niceness of those."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, usual - 15)
        return usual
    except PermissionError:
        return usual + 5


def _first(job, lines, ending):
    """The worker's parent: reports how the worker ended. Never returns."""
    try:
        isolation.die_with_parent()
        isolation.be_killed_first()  # before it is closed in: /proc is read-only there
        if job["isolated"]:
            isolation.close_in(job["folder"], _FILES_IN_MEMORY * job["limits"]["file"])
        child = os.fork()
        if child == 0:
            os.close(ending)
            worker.main(job, *lines)
        for line in lines:
            line.close()
        while (ended := os.wait())[0] != child:
            pass
        os.write(ending, str(ended[1]).encode())
    finally:
        os._exit(0)
