"""Two learners on one machine: chapters 00 and 03 at once in servers of their own, and nothing left."""

import asyncio
import subprocess
import time

from hub import jupyterhub, open_folder, processes_of

USERS = {
    "course-test-ada": "notebooks/00_start_here.ipynb",
    "course-test-ben": "notebooks/03_ddp.ipynb",
}


async def _run_all(hub):
    return await asyncio.gather(*(hub.run(user, notebook) for user, notebook in USERS.items()))


def _files_of(user: str) -> list[str]:
    found = subprocess.run(
        ["find", "/tmp", "/var/tmp", "/dev/shm", "-user", user],
        capture_output=True,
        text=True,
        check=False,
    )
    kept = (f"/homes/{user}", "/torchinductor_")  # PyTorch keeps its cache for good
    return [line for line in found.stdout.splitlines() if not any(word in line for word in kept)]


def test_two_learners_run_chapters_at_once_and_leave_nothing(capsys):
    with open_folder() as folder, jupyterhub(folder, list(USERS)) as hub:
        for user in USERS:
            hub.start_server(user)
        outcomes = asyncio.run(_run_all(hub))
        memory = {user: hub.memory(user) for user in USERS}
        for user in USERS:
            hub.stop_server(user)
        _nothing_left()
        left = {user: _files_of(user) for user in USERS}
    with capsys.disabled():
        for user, parts in memory.items():
            print(f"\n{user}: {sum(parts.values())} MB (PSS) {parts}")
    assert hub.left == []
    for user, failed in zip(USERS, outcomes, strict=True):
        assert failed == [], user
    assert left == {user: [] for user in USERS}
    assert not folder.exists()


def _nothing_left():
    end = time.monotonic() + 10
    while left := [p for user in USERS for p in processes_of(user)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
