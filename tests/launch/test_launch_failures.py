"""What a RankFailure has to say beyond the rank and its line: causes, notes, members, the whole
traceback."""

import pickle
import queue
import signal
import threading
from collections import ChainMap

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from course_utils import hardware
from course_utils.launch import RankFailure
from course_utils.launch import launch as launch_as_asked
from tests.support.on_gloo import launch


def _failure(fn, nprocs=2, *args, **how):
    with pytest.raises(RankFailure) as caught:
        launch(fn, nprocs, *args, **how)
    return caught.value


# --- the message ----------------------------------------------------------------------------------


def _reads(path):
    open(path)  # noqa: SIM115 - it fails


def _raises_from(rank):
    if rank == 1:
        try:
            _reads("/nowhere/config")
        except OSError as error:
            raise RuntimeError("cannot read config") from error
    dist.barrier()


def test_message_has_the_cause_and_its_lines():
    failure = _failure(_raises_from)
    lines = str(failure).splitlines()
    assert lines[0] == "rank 1 raised RuntimeError: cannot read config"
    assert lines[1].endswith('raise RuntimeError("cannot read config") from error')
    assert lines[2].startswith("which was caused by FileNotFoundError: [Errno 2]")
    assert lines[3].endswith('_reads("/nowhere/config")')
    assert "in _reads:  open(path)" in lines[4]
    assert lines[5].startswith("Meanwhile rank 0 was waiting in barrier")
    assert len(lines) == 6
    assert failure.line == _line_of(lines[1])


def _line_of(quote):
    return int(quote.split("line ")[1].split(",")[0])


def _raises_as_it_handles(rank):
    try:
        {}["a"]
    except KeyError:
        int("three")


def _raises_instead(rank):
    try:
        {}["a"]
    except KeyError:
        raise ValueError("no a") from None


def test_message_has_what_was_being_handled():
    lines = str(_failure(_raises_as_it_handles)).splitlines()
    assert lines[2] == "while it handled KeyError: 'a'"
    assert lines[3].endswith('{}["a"]')
    assert "handled" not in str(_failure(_raises_instead))


def test_what_a_library_handles_is_no_part_of_the_message():
    def no_such_key(rank):
        ChainMap({}).pop("a")

    failure = _failure(no_such_key, 1)
    assert len(str(failure).splitlines()) == 2
    assert "During handling of the above exception" in failure.traceback(0)


def _raises_several(rank):
    errors = []
    for index in range(3):
        try:
            if index == 1:
                [][index]
            raise ValueError(f"part {index}")
        except (ValueError, IndexError) as error:
            errors.append(error)
    raise ExceptionGroup("parts", [errors[0], ExceptionGroup("more", errors[1:])])


def test_message_has_the_members_of_a_group():
    lines = str(_failure(_raises_several, 1)).splitlines()
    assert lines[0] == "rank 0 raised ExceptionGroup: parts (2 sub-exceptions)"
    told = [line.partition(" (test_launch_failures.py, line ")[0] for line in lines[2:]]
    assert told == [
        "  with ValueError: part 0",
        "  with IndexError: list index out of range",
        "  with ValueError: part 2",
    ]


def _raises_with_a_note(rank):
    error = ValueError("bad batch")
    error.add_note("in batch 7")
    raise error


def test_message_has_notes():
    failure = _failure(_raises_with_a_note, 1)
    assert str(failure).startswith("rank 0 raised ValueError: bad batch\nin batch 7\n")


# --- a thread that has ended, on all ranks alike: none of them misses another ------------------------------


def _waits_for_a_thread_that_has_ended(rank):
    def feed():
        raise LookupError("page 7")

    pages = queue.Queue()
    threading.Thread(target=feed, name="feeder").start()
    pages.get()


def test_what_has_ended_a_thread_is_the_cause_for_which_all_wait():
    failure = _failure(_waits_for_a_thread_that_has_ended, timeout=3.0)
    lines = str(failure).splitlines()
    assert lines[0] == "rank 0 raised LookupError: page 7"
    assert lines[1].endswith('in feed:  raise LookupError("page 7")')
    assert lines[2] == "That has ended its thread feeder, and the others went on:"
    assert lines[3].startswith("rank 0 was waiting for another thread when the time was up")
    assert lines[5].startswith("Meanwhile rank 1 was waiting for another thread (")
    assert (failure.rank, failure.error, failure.line) == (0, "LookupError", _line_of(lines[1]))


# --- what all ranks raise because of one: DCP gathers the exceptions, and raises them on every rank -------


