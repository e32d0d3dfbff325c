"""Programs that a chapter runs as in a terminal: what they print, how they fail, how they end."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import IPython.display
import psutil
import pytest

from course_utils import hardware
from course_utils.lesson import terminal
from course_utils.lesson.terminal import run_in_terminal, scratch, torchrun
from tests.support.leftovers import living

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"{sys.argv[1]}: {total.item():.0f} ranks")
dist.destroy_process_group()
"""


def test_what_a_program_prints_comes_back():
    assert run_in_terminal(sys.executable, "-c", "print('hello')") == "hello\n"


def test_a_program_that_fails_shows_the_end_of_its_errors():
    said = run_in_terminal(
        sys.executable, "-c", "print('lost'); raise SystemExit('no such street')"
    )
    assert said == "no such street\n"


def test_a_program_is_told_what_not_to_print():
    script = f"import os; print(*map(os.environ.get, {list(hardware.QUIET)!r}))"
    assert run_in_terminal(sys.executable, "-c", script) == "false 6\n"


def test_torchrun_starts_ranks_that_meet(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(SCRIPT)
    assert torchrun(2, script, "all") == "all: 2 ranks\n"


def test_a_rank_writes_whole_lines_where_python_is_told_not_to_buffer(monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    asked = "import sys; print(sys.stdout.write_through)"
    assert run_in_terminal(sys.executable, "-c", asked) == "False\n"


def test_lines_of_two_ranks_do_not_mix(tmp_path):
    script, line = tmp_path / "counts.py", "*range(50)"
    script.write_text(f"for _ in range(300): print({line})")
    expected = " ".join(map(str, range(50)))
    assert set(torchrun(2, script).splitlines()) == {expected}


def test_another_sitecustomize_is_imported_too(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_in_terminal(sys.executable, "-c", "print('and the program')") == (
        "mine\nand the program\n"
    )


def test_what_a_rank_says_is_shown_and_not_torchruns_own_traceback(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('no such street')")
    said = torchrun(1, script)
    assert "no such street" in said and "ChildFailedError" not in said


def test_torchrun_leaves_no_folder_of_logs(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    (tmp_path / "nothing.py").touch()
    assert torchrun(1, tmp_path / "nothing.py") == ""
    assert list(temporary.iterdir()) == []


def test_time_that_is_up_ends_the_program(tmp_path, monkeypatch):
    mark = tmp_path / "pid"
    time_counts(monkeypatch, lambda: 1.0 if mark.exists() else 0.0)
    script = "import os, pathlib, time\nprint('half way', flush=True)\n"
    script += f"pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n"
    with pytest.raises(TimeoutError, match="(?s)was still running after .* had printed:\nhalf way"):
        run_in_terminal(sys.executable, "-c", script + "time.sleep(600)", timeout=1)
    assert not psutil.pid_exists(int(mark.read_text()))


HANGS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank):
    meeting = "file://" + os.path.abspath("meeting")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    open(f"{rank}-{os.getpid()}", "w").close()
    dist.barrier() if rank == 0 else dist.recv(torch.ones(1), 0)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def test_what_a_program_has_spawned_ends_with_it(tmp_path, monkeypatch):
    spawned = []

    def passed():  # time begins when both are there
        pids = [int(path.name.partition("-")[2]) for path in tmp_path.glob("?-*")]
        if len(pids) < 2:
            return 0.0
        spawned[:] = map(psutil.Process, pids)
        return 5.0

    monkeypatch.chdir(tmp_path)
    time_counts(monkeypatch, passed)
    Path("hangs.py").write_text(HANGS)
    with pytest.raises(TimeoutError, match="and was ended"):
        run_in_terminal(sys.executable, "hangs.py", timeout=10)
    assert len(spawned) == 2
    end = time.monotonic() + 5
    while any(map(living, spawned)):
        assert time.monotonic() < end, spawned
        time.sleep(0.01)


LISTENS = """
import os, psutil, torch.distributed as dist
dist.init_process_group("gloo")
seen = [c for pid in (os.getpid(), os.getppid()) for c in psutil.Process(pid).net_connections("tcp")]
print({c.laddr.ip for c in seen if c.status == "LISTEN"} - {"127.0.0.1"})
dist.destroy_process_group()
"""


def test_neither_torchruns_agent_nor_a_rank_listens_to_other_machines(tmp_path):
    (tmp_path / "listens.py").write_text(LISTENS)
    assert torchrun(1, tmp_path / "listens.py") == "set()\n"


def test_time_without_a_processor_does_not_count(monkeypatch):
    monkeypatch.setattr(terminal, "_TICK", 0.01)
    time_counts(monkeypatch, lambda: 0.0)
    rests = [sys.executable, "-c", "import time; time.sleep(1); print('there')"]
    assert run_in_terminal(*rests, timeout=0.1) == "there\n"


def time_counts(monkeypatch, passed):
    """Puts a clock in place that says how many seconds count of each tick."""
    monkeypatch.setattr(terminal, "FairClock", lambda pid: SimpleNamespace(passed=passed))


def test_a_line_counts_the_seconds_and_goes(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda html: shown.append(html.data))
    monkeypatch.setattr(IPython.display, "display", lambda *_, **__: handle)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(terminal, "_TICK", 0.01)
    progress = terminal._Progress()
    progress.show("too early")
    progress._begins = 0.0
    progress.show("still running after 6 seconds ...")
    progress.clear()
    assert shown == ["<i>still running after 6 seconds ...</i>", "<i></i>"]


def test_under_nbval_the_line_is_not_shown(monkeypatch):
    monkeypatch.setattr(IPython.display, "display", lambda *_, **__: pytest.fail("shown"))
    progress = terminal._Progress()
    progress._begins = 0.0
    progress.show("still running after 6 seconds ...")
    progress.clear()


def test_scratch_lies_beside_the_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert [scratch(), scratch()] == [Path("scratch")] * 2
    assert (tmp_path / "scratch").is_dir() and not capsys.readouterr().out


def test_scratch_of_a_read_only_course_is_the_users_own(tmp_path, monkeypatch, capsys):
    course = tmp_path / "notebooks"
    course.mkdir()
    monkeypatch.chdir(course)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != course)
    (scratch() / "train.py").write_text("print('hello')")
    own = tmp_path / "cache" / "parallelism-course" / "notebooks" / "scratch"
    assert (own / "train.py").exists() and not list(course.iterdir())
    assert str(own) in capsys.readouterr().out
    assert run_in_terminal(sys.executable, "scratch/train.py") == "hello\n"
