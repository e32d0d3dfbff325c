"""Answers to 3.5, `evaluate`: wrong in a plausible way, or right in another."""

from contextlib import contextmanager

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


def _count(model, images, labels, batch_size):
    """The correct images of these, as a tensor; the model's mode stays as it was."""
    correct = torch.zeros(1, device=images.device)
    with torch.no_grad(), _evaluating(model):
        for x, y in _batches(images, labels, batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    return correct


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


@wrong("3.5", names="parts-mode-lost")
def sets_every_part_to_the_models_mode(model, images, labels, batch_size):
    training = model.training
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="not-a-float")
def returns_a_tensor_of_one_number(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return (correct / len(images)).squeeze()


@wrong("3.5", names="padded-duplicates")
def shares_out_with_the_sampler(model, images, labels, batch_size):
    mine = list(DistributedSampler(range(len(images)), shuffle=False))
    correct = _count(model, images[mine], labels[mine], batch_size)
    total = torch.tensor([float(len(mine))], device=images.device)
    dist.all_reduce(correct)
    dist.all_reduce(total)
    return (correct / total).item()


@wrong("3.5", names="fixed-two")
def deals_to_two_ranks(model, images, labels, batch_size):
    mine = slice(dist.get_rank(), None, 2)
    correct = _count(model, images[mine], labels[mine], batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="everyone-everything")
def evaluates_everything_everywhere(model, images, labels, batch_size):
    return _count(model, images, labels, batch_size).item() / len(images)


@wrong("3.5", names="images-lost")
def drops_the_rest(model, images, labels, batch_size):
    whole = len(images) // dist.get_world_size() * dist.get_world_size()
    correct = _count(model, _mine(images[:whole]), _mine(labels[:whole]), batch_size)
    dist.all_reduce(correct)
    return correct.item() / max(1, whole)


@wrong("3.5", names="mean-of-ranks")
def averages_the_ranks(model, images, labels, batch_size):
    share = _count(model, _mine(images), _mine(labels), batch_size) / len(_mine(images))
    dist.all_reduce(share)
    return share.item() / dist.get_world_size()


@wrong("3.5", names="mean-of-batches")
def averages_the_batches(model, images, labels, batch_size):
    training = model.training
    model.eval()
    with torch.no_grad():
        shares = [
            (model(x).argmax(1) == y).float().mean()
            for x, y in _batches(_mine(images), _mine(labels), batch_size)
        ]
    model.train(training)
    sums = torch.tensor([sum(shares), float(len(shares))], device=images.device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@wrong("3.5", names="own-share")
def returns_its_own(model, images, labels, batch_size):
    return _count(model, _mine(images), _mine(labels), batch_size).item() / len(_mine(images))


@wrong("3.5", names="not-added")
def does_not_add(model, images, labels, batch_size):
    return _count(model, _mine(images), _mine(labels), batch_size).item() / len(images)


@wrong("3.5", names="divided-by-share")
def divides_by_its_share(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(_mine(images))


@wrong("3.5", names="percent")
def returns_percent(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return 100 * correct.item() / len(images)


@wrong("3.5", names="errors-counted")
def returns_the_error_rate(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return 1 - correct.item() / len(images)


@wrong("3.5", names="count-not-share")
def returns_a_count(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item()


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
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="uneven-shares")
def gives_the_rest_to_the_last(model, images, labels, batch_size):
    rank, n = dist.get_rank(), dist.get_world_size()
    share = len(images) // n
    mine = slice(rank * share, (rank + 1) * share if rank < n - 1 else len(images))
    correct = _count(model, images[mine], labels[mine], batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="batch-too-large")
def takes_one_batch(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), max(1, len(images)))
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="train-mode")
def stays_in_training_mode(model, images, labels, batch_size):
    correct = torch.zeros(1, device=images.device)
    with torch.no_grad():
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="mode-not-restored")
def leaves_evaluation_mode_on(model, images, labels, batch_size):
    model.eval()
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="gradients-on")
def records_gradients(model, images, labels, batch_size):
    correct = torch.zeros(1, device=images.device)
    training = model.training
    model.eval()
    for x, y in _batches(_mine(images), _mine(labels), batch_size):
        correct += (model(x).argmax(dim=1) == y).sum()
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


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


@wrong("3.5", names="miscounted")
def takes_the_largest_of_all(model, images, labels, batch_size):
    correct = torch.zeros(1, device=images.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax() == y).sum()
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="uneven-gather")
def gathers_the_predictions(model, images, labels, batch_size):
    training = model.training
    model.eval()
    with torch.no_grad():
        batches = _batches(_mine(images), _mine(labels), batch_size)
        predictions = torch.cat([model(x).argmax(dim=1) for x, _ in batches])
    model.train(training)
    everyones = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, predictions)
    dealt = torch.stack(everyones, dim=1).flatten()
    return (dealt == labels).float().mean().item()


@wrong("3.5", names="empty-batch")
def goes_one_batch_too_far(model, images, labels, batch_size):
    mine, own = _mine(images), _mine(labels)
    correct = torch.zeros(1, device=images.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for i in range(len(mine) // batch_size + 1):
            batch = slice(i * batch_size, (i + 1) * batch_size)
            correct += (model(mine[batch]).argmax(dim=1) == own[batch]).sum()
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="miscounted")
def counts_in_half_precision(model, images, labels, batch_size):
    correct = torch.zeros(1, dtype=torch.bfloat16, device=images.device)
    with torch.no_grad(), _evaluating(model):
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="miscounted")
def counts_in_float16(model, images, labels, batch_size):
    correct = torch.zeros((), dtype=torch.float16, device=images.device)
    with torch.no_grad(), _evaluating(model):
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="empty-rank")
def deals_out_with_arange(model, images, labels, batch_size):
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    mine = torch.arange(dist.get_rank(), len(images), dist.get_world_size())
    with torch.no_grad(), _evaluating(model):
        for rows in mine.split(batch_size):
            correct += (model(images[rows]).argmax(dim=1) == labels[rows]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="parts-mode-lost")
def remembers_the_children_alone(model, images, labels, batch_size):
    own, modes = model.training, {child: child.training for child in model.children()}
    correct = _count(model.eval(), _mine(images), _mine(labels), batch_size)
    model.train(own)
    for child, training in modes.items():
        child.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="empty-batch")
def splits_an_empty_share(model, images, labels, batch_size):
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    batches = zip(_mine(images).split(batch_size), _mine(labels).split(batch_size), strict=True)
    with torch.no_grad(), _evaluating(model):
        for x, y in batches:
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="mode-not-restored")
def leaves_before_it_restores(model, images, labels, batch_size):
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    correct = torch.zeros(1, device=images.device)
    if len(_mine(images)) > 0:
        correct = _count(model, _mine(images), _mine(labels), batch_size)
        for module, mode in training:
            module.training = mode
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="gradients-left-off")
def switches_gradients_off(model, images, labels, batch_size):
    torch.set_grad_enabled(False)
    correct = torch.zeros(1, device=images.device)
    with _evaluating(model):
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="gradients-left-on")
def switches_gradients_off_and_on(model, images, labels, batch_size):
    share = switches_gradients_off(model, images, labels, batch_size)
    torch.set_grad_enabled(True)
    return share


@wrong("3.5", names="thawed")
def freezes_and_thaws(model, images, labels, batch_size):
    model.requires_grad_(False)
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    model.requires_grad_(True)
    dist.all_reduce(correct)
    return correct.item() / len(images)
