"""Answers to 8.2, `ShardedOptimizer`: wrong in a plausible way, or right in another."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from tests.wrong_answers import right, wrong


@right("8.2")
class OneFlatMessage(torch.optim.Optimizer):
    """One inner optimizer for each parameter that is owned here; each owner sends one vector."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.make = lambda group: optimizer_cls([group], **kwargs)
        self.owner, self.inner = {}, {}
        defaults = optimizer_cls([nn.Parameter(torch.zeros(1))], **kwargs).defaults
        super().__init__(params, defaults)

    def add_param_group(self, group):
        super().add_param_group(group)
        options = {key: v for key, v in self.param_groups[-1].items() if key != "params"}
        loads = [0] * dist.get_world_size()
        for parameter, owner in self.owner.items():
            loads[owner] += parameter.numel()
        for parameter in self.param_groups[-1]["params"]:
            owner = min(range(len(loads)), key=lambda rank: loads[rank])
            self.owner[parameter] = owner
            loads[owner] += parameter.numel()
            if owner == dist.get_rank():
                self.inner[parameter] = self.make({**options, "params": [parameter]})
                self.state[parameter] = self.inner[parameter].state[parameter]

    def step(self, closure=None):
        loss = closure() if closure else None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter in self.inner:
                        inner = self.inner[parameter]
                        options = {k: v for k, v in group.items() if k != "params"}
                        inner.param_groups[0].update(options)
                        inner.state[parameter] = self.state[parameter]
                        inner.step()
            for rank in range(dist.get_world_size()):
                self._send_all_of(rank)
        return loss

    def _send_all_of(self, rank):
        own = [parameter for parameter, owner in self.owner.items() if owner == rank]
        if own:
            flat = torch.cat([parameter.flatten() for parameter in own])
            dist.broadcast(flat, rank)
            parts = flat.split([parameter.numel() for parameter in own])
            for parameter, part in zip(own, parts, strict=True):
                parameter.copy_(part.view_as(parameter))


class Sharded(torch.optim.Optimizer):
    """A right answer of small parts; each wrong one below writes one of them wrongly."""

    first = 0  # the parameter from which on it counts who owns how much

    def __init__(self, params, optimizer_cls, **kwargs):
        self.make_inner = partial(optimizer_cls, **kwargs)
        self.inner, self.owners = [], {}
        super().__init__(self.handed(params), self.find_defaults(kwargs))

    def handed(self, params):
        return params

    def find_defaults(self, kwargs):
        return self.make_inner([{"params": []}]).defaults

    def add_param_group(self, group):
        super().add_param_group(group)
        self.share_out(self.param_groups[-1])

    def share_out(self, group):
        for parameter in group["params"]:
            self.owners[parameter] = self.next_owner(parameter)
        self.inner.append(self.inner_for(group, self.mine(group["params"])))
        self.state.update(self.inner[-1].state)

    def next_owner(self, parameter):
        loads = [0] * dist.get_world_size()
        for other, owner in list(self.owners.items())[self.first :]:
            loads[owner] += other.numel()
        return loads.index(min(loads))

    def mine(self, parameters):
        return [p for p in parameters if self.owners.get(p) == dist.get_rank()]

    def inner_for(self, group, mine):
        return self.make_inner([{**group, "params": mine}])

    def step(self, closure=None):
        loss = self.loss_of(closure)
        with torch.no_grad():
            for group, inner in zip(self.param_groups, self.inner, strict=True):
                self.hand_over(group, inner)
                inner.step()
            self.send()
        return loss

    def loss_of(self, closure):
        return None if closure is None else closure()

    def hand_over(self, group, inner):
        inner.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
        inner.state = self.state

    def send(self):
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter, owner)


@wrong("8.2", names="not-broadcast")
class SendsNothing(Sharded):
    def send(self):
        pass


@wrong("8.2", names="not-broadcast")
class SendsFromRank0(Sharded):
    def send(self):
        for parameter in self.owners:
            dist.broadcast(parameter, 0)


@wrong("8.2", names="other-calls")
class OnlyTheOwnerSends(Sharded):
    def send(self):
        for parameter, owner in self.owners.items():
            if owner == dist.get_rank():
                dist.broadcast(parameter, owner)


@wrong("8.2", names="two-ranks")
class CutsIntoHalves(Sharded):
    """Knows two ranks only."""

    def mine(self, parameters):
        halves = [[p for p in parameters if self.owners[p] == rank] for rank in (0, 1)]
        return halves[dist.get_rank()]


