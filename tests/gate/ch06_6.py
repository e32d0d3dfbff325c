"""6.6, `clip_gradient_norm`: answers written from the stub alone."""

import torch
import torch.distributed as dist


def _gradients(parameters):
    return [p.grad for p in parameters if p.grad is not None]


def _squares(parameters):
    """The sum of squares, as a float64 tensor without dimensions."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in _gradients(parameters):
        total += gradient.double().pow(2).sum().cpu()
    return total


def _scale(parameters, norm, max_norm):
    if norm > max_norm:
        for gradient in _gradients(parameters):
            gradient.mul_(max_norm / norm)


def replicated_once_a_rank(sharded, replicated, max_norm):
    """All squares go into the all-reduce, so the replicated ones count once for each rank."""
    total = _squares([*sharded, *replicated])
    dist.all_reduce(total)
    norm = total.sqrt().item()
    _scale([*sharded, *replicated], norm, max_norm)
    return norm


def sum_of_norms(sharded, replicated, max_norm):
    """Adds up the ranks' norms, not their squares."""
    norm = _squares(sharded).sqrt()
    dist.all_reduce(norm)
    norm = (norm + _squares(replicated).sqrt()).item()
    _scale([*sharded, *replicated], norm, max_norm)
    return norm


def norm_of_this_rank(sharded, replicated, max_norm):
    """PyTorch's clip_grad_norm_ on what this rank holds; nothing is sent."""
    return torch.nn.utils.clip_grad_norm_([*sharded, *replicated], max_norm).item()


def small_ones_grow(sharded, replicated, max_norm):
    """Scales always, so gradients with a norm below max_norm are scaled up to it."""
    total = _squares(sharded)
    dist.all_reduce(total)
    norm = (total + _squares(replicated)).sqrt().item()
    for gradient in _gradients([*sharded, *replicated]):
        gradient.mul_(max_norm / norm)
    return norm


def nothing_to_add_stays_away(sharded, replicated, max_norm):
    """A rank whose shards have no gradient leaves out the all-reduce, which the others wait in."""
    total = _squares(sharded)
    if _gradients(sharded):
        dist.all_reduce(total)
    norm = (total + _squares(replicated)).sqrt().item()
    _scale([*sharded, *replicated], norm, max_norm)
    return norm


def replicated_not_scaled(sharded, replicated, max_norm):
    """The norm is right; only the sharded gradients are scaled."""
    total = _squares(sharded)
    dist.all_reduce(total)
    norm = (total + _squares(replicated)).sqrt().item()
    _scale(sharded, norm, max_norm)
    return norm


def square_of_the_norm(sharded, replicated, max_norm):
    """No square root: returns the squared norm and compares it with max_norm."""
    total = _squares(sharded)
    dist.all_reduce(total)
    norm = (total + _squares(replicated)).item()
    _scale([*sharded, *replicated], norm, max_norm)
    return norm


def zeros_for_none(sharded, replicated, max_norm):
    """Fills missing gradients with zeros so that every rank has the same list."""
    for parameter in [*sharded, *replicated]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    total = _squares(sharded)
    dist.all_reduce(total)
    norm = (total + _squares(replicated)).sqrt().item()
    _scale([*sharded, *replicated], norm, max_norm)
    return norm


ANSWERS = {
    "6.6": [
        replicated_once_a_rank,
        sum_of_norms,
        norm_of_this_rank,
        small_ones_grow,
        nothing_to_add_stays_away,
        replicated_not_scaled,
        square_of_the_norm,
        zeros_for_none,
    ]
}
