"""7.3, `train_2d_step`: answers written from the stub alone."""

import torch.distributed as dist
from torch import nn

from course_exercises.sources.answers import load_code

SumBackward = load_code(7, "SumBackward")
SumForward = load_code(7, "SumForward")


def reads_by_its_world_rank(part, read_inputs, read_targets, mesh, optimizer):
    """Cuts the batch by world size, so the ranks of a tensor group read different rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    optimizer.zero_grad()
    x = SumBackward.apply(part.scale * read_inputs(rank, size), tensor)
    y = SumForward.apply(part.down(part.up(x).relu()), tensor) + part.bias
    loss = nn.functional.mse_loss(y, read_targets(rank, size))
    loss.backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= dist.get_world_size(data)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=data)
    return mean.item() / dist.get_world_size(data)


def adds_gradients_and_does_not_divide(part, read_inputs, read_targets, mesh, optimizer):
    """Adds up the gradients over the data group, and forgets that the loss is a mean."""
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    block, blocks = mesh.get_local_rank("data"), dist.get_world_size(data)
    optimizer.zero_grad()
    x = SumBackward.apply(part.scale * read_inputs(block, blocks), tensor)
    y = SumForward.apply(part.down(part.up(x).relu()), tensor) + part.bias
    loss = nn.functional.mse_loss(y, read_targets(block, blocks))
    loss.backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=data)
    return mean.item() / blocks


def averages_over_all_ranks(part, read_inputs, read_targets, mesh, optimizer):
    """Averages gradients over the default group, and so mixes the shards of a tensor group."""
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    block, blocks = mesh.get_local_rank("data"), dist.get_world_size(data)
    optimizer.zero_grad()
    x = SumBackward.apply(part.scale * read_inputs(block, blocks), tensor)
    y = SumForward.apply(part.down(part.up(x).relu()), tensor) + part.bias
    loss = nn.functional.mse_loss(y, read_targets(block, blocks))
    loss.backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def returns_the_loss_of_its_own_rows(part, read_inputs, read_targets, mesh, optimizer):
    """Trains right, but returns the loss of this rank's rows, not the mean of the batch."""
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    block, blocks = mesh.get_local_rank("data"), dist.get_world_size(data)
    optimizer.zero_grad()
    x = SumBackward.apply(part.scale * read_inputs(block, blocks), tensor)
    y = SumForward.apply(part.down(part.up(x).relu()), tensor) + part.bias
    loss = nn.functional.mse_loss(y, read_targets(block, blocks))
    loss.backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= blocks
    optimizer.step()
    return loss.item()


def leaves_out_the_sum_in_backward(part, read_inputs, read_targets, mesh, optimizer):
    """Has no SumBackward at the entry, so `scale` gets the gradient through one shard only."""
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    block, blocks = mesh.get_local_rank("data"), dist.get_world_size(data)
    optimizer.zero_grad()
    x = part.scale * read_inputs(block, blocks)
    y = SumForward.apply(part.down(part.up(x).relu()), tensor) + part.bias
    loss = nn.functional.mse_loss(y, read_targets(block, blocks))
    loss.backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= blocks
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=data)
    return mean.item() / blocks


def adds_the_bias_on_every_shard(part, read_inputs, read_targets, mesh, optimizer):
    """Adds the bias to the partial result, before the sum: it counts once for each tensor rank."""
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    block, blocks = mesh.get_local_rank("data"), dist.get_world_size(data)
    optimizer.zero_grad()
    x = SumBackward.apply(part.scale * read_inputs(block, blocks), tensor)
    y = SumForward.apply(part.down(part.up(x).relu()) + part.bias, tensor)
    loss = nn.functional.mse_loss(y, read_targets(block, blocks))
    loss.backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= blocks
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=data)
    return mean.item() / blocks


def takes_data_for_the_first_dimension(part, read_inputs, read_targets, mesh, optimizer):
    """Asks the mesh by position, as if "data" always came first."""
    data, tensor = mesh.get_group(0), mesh.get_group(1)
    block, blocks = mesh.get_local_rank(0), mesh.size(0)
    optimizer.zero_grad()
    x = SumBackward.apply(part.scale * read_inputs(block, blocks), tensor)
    y = SumForward.apply(part.down(part.up(x).relu()), tensor) + part.bias
    loss = nn.functional.mse_loss(y, read_targets(block, blocks))
    loss.backward()
    for parameter in part.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= blocks
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=data)
    return mean.item() / blocks


def averages_only_what_is_replicated(part, read_inputs, read_targets, mesh, optimizer):
    """Averages `scale` and `bias` over the data group, and takes the shards for nobody else's."""
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    block, blocks = mesh.get_local_rank("data"), dist.get_world_size(data)
    optimizer.zero_grad()
    x = SumBackward.apply(part.scale * read_inputs(block, blocks), tensor)
    y = SumForward.apply(part.down(part.up(x).relu()), tensor) + part.bias
    loss = nn.functional.mse_loss(y, read_targets(block, blocks))
    loss.backward()
    for parameter in (part.scale, part.bias):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= blocks
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=data)
    return mean.item() / blocks


ANSWERS = {
    "7.3": [
        reads_by_its_world_rank,
        adds_gradients_and_does_not_divide,
        averages_over_all_ranks,
        returns_the_loss_of_its_own_rows,
        leaves_out_the_sum_in_backward,
        adds_the_bias_on_every_shard,
        takes_data_for_the_first_dimension,
        averages_only_what_is_replicated,
    ]
}
