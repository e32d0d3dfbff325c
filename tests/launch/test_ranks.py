"""Ranks that stay for several calls: what they keep, and what a call that fails leaves of them."""

import functools
import gc
import linecache
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils.launch import RankFailure, kept
from course_utils.launch.ranks import elsewhere
from tests.support.leftovers import living, nothing_left
from tests.support.on_gloo import Ranks, launch

LIVE_ON = "\nThe ranks live on, with what they keep."
ENDED = "The ranks have been ended, and what they kept is gone; Ranks(...) makes others."
NO_MORE = "these ranks take no more calls. " + ENDED
SIZE = 3


def remember(rank):
    kept.total = torch.full((2,), float(rank))
    return os.getpid()


def add_up(rank, times=1):
    for _ in range(times):
        dist.all_reduce(kept.total)
    return kept.total[0].item(), os.getpid()


def raise_everywhere(rank):
    raise ValueError(f"rank {rank} has nothing")


@pytest.fixture
def ranks():
    with Ranks(2) as ranks:
        yield ranks


# --- what stays -----------------------------------------------------------------------------------


def test_processes_their_group_and_what_they_keep_stay():
    with Ranks(SIZE) as ranks:
        processes = ranks(remember)
        assert ranks(add_up) == [(3.0, process) for process in processes]
        assert ranks(add_up, times=2) == [(27.0, process) for process in processes]


def test_other_ranks_and_launch_have_their_own(ranks):
    ranks(remember)
    for run in (functools.partial(launch, nprocs=2), Ranks(2)):
        with pytest.raises(RankFailure, match="kept has no 'total' here: an earlier call of these"):
            run(add_up)
    assert [value for value, _ in ranks(add_up)] == [1.0, 1.0]


def test_a_global_is_new_with_each_call(ranks):
    cell = {"__name__": "__main__"}
    source = "count = 0\ndef add_one(rank):\n    global count\n    count += 1\n    return count"
    exec(source, cell)  # noqa: S102
    assert ranks(cell["add_one"]) == ranks(cell["add_one"]) == [1, 1]
    cell["count"] = 10
    assert ranks(cell["add_one"]) == [11, 11]


def test_classes_stay_the_same(ranks):
    class Point:
        pass

    def make(rank):
        kept.point = Point()

    ranks(make)
    assert ranks(lambda rank: isinstance(kept.point, Point)) == [True, True]


def test_the_random_state_goes_on(ranks):
    def seed(rank):
        torch.manual_seed(7)
        numpy.random.seed(7)
        random.seed(7)

    def draw(rank):
        return torch.rand(1).item(), numpy.random.rand(), random.random()

    different = ranks(draw)
    assert len({*different, *ranks(draw)}) == 4
    ranks(seed)
    first, second = ranks(draw), ranks(draw)
    assert first[0] == first[1] != second[0] == second[1]


def test_handlers_of_signals_stay(ranks):
    def install(rank):
        signal.signal(signal.SIGUSR1, lambda *_: setattr(kept, "told", rank))

    ranks(install)
    assert ranks(lambda rank: os.kill(os.getpid(), signal.SIGUSR1) or kept.told) == [0, 1]


def test_tensors_come_back_from_each_call(ranks):
    for size in (3, 300_000):
        for rank, got in enumerate(ranks(lambda rank, t: t + rank, torch.ones(size))):
            assert torch.equal(got, torch.full((size,), 1.0 + rank))


def test_what_is_printed_comes_with_its_call(ranks, capsys):
    ranks(lambda rank: print(300_000 * "x"))  # more than is shown of a call
    assert "bytes left out" in capsys.readouterr().out
    for word in ("one", "two"):
        ranks(lambda rank, word: print(word), word)
        assert capsys.readouterr().out == f"[rank 0] {word}\n[rank 1] {word}\n"


def test_figures_come_with_their_call(capsys):
    def draw(rank, number, fail=False):
        from matplotlib import pyplot

        for _ in range(number):
            pyplot.figure(figsize=(1, 1))
            pyplot.show()
        pyplot.figure(figsize=(2, 2))
        assert not fail

    with Ranks(1) as ranks:
        with pytest.raises(RankFailure):
            ranks(draw, 1, fail=True)
        for _ in range(2):  # of one process, a call shows at most twenty
            capsys.readouterr()
            ranks(draw, 19)
            shown = capsys.readouterr().out.splitlines()
            assert len(shown) == 20 and "200x200" in shown[-1] and "100x100" in shown[-2]


