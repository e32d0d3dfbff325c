"""The grader's hold on the server that forks its keepers (keeper_server.py)."""

import contextlib
import json
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Self

from course_exercises.sources.chapters import ROOT
from course_grader import outside, submission

_PROGRAM = "course_grader.keeper_server"
PROTECTED = b"p"  # what the server says first; else that there are no namespaces
UNPROTECTED = (
    "This system lets nobody make namespaces, so a submission could read your files, change them, and "
    "reach the network. Grade in a container or a machine that you can throw away, with --unprotected."
)
_STARTS = 3  # without namespaces, a submission may kill the server


class KeeperClient:
    """`isolated=False` does without namespaces, where they are possible; None uses them where they
    are. `protected` says whether they are used."""

    def __init__(self, isolated: bool | None):
        self._isolated = isolated
        self.protected = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._process.wait()  # it waits for its keepers, and these end everything

    def _start(self):
        self._control, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            _PROGRAM,
            str(theirs.fileno()),
            str(int(self._isolated is not False)),
            *submission.imported(),  # named here: the server never holds the sources, which have the answers
        ]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=outside.environment(),
                cwd=ROOT,  # where this package can be imported, and nothing else lies
            )
        with contextlib.suppress(ConnectionError):
            if said := self._control.recv(1):  # when it has imported all that it needs
                self.protected = said == PROTECTED
                if self._isolated and not self.protected:
                    raise RuntimeError(UNPROTECTED)
                return
        raise RuntimeError(f"The grader's server does not start: see above what {_PROGRAM} says.")

    def begin(self, job: dict, variant: str) -> Connection:
        """Starts a keeper for the job; returns the connection through which it reports."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._hand_over(theirs)
        keeper = Connection(ours.detach())
        with contextlib.suppress(ConnectionError):  # a server that dies now shows in the keeper
            keeper.send_bytes(json.dumps(job).encode())
            keeper.send_bytes(variant.encode())
        return keeper

    def _hand_over(self, end):
        for attempts_left in reversed(range(_STARTS)):
            try:
                socket.send_fds(self._control, [b"job"], [end.fileno()])
                return
            except ConnectionError:
                if not attempts_left:
                    raise RuntimeError("The grader's server is killed each time.") from None
                self._control.close()
                self._process.wait()
                self._start()
