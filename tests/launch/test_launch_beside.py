"""launch beside what else a learner does with multiprocessing, in a program of its own."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (IN_A_FORK, "[0, 1]\n[0, 1]\n[0, 1] 0\n"),
        (A_SERVER_OF_ITS_OWN_KIND, "[0, 1] True\n"),
    ],
    ids=["in a fork", "beside a process of the fork server"],
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
