"""Calls that some ranks do not make, messages without a partner, keys that nobody sets."""

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils.hardware import device
from tests.reports.corpus import PASSES, report


@report("pytorch/pytorch#138322", nprocs=4, says=("barrier", "rank 3 finished"))
def one_barrier_less(rank):
    if rank != 3:
        dist.barrier()  # <- also
    dist.barrier()  # <- here


@report(
    "huggingface/transformers#1081",
    nprocs=3,
    says=("barrier", "rank 0", "rank 1 finished", "rank 2 finished"),
)
def barrier_in_a_helper(rank):
    def load_examples():
        dist.barrier()  # <- here

    if rank == 0:
        load_examples()


@report("Lightning-AI/pytorch-lightning#20536", says=("barrier", "all_reduce", "rank 0", "rank 1"))
def returned_before_the_barrier(rank):
    def make_dataset():
        if rank == 0:
            return torch.ones(4, device=device())
        dist.barrier()  # <- here
        return torch.zeros(4, device=device())

    dist.all_reduce(make_dataset())  # <- here


@report("hao-ai-lab/FastVideo#598", says=("barrier", "broadcast", "rank 0", "rank 1"))
def cache_seen_by_some(rank):
    if rank == 1:
        time.sleep(2)
    if not Path("cache").exists():
        if rank == 0:
            Path("cache").write_text("files")
        dist.barrier()  # <- here
    dist.broadcast(torch.ones(1, device=device()), src=0)  # <- here


@report(
    "pytorch/pytorch#108378",
    says=("isend", "rank 0", "rank 1", "recv"),
    rules_says=("isend", "rank 0", "rank 1", "recv", "barrier"),
)
def send_without_receive(rank):
    if rank == 0:
        dist.isend(torch.ones(1, device=device()), dst=1).wait()  # <- here
    dist.barrier()


@report(
    "pytorch/pytorch#109401",
    says=PASSES,
    rules_says=("isend|send", "recv", "order|batch_isend_irecv"),
)
def interleaved(rank):
    a, b = torch.ones(1, device=device()), torch.zeros(1, device=device())
    if rank == 0:
        works = [dist.irecv(b, src=1), dist.isend(a, dst=1)]
    else:
        works = [dist.irecv(b, src=0), dist.isend(a, dst=0)]
    for work in works:
        work.wait()  # <- here


@report(
    "pytorch/pytorch#78514",
    "pytorch/pytorch#75512",
    says=("isend", "wait()", "rank 0 finished", "rank 1", "recv"),
    rules_says=PASSES,
    late=True,  # gloo's thread computes while it waits for what was dropped
)
def send_that_nobody_waits_for(rank):
    t = torch.ones(1, device=device())
    if rank == 0:
        dist.isend(t, dst=1)  # <- also
    else:
        time.sleep(1)  # by then rank 0 has dropped what isend returned, and gloo the message
        dist.recv(t, src=0)  # <- here


@report(
    "NVIDIA/nccl#479",
    says=("rank 0 waits in send", "rank 1 waits in send", "irecv|recv first|batch_isend"),
)
def both_send_first(rank):
    a, b = torch.ones(4, device=device()), torch.zeros(4, device=device())
    dist.send(a, dst=1 - rank)  # <- here
    dist.recv(b, src=1 - rank)


@report("NVIDIA/nccl#2130", says=("rank 0", "irecv|recv", "rank 1 finished"))
def batch_of_one_side(rank):
    a, b = torch.ones(1, device=device()), torch.zeros(1, device=device())
    ops = [dist.P2POp(dist.isend, a, 1), dist.P2POp(dist.irecv, b, 1)]
    if rank == 1:
        ops = [dist.P2POp(dist.irecv, b, 0)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()  # <- here


@report("intel/torch-ccl#72", says=PASSES, rules_says=("isend|send", "batch_isend_irecv|order"))
def both_isend_first(rank):
    a, b = torch.ones(1, device=device()), torch.zeros(1, device=device())
    send = dist.isend(a, dst=1 - rank)
    recv = dist.irecv(b, src=1 - rank)
    send.wait()  # <- here
    recv.wait()
    assert b.item() == 1


def shared_store(rank):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = [store.port if store else None]
    dist.broadcast_object_list(port, src=0)
    return store or dist.TCPStore("127.0.0.1", port[0])


@report("pytorch/pytorch#67972", says=("rank 0", "wait", "ready", "rank 1", "barrier"))
def key_that_nobody_sets(rank):
    store = shared_store(rank)
    if rank == 0:
        store.wait(["ready"])  # <- here
    dist.barrier()  # <- also


@report(
    "pytorch/pytorch#55571",
    "pytorch/pytorch#131808",
    says=("rank 0 raised", "wait timeout after 2000ms", "invalid_key"),
)
def key_waited_for_in_vain(rank):
    store = shared_store(rank)
    if rank == 0:
        store.wait(["invalid_key"], timedelta(seconds=2))  # <- here
    dist.barrier()


@report("pytorch/pytorch#53840", says=PASSES)
def keys_set_one_after_the_other(rank):
    store = shared_store(rank)
    if rank == 0:
        time.sleep(0.5)
        store.wait(["1", "2"])
    else:
        store.set("1", "here")
        time.sleep(1)
        store.set("2", "here")
    dist.barrier()


@report(
    "pytorch/pytorch#83289",
    "NVIDIA/nccl#849",
    says=("rank 0 raised", "Rank 1 failed to pass monitoredBarrier", "2000 ms"),
    rules_says=("monitored_barrier requires a group with a CPU-capable backend",),
)
def barrier_with_a_limit(rank):
    if rank == 1:
        time.sleep(8)
    dist.monitored_barrier(timeout=timedelta(seconds=2))  # <- here


@report(
    "pytorch/pytorch#75097",
    "meta-pytorch/torchrec#3560",
    says=("rank 0", "all_reduce", "rank 1", "destroy_process_group"),
)
def destroyed_early(rank):
    t = torch.ones(2, device=device())
    if rank == 1:
        dist.destroy_process_group()  # <- here
    else:
        dist.all_reduce(t)  # <- also


@report("Lightning-AI/pytorch-lightning#17733", says=PASSES)
def downloads_and_the_others_wait(rank):
    if rank == 0:
        time.sleep(6)
        Path("data").write_text("1 2 3")
    dist.barrier()
    assert Path("data").read_text() == "1 2 3"


@report(
    "hiyouga/LLaMA-Factory#360",
    "speechbrain/speechbrain#1766",
    "NVIDIA/nccl#708",
    says=("rank 1", "barrier", "3000ms|3 s|time limit|timeout", "rank 0"),
    rules_says=("rank 1", "barrier", "3000ms|3 s|time limit|timeout|watchdog", "rank 0"),
)
def slower_than_the_groups_limit(rank):
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == 0:
        time.sleep(15)  # <- also
    dist.barrier(group)  # <- here


@report(
    "pytorch/torchtitan#775",
    says=(
        "Number of microbatches (1) must be greater than or equal to the number of stages (2)|Number of microbatches (1)",
    ),
)
def fewer_microbatches_than_stages(rank):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(torch.nn.Linear(2, 2).to(device()), rank, 2, device())
    Schedule1F1B(stage, n_microbatches=1)  # <- here
