"""Answers to 8.2, `ShardedOptimizer`: wrong in a plausible way, or right in another."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_exercises.authoring import load_answer
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


class _Sharded(torch.optim.Optimizer):
    """A right answer of small parts; each wrong one below writes one of them wrongly."""

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
        for other, owner in self.owners.items():
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
class SendsNothing(_Sharded):
    def send(self):
        pass


@wrong("8.2", names="wrong-source")
class SendsFromRank0(_Sharded):
    def send(self):
        for parameter in self.owners:
            dist.broadcast(parameter, 0)


@wrong("8.2", names="all-reduced")
class AddsTheCopies(_Sharded):
    def send(self):
        for parameter in self.owners:
            dist.all_reduce(parameter)


@wrong("8.2", names="all-reduced")
class AveragesTheCopies(_Sharded):
    def send(self):
        for parameter in self.owners:
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


@wrong("8.2", names="not-every-rank")
class OnlyTheOwnerSends(_Sharded):
    def send(self):
        for parameter, owner in self.owners.items():
            if owner == dist.get_rank():
                dist.broadcast(parameter, owner)


@wrong("8.2", names="not-every-rank")
class NumbersTheOwnersFromItself(_Sharded):
    """As `hash(parameter)` or `id(parameter)` would: each rank finds another owner."""

    def next_owner(self, parameter):
        return (len(self.owners) + dist.get_rank()) % dist.get_world_size()


@wrong("8.2", names="both-send")
class SendsBeforeItReceives(_Sharded):
    def send(self):
        for parameter, owner in self.owners.items():
            for other in range(dist.get_world_size()):
                if other != owner == dist.get_rank():
                    dist.send(parameter.detach(), other)
        for parameter, owner in self.owners.items():
            if owner != dist.get_rank():
                dist.recv(parameter.detach(), owner)


@wrong("8.2", names="two-ranks")
class CutsIntoHalves(_Sharded):
    """Knows two ranks only."""

    def mine(self, parameters):
        halves = [[p for p in parameters if self.owners[p] == rank] for rank in (0, 1)]
        return halves[dist.get_rank()]


@wrong("8.2", names="left-over")
class NeedsASecondRank(_Sharded):
    """Right on several ranks; on one, every second parameter is nobody's."""

    def next_owner(self, parameter):
        if dist.get_world_size() > 1:
            return super().next_owner(parameter)
        return len(self.owners) % 2

    def send(self):
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter, min(owner, dist.get_world_size() - 1))


@wrong("8.2", names="left-over")
class DropsTheRemainder(_Sharded):
    def share_out(self, group):
        n = dist.get_world_size()
        share = len(group["params"]) // n
        for index, parameter in enumerate(group["params"][: n * share]):
            self.owners[parameter] = index // share
        self.inner.append(self.inner_for(group, self.mine(group["params"])))
        self.state.update(self.inner[-1].state)


@wrong("8.2", names="everyone-everything")
class KeepsAllStates(_Sharded):
    def mine(self, parameters):
        return parameters


@wrong("8.2", names="everyone-everything")
class HidesTheGradients(_Sharded):
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


@wrong("8.2", names="state-elsewhere")
class KeepsTheStateInside(_Sharded):
    def share_out(self, group):
        super().share_out(group)
        self.state.clear()

    def hand_over(self, group, inner):
        inner.param_groups[0].update({k: v for k, v in group.items() if k != "params"})


@wrong("8.2", names="unbalanced")
class DealsParametersOut(_Sharded):
    def next_owner(self, parameter):
        return len(self.owners) % dist.get_world_size()


@wrong("8.2", names="unbalanced")
class OneOwnsAll(_Sharded):
    def next_owner(self, parameter):
        return 0


@wrong("8.2", names="groups-lost")
class ForgetsTheGroups(_Sharded):
    def inner_for(self, group, mine):
        return self.make_inner([{"params": mine}])

    def hand_over(self, group, inner):
        inner.state = self.state


@wrong("8.2", names="scheduler-unheard")
class CopiesTheOptionsOnce(_Sharded):
    def hand_over(self, group, inner):
        inner.state = self.state


@wrong("8.2", names="options-unheard")
class HandsOnTheLearningRate(_Sharded):
    def hand_over(self, group, inner):
        inner.state = self.state
        inner.param_groups[0]["lr"] = group["lr"]


@wrong("8.2", names="options-missing")
class KnowsTheKwargsOnly(_Sharded):
    def find_defaults(self, kwargs):
        return kwargs


@wrong("8.2", names="fixed-optimizer")
class AlwaysSGD(_Sharded):
    def __init__(self, params, optimizer_cls, **kwargs):
        known = {key: kwargs[key] for key in ("lr", "momentum") if key in kwargs}
        plain = optimizer_cls if optimizer_cls.__bases__[0] is torch.optim.SGD else torch.optim.SGD
        super().__init__(params, plain, **known)


@wrong("8.2", names="first-state-lost")
class ExpectsStateAfterAStep(_Sharded):
    def share_out(self, group):
        super().share_out(group)
        if "momentum" in group:
            self.state.clear()


@wrong("8.2", names="first-state-lost")
class HandsOnTheFirstGroupsOnly(_Sharded):
    def share_out(self, group):
        super().share_out(group)
        for parameter in [p for inner in self.inner[1:] for p in inner.state]:
            self.state.pop(parameter, None)


@wrong("8.2", names="not-waited")
class SendsInTheBackground(_Sharded):
    def send(self):
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter, owner, async_op=True)


