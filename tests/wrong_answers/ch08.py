"""Plausible wrong answers, and other right ones, to the exercises of chapter 08.

The wrong answers to 8.2, 8.3 and 8.4 are right ones with one thing written wrongly.
"""

import copy
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from course_utils.checks import load_answer
from tests.wrong_answers import right, wrong

# ---- 8.1 model_state_bytes -----------------------------------------------------------------------


def _held(count, shard, sharded, sizes):
    return sum(size * (shard if each in sharded else count) for each, size in enumerate(sizes))


def _must_exist(stage):
    if not 0 <= stage <= 3:
        raise ValueError(f"no stage {stage}")


@right("8.1")
def adds_stage_by_stage(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    if stage not in range(4):
        raise ValueError("0 to 3")
    shard = math.ceil(parameters / world_size)
    total = parameters * (parameter_bytes + gradient_bytes + optimizer_bytes)
    saved = parameters - shard
    for size, first in ((optimizer_bytes, 1), (gradient_bytes, 2), (parameter_bytes, 3)):
        if stage >= first:
            total -= saved * size
    return total


@wrong("8.1", names="stage-0-sharded")
def shards_at_stage_0(parameters, world_size, stage, *sizes, **named):
    _must_exist(stage)
    return adds_stage_by_stage(parameters, world_size, max(stage, 1), *sizes, **named)


@wrong("8.1", names="wrong-order")
def parameters_first(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    _must_exist(stage)
    sizes = (parameter_bytes, gradient_bytes, optimizer_bytes)
    return _held(parameters, -(-parameters // world_size), range(stage), sizes)


@wrong("8.1", names="only-its-own")
def forgets_the_earlier_stages(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    _must_exist(stage)
    sizes = (parameter_bytes, gradient_bytes, optimizer_bytes)
    return _held(parameters, -(-parameters // world_size), (3 - stage,), sizes)


@wrong("8.1", names="everything-divided")
def divides_all(parameters, world_size, stage, *sizes, **named):
    _must_exist(stage)
    return adds_stage_by_stage(parameters, world_size, 3 if stage else 0, *sizes, **named)


@wrong("8.1", names="all-ranks-together")
def counts_every_rank(parameters, world_size, stage, *sizes, **named):
    return world_size * adds_stage_by_stage(parameters, world_size, stage, *sizes, **named)


def _with_shard(shard):
    def answer(
        parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
    ):
        _must_exist(stage)
        sizes = (parameter_bytes, gradient_bytes, optimizer_bytes)
        return _held(parameters, shard(parameters, world_size), range(3 - stage, 3), sizes)

    return answer


@wrong("8.1", names="rounded-down")
def rounds_down(parameters, world_size, stage, *sizes, **named):
    return _with_shard(lambda count, n: count // n)(parameters, world_size, stage, *sizes, **named)


@wrong("8.1", names="one-too-many")
def adds_one(parameters, world_size, stage, *sizes, **named):
    with_one_more = _with_shard(lambda count, n: count // n + 1)
    return with_one_more(parameters, world_size, stage, *sizes, **named)


@wrong("8.1", names="other-unit")
def counts_gigabytes(parameters, world_size, stage, *sizes, **named):
    return adds_stage_by_stage(parameters, world_size, stage, *sizes, **named) / 1e9


@wrong("8.1", names="other-unit")
def counts_gibibytes(parameters, world_size, stage, *sizes, **named):
    return adds_stage_by_stage(parameters, world_size, stage, *sizes, **named) / 2**30


@wrong("8.1", names="not-rounded")
def divides_exactly(parameters, world_size, stage, *sizes, **named):
    return _with_shard(lambda count, n: count / n)(parameters, world_size, stage, *sizes, **named)


@wrong("8.1", names="rounded-late")
def rounds_the_bytes(parameters, world_size, stage, *sizes, **named):
    return math.ceil(divides_exactly(parameters, world_size, stage, *sizes, **named))


@wrong("8.1", names="rounded-late")
def rounds_the_bytes_of_each_sort(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    _must_exist(stage)
    held = [parameters * size for size in (parameter_bytes, gradient_bytes, optimizer_bytes)]
    cut = range(3 - stage, 3)
    return sum(-(-b // world_size) if i in cut else b for i, b in enumerate(held))


@wrong("8.1", names="a-sort-missing")
def forgets_the_gradients(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    return adds_stage_by_stage(parameters, world_size, stage, parameter_bytes, 0, optimizer_bytes)


@wrong("8.1", names="sizes-fixed")
def knows_adam_only(parameters, world_size, stage, **named):
    return adds_stage_by_stage(parameters, world_size, stage)


@wrong("8.1", names="no-error")
def accepts_any_stage(parameters, world_size, stage, *sizes, **named):
    return adds_stage_by_stage(parameters, world_size, min(max(stage, 0), 3), *sizes, **named)


@wrong("8.1", names="other-error")
def looks_the_stage_up(parameters, world_size, stage, *sizes, **named):
    known = {0: 0, 1: 1, 2: 2, 3: 3}
    return adds_stage_by_stage(parameters, world_size, known[stage], *sizes, **named)


# ---- 8.2 ShardedOptimizer ------------------------------------------------------------------------


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


# ---- 8.3 FlatLayout ------------------------------------------------------------------------------


@right("8.3")
class JoinsAndPads:
    def __init__(self, shapes, world_size):
        self.shapes, self.n = [tuple(shape) for shape in shapes], world_size
        self.total = sum(math.prod(shape) for shape in self.shapes)
        self.shard_size = math.ceil(self.total / world_size)

    def flatten(self, tensors):
        padding = tensors[0].new_zeros(self.n * self.shard_size - self.total)
        return torch.cat([*(tensor.reshape(-1) for tensor in tensors), padding])

    def shards(self, flat):
        return [flat.narrow(0, r * self.shard_size, self.shard_size) for r in range(self.n)]

    def unflatten(self, flat):
        tensors, start = [], 0
        for shape in self.shapes:
            end = start + math.prod(shape)
            tensors.append(flat[start:end].view(shape))
            start = end
        return tensors


@wrong("8.3", names="rounded-down")
class RoundsDown(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = self.total // world_size


@wrong("8.3", names="padded-each")
class PadsEveryTensor(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = sum(math.ceil(math.prod(s) / world_size) for s in self.shapes)


@wrong("8.3", names="padded-too-much")
class PadsAlways(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = self.total // world_size + 1


@wrong("8.3", names="not-padded")
class PadsNothing(JoinsAndPads):
    def flatten(self, tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


@wrong("8.3", names="padding-not-zero")
class PadsWithTheBeginning(JoinsAndPads):
    def flatten(self, tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return flat.repeat(1 + self.n)[: self.n * self.shard_size].clone()


@wrong("8.3", names="padded-in-front")
class PadsInFront(JoinsAndPads):
    def flatten(self, tensors):
        flat = super().flatten(tensors)
        return flat.roll(self.n * self.shard_size - self.total)


@wrong("8.3", names="strided")
class DealsElementsOut(JoinsAndPads):
    def shards(self, flat):
        return [flat[rank :: self.n] for rank in range(self.n)]


@wrong("8.3", names="too-few-shards")
class ChunksTheTensorsOnly(JoinsAndPads):
    def shards(self, flat):
        return (
            list(flat[: self.total].chunk(self.n)) if self.total < self.n else super().shards(flat)
        )


@wrong("8.3", names="shards-copied")
class CopiesTheShards(JoinsAndPads):
    def shards(self, flat):
        return [shard.clone() for shard in super().shards(flat)]


@wrong("8.3", names="tensors-copied")
class CopiesTheTensors(JoinsAndPads):
    def unflatten(self, flat):
        return [tensor.clone() for tensor in super().unflatten(flat)]


@wrong("8.3", names="flatten-aliases")
class ReusesASingleTensor(JoinsAndPads):
    def flatten(self, tensors):
        if len(tensors) == 1 and self.total % self.n == 0:
            return tensors[0].reshape(-1)
        return super().flatten(tensors)


@wrong("8.3", names="input-changed")
class CopiesTheOtherWay(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            tensor.copy_(place)
        return flat


@wrong("8.3", names="input-changed")
class AppendsThePadding(JoinsAndPads):
    def flatten(self, tensors):
        tensors.append(tensors[0].new_zeros(self.n * self.shard_size - self.total))
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


@wrong("8.3", names="tensors-copied")
class WritesIntoCopies(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat

    def unflatten(self, flat):
        return [tensor.clone() for tensor in super().unflatten(flat)]


@wrong("8.3", names="buffer-kept")
class KeepsItsVector(JoinsAndPads):
    vector = None

    def flatten(self, tensors):
        if self.vector is None:
            self.vector = tensors[0].new_zeros(self.n * self.shard_size)
        return self.vector.copy_(super().flatten(tensors))


@wrong("8.3", names="dimensions-left-out")
class KnowsMatricesAndVectors(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        sizes = [s[0] * s[-1] if len(s) > 1 else math.prod(s) for s in self.shapes]
        self.shard_size = math.ceil(sum(sizes) / world_size)


@wrong("8.3", names="dtype-lost")
class FillsAFloat32Vector(JoinsAndPads):
    def flatten(self, tensors):
        flat = torch.zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat


@wrong("8.3", names="not-contiguous")
class ViewsTheTensors(JoinsAndPads):
    def flatten(self, tensors):
        padding = tensors[0].new_zeros(self.n * self.shard_size - self.total)
        return torch.cat([*(tensor.view(-1) for tensor in tensors), padding])


@wrong("8.3", names="not-contiguous")
class TakesTheOrderOfMemory(JoinsAndPads):
    def flatten(self, tensors):
        return super().flatten([t.as_strided((t.numel(),), (1,)) for t in tensors])


@wrong("8.3", names="scalars")
class MultipliesTheShape(JoinsAndPads):
    def unflatten(self, flat):
        tensors, start = [], 0
        for shape in self.shapes:
            size = shape[0]
            for extent in shape[1:]:
                size *= extent
            tensors.append(flat[start : start + size].view(shape))
            start += size
        return tensors


# ---- 8.5 reshard ---------------------------------------------------------------------------------


def _whole_checkpoint(parts):
    ordered = sorted(parts, key=lambda part: part["rank"])
    n = ordered[0]["world_size"]
    there = {part["rank"] for part in ordered}
    missing = [rank for rank in range(n) if rank not in there]
    if missing or len(ordered) != n or any(part["world_size"] != n for part in ordered):
        raise ValueError(f"not a whole checkpoint of {n} ranks; missing: {missing}")
    return ordered


def _is_cut(shape, value):
    return len(shape) > 1 and torch.is_tensor(value) and value.dim() > 0


def _cut(whole, n):
    size = -(-whole.numel() // n)
    padded = torch.zeros(n * size, dtype=whole.dtype)
    padded[: whole.numel()] = whole
    return [piece.clone() for piece in padded.view(n, size)]


def _same_everywhere(value, n):
    return [value.clone() if torch.is_tensor(value) else value for _ in range(n)]


class _Resharding:
    """A right answer of small parts; each wrong one below writes one of them wrongly."""

    def order(self, parts):
        return _whole_checkpoint(parts)

    def again(self, shape, values, n):
        if not _is_cut(shape, values[0]):
            return self.uncut(shape, values, n)
        return self.pieces(torch.cat(values)[: shape.numel()], shape, n)

    def uncut(self, shape, values, n):
        return _same_everywhere(values[0], n)

    def pieces(self, whole, shape, n):
        return _cut(whole, n)

    def state(self, name, shape, states, n):
        keys = states[0]
        cut = {key: self.again(shape, [state[key] for state in states], n) for key in keys}
        return [{key: cut[key][rank] for key in keys} for rank in range(n)]

    def __call__(self, parts, n):
        parts = self.order(parts)
        shapes = parts[0]["shapes"]
        made = [self.labels(parts, rank, n) | {"shapes": shapes} for rank in range(n)]
        for new in made:
            new["parameters"], new["optimizer"] = {}, {}
        for name, shape in shapes.items():
            values = self.again(shape, [part["parameters"][name] for part in parts], n)
            for new, value in zip(made, values, strict=True):
                new["parameters"][name] = value
            if self.has_state(parts, name):
                states = [part["optimizer"][name] for part in parts]
                for new, state in zip(made, self.state(name, shape, states, n), strict=True):
                    new["optimizer"][name] = state
        return made

    def has_state(self, parts, name):
        return name in parts[0]["optimizer"]

    def labels(self, parts, rank, n):
        return {"rank": rank, "world_size": n}


@right("8.5")
def reshards_in_small_parts(checkpoints, world_size):
    return _Resharding()(checkpoints, world_size)


@right("8.5")
def copies_element_ranges(checkpoints, world_size):
    """Never holds a whole parameter: copies the overlap of each old shard with each new one."""
    parts = _whole_checkpoint(checkpoints)

    def again(shape, values):
        if not _is_cut(shape, values[0]):
            return _same_everywhere(values[0], world_size)
        old, new = len(values[0]), -(-shape.numel() // world_size)
        shards = [values[0].new_zeros(new) for _ in range(world_size)]
        for index in range(shape.numel()):
            shards[index // new][index % new] = values[index // old][index % old]
        return shards

    made = []
    for rank in range(world_size):
        made.append({"rank": rank, "world_size": world_size, "shapes": parts[0]["shapes"]})
        made[-1] |= {"parameters": {}, "optimizer": {}}
    for name, shape in parts[0]["shapes"].items():
        for new, value in zip(made, again(shape, [p["parameters"][name] for p in parts])):
            new["parameters"][name] = value
        for key in parts[0]["optimizer"].get(name, ()):
            values = [part["optimizer"][name][key] for part in parts]
            for new, value in zip(made, again(shape, values)):
                new["optimizer"].setdefault(name, {})[key] = value
    return made


@wrong("8.5", names="list-order")
def trusts_the_order(checkpoints, world_size):
    class Trusting(_Resharding):
        def order(self, parts):
            _whole_checkpoint(parts)
            return parts

    return Trusting()(checkpoints, world_size)


@wrong("8.5", names="sorted-as-text")
def sorts_ranks_as_text(checkpoints, world_size):
    class Textual(_Resharding):
        def order(self, parts):
            _whole_checkpoint(parts)
            return sorted(parts, key=lambda part: str(part["rank"]))

    return Textual()(checkpoints, world_size)


@wrong("8.5", names="padding-kept")
def cuts_the_padding_too(checkpoints, world_size):
    class Keeping(_Resharding):
        def again(self, shape, values, n):
            if not _is_cut(shape, values[0]):
                return self.uncut(shape, values, n)
            return self.pieces(torch.cat(values), shape, n)

    return Keeping()(checkpoints, world_size)


@wrong("8.5", names="vectors-cut")
def cuts_vectors(checkpoints, world_size):
    class Cutting(_Resharding):
        def uncut(self, shape, values, n):
            if torch.is_tensor(values[0]) and values[0].dim() > 0:
                return _cut(values[0], n)
            return super().uncut(shape, values, n)

    return Cutting()(checkpoints, world_size)


@wrong("8.5", names="whole-everywhere")
def hands_out_the_whole(checkpoints, world_size):
    class Handing(_Resharding):
        def pieces(self, whole, shape, n):
            return [whole.view(shape).clone() for _ in range(n)]

    return Handing()(checkpoints, world_size)


@wrong("8.5", names="matrix-shape")
def cuts_rows(checkpoints, world_size):
    class Rows(_Resharding):
        def pieces(self, whole, shape, n):
            rows = -(-shape[0] // n)
            padded = torch.zeros(n * rows, *shape[1:])
            padded[: shape[0]] = whole.view(shape)
            return [piece.clone() for piece in padded.split(rows)]

    return Rows()(checkpoints, world_size)


@wrong("8.5", names="uneven")
def does_not_pad(checkpoints, world_size):
    class Uneven(_Resharding):
        def pieces(self, whole, shape, n):
            return [piece.clone() for piece in whole.tensor_split(n)]

    return Uneven()(checkpoints, world_size)


@wrong("8.5", names="multiples-only")
def merges_or_splits(checkpoints, world_size):
    class Merging(_Resharding):
        def again(self, shape, values, n):
            if not _is_cut(shape, values[0]) or n == len(values):
                return values if n == len(values) else super().again(shape, values, n)
            if n < len(values):
                step = len(values) // n
                return [torch.cat(values[r * step : (r + 1) * step]) for r in range(n)]
            step = n // len(values)
            return [piece.clone() for value in values for piece in value.chunk(step)]

        def __call__(self, parts, n):
            made = super().__call__(parts, n)
            assert len(made) == n
            return made

    return Merging()(checkpoints, world_size)


@wrong("8.5", names="optimizer-left")
def forgets_the_optimizer(checkpoints, world_size):
    made = _Resharding()(checkpoints, world_size)
    for part in made:
        part["optimizer"] = {}
    return made


@wrong("8.5", names="optimizer-left")
def keeps_the_old_state(checkpoints, world_size):
    class Keeping(_Resharding):
        def state(self, name, shape, states, n):
            return [copy.deepcopy(states[rank % len(states)]) for rank in range(n)]

    return Keeping()(checkpoints, world_size)


@wrong("8.5", names="step-cut")
def cuts_every_tensor(checkpoints, world_size):
    class Cutting(_Resharding):
        def state(self, name, shape, states, n):
            made = super().state(name, shape, states, n)
            for rank, new in enumerate(made):
                new["step"] = _cut(states[0]["step"].reshape(1), n)[rank]
            return made

    return Cutting()(checkpoints, world_size)


@wrong("8.5", names="stateless")
def expects_state_everywhere(checkpoints, world_size):
    class Expecting(_Resharding):
        def has_state(self, parts, name):
            return True

    return Expecting()(checkpoints, world_size)


@wrong("8.5", names="rank-and-size")
def keeps_the_labels(checkpoints, world_size):
    class Keeping(_Resharding):
        def labels(self, parts, rank, n):
            return {"rank": rank, "world_size": parts[0]["world_size"]}

    return Keeping()(checkpoints, world_size)


@wrong("8.5", names="missing-rank")
def takes_what_is_there(checkpoints, world_size):
    class Trusting(_Resharding):
        def order(self, parts):
            return sorted(parts, key=lambda part: part["rank"])

        def pieces(self, whole, shape, n):
            padded = torch.zeros(shape.numel())
            padded[: len(whole)] = whole
            return _cut(padded, n)

    return Trusting()(checkpoints, world_size)


@wrong("8.5", names="twice")
def counts_the_parts(checkpoints, world_size):
    class Counting(_Resharding):
        def order(self, parts):
            n = max(part["world_size"] for part in parts)
            if len(parts) < n:
                there = {part["rank"] for part in parts}
                raise ValueError(f"missing: {set(range(n)) - there}")
            return sorted(parts, key=lambda part: part["rank"])

    return Counting()(checkpoints, world_size)


@wrong("8.5", names="other-error")
def looks_ranks_up(checkpoints, world_size):
    class LookingUp(_Resharding):
        def order(self, parts):
            by_rank = {part["rank"]: part for part in parts}
            return [by_rank[rank] for rank in range(parts[0]["world_size"])]

    return LookingUp()(checkpoints, world_size)


@wrong("8.5", names="error-without-rank")
def says_little(checkpoints, world_size):
    try:
        return _Resharding()(checkpoints, world_size)
    except ValueError:
        raise ValueError("This checkpoint is not complete.") from None


@wrong("8.5", names="a-view")
def saves_the_whole(checkpoints, world_size):
    class Viewing(_Resharding):
        def pieces(self, whole, shape, n):
            size = -(-whole.numel() // n)
            padded = torch.zeros(n * size)
            padded[: whole.numel()] = whole
            return list(padded.view(n, size))

    return Viewing()(checkpoints, world_size)


@wrong("8.5", names="input-changed")
def empties_the_parts(checkpoints, world_size):
    made = _Resharding()(checkpoints, world_size)
    for part in checkpoints:
        part["optimizer"].clear()
    return made


@wrong("8.5", names="twice")
def asks_which_ranks_are_there(checkpoints, world_size):
    """A part that comes twice is left out without a word."""
    last = {part["rank"]: part for part in checkpoints}
    return _Resharding()(list(last.values()), world_size)


@wrong("8.5", names="other-dtype")
def makes_room_in_float32(checkpoints, world_size):
    class Making(_Resharding):
        def pieces(self, whole, shape, n):
            padded = torch.zeros(n * -(-whole.numel() // n))
            padded[: whole.numel()] = whole
            return [piece.clone() for piece in padded.chunk(n)]

    return Making()(checkpoints, world_size)


@wrong("8.5", names="fewer-pieces")
def cuts_into_chunks(checkpoints, world_size):
    """`chunk` gives no empty pieces."""

    class Chunking(_Resharding):
        def again(self, shape, values, n):
            made = super().again(shape, values, n)
            return made + [None] * (n - len(made))

        def pieces(self, whole, shape, n):
            chunks = whole.chunk(n)
            size = len(chunks[0])
            return [torch.cat([c, c.new_zeros(size - len(c))]) for c in chunks]

        def __call__(self, parts, n):
            made = super().__call__(parts, n)
            for part in made:
                kept = part["parameters"].items()
                part["parameters"] = {name: value for name, value in kept if value is not None}
            return made

    return Chunking()(checkpoints, world_size)


@wrong("8.5", names="padding-inside")
def pads_each_piece(checkpoints, world_size):
    class Splitting(_Resharding):
        def pieces(self, whole, shape, n):
            parts = whole.tensor_split(n)
            size = len(parts[0])
            return [torch.cat([p, p.new_zeros(size - len(p))]) for p in parts]

    return Splitting()(checkpoints, world_size)


@wrong("8.5", names="three-dimensions")
def knows_matrices_only(checkpoints, world_size):
    class Matrices(_Resharding):
        def again(self, shape, values, n):
            return super().again(shape if len(shape) == 2 else torch.Size(), values, n)

    return Matrices()(checkpoints, world_size)


@wrong("8.5", names="one-element")
def takes_one_element_for_a_number(checkpoints, world_size):
    class Counting(_Resharding):
        def again(self, shape, values, n):
            single = torch.is_tensor(values[0]) and values[0].numel() == 1
            return super().again(torch.Size() if single else shape, values, n)

    return Counting()(checkpoints, world_size)


# ---- 8.4 MiniFSDP --------------------------------------------------------------------------------

MiniFSDP = load_answer("8.4")


@right("8.4")
class GathersCopiesAndDividesFirst(MiniFSDP):
    """Gathers into tensors of their own, averages before it adds, and frees at the next chance."""

    def _start_gather(self, weights):
        for weight in weights:
            memory = weight.flat.untyped_storage()
            if memory.nbytes() > 0:
                continue
            memory.resize_(weight.bytes)
            kept = weight.kept.detach().to(weight.flat.dtype)
            weight.pieces = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
            if weight.sharded:
                weight.work = dist.all_gather(
                    weight.pieces, kept, group=self.gathers, async_op=True
                )
            else:
                weight.whole.data.copy_(kept)

    def _wait(self, weights):
        for weight in weights:
            if weight.work is not None:
                weight.work.wait()
                weight.flat.copy_(torch.cat(weight.pieces))
                weight.work = weight.pieces = None

    def _gradient_ready(self, weight, whole):
        whole.grad /= dist.get_world_size()
        super()._gradient_ready(weight, whole)

    def _finish_reductions(self):
        for work, kept, total in self.pending:
            work.wait()
            kept.grad = total if kept.grad is None else kept.grad + total
        self.pending.clear()


class _WholeOf(torch.autograd.Function):
    """From a shard to its whole matrix; in backward from the gradient to what is reduced."""

    @staticmethod
    def forward(ctx, kept, call):
        ctx.kept, ctx.call = kept, call
        return call.whole_of(kept)

    @staticmethod
    def backward(ctx, gradient):
        ctx.call.wholes.pop(ctx.kept, None)
        ctx.call.model.reduce(ctx.kept, gradient)
        return None, None


class _Call:
    """One call of a layer: which matrices are whole for it right now."""

    def __init__(self, model, kept):
        self.model, self.matrices = model, [k for k in kept if k in model.shape_of]
        self.wholes, self.running = {}, {}
        self.index = 0

    def start(self):
        for kept in self.matrices:
            if kept not in self.wholes and kept not in self.running:
                part = kept.detach().to(self.model.compute_dtype or kept.dtype)
                flat = part.new_empty(dist.get_world_size() * len(part))
                pieces = list(flat.chunk(dist.get_world_size()))
                work = dist.all_gather(pieces, part, group=self.model.gathering, async_op=True)
                self.running[kept] = work, flat

    def whole_of(self, kept):
        if kept not in self.model.shape_of:
            return kept.detach().to(self.model.compute_dtype or kept.dtype, copy=True)
        self.start()
        if kept in self.running:
            work, flat = self.running.pop(kept)
            work.wait()
            shape = self.model.shape_of[kept]
            self.wholes[kept] = flat[: shape.numel()].view(shape)
        return self.wholes[kept]

    def drop(self):
        for work, _ in self.running.values():
            work.wait()
        self.running, self.wholes = {}, {}

    def packed(self, tensor):
        """Autograd keeps a note about a whole matrix, and not the matrix."""
        for kept, whole in self.wholes.items():
            if tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
                return kept, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpacked(self, packed):
        if torch.is_tensor(packed):
            return packed
        calls = self.model.calls
        for later in calls[self.index + 1 : self.index + 2]:
            later.drop()  # of a frozen matrix no gradient comes
        self.start()
        for earlier in reversed(calls[max(self.index - 1, 0) : self.index]):
            earlier.start()
        kept, size, stride, offset = packed
        return self.whole_of(kept).as_strided(size, stride, offset)


@right("8.4")
class NotesForAutograd(nn.Module):
    """No memory is resized and no hook is set: a layer's forward goes through an autograd function
    from shard to matrix, and `saved_tensors_hooks` gather again what backward asks for."""

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        self.gathering, self.reducing = dist.new_group(), dist.new_group()
        self.calls, self.last = [], None
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        shards = {p: self.shard(p) for p in module.parameters() if p.dim() > 1}
        self.shape_of = {kept: p.shape for p, kept in shards.items()}
        for layer in module.modules():
            own = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own.items():
                layer.register_parameter(name, shards.get(parameter, parameter))
            if own:
                layer.forward = self.wrapped(layer, layer.forward, list(own))

    def shard(self, parameter):
        n = dist.get_world_size()
        flat = nn.functional.pad(parameter.detach().flatten(), (0, -parameter.numel() % n))
        return nn.Parameter(flat.chunk(n)[dist.get_rank()].clone(), parameter.requires_grad)

    def wrapped(self, layer, forward, names):
        def call_layer(*inputs, **keywords):
            parameters = {name: layer._parameters[name] for name in names}
            call = _Call(self, parameters.values())
            call.start()
            for name, kept in parameters.items():
                vars(layer)[name] = _WholeOf.apply(kept, call)
            with torch.autograd.graph.saved_tensors_hooks(call.packed, call.unpacked):
                output = forward(
                    *map(self.cast, inputs), **{k: self.cast(v) for k, v in keywords.items()}
                )
            for name in names:
                del vars(layer)[name]
            call.drop()
            if torch.is_grad_enabled():
                call.index = len(self.calls)
                self.calls.append(call)
            return output

        return call_layer

    def cast(self, value):
        if self.compute_dtype and torch.is_tensor(value) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value

    def reduce(self, kept, gradient):
        gradient = gradient.to(kept.dtype, copy=True)
        self.finish_last()
        if kept not in self.shape_of:
            self.last = (
                dist.all_reduce(gradient, group=self.reducing, async_op=True),
                kept,
                gradient,
            )
            return
        n, size = dist.get_world_size(), len(kept)
        flat = nn.functional.pad(gradient.flatten(), (0, n * size - gradient.numel()))
        total = torch.empty_like(kept, requires_grad=False)
        work = dist.reduce_scatter(
            total, list(flat.split(size)), group=self.reducing, async_op=True
        )
        self.last = work, kept, total

    def finish_last(self):
        if self.last:
            work, kept, total = self.last
            work.wait()
            mean = total / dist.get_world_size()
            kept.grad = mean if kept.grad is None else kept.grad + mean
            self.last = None

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self):
        self.finish_last()
        for call in self.calls:
            call.drop()
        self.calls = []

    def full_parameters(self):
        full = {}
        for name, kept in self.module.named_parameters():
            full[name] = kept.detach().clone()
            if kept in self.shape_of:
                pieces = [torch.empty_like(full[name]) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, full[name])
                full[name] = torch.cat(pieces)[: self.shapes[name].numel()].view(self.shapes[name])
        return full


@wrong("8.4", names="no-module")
class CallsItModel(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        super().__init__(module, compute_dtype)
        self.model = self._modules.pop("module")


def _piece(tensor):
    n = dist.get_world_size()
    size = -(-tensor.numel() // n)
    flat = tensor.new_zeros(n * size)
    flat[: tensor.numel()] = tensor.flatten()
    return flat.view(n, size)[dist.get_rank()]


@wrong("8.4", names="no-broadcast")
class KeepsItsOwnStart(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        own = {name: p.detach().clone() for name, p in module.named_parameters()}
        super().__init__(module, compute_dtype)
        for name, kept in module.named_parameters():
            kept.data.copy_(_piece(own[name]) if own[name].dim() > 1 else own[name])


@wrong("8.4", names="buffers-forgotten")
class KeepsItsOwnBuffers(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        own = {name: buffer.clone() for name, buffer in module.named_buffers()}
        super().__init__(module, compute_dtype)
        for name, buffer in module.named_buffers():
            buffer.copy_(own[name])


@wrong("8.4", names="not-full")
class GivesFlatParameters(MiniFSDP):
    def full_parameters(self):
        return {name: whole.flatten() for name, whole in super().full_parameters().items()}


@wrong("8.4", names="rank-0-alone")
class GathersOnRank0(MiniFSDP):
    def full_parameters(self):
        return super().full_parameters() if dist.get_rank() == 0 else {}


class _OtherShard(MiniFSDP):
    """Keeps something else than its shard; what it holds is right all the same."""

    def other(self, whole, rank, ranks):
        raise NotImplementedError

    def _weight(self, parameter):
        weight = super()._weight(parameter)
        if weight.sharded:
            kept = self.other(parameter.detach(), dist.get_rank(), dist.get_world_size())
            weight.kept = nn.Parameter(kept, parameter.requires_grad)
        return weight

    def full_parameters(self):
        return self.at_first

    def __init__(self, module, compute_dtype=None):
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.__dict__["at_first"] = {n: p.detach().clone() for n, p in module.named_parameters()}
        super().__init__(module, compute_dtype)


@wrong("8.4", names="nothing-sharded")
class KeepsTheMatrices(_OtherShard):
    def other(self, whole, rank, ranks):
        return whole.clone()


@wrong("8.4", names="a-view")
class KeepsAView(_OtherShard):
    def other(self, whole, rank, ranks):
        return whole.flatten().view(ranks, -1)[rank]


@wrong("8.4", names="wrong-shard")
class DealsTheElementsOut(_OtherShard):
    def other(self, whole, rank, ranks):
        return whole.flatten()[rank::ranks].clone()


@wrong("8.4", names="names-changed")
class RenamesTheShards(_OtherShard):
    def other(self, whole, rank, ranks):
        return _piece(whole)

    def __init__(self, module, compute_dtype=None):
        super().__init__(module, compute_dtype)
        for layer in module.modules():
            if "weight" in layer._parameters:
                layer._parameters["weight_shard"] = layer._parameters.pop("weight")


@wrong("8.4", names="vectors-sharded")
class ShardsVectors(_OtherShard):
    def other(self, whole, rank, ranks):
        return _piece(whole).clone()

    def __init__(self, module, compute_dtype=None):
        super().__init__(module, compute_dtype)
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                if self.shapes and name == "bias":
                    layer.register_parameter(name, nn.Parameter(_piece(parameter.detach()).clone()))


class _FirstTry(nn.Module):
    """What the first ten minutes give: shards in the parameters' places, cut as they should be."""

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                if parameter.dim() > 1:
                    kept = nn.Parameter(self.piece(parameter.detach()))
                    kept.whole_shape = parameter.shape
                    setattr(layer, name, kept)
        self.set_hooks()

    def piece(self, tensor):
        return _piece(tensor).clone()

    def set_hooks(self):
        pass

    def whole(self, kept):
        pieces = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, kept.detach())
        return torch.cat(pieces)[: kept.whole_shape.numel()].view(kept.whole_shape)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def full_parameters(self):
        named = self.module.named_parameters()
        return {
            n: self.whole(p) if hasattr(p, "whole_shape") else p.detach().clone() for n, p in named
        }


@wrong("8.4", names="shard-in-forward")
class GathersNothing(_FirstTry):
    pass


@wrong("8.4", names="wrong-shard")
class CutsRows(_FirstTry):
    """As `fully_shard` does."""

    def piece(self, tensor):
        return tensor.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def whole(self, kept):
        pieces = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, kept.detach())
        return torch.cat(pieces)


class _SwapsData(_FirstTry):
    """Lets one parameter be the shard at one time and the whole at another."""

    def set_hooks(self):
        for layer in self.module.modules():
            own = [p for p in layer.parameters(recurse=False) if hasattr(p, "whole_shape")]
            if own:
                layer.register_forward_pre_hook(lambda *_, own=own: self.gather(own))
                layer.register_forward_hook(lambda *_, own=own: self.free(own))
                layer.register_full_backward_pre_hook(lambda *_, own=own: self.gather(own))

    def gather(self, own):
        for kept in own:
            kept.shard = kept.data
            kept.data = self.whole(kept)

    def free(self, own):
        for kept in own:
            kept.data = kept.shard


@wrong("8.4", names="whole-in-parameter")
class StaysWholeAfterBackward(_SwapsData):
    pass


@wrong("8.4", names="gradient-not-there")
class ReducesInAFullBackwardHook(_SwapsData):
    def set_hooks(self):
        super().set_hooks()
        for layer in self.module.modules():
            own = [p for p in layer.parameters(recurse=False) if hasattr(p, "whole_shape")]
            if own:
                layer.register_full_backward_hook(lambda *_, own=own: self.reduce(own))

    def reduce(self, own):
        self.free(own)
        for kept in own:
            dist.all_reduce(kept.grad)
            kept.grad = _piece(kept.grad) / dist.get_world_size()


@wrong("8.4", names="accumulated-wrong")
class LetsAutogradAdd(_SwapsData):
    """Right for one backward pass: a second one adds a whole gradient to a shard's."""

    def set_hooks(self):
        super().set_hooks()
        for kept in self.module.parameters():
            if hasattr(kept, "whole_shape"):
                kept.register_post_accumulate_grad_hook(self.ready)

    def ready(self, kept):
        gradient, kept.grad = kept.grad, None
        self.free([kept])
        pieces = _all_pieces(gradient)
        kept.grad = torch.empty_like(kept)
        dist.reduce_scatter(kept.grad, pieces)
        kept.grad /= dist.get_world_size()

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if not hasattr(parameter, "whole_shape"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def _all_pieces(tensor):
    n = dist.get_world_size()
    flat = nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n))
    return list(flat.chunk(n))


class _FullyShards(nn.Module):
    """PyTorch's own, which keeps DTensors."""

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.prepare(module)
        self.module = fully_shard(module)

    def prepare(self, module):
        pass

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        pass

    def full_parameters(self):
        return {name: p.full_tensor() for name, p in self.module.named_parameters()}


@wrong("8.4", names="no-broadcast")
class ForgetsThatFullyShardKeepsTheStart(_FullyShards):
    pass


@wrong("8.4", names="dtensor")
class HandsOverToFullyShard(_FullyShards):
    def prepare(self, module):
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


@wrong("8.4", names="names-changed")
class WrapsWithDDP(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module = nn.parallel.DistributedDataParallel(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        pass

    def full_parameters(self):
        return {name: p.detach() for name, p in self.module.module.named_parameters()}


class _Reducing(MiniFSDP):
    """A right answer whose reduction each wrong one below writes in another way."""

    def _gradient_ready(self, weight, whole):
        self.release(weight)
        gradient, whole.grad = self.prepared(whole.grad, weight), None
        if weight.sharded:
            self.make_room()
            work, total = self.reduce(weight, gradient)
        else:
            work, total = self.reduce_vector(gradient)
        self.pending.append((work, weight.kept, total))

    def release(self, weight):
        self._free([weight])

    def prepared(self, gradient, weight):
        return gradient.to(weight.kept.dtype)

    def make_room(self):
        self._finish_reductions()

    def reduce(self, weight, gradient):
        pieces = weight.layout.shards(weight.layout.flatten([gradient]))
        total = torch.empty_like(pieces[0])
        return dist.reduce_scatter(total, pieces, group=self.reductions, async_op=True), total

    def reduce_vector(self, gradient):
        return dist.all_reduce(gradient, group=self.reductions, async_op=True), gradient

    def _finish_reductions(self):
        for work, kept, total in self.pending:
            self.wait(work)
            self.take(kept, self.averaged(total).to(kept.dtype))
        self.pending.clear()

    def wait(self, work):
        if work is not None:
            work.wait()

    def averaged(self, total):
        return total / dist.get_world_size()

    def take(self, kept, mean):
        kept.grad = mean if kept.grad is None else kept.grad + mean


@wrong("8.4", names="not-waited")
class WaitsForNoReduction(_Reducing):
    def wait(self, work):
        pass


@wrong("8.4", names="sum-not-mean")
class AddsOnly(_Reducing):
    def averaged(self, total):
        return total


@wrong("8.4", names="divided-twice")
class DividesBeforeAndAfter(_Reducing):
    def averaged(self, total):
        return total / dist.get_world_size() ** 2


@wrong("8.4", names="own-gradient")
class KeepsItsOwnPiece(_Reducing):
    def reduce(self, weight, gradient):
        return None, _piece(gradient) * dist.get_world_size()

    def reduce_vector(self, gradient):
        return None, gradient * dist.get_world_size()


@wrong("8.4", names="vectors-local")
class ForgetsTheVectors(_Reducing):
    def reduce_vector(self, gradient):
        return None, gradient * dist.get_world_size()


@wrong("8.4", names="all-reduced")
class AllReducesAndCuts(_Reducing):
    def reduce(self, weight, gradient):
        flat = weight.layout.flatten([gradient])
        work = dist.all_reduce(flat, group=self.reductions, async_op=True)
        return work, weight.layout.shards(flat)[dist.get_rank()]


@wrong("8.4", names="accumulated-lost")
class ReplacesTheGradient(_Reducing):
    def take(self, kept, mean):
        kept.grad = mean


@wrong("8.4", names="accumulated-wrong")
class AveragesThePasses(_Reducing):
    def take(self, kept, mean):
        before = kept.grad is not None and bool(kept.grad.any())
        kept.grad = (kept.grad + mean) / 2 if before else mean


@wrong("8.4", names="summed-in-half")
class AddsBeforeItCasts(_Reducing):
    def prepared(self, gradient, weight):
        return gradient


@wrong("8.4", names="backward-blocks")
class ReducesInBackward(_Reducing):
    def reduce(self, weight, gradient):
        pieces = weight.layout.shards(weight.layout.flatten([gradient]))
        total = torch.empty_like(pieces[0])
        dist.reduce_scatter(total, pieces, group=self.reductions)
        return None, total


@wrong("8.4", names="reductions-pile-up")
class FinishesAtTheEnd(_Reducing):
    def make_room(self):
        pass


@wrong("8.4", names="kept-in-backward")
class FreesAtTheEnd(_Reducing):
    def release(self, weight):
        pass

    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls[: index + 1], index, gradients)


@wrong("8.4", names="kept-in-backward")
class NeverFreesFrozenOnes(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls[: index + 1], index, gradients)


@wrong("8.4", names="kept-afterwards")
class FreesTheFollowingOnly(_Reducing):
    """The first layer's matrix stays until its next forward."""

    def release(self, weight):
        pass

    def _before_forward(self, own, layer, inputs, keywords):
        self._free(own.weights.values())
        return super()._before_forward(own, layer, inputs, keywords)

    def finish_gradient_synchronization(self):
        self._finish_reductions()
        self.calls = []


@wrong("8.4", names="wrong-output")
class ForgetsTheVectorsValues(MiniFSDP):
    def _start_gather(self, weights):
        weights = list(weights)
        super()._start_gather(weights)
        for weight in weights:
            if not weight.sharded:
                weight.flat.zero_()


@wrong("8.4", names="first-step-only")
class GathersOnce(MiniFSDP):
    def _free(self, weights):
        pass


@wrong("8.4", names="kept-after-forward")
class KeepsForBackward(MiniFSDP):
    """Takes the whole matrix away from the layer only; autograd has it still."""

    def _after_forward(self, own, layer, inputs, output):
        vars(self)["_free"] = lambda weights: None
        super()._after_forward(own, layer, inputs, output)
        del vars(self)["_free"]


@wrong("8.4", names="all-at-once")
class GathersAllForBackward(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        if index == len(calls) - 1:
            for weights, _ in reversed(calls):
                self._start_gather(weights)
        super()._prepare_backward(calls, index, gradients)


@wrong("8.4", names="gathered-again")
class GathersTwiceForBackward(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls, index, gradients)
        self._free(calls[index][0])
        self._start_gather(calls[index][0])
        self._wait(calls[index][0])


@wrong("8.4", names="gathered-again")
class FreesWhatItHasPrefetched(MiniFSDP):
    """Where a tied matrix is used by the calls before and after, it has just been gathered."""

    def _prepare_backward(self, calls, index, gradients):
        for weights, _ in calls[index + 2 : index + 3]:
            self._free(weights)
        super()._prepare_backward(calls, index, gradients)


@wrong("8.4", names="whole-stays-in-layer")
class LeavesTheWholeInTheLayer(MiniFSDP):
    def _after_forward(self, own, layer, inputs, output):
        super()._after_forward(own, layer, inputs, output)
        for name, weight in own.weights.items():
            vars(layer)[name] = weight.whole


@wrong("8.4", names="no-prefetch")
class GathersWhenBackwardArrives(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls[index:], 0, gradients)


@wrong("8.4", names="remainder-lost")
class ForgetsTheLastElements(MiniFSDP):
    """As if a shard had elements // n elements: right wherever the sizes divide."""

    def _weight(self, parameter):
        rest = parameter.numel() % dist.get_world_size()
        if parameter.dim() > 1 and rest:
            parameter.data.flatten()[-rest:] = 0.0
        return super()._weight(parameter)


@wrong("8.4", names="frozen")
class TrainsEverything(MiniFSDP):
    def _weight(self, parameter):
        return super()._weight(parameter.requires_grad_())


@wrong("8.4", names="unused")
class FillsInZeros(MiniFSDP):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for kept in self.module.parameters():
            if kept.grad is None and kept.requires_grad:
                kept.grad = torch.zeros_like(kept)


@wrong("8.4", names="unused")
class ExpectsEveryGradient(MiniFSDP):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for kept in self.module.parameters():
            if kept.requires_grad:
                kept.grad = kept.grad.contiguous()


@wrong("8.4", names="tied")
class WalksOverTheLayers(MiniFSDP):
    """Makes a shard for each place of a parameter."""

    def __init__(self, module, compute_dtype=None):
        seen = set()
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                if parameter in seen:
                    layer.register_parameter(name, nn.Parameter(parameter.detach().clone()))
                seen.add(parameter)
        super().__init__(module, compute_dtype)


@wrong("8.4", names="outer-layer")
class KnowsLeavesOnly(MiniFSDP):
    """An outer layer's matrices are freed as soon as the first layer inside it is done."""

    def _after_forward(self, own, layer, inputs, output):
        super()._after_forward(own, layer, inputs, output)
        for outer in self.module.modules():
            if "mix" in vars(outer):
                vars(outer)["mix"] = torch.zeros_like(vars(outer)["mix"])


@wrong("8.4", names="view-output")
class HooksTheOutputOnly(MiniFSDP):
    def _after_forward(self, own, layer, inputs, output):
        for name in own.weights:
            del vars(layer)[name]
        self._free(own.weights.values())
        if output.requires_grad:
            prepare = partial(self._prepare_backward, self.calls, len(self.calls))
            self.calls.append((own.weights.values(), own.started))
            output.grad_fn.register_prehook(prepare)


@wrong("8.4", names="without-gradients")
class HooksEveryOutput(MiniFSDP):
    def _after_forward(self, own, layer, inputs, output):
        output.grad_fn.register_prehook(lambda gradients: None)
        super()._after_forward(own, layer, inputs, output)


@wrong("8.4", names="gathered-in-float32")
class CastsAfterTheGather(MiniFSDP):
    def _start_gather(self, weights):
        for weight in weights:
            if weight.flat.untyped_storage().nbytes() > 0:
                continue
            weight.flat.untyped_storage().resize_(weight.bytes)
            if weight.sharded:
                kept = weight.kept.detach()
                pieces = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, kept, group=self.gathers)
                weight.flat.copy_(torch.cat(pieces))
            else:
                weight.whole.data.copy_(weight.kept)


@wrong("8.4", names="master-cast")
class CastsTheModule(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        super().__init__(
            module if compute_dtype is None else module.to(compute_dtype), compute_dtype
        )


@wrong("8.4", names="dtypes-mixed")
class LeavesTheInputs(MiniFSDP):
    def _cast(self, value):
        return value


@wrong("8.4", names="double-lost")
class KeepsShardsInFloat32(MiniFSDP):
    def _weight(self, parameter):
        weight = super()._weight(parameter)
        weight.kept.data = weight.kept.data.float()
        return weight


@wrong("8.4", names="one-communicator")
class HasOneGroup(MiniFSDP):
    def _start_gather(self, weights):
        self.gathers = self.reductions
        super()._start_gather(weights)


@wrong("8.4", names="backward-blocks")
class WaitsForEachReduction(MiniFSDP):
    def _gradient_ready(self, weight, whole):
        super()._gradient_ready(weight, whole)
        self._finish_reductions()


@right("8.4")
class SumsInDoublePrecision(MiniFSDP):
    """As many elements, and sums that are rounded once."""

    def _gradient_ready(self, weight, whole):
        self._free([weight])
        gradient, whole.grad = whole.grad.double(), None
        self._finish_reductions()
        total = gradient
        if weight.sharded:
            pieces = weight.layout.shards(weight.layout.flatten([gradient]))
            total = torch.empty_like(pieces[0])
            work = dist.reduce_scatter(total, pieces, group=self.reductions, async_op=True)
        else:
            work = dist.all_reduce(total, group=self.reductions, async_op=True)
        self.pending.append((work, weight.kept, total))

    def _finish_reductions(self):
        for work, _, _ in self.pending:
            work.wait()
        self.pending = [(work, kept, total.to(kept.dtype)) for work, kept, total in self.pending]
        super()._finish_reductions()


@wrong("8.4", names="shapes-of-shards")
class TellsTheShapesOfShards(MiniFSDP):
    @property
    def shapes(self):
        return {name: p.shape for name, p in self.module.named_parameters()}

    @shapes.setter
    def shapes(self, whole):
        pass


@wrong("8.4", names="integers-cast")
class CastsEveryTensor(MiniFSDP):
    def _cast(self, value):
        return (
            value.to(self.compute_dtype) if self.compute_dtype and torch.is_tensor(value) else value
        )


@wrong("8.4", names="dtypes-mixed")
class CastsNoKeywords(MiniFSDP):
    def _before_forward(self, own, layer, inputs, keywords):
        inputs, _ = super()._before_forward(own, layer, inputs, keywords)
        return inputs, keywords


@wrong("8.4", names="full-aliased")
class HandsOutItsVectors(MiniFSDP):
    def full_parameters(self):
        full, own = super().full_parameters(), dict(self.module.named_parameters())
        return {n: own[n].detach() if p.dim() == 1 else p for n, p in full.items()}
