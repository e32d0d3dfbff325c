"""`python -m course_utils explain`: what PyTorch's flight recorder has written, explained.

The dumps of gloo are real: ranks on the CPU write them. Those of NCCL are written by its format, as
torch.distributed.flight_recorder reads it; no GPU has made them.
"""

import json
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_run.dumps import explained
from course_utils import __main__ as commands
from course_utils.launch import RankFailure
from tests.support.on_gloo import launch


def differ(rank, guilty, what, folder):
    """Ranks whose calls do not meet; each writes what its flight recorder has, and ends."""
    from torch._C import _distributed_c10d as recorder

    evens = dist.new_group([0, 2])  # gloo's dumps do not tell whose group it is
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank != 1:
        dist.all_reduce(torch.ones(2), group=evens)
    calls = {
        "skips": lambda: None,
        "type": lambda: dist.all_reduce(torch.ones(4).int(), async_op=True),
        "kind": lambda: dist.broadcast(torch.ones(4), 0, async_op=True),
    }
    if rank == guilty:
        work = calls[what]()
    else:
        work = dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(0.1)  # for what can end
    Path(folder, f"trace_{rank}.json").write_bytes(recorder._dump_fr_trace_json())
    Path(folder, f"trace_{rank}").write_bytes(recorder._dump_fr_trace())
    while len(list(Path(folder).glob("trace_*"))) < 6:
        time.sleep(0.01)
    os._exit(0 if work else 1)


SAID = {
    "skips": "  rank {guilty} did not make that call; its last was all_reduce of float32 [4]\n"
    "    test_dumps.py, line 29, in differ:  dist.all_reduce(torch.ones(4))",
    "type": "  rank {guilty}: all_reduce of int32 [4]\n    test_dumps.py, line 34, in <lambda>:",
    "kind": "  rank {guilty}: broadcast of float32 [4]\n    test_dumps.py, line 35, in <lambda>:",
}


@pytest.mark.parametrize(
    ("what", "guilty"), [*((what, 1) for what in SAID), ("skips", 0), ("skips", 2)]
)
def test_real_dumps_say_what_launch_says(what, guilty, tmp_path):
    with pytest.raises(RankFailure):
        launch(differ, 3, guilty, what, str(tmp_path))
    told = explained([tmp_path / f"trace_{rank}" for rank in range(3)])
    assert SAID[what].format(guilty=guilty) in told, told
    others = " and ".join(str(rank) for rank in range(3) if rank != guilty)
    verb = " wait in" if what == "skips" else ":"
    mine = f"  ranks {others}{verb} all_reduce of float32 [4]\n"
    assert f"{mine}    test_dumps.py, line 40, in differ:" in told, told
    without_lines = explained([tmp_path / f"trace_{rank}.json" for rank in range(3)])
    assert mine in without_lines and "The dumps have no lines of the program" in without_lines


def entry(number, name, group="0", order=None, peer=False, **others):
    """An entry as ProcessGroupNCCL makes it."""
    return {
        "frames": [
            {"name": "wrapper", "filename": "/env/site-packages/torch/distributed/c10d_logger.py", "line": 83},
            {"name": "train", "filename": "/job/train.py", "line": 40 + number},
            {"name": "<module>", "filename": "/job/train.py", "line": 99},
        ],
        "record_id": number,
        "pg_id": int(group),
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": number + 1 if order is None else order,
        "p2p_seq_id": (number + 1 if order is None else order) if peer else 0,
        "op_id": number + 1,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[3, 4]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[3, 4]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "retired": True,
        "is_p2p": peer,
    } | others  # fmt: skip


OPEN = {"state": "started", "retired": False}
COALESCED = {"state": "scheduled", "retired": False}  # its batch has the state


def write(folder, *ranks, config=None):
    config = config or {
        "0": {"name": "0", "desc": "default_pg", "ranks": str([*range(len(ranks))])}
    }
    paths = [folder / f"nccl_trace_rank_{rank}" for rank in range(len(ranks))]
    for path, entries in zip(paths, ranks):
        if entries is not None:
            path.write_bytes(
                pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries}, 2)
            )
    return [path for path in paths if path.exists()]


