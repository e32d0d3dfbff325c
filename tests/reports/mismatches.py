"""Ranks that make different calls, or the same with other shapes, types, splits or roots."""

import numpy as np
import torch
import torch.distributed as dist

from course_utils.hardware import device
from tests.reports.corpus import PASSES, report


@report("pytorch/pytorch#103305", says=("gather", "[3]", "[4]", "rank 0", "rank 1"))
def gathered_unequal(rank):
    t = torch.ones(3 + rank, device=device())
    out = [torch.empty_like(t), torch.empty_like(t)] if rank == 0 else None
    dist.gather(t, out, dst=0)  # <- here


@report(
    "Lightning-AI/pytorch-lightning#7773", says=("all_gather", "[2]", "[3]", "rank 0", "rank 1")
)
def all_gathered_unequal(rank):
    t = torch.ones(2 + rank, device=device())
    dist.all_gather([torch.empty_like(t) for _ in range(2)], t)  # <- here


@report("pytorch/pytorch#156627", says=("all_gather", "3", "4"), rules_says=PASSES)
def list_of_uneven_tensors(rank):
    out = [torch.empty(3 + r, device=device()) for r in range(2)]
    dist.all_gather(out, torch.full((3 + rank,), 1.0 + rank, device=device()))  # <- here
    assert out[1].tolist() == [2.0] * 4


@report("pytorch/pytorch#18689", says=PASSES)
def the_same_tensor_twice(rank):
    t = torch.full((2,), float(rank), device=device())
    out = [torch.empty_like(t)] * 2
    dist.all_gather(out, t)


@report(
    "NVIDIA/nccl#1394",
    "NVIDIA/nccl#1417",
    says=("all_reduce", "[100, 2]", "[200, 2]", "rank 0", "rank 1"),
    rules_says=("all_reduce", "[100, 2]", "[200, 2]", "rank 0", "rank 1", "NCCL"),
)
def reduced_unequal(rank):
    dist.all_reduce(torch.ones(100 * (rank + 1), 2, device=device()))  # <- here


@report("pytorch/pytorch#150248", says=("all_reduce", "bfloat16", "float32", "rank 1"), nprocs=3)
def half_a_precision(rank):
    dtype = torch.bfloat16 if rank == 1 else torch.float32
    dist.all_reduce(torch.ones(1, dtype=dtype, device=device()))  # <- here


@report("modelscope/ms-swift#9550", says=("all_reduce", "float64", "float32", "rank 0", "rank 1"))
def type_of_a_metric(rank):
    correct = np.float64(1) if rank == 1 else 1.0
    total = torch.tensor([correct, 2], device=device())
    dist.all_reduce(total)  # <- here


@report("pytorch/pytorch#91535", says=("broadcast", "float32", "int64", "[6]", "[14]"))
def broadcast_into_another_type(rank):
    ids = torch.arange(6.0, device=device())
    if rank == 1:
        ids = torch.zeros(14, dtype=torch.int64, device=device())
    dist.broadcast(ids, src=0)  # <- here


@report("EchoseChen/SPA-VL-RLHF#2", says=("broadcast", "[2, 206]", "[2, 238]", "rank 2"), nprocs=3)
def prompts_of_other_lengths(rank):
    width = 238 if rank == 2 else 206
    dist.broadcast(torch.ones(2, width, device=device()), src=0)  # <- here


@report(
    "aurekaresearch/OpenDDE#23", says=("all_gather", "1435", "1436", "rank 0", "rank 2"), nprocs=3
)
def gathered_into_one(rank):
    t = torch.ones(1436 if rank == 2 else 1435, device=device())
    dist.all_gather_into_tensor(torch.empty(3 * len(t), device=device()), t)  # <- here


@report("pytorch/pytorch#84525", says=("Invalid usage of tensors with different dtypes",))
def half_into_float(rank):
    t = torch.ones(1, 5, device=device()).half()
    dist.all_gather([torch.zeros(1, 5, device=device()) for _ in range(2)], t)  # <- here


@report("pytorch/pytorch#117486", says=("all_to_all_single", "rank 0", "rank 1", "2", "3"))
def splits_that_do_not_fit(rank):
    data = torch.ones(4, device=device())
    send, receive = [2, 2], [2, 2] if rank == 0 else [3, 2]
    out = torch.empty(sum(receive), device=device())
    dist.all_to_all_single(out, data, receive, send)  # <- here


@report(
    "pytorch/pytorch#117486",
    says=("all_to_all", "rank 1", "same size|sends|expects"),
    rules_says=("all_to_all", "rank 1", "[2]|2", "[3]|3"),
)
def parts_that_do_not_fit(rank):
    parts = [torch.ones(2, device=device()) for _ in range(2)]
    out = [torch.empty(2 + rank, device=device()) for _ in range(2)]
    dist.all_to_all(out, parts)  # <- here


