"""Saving and loading: calls of all ranks that look like calls of one."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from course_utils.hardware import device
from tests.reports.corpus import PASSES, report

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@report("pytorch/pytorch#169448", says=("get_model_state_dict", "rank 0", "rank 1 finished"))
def gets_the_full_state_alone(rank):
    model = fully_shard(nn.Linear(8, 8).to(device()))
    if rank == 0:
        get_model_state_dict(model, options=FULL)  # <- here


@report("pytorch/pytorch#134095", nprocs=4, says=PASSES)
def full_state_of_two_dimensions(rank):
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8)).to(device())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = get_model_state_dict(model, options=FULL)
    assert rank or state["0.weight"].shape == (8, 8)


@report(
    "deepspeedai/DeepSpeed#797",
    "deepspeedai/DeepSpeed#801",
    says=("save", "rank 0", "rank 1 finished"),
)
def saves_alone(rank):
    model = fully_shard(nn.Linear(8, 8).to(device()))
    if rank == 0:
        dcp.save(model.state_dict(), checkpoint_id="ckpt")  # <- here


@report(
    "KempnerInstitute/KempnerForge#49", says=("broadcast_object_list", "rank 0", "rank 1 finished")
)
def file_that_one_does_not_see(rank):
    path = Path(f"train_state_{rank}.pt")
    if rank == 0:
        path.write_text("step 5")
    if path.exists():
        dist.broadcast_object_list([path.read_text()], src=0)  # <- here


@report(
    "vllm-project/speculators#324",
    nprocs=3,
    says=("barrier", "rank 1", "rank 0 finished", "rank 2 finished"),
)
def best_loss_of_one(rank):
    best, loss = 0.5, [0.6, 0.4, 0.7][rank]
    if loss < best:
        torch.save({"loss": loss}, "best.pt")
        dist.barrier()  # <- here


@report(
    "InternLM/xtuner#1852", says=("rank 1 raised FileExistsError", "exists", "barrier", "rank 0")
)
def only_one_sees_the_folder(rank):
    exists = rank == 1  # what the file system says
    if exists:
        raise FileExistsError("the folder weights exists")  # <- here
    dist.barrier()  # <- also


@report("Lightning-AI/pytorch-lightning#5155", says=("rank 1", "rank 0", "broadcast", "barrier"))
def name_that_was_taken_meanwhile(rank):
    if rank == 1:
        time.sleep(2)
    if Path("best.ckpt").exists():
        dist.broadcast_object_list(["best-v1.ckpt"], src=0)  # <- here
    Path("best.ckpt").touch()
    dist.barrier()  # <- here


@report("huggingface/accelerate#3536", "pytorch/pytorch#46166", says=PASSES)
def the_same_layer_checkpointed_twice(rank):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            x = checkpoint(self.layer, x, use_reentrant=False)
            return checkpoint(self.layer, x, use_reentrant=False)

    model = DDP(Twice().to(device()))
    for _ in range(2):
        model(torch.ones(1, 2, device=device())).sum().backward()


@report(
    "pytorch/pytorch#148252",
    "JinjieNi/dlms-are-super-data-learners#4",
    says=("Missing key in checkpoint state_dict", "2.weight|2.bias"),
)
def loads_into_a_bigger_model(rank):
    small = fully_shard(nn.Sequential(nn.Linear(4, 4)).to(device()))
    dcp.save(small.state_dict(), checkpoint_id="ckpt")
    bigger = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device()))
    dcp.load(bigger.state_dict(), checkpoint_id="ckpt")  # <- here


@report("RLinf/RLinf#655", says=("Size mismatch between saved", "[4, 4]", "[6, 4]"))
def loads_into_another_shape(rank):
    dcp.save({"embed": torch.ones(4, 4, device=device())}, checkpoint_id="ckpt")
    dcp.load({"embed": torch.ones(6, 4, device=device())}, checkpoint_id="ckpt")  # <- here


@report("mosaicml/llm-foundry#733", says=PASSES)
def waits_while_one_writes(rank):
    if rank == 0:
        time.sleep(6)
        torch.save({"step": 1}, "last.pt")
    dist.barrier()
    assert torch.load("last.pt", weights_only=True) == {"step": 1}


@report(
    "speechbrain/speechbrain#2192",
    says=("broadcast", "all_reduce|backward|DistributedDataParallel", "rank 0", "rank 1"),
)
def checkpoint_after_minutes(rank):
    model = DDP(nn.Linear(2, 1).to(device()))
    minutes = [0.9, 1.1][rank]
    for _ in range(2):
        model(torch.ones(1, 2, device=device())).sum().backward()  # <- here
        if minutes > 1:
            dist.broadcast_object_list(["save/CKPT"], src=0)  # <- here


@report(
    "speechbrain/speechbrain#2401",
    "speechbrain/speechbrain#2404",
    nprocs=3,
    says=("broadcast", "all_reduce", "rank 0", "rank 2"),
)
def folder_announced_by_the_main_process(rank):
    if rank == 0:
        dist.broadcast_object_list(["save/CKPT"], src=0)  # <- here
    dist.all_reduce(torch.ones(1, device=device()))  # <- here