def test_a_call_lacks_a_rank_whose_recorder_begins_earlier(tmp_path):
    """Those of ranks 0 and 2 have room for the last two calls only."""
    calls = [entry(n, "all_reduce") for n in range(6)]
    stuck = entry(6, "_all_gather_base", **OPEN)
    told = explained(write(tmp_path, [*calls[5:], stuck], calls, [*calls[5:], stuck]))
    assert (
        "  ranks 0 and 2 wait in all_gather_into_tensor of bfloat16 [12]\n    train.py, line 46"
        in told
    )
    assert "  rank 1 did not make that call; its last was all_reduce of bfloat16 [12]" not in told
    assert "  rank 1 made no call that is known" in told
    assert "The first calls of ranks 0 and 2 had no room" in told


def test_a_message_of_a_batch_waits_as_long_as_the_batch(tmp_path):
    sent = [
        entry(0, "send 0->1", peer=True, order=1, **COALESCED),
        entry(1, "coalesced", peer=True, order=1),
    ]
    got = [
        entry(0, "recv 1<-0", peer=True, order=1, **COALESCED),
        entry(1, "coalesced", peer=True, order=1),
    ]
    lost = [entry(2, "send 0->1", peer=True, order=2, **COALESCED)]
    lost += [entry(3, "coalesced", peer=True, order=2, **OPEN)]
    told = explained(write(tmp_path, sent + lost, got))
    assert (
        "  rank 0 waits in send of bfloat16 [12] to rank 1\n    train.py, line 42, in train:"
        in told
    )
    assert "  rank 1 did not make that call; its last was recv of bfloat16 [12] from rank 0" in told
    assert "Every send needs a recv" in told


def test_what_nccl_takes_is_no_mismatch(tmp_path):
    flat = entry(0, "all_reduce", input_sizes=[[12]], output_sizes=[[12]])
    told = explained(write(tmp_path, [entry(0, "all_reduce")], [flat]))
    assert told.startswith("all calls that the dumps hold have ended, and match.\n  ranks 0 and 1")
    more = entry(0, "all_reduce", input_sizes=[[3, 5]], output_sizes=[[3, 5]], **OPEN)
    told = explained(write(tmp_path, [flat], [more], [flat]))
    assert "  rank 1: all_reduce of bfloat16 [15]\n    train.py, line 40, in train:" in told


def test_groups_of_one_name_and_ranks_without_a_dump(tmp_path):
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": "undefined", "ranks": "[1, 3]"},
    }
    first, stuck = entry(0, "all_reduce"), entry(1, "all_to_all", group="1", order=1, **OPEN)
    told = explained(write(tmp_path, [first], [first, stuck], [first], None, config=config))
    assert "  ranks 0 and 2 were done with their last, all_reduce of bfloat16 [12]" in told
    assert "  rank 1 waits in all_to_all\n    train.py, line 41, in train:" in told
    assert "  rank 3 left no dump" in told


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "rank_0",
            pickle.dumps({"entries": [Harmful()], "pg_config": {}}),
            "it asks for posix.mkdir, and a dump",
        ),
        ("rank_0", b"no pickle", "is no dump of PyTorch's flight recorder"),
        ("rank_0.json", json.dumps({"version": "2.10"}).encode(), "is no dump"),
        (
            "rank_0",
            pickle.dumps({"entries": [{"record_id": 0}], "pg_config": {}}),
            "of an older PyTorch",
        ),
        ("trace", b"{}", "the name of a dump ends with its rank"),
        ("absent_0", None, "No such file or directory"),
    ],
    ids=["harmful", "no pickle", "other JSON", "older", "no rank", "absent"],
)
def test_what_is_no_dump_is_told(name, content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        commands.main(["explain", name])
    assert str(caught.value).startswith("explain: ") and said in str(caught.value)
    assert not (tmp_path / "harm").exists()


def test_two_dumps_of_one_rank_are_refused(tmp_path):
    [path] = write(tmp_path, [entry(0, "barrier")])
    other = path.with_name(f"other_{path.name}")
    other.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="the second file of rank 0: give one file a rank"):
        explained([path, other])


def test_the_command_prints_it(tmp_path, capsys):
    paths = write(tmp_path, [entry(0, "barrier")], [entry(0, "barrier")])
    commands.main(["explain", *map(str, paths)])
    assert "ranks 0 and 1 were done with their last, barrier" in capsys.readouterr().out