def test_cells_that_are_newer_than_the_ranks(ranks):
    ranks(remember)
    source = "def broken(rank):\n    return 1 / 0  # newer\n"
    linecache.cache["<newer>"] = (len(source), None, source.splitlines(True), "<newer>")
    names = {}
    exec(compile(source, "<newer>", "exec"), names)  # noqa: S102
    with pytest.raises(RankFailure, match="line 2, in broken: .*# newer") as caught:
        ranks(names["broken"])
    assert "return 1 / 0  # newer" in caught.value.traceback(1)


def test_a_debugger_in_a_later_call(monkeypatch, capsys):
    def stop(rank):
        number = 40 + rank
        breakpoint()  # noqa: T100
        return number

    lines = iter(["number", "number = 7", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with Ranks(1, debug=True) as ranks:
        ranks(remember)
        assert ranks(stop) == [7]
    assert "[rank 0] 40" in capsys.readouterr().out


# --- a call that fails ----------------------------------------------------------------------------


def test_ranks_that_all_come_back_live_on(ranks):
    processes = ranks(remember)
    with pytest.raises(RankFailure, match="rank 0 raised ValueError: rank 0 has nothing") as caught:
        ranks(raise_everywhere)
    assert str(caught.value).endswith(LIVE_ON)
    with pytest.raises(RankFailure, match="could not return|returned what cannot") as caught:
        ranks(lambda rank: threading.Lock())
    assert str(caught.value).endswith(LIVE_ON)
    with pytest.raises(RankFailure, match="argument 1 .*cannot be pickled") as caught:
        ranks(add_up, threading.Lock())
    assert str(caught.value).endswith(LIVE_ON)
    assert ranks(add_up) == [(1.0, process) for process in processes]


class Unreadable:
    def __reduce__(self):
        return int, ("unreadable",)


def test_ranks_that_cannot_begin_are_ended(ranks):
    with pytest.raises(RankFailure, match="invalid literal") as caught:
        ranks(add_up, Unreadable())
    assert str(caught.value).endswith(ENDED)


def raises(rank, guilty):
    if rank == guilty:
        raise ValueError("mine")
    dist.barrier()


def exits(rank, guilty):
    if rank == guilty:
        sys.exit(3)
    dist.barrier()


def is_killed(rank, guilty):
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leaves_out_a_call(rank, guilty):
    if rank != guilty:
        dist.all_reduce(kept.total)


def adds_other_numbers(rank, guilty):
    dist.all_reduce(kept.total.int() if rank == guilty else kept.total)


def does_not_wait(rank, guilty):
    if rank != guilty:
        kept.work = dist.all_reduce(kept.total, async_op=True)


SAID = {
    raises: "rank {guilty} raised ValueError: mine",
    exits: "rank {guilty} called sys.exit(3)",
    is_killed: "rank {guilty} was killed by SIGKILL",
    leaves_out_a_call: "rank {guilty} finished without calling it",
    adds_other_numbers: "rank {guilty}: all_reduce of int32 [2]",
    does_not_wait: "rank {guilty} finished without calling it",  # said of this call, not of the next
}
CASES = [(fn, guilty) for fn in SAID for guilty in range(SIZE)]


@pytest.fixture(scope="module")
def failures():
    def provoke(case):
        fn, guilty = case
        with Ranks(SIZE) as ranks:
            ranks(remember)
            ranks(add_up)
            with pytest.raises(RankFailure) as caught:
                ranks(fn, guilty)
            with pytest.raises(RuntimeError, match=re.escape(NO_MORE)):
                ranks(add_up)
        return caught.value

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(CASES, pool.map(provoke, CASES)))


@pytest.mark.parametrize(("fn", "guilty"), CASES)
def test_ranks_that_do_not_come_back_are_ended(fn, guilty, failures):
    message = str(failures[fn, guilty])
    assert SAID[fn].format(guilty=guilty) in message and message.endswith("\n" + ENDED), message


def test_what_an_earlier_call_did_is_not_the_cause(ranks):
    def go_apart(rank):
        if rank == 0:
            dist.barrier()  # each at a line of its own
        else:
            dist.barrier()
            thread = threading.Thread(target=raise_everywhere, args=(rank,))
            thread.start()
            thread.join()

    def leave_out(rank):
        if rank == 1:
            dist.barrier()

    ranks(go_apart)
    with pytest.raises(RankFailure) as caught:
        ranks(leave_out)
    assert caught.value.kind == "timeout"
    told = str(caught.value)
    assert "rank 0 finished without calling it" in told
    assert "has nothing" not in told and "each at a line of its own" not in told


def test_each_function_may_take_over_the_group(ranks):
    def as_under_torchrun(rank):
        dist.init_process_group("gloo")
        dist.barrier()
        return dist.get_world_size()

    assert ranks(as_under_torchrun) == ranks(as_under_torchrun) == [2, 2]


def test_the_timeout_is_for_each_call():
    with Ranks(1, timeout=3.0) as ranks:
        for _ in range(3):
            ranks(lambda rank: time.sleep(1.2))
        with pytest.raises(RankFailure, match=r"was running when the time was up \(timeout=3"):
            ranks(lambda rank: sum(iter(int, 1)))


def test_ranks_that_die_between_two_calls(ranks):
    os.kill(ranks(remember)[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL") as caught:
        ranks(add_up)
    assert str(caught.value).endswith("\n" + ENDED)


# --- nothing is left ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    launch(remember, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def by_the_block():
    with Ranks(2) as ranks:
        ranks(remember)


def by_an_exception():
    with pytest.raises(KeyError), Ranks(2) as ranks:
        ranks(remember)
        raise KeyError


def by_hand():
    ranks = Ranks(2)
    ranks(remember)
    ranks.close()
    with pytest.raises(RuntimeError, match=re.escape(NO_MORE)):
        ranks(remember)


def by_nobody():
    Ranks(2)(remember)


def by_nobody_after_a_failure():
    """A kernel keeps the newest exception, and with it the frames of its traceback."""
    ranks = Ranks(2)
    try:
        ranks(raise_everywhere)
    except RankFailure as failure:
        assert str(failure).endswith(LIVE_ON)
        sys.last_value = failure
    del ranks  # of this function's frame; in a notebook another cell gives the name away


def by_an_interrupt():
    def interrupt(rank, kernel):
        dist.barrier()
        if rank == 0:
            os.kill(kernel, signal.SIGINT)
        time.sleep(1000)

    ranks = Ranks(2)
    ranks(remember)
    with pytest.raises(KeyboardInterrupt, match="the call was interrupted. The ranks have been"):
        ranks(interrupt, os.getpid())
    with pytest.raises(RuntimeError, match=re.escape(NO_MORE)):
        ranks(remember)


@pytest.mark.parametrize(
    "end",
    [
        *(by_the_block, by_an_exception, by_hand, by_nobody, by_nobody_after_a_failure),
        by_an_interrupt,
    ],
)
def test_nothing_is_left(end, folder):
    with nothing_left(folder):
        end()
        gc.collect()


PROGRAM = """
import os, sys, time
from course_utils.launch import Ranks, kept

def remember(rank):
    kept.rank = rank
    return os.getpid()

ranks = Ranks(2, backend="gloo")
print(*ranks(remember), flush=True)
"""
IN_A_FORK = """
if os.fork() == 0:
    try:
        ranks(remember)
    except RuntimeError as error:
        print(error, flush=True)
    del ranks
    sys.exit()
os.wait()
print(ranks(lambda rank: kept.rank), *sorted(os.listdir(os.environ["TMPDIR"])))
"""


def _program(text, folder):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + text],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_fork_of_the_kernel_leaves_them_alone_and_its_own_end_does_not(tmp_path):
    said, warned = _program(IN_A_FORK, tmp_path).communicate(timeout=180)
    _, refused, answer = said.splitlines()
    assert refused == NO_MORE and answer.startswith("[0, 1] course-launch-")
    assert warned == "" and not list(tmp_path.glob("course-*"))


def test_a_kernel_that_is_killed_takes_them_with_it(tmp_path):
    kernel = _program("time.sleep(1000)", tmp_path)
    below = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
    assert len(below) == 2
    kernel.kill()
    kernel.communicate(timeout=180)
    end = time.monotonic() + 2
    while any(map(living, below)) or list(tmp_path.glob("course-*")):
        assert time.monotonic() < end
        time.sleep(0.02)


# --- where they cannot be used --------------------------------------------------------------------


def test_inside_a_rank_they_are_refused(ranks):
    for nested in (lambda rank: ranks(add_up), lambda rank: Ranks(2)):
        with pytest.raises(RankFailure, match="launch was called inside a rank; start all ranks"):
            ranks(nested)


def test_on_other_hosts_they_are_refused(ranks):
    with elsewhere.started_by(object), pytest.raises(ValueError, match="on this machine"):
        ranks(remember)
    assert ranks(remember)


def test_calls_of_two_threads_take_turns(ranks):
    def add_slowly(rank, number):
        kept.total[:] = number
        time.sleep(0.1)
        return add_up(rank)[0]

    ranks(remember)
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(functools.partial(ranks, add_slowly), range(3)))
    assert got == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


@pytest.mark.parametrize("nprocs", [0, 65, "2"])
def test_a_number_of_ranks_that_makes_no_sense(nprocs):
    with pytest.raises((TypeError, ValueError), match="nprocs is the number of ranks"):
        Ranks(nprocs)


def test_a_function_that_does_not_take_what_it_is_given(ranks):
    with pytest.raises(TypeError, match="the others are launch's further arguments.$"):
        ranks(remember, 1)
    assert ranks(remember)
