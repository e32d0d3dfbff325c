"""Chapter 5: stages that work on several micro-batches at once, in the order of a schedule."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from course_utils.lesson import schedules
from course_utils.lesson.schedules import Placement, Schedule, looped, v_shaped
from tests.techniques import Job, Trained, mean_loss, mistake, sgd, technique, trained
from tests.techniques.chains import stages

SHALLOW = ("even", "uneven", "convolutional", "language")  # can be cut in two
DEEP = ("convolutional", "language")  # can be cut in four
DEEPEST = ("language",)  # can be cut in six
MICRO_BATCHES = 6

Pipeline, samples = load_code(5, "Pipeline"), load_code(5, "samples")
micro_batch_gradients = load_answer("5.5")


@technique([1], ("even", "uneven", "awkward", "convolutional", "language"))
def micro_batches_in_one_process(rank: int, job: Job) -> Trained:
    model = job.model()
    optimizer = sgd(model)
    for inputs, targets in job.batches:
        batch = inputs.to(device()), targets.to(device())
        micro_batch_gradients(model, mean_loss, *batch, size=5)
        optimizer.step()
    return trained(model)


def numbers_of(rank: int, chunks: int, place: Placement) -> list[int]:
    return [place(rank, chunk, dist.get_world_size()) for chunk in range(chunks)]


def engine(
    make_schedule: Callable[[int, int], Schedule], rank: int, job: Job, place: Placement = looped
) -> Trained:
    """The chapter's engine; the virtual stages follow from the schedule and the placement."""
    fewest = min(len(inputs) for inputs, _ in job.batches)
    schedule = make_schedule(dist.get_world_size(), min(MICRO_BATCHES, fewest))
    chunks = 1 + max(op.chunk for op in schedule[rank])
    model = job.model()
    pieces = stages(model, len(schedule) * chunks)
    mine = nn.ModuleList(pieces[n] for n in numbers_of(rank, chunks, place))
    entering = samples(pieces, job.batches[0][0])
    own = Pipeline(list(mine), schedule, entering, mean_loss, place)
    optimizer = sgd(mine)
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        own.step(inputs, targets)
        optimizer.step()
    return trained(model, mine)


for name in ("gpipe", "one_forward_one_backward", "zb_h1", "zb_h2"):
    run = partial(engine, getattr(schedules, name))
    technique([1, 2], SHALLOW, f"engine_{name}")(run)
    technique([3, 4], DEEP, f"engine_{name}_deep")(run)
run = partial(engine, partial(schedules.interleaved, chunks=2))
technique([2], DEEP, "engine_interleaved")(run)
technique([3], DEEPEST, "engine_interleaved_deep")(run)
for name in ("zb_v", "dualpipe_v"):
    run = partial(engine, getattr(schedules, name), place=v_shaped)
    technique([2], DEEP, f"engine_{name}")(run)
    technique([3], DEEPEST, f"engine_{name}_deep")(run)


def run_schedule(job: Job, schedule, optimizer, first: bool, last: bool) -> None:
    """Trains with a schedule of torch's; the first rank has the inputs, the last the targets."""
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        given = [inputs.to(device())] if first else []
        schedule.step(*given, **({"target": targets.to(device())} if last else {}))
        optimizer.step()


def torch_pipelining(
    schedule_class,
    chunks: int,
    rank: int,
    job: Job,
    scale_grads: bool = True,
    place: Placement = looped,
) -> Trained:
    ranks, model = dist.get_world_size(), job.model()
    pieces = stages(model, ranks * chunks)
    numbers = numbers_of(rank, chunks, place)
    mine = nn.ModuleList(pieces[n] for n in numbers)
    own = [PipelineStage(pieces[n], n, len(pieces), device()) for n in numbers]
    schedule = schedule_class(
        own if chunks > 1 else own[0], MICRO_BATCHES, loss_fn=mean_loss, scale_grads=scale_grads
    )
    last = len(pieces) - 1 in numbers
    run_schedule(job, schedule, sgd(mine), first=rank == 0, last=last)
    return trained(model, mine)


EQUAL = tuple(name for name in SHALLOW if name != "uneven")  # torch wants equal micro-batches
technique([2], EQUAL, "torch_gpipe")(partial(torch_pipelining, ScheduleGPipe, 1))
technique([2], EQUAL, "torch_1f1b")(partial(torch_pipelining, Schedule1F1B, 1))
technique([3], DEEP, "torch_1f1b_deep")(partial(torch_pipelining, Schedule1F1B, 1))
technique([2], DEEP, "torch_interleaved")(partial(torch_pipelining, ScheduleInterleaved1F1B, 2))
technique([2], DEEP, "torch_zero_bubble")(
    partial(torch_pipelining, ScheduleInterleavedZeroBubble, 2)
)
for name, schedule_class in (("zbv", ScheduleZBVZeroBubble), ("dualpipev", ScheduleDualPipeV)):
    run = partial(torch_pipelining, schedule_class, 2, place=v_shaped)
    technique([2], DEEP, f"torch_{name}")(run)


@technique([2], DEEPEST)
def torch_cuts_the_model_itself(rank: int, job: Job) -> Trained:
    model = job.model()
    example = job.batches[0][0].to(device()).chunk(MICRO_BATCHES)[0]
    cuts = {"blocks.2": SplitPoint.BEGINNING}
    pipe = pipeline(model, mb_args=(example,), split_spec=cuts)
    schedule = Schedule1F1B(pipe.build_stage(rank, device()), MICRO_BATCHES, loss_fn=mean_loss)
    mine = pipe.get_stage_module(rank)
    run_schedule(job, schedule, sgd(mine), first=rank == 0, last=rank == 1)
    return trained(mine)


mistake([2], EQUAL, "sum_of_micro_batches")(
    partial(torch_pipelining, ScheduleGPipe, 1, scale_grads=False)
)
