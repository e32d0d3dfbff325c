"""Loaders and samplers: their workers, and how much they give to whom."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from course_utils.hardware import device
from tests.reports.corpus import PASSES, report


@report("pytorch/pytorch#82077", "pytorch/pytorch#41517", says=PASSES)
def workers_in_ranks(rank):
    loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    total = torch.stack([batch.sum() for batch in loader]).sum().to(device())
    dist.all_reduce(total)
    assert total.item() == 56


@report(
    "https://discuss.pytorch.org/t/220127",
    says=("rank 0", "rank 1 finished", "backward|all_reduce|DistributedDataParallel", "join"),
)
def loaders_of_unequal_length(rank):
    model = DDP(nn.Linear(1, 1).to(device()))
    loader = DataLoader(torch.ones(8 - 2 * rank, 1), batch_size=2)
    for batch in loader:
        model(batch.to(device())).sum().backward()  # <- here


@report(
    "Lightning-AI/pytorch-lightning#15734",
    nprocs=3,
    says=("rank 0", "finished", "backward|all_reduce|DistributedDataParallel", "join"),
)
def stream_shared_unevenly(rank):
    class Stream(IterableDataset):
        def __iter__(self):
            return (torch.ones(1) for i in range(7) if i % 3 == rank)

    model = DDP(nn.Linear(1, 1).to(device()))
    for batch in DataLoader(Stream(), batch_size=1):
        model(batch.to(device())).sum().backward()  # <- here


@report(
    "msr-fiddle/pipedream#80",
    nprocs=3,
    says=("all_reduce", "rank 2", "rank 0 finished", "rank 1 finished"),
)
def sampler_of_fewer_replicas(rank):
    data = torch.ones(8)
    sampler = DistributedSampler(data, num_replicas=2, rank=rank) if rank < 2 else None
    for batch in DataLoader(data, batch_size=2, sampler=sampler):
        dist.all_reduce(batch.to(device()))  # <- here


@report("pytorch/pytorch#28841", says=PASSES)
def sampler_that_pads(rank):
    data = torch.arange(5.0)
    sampler = DistributedSampler(data, shuffle=False)
    for batch in DataLoader(data, batch_size=1, sampler=sampler):
        dist.all_reduce(batch.to(device()))
    assert len(sampler) == 3


@report(
    "pytorch/pytorch#72034",
    "pytorch/pytorch#8976",
    "Visual-AI/3DRS#7",
    says=("rank 1 raised", "worker", "DataLoader", "killed"),
)
def worker_that_was_killed(rank):
    class Hungry(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if rank == 1 and i == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return float(i)

    for batch in DataLoader(Hungry(), num_workers=1):  # in which line it is noticed is chance
        dist.all_reduce(batch.float().to(device()))


@report(
    "Megvii-BaseDetection/YOLOX#548",
    says=("rank 0 raised", "Caught ValueError in DataLoader worker process 0", "image 1 is broken"),
)
def broken_image(rank):
    class Images(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if rank == 0 and i == 1:
                raise ValueError("image 1 is broken")
            return float(i)

    for batch in DataLoader(Images(), num_workers=1):  # <- here
        dist.all_reduce(batch.float().to(device()))


@report(
    "bshall/hubert#3",
    says=("rank 1 raised RuntimeError", "stack expects each tensor to be equal size"),
)
def samples_of_unequal_length(rank):
    data = [torch.ones(3), torch.ones(3), torch.ones(3), torch.ones(3 + rank)]
    for batch in DataLoader(data, batch_size=2):  # <- here
        dist.all_reduce(batch.to(device()))


@report(
    "bigscience-workshop/Megatron-DeepSpeed#276",
    says=("rank 0", "rank 1", "broadcast", "all_reduce"),
)
def drawn_apart(rank):
    torch.manual_seed(1)
    if rank == 0:
        next(iter(DataLoader(torch.ones(2), shuffle=True)))
    skip = torch.rand(()) < 0.5
    t = torch.ones(2, device=device())
    if skip:
        dist.broadcast(t, src=0)  # <- here
    else:
        dist.all_reduce(t)  # <- here


@report(
    "pytorch/pytorch#87995",
    says=("rank 0", "rank 1", "all_reduce"),
    late=True,  # a worker of the loader sleeps
)
def reader_that_never_returns(rank):
    class Slow(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            if rank == 0 and i == 1:
                time.sleep(3600)
            return float(i)

    for batch in DataLoader(Slow(), num_workers=1):  # <- here
        dist.all_reduce(batch.float().to(device()))  # <- also
