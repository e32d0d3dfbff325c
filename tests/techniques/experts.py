"""Chapter 11: ranks in a grid of data and experts; each has rows of its own and some of the experts."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import Job, Trained, mistake, sgd, technique, trained
from tests.techniques.fsdp import trained as trained_dtensors
from tests.techniques.jobs import BALANCE

WITH_QUEUES = ("experts, capacity 1.25", "experts, capacity 0.75")
JOBS, WITH_BIAS = ("experts", *WITH_QUEUES), ("experts, bias",)

expert_parallel, is_expert = load_code(11, "expert_parallel"), load_code(11, "is_expert")
add_up_gradients, share_of_loss = load_code(11, "add_up_gradients"), load_code(11, "share_of_loss")
exchange_with_pytorch, shard = load_code(11, "exchange_with_pytorch"), load_code(11, "shard")
run_experts = load_code(11, "run_experts")
route, places, Dispatcher = load_answer("11.1"), load_answer("11.2"), load_answer("11.3")
balance_loss, average_expert_gradients = load_answer("11.4"), load_answer("11.5")

Finish = Callable[[nn.Module, DeviceMesh], None]
Sizes = tuple[int, int]  # data, experts


def add_up(model: nn.Module, mesh: DeviceMesh) -> None:
    add_up_gradients(model, mesh.get_group("data"))


def mesh_of(sizes: Sizes) -> DeviceMesh:
    return init_device_mesh(device().type, sizes, mesh_dim_names=("data", "experts"))


def train(
    sizes: Sizes,
    rank: int,
    job: Job,
    *,
    change: Callable[[nn.Module, DeviceMesh], None] = lambda model, mesh: None,
    finish: Finish = add_up,
    means: bool = False,
) -> nn.Module:
    """Trains what this rank has of the model; `change` is made before the first step. The loss is this
    rank's share of the batch's or, with `means`, the mean of its own rows."""
    mesh = mesh_of(sizes)
    model = expert_parallel(job.model(), mesh.get_group("experts"))
    change(model, mesh)
    optimizer = sgd(model)
    for batch in job.batches:
        inputs, targets = (part.tensor_split(mesh.size())[rank].to(device()) for part in batch)
        optimizer.zero_grad()
        share = share_of_loss(model(inputs), targets, batch[1].numel(), BALANCE)
        (share * (mesh.size() if means else 1)).backward()
        finish(model, mesh)
        optimizer.step()
    return model


def by_hand(sizes: Sizes, rank: int, job: Job, **how) -> Trained:
    return trained(train(sizes, rank, job, **how))


for sizes in ((1, 2), (1, 4), (2, 2)):
    name = f"experts_of_{sizes[1]}_ranks_and_data_of_{sizes[0]}"
    technique([sizes[0] * sizes[1]], [*JOBS, *WITH_BIAS], name)(partial(by_hand, sizes))


@technique([4], ["experts", *WITH_BIAS])
def torch_experts_and_fsdp(rank: int, job: Job) -> Trained:
    """PyTorch's all-to-all with its backward; FSDP shards experts over data, the rest over all."""

    def change(model: nn.Module, mesh: DeviceMesh) -> None:
        layer = layer_of(model)
        layer.run = partial(layer.run, exchange=exchange_with_pytorch)
        everybody = init_device_mesh(device().type, (mesh.size(),))
        shard(model, layer.experts, mesh["data"], everybody)

    model = train((2, 2), rank, job, change=change, finish=lambda model, mesh: None)
    return trained_dtensors(model)


def layer_of(model: nn.Module) -> nn.Module:
    return model.blocks[1].feed_forward


# ---- the exercises: a layer of their answers -----------------------------------------------------


def forward_of_answers(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's forward, for experts that all ranks share; ranks may have no token."""
    tokens = x.flatten(0, -2)
    logits = layer.router(tokens)
    experts = logits.shape[1]
    choices, weights = route(logits, logits.new_zeros(experts), layer.k)
    layer.balance = balance_loss(logits, choices)
    pieces = choices.new_tensor([choices.numel()])
    dist.all_reduce(pieces)
    room = min(layer.capacity_factor * pieces.item() / experts, pieces.item())
    kept = places(choices, choices.new_full((experts,), -int(-room // 1))) >= 0
    token, which = kept.nonzero(as_tuple=True)
    order = choices[token, which].argsort(stable=True)
    token, which = token[order], which[order]
    sender = Dispatcher(choices[token, which].bincount(minlength=experts))
    queues = sender.dispatch(tokens[token])
    numbers = [int(number) for number in layer.experts]
    wanted = choices.new_tensor(numbers).repeat_interleave(sender.load)
    back = sender.combine(run_experts(layer.experts, queues, wanted))
    weighted = weights[token, which, None] * back
    return layer.shared(tokens).index_add(0, token, weighted).view_as(x)


def with_answers(model: nn.Module, mesh: DeviceMesh) -> None:
    layer_of(model).forward = partial(forward_of_answers, layer_of(model))


@technique([2, 4], JOBS)
def layer_of_the_exercises(rank: int, job: Job) -> Trained:
    sizes = (1, dist.get_world_size())
    return by_hand(
        sizes, rank, job, change=with_answers, finish=average_expert_gradients, means=True
    )


@technique([4], ["uneven experts"])
def layer_of_the_exercises_with_uneven_rows(rank: int, job: Job) -> Trained:
    return by_hand((1, 4), rank, job, change=with_answers)


@technique([4], JOBS)
def averages_of_the_exercise(rank: int, job: Job) -> Trained:
    return by_hand((2, 2), rank, job, finish=average_expert_gradients, means=True)


# ---- mistakes ------------------------------------------------------------------------------------


@mistake([4], ["experts"])
def experts_averaged_over_their_copies(rank: int, job: Job) -> Trained:
    """As FSDP does by default: too large by the size of the experts' group."""

    def finish(model: nn.Module, mesh: DeviceMesh) -> None:
        for name, p in model.named_parameters():
            group = mesh.get_group("data") if is_expert(name) else None
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)

    return by_hand((2, 2), rank, job, finish=finish, means=True)


@mistake([2], ["experts"])
def experts_divided_by_their_group(rank: int, job: Job) -> Trained:
    def finish(model: nn.Module, mesh: DeviceMesh) -> None:
        add_up(model, mesh)
        for name, p in model.named_parameters():
            p.grad /= mesh["experts"].size() if is_expert(name) else 1

    return by_hand((1, 2), rank, job, finish=finish)


@mistake([4], ["experts"])
def experts_of_one_copy_only(rank: int, job: Job) -> Trained:
    def finish(model: nn.Module, mesh: DeviceMesh) -> None:
        for name, p in model.named_parameters():
            if not is_expert(name):
                dist.all_reduce(p.grad)

    return by_hand((2, 2), rank, job, finish=finish)


@mistake([2], [*WITH_QUEUES, *WITH_BIAS])
def queues_of_each_rank(rank: int, job: Job) -> Trained:
    """Capacity and balance, or the bias, of a rank's own tokens."""

    def change(model: nn.Module, mesh: DeviceMesh) -> None:
        layer_of(model).gather = lambda choices: choices

    return by_hand((1, 2), rank, job, change=change)


@mistake([2], ["experts"])
def balance_of_each_rank(rank: int, job: Job) -> Trained:
    """Without queues the own choices only change the balance loss."""

    def change(model: nn.Module, mesh: DeviceMesh) -> None:
        layer = layer_of(model)
        ranks = mesh.size()
        layer.gather = lambda choices: choices.repeat(ranks, 1)

    return by_hand((1, 2), rank, job, change=change)
