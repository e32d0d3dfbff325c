"""The steps in which the text of a long exercise leads to its answer, and what the check says to each.

A step is an answer of its own; which lines of the check hold for it is what the text's table promises.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_exercises.authoring import load_answer
from course_exercises.checks import examine

MiniFSDP, FlatLayout = load_answer("8.4"), load_answer("8.3")


class PerParameter(nn.Module):
    """3.4, step 1: a broadcast, and at the end one all-reduce for each parameter."""

    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.module, self.synchronize = module, True
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.learning = [p for p in reversed([*module.parameters()]) if p.requires_grad]

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self):
        for parameter in self.learning:
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)

    @contextlib.contextmanager
    def no_sync(self):
        self.synchronize = False
        try:
            yield
        finally:
            self.synchronize = True


class Flat(PerParameter):
    """3.4, step 2: all gradients in one vector, one all-reduce."""

    def finish_gradient_synchronization(self):
        used = [p for p in self.learning if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in used]) / dist.get_world_size()
        dist.all_reduce(flat)
        for parameter, mean in zip(used, flat.split([p.numel() for p in used])):
            parameter.grad = mean.view_as(parameter)


class Asynchronous(PerParameter):
    """3.4, step 3: a hook for each parameter starts its all-reduce, and nobody waits before the end."""

    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__(module, bucket_bytes)
        self.works = []
        for parameter in self.learning:
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        if self.synchronize:
            parameter.grad /= dist.get_world_size()
            self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish_gradient_synchronization(self):
        for work in self.works:
            work.wait()
        self.works.clear()


class Shards(nn.Module):
    """8.4, step 1: what a rank keeps, and how it becomes whole again. It cannot compute."""

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.layouts = module, {}
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        for layer in module.modules():
            for name, whole in list(layer.named_parameters(recurse=False)):
                if whole.dim() > 1:
                    layout = FlatLayout([whole.shape], dist.get_world_size())
                    own = layout.shards(layout.flatten([whole.detach()]))[dist.get_rank()]
                    layer.register_parameter(name, nn.Parameter(own.clone()))
                    self.layouts[layer._parameters[name]] = layout

    def full_parameters(self):
        return {name: self.whole(kept) for name, kept in self.module.named_parameters()}

    def whole(self, kept):
        if kept not in self.layouts:
            return kept.detach().clone()
        layout = self.layouts[kept]
        flat = kept.new_empty(layout.world_size * layout.shard_size)
        dist.all_gather(layout.shards(flat), kept.detach())
        return layout.unflatten(flat)[0]


class MixedPrecision(MiniFSDP):
    """8.4, step 3: every call when it is needed, and waited for at once."""

    def _prepare_backward(self, calls, index, gradients):
        for weights, started in calls[index + 1 : index + 2]:
            if started > index:
                self._free(weights)
        self._start_gather(calls[index][0])
        self._wait(calls[index][0])

    def _gradient_ready(self, weight, whole):
        super()._gradient_ready(weight, whole)
        self._finish_reductions()


class GatherAndFree(MixedPrecision):
    """8.4, step 2: the same, and all in float32."""

    def __init__(self, module, compute_dtype=None):
        super().__init__(module)


LAST = ["gradients travel", "within no_sync", "only some"]
FAIL = {
    PerParameter: ["all-reduces start", "backward does not wait", *LAST],
    Flat: ["all-reduces start", "backward does not wait", *LAST],
    Asynchronous: LAST,
    GatherAndFree: ["compute_dtype", "compute_dtype", "the next gather"],
    MixedPrecision: ["the next gather"],
}


@pytest.mark.parametrize("step", FAIL, ids=lambda step: step.__name__)
def test_a_step_holds_what_the_text_says(step):
    exercise = "3.4" if issubclass(step, PerParameter) else "8.4"
    lines = examine(exercise, step, seed="7").lines
    failed = [line.requirement for line in lines if not line.ok]
    assert len(failed) == len(FAIL[step]), failed
    assert all(part in line for part, line in zip(FAIL[step], failed)), failed


def test_shards_alone_hold_the_first_lines():
    lines = examine("8.4", Shards, seed="7").lines
    first = next(number for number, line in enumerate(lines) if not line.ok)
    assert lines[first].requirement == "two ranks compute and learn as one process does"
