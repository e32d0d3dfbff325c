"""A script that was written for torchrun runs in a rank as it does there."""

import os
import runpy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import init_process_group

from course_utils.launch import RankFailure
from course_utils.launch import launch as launch_as_asked
from tests.support.on_gloo import launch

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def _sum():
    total = torch.ones(2) * (1 + dist.get_rank())
    dist.all_reduce(total)
    return total.tolist()


def test_environment_is_torchruns():
    def environment(rank):
        return [os.environ[name] for name in (*_NAMES, "MASTER_ADDR", "MASTER_PORT")]

    first, second = launch(environment, 2)
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert first[5] == second[5] and 1024 <= int(first[5]) < 65536


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "gloo"},
        {"backend": "nccl"},
        {},
        {"backend": "cpu:gloo,cuda:nccl", "timeout": timedelta(minutes=2)},
        {"init_method": "env://", "rank": 1, "world_size": 2},
    ],
    ids=["gloo", "nccl", "nothing", "both", "place"],
)
def test_a_script_takes_over_the_world(asked):
    def main():
        rank = int(os.environ["RANK"])
        dist.init_process_group(**asked | ({"rank": rank} if "rank" in asked else {}))
        total = _sum()
        dist.destroy_process_group()
        return total

    assert launch(lambda rank: main(), 2) == [[3, 3], [3, 3]]


def test_a_script_may_have_imported_the_name():
    def main(rank):
        init_process_group("gloo")
        return _sum()

    assert launch(main, 2) == [[3, 3], [3, 3]]


def test_a_file_runs_as_main(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "def main():\n"
        "    dist.init_process_group('nccl')\n"
        "    total = torch.tensor(float(os.environ['RANK']))\n"
        "    dist.all_reduce(total)\n"
        "    print('total', total.item())\n"
        "    dist.barrier()\n"
        "    dist.destroy_process_group()\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    path = str(tmp_path / "train.py")

    def run(rank):
        runpy.run_path(path, run_name="__main__")

    assert launch(run, 2) == [None, None]


@pytest.mark.parametrize("backend", ["gloo", "nccl", None])
def test_a_script_may_make_a_second_world(backend):
    def main(rank):
        totals = []
        for _ in range(3):
            dist.init_process_group(backend)
            totals.append(_sum())
            dist.destroy_process_group()
        return totals

    assert launch(main, 2) == [[[3, 3]] * 3] * 2


def test_twice_is_still_a_mistake():
    def main(rank):
        dist.init_process_group("gloo")
        dist.init_process_group("gloo")

    def late(rank):
        _sum()
        dist.init_process_group("gloo")

    for wrong in (main, late):
        with pytest.raises(
            RankFailure, match="trying to initialize the default process group twice"
        ):
            launch(wrong, 2)


@pytest.mark.parametrize(("name", "value"), [("world_size", 4), ("rank", 5)])
def test_a_world_of_other_ranks_is_refused(name, value):
    def main(rank):
        dist.init_process_group("gloo", **{"rank": rank, "world_size": 2} | {name: value})

    with pytest.raises(RankFailure) as caught:
        launch(main, 2)
    assert f"init_process_group was called with {name}={value}" in str(caught.value)
    assert "launch has made this rank 0 of 2: leave rank and world_size out" in str(caught.value)


def test_a_script_for_gloo_is_sent_to_gloo():
    def main(rank, backend):
        dist.init_process_group(backend)
        return dist.get_backend()

    assert launch_as_asked(main, 2, "nccl", rules="nccl") == ["nccl", "nccl"]
    with pytest.raises(RankFailure, match='call launch with backend="gloo"'):
        launch_as_asked(main, 2, "gloo", rules="nccl")
