"""Answers to 3.5, `evaluate`: wrong in a plausible way, or right in another."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.wrong_answers import right, wrong


def _mine(tensor):
    return tensor[dist.get_rank() :: dist.get_world_size()]


def _batches(images, labels, batch_size):
    for start in range(0, len(images), batch_size):
        yield images[start : start + batch_size], labels[start : start + batch_size]


@contextmanager
def _evaluating(model):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    yield
    for module, training in modes.items():
        module.training = training


def _count(
    model, images, labels, batch_size, mode=_evaluating, grad=torch.no_grad, dtype=torch.float32
):
    """The correct images of these, as a tensor; the model's mode stays as it was."""
    correct = torch.zeros(1, dtype=dtype, device=images.device)
    with grad(), mode(model):
        for x, y in _batches(images, labels, batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    return correct


def _counted(model, images, labels, batch_size, **how):
    """The correct images of all ranks, as a number."""
    correct = _count(model, _mine(images), _mine(labels), batch_size, **how)
    dist.all_reduce(correct)
    return correct.item()


@right("3.5")
def shares_out_blocks(model, images, labels, batch_size):
    rank, n = dist.get_rank(), dist.get_world_size()
    images, labels = images.tensor_split(n)[rank], labels.tensor_split(n)[rank]
    correct = _count(model, images, labels, batch_size).item()
    counts = [None] * n
    dist.all_gather_object(counts, (correct, len(images)))
    return sum(right for right, _ in counts) / sum(size for _, size in counts)


@right("3.5")
def deals_out_batches(model, images, labels, batch_size):
    """Deals indices, and sends both sums in one tensor."""
    mine = list(range(dist.get_rank(), len(images), dist.get_world_size()))
    sums = torch.zeros(2, dtype=torch.float64, device=images.device)
    with torch.inference_mode(), _evaluating(model):
        while mine:
            batch, mine = mine[:batch_size], mine[batch_size:]
            sums[0] += (model(images[batch]).argmax(1) == labels[batch]).sum()
            sums[1] += len(batch)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@wrong("3.5", names="not-a-float")
def returns_a_tensor_of_one_number(model, images, labels, batch_size):
    return torch.tensor(_counted(model, images, labels, batch_size) / len(images))


@wrong("3.5", names="repeated")
def shares_out_with_the_sampler(model, images, labels, batch_size):
    mine = list(DistributedSampler(range(len(images)), shuffle=False))
    correct = _count(model, images[mine], labels[mine], batch_size)
    total = torch.tensor([float(len(mine))], device=images.device)
    dist.all_reduce(correct)
    dist.all_reduce(total)
    return (correct / total).item()


@wrong("3.5", names="repeated")
def drops_what_the_sampler_repeats(model, images, labels, batch_size):
    """roboflow/rf-detr#1507: the index travels with each result, and a repeated one counts once.

    The accuracy is right, but the model sees these images twice.
    """
    mine = torch.tensor([*DistributedSampler(range(len(images)), shuffle=False)])
    mine = mine.to(images.device)
    with torch.no_grad(), _evaluating(model):
        hits = [model(images[b]).argmax(1) == labels[b] for b in mine.split(batch_size)]
    found = torch.stack([mine, torch.cat(hits).long()])
    of_ranks = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, found)
    results = dict(torch.cat(of_ranks, dim=1).T.tolist())
    return sum(results.values()) / len(results)


@wrong("3.5", names="mean-of-shares")
def averages_the_ranks(model, images, labels, batch_size):
    share = _count(model, _mine(images), _mine(labels), batch_size) / len(_mine(images))
    dist.all_reduce(share)
    return share.item() / dist.get_world_size()


@wrong("3.5", names="not-added")
def returns_its_own(model, images, labels, batch_size):
    return _count(model, _mine(images), _mine(labels), batch_size).item() / len(_mine(images))