class _CannotBePickled:
    def __getstate__(self):
        raise TypeError("no state")  # <- here


def _saves_what_cannot_be_pickled(rank, guilty, folder):
    state = {f"own of {rank}": _CannotBePickled() if rank == guilty else rank}
    dcp.save(state, checkpoint_id=folder)


def _loads_a_key_that_was_not_saved(rank, guilty, folder):
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder)
    wanted = {"weight": torch.zeros(3)} | ({"bias": torch.zeros(2)} if rank == guilty else {})
    dcp.load(wanted, checkpoint_id=folder)


@pytest.mark.parametrize("guilty", range(3))
@pytest.mark.parametrize(
    ("program", "error", "text", "lines"),
    [
        (
            _saves_what_cannot_be_pickled,
            "TypeError",
            "no state",
            ["dcp.save(state", 'raise TypeError("no state")'],
        ),
        (
            _loads_a_key_that_was_not_saved,
            "RuntimeError",
            "Missing key in checkpoint state_dict: bias.",
            ["dcp.load(wanted"],
        ),
    ],
)
def test_a_checkpoint_that_fails_on_one_rank(program, error, text, lines, guilty, tmp_path):
    failure = _failure(program, 3, guilty, str(tmp_path))
    assert (failure.rank, failure.error) == (guilty, error)
    said = str(failure).splitlines()
    assert said[0] == f"rank {guilty} raised {error}: {text}"
    assert all(line in quote for line, quote in zip(lines, said[1:-1], strict=True))
    first, second = sorted({0, 1, 2} - {guilty})
    assert said[-1].startswith(f"Meanwhile ranks {first} and {second} raised CheckpointException (")
    assert text in failure.traceback(first)


def _saves_a_shard_under_another_key(rank, guilty, folder):
    state = fully_shard(torch.nn.Linear(6, 6, bias=False)).state_dict()
    dcp.save({"other" if rank == guilty else n: p for n, p in state.items()}, checkpoint_id=folder)


@pytest.mark.parametrize("guilty", range(2))
def test_a_checkpoint_whose_parts_have_different_keys(guilty, tmp_path):
    said = str(_failure(_saves_a_shard_under_another_key, 2, guilty, str(tmp_path)))
    assert "key:other" in said and "key:weight" in said and "dcp.save({" in said
    assert "under the same key: do the ranks' state_dicts" in said


def _saves_where_others_load(rank, guilty, folder):
    weights = {"weight": torch.ones(3)}
    dcp.save(weights, checkpoint_id=folder)
    if rank == guilty:
        dcp.save(weights, checkpoint_id=folder)  # <- here
    dcp.load(weights, checkpoint_id=folder)


@pytest.mark.parametrize("guilty", range(3))
def test_a_checkpoint_that_one_rank_saves_and_others_load(guilty, tmp_path):
    said = str(_failure(_saves_where_others_load, 3, guilty, str(tmp_path)))
    assert "do not match" in said and "has to make the same collective calls" in said
    assert "dcp.load(weights" in said and "# <- here" in said and f"rank {guilty}" in said


# --- the traceback --------------------------------------------------------------------------------


def test_traceback_is_what_python_prints():
    text = _failure(_raises_from).traceback(1)
    cause, _, rest = text.partition("\nThe above exception was the direct cause")
    assert cause.startswith("Traceback (most recent call last):\n") and "open(path)" in cause
    assert rest.endswith("RuntimeError: cannot read config\n")
    assert "rank.py" not in text  # launch's own frames


def test_traceback_has_the_frames_of_libraries():
    def third_layer(rank):
        layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(5, 4)]
        torch.nn.Sequential(*layers)(torch.ones(2, 4))

    failure = _failure(third_layer, 1)
    assert "Sequential(*layers)" in str(failure) and "container.py" not in str(failure)
    assert "container.py" in failure.traceback(0) and "F.linear(" in failure.traceback(0)


def test_traceback_has_members_and_notes():
    text = _failure(_raises_several, 1).traceback(0)
    assert all(f"ValueError: part {n}\n" in text for n in (0, 2)) and "IndexError: list" in text
    assert "in batch 7" in _failure(_raises_with_a_note, 1).traceback(0)


def _one_fails(rank):
    if rank == 0:
        raise ValueError("first")
    if rank == 1:
        dist.barrier()


