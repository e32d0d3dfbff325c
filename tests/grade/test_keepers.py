"""The server of the grader's keepers takes note of each that ends."""

import subprocess
import sys

# A keeper that was killed, what it left, and another keeper, which ends while that is being ended.
PROGRAM = """
import os, signal, time
from pathlib import Path
from course_grader import keeper_server


def forked(work):
    process = os.fork()
    if process == 0:
        work()
        os._exit(0)
    return process


def until_it_is_stopped():
    while " (python" in (told := Path(f"/proc/{stray}/stat").read_text()) and ") S" in told:
        time.sleep(0.0005)


killed, stray = (forked(lambda: time.sleep(1000)) for _ in range(2))
other = forked(until_it_is_stopped)
keepers = {killed, other}
os.kill(killed, signal.SIGKILL)
end = time.monotonic() + 20
while keepers and time.monotonic() < end:
    keeper_server._look_after(keepers)
    time.sleep(0.01)
print(keepers, Path(f"/proc/{stray}").exists())
"""


def test_a_keeper_that_ends_while_another_ones_processes_are_ended_is_known_to_have_ended():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "set() False\n"
