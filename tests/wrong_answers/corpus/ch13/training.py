"""Rarer wrong answers to 13.1, `Training`."""

import copy

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch13.training import _Copied, _Sharded


@rarer("13.1")
class HandsOutItsOwnTensors(_Copied):
    def whole(self, tensor):
        return tensor


@rarer("13.1")
class KeepsTheModelBeside(_Sharded):
    def split(self, model):
        self.start = copy.deepcopy(model)
        return super().split(model)


@rarer("13.1")
class SumOfTheLosses(_Sharded):
    def mean(self, loss):
        return super().mean(loss) * dist.get_world_size()


@rarer("13.1")
class ItsOwnPart(_Sharded):
    def whole(self, tensor):
        return tensor.to_local().cpu().clone()


@rarer("13.1")
class EqualShares(_Sharded):
    def share(self, rows):
        size = len(rows) // dist.get_world_size()
        return rows[dist.get_rank() * size :][:size]

    def loss(self, scores, labels, rows):
        return super().loss(scores, labels, max(1, len(labels) * dist.get_world_size()))


@rarer("13.1")
class LoadsNothing(_Sharded):
    def load_state_dict(self, state):
        pass


@rarer("13.1")
class NumbersTheParameters(_Sharded):
    """As an optimizer's own state does."""

    def state_dict(self):
        return {
            kind: dict(enumerate(tensors.values()))
            for kind, tensors in super().state_dict().items()
        }


@rarer("13.1")
class MomentumOfZeros(_Sharded):
    def state_dict(self):
        state = super().state_dict()
        return state | {"momentum": {n: torch.zeros_like(t) for n, t in state["model"].items()}}