@report("pytorch/pytorch#70155", says=PASSES)
def object_without_tensors(rank):
    out = [None, None]
    dist.all_gather_object(out, {"path": str(rank), "score": rank})
    assert out[1]["score"] == 1


@report("pytorch/pytorch#75619", says=PASSES)
def objects_of_all(rank):
    out = [None, None]
    dist.all_gather_object(out, "hello" if rank == 0 else "world")
    assert out == ["hello", "world"]


@report("pytorch/pytorch#146468", says=PASSES)
def sends_nothing(rank):
    if rank == 0:
        send, receive = [0, 2], [0, 0]
    else:
        send, receive = [0, 0], [2, 0]
    out = torch.empty(sum(receive), device=device())
    dist.all_to_all_single(out, torch.ones(sum(send), device=device()), receive, send)


@report(
    "torchgeo/terratorch#1004",
    says=PASSES,
    rules_says=("No backend type associated with device type cpu",),
)
def tensor_of_the_cpu(rank):
    total = torch.ones(1)
    dist.all_reduce(total)  # <- here


@report(
    "pytorch/pytorch#73515",
    "facebookresearch/fairscale#1173",
    says=PASSES,
    rules_says=("contiguous",),
)
def transposed(rank):
    weight = torch.ones(2, 3, device=device()).t()
    out = [torch.empty(3, 2, device=device()) for _ in range(2)]
    dist.all_gather(out, weight)  # <- here


@report("pytorch/pytorch#192920", says=PASSES, rules_says=("contiguous",))
def a_column(rank):
    dist.broadcast(torch.ones(2, 2, device=device())[:, 0], src=0)  # <- here


@report("pytorch/pytorch#128066", says=PASSES, rules_says=("contiguous",))
def strided_input(rank):
    column = torch.ones(4, 2, device=device())[:, 0]
    dist.reduce_scatter_tensor(torch.empty(2, device=device()), column)  # <- here


@report("pytorch/pytorch#84566", says=("scatter", "13", "6", "rank 0"))
def scattered_unequal(rank):
    out = torch.zeros(13, device=device())
    parts = [torch.zeros(13, device=device()), torch.zeros(6, device=device())]
    dist.scatter(out, parts if rank == 0 else None, src=0)  # <- here


@report(
    "bigscience-workshop/Megatron-DeepSpeed#63",
    says=("scatter_list", "List[torch.Tensor]", "rank 0 raised"),
)
def a_tuple_of_parts(rank):
    parts = torch.arange(4.0, device=device()).split(2) if rank == 0 else None
    dist.scatter(torch.empty(2, device=device()), parts, src=0)  # <- here


@report(
    "pytorch/pytorch#74323",
    says=("rank 1 raised", "gather_list", "must NOT be specified on non-destination ranks"),
)
def list_on_every_rank(rank):
    t = torch.ones(1, device=device())
    dist.gather(t, [torch.empty(1, device=device()) for _ in range(2)], dst=0)  # <- here


@report("NVIDIA/nccl#296", says=("reduce", "all_reduce", "rank 0", "rank 1"))
def another_operation(rank):
    t = torch.ones(8, device=device())
    if rank == 0:
        dist.reduce(t, dst=0)  # <- here
    else:
        dist.all_reduce(t)  # <- here


@report(
    "NVIDIA/apex#18",
    "NVIDIA/apex#19",
    says=("all_reduce", "[2]", "[3]", "order", "rank 0", "rank 1"),
)
def dictionary_in_another_order(rank):
    grads = {"float": torch.ones(2, device=device()), "half": torch.ones(3, device=device())}
    for name in sorted(grads, reverse=rank == 1):
        dist.all_reduce(grads[name])  # <- here


@report("huggingface/accelerate#2690", says=("all_gather", "barrier", "rank 0", "rank 1"))
def saves_while_the_others_wait(rank):
    shard = torch.ones(2, device=device())
    if rank == 0:
        dist.all_gather([torch.empty_like(shard) for _ in range(2)], shard)  # <- here
    else:
        dist.barrier()  # <- here


@report("pytorch/pytorch#118696", says=("broadcast", "float16", "float32", "rank 0", "rank 1"))
def default_type_of_one_rank(rank):
    if rank == 1:
        torch.set_default_dtype(torch.float16)
    dist.broadcast(torch.ones(4, device=device()), src=0)  # <- here


@report("criteo/tf-yarn#79", says=("all_gather", "[4, 2]", "[3, 2]", "rank 1"))
def smaller_last_batch(rank):
    data = torch.ones(8 if rank == 0 else 7, 2, device=device())
    for batch in data.split(4):
        dist.all_gather([torch.empty_like(batch) for _ in range(2)], batch)  # <- here


@report("pytorch/pytorch#56142", says=PASSES)
def object_list_of_its_own(rank):
    mine = {"rank": rank}
    dist.broadcast_object_list([mine], src=0)
    assert mine["rank"] == rank
