"""Answers to 7.3, `train_2d_step`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import mse_loss

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch07.shared import (
    SumBackward,
    SumForward,
    SumTwice,
    average_all,
    average_over,
    average_parameters,
    average_replicated_only,
    average_shards_only,
    averaging,
    averaging_asynchronously,
    forward_of,
    group_of,
    own_block,
    with_zeros_for_none,
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
def waits_for_no_gradient(*given):
    def average(part, mesh):
        averaging_asynchronously(mesh, [p.grad for p in part.parameters()])

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


@wrong("7.3", names="not-stepped")
def forgets_the_step(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*own_block(mesh)), read_targets(*own_block(mesh))
    loss = mse_loss(forward_of(part, x, mesh), targets)
    loss.backward()
    average_all(part, mesh)
    return _mean_loss(loss, mesh)


@wrong("7.3", names="whole-batch")
def reads_everything(*given):
    return _train_2d(*given, block=lambda mesh: (0, 1))


@wrong("7.3", names="batch-by-rank")
def reads_by_its_rank(*given):
    return _train_2d(*given, block=lambda mesh: (dist.get_rank(), dist.get_world_size()))


@wrong("7.3", names="batch-by-tensor")
def reads_by_its_tensor_coordinate(*given):
    return _train_2d(
        *given, block=lambda mesh: (mesh.get_local_rank("tensor"), mesh.get_group("tensor").size())
    )


@wrong("7.3", names="other-rows")
def reads_block_0(*given):
    return _train_2d(*given, block=lambda mesh: (0, mesh.get_group("data").size()))


@wrong("7.3", names="partial-output")
def leaves_terms_of_the_sum(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        return part.down(part.up(SumBackward.apply(part.scale * x, tensor)).relu()) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="partial-output")
def treats_the_part_as_the_model(*given):
    def forward(part, x, mesh):
        return part.down(part.up(part.scale * x).relu()) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="bias-per-rank")
def adds_the_bias_before_the_sum(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
        return SumForward.apply(part.down(hidden) + part.bias, tensor)

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="mean-not-sum")
def averages_the_partial_outputs(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
        return SumForward.apply(part.down(hidden), tensor) / tensor.size() + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="input-gradient-partial")
def forgets_the_replicated_scale(*given):
    return _train_2d(*given, forward=without_sum_backward)


@wrong("7.3", names="input-gradient-partial")
def averages_over_all_what_is_partial(*given):
    """The mean over all ranks of partial gradients is too small by the size of the tensor group."""

    def average(part, mesh):
        average_all(part, mesh)
        average_over([part.scale.grad], mesh, ("tensor",))

    return _train_2d(*given, forward=without_sum_backward, average=average)


@wrong("7.3", names="summed-again")
def sums_in_backward_too(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
        return SumTwice.apply(part.down(hidden), tensor) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="summed-again")
def sums_replicated_gradients_again(*given):
    def average(part, mesh):
        average_all(part, mesh)
        average_over([part.scale.grad, part.bias.grad], mesh, ("tensor",), divisor=1)

    return _train_2d(*given, average=average)


def _in_groups(forward_names, backward_names):
    def forward(part, x, mesh):
        scaled = SumBackward.apply(part.scale * x, group_of(mesh, *backward_names))
        partial = part.down(part.up(scaled).relu())
        return SumForward.apply(partial, group_of(mesh, *forward_names)) + part.bias

    return forward


@wrong("7.3", names="pair-swapped")
def sums_where_it_enters(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumForward.apply(part.scale * x, tensor)).relu()
        return SumBackward.apply(part.down(hidden), tensor) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="sum-over-other-ranks")
def sums_over_all_ranks(*given):
    both = ("data", "tensor")
    return _train_2d(*given, forward=_in_groups(both, both))


@wrong("7.3", names="sum-over-other-ranks")
def sums_backward_over_the_data_group(*given):
    return _train_2d(*given, forward=_in_groups(("tensor",), ("data",)))


@wrong("7.3", names="not-averaged")
def keeps_its_own_gradients(*given):
    return _train_2d(*given, average=lambda part, mesh: None)


@wrong("7.3", names="not-averaged")
def averages_on_the_first_of_each_team(*given):
    def average(part, mesh):
        if mesh.get_local_rank("tensor") == 0:
            average_all(part, mesh)

    return _train_2d(*given, average=average)


@wrong("7.3", names="not-averaged")
def averages_after_the_step(part, read_inputs, read_targets, mesh, optimizer):
    def nothing(part, mesh):
        pass

    loss = _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=nothing)
    average_all(part, mesh)
    return loss


@wrong("7.3", names="sum-not-mean")
def sums_the_gradients(*given):
    return _train_2d(*given, average=averaging(("data",), divisor=1))


@wrong("7.3", names="divided-twice")
def averages_a_share_of_the_loss(part, read_inputs, read_targets, mesh, optimizer):
    dp = mesh.get_group("data").size()
    return _train_2d(
        part,
        read_inputs,
        read_targets,
        mesh,
        optimizer,
        average=averaging(("data",), divisor=dp * dp),
    )


@wrong("7.3", names="divided-by-world")
def divides_by_all_ranks(part, read_inputs, read_targets, mesh, optimizer):
    average = averaging(("data",), divisor=dist.get_world_size())
    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=average)


@wrong("7.3", names="average-over-all")
def averages_over_all_ranks(*given):
    return _train_2d(*given, average=averaging(("data", "tensor")))


@wrong("7.3", names="average-over-another")
def averages_over_the_tensor_group(*given):
    return _train_2d(*given, average=averaging(("tensor",)))


@wrong("7.3", names="sharded-not-averaged")
def averages_replicated_parameters_only(*given):
    return _train_2d(*given, average=average_replicated_only)


@wrong("7.3", names="replicated-not-averaged")
def averages_shards_only(*given):
    return _train_2d(*given, average=average_shards_only)


@wrong("7.3", names="parameters-averaged")
def averages_parameters_after_the_step(part, read_inputs, read_targets, mesh, optimizer):
    """Equal with plain SGD, and with momentum; not with Adam."""
    loss = _train_2d(
        part, read_inputs, read_targets, mesh, optimizer, average=lambda part, mesh: None
    )
    average_parameters(part, mesh)
    return loss


@wrong("7.3", names="divided-by-another")
def divides_by_two(*given):
    return _train_2d(*given, average=averaging(("data",), divisor=2))


@wrong("7.3", names="not-stepped")
def clears_before_the_step(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*own_block(mesh)), read_targets(*own_block(mesh))
    loss = mse_loss(forward_of(part, x, mesh), targets)
    loss.backward()
    average_all(part, mesh)
    optimizer.zero_grad()
    optimizer.step()
    return _mean_loss(loss, mesh)


@wrong("7.3", names="other-model")
def forgets_the_relu(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor))
        return SumForward.apply(part.down(hidden), tensor) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="other-model")
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


@wrong("7.3", names="loss-not-a-float")
def returns_a_tensor(*given):
    def mean_loss(loss, mesh):
        loss = loss.detach().clone()
        average_over([loss], mesh)
        return loss

    return _train_2d(*given, mean_loss=mean_loss)


@wrong("7.3", names="loss-local")
def returns_its_own_loss(*given):
    return _train_2d(*given, mean_loss=lambda loss, mesh: loss.item())


@wrong("7.3", names="loss-not-mean")
def returns_the_sum_of_losses(*given):
    def summed(loss, mesh):
        loss = loss.detach().clone()
        average_over([loss], mesh, divisor=1)
        return loss.item()

    return _train_2d(*given, mean_loss=summed)


@wrong("7.3", names="old-gradients")
def never_clears_gradients(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*own_block(mesh)), read_targets(*own_block(mesh))
    loss = mse_loss(forward_of(part, x, mesh), targets)
    loss.backward()
    average_all(part, mesh)
    optimizer.step()
    return _mean_loss(loss, mesh)


@wrong("7.3", names="frozen")
def expects_gradients_everywhere(*given):
    return _train_2d(*given, average=averaging(("data",)))


@wrong("7.3", names="frozen")
def makes_up_zeros(*given):
    return _train_2d(*given, average=with_zeros_for_none)


@wrong("7.3", names="frozen")
def clears_what_learns(part, read_inputs, read_targets, mesh, optimizer):
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    return never_clears_gradients(part, read_inputs, read_targets, mesh, optimizer)


@wrong("7.3", names="by-arithmetic")
def computes_its_coordinate(part, read_inputs, read_targets, mesh, optimizer):
    def block(mesh):
        tp = mesh.get_group("tensor").size()
        return dist.get_rank() // tp, mesh.get_group("data").size()

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, block=block)


@wrong("7.3", names="by-arithmetic")
def takes_dimensions_by_position(part, read_inputs, read_targets, mesh, optimizer):
    def block(mesh):
        return mesh.get_coordinate()[0], mesh.shape[0]

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, block=block)


@wrong("7.3", names="not-every-rank")
def averages_the_loss_on_rank_0(*given):
    def mean_loss(loss, mesh):
        loss = loss.detach().clone()
        if dist.get_rank() == 0:
            dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return _train_2d(*given, mean_loss=mean_loss)


@wrong("7.3", names="loss-on-some")
def reduces_the_loss_to_one_rank(part, read_inputs, read_targets, mesh, optimizer):
    def mean_loss(loss, mesh):
        loss, data = loss.detach().clone(), mesh.get_group("data")
        dist.reduce(loss, group=data, group_dst=0)
        return loss.item() / data.size()

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, mean_loss=mean_loss)
