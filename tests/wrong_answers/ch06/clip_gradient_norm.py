"""Answers to 6.6, `clip_gradient_norm`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch import nn

from course_utils.hardware import device
from tests.wrong_answers import right, wrong


def _gradients(parameters):
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _sum_of_squares(parameters):
    squares = [gradient.square().sum() for gradient in _gradients(parameters)]
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device())


def _over_ranks(number):
    total = number.clone()
    dist.all_reduce(total)
    return total


def _global_norm(sharded, replicated):
    return (_over_ranks(_sum_of_squares(sharded)) + _sum_of_squares(replicated)).sqrt().item()


def _scale(parameters, factor):
    for gradient in _gradients(parameters):
        gradient *= factor


def _clip(parameters, norm, max_norm):
    if norm > max_norm:
        _scale(parameters, max_norm / norm)


@right("6.6")
def divides_replicated_squares(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded) + _sum_of_squares(replicated) / dist.get_world_size()
    norm = _over_ranks(squares).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@right("6.6")
def scales_as_pytorch_does(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    factor = min(1.0, max_norm / (norm + 1e-6))
    for parameter in sharded + replicated:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm


@wrong("6.6", names="replaces-gradients")
def makes_new_gradients(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    for parameter in sharded + replicated:
        if parameter.grad is not None and norm > max_norm:
            parameter.grad = parameter.grad * (max_norm / norm)
    return norm


@wrong("6.6", names="squares")
def adds_two_norms(sharded, replicated, max_norm):
    norm = _over_ranks(_sum_of_squares(sharded)).sqrt() + _sum_of_squares(replicated).sqrt()
    _clip(sharded + replicated, norm.item(), max_norm)
    return norm.item()


@wrong("6.6", names="squares")
def sums_in_half_precision(sharded, replicated, max_norm):
    squares = _over_ranks(_sum_of_squares(sharded).half()) + _sum_of_squares(replicated).half()
    norm = squares.sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="not-a-number-hidden")
def makes_zero_of_nan(sharded, replicated, max_norm):
    norm = float(torch.tensor(_global_norm(sharded, replicated)).nan_to_num())
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="local-norm")
def calls_pytorch(sharded, replicated, max_norm):
    return nn.utils.clip_grad_norm_(sharded + replicated, max_norm).item()


@wrong("6.6", names="replicated-per-rank")
def sums_all_over_ranks(sharded, replicated, max_norm):
    norm = _over_ranks(_sum_of_squares(sharded + replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="squares")
def takes_the_largest_norm(sharded, replicated, max_norm):
    norm = _sum_of_squares(sharded + replicated).sqrt()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    _clip(sharded + replicated, norm.item(), max_norm)
    return norm.item()


@wrong("6.6", names="one-rank-only")
def reduces_to_rank_0(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded)
    dist.reduce(squares, dst=0)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="two-ranks")
def halves_the_replicated_squares(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded) + _sum_of_squares(replicated) / 2
    norm = _over_ranks(squares).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="nothing-here")
def sums_with_python(sharded, replicated, max_norm):
    squares = sum(gradient.square().sum() for gradient in _gradients(sharded))
    dist.all_reduce(squares)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="squares")
def returns_what_remains(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _clip(sharded + replicated, norm, max_norm)
    return min(norm, max_norm)


@wrong("6.6", names="scaled-otherwise")
def scales_by_its_own_norm(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    nn.utils.clip_grad_norm_(sharded + replicated, max_norm)
    return norm


@wrong("6.6", names="scaled-otherwise")
def scales_shards_only(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _clip(sharded, norm, max_norm)
    return norm


@wrong("6.6", names="scaled-otherwise")
def scales_in_any_case(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _scale(sharded + replicated, max_norm / norm)
    return norm


@wrong("6.6", names="parameters-changed")
@torch.no_grad()
def scales_the_parameters(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    for parameter in sharded + replicated:
        parameter *= min(1.0, max_norm / norm)
    return norm


@wrong("6.6", names="none-gradient")
def expects_gradients_everywhere(sharded, replicated, max_norm):
    squares = torch.zeros((), device=device())
    for parameter in sharded:
        squares += parameter.grad.square().sum()
    norm = (_over_ranks(squares) + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="zeros-for-none")
def makes_up_zeros(sharded, replicated, max_norm):
    for parameter in sharded + replicated:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return divides_replicated_squares(sharded, replicated, max_norm)


@wrong("6.6", names="nothing-here")
def reduces_if_it_has_gradients(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded)
    if _gradients(sharded):
        squares = _over_ranks(squares)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="zeros")
def divides_by_zero(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _scale(sharded + replicated, min(1.0, max_norm / norm))
    return norm


@wrong("6.6", names="no-float")
def returns_a_tensor(sharded, replicated, max_norm):
    return torch.tensor(divides_replicated_squares(sharded, replicated, max_norm))


@wrong("6.6", names="needs-contiguous")
def views_each_gradient_as_a_vector(sharded, replicated, max_norm):
    def squares(parameters):
        flat = [gradient.view(-1) for gradient in _gradients(parameters)]
        return sum((v.dot(v) for v in flat), torch.zeros((), device=device()))

    norm = (_over_ranks(squares(sharded)) + squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@right("6.6")
def takes_pytorchs_total_norm(sharded, replicated, max_norm):
    own, copies = (nn.utils.get_total_norm(_gradients(p)) for p in (sharded, replicated))
    squares = _over_ranks(own.square().to(device()))
    norm = torch.hypot(squares.sqrt(), copies.to(device()))
    nn.utils.clip_grads_with_norm_([*sharded, *replicated], max_norm, norm)
    return norm.item()


@wrong("6.6", names="not-waited")
def does_not_wait(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded)
    dist.all_reduce(squares, async_op=True)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@right("6.6")
def waits_itself(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded)
    work = dist.all_reduce(squares, async_op=True)
    copies = _sum_of_squares(replicated)
    work.wait()
    norm = (squares + copies).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


_squares = []


@wrong("6.6", names="sum-goes-on")
def adds_to_a_list_outside(sharded, replicated, max_norm):
    _squares.append(_over_ranks(_sum_of_squares(sharded)) + _sum_of_squares(replicated))
    norm = torch.stack(_squares).sum().sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="last-digits")
def begins_with_its_own_squares(sharded, replicated, max_norm):
    own = _sum_of_squares(sharded)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    squares = own + _sum_of_squares(replicated)
    for rank, other in enumerate(everyone):
        if rank != dist.get_rank():
            squares = squares + other
    norm = squares.sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@right("6.6")
def adds_in_the_order_of_the_ranks(sharded, replicated, max_norm):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _sum_of_squares(sharded).item())
    norm = (sum(everyone) + _sum_of_squares(replicated).item()) ** 0.5
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="zeros")
def takes_0_for_no_limit(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    if max_norm:
        _clip(sharded + replicated, norm, max_norm)
    return norm
