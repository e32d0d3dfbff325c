"""Groups of some ranks: who has to make them, whose rank counts, in which order they are used."""

import torch
import torch.distributed as dist

from course_utils.hardware import device
from tests.reports.corpus import PASSES, report


@report(
    "pytorch/pytorch#25390",
    "pytorch/pytorch#46181",
    "pytorch/pytorch#38375",
    "pytorch/pytorch#130102",
    nprocs=4,
    says=("new_group", "every rank|all ranks"),
)
def each_makes_its_own(rank):
    pair = [0, 3] if rank in (0, 3) else [1, 2]
    group = dist.new_group(pair)  # <- here
    dist.barrier(group)


@report(
    "pytorch/pytorch#142356",
    nprocs=3,
    says=PASSES,
    rules_says=("new_group", "rank 2 finished", "every rank|all ranks"),
)
def made_by_its_members(rank):
    if rank < 2:
        group = dist.new_group([0, 1])  # <- here
        dist.all_reduce(torch.ones(1, device=device()), group=group)


@report("axolotl-ai-cloud/axolotl#3533", nprocs=4, says=("new_group", "every rank|all ranks"))
def made_when_needed(rank):
    start = rank // 2 * 2
    groups = {}
    groups[start] = dist.new_group([start, start + 1])  # <- here
    dist.all_reduce(torch.ones(1, device=device()), group=groups[start])


@report("pytorch/pytorch#134314", says=PASSES)
def group_of_one(rank):
    dist.new_group([0])
    dist.barrier()


@report(
    "pytorch/pytorch#60356",
    "pytorch/pytorch#91760",
    nprocs=3,
    says=("Global rank 0 is not part of group", "gather"),
)
def gathered_to_the_groups_rank(rank):
    group = dist.new_group([1, 2])
    if rank:
        t = torch.ones(1, device=device())
        out = [torch.empty_like(t) for _ in range(2)] if rank == 1 else None
        dist.gather(t, out, dst=0, group=group)  # <- here


@report(
    "meta-pytorch/torchrec#4601",
    nprocs=3,
    says=("Global rank 0 is not part of group", "broadcast_object_list"),
)
def sent_by_the_groups_rank(rank):
    group = dist.new_group([1, 2])
    if rank:
        dist.broadcast_object_list([rank], 0, group=group)  # <- here


@report("pytorch/pytorch#74602", nprocs=3, says=PASSES)
def objects_scattered_in_a_group(rank):
    group = dist.new_group([1, 2])
    if rank:
        out = [None]
        dist.scatter_object_list(out, ["a", "b"] if rank == 1 else None, src=1, group=group)
        assert out == ["ab"[rank - 1]]


@report("pytorch/pytorch#75755", nprocs=3, says=PASSES)
def called_by_a_stranger(rank):
    group = dist.new_group([0, 1])
    t = torch.ones(1, device=device())
    dist.all_reduce(t, group=group)
    assert t.item() == (1 if rank == 2 else 2)


@report("pytorch/pytorch#153798", nprocs=4, says=PASSES)
def groups_of_two(rank):
    group, _ = dist.new_subgroups(2, group=dist.group.WORLD)
    t = torch.full((1,), float(rank), device=device())
    dist.all_reduce(t, group=group)
    assert t.item() == (1 if rank < 2 else 5)


@report("run-ai/runai-model-streamer#165", says=("broadcast", "rank 0", "rank 1", "order"))
def two_groups_in_two_orders(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    t = torch.ones(4, device=device())
    for group in groups if rank == 0 else reversed(groups):
        dist.broadcast(t, src=0, group=group)  # <- here


@report(
    "meta-pytorch/torchrec#4149",
    nprocs=3,
    says=("all_reduce", "all_to_all_single", "order", "rank 2"),
)
def exchange_and_reduction_crossed(rank):
    shard, replicate = dist.new_group(), dist.new_group()
    x = torch.ones(3, device=device())
    if rank == 2:
        dist.all_reduce(x, group=replicate)  # <- here
    dist.all_to_all_single(torch.empty_like(x), x, group=shard)  # <- here
    if rank != 2:
        dist.all_reduce(x, group=replicate)


@report(
    "pytorch/pytorch#67600", nprocs=4, says=("rank 0 raised", "Invalid process group specified")
)
def broadcast_in_a_group_of_others(rank):
    t = torch.full((1,), float(rank), device=device())
    others = dist.new_group([2, 3])
    if rank < 2:
        dist.broadcast(t, src=1, group=others)  # <- here
