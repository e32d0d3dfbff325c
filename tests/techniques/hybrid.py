"""Chapter 7: ranks in a grid of data, pipeline and tensor; each dimension has a group of its own."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import pad

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import Job, Trained, mistake, sgd, technique, trained
from tests.techniques.data_parallel import train as train_copies
from tests.techniques.fsdp import trained as trained_dtensors
from tests.techniques.tensor_parallel import put_together

JOBS = ("language", "uneven language")

groups_by_hand, groups_of_mesh = load_code(7, "groups_by_hand"), load_code(7, "groups_of_mesh")
cut_blocks, cut_dimension = load_code(7, "cut_blocks"), load_code(7, "cut_dimension")
Stage = load_code(7, "Stage")
hierarchical_all_reduce = load_code(7, "hierarchical_all_reduce")
own_rows, add_up_gradients = load_code(7, "own_rows"), load_code(7, "add_up_gradients")
whole_step, pipelined_step = load_code(7, "whole_step"), load_code(7, "pipelined_step")
PLAN, local, share_of_loss = (load_code(7, name) for name in ("PLAN", "local", "share_of_loss"))
train_2d_step, train_3d_step = load_answer("7.3"), load_answer("7.4")

Sizes = tuple[int, int, int]  # data, pipeline, tensor
Groups = dict[str, dist.ProcessGroup]
Step = Callable[[nn.Module, Tensor, Tensor, Groups], object]


def train(make_groups: Callable[..., Groups], sizes: Sizes, step: Step, rank: int, job: Job):
    """Trains the part of a language model that this rank of a grid holds."""
    groups = make_groups(*sizes)
    held = cut_blocks(job.model(), groups["tensor"]) if sizes[2] > 1 else job.model()
    held = Stage(held, groups["pipeline"]) if sizes[1] > 1 else held
    optimizer = sgd(held)
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        step(held, inputs.to(device()), targets.to(device()), groups)
        optimizer.step()
    return whole(trained(held), groups["tensor"], cut_dimension)


def whole(part: Trained, group: dist.ProcessGroup, cut: Callable[[str], int | None]) -> Trained:
    """The parts of a tensor group, put together."""

    def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: put_together(name, tensor.to(device()), cut, group).cpu()
            for name, tensor in tensors.items()
        }

    return Trained(together(part.parameters), together(part.gradients))


def grid(make_groups: Callable[..., Groups], sizes: Sizes, name: str) -> None:
    data, pipeline, tensor = sizes
    step = pipelined_step if pipeline > 1 else whole_step
    technique([data * pipeline * tensor], JOBS, name)(partial(train, make_groups, sizes, step))


grid(groups_by_hand, (2, 1, 2), "data_and_tensor")
grid(groups_by_hand, (3, 1, 2), "data_of_three_and_tensor")
grid(groups_of_mesh, (2, 2, 1), "data_and_pipeline")
grid(groups_of_mesh, (1, 2, 2), "pipeline_and_tensor")
grid(groups_of_mesh, (2, 2, 2), "data_pipeline_and_tensor")


@technique([8], ["language"])
def torch_data_pipeline_and_tensor(rank: int, job: Job) -> Trained:
    """PyTorch cuts the blocks and runs the pipeline; the sum over the data group stays by hand."""
    mesh = init_device_mesh(device().type, (2, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
    data, pipeline = mesh.get_group("data"), mesh.get_group("pipeline")
    stage = parallelize_module(Stage(job.model(), pipeline), mesh["tensor"], PLAN)
    schedule = ScheduleGPipe(
        PipelineStage(stage, dist.get_rank(pipeline), pipeline.size(), device(), group=pipeline),
        n_microbatches=2,
        loss_fn=partial(share_of_loss, tokens=job.batches[0][1].numel()),
        scale_grads=False,  # the shares add up already
    )
    optimizer = sgd(stage)
    for batch in job.batches:
        optimizer.zero_grad()
        inputs, targets = (own_rows(part.to(device()), data) for part in batch)
        schedule.step(*[inputs] * stage.first, target=targets if stage.last else None)
        for parameter in stage.parameters():
            dist.all_reduce(local(parameter.grad), group=data)
        optimizer.step()
    return trained_dtensors(stage)


@technique([4], ["uneven", "language"])
def gradients_averaged_in_a_hierarchy(rank: int, job: Job) -> Trained:
    """Two machines of two ranks; every rank has the whole model."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("between", "inside"))
    inside, between = mesh.get_group("inside"), mesh.get_group("between")
    model = job.model()

    def average() -> None:
        for p in model.parameters():
            flat = pad(p.grad.flatten(), (0, -p.numel() % inside.size()))
            hierarchical_all_reduce(flat, inside, between)
            p.grad.copy_(flat[: p.numel()].view_as(p) / dist.get_world_size())

    train_copies(job, model, average)
    return trained(model)


def sum_over_the_tensor_group(
    model: nn.Module, inputs: Tensor, targets: Tensor, groups: Groups
) -> None:
    """The wrong dimension of the mesh: right shapes, wrong numbers."""
    logits = model(own_rows(inputs, groups["data"]))
    share_of_loss(logits, own_rows(targets, groups["data"]), targets.numel()).backward()
    add_up_gradients(model, groups["tensor"])


def another_batch_on_each_tensor_rank(
    model: nn.Module, inputs: Tensor, targets: Tensor, groups: Groups
) -> None:
    shift = dist.get_rank(groups["tensor"])
    whole_step(model, inputs.roll(shift, dims=0), targets.roll(shift, dims=0), groups)


for wrong_step in (sum_over_the_tensor_group, another_batch_on_each_tensor_rank):
    mistake([4], JOBS, wrong_step.__name__)(partial(train, groups_by_hand, (2, 1, 2), wrong_step))


# ---- the exercises: a line of small parts --------------------------------------------------------


def cut_of_part(name: str) -> int | None:
    """The dimension along which exercises 7.3 and 7.4 cut a parameter; None: whole on each rank."""
    cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    return next((dim for end, dim in cuts.items() if name.endswith(end)), None)


def train_line(step: Callable, sizes: dict[str, int], rank: int, job: Job) -> Trained:
    """`sizes` are those of the mesh by name, in its order."""
    mesh = init_device_mesh(device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tensor, at = mesh.get_group("tensor"), mesh.get_local_rank("tensor")
    model = job.model()
    part = model[mesh.get_local_rank("pipeline") if "pipeline" in sizes else 0]
    for name, parameter in part.named_parameters():
        if (dim := cut_of_part(name)) is not None:
            parameter.data = parameter.data.chunk(tensor.size(), dim)[at].clone()
    optimizer = sgd(part)
    for batch in job.batches:
        read_inputs, read_targets = (partial(block, rows.to(device())) for rows in batch)
        step(part, read_inputs, read_targets, mesh, optimizer)
    return whole(trained(model, part), tensor, cut_of_part)


def block(rows: Tensor, i: int, n: int) -> Tensor:
    """What the exercises read: the i-th of n equal blocks of rows."""
    return rows.chunk(n)[i]


def step_in_three_dimensions(part, read_inputs, read_targets, mesh, optimizer) -> None:
    shape = tuple(read_inputs(0, mesh.get_group("data").size()).shape)
    train_3d_step(part, read_inputs, read_targets, shape, mesh, optimizer)


technique([4], ["one part"], "train_2d_step")(
    partial(train_line, train_2d_step, {"data": 2, "tensor": 2})
)
technique([8], ["two parts"], "train_3d_step")(
    partial(train_line, step_in_three_dimensions, {"data": 2, "pipeline": 2, "tensor": 2})
)