@wrong("8.2", names="no-owner")
class DropsTheRemainder(Sharded):
    def share_out(self, group):
        n = dist.get_world_size()
        share = len(group["params"]) // n
        for index, parameter in enumerate(group["params"][: n * share]):
            self.owners[parameter] = index // share
        self.inner.append(self.inner_for(group, self.mine(group["params"])))
        self.state.update(self.inner[-1].state)


@wrong("8.2", names="everyone-everything")
class KeepsAllStates(Sharded):
    def mine(self, parameters):
        return parameters


@wrong("8.2", names="state")
class KeepsTheStateInside(Sharded):
    def share_out(self, group):
        super().share_out(group)
        self.state.clear()

    def hand_over(self, group, inner):
        inner.param_groups[0].update({k: v for k, v in group.items() if k != "params"})


@wrong("8.2", names="unbalanced")
class DealsParametersOut(Sharded):
    def next_owner(self, parameter):
        return len(self.owners) % dist.get_world_size()


@wrong("8.2", names="other-update")
class CopiesTheOptionsOnce(Sharded):
    def hand_over(self, group, inner):
        inner.state = self.state


@wrong("8.2", names="not-waited")
class SendsInTheBackground(Sharded):
    def send(self):
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter, owner, async_op=True)


@wrong("8.2", names="read-twice")
class ReadsTheParametersTwice(Sharded):
    def handed(self, params):
        self.count = sum(1 for _ in params)
        return params


@wrong("8.2", names="empty-rank")
class HandsOverAList(Sharded):
    def inner_for(self, group, mine):
        inner = self.make_inner(mine)
        inner.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
        return inner

    def find_defaults(self, kwargs):
        return self.make_inner([nn.Parameter(torch.zeros(1))]).defaults


@wrong("8.2", names="none-gradient")
class AveragesTheGradientsToo(Sharded):
    def step(self, closure=None):
        loss = self.loss_of(closure)
        for parameter in self.owners:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        super().step()
        return loss


@wrong("8.2", names="closure")
class DropsTheLoss(Sharded):
    def step(self, closure=None):
        super().step(closure)


@wrong("8.2", names="not-an-optimizer")
class ForgetsToInitialise(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.all = list(params)
        own = self.all[dist.get_rank() :: dist.get_world_size()]
        self.inner = optimizer_cls(own, **kwargs)

    def step(self, closure=None):
        self.inner.step()
        for index, parameter in enumerate(self.all):
            dist.broadcast(parameter.detach(), index % dist.get_world_size())


@wrong("8.2", names="not-an-optimizer")
class TakesParametersOnly(Sharded):
    def handed(self, params):
        params = list(params)
        self.elements = sum(parameter.numel() for parameter in params)
        return params


@right("8.2")
class GoesRoundTheSorted(Sharded):
    """The largest first, one to each rank in turn: no two ranks differ by more than the largest."""

    def share_out(self, group):
        params = group["params"]
        group["params"] = sorted(params, key=torch.numel, reverse=True)
        super().share_out(group)
        group["params"] = params

    def send(self):
        for parameter, owner in self.owners.items():
            if parameter.grad is not None:  # the others have not changed
                dist.broadcast(parameter, owner)


@wrong("8.2", names="gradients")
class ClearsItsOwnGradients(Sharded):
    def zero_grad(self, set_to_none=True):
        for inner in self.inner:
            inner.zero_grad(set_to_none)


@wrong("8.2", names="param-groups")
class GroupsItsOwn(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.owners, self.loads = {}, [0] * dist.get_world_size()
        self.inner = optimizer_cls([{"params": []}], **kwargs)
        self.inner.param_groups.clear()
        super().__init__(params, self.inner.defaults)

    def add_param_group(self, group):
        params = list(group["params"])
        for parameter in params:
            self.owners[parameter] = self.loads.index(min(self.loads))
            self.loads[self.owners[parameter]] += parameter.numel()
        mine = [p for p in params if self.owners[p] == dist.get_rank()]
        super().add_param_group({**group, "params": mine})
        self.inner.param_groups.append({**self.param_groups[-1]})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for theirs, own in zip(self.inner.param_groups, self.param_groups, strict=True):
            theirs.update(own)
        self.inner.state = self.state
        self.inner.step()
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter.detach(), owner)
        return loss


@wrong("8.2", names="other-calls")
class BreaksTiesByTheirId(Sharded):
    def share_out(self, group):
        ordered = sorted(group["params"], key=lambda p: (-p.numel(), id(p)))
        super().share_out({**group, "params": ordered})
