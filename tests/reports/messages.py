"""Where PyTorch, or the learner's own exception, says what is wrong: those words must come through."""

import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.hardware import device
from tests.reports.corpus import PASSES, SWALLOWED, report


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.aux = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x, with_aux=False):
        return self.main(x) + self.aux(x) if with_aux else self.main(x)


@report(
    "pytorch/pytorch#43259",
    "pytorch/pytorch#68862",
    "pytorch/pytorch#57776",
    says=(
        "parameters that were not used in producing loss",
        "find_unused_parameters",
        "aux.weight",
    ),
)
def unused_layer(rank):
    model = DDP(TwoHeads().to(device()))
    for _ in range(2):
        model(torch.ones(1, 2, device=device())).sum().backward()  # <- here


@report(
    "open-mmlab/mmdetection (FAQ)",
    "facebookresearch/detectron2#4191",
    "open-mmlab/mmdetection3d#488",
    nprocs=3,
    says=("rank 1", "not used in producing loss", "find_unused_parameters", "aux.weight"),
)
def unused_on_one_rank(rank):
    model = DDP(TwoHeads().to(device()))
    for _ in range(2):
        model(torch.ones(1, 2, device=device()), rank != 1).sum().backward()  # <- here


@report("pytorch/pytorch#128949", says=PASSES)
def unused_in_the_only_step(rank):
    model = DDP(TwoHeads().to(device()))
    model(torch.ones(1, 2, device=device())).sum().backward()


@report("facebookresearch/TimeSformer#107", "lhotse-speech/lhotse#554", says=PASSES)
def unused_but_looked_for(rank):
    model = DDP(TwoHeads().to(device()), find_unused_parameters=True)
    for step in range(3):
        model(torch.ones(1, 2, device=device()), step == 1 and rank == 0).sum().backward()


@report("pytorch/pytorch#22436", says=PASSES)
def output_left_out_of_the_loss(rank):
    class Pair(TwoHeads):
        def forward(self, x):
            return self.main(x), self.aux(x)

    model = DDP(Pair().to(device()), find_unused_parameters=True)
    for _ in range(2):
        source, _target = model(torch.ones(1, 2, device=device()))
        source.sum().backward()


@report(
    "pytorch/pytorch#105723",
    "huggingface/transformers#24970",
    says=("marked as ready twice", "main.weight|main.bias"),
)
def three_forwards_one_backward(rank):
    model = DDP(TwoHeads().to(device()), find_unused_parameters=True)
    x = torch.ones(1, 2, device=device())
    losses = model(x).sum(), model(x, True).sum()
    losses[0].backward()
    losses[1].backward()  # <- here


@report("pytorch/pytorch#22095", "pytorch/pytorch#66504", says=PASSES)
def buffer_used_twice(rank):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x):
            return (self.layer(x) * self.scale).sum()

    model = DDP(Scaled().to(device()))
    x = torch.ones(1, 2, device=device())
    loss = model(x) + model(x)
    loss.backward()


@report(
    "pytorch/pytorch#44957",
    says=("SyncBatchNorm expected input tensor to be on GPU",),
    rules_says=("SyncBatchNorm|batch_norm",),
)
def synchronised_batch_norm(rank):
    model = nn.SyncBatchNorm(4).to(device())
    model(torch.ones(2, 4, device=device()))  # <- here


@report(
    "pytorch/pytorch#102438",
    "Kent0n-Li/ChatDoctor#49",
    says=(
        "DDP expects same model across all ranks",
        "Rank 0 has 2 params",
        "rank 1 has inconsistent 0 params|rank 1",
    ),
)
def models_of_unequal_size(rank):
    model = nn.Linear(2, 1).to(device())
    if rank == 1:
        model = nn.Sequential(model, nn.Linear(1, 1).to(device()))
    DDP(model)  # <- here


@report(
    "pytorch/torchtitan#1790", nprocs=3, says=("rank 1 raised ValueError", "x.shape", "all_reduce")
)
def shapes_of_one_rank(rank):
    x, y = torch.ones(2, 3), torch.ones(2, 4 if rank == 1 else 3)
    if x.shape != y.shape:
        raise ValueError(f"x.shape is {x.shape}, y.shape is {y.shape}")  # <- here
    dist.all_reduce(x.to(device()))  # <- also


@report("mosaicml/composer#334", says=("rank 0 raised OSError", "disk full", "rank 1", "barrier"))
def disk_full_on_rank_0(rank):
    if rank == 0:
        raise OSError("disk full")  # <- here
    dist.barrier()  # <- also


@report("ai2cm/ace#1067", says=("OSError", "disk full", "rank 0", "barrier", "all_reduce"))
def barrier_in_finally(rank):
    try:
        if rank == 0:
            raise OSError("disk full")  # <- here
        dist.all_reduce(torch.ones(2, device=device()))
    finally:
        dist.barrier()


@report("pytorch/pytorch#36613", "facebookresearch/detr#544", says=PASSES)
def seeds_of_their_own(rank):
    torch.manual_seed(rank)
    model = DDP(nn.Linear(2, 1).to(device()))
    weights = [torch.empty(1, 2, device=device()) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.detach())
    assert torch.equal(*weights)


@report("mlfoundations/open_clip#616", says=PASSES)
def gathered_with_gradients(rank):
    x = torch.ones(2, device=device(), requires_grad=True)
    torch.cat(dnn.all_gather(x)).sum().backward()
    assert x.grad.tolist() == [2, 2]


@report(
    "kohjingyu/fromage#33",
    "3dlg-hcvc/DuoduoCLIP#10",
    says=("rank 0 raised RuntimeError|raised RuntimeError", "does not require grad"),
)
def gathered_without_gradients(rank):
    x = torch.ones(2, device=device(), requires_grad=True)
    out = [torch.empty(2, device=device()) for _ in range(2)]
    dist.all_gather(out, x.detach())
    torch.cat(out).sum().backward()  # <- here


@report(
    "ai-dynamo/aiconfigurator#1542",
    says=("rank 0", "OSError", "no space left", "rank 1", "barrier"),
    known=SWALLOWED,
    known_rules=SWALLOWED,
)
def failure_that_one_keeps_to_itself(rank):
    failed = False
    try:
        if rank == 0:
            raise OSError("no space left")
    except OSError:
        failed = True
    if not failed:
        dist.barrier()  # <- here


@report("ZhehengJiangLancaster/AMVUR#2", nprocs=3, says=("rank 2", "SIGKILL|signal 9|killed"))
def killed_by_the_system(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
