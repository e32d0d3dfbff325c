"""Rarer wrong answers to 8.2, `ShardedOptimizer`."""

import torch
import torch.distributed as dist

from course_exercises.authoring import load_answer
from tests.wrong_answers import rarer
from tests.wrong_answers.ch08.sharded_optimizer import Sharded


class _Facade:
    """Looks like an optimizer and is none."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.real = load_answer("8.2")(params, optimizer_cls, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__dict__["real"], name)


@rarer("8.2")
class AveragesTheCopies(Sharded):
    def send(self):
        for parameter in self.owners:
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


@rarer("8.2")
class SendsBeforeItReceives(Sharded):
    def send(self):
        for parameter, owner in self.owners.items():
            for other in range(dist.get_world_size()):
                if other != owner == dist.get_rank():
                    dist.send(parameter.detach(), other)
        for parameter, owner in self.owners.items():
            if owner != dist.get_rank():
                dist.recv(parameter.detach(), owner)


@rarer("8.2")
class NeedsASecondRank(Sharded):
    """Right on several ranks; on one, every second parameter is nobody's."""

    def next_owner(self, parameter):
        if dist.get_world_size() > 1:
            return super().next_owner(parameter)
        return len(self.owners) % 2

    def send(self):
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter, min(owner, dist.get_world_size() - 1))


@rarer("8.2")
class HidesTheGradients(Sharded):
    """Saves nothing where an optimizer makes its state at once."""

    def mine(self, parameters):
        return parameters

    def step(self, closure=None):
        hidden = {p: p.grad for p, owner in self.owners.items() if owner != dist.get_rank()}
        for parameter in hidden:
            parameter.grad = None
        loss = super().step(closure)
        for parameter, gradient in hidden.items():
            parameter.grad = gradient
        return loss


@rarer("8.2")
class HandsOnTheLearningRate(Sharded):
    def hand_over(self, group, inner):
        inner.state = self.state
        inner.param_groups[0]["lr"] = group["lr"]


@rarer("8.2")
class KnowsTheKwargsOnly(Sharded):
    def find_defaults(self, kwargs):
        return kwargs


@rarer("8.2")
class AlwaysSGD(Sharded):
    def __init__(self, params, optimizer_cls, **kwargs):
        known = {key: kwargs[key] for key in ("lr", "momentum") if key in kwargs}
        plain = optimizer_cls if optimizer_cls.__bases__[0] is torch.optim.SGD else torch.optim.SGD
        super().__init__(params, plain, **known)


@rarer("8.2")
class ExpectsStateAfterAStep(Sharded):
    def share_out(self, group):
        super().share_out(group)
        if "momentum" in group:
            self.state.clear()


@rarer("8.2")
class SharesOutOnce(Sharded):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.constructed = False
        super().__init__(params, optimizer_cls, **kwargs)
        self.constructed = True

    def share_out(self, group):
        if not self.constructed:
            super().share_out(group)

    def step(self, closure=None):
        loss = self.loss_of(closure)
        with torch.no_grad():
            for group, inner in zip(self.param_groups, self.inner):
                self.hand_over(group, inner)
                inner.step()
            self.send()
        return loss


@rarer("8.2")
class LeavesFrozenOnesOut(Sharded):
    def share_out(self, group):
        learning = [p for p in group["params"] if p.requires_grad]
        super().share_out({**group, "params": learning})


@rarer("8.2")
class HandsTheClosureOn(Sharded):
    def step(self, closure=None):
        loss = self.loss_of(closure)
        for group, inner in zip(self.param_groups, self.inner, strict=True):
            self.hand_over(group, inner)
            inner.step(closure)
        with torch.no_grad():
            self.send()
        return loss


@rarer("8.2")
class ClosureWithoutGradients(Sharded):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


@rarer("8.2")
class HandsTheStateOverOnce(Sharded):
    def share_out(self, group):
        super().share_out(group)
        self.inner[-1].state = self.state

    def hand_over(self, group, inner):
        inner.param_groups[0].update({k: v for k, v in group.items() if k != "params"})


@rarer("8.2")
class WrapsWithoutDeriving(_Facade):
    pass


@rarer("8.2")
class CallsTheClosureWhereItOwnsSomething(Sharded):
    def loss_of(self, closure):
        owns = any(inner.param_groups[0]["params"] for inner in self.inner)
        return super().loss_of(closure if owns else None)


@rarer("8.2")
class CallsTheClosureAfterTheUpdate(Sharded):
    def step(self, closure=None):
        super().step()
        return super().loss_of(closure)


@rarer("8.2")
class FreesTheOthersGradients(Sharded):
    def send(self):
        super().send()
        for parameter, owner in self.owners.items():
            if owner != dist.get_rank():
                parameter.grad = None


@rarer("8.2")
class ReadsAGroupTwice(Sharded):
    def handed(self, params):
        params = list(params)
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        self.elements = sum(p.numel() for group in groups for p in group["params"])
        return groups


@rarer("8.2")
class SharesOutEachGroup(Sharded):
    def share_out(self, group):
        self.first = len(self.owners)
        super().share_out(group)


@rarer("8.2")
class SharesOutAnAddedGroupByItself(SharesOutEachGroup):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.all_at_once = True
        super().__init__(params, optimizer_cls, **kwargs)
        self.all_at_once = False

    def next_owner(self, parameter):
        if self.all_at_once:
            self.first = 0
        return super().next_owner(parameter)
