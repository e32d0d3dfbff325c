"""Rarer wrong answers to 6.6, `clip_gradient_norm`."""

import torch
import torch.distributed as dist

from course_utils.hardware import device
from tests.wrong_answers import rarer
from tests.wrong_answers.ch06.clip_gradient_norm import (
    _clip,
    _global_norm,
    _gradients,
    _over_ranks,
    _sum_of_squares,
    divides_replicated_squares,
)


@rarer("6.6")
def joins_the_shards(sharded, replicated, max_norm):
    squares = _over_ranks(torch.cat([g.flatten() for g in _gradients(sharded)]).square().sum())
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@rarer("6.6")
def returns_where_there_is_nothing(sharded, replicated, max_norm):
    if not _gradients(sharded + replicated):
        return 0.0
    return divides_replicated_squares(sharded, replicated, max_norm)


@rarer("6.6")
def stacks_norms(sharded, replicated, max_norm):
    squares = torch.stack([g.norm() for g in _gradients(sharded)]).square().sum()
    dist.all_reduce(squares)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@rarer("6.6")
def adds_the_ranks_norms(sharded, replicated, max_norm):
    norm = _over_ranks(_sum_of_squares(sharded + replicated).sqrt()).item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@rarer("6.6")
def averages_squares(sharded, replicated, max_norm):
    own = _sum_of_squares(sharded) + _sum_of_squares(replicated)
    norm = (_over_ranks(own) / dist.get_world_size()).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@rarer("6.6")
def clamps_each_value(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    if norm > max_norm:
        for gradient in _gradients(sharded + replicated):
            gradient.clamp_(-max_norm, max_norm)
    return norm


@rarer("6.6")
def reduces_each_parameter(sharded, replicated, max_norm):
    squares = _sum_of_squares(replicated)
    for gradient in _gradients(sharded):
        squares = squares + _over_ranks(gradient.square().sum())
    norm = squares.sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@rarer("6.6")
def returns_0_where_there_is_nothing(sharded, replicated, max_norm):
    norm = divides_replicated_squares(sharded, replicated, max_norm)
    return norm if _gradients(sharded + replicated) else 0.0


@rarer("6.6")
def views_the_replicated_as_one_vector(sharded, replicated, max_norm):
    flat = [torch.zeros(1, device=device()), *(g.view(-1) for g in _gradients(replicated))]
    squares = _over_ranks(_sum_of_squares(sharded)) + torch.cat(flat).square().sum()
    norm = squares.sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@rarer("6.6")
def divides_by_the_largest_value(sharded, replicated, max_norm):
    """So that no square overflows."""
    largest = [gradient.abs().max() for gradient in _gradients(sharded + replicated)]
    high = torch.stack([torch.full((), 1e-30, device=device()), *largest]).max()
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    squares = torch.zeros((), device=device())
    for gradient in _gradients(sharded):
        squares += (gradient / high).square().sum()
    squares = _over_ranks(squares)
    for gradient in _gradients(replicated):
        squares += (gradient / high).square().sum()
    norm = (squares.sqrt() * high).item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@rarer("6.6")
def divides_by_how_much_too_large(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    for gradient in _gradients(sharded + replicated):
        if norm > max_norm:
            gradient.div_(norm / max_norm)
    return norm
