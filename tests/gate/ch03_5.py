"""3.5, `evaluate`: answers written from the stub alone."""

import torch
import torch.distributed as dist


def _set_modes(modes):
    for module, training in modes:
        module.training = training


def _share(images, labels):
    rank, n = dist.get_rank(), dist.get_world_size()
    return images[rank::n], labels[rank::n]


def mean_of_accuracies(model, images, labels, batch_size):
    """Averages the ranks' accuracies, though their shares differ in size."""
    mine, asked = _share(images, labels)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(mine), batch_size):
            rows = slice(start, start + batch_size)
            right += (model(mine[rows]).argmax(1) == asked[rows]).sum().item()
    _set_modes(modes)
    accuracy = torch.tensor(right / max(1, len(mine)), device=images.device)
    dist.all_reduce(accuracy)
    return accuracy.item() / dist.get_world_size()


def padding_counted(model, images, labels, batch_size):
    """Pads the indices as DistributedSampler does, and divides by the padded number."""
    rank, n = dist.get_rank(), dist.get_world_size()
    each = -(-len(images) // n)
    indices = torch.arange(each * n)[rank::n] % len(images)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    with torch.no_grad():
        for rows in indices.split(batch_size):
            right += (model(images[rows]).argmax(1) == labels[rows]).sum()
    _set_modes(modes)
    dist.all_reduce(right)
    return right.item() / (each * n)


def all_reduce_for_each_batch(model, images, labels, batch_size):
    """The all-reduce stands in the loop, so a rank with fewer batches calls it less often."""
    mine, asked = _share(images, labels)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(mine), batch_size):
            rows = slice(start, start + batch_size)
            here = (model(mine[rows]).argmax(1) == asked[rows]).sum()
            dist.all_reduce(here)
            right += here.item()
    _set_modes(modes)
    return right / len(images)


def training_mode_for_all_afterwards(model, images, labels, batch_size):
    """Ends with model.train(), which also wakes the parts that came in evaluation mode."""
    mine, asked = _share(images, labels)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    with torch.no_grad():
        for start in range(0, len(mine), batch_size):
            rows = slice(start, start + batch_size)
            right += (model(mine[rows]).argmax(1) == asked[rows]).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(images)


def autograd_left_off(model, images, labels, batch_size):
    """Switches gradients off with set_grad_enabled(False) and never on again."""
    mine, asked = _share(images, labels)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    torch.set_grad_enabled(False)
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    for start in range(0, len(mine), batch_size):
        rows = slice(start, start + batch_size)
        right += (model(mine[rows]).argmax(1) == asked[rows]).sum()
    _set_modes(modes)
    dist.all_reduce(right)
    return right.item() / len(images)


def an_empty_batch(model, images, labels, batch_size):
    """split gives a share of no images one batch of no images, and the model gets it."""
    mine, asked = _share(images, labels)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    with torch.no_grad():
        for x, y in zip(mine.split(batch_size), asked.split(batch_size)):
            right += (model(x).argmax(1) == y).sum()
    _set_modes(modes)
    dist.all_reduce(right)
    return right.item() / len(images)


def last_rank_takes_the_rest(model, images, labels, batch_size):
    """Blocks of N // n images, and whatever is left over goes to the last rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    block = len(images) // n
    end = len(images) if rank == n - 1 else (rank + 1) * block
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    with torch.no_grad():
        for start in range(rank * block, end, batch_size):
            rows = slice(start, min(start + batch_size, end))
            right += (model(images[rows]).argmax(1) == labels[rows]).sum()
    _set_modes(modes)
    dist.all_reduce(right)
    return right.item() / len(images)


def only_rank_0_knows(model, images, labels, batch_size):
    """dist.reduce to rank 0: the other ranks return something else."""
    mine, asked = _share(images, labels)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    with torch.no_grad():
        for start in range(0, len(mine), batch_size):
            rows = slice(start, start + batch_size)
            right += (model(mine[rows]).argmax(1) == asked[rows]).sum()
    _set_modes(modes)
    dist.reduce(right, dst=0)
    return right.item() / len(images)


ANSWERS = {
    "3.5": [
        mean_of_accuracies,
        padding_counted,
        all_reduce_for_each_batch,
        training_mode_for_all_afterwards,
        autograd_left_off,
        an_empty_batch,
        last_rank_takes_the_rest,
        only_rank_0_knows,
    ]
}