def test_traceback_of_a_rank_that_waited_is_its_stack():
    failure = _failure(_one_fails, 3)
    text = failure.traceback(1)
    assert text.startswith("Stack (most recent call last):\n")
    assert text.index("dist.barrier()") < text.index("distributed_c10d.py")
    assert failure.traceback(2) == "rank 2 finished\n"
    with pytest.raises(IndexError):
        failure.traceback(3)


def test_traceback_of_a_rank_that_crashed():
    def crash(rank):
        if rank == 1:
            signal.raise_signal(signal.SIGSEGV)
        dist.barrier()

    assert "signal.raise_signal(" in _failure(crash).traceback(1)


def test_a_failure_can_be_pickled():
    failure = _failure(_raises_from)
    again = pickle.loads(pickle.dumps(failure))
    assert (str(again), again.__dict__) == (str(failure), failure.__dict__)
    assert again.traceback(1) == failure.traceback(1) != ""


class _Awkward(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("no notes")

    def __str__(self):
        raise RuntimeError("no text")


def test_an_exception_that_cannot_be_described_is_reported():
    def raises(rank):
        raise _Awkward

    failure = _failure(raises, 1)
    assert (failure.error, failure.kind, failure.rank) == ("_Awkward", "exception", 0)
    assert failure.line is not None


def test_a_traceback_has_a_limit():
    def raises(rank):
        raise ValueError("x" * 1_000_000)

    assert 50_000 < len(_failure(raises, 1).traceback(0)) < 110_000


# --- the variables --------------------------------------------------------------------------------


class _Exits:
    def __repr__(self):
        raise SystemExit("no")


def _computes(rank, batch):
    weight, name, exits = torch.arange(6).view(2, 3), "x" * 1000, _Exits()
    many = [torch.linspace(-1, 1, 101), list(range(10**6))]
    return [len(name) + each @ weight for each in batch][rank], exits, many


def test_locals_are_those_of_the_line_that_raised():
    failure = _failure(_computes, 2, [torch.ones(2), torch.full((3,), 0.25)])
    found = failure.locals(failure.rank)
    assert found["weight"] == "int64 [2, 3], values 0, 1, 2, 3, 4, 5"
    assert found["each"].startswith("float32 [2], values 1, 1")
    assert found["batch"] == "[float32 [2], values 1, 1, float32 [3], values 0.25, 0.25, 0.25]"
    assert found["many"].startswith("[float32 [101], from -1 to 1, mean ")
    assert found["exits"] == "<_Exits, whose repr raised SystemExit>"
    assert len(found["name"]) <= 200 and found["rank"] == str(failure.rank)
    assert max(map(len, found.values())) <= 200


def test_locals_are_of_ranks_that_raised():
    failure = _failure(_one_fails, 3)
    assert [failure.locals(rank) for rank in range(3)] == [{"rank": "0"}, {}, {}]


def test_locals_of_a_device_wait_for_no_rank():
    """What a rank that never calls would have sent."""

    def waits_no_longer(rank):
        here = hardware.device()
        x, here_too = torch.ones(3, device=here), [torch.zeros(2)]
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            work.wait()  # of the stream, not of the host
            raise ValueError(len(here_too))

    with pytest.raises(RankFailure) as caught:
        launch_as_asked(waits_no_longer, 2, rules="nccl")
    found = caught.value.locals(0)
    assert found["x"].startswith("float32 [3], on ") and "values" not in found["x"]
    assert found["here_too"] == "[float32 [2], values 0, 0]"
    assert found["work"].startswith("<") and found["here"].startswith("device(")


# --- PyTorch's own advice -------------------------------------------------------------------------


class _Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.aux = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def _leaves_parameters_out(rank):
    model = torch.nn.parallel.DistributedDataParallel(_Unused())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def test_message_names_the_parameters_without_gradients():
    failure = _failure(_leaves_parameters_out)
    assert "did not receive grad for rank 0: aux.bias, aux.weight" in str(failure)


@pytest.mark.parametrize("asked", ["OFF", "INFO", "DETAIL"])
def test_debug_level_of_the_notebook_is_that_of_the_ranks(asked, monkeypatch):
    def level(rank):
        dist.barrier()
        return dist.get_debug_level().name

    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", asked)
    assert launch(level, 2) == [asked] * 2


def test_debug_level_prints_nothing(capfd):
    def shards(rank):
        model = FullyShardedDataParallel(
            torch.nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu")
        )
        model(torch.ones(1, 2)).sum().backward()
        return dist.get_debug_level().name

    assert launch(shards, 2) == ["INFO", "INFO"]
    assert capfd.readouterr().out == ""
