"""8.2, `ShardedOptimizer`: answers written from the stub alone."""

import torch
import torch.distributed as dist


class Right(torch.optim.Optimizer):
    """A right answer, of which the wrong ones change a method."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.inner = None
        self.owners = {}
        self.owned = [0] * dist.get_world_size()
        super().__init__(params, {})
        self.inner = optimizer_cls([self.own(group) for group in self.param_groups], **kwargs)
        self.defaults = self.inner.defaults
        for own, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})
        self.state = self.inner.state

    def own(self, group):
        """The part of a group that this rank's inner optimizer gets."""
        mine = [p for p in group["params"] if self.owners[p] == dist.get_rank()]
        return {**group, "params": mine}

    def choose_owner(self, parameter):
        return self.owned.index(min(self.owned))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            owner = self.choose_owner(parameter)
            self.owners[parameter] = owner
            self.owned[owner] += parameter.numel()
        if self.inner is not None:
            self.inner.add_param_group(self.own(group))

    def copy_options(self):
        for own, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})

    def send_results(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.broadcast(parameter.data, src=self.owners[parameter])

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.copy_options()
        self.inner.state = self.state
        self.inner.step()
        self.send_results()
        return loss


class CountsParametersNotElements(Right):
    """Gives parameter i to rank i modulo n, whatever its size: the shares are unequal."""

    def choose_owner(self, parameter):
        return len(self.owners) % dist.get_world_size()


class KeepsItsResults(Right):
    """Updates what it owns, and sends nothing: half finished."""

    def send_results(self):
        pass


class SendsFromRankZero(Right):
    """Broadcasts every parameter from rank 0 instead of from its owner."""

    def send_results(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.broadcast(parameter.data, src=0)


class FlattensTheGroups(torch.optim.Optimizer):
    """Hands its inner optimizer one list of parameters: no options of groups, and it may be empty."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.owners = {}
        self.owned = [0] * dist.get_world_size()
        super().__init__(params, kwargs)
        mine = [p for p, owner in self.owners.items() if owner == dist.get_rank()]
        self.inner = optimizer_cls(mine, **kwargs)
        self.state = self.inner.state

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            owner = self.owned.index(min(self.owned))
            self.owners[parameter] = owner
            self.owned[owner] += parameter.numel()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own in self.inner.param_groups:
            own["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter.data, src=owner)
        return loss


class KeepsTheFirstLearningRate(Right):
    """Copies the options to the inner optimizer when it is made, and never again."""

    def copy_options(self):
        pass


class LoadsIntoItselfOnly(Right):
    """Shares the state with the inner optimizer at the start; a loaded one is another dict."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.copy_options()
        self.inner.step()
        self.send_results()
        return loss


class CallsTheClosureWithoutGradients(Right):
    """Calls the closure under the `no_grad` of `step`."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self.copy_options()
        self.inner.state = self.state
        self.inner.step()
        self.send_results()
        return loss


class KeepsAllStateEverywhere(Right):
    """Gives its inner optimizer every parameter: right numbers, and no memory saved."""

    def own(self, group):
        return dict(group)


class FillsItsInnerLater(Right):
    """Makes an inner optimizer without parameters, and adds the groups: some make their state first."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.inner = optimizer_cls([{"params": []}], **kwargs)
        self.inner.param_groups.clear()
        self.owners = {}
        self.owned = [0] * dist.get_world_size()
        torch.optim.Optimizer.__init__(self, params, self.inner.defaults)


ANSWERS = {
    "8.2": [
        CountsParametersNotElements,
        KeepsItsResults,
        SendsFromRankZero,
        FlattensTheGroups,
        KeepsTheFirstLearningRate,
        LoadsIntoItselfOnly,
        CallsTheClosureWithoutGradients,
        KeepsAllStateEverywhere,
        FillsItsInnerLater,
    ]
}
