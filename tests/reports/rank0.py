"""What only one rank does although all have to: validation, gathering, saving, logging."""

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.hardware import device
from tests.reports.corpus import PASSES, report


def with_batch_norm():
    return DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device()))


@report(
    "pytorch/pytorch#20611",
    "pytorch/pytorch#53979",
    "https://discuss.pytorch.org/t/114522",
    says=("rank 0", "rank 1 finished", "model.module"),
)
def validates_alone(rank):
    model = with_batch_norm()
    if rank == 0:
        model.eval()
        model(torch.randn(8, 4, device=device()))  # <- here


@report(
    "jpata/particleflow#233",
    "pytorch/pytorch#54059",
    nprocs=3,
    says=("rank 0", "barrier", "model.module"),
)
def validates_before_the_barrier(rank):
    model = with_batch_norm()
    if rank == 0:
        model(torch.randn(8, 4, device=device()))  # <- here
    dist.barrier()  # <- here


@report("pytorch/pytorch#72897", says=PASSES)
def validates_the_module(rank):
    model = with_batch_norm()
    if rank == 0:
        with torch.no_grad():
            model.module(torch.randn(8, 4, device=device()))
    dist.barrier()


@report(
    "pytorch/pytorch#73383",
    "pytorch/pytorch#122903",
    says=("rank 0", "full_tensor", "rank 1 finished", "every rank|all ranks"),
)
def full_state_of_one(rank):
    model = fully_shard(nn.Linear(8, 8).to(device()))
    if rank == 0:
        state = model.state_dict()
        state = {name: part.full_tensor() for name, part in state.items()}  # <- here


@report(
    "inclusionAI/AReaL#187",
    nprocs=3,
    says=("rank 0", "full_tensor", "barrier", "every rank|all ranks"),
)
def full_tensors_before_the_barrier(rank):
    model = fully_shard(nn.Linear(8, 8).to(device()))
    if rank == 0:
        for part in model.parameters():
            part.full_tensor()  # <- here
    dist.barrier()  # <- here


@report("pytorch/pytorch#123421", says=PASSES)
def norm_of_one_shard(rank):
    mesh = init_device_mesh(device().type, (2,))
    t = distribute_tensor(torch.ones(4, 4, device=device()), mesh, [Shard(0)])
    if rank == 0:
        t.norm()


@report("pytorch/ignite#2623", says=("rank 0", "consolidate_state_dict", "rank 1 finished"))
def consolidates_alone(rank):
    model = nn.Linear(2, 2).to(device())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    model(torch.ones(1, 2, device=device())).sum().backward()
    optimizer.step()
    if rank == 0:
        optimizer.consolidate_state_dict(to=0)  # <- here


@report(
    "zhijian-liu/torchpack#18", says=("rank 0 raised RuntimeError", "consolidate_state_dict(to=0)")
)
def never_consolidated(rank):
    model = nn.Linear(2, 2).to(device())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    if rank == 0:
        optimizer.state_dict()  # <- here
    dist.barrier()


@report(
    "Lightning-AI/pytorch-lightning#17600",
    "TRI-ML/prismatic-vlms#35",
    says=("clip_grad_norm_", "rank 0", "rank 1 finished"),
)
def clips_alone(rank):
    model = fully_shard(nn.Linear(4, 4).to(device()))
    model(torch.ones(1, 4, device=device())).sum().backward()
    if rank == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- here
        norm.full_tensor()


@report("pytorch/pytorch#170862", says=PASSES)
def clips_with_all(rank):
    model = fully_shard(nn.Linear(4, 4).to(device()))
    model(torch.ones(1, 4, device=device())).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    assert norm > 0


@report(
    "huggingface/accelerate#2785",
    "huggingface/transformers#31532",
    nprocs=3,
    says=("all_gather", "rank 0", "barrier"),
)
def gathers_metrics_alone(rank):
    loss = torch.ones(1, device=device())
    if rank == 0:
        dist.all_gather([torch.empty_like(loss) for _ in range(3)], loss)  # <- here
    dist.barrier()  # <- here


@report(
    "Lightning-AI/pytorch-lightning#16541",
    says=("all_gather", "rank 0", "rank 1 finished", "every rank|all ranks"),
)
def gathers_outputs_alone(rank):
    outputs = torch.ones(4, device=device())
    if rank == 0:
        everything = [torch.empty_like(outputs) for _ in range(2)]
        dist.all_gather(everything, outputs)  # <- here


@report(
    "Lightning-AI/torchmetrics#938",
    "Lightning-AI/torchmetrics#2684",
    says=("all_gather", "rank 0", "rank 1", "backward|all_reduce|DistributedDataParallel"),
)
def computes_the_metric_alone(rank):
    model = DDP(nn.Linear(2, 1).to(device()))
    for _epoch in range(2):
        model(torch.ones(1, 2, device=device())).sum().backward()
        if rank == 0:
            hits = torch.ones(1, device=device())
            dist.all_gather([torch.empty_like(hits) for _ in range(2)], hits)  # <- here


@report("huggingface/accelerate#2733", says=("gather_object", "rank 0", "rank 1 finished"))
def gathers_objects_alone(rank):
    if rank == 0:
        texts = [None, None]
        dist.gather_object("a text", texts, dst=0)  # <- here


@report("bo-ke/llm-internal-medicine#45", nprocs=3, says=("all_gather_object", "rank 2 finished"))
def nothing_to_gather(rank):
    metrics = {} if rank == 2 else {"norm": 1.0}
    if not metrics:
        return
    dist.all_gather_object([None] * 3, metrics)  # <- here


@report("alan-turing-institute/autocast#386", says=("barrier", "rank 0", "rank 1 finished"))
def saves_with_a_barrier_inside(rank):
    def save_checkpoint():
        dist.barrier()  # <- also

    if rank == 0:
        save_checkpoint()
    dist.barrier()  # <- here


@report("EleutherAI/bergson#249", says=("rank 0", "rank 1", "barrier"))
def logger_that_never_starts(rank):
    if rank == 0:
        threading.Event().wait()  # <- here
    dist.barrier()  # <- also


@report("pytorch/pytorch#77562", says=("do not match", "rank 0: barrier", "rank 1: all_reduce"))
def decides_by_a_sum_that_one_rank_has(rank):
    best = 4.0
    loss = torch.tensor([2.0 if rank == 0 else 3.0], device=device())
    for _ in range(2):
        dist.reduce(loss.clone() if rank else loss, 0)  # only rank 0 has the sum
        if loss.item() > best:
            dist.barrier()  # <- here
            best = loss.item()
        dist.all_reduce(torch.ones(3, device=device()))  # <- here
