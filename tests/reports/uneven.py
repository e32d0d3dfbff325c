"""Ranks with more or fewer steps than the others, and ranks that leave one out."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.hardware import device
from tests.reports.corpus import PASSES, SWALLOWED, report

BACKWARD = "backward|all_reduce|DistributedDataParallel"


def made():
    return DDP(nn.Linear(2, 1).to(device())), torch.ones(1, 2, device=device())


@report(
    "pytorch/pytorch#33148",
    "Lightning-AI/pytorch-lightning#20404",
    "intel/ipex-llm#3626",
    says=("rank 0", "rank 1 finished", BACKWARD, "join"),
)
def one_batch_more(rank):
    model, x = made()
    for _batch in range(4 - rank):
        model(x).sum().backward()  # <- here


@report(
    "microsoft/PyMarlin#80",
    nprocs=3,
    says=("rank 2", "rank 0 finished", "rank 1 finished", BACKWARD, "join"),
)
def many_batches_more(rank):
    model, x = made()
    for _batch in range(8 if rank == 2 else 3):
        model(x).sum().backward()  # <- here


@report("k2-fsa/snowfall#152", nprocs=3, says=("rank 2 finished", BACKWARD, "join"))
def rest_of_the_last(rank):
    model, x = made()
    per_rank = -(-10 // 3)
    for _batch in range(per_rank * rank, min(per_rank * (rank + 1), 10)):
        model(x).sum().backward()  # <- here


@report("pytorch/pytorch#141069", says=("rank 0", "rank 1", BACKWARD, "all_reduce"))
def trains_longer_than_it_validates(rank):
    model, x = made()
    for _batch in range(3 - rank):
        model(x).sum().backward()  # <- also
    correct = torch.ones(3, device=device())
    dist.all_reduce(correct)  # <- here


@report("Lightning-AI/pytorch-lightning#9851", says=("rank 0", "rank 1 finished", BACKWARD, "join"))
def splits_drawn_by_each(rank):
    torch.manual_seed(rank)
    chosen = torch.randperm(10)[: int(torch.randint(2, 4, ())) + 2 * (1 - rank)]
    model, x = made()
    for _sample in chosen:
        model(x).sum().backward()  # <- here


@report("pytorch/pytorch#38174", says=PASSES)
def joined(rank):
    model, x = made()
    with Join([model]):
        for _batch in range(4 - rank):
            model(x).sum().backward()


FLAG = "flag|decide|decision|broadcast|same condition|only some|branch"


@report(
    "Lightning-AI/pytorch-lightning#379",
    "huggingface/transformers#17478",
    says=("rank 0", "rank 1", BACKWARD, FLAG),
)
def stops_early(rank):
    model, x = made()
    for epoch in range(5):
        model(x).sum().backward()  # <- here
        accuracy = 0.1 * epoch + 0.2 * rank
        if accuracy > 0.35:
            break


@report(
    "speechbrain/speechbrain#1939",
    "ultralytics/yolov5#4576",
    nprocs=3,
    says=("rank 0 finished", BACKWARD, FLAG),
)
def only_the_main_process_stops(rank):
    model, x = made()
    stop = False
    for epoch in range(5):
        model(x).sum().backward()  # <- here
        if rank == 0:
            stop = epoch == 2
        if stop:
            break


@report("talmolab/sleap-nn#471", says=("rank 1", "barrier", "rank 0 finished"))
def a_barrier_shares_no_flag(rank):
    should_stop = False
    for step in range(4):
        if rank == 0 and step == 2:
            should_stop = True
        dist.barrier()  # <- here
        if should_stop:
            break


@report("webdataset/webdataset#446", says=("rank 0 finished", "rank 1", "broadcast"))
def leaves_before_the_flag_is_sent(rank):
    loss = torch.ones(1, device=device())
    for epoch in range(4):
        dist.all_reduce(loss)
        stop = torch.tensor(int(epoch == 2), device=device())
        if rank == 0 and stop:
            break
        dist.broadcast(stop, src=0)  # <- here


@report(
    "pytorch/pytorch#44353",
    "facebookresearch/fairseq#708",
    "Lightning-AI/pytorch-lightning#5243",
    "mosaicml/composer#1319",
    says=("rank 1", "OutOfMemoryError", "out of memory", BACKWARD),
    known=SWALLOWED,
    known_rules=SWALLOWED,
)
def out_of_memory_skipped(rank):
    model, x = made()
    for batch in range(4):
        try:
            if rank == 1 and batch == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            model(x).sum().backward()
        except torch.OutOfMemoryError:
            model.zero_grad()


@report(
    "NVIDIA-NeMo/Automodel#2468",
    "ray-project/ray#66030",
    nprocs=3,
    says=("rank 2 finished", BACKWARD),
)
def short_samples_skipped(rank):
    model, x = made()
    for batch in range(4):
        if rank == 2 and batch == 1:
            continue
        model(x).sum().backward()  # <- here


@report("ecmwf/WeatherGenerator#2718", says=("rank 0", "all_reduce", "rank 1 finished"))
def loss_of_nan_skipped(rank):
    for batch in range(3):
        loss = torch.tensor(float("nan") if (rank, batch) == (1, 1) else 1.0, device=device())
        if loss.isnan():
            continue
        dist.all_reduce(loss)  # <- here


@report(
    "pytorch/pytorch#152964",
    says=("rank 0", "rank 1", "all_gather", "reduce_scatter|backward|finished"),
)
def picture_on_one_rank(rank):
    text, vision = (fully_shard(nn.Linear(4, 4).to(device())) for _ in range(2))
    x = torch.ones(1, 4, device=device())
    out = text(x)
    if rank == 0:
        out = out + vision(x)  # <- here
    out.sum().backward()  # <- here


@report(
    "PaddlePaddle/PaddleFormers#3010", says=("rank 0", "rank 1 finished", "all_reduce|backward")
)
def expert_without_tokens(rank):
    x = torch.ones(2, 4, device=device(), requires_grad=True)
    out = dnn.all_reduce(x)
    if rank == 1:
        out = torch.zeros(2, 4, device=device(), requires_grad=True)
    out.sum().backward()  # <- here


@report("speechbrain/speechbrain#2010", "modelscope/FunASR#3472", says=PASSES)
def synchronised_in_the_wrong_step(rank):
    model, x = made()
    for batch in range(4):
        if batch % 2:
            with model.no_sync():
                model(x * (rank + 1)).sum().backward()
        else:
            model(x * (rank + 1)).sum().backward()


@report("huggingface/accelerate#1726", "baidu-baige/LoongForge#163", says=PASSES)
def forward_outside_of_no_sync(rank):
    model, x = made()
    for _batch in range(2):
        loss = model(x).sum()
        with model.no_sync():
            loss.backward()


@report("mosaicml/composer#3415", says=PASSES)
def stops_with_the_first_that_is_empty(rank):
    model, x = made()
    for batch in range(9):
        more = torch.tensor(int(batch < 4 - rank), device=device())
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more:
            break
        model(x).sum().backward()


@report("dylanyunlon/Neuron_SP#73", nprocs=3, says=("barrier", "rank 0", "all_reduce"))
def debug_barrier(rank):
    loss = torch.ones(1, device=device())
    for micro in range(2):
        if rank == 0 and micro == 1:
            dist.barrier()  # <- here
        dist.all_reduce(loss)  # <- here


@report("Lightning-AI/pytorch-lightning#19106", nprocs=3, says=("rank 1 finished", "all_reduce"))
def logs_other_keys(rank):
    logs = {"loss": 1.0, "hard": 2.0} if rank != 1 else {"loss": 1.0}
    for value in logs.values():
        dist.all_reduce(torch.tensor(value, device=device()))  # <- here
