"""Rarer wrong answers to 10.4, `RingAttention`."""

import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch10.ring_backward import (
    Right,
    WaitsForEachHop,
    backward,
    forward,
    parts_of,
)
from tests.wrong_answers.ch10.shared import pass_on


@rarer("10.4")
class WaitsInForward(Right):
    @staticmethod
    def forward(ctx, q, k, v):
        return forward(ctx, q, k, v, WaitsForEachHop)


@rarer("10.4")
class PassesItsOwnPartOnly(Right):
    @staticmethod
    def backward(ctx, gradient):
        return backward(ctx, gradient, send=lambda travelling, found: found)


@rarer("10.4")
class AddsUpWhatComesBy(Right):
    @staticmethod
    def backward(ctx, gradient):
        found = []

        def part(*args):
            found.append(parts_of(*args))
            return found[-1]

        d_q, *_ = backward(ctx, gradient, part)
        return d_q, *(sum(each[which] for each in found) for which in (1, 2))


@rarer("10.4")
class SumsOverTheRanks(Right):
    @staticmethod
    def backward(ctx, gradient):
        gradients = backward(ctx, gradient)
        for each in gradients[1:]:
            dist.all_reduce(each)
        return gradients


@rarer("10.4")
class SendsGradientsOneHopTooFar(Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = backward(ctx, gradient)
        return d_q, *(pass_on(d_k, d_v) if dist.get_world_size() > 1 else (d_k, d_v))


@rarer("10.4")
class TakesValuesForTheOutputInDelta(Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(saved, *rest):
            return parts_of(saved, *rest, delta=(gradient * saved[2]).sum(dim=-1))

        return backward(ctx, gradient, part)
