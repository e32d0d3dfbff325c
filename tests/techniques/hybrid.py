"""Chapter 7: ranks in a grid of data, pipeline and tensor; each dimension has a group of its own."""

import math
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import pad

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import Job, Trained, mistake, sgd, technique, trained
from tests.techniques.data_parallel import train as train_copies
from tests.techniques.fsdp import trained as trained_dtensors
from tests.techniques.tensor_parallel import put_together

groups_by_hand, groups_of_mesh = load_code(7, "groups_by_hand"), load_code(7, "groups_of_mesh")
Stage, PLAN, pipeline_of = (load_code(7, name) for name in ("Stage", "PLAN", "pipeline_of"))
own_rows, sum_gradients = load_code(7, "own_rows"), load_code(7, "sum_gradients")
share_of_loss = load_code(7, "share_of_loss")
hierarchical_all_reduce = load_code(7, "hierarchical_all_reduce")
groups_of, train_2d_step = load_answer("7.1"), load_answer("7.3")
train_3d_step = load_answer("7.4")

NAMES = ("data", "pipeline", "tensor")
Sizes = tuple[int, int, int]
Groups = dict[str, dist.ProcessGroup]


def by_hand(*sizes: int) -> Groups:
    return groups_by_hand(groups_of(dict(zip(NAMES, sizes, strict=True))))


def rows_of_this_copy(part: Tensor, groups: Groups) -> Tensor:
    return own_rows(part.to(device()), groups["data"])


def train(
    make_groups: Callable[..., Groups],
    sizes: Sizes,
    rank: int,
    job: Job,
    rows: Callable[[Tensor, Groups], Tensor] = rows_of_this_copy,
    sum_over: str = "data",
) -> Trained:
    """PyTorch cuts the blocks and runs the pipeline; the sum over the data group stays by hand."""
    groups = make_groups(*sizes)
    mesh = init_device_mesh(device().type, sizes, mesh_dim_names=NAMES)
    stage = parallelize_module(Stage(job.model(), groups["pipeline"]), mesh["tensor"], PLAN)
    loss = partial(share_of_loss, tokens=job.batches[0][1].numel())
    schedule = pipeline_of(stage, groups["pipeline"], loss)
    optimizer = sgd(stage)
    for batch in job.batches:
        optimizer.zero_grad()
        inputs, targets = (rows(part, groups) for part in batch)
        schedule.step(*[inputs] * stage.first, target=targets)
        sum_gradients(stage, groups[sum_over])
        optimizer.step()
    return trained_dtensors(stage)


def grid(make_groups: Callable[..., Groups], sizes: Sizes, name: str) -> None:
    technique([math.prod(sizes)], ["transformer"], name)(partial(train, make_groups, sizes))


grid(by_hand, (2, 1, 2), "data_and_tensor")
grid(by_hand, (3, 1, 2), "data_of_three_and_tensor")
grid(groups_of_mesh, (2, 2, 1), "data_and_pipeline")
grid(groups_of_mesh, (1, 2, 2), "pipeline_and_tensor")
grid(groups_of_mesh, (2, 2, 2), "data_pipeline_and_tensor")


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


def other_rows_on_each_tensor_rank(part: Tensor, groups: Groups) -> Tensor:
    return rows_of_this_copy(part.roll(dist.get_rank(groups["tensor"]), dims=0), groups)


WRONG = {
    "sum_over_the_tensor_group": {"sum_over": "tensor"},  # right shapes, wrong numbers
    "another_batch_on_each_tensor_rank": {"rows": other_rows_on_each_tensor_rank},
}
for name, slip in WRONG.items():
    mistake([4], ["transformer"], name)(partial(train, by_hand, (2, 1, 2), **slip))


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
    return whole(trained(model, part), tensor)


def whole(part: Trained, group: dist.ProcessGroup) -> Trained:
    """The parts of a tensor group, put together."""

    def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: put_together(name, tensor.to(device()), cut_of_part, group).cpu()
            for name, tensor in tensors.items()
        }

    return Trained(together(part.parameters), together(part.gradients))


def block(rows: Tensor, i: int, n: int) -> Tensor:
    """What the exercises read: the i-th of n equal blocks of rows."""
    return rows.chunk(n)[i]


def step_in_three_dimensions(part, read_inputs, read_targets, mesh, optimizer) -> None:
    shape = tuple(read_inputs(0, mesh.get_group("data").size()).shape)
    train_3d_step(part, read_inputs, read_targets, shape, mesh, optimizer)


technique([4], ["one part"], "train_2d_step")(
    partial(train_line, train_2d_step, {"data": 2, "tensor": 2})
)
technique([6], ["one part"], "train_2d_step_on_three_copies")(
    partial(train_line, train_2d_step, {"data": 3, "tensor": 2})
)
for sizes in ((2, 2, 1), (1, 2, 2), (2, 2, 2)):
    of_mesh = dict(zip(NAMES, sizes, strict=True))
    technique([math.prod(sizes)], ["two parts"], f"train_3d_step_{sizes}")(
        partial(train_line, step_in_three_dimensions, of_mesh)
    )
