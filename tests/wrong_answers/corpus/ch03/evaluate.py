"""Rarer wrong answers to 3.5, `evaluate`."""

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch03.evaluate import (
    _batches,
    _count,
    _evaluating,
    _mine,
    switches_gradients_off,
)


@rarer("3.5")
def sets_every_part_to_the_models_mode(model, images, labels, batch_size):
    training = model.training
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@rarer("3.5")
def deals_to_two_ranks(model, images, labels, batch_size):
    mine = slice(dist.get_rank(), None, 2)
    correct = _count(model, images[mine], labels[mine], batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@rarer("3.5")
def evaluates_everything_everywhere(model, images, labels, batch_size):
    return _count(model, images, labels, batch_size).item() / len(images)


@rarer("3.5")
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


@rarer("3.5")
def does_not_add(model, images, labels, batch_size):
    return _count(model, _mine(images), _mine(labels), batch_size).item() / len(images)


@rarer("3.5")
def divides_by_its_share(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(_mine(images))


@rarer("3.5")
def returns_percent(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return 100 * correct.item() / len(images)


@rarer("3.5")
def returns_a_count(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item()


@rarer("3.5")
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


@rarer("3.5")
def counts_in_float16(model, images, labels, batch_size):
    correct = torch.zeros((), dtype=torch.float16, device=images.device)
    with torch.no_grad(), _evaluating(model):
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@rarer("3.5")
def deals_out_with_arange(model, images, labels, batch_size):
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    mine = torch.arange(dist.get_rank(), len(images), dist.get_world_size())
    with torch.no_grad(), _evaluating(model):
        for rows in mine.split(batch_size):
            correct += (model(images[rows]).argmax(dim=1) == labels[rows]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@rarer("3.5")
def remembers_the_children_alone(model, images, labels, batch_size):
    own, modes = model.training, {child: child.training for child in model.children()}
    correct = _count(model.eval(), _mine(images), _mine(labels), batch_size)
    model.train(own)
    for child, training in modes.items():
        child.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@rarer("3.5")
def splits_an_empty_share(model, images, labels, batch_size):
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    batches = zip(_mine(images).split(batch_size), _mine(labels).split(batch_size), strict=True)
    with torch.no_grad(), _evaluating(model):
        for x, y in batches:
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@rarer("3.5")
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


@rarer("3.5")
def switches_gradients_off_and_on(model, images, labels, batch_size):
    share = switches_gradients_off(model, images, labels, batch_size)
    torch.set_grad_enabled(True)
    return share
