"""The server that forks a keeper for each exercise: it has imported all that a check needs.

It is a program of its own, so that nothing of the grader's process (nbgrader's, for instance) is
in what it forks, and it never sees a submission: a keeper gets its job from the grader itself.
"""

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection

import psutil

from course_exercises.checks import catalogue
from course_grader import isolation, keeper, standins, tree
from course_grader.keeper_client import PROTECTED
from course_utils.launch.keepers import forks
from course_utils.lesson import mnist


def main(control: socket.socket, isolated: bool, imported: list[str]) -> None:
    """Forks a keeper for each connection that arrives through `control`, until that is closed and
    all keepers have ended. imported: modules that cells of the course import."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    isolation.adopt_orphans()
    isolated = isolated and isolation.possible()
    forks.without("course_exercises.chapters")  # what a check expects is not for workers
    forks.import_preloaded()
    for name in [*catalogue.imported(), *standins.IMPORTED, *imported]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(RuntimeError, OSError):
        mnist.dataset(train=False)  # unpacks the files: in namespaces nobody could write them
    control.sendall(PROTECTED if isolated else b"u")  # from now on it answers at once
    keepers: set[int] = set()
    listening = True
    while listening or keepers:
        if select.select([control] if listening else [], [], [], 0.2)[0]:
            message, fds, *_ = socket.recv_fds(control, 100, 1)
            listening = bool(message)
            for fd in fds:
                keepers.add(_fork(fd, control, isolated))
        _look_after(keepers)


def _fork(fd, control, isolated):
    process = os.fork()
    if process == 0:
        control.close()
        keeper.main(Connection(fd), isolated)
    os.close(fd)
    return process


def _look_after(keepers: set[int]) -> None:
    """Forgets the keepers that have ended, and ends what one has left that was killed."""
    ended = tree.reap()
    while any(ended.get(keeper) for keeper in keepers):  # one was killed
        keepers.difference_update(ended)
        ended = tree.end(lambda: _strays(keepers))  # others may end meanwhile
    keepers.difference_update(ended)


def _strays(keepers):
    found = []
    for child in psutil.Process().children():
        if child.pid not in keepers:
            found += [child, *tree.below(child)]
    return [process for process in found if tree.alive(process)]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), bool(int(sys.argv[2])), sys.argv[3:])
    os._exit(0)  # C libraries would list at the end, in the instructor's terminal, what they leak