@wrong("3.5", names="not-the-share")
def returns_the_error_rate(model, images, labels, batch_size):
    return 1 - _counted(model, images, labels, batch_size) / len(images)


@wrong("3.5", names="one-rank-only")
def reduces_counts_to_rank_0(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.reduce(correct, dst=0)
    return correct.item() / len(images)


@wrong("3.5", names="collective-per-batch")
def reduces_every_batch(model, images, labels, batch_size):
    total = 0
    for x, y in _batches(_mine(images), _mine(labels), batch_size):
        correct = _count(model, x, y, batch_size)
        dist.all_reduce(correct)
        total += correct.item()
    return total / len(images)


@wrong("3.5", names="empty-rank")
def leaves_when_it_has_nothing(model, images, labels, batch_size):
    if len(_mine(images)) == 0:
        return 0.0
    return _counted(model, images, labels, batch_size) / len(images)


@wrong("3.5", names="batch-too-large")
def takes_one_batch(model, images, labels, batch_size):
    return _counted(model, images, labels, len(images)) / len(images)


@wrong("3.5", names="train-mode")
def stays_in_training_mode(model, images, labels, batch_size):
    return _counted(model, images, labels, batch_size, mode=nullcontext) / len(images)


@wrong("3.5", names="mode-not-restored")
def leaves_evaluation_mode_on(model, images, labels, batch_size):
    return _counted(model.eval(), images, labels, batch_size) / len(images)


@wrong("3.5", names="autograd")
def records_gradients(model, images, labels, batch_size):
    return _counted(model, images, labels, batch_size, grad=nullcontext) / len(images)


@wrong("3.5", names="number-not-tensor")
def reduces_a_number(model, images, labels, batch_size):
    correct = int(_count(model, _mine(images), _mine(labels), batch_size).item())
    dist.all_reduce(correct)
    return correct / len(images)


@wrong("3.5", names="not-every-rank")
def only_rank_0_adds(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    if dist.get_rank() == 0:
        dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="uneven-gather")
def gathers_the_predictions(model, images, labels, batch_size):
    with torch.no_grad(), _evaluating(model):
        batches = _batches(_mine(images), _mine(labels), batch_size)
        predictions = torch.cat([model(x).argmax(dim=1) for x, _ in batches])
    everyones = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, predictions)
    dealt = torch.stack(everyones, dim=1).flatten()
    return (dealt == labels).float().mean().item()


@wrong("3.5", names="empty-batch")
def goes_one_batch_too_far(model, images, labels, batch_size):
    share = _counted(model, images, labels, batch_size) / len(images)
    with torch.no_grad(), _evaluating(model):
        if len(_mine(images)) % batch_size == 0:
            model(images[:0])
    return share


@wrong("3.5", names="miscounted")
def counts_in_half_precision(model, images, labels, batch_size):
    return _counted(model, images, labels, batch_size, dtype=torch.bfloat16) / len(images)


@wrong("3.5", names="never-seen")
def drops_the_rest(model, images, labels, batch_size):
    whole = len(images) // dist.get_world_size() * dist.get_world_size()
    correct = _count(model, _mine(images[:whole]), _mine(labels[:whole]), batch_size)
    dist.all_reduce(correct)
    return correct.item() / max(1, whole)


@wrong("3.5", names="uneven")
def gives_the_rest_to_the_last(model, images, labels, batch_size):
    rank, n = dist.get_rank(), dist.get_world_size()
    share = len(images) // n
    mine = slice(rank * share, (rank + 1) * share if rank < n - 1 else len(images))
    correct = _count(model, images[mine], labels[mine], batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="autograd-not-restored")
def switches_gradients_off(model, images, labels, batch_size):
    torch.set_grad_enabled(False)
    correct = torch.zeros(1, device=images.device)
    with _evaluating(model):
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="thawed")
def freezes_and_thaws(model, images, labels, batch_size):
    model.requires_grad_(False)
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    model.requires_grad_(True)
    dist.all_reduce(correct)
    return correct.item() / len(images)