@wrong("8.2", names="generator-used-up")
class ReadsTheParametersTwice(_Sharded):
    def handed(self, params):
        self.count = sum(1 for _ in params)
        return params


@wrong("8.2", names="empty-rank")
class HandsOverAList(_Sharded):
    def inner_for(self, group, mine):
        inner = self.make_inner(mine)
        inner.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
        return inner

    def find_defaults(self, kwargs):
        return self.make_inner([nn.Parameter(torch.zeros(1))]).defaults


@wrong("8.2", names="new-group-lost")
class SharesOutOnce(_Sharded):
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


@wrong("8.2", names="unfrozen-lost")
class LeavesFrozenOnesOut(_Sharded):
    def share_out(self, group):
        learning = [p for p in group["params"] if p.requires_grad]
        super().share_out({**group, "params": learning})


@wrong("8.2", names="none-gradient")
class AveragesTheGradientsToo(_Sharded):
    def step(self, closure=None):
        loss = self.loss_of(closure)
        for parameter in self.owners:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        super().step()
        return loss


@wrong("8.2", names="closure-lost")
class DropsTheLoss(_Sharded):
    def step(self, closure=None):
        super().step(closure)


@wrong("8.2", names="closure-twice")
class HandsTheClosureOn(_Sharded):
    def step(self, closure=None):
        loss = self.loss_of(closure)
        for group, inner in zip(self.param_groups, self.inner, strict=True):
            self.hand_over(group, inner)
            inner.step(closure)
        with torch.no_grad():
            self.send()
        return loss


@wrong("8.2", names="closure-no-grad")
class ClosureWithoutGradients(_Sharded):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


@wrong("8.2", names="state-not-restored")
class HandsTheStateOverOnce(_Sharded):
    def share_out(self, group):
        super().share_out(group)
        self.inner[-1].state = self.state

    def hand_over(self, group, inner):
        inner.param_groups[0].update({k: v for k, v in group.items() if k != "params"})


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


@wrong("8.2", names="groups-as-parameters")
class TakesParametersOnly(_Sharded):
    def handed(self, params):
        params = list(params)
        self.elements = sum(parameter.numel() for parameter in params)
        return params


class _Facade:
    """Looks like an optimizer and is none."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.real = load_answer("8.2")(params, optimizer_cls, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__dict__["real"], name)


@wrong("8.2", names="not-an-optimizer")
class WrapsWithoutDeriving(_Facade):
    pass


@wrong("8.2", names="unbalanced")
class CountsParameters(_Sharded):
    """In one group the largest come first, and it is fair; over groups it is not."""

    def share_out(self, group):
        ordered = {**group, "params": sorted(group["params"], key=torch.numel, reverse=True)}
        super().share_out(ordered)

    def next_owner(self, parameter):
        return len(self.owners) % dist.get_world_size()


@wrong("8.2", names="unbalanced-groups")
class SharesOutEachGroup(_Sharded):
    def share_out(self, group):
        self.loads = [0] * dist.get_world_size()
        super().share_out(group)

    def next_owner(self, parameter):
        owner = self.loads.index(min(self.loads))
        self.loads[owner] += parameter.numel()
        return owner


@wrong("8.2", names="closure-lost")
class CallsTheClosureWhereItOwnsSomething(_Sharded):
    def loss_of(self, closure):
        owns = any(inner.param_groups[0]["params"] for inner in self.inner)
        return super().loss_of(closure if owns else None)


@wrong("8.2", names="closure-late")
class CallsTheClosureAfterTheUpdate(_Sharded):
    def step(self, closure=None):
        super().step()
        return super().loss_of(closure)


@wrong("8.2", names="drops-gradients")
class ClearsGradients(_Sharded):
    def send(self):
        super().send()
        self.zero_grad()


@wrong("8.2", names="drops-gradients")
class FreesTheOthersGradients(_Sharded):
    def send(self):
        super().send()
        for parameter, owner in self.owners.items():
            if owner != dist.get_rank():
                parameter.grad = None


@right("8.2")
class GoesRoundTheSorted(_Sharded):
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


@wrong("8.2", names="generator-used-up")
class ReadsAGroupTwice(_Sharded):
    def handed(self, params):
        params = list(params)
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        self.elements = sum(p.numel() for group in groups for p in group["params"])
        return groups


@wrong("8.2", names="unbalanced-groups")
class SharesOutAnAddedGroupByItself(_Sharded):
    counted = None

    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        self.counted = {}

    def share_out(self, group):
        if self.counted is not None:
            self.counted = {}
        super().share_out(group)

    def next_owner(self, parameter):
        if self.counted is None:
            return super().next_owner(parameter)
        loads = [0] * dist.get_world_size()
        for other, owner in self.counted.items():
            loads[owner] += other.numel()
        self.counted[parameter] = loads.index(min(loads))
        return self.counted[parameter]


@wrong("8.2", names="gradients-left")
class ClearsItsOwnGradients(_Sharded):
    def zero_grad(self, set_to_none=True):
        for inner in self.inner:
            inner.zero_grad(set_to_none)


@wrong("8.2", names="parameters-missing")
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


@wrong("8.2", names="groups-lost")
class HandsOnTheFirstGroup(_Sharded):
    def hand_over(self, group, inner):
        super().hand_over(self.param_groups[0], inner)


@wrong("8.2", names="not-every-rank")
class BreaksTiesByTheirId(_Sharded):
    def share_out(self, group):
        ordered = sorted(group["params"], key=lambda p: (-p.numel(), id(p)))
        super().share_out({**group, "params": ordered})
