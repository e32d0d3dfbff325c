"""launch beside what else a learner does with multiprocessing, in a program of its own."""

import subprocess
import sys

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="where shared memory lies is Linux's")
IN_A_FORK = """
import multiprocessing, time
from course_utils.launch import launch

def number(rank):
    return rank

print(launch(number, 2))
child = multiprocessing.get_context("fork").Process(target=lambda: print(launch(number, 2), flush=True))
child.start()
child.join()
time.sleep(2)  # by then the child's janitor has ended all that was the child's
print(launch(number, 2), child.exitcode)
"""
A_SERVER_OF_ITS_OWN_KIND = """
import multiprocessing, time
from course_utils.launch import launch

def number(rank):
    return rank

launch(number, 2)
other = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(1000,))
other.start()
print(launch(number, 2), other.is_alive())
other.terminate()
"""
A_FORK_THAT_ENDS = """
import os, sys
from course_utils.launch import launch
from course_utils.launch.keepers import server

def number(rank):
    return rank

launch(number, 2)
before = server._server.pid
if os.fork() == 0:
    sys.exit()
os.wait()
print(launch(number, 2), server._server.pid == before)
"""
A_MANAGER = """
import multiprocessing
from course_utils.launch import launch

def note(rank, found):
    found[rank] = 10 * rank

with multiprocessing.Manager() as manager:
    found = manager.dict()
    launch(note, 2, found)
    print(sorted(found.items()))
"""
IN_SHARED_MEMORY = """
import os, time
from multiprocessing import shared_memory
from course_utils.launch import launch

def leave(rank):
    return shared_memory.SharedMemory(create=True, size=1).name

name, = launch(leave, 1)
print(os.path.exists(f"/dev/shm/{name}"))  # another rank may have it yet
from course_utils.launch.keepers import server
server.IDLE = 0
server.leave_if_idle()
while os.path.exists(f"/dev/shm/{name}"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (IN_A_FORK, "[0, 1]\n[0, 1]\n[0, 1] 0\n"),
        (A_FORK_THAT_ENDS, "[0, 1] True\n"),
        (A_SERVER_OF_ITS_OWN_KIND, "[0, 1] True\n"),
        (A_MANAGER, "[(0, 0), (1, 10)]\n"),
        pytest.param(IN_SHARED_MEMORY, "True\n", marks=LINUX),
    ],
    ids=[
        "in a fork",
        "a fork that ends",
        "beside another fork server",
        "a manager",
        "in shared memory",
    ],
)
def test_launch_and_multiprocessing_leave_each_other_alone(program, printed, tmp_path):
    guarded = "if __name__ == '__main__':\n" + "".join(
        f"    {line}\n" for line in program.splitlines()
    )
    (tmp_path / "program.py").write_text(guarded)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.stdout, ran.returncode) == (printed, 0), ran.stderr


REPLACED = """
import importlib, multiprocessing, pkgutil, torch

found = pkgutil.iter_modules(multiprocessing.__path__)
names = [each.name for each in found if "win32" not in each.name]
parts = [multiprocessing, *(importlib.import_module(f"multiprocessing.{name}") for name in names)]

def state():
    owners = [*parts, *(v for part in parts for v in vars(part).values() if isinstance(v, type))]
    owners += [multiprocessing.current_process(), importlib.import_module("multiprocessing.forkserver")._forkserver]
    return {(str(owner), name): value for owner in owners for name, value in vars(owner).items()}

before = state()
from course_utils.launch import launch
launch(lambda rank: rank, 1)
after = state()
print([key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)])
"""


def test_launch_replaces_nothing_in_multiprocessing():
    ran = subprocess.run(
        [sys.executable, "-c", REPLACED], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "[]\n", ran.stderr
