"""torch.compile in the ranks: what works under torchrun works here, and what hangs is explained."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.launch import RankFailure
from tests.support.on_gloo import launch


def _mean_of_squares(x):
    total = x.square().sum()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _compiled_whole(rank):
    compiled = torch.compile(_mean_of_squares, backend="aot_eager")  # no C++ compiler is needed
    return compiled(torch.full((2,), rank + 1.0)).item()


def test_a_compiled_collective():
    assert launch(_compiled_whole, 2) == [5.0, 5.0]


def _compiled_ddp(rank):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    compiled = torch.compile(ddp, backend="aot_eager")
    for _ in range(2):  # the second forward pass, which rebuilds the buckets, communicates
        ddp.zero_grad()
        compiled(torch.full((2, 3), float(rank))).sum().backward()
    return ddp.module.weight.grad.tolist()


def test_a_compiled_ddp_model_leaves_launch_alone(capsys):
    """The compiler, which looks into all that a compiled function calls, is not to compile what
    hears of its collectives."""
    assert launch(_compiled_ddp, 2) == [[[1.0, 1.0, 1.0]]] * 2
    assert "Dynamo does not know how to trace" not in capsys.readouterr().out


def _sum(x):
    dist.all_reduce(x)
    return x


def _compiled_on_one_rank(rank):
    if rank == 1:
        return torch.compile(_sum)(torch.ones(3))


def test_a_compiled_collective_on_one_rank():
    with pytest.raises(RankFailure) as caught:
        launch(_compiled_on_one_rank, 2)
    message = str(caught.value)
    assert message.startswith(
        "a rank waits for a call that no other rank will make.\n"
        "  rank 0 finished without calling it\n"
        "  rank 1 waits in all_reduce\n"
        "    test_launch_compile.py, line "
    )
    assert "torchinductor" not in message and "wait_tensor" not in message


def test_warnings_of_the_compiler_have_no_time(capsys):
    def speak(rank):
        print("[rank0]:W1124 03:24:47.644000 6696 torch/x.py:14] [0/0] mind this")

    launch(speak, 1)
    assert capsys.readouterr().out == "[rank 0] [W torch/x.py:14] [0/0] mind this\n"
