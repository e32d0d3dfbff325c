"""Answers to 7.3, `train_2d_step`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import mse_loss

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch07.shared import (
    average_all,
    average_over,
    average_parameters,
    average_shards_only,
    averaging,
    averaging_asynchronously,
    bias_before_the_sum,
    forward_of,
    over_all_ranks,
    own_block,
    summing_twice,
    with_zeros_for_none,
    without_either,
    without_sum_backward,
)


def _mean_loss(loss, mesh):
    loss = loss.detach().clone()
    average_over([loss], mesh)
    return loss.item()


def _train_2d(
    part,
    read_inputs,
    read_targets,
    mesh,
    optimizer,
    *,
    block=own_block,
    forward=forward_of,
    average=average_all,
    mean_loss=_mean_loss,
):
    """A right answer, of which each wrong one replaces a part."""
    x, targets = read_inputs(*block(mesh)), read_targets(*block(mesh))
    optimizer.zero_grad()
    loss = mse_loss(forward(part, x, mesh), targets)
    loss.backward()
    average(part, mesh)
    optimizer.step()
    return mean_loss(loss, mesh)


@right("7.3")
def averages_one_flat_buffer(part, read_inputs, read_targets, mesh, optimizer):
    def average(part, mesh):
        gradients = [p.grad for p in part.parameters() if p.requires_grad]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        average_over([flat], mesh)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(mean.view_as(gradient))

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=average)


@right("7.3")
def averages_replicated_parameters_over_all(part, read_inputs, read_targets, mesh, optimizer):
    """The ranks of a tensor group have the same gradients of these: the mean is the same."""

    def average(part, mesh):
        copies = [p.grad for p in (part.scale, part.bias) if p.grad is not None]
        shards = [*part.up.parameters(), *part.down.parameters()]
        average_over(copies, mesh, ("data", "tensor"))
        average_over([p.grad for p in shards if p.grad is not None], mesh)

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=average)


@right("7.3")
def sums_the_scales_gradient_itself(part, read_inputs, read_targets, mesh, optimizer):
    """Nothing comes before `scale` here, so its gradient can be summed after backward."""
    tensor = mesh.get_group("tensor")

    def forward(part, x, mesh):
        own = part.down(part.up(part.scale * x).relu())
        others = own.detach().clone()
        dist.all_reduce(others, group=tensor)
        return own + (others - own.detach()) + part.bias

    def average(part, mesh):
        if part.scale.grad is not None:
            dist.all_reduce(part.scale.grad, group=tensor)
        average_all(part, mesh)

    return _train_2d(
        part, read_inputs, read_targets, mesh, optimizer, forward=forward, average=average
    )


@right("7.3")
def averages_while_the_loss_travels(part, read_inputs, read_targets, mesh, optimizer):
    """Starts all sums, waits for them before the step, and for the loss after it."""
    data = mesh.get_group("data")
    started = []

    def average(part, mesh):
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        works = [dist.all_reduce(g, group=data, async_op=True) for g in gradients]
        for work, gradient in zip(works, gradients):
            work.wait()
            gradient /= data.size()

    def forward(part, x, mesh):
        y = forward_of(part, x, mesh)
        loss = mse_loss(y.detach(), read_targets(*own_block(mesh)))
        started.append((loss, dist.all_reduce(loss, group=data, async_op=True)))
        return y

    def mean_loss(_, mesh):
        loss, work = started.pop()
        work.wait()
        return loss.item() / data.size()

    return _train_2d(
        part,
        read_inputs,
        read_targets,
        mesh,
        optimizer,
        forward=forward,
        average=average,
        mean_loss=mean_loss,
    )


@right("7.3")
def lets_functional_collectives_wait(*given):
    """They wait where the result is used, and no `Work` is seen."""

    def average(part, mesh):
        data = mesh.get_group("data")
        for parameter in part.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(functional.all_reduce(parameter.grad, "avg", data))

    return _train_2d(*given, average=average)


@wrong("7.3", names="not-waited")
def waits_for_gradients_after_the_step(*given):
    works = []

    def average(part, mesh):
        works.extend(averaging_asynchronously(mesh, [p.grad for p in part.parameters()]))

    def mean_loss(loss, mesh):
        for work in works:
            work.wait()
        return _mean_loss(loss, mesh)

    return _train_2d(*given, average=average, mean_loss=mean_loss)


@wrong("7.3", names="other-rows")
def reads_everything(*given):
    return _train_2d(*given, block=lambda mesh: (0, 1))


@wrong("7.3", names="other-rows")
def reads_by_its_rank(*given):
    return _train_2d(*given, block=lambda mesh: (dist.get_rank(), dist.get_world_size()))


@wrong("7.3", names="other-output")
def treats_the_part_as_the_model(*given):
    return _train_2d(*given, forward=without_either)


@wrong("7.3", names="other-output")
def adds_the_bias_before_the_sum(*given):
    return _train_2d(*given, forward=bias_before_the_sum)


@wrong("7.3", names="input-gradient-partial")
def forgets_the_replicated_scale(*given):
    return _train_2d(*given, forward=without_sum_backward)


@wrong("7.3", names="summed-too-often")
def sums_in_backward_too(*given):
    return _train_2d(*given, forward=summing_twice)


@wrong("7.3", names="other-group")
def sums_over_all_ranks(*given):
    return _train_2d(*given, forward=over_all_ranks)


@wrong("7.3", names="unchanged")
def averages_after_the_step(part, *others):
    loss = _train_2d(part, *others, average=lambda part, mesh: None)
    average_all(part, others[2])
    return loss


@wrong("7.3", names="other-factor")
def divides_by_all_ranks(*given):
    return _train_2d(*given, average=averaging(("data",), dist.get_world_size()))


@wrong("7.3", names="other-group")
def averages_over_all_ranks(*given):
    return _train_2d(*given, average=averaging(("data", "tensor")))


@wrong("7.3", names="left-out")
def averages_shards_only(*given):
    return _train_2d(*given, average=average_shards_only)


@wrong("7.3", names="parameters-averaged")
def averages_parameters_after_the_step(part, *others):
    """Equal with plain SGD, and with momentum; not with Adam."""
    loss = _train_2d(part, *others, average=lambda part, mesh: None)
    average_parameters(part, others[2])
    return loss


@wrong("7.3", names="not-stepped")
def clears_before_the_step(*given):
    def average(part, mesh):
        average_all(part, mesh)
        part.zero_grad()

    return _train_2d(*given, average=average)


@wrong("7.3", names="other-output")
def forgets_the_bias(*given):
    return _train_2d(*given, forward=lambda part, x, mesh: forward_of(part, x, mesh) - part.bias)


@wrong("7.3", names="group-rank")
def broadcasts_the_loss_from_rank_0(*given):
    def mean_loss(loss, mesh):
        loss = loss.detach().clone()
        average_over([loss], mesh)
        dist.broadcast(loss, src=0, group=mesh.get_group("tensor"))
        return loss.item()

    return _train_2d(*given, mean_loss=mean_loss)


@wrong("7.3", names="not-a-float")
def returns_a_tensor(*given):
    return torch.tensor(_train_2d(*given))


@wrong("7.3", names="loss-not-mean")
def returns_its_own_loss(*given):
    return _train_2d(*given, mean_loss=lambda loss, mesh: loss.item())


@wrong("7.3", names="old-gradients")
def never_clears_gradients(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*own_block(mesh)), read_targets(*own_block(mesh))
    loss = mse_loss(forward_of(part, x, mesh), targets)
    loss.backward()
    average_all(part, mesh)
    optimizer.step()
    return _mean_loss(loss, mesh)


@wrong("7.3", names="old-gradients")
def sums_old_gradients_too(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*own_block(mesh)), read_targets(*own_block(mesh))
    loss = mse_loss(forward_of(part, x, mesh), targets)
    (loss / mesh["data"].size()).backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.get_group("data"))
    optimizer.step()
    return _mean_loss(loss, mesh)


@wrong("7.3", names="frozen")
def makes_up_zeros(*given):
    return _train_2d(*given, average=with_zeros_for_none)


@wrong("7.3", names="by-arithmetic")
def takes_dimensions_by_position(*given):
    return _train_2d(*given, block=lambda mesh: (mesh.get_coordinate()[0], mesh.shape[0]))


@wrong("7.3", names="not-every-rank")
def averages_the_loss_on_rank_0(*given):
    def mean_loss(loss, mesh):
        loss = loss.detach().clone()
        if dist.get_rank() == 0:
            dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return _train_2d(*given, mean_loss=mean_loss)
