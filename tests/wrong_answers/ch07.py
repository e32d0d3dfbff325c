"""Plausible wrong answers, and other right ones, to the exercises of chapter 07.

The wrong answers to 7.3 and 7.4 are right ones with one thing written wrongly.
"""

import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import mse_loss

from course_utils.checks import load_code
from course_utils.hardware import device
from tests.wrong_answers import right, wrong

SumBackward = load_code(7, "SumBackward")
SumForward = load_code(7, "SumForward")

# ---- 7.1 groups_of -------------------------------------------------------------------------------

NAMES = "data", "pipeline", "tensor"


def _lines(dp, pp, tp, slowest_first=NAMES):
    """The groups where ranks are numbered in this order of the dimensions."""
    size = dict(zip(NAMES, (dp, pp, tp)))
    grid = torch.arange(dp * pp * tp).reshape([size[name] for name in slowest_first])
    return {
        name: grid.movedim(slowest_first.index(name), -1).reshape(-1, size[name]).tolist()
        for name in NAMES
    }


@right("7.1")
def lays_out_a_tensor(dp, pp, tp):
    return _lines(dp, pp, tp)


@right("7.1")
def loops_over_coordinates(dp, pp, tp):
    return {
        "data": [list(range(i, dp * pp * tp, pp * tp)) for i in range(pp * tp)],
        "pipeline": [
            [(d * pp + p) * tp + t for p in range(pp)] for d in range(dp) for t in range(tp)
        ],
        "tensor": [list(range(i * tp, i * tp + tp)) for i in range(dp * pp)],
    }


@wrong("7.1", names="not-a-dict")
def returns_three_lists(dp, pp, tp):
    return list(_lines(dp, pp, tp).values())


@wrong("7.1", names="keys")
def abbreviates_the_names(dp, pp, tp):
    return dict(zip(("dp", "pp", "tp"), _lines(dp, pp, tp).values()))


@wrong("7.1", names="not-lists")
def gives_the_groups_of_one_rank(dp, pp, tp):
    grid = torch.arange(dp * pp * tp).view(dp, pp, tp)
    lines = grid[:, 0, 0], grid[0, :, 0], grid[0, 0]
    return {name: line.tolist() for name, line in zip(NAMES, lines)}


@wrong("7.1", names="not-lists")
def collects_sets(dp, pp, tp):
    return {name: [set(line) for line in lines] for name, lines in _lines(dp, pp, tp).items()}


@wrong("7.1", names="names-swapped")
def swaps_data_and_tensor(dp, pp, tp):
    lines = _lines(dp, pp, tp)
    return {"data": lines["tensor"], "pipeline": lines["pipeline"], "tensor": lines["data"]}


@wrong("7.1", names="order-of-dimensions")
def lets_pipeline_change_slowest(dp, pp, tp):
    return _lines(dp, pp, tp, ("pipeline", "data", "tensor"))


@wrong("7.1", names="consecutive-everywhere")
def cuts_runs(dp, pp, tp):
    ranks = torch.arange(dp * pp * tp)
    return {n: ranks.reshape(-1, size).tolist() for n, size in zip(NAMES, (dp, pp, tp))}


@wrong("7.1", names="same-coordinate")
def collects_equal_coordinates(dp, pp, tp):
    grid = torch.arange(dp * pp * tp).reshape(dp, pp, tp)
    return {
        name: [part.flatten().tolist() for part in grid.unbind(dim)]
        for dim, name in enumerate(NAMES)
    }


@wrong("7.1", names="one-group")
def gives_rank_0s_groups(dp, pp, tp):
    return {name: groups[:1] for name, groups in _lines(dp, pp, tp).items()}


@wrong("7.1", names="size-one-left-out")
def leaves_lonely_ranks_out(dp, pp, tp):
    lines = _lines(dp, pp, tp)
    return {name: [g for g in groups if len(g) > 1] for name, groups in lines.items()}


@wrong("7.1", names="not-a-partition")
def strides_by_its_own_size(dp, pp, tp):
    """Right where the sizes are equal."""
    firsts = [d * pp * tp + t for d in range(dp) for t in range(tp)]
    return _lines(dp, pp, tp) | {
        "pipeline": [[first + p * pp for p in range(pp)] for first in firsts]
    }


@wrong("7.1", names="not-a-partition")
def lists_a_group_for_each_rank(dp, pp, tp):
    lines = _lines(dp, pp, tp)
    ranks = range(dp * pp * tp)
    return {name: [next(g for g in lines[name] if r in g) for r in ranks] for name in NAMES}


@wrong("7.1", names="not-a-partition")
def finds_partners_by_flipping_a_bit(dp, pp, tp):
    """Right for two ranks in each dimension, as in the chapter's picture."""
    strides = {"data": pp * tp, "pipeline": tp, "tensor": 1}
    ranks = range(dp * pp * tp)
    return {
        name: [[r, r ^ stride] for r in ranks if not r & stride] for name, stride in strides.items()
    }


@wrong("7.1", names="not-lists")
def keeps_rows_of_tensors(dp, pp, tp):
    grid = torch.arange(dp * pp * tp).reshape(dp, pp, tp)
    return {name: list(grid.movedim(dim, -1).flatten(0, 1)) for dim, name in enumerate(NAMES)}


@wrong("7.1", names="order-of-groups")
def starts_at_the_end(dp, pp, tp):
    return {name: groups[::-1] for name, groups in _lines(dp, pp, tp).items()}


@wrong("7.1", names="not-whole-numbers")
def halves_with_a_slash(dp, pp, tp):
    groups = _lines(dp, pp, tp)
    return groups | {"data": [[rank / 1 for rank in group] for group in groups["data"]]}


# ---- 7.2 RankGrid --------------------------------------------------------------------------------


class _Grid:
    """A right answer with one thing wrong in each subclass."""

    def __init__(self, dp, pp, tp):
        self.dp, self.pp, self.tp = dp, pp, tp

    def refuse(self, fits):
        if not fits:
            raise ValueError("outside the grid")

    def split(self, rank):
        return rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    def coordinates(self, rank):
        self.refuse(0 <= rank < self.dp * self.pp * self.tp)
        return self.split(rank)

    def rank(self, d, p, t):
        self.refuse(0 <= d < self.dp and 0 <= p < self.pp and 0 <= t < self.tp)
        return self.number(d, p, t)

    def number(self, d, p, t):
        return d * self.pp * self.tp + p * self.tp + t


@right("7.2")
class LooksUp:
    def __init__(self, dp, pp, tp):
        self.places = list(itertools.product(range(dp), range(pp), range(tp)))

    def coordinates(self, rank):
        if rank not in range(len(self.places)):
            raise ValueError(f"no rank {rank}")
        return self.places[rank]

    def rank(self, d, p, t):
        return self.places.index((d, p, t))


@right("7.2")
class DividesTwice(_Grid):
    def split(self, rank):
        rest, t = divmod(rank, self.tp)
        return *divmod(rest, self.pp), t


@wrong("7.2", names="other-order")
class LetsDataChangeFastest(_Grid):
    def split(self, rank):
        return rank % self.dp, rank // self.dp % self.pp, rank // (self.dp * self.pp)


@wrong("7.2", names="reversed")
class GivesTheFastestFirst(_Grid):
    def split(self, rank):
        return super().split(rank)[::-1]


@wrong("7.2", names="fractions")
class DividesWithASlash(_Grid):
    def split(self, rank):
        return rank / (self.pp * self.tp), rank / self.tp % self.pp, rank % self.tp


@wrong("7.2", names="remainder-missing")
class ForgetsARemainder(_Grid):
    def split(self, rank):
        return rank // (self.pp * self.tp), rank // self.tp, rank % self.tp


@wrong("7.2", names="another-grid")
class KeepsSizesInTheClass(_Grid):
    def __init__(self, dp, pp, tp):
        KeepsSizesInTheClass.dp, KeepsSizesInTheClass.pp, KeepsSizesInTheClass.tp = dp, pp, tp


_known = {}


@wrong("7.2", names="another-grid")
class RemembersForAllGrids(_Grid):
    def split(self, rank):
        return _known.setdefault(rank, super().split(rank))


@wrong("7.2", names="wrong-stride")
class DividesByThePipeline(_Grid):
    def split(self, rank):
        return rank // (self.pp * self.tp), rank // self.pp % self.pp, rank % self.tp


@wrong("7.2", names="back-is-wrong")
class AddsUpWithWrongStrides(_Grid):
    def number(self, d, p, t):
        return d * self.dp * self.pp + p * self.pp + t


@wrong("7.2", names="refuses-what-is-inside")
class CountsRanksFromOne(_Grid):
    def coordinates(self, rank):
        self.refuse(0 < rank <= self.dp * self.pp * self.tp)
        return self.split(rank)


@wrong("7.2", names="no-error")
class WrapsAround(_Grid):
    def refuse(self, fits):
        pass


@wrong("7.2", names="negative")
class ComparesWithTheSizeOnly(_Grid):
    def coordinates(self, rank):
        self.refuse(rank < self.dp * self.pp * self.tp)
        return self.split(rank)


@wrong("7.2", names="other-error")
class Asserts(_Grid):
    def refuse(self, fits):
        assert fits


# ---- 7.3 train_2d_step ---------------------------------------------------------------------------


def _group(mesh, *names):
    """The group of one dimension, or the default group, of all ranks, for several."""
    return mesh.get_group(names[0]) if len(names) == 1 else dist.group.WORLD


def _own_block(mesh):
    return mesh.get_local_rank("data"), mesh.get_group("data").size()


def _average(gradients, mesh, names=("data",), divisor=None):
    group = _group(mesh, *names)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient /= divisor or group.size()


def _average_all(part, mesh):
    _average([p.grad for p in part.parameters() if p.grad is not None], mesh)


def _forward(part, x, mesh):
    tensor = mesh.get_group("tensor")
    hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
    return SumForward.apply(part.down(hidden), tensor) + part.bias


def _mean_loss(loss, mesh):
    loss = loss.detach().clone()
    _average([loss], mesh)
    return loss.item()


def _train_2d(
    part,
    read_inputs,
    read_targets,
    mesh,
    optimizer,
    *,
    block=_own_block,
    forward=_forward,
    average=_average_all,
    mean_loss=_mean_loss,
):
    """A right answer, of which each wrong one replaces a part."""
    x, targets = read_inputs(*block(mesh)), read_targets(*block(mesh))
    optimizer.zero_grad()
    loss = mse_loss(forward(part, x, mesh), targets)
    loss.backward()
    average(part, mesh)
    optimizer.step()
    return mean_loss(loss, mesh)


@right("7.3")
def averages_one_flat_buffer(part, read_inputs, read_targets, mesh, optimizer):
    def average(part, mesh):
        gradients = [p.grad for p in part.parameters() if p.requires_grad]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        _average([flat], mesh)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(mean.view_as(gradient))

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=average)


@right("7.3")
def averages_replicated_parameters_over_all(part, read_inputs, read_targets, mesh, optimizer):
    """The ranks of a tensor group have the same gradients of these: the mean is the same."""

    def average(part, mesh):
        copies = [p.grad for p in (part.scale, part.bias) if p.grad is not None]
        shards = [*part.up.parameters(), *part.down.parameters()]
        _average(copies, mesh, ("data", "tensor"))
        _average([p.grad for p in shards if p.grad is not None], mesh)

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=average)


@right("7.3")
def sums_the_scales_gradient_itself(part, read_inputs, read_targets, mesh, optimizer):
    """Nothing comes before `scale` here, so its gradient can be summed after backward."""
    tensor = mesh.get_group("tensor")

    def forward(part, x, mesh):
        own = part.down(part.up(part.scale * x).relu())
        others = own.detach().clone()
        dist.all_reduce(others, group=tensor)
        return own + (others - own.detach()) + part.bias

    def average(part, mesh):
        if part.scale.grad is not None:
            dist.all_reduce(part.scale.grad, group=tensor)
        _average_all(part, mesh)

    return _train_2d(
        part, read_inputs, read_targets, mesh, optimizer, forward=forward, average=average
    )


@right("7.3")
def averages_while_the_loss_travels(part, read_inputs, read_targets, mesh, optimizer):
    """Starts all sums, waits for them before the step, and for the loss after it."""
    data = mesh.get_group("data")
    started = []

    def average(part, mesh):
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        works = [dist.all_reduce(g, group=data, async_op=True) for g in gradients]
        for work, gradient in zip(works, gradients):
            work.wait()
            gradient /= data.size()

    def forward(part, x, mesh):
        y = _forward(part, x, mesh)
        loss = mse_loss(y.detach(), read_targets(*_own_block(mesh)))
        started.append((loss, dist.all_reduce(loss, group=data, async_op=True)))
        return y

    def mean_loss(_, mesh):
        loss, work = started.pop()
        work.wait()
        return loss.item() / data.size()

    return _train_2d(
        part,
        read_inputs,
        read_targets,
        mesh,
        optimizer,
        forward=forward,
        average=average,
        mean_loss=mean_loss,
    )


@right("7.3")
def lets_functional_collectives_wait(*given):
    """They wait where the result is used, and no `Work` is seen."""

    def average(part, mesh):
        data = mesh.get_group("data")
        for parameter in part.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(functional.all_reduce(parameter.grad, "avg", data))

    return _train_2d(*given, average=average)


def _averaging_asynchronously(mesh, gradients):
    data = mesh.get_group("data")
    for gradient in gradients:
        gradient /= data.size()
    return [dist.all_reduce(g, group=data, async_op=True) for g in gradients]


@wrong("7.3", names="not-waited")
def waits_for_no_gradient(*given):
    def average(part, mesh):
        _averaging_asynchronously(mesh, [p.grad for p in part.parameters()])

    return _train_2d(*given, average=average)


@wrong("7.3", names="not-waited")
def waits_for_gradients_after_the_step(*given):
    works = []

    def average(part, mesh):
        works.extend(_averaging_asynchronously(mesh, [p.grad for p in part.parameters()]))

    def mean_loss(loss, mesh):
        for work in works:
            work.wait()
        return _mean_loss(loss, mesh)

    return _train_2d(*given, average=average, mean_loss=mean_loss)


@wrong("7.3", names="not-stepped")
def forgets_the_step(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*_own_block(mesh)), read_targets(*_own_block(mesh))
    loss = mse_loss(_forward(part, x, mesh), targets)
    loss.backward()
    _average_all(part, mesh)
    return _mean_loss(loss, mesh)


@wrong("7.3", names="whole-batch")
def reads_everything(*given):
    return _train_2d(*given, block=lambda mesh: (0, 1))


@wrong("7.3", names="batch-by-rank")
def reads_by_its_rank(*given):
    return _train_2d(*given, block=lambda mesh: (dist.get_rank(), dist.get_world_size()))


@wrong("7.3", names="batch-by-tensor")
def reads_by_its_tensor_coordinate(*given):
    return _train_2d(
        *given, block=lambda mesh: (mesh.get_local_rank("tensor"), mesh.get_group("tensor").size())
    )


@wrong("7.3", names="other-rows")
def reads_block_0(*given):
    return _train_2d(*given, block=lambda mesh: (0, mesh.get_group("data").size()))


@wrong("7.3", names="partial-output")
def leaves_terms_of_the_sum(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        return part.down(part.up(SumBackward.apply(part.scale * x, tensor)).relu()) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="partial-output")
def treats_the_part_as_the_model(*given):
    def forward(part, x, mesh):
        return part.down(part.up(part.scale * x).relu()) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="bias-per-rank")
def adds_the_bias_before_the_sum(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
        return SumForward.apply(part.down(hidden) + part.bias, tensor)

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="mean-not-sum")
def averages_the_partial_outputs(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
        return SumForward.apply(part.down(hidden), tensor) / tensor.size() + part.bias

    return _train_2d(*given, forward=forward)


def _without_sum_backward(part, x, mesh):
    hidden = part.up(part.scale * x).relu()
    return SumForward.apply(part.down(hidden), mesh.get_group("tensor")) + part.bias


@wrong("7.3", names="input-gradient-partial")
def forgets_the_replicated_scale(*given):
    return _train_2d(*given, forward=_without_sum_backward)


@wrong("7.3", names="input-gradient-partial")
def averages_over_all_what_is_partial(*given):
    """The mean over all ranks of partial gradients is too small by the size of the tensor group."""

    def average(part, mesh):
        _average_all(part, mesh)
        _average([part.scale.grad], mesh, ("tensor",))

    return _train_2d(*given, forward=_without_sum_backward, average=average)


class SumTwice(torch.autograd.Function):
    """As the all-reduce of torch.distributed.nn: its backward is an all-reduce too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


@wrong("7.3", names="summed-again")
def sums_in_backward_too(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
        return SumTwice.apply(part.down(hidden), tensor) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="summed-again")
def sums_replicated_gradients_again(*given):
    def average(part, mesh):
        _average_all(part, mesh)
        _average([part.scale.grad, part.bias.grad], mesh, ("tensor",), divisor=1)

    return _train_2d(*given, average=average)


def _in_groups(forward_names, backward_names):
    def forward(part, x, mesh):
        scaled = SumBackward.apply(part.scale * x, _group(mesh, *backward_names))
        partial = part.down(part.up(scaled).relu())
        return SumForward.apply(partial, _group(mesh, *forward_names)) + part.bias

    return forward


@wrong("7.3", names="pair-swapped")
def sums_where_it_enters(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumForward.apply(part.scale * x, tensor)).relu()
        return SumBackward.apply(part.down(hidden), tensor) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="sum-over-other-ranks")
def sums_over_all_ranks(*given):
    both = ("data", "tensor")
    return _train_2d(*given, forward=_in_groups(both, both))


@wrong("7.3", names="sum-over-other-ranks")
def sums_backward_over_the_data_group(*given):
    return _train_2d(*given, forward=_in_groups(("tensor",), ("data",)))


@wrong("7.3", names="not-averaged")
def keeps_its_own_gradients(*given):
    return _train_2d(*given, average=lambda part, mesh: None)


@wrong("7.3", names="not-averaged")
def averages_on_the_first_of_each_team(*given):
    def average(part, mesh):
        if mesh.get_local_rank("tensor") == 0:
            _average_all(part, mesh)

    return _train_2d(*given, average=average)


@wrong("7.3", names="not-averaged")
def averages_after_the_step(part, read_inputs, read_targets, mesh, optimizer):
    def nothing(part, mesh):
        pass

    loss = _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=nothing)
    _average_all(part, mesh)
    return loss


def _averaging(names, divisor=None):
    def average(part, mesh):
        _average([p.grad for p in part.parameters()], mesh, names, divisor)

    return average


@wrong("7.3", names="sum-not-mean")
def sums_the_gradients(*given):
    return _train_2d(*given, average=_averaging(("data",), divisor=1))


@wrong("7.3", names="divided-twice")
def averages_a_share_of_the_loss(part, read_inputs, read_targets, mesh, optimizer):
    dp = mesh.get_group("data").size()
    return _train_2d(
        part,
        read_inputs,
        read_targets,
        mesh,
        optimizer,
        average=_averaging(("data",), divisor=dp * dp),
    )


@wrong("7.3", names="divided-by-world")
def divides_by_all_ranks(part, read_inputs, read_targets, mesh, optimizer):
    average = _averaging(("data",), divisor=dist.get_world_size())
    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, average=average)


@wrong("7.3", names="average-over-all")
def averages_over_all_ranks(*given):
    return _train_2d(*given, average=_averaging(("data", "tensor")))


@wrong("7.3", names="average-over-another")
def averages_over_the_tensor_group(*given):
    return _train_2d(*given, average=_averaging(("tensor",)))


def _average_replicated_only(part, mesh):
    _average([part.scale.grad, part.bias.grad], mesh)


def _average_shards_only(part, mesh):
    _average([p.grad for p in (*part.up.parameters(), *part.down.parameters())], mesh)


def _average_parameters(part, mesh):
    _average([p.data for p in part.parameters()], mesh)


@wrong("7.3", names="sharded-not-averaged")
def averages_replicated_parameters_only(*given):
    return _train_2d(*given, average=_average_replicated_only)


@wrong("7.3", names="replicated-not-averaged")
def averages_shards_only(*given):
    return _train_2d(*given, average=_average_shards_only)


@wrong("7.3", names="parameters-averaged")
def averages_parameters_after_the_step(part, read_inputs, read_targets, mesh, optimizer):
    """Equal with plain SGD, and with momentum; not with Adam."""
    loss = _train_2d(
        part, read_inputs, read_targets, mesh, optimizer, average=lambda part, mesh: None
    )
    _average_parameters(part, mesh)
    return loss


@wrong("7.3", names="divided-by-another")
def divides_by_two(*given):
    return _train_2d(*given, average=_averaging(("data",), divisor=2))


@wrong("7.3", names="not-stepped")
def clears_before_the_step(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*_own_block(mesh)), read_targets(*_own_block(mesh))
    loss = mse_loss(_forward(part, x, mesh), targets)
    loss.backward()
    _average_all(part, mesh)
    optimizer.zero_grad()
    optimizer.step()
    return _mean_loss(loss, mesh)


@wrong("7.3", names="other-model")
def forgets_the_relu(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(part.scale * x, tensor))
        return SumForward.apply(part.down(hidden), tensor) + part.bias

    return _train_2d(*given, forward=forward)


@wrong("7.3", names="other-model")
def forgets_the_bias(*given):
    return _train_2d(*given, forward=lambda part, x, mesh: _forward(part, x, mesh) - part.bias)


@wrong("7.3", names="group-rank")
def broadcasts_the_loss_from_rank_0(*given):
    def mean_loss(loss, mesh):
        loss = loss.detach().clone()
        _average([loss], mesh)
        dist.broadcast(loss, src=0, group=mesh.get_group("tensor"))
        return loss.item()

    return _train_2d(*given, mean_loss=mean_loss)


@wrong("7.3", names="loss-local")
def returns_its_own_loss(*given):
    return _train_2d(*given, mean_loss=lambda loss, mesh: loss.item())


@wrong("7.3", names="loss-not-mean")
def returns_the_sum_of_losses(*given):
    def summed(loss, mesh):
        loss = loss.detach().clone()
        _average([loss], mesh, divisor=1)
        return loss.item()

    return _train_2d(*given, mean_loss=summed)


@wrong("7.3", names="old-gradients")
def never_clears_gradients(part, read_inputs, read_targets, mesh, optimizer):
    x, targets = read_inputs(*_own_block(mesh)), read_targets(*_own_block(mesh))
    loss = mse_loss(_forward(part, x, mesh), targets)
    loss.backward()
    _average_all(part, mesh)
    optimizer.step()
    return _mean_loss(loss, mesh)


@wrong("7.3", names="frozen")
def expects_gradients_everywhere(*given):
    return _train_2d(*given, average=_averaging(("data",)))


def _with_zeros_for_none(part, mesh):
    for parameter in part.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _average_all(part, mesh)


@wrong("7.3", names="frozen")
def makes_up_zeros(*given):
    return _train_2d(*given, average=_with_zeros_for_none)


@wrong("7.3", names="frozen")
def clears_what_learns(part, read_inputs, read_targets, mesh, optimizer):
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    return never_clears_gradients(part, read_inputs, read_targets, mesh, optimizer)


@wrong("7.3", names="by-arithmetic")
def computes_its_coordinate(part, read_inputs, read_targets, mesh, optimizer):
    def block(mesh):
        tp = mesh.get_group("tensor").size()
        return dist.get_rank() // tp, mesh.get_group("data").size()

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, block=block)


@wrong("7.3", names="by-arithmetic")
def takes_dimensions_by_position(part, read_inputs, read_targets, mesh, optimizer):
    def block(mesh):
        return mesh.get_coordinate()[0], mesh.shape[0]

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, block=block)


@wrong("7.3", names="not-every-rank")
def averages_the_loss_on_rank_0(*given):
    def mean_loss(loss, mesh):
        loss = loss.detach().clone()
        if dist.get_rank() == 0:
            dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return _train_2d(*given, mean_loss=mean_loss)


@wrong("7.3", names="loss-on-some")
def reduces_the_loss_to_one_rank(part, read_inputs, read_targets, mesh, optimizer):
    def mean_loss(loss, mesh):
        loss, data = loss.detach().clone(), mesh.get_group("data")
        dist.reduce(loss, group=data, group_dst=0)
        return loss.item() / data.size()

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, mean_loss=mean_loss)


# ---- 7.4 train_3d_step ---------------------------------------------------------------------------


def _send(tensor, mesh, stage):
    dist.send(tensor, group=mesh.get_group("pipeline"), group_dst=stage)


def _receive(tensor, mesh, stage):
    dist.recv(tensor, group=mesh.get_group("pipeline"), group_src=stage)


def _received_input(shape, mesh, stage, receive):
    x = torch.empty(shape, device=device())
    receive(x, mesh, stage - 1)
    return x.requires_grad_()


def _last_stages_loss(loss, mesh):
    """Average over the data group, then tell the other stages; they bring a zero."""
    pipeline = mesh.get_group("pipeline")
    _average([loss], mesh)
    dist.broadcast(loss, group=pipeline, group_src=pipeline.size() - 1)
    return loss.item()


def _train_3d(
    part,
    read_inputs,
    read_targets,
    shape,
    mesh,
    optimizer,
    *,
    block=_own_block,
    forward=_forward,
    take_input=_received_input,
    send=_send,
    receive=_receive,
    sends_back=True,
    average=_average_all,
    mean_loss=_last_stages_loss,
):
    """A right answer, of which each wrong one replaces a part."""
    stage, last = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline").size() - 1
    loss = torch.zeros((), device=device())
    optimizer.zero_grad()
    x = read_inputs(*block(mesh)) if stage == 0 else take_input(shape, mesh, stage, receive)
    y = forward(part, x, mesh)
    if stage < last:
        send(y.detach(), mesh, stage + 1)
        if sends_back:
            gradient = torch.empty_like(y)
            receive(gradient, mesh, stage + 1)
            y.backward(gradient)
    else:
        own = mse_loss(y, read_targets(*block(mesh)))
        own.backward()
        loss += own.detach()
    if stage > 0 and sends_back:
        send(x.grad, mesh, stage - 1)
    average(part, mesh)
    optimizer.step()
    return mean_loss(loss, mesh)


def _zeros_of_others_summed(loss, mesh):
    """Only the last stages bring a loss: as many as there are ranks in data and tensor."""
    dist.all_reduce(loss)
    return loss.item() / (mesh.get_group("data").size() * mesh.get_group("tensor").size())


@right("7.4")
def sends_by_global_ranks(*given):
    """Asynchronously, and with one all-reduce over all ranks for the loss."""

    def peer(mesh, stage):
        return dist.get_global_rank(mesh.get_group("pipeline"), stage)

    return _train_3d(
        *given,
        send=lambda tensor, mesh, stage: dist.isend(tensor, dst=peer(mesh, stage)).wait(),
        receive=lambda tensor, mesh, stage: dist.irecv(tensor, src=peer(mesh, stage)).wait(),
        mean_loss=_zeros_of_others_summed,
    )


@right("7.4")
def lets_autograd_multiply(part, read_inputs, read_targets, shape, mesh, optimizer):
    """Backward starts from the sum of output times gradient."""
    pipeline, stage = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    x, slope = torch.empty(shape, device=device()), torch.empty(shape, device=device())
    if stage > 0:
        _receive(x, mesh, stage - 1)
    else:
        x.copy_(read_inputs(*_own_block(mesh)))
    x.requires_grad_()
    y = _forward(part, x, mesh)
    loss, is_last = torch.zeros((), device=device()), stage == pipeline.size() - 1
    if is_last:
        loss = mse_loss(y, read_targets(*_own_block(mesh)))
    else:
        _send(y.detach(), mesh, stage + 1)
        _receive(slope, mesh, stage + 1)
    optimizer.zero_grad()
    (loss if is_last else (y * slope).sum()).backward()
    if stage > 0:
        _send(x.grad, mesh, stage - 1)
    _average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(loss.detach(), mesh)


@wrong("7.4", names="not-waited")
def sends_and_forgets(*given):
    def send(tensor, mesh, stage):
        dist.isend(tensor, group=mesh.get_group("pipeline"), group_dst=stage)

    return _train_3d(*given, send=send)


@wrong("7.4", names="not-waited")
def computes_with_what_may_arrive(*given):
    def receive(tensor, mesh, stage):
        dist.irecv(tensor, group=mesh.get_group("pipeline"), group_src=stage)

    return _train_3d(*given, receive=receive)


@wrong("7.4", names="not-waited")
def waits_after_computing(*given):
    """What was received is right in nearly every run, because it has come by then."""
    works = []

    def receive(tensor, mesh, stage):
        works.append(dist.irecv(tensor, group=mesh.get_group("pipeline"), group_src=stage))

    def average(part, mesh):
        for work in works:
            work.wait()
        _average_all(part, mesh)

    return _train_3d(*given, receive=receive, average=average)


@wrong("7.4", names="not-waited")
def steps_while_gradients_travel(*given):
    def average(part, mesh):
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        _averaging_asynchronously(mesh, gradients)

    return _train_3d(*given, average=average)


@wrong("7.4", names="not-stepped")
def steps_nothing(part, read_inputs, read_targets, shape, mesh, optimizer):
    idle = torch.optim.SGD(part.parameters(), lr=0.0)
    return _train_3d(part, read_inputs, read_targets, shape, mesh, idle)


@wrong("7.4", names="whole-batch")
def every_pipeline_reads_everything(part, read_inputs, read_targets, shape, mesh, optimizer):
    everything = shape[0] * mesh.get_group("data").size(), shape[1]
    return _train_3d(
        part, read_inputs, read_targets, everything, mesh, optimizer, block=lambda mesh: (0, 1)
    )


@wrong("7.4", names="other-rows")
def every_rank_reads_its_own(*given):
    return _train_3d(*given, block=lambda mesh: (dist.get_rank(), dist.get_world_size()))


@wrong("7.4", names="partial-output")
def sends_terms_of_the_sum(*given):
    def forward(part, x, mesh):
        scaled = SumBackward.apply(part.scale * x, mesh.get_group("tensor"))
        return part.down(part.up(scaled).relu()) + part.bias

    return _train_3d(*given, forward=forward)


@wrong("7.4", names="bias-per-rank")
def adds_the_bias_on_every_rank(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        scaled = SumBackward.apply(part.scale * x, tensor)
        return SumForward.apply(part.down(part.up(scaled).relu()) + part.bias, tensor)

    return _train_3d(*given, forward=forward)


@wrong("7.4", names="mean-not-sum")
def averages_the_outputs(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        scaled = SumBackward.apply(part.scale * x, tensor)
        partial = part.down(part.up(scaled).relu())
        return SumForward.apply(partial, tensor) / tensor.size() + part.bias

    return _train_3d(*given, forward=forward)


@wrong("7.4", names="input-gradient-partial")
def sends_back_a_part_of_the_gradient(*given):
    return _train_3d(*given, forward=_without_sum_backward)


@wrong("7.4", names="summed-again")
def sums_output_gradients(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        scaled = SumBackward.apply(part.scale * x, tensor)
        return SumTwice.apply(part.down(part.up(scaled).relu()), tensor) + part.bias

    return _train_3d(*given, forward=forward)


@wrong("7.4", names="sum-waits")
def sums_over_everyone(*given):
    def forward(part, x, mesh):
        hidden = part.up(SumBackward.apply(part.scale * x, dist.group.WORLD)).relu()
        return SumForward.apply(part.down(hidden), dist.group.WORLD) + part.bias

    return _train_3d(*given, forward=forward)


@wrong("7.4", names="not-averaged")
def trains_each_pipeline_alone(*given):
    return _train_3d(*given, average=lambda part, mesh: None)


@wrong("7.4", names="sum-not-mean")
def adds_the_pipelines_gradients(*given):
    return _train_3d(*given, average=_averaging(("data",), divisor=1))


@wrong("7.4", names="divided-twice")
def divides_the_mean_again(*given):
    def average(part, mesh):
        _average_all(part, mesh)
        for parameter in part.parameters():
            parameter.grad /= mesh.get_group("data").size()

    return _train_3d(*given, average=average)


@wrong("7.4", names="divided-by-world")
def divides_by_the_world_size(*given):
    def average(part, mesh):
        _averaging(("data",), divisor=dist.get_world_size())(part, mesh)

    return _train_3d(*given, average=average)


@wrong("7.4", names="average-over-all")
def averages_in_the_default_group(*given):
    """As DistributedDataParallel would without its argument `process_group`."""
    return _train_3d(*given, average=_averaging(NAMES))


@wrong("7.4", names="average-over-another")
def averages_along_the_pipeline(*given):
    return _train_3d(*given, average=_averaging(("pipeline",)))


@wrong("7.4", names="sharded-not-averaged")
def averages_what_is_replicated(*given):
    return _train_3d(*given, average=_average_replicated_only)


@wrong("7.4", names="replicated-not-averaged")
def averages_what_is_cut(*given):
    return _train_3d(*given, average=_average_shards_only)


@wrong("7.4", names="parameters-averaged")
def averages_parts_after_the_step(part, read_inputs, read_targets, shape, mesh, optimizer):
    def nothing(part, mesh):
        pass

    loss = _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer, average=nothing)
    _average_parameters(part, mesh)
    return loss


@wrong("7.4", names="divided-by-another")
def divides_by_the_stages(*given):
    def average(part, mesh):
        _averaging(("data",), divisor=mesh.get_group("pipeline").size())(part, mesh)

    return _train_3d(*given, average=average)


@wrong("7.4", names="other-model")
def forgets_to_scale(*given):
    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(SumBackward.apply(x, tensor)).relu()
        return SumForward.apply(part.down(hidden), tensor) + part.bias

    return _train_3d(*given, forward=forward)


@wrong("7.4", names="wrong-neighbour")
def sends_to_the_next_rank(*given):
    """The next rank is the next stage only where nothing is cut."""

    def beside(mesh, stage):
        return dist.get_rank() + stage - mesh.get_local_rank("pipeline")

    return _train_3d(
        *given,
        send=lambda tensor, mesh, stage: dist.send(tensor, dst=beside(mesh, stage)),
        receive=lambda tensor, mesh, stage: dist.recv(tensor, src=beside(mesh, stage)),
    )


@wrong("7.4", names="group-rank")
def takes_a_stage_for_a_rank(*given):
    return _train_3d(
        *given,
        send=lambda x, mesh, stage: dist.send(x, dst=stage, group=mesh.get_group("pipeline")),
        receive=lambda x, mesh, stage: dist.recv(x, src=stage, group=mesh.get_group("pipeline")),
    )


@wrong("7.4", names="group-rank")
def takes_a_rank_for_a_stage(*given):
    def peer(mesh, stage):
        return dist.get_global_rank(mesh.get_group("pipeline"), stage)

    return _train_3d(
        *given,
        send=lambda x, mesh, stage: _send(x, mesh, peer(mesh, stage)),
        receive=lambda x, mesh, stage: _receive(x, mesh, peer(mesh, stage)),
    )


@wrong("7.4", names="group-rank")
def sends_gradients_on(*given):
    """They go to the stage behind, too, and the last one has none."""

    def send(x, mesh, stage):
        _send(x, mesh, mesh.get_local_rank("pipeline") + 1)

    return _train_3d(*given, send=send)


@wrong("7.4", names="group-rank")
def broadcasts_from_a_stage(*given):
    def mean_loss(loss, mesh):
        pipeline = mesh.get_group("pipeline")
        _average([loss], mesh)
        dist.broadcast(loss, src=pipeline.size() - 1, group=pipeline)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="graph-cut")
def asks_for_no_gradient(*given):
    def take_input(shape, mesh, stage, receive):
        return _received_input(shape, mesh, stage, receive).detach()

    return _train_3d(*given, take_input=take_input)


@wrong("7.4", names="no-gradient-given")
def goes_backward_without_a_gradient(part, read_inputs, read_targets, shape, mesh, optimizer):
    pipeline, stage = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    optimizer.zero_grad()
    if stage == 0:
        x = read_inputs(*_own_block(mesh))
    else:
        x = _received_input(shape, mesh, stage, _receive)
    y = _forward(part, x, mesh)
    if stage < pipeline.size() - 1:
        _send(y.detach(), mesh, stage + 1)
    else:
        y = mse_loss(y, read_targets(*_own_block(mesh)))
    y.backward()
    _average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(y.detach(), mesh)


@wrong("7.4", names="not-sent-back")
def goes_backward_in_the_last_stage(*given):
    return _train_3d(
        *given,
        sends_back=False,
        average=lambda part, mesh: _average(
            [p.grad for p in part.parameters() if p.grad is not None], mesh
        ),
    )


@wrong("7.4", names="never-sent")
def forgets_to_send_back(*given):
    """The stage before waits for its gradient."""

    def send(tensor, mesh, stage):
        if stage > mesh.get_local_rank("pipeline"):
            _send(tensor, mesh, stage)

    return _train_3d(*given, send=send)


@wrong("7.4", names="first-waits")
def receives_first_on_every_rank(part, read_inputs, read_targets, shape, mesh, optimizer):
    stages = mesh.get_group("pipeline").size()
    before = (mesh.get_local_rank("pipeline") - 1) % stages
    _receive(torch.empty(shape, device=device()), mesh, before)
    return _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer)


@wrong("7.4", names="first-waits")
def waits_for_the_gradient_first(*given):
    def send(x, mesh, stage):
        if stage > mesh.get_local_rank("pipeline"):
            _receive(torch.empty_like(x), mesh, stage)
        _send(x, mesh, stage)

    return _train_3d(*given, send=send)


@wrong("7.4", names="not-every-rank")
def averages_the_loss_on_last_stages(*given):
    def mean_loss(loss, mesh):
        pipeline = mesh.get_group("pipeline")
        if mesh.get_local_rank("pipeline") == pipeline.size() - 1:
            dist.all_reduce(loss)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="every-stage-reads")
def reads_everywhere(part, read_inputs, read_targets, *more):
    block = _own_block(more[1])
    inputs, targets = read_inputs(*block), read_targets(*block)
    return _train_3d(part, lambda *_: inputs, lambda *_: targets, *more)


@wrong("7.4", names="loss-on-last-only")
def knows_a_loss_in_the_last_stage(*given):
    def mean_loss(loss, mesh):
        pipeline = mesh.get_group("pipeline")
        _average([loss], mesh)
        if mesh.get_local_rank("pipeline") == pipeline.size() - 1:
            mean_loss = loss
        return mean_loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="loss-on-last-only")
def keeps_the_loss_in_the_last_stage(*given):
    def mean_loss(loss, mesh):
        _average([loss], mesh)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="loss-on-last-only")
def tells_the_first_stages_zero(*given):
    def mean_loss(loss, mesh):
        _average([loss], mesh)
        dist.broadcast(loss, group=mesh.get_group("pipeline"), group_src=0)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="loss-local")
def tells_its_pipelines_loss(*given):
    def mean_loss(loss, mesh):
        pipeline = mesh.get_group("pipeline")
        dist.broadcast(loss, group=pipeline, group_src=pipeline.size() - 1)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="loss-not-mean")
def averages_the_loss_over_all(*given):
    """The zeros of the other stages are in the mean."""

    def mean_loss(loss, mesh):
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="single-stage")
def is_first_or_last(part, read_inputs, read_targets, shape, mesh, optimizer):
    """A stage is the first one, and otherwise a later one."""
    if mesh.get_local_rank("pipeline") > 0:
        return _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer)
    optimizer.zero_grad()
    y = _forward(part, read_inputs(*_own_block(mesh)), mesh)
    _send(y.detach(), mesh, 1)
    gradient = torch.empty_like(y)
    _receive(gradient, mesh, 1)
    y.backward(gradient)
    _average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(torch.zeros((), device=device()), mesh)


@wrong("7.4", names="middle-stage")
def knows_two_stages(part, read_inputs, read_targets, shape, mesh, optimizer):
    """A stage that is not the first one is the last one."""
    stage, pipeline = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    if stage == 0 or pipeline.size() == 1:
        return _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer)
    optimizer.zero_grad()
    x = _received_input(shape, mesh, stage, _receive)
    loss = mse_loss(_forward(part, x, mesh), read_targets(*_own_block(mesh)))
    loss.backward()
    _send(x.grad, mesh, stage - 1)
    _average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(loss.detach(), mesh)


@wrong("7.4", names="old-gradients")
def adds_to_old_gradients(part, read_inputs, read_targets, shape, mesh, optimizer):
    class NeverClears:
        def zero_grad(self):
            pass

        def step(self):
            optimizer.step()

    return _train_3d(part, read_inputs, read_targets, shape, mesh, NeverClears())


@wrong("7.4", names="frozen")
def expects_every_gradient(*given):
    return _train_3d(*given, average=_averaging(("data",)))


@wrong("7.4", names="frozen")
def makes_up_zeros_in_every_stage(*given):
    return _train_3d(*given, average=_with_zeros_for_none)


@wrong("7.4", names="by-arithmetic")
def computes_its_block(*given):
    def block(mesh):
        pp, tp = mesh.get_group("pipeline").size(), mesh.get_group("tensor").size()
        return dist.get_rank() // (pp * tp), mesh.get_group("data").size()

    return _train_3d(*given, block=block)


@wrong("7.4", names="input-gradient-partial")
def scales_inside_the_cut_region(*given):
    """The input's gradient is whole, and that of `scale` is not."""

    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(part.scale * SumBackward.apply(x, tensor)).relu()
        return SumForward.apply(part.down(hidden), tensor) + part.bias

    return _train_3d(*given, forward=forward)


@wrong("7.4", names="begins-with-ones")
def goes_backward_from_the_sum_of_its_output(*given):
    def receive(tensor, mesh, stage):
        _receive(tensor, mesh, stage)
        if stage > mesh.get_local_rank("pipeline"):
            tensor.fill_(1.0)

    return _train_3d(*given, receive=receive)


@wrong("7.4", names="scaled-on-the-way")
def divides_what_goes_back_by_the_tensor_group(*given):
    def send(tensor, mesh, stage):
        goes_back = stage < mesh.get_local_rank("pipeline")
        _send(tensor / (mesh.get_group("tensor").size() if goes_back else 1), mesh, stage)

    return _train_3d(*given, send=send)


@wrong("7.4", names="loss-not-mean")
def sums_the_loss_over_the_tensor_group_too(*given):
    def mean_loss(loss, mesh):
        dist.all_reduce(loss)
        return loss.item() / mesh.get_group("data").size()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="other-loss")
def sums_the_loss_over_columns(part, read_inputs, read_targets, shape, mesh, optimizer):
    """As `reduction="sum"` by the number of rows."""

    def average(part, mesh):
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        _average([gradient.mul_(shape[1]) for gradient in gradients], mesh)

    return _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer, average=average)


# ---- 7.5 cheapest_placement ----------------------------------------------------------------------


def _inside(stride, size, ranks, per_machine):
    """Whether every group with this stride and size lies in one machine."""
    firsts = [r for r in range(ranks) if r // stride % size == 0]
    apart = stride * (size - 1)
    return all(first // per_machine == (first + apart) // per_machine for first in firsts)


def _times(order, sizes, sent, per_machine, rates, inside=_inside):
    """Each dimension's seconds, from the last to the first."""
    stride, ranks, times = 1, math.prod(sizes.values()), []
    for name in reversed(order):
        if sizes[name] > 1:
            fits = inside(stride, sizes[name], ranks, per_machine)
            times.append(sent[name] / rates[0 if fits else 1])
        stride *= sizes[name]
    return times


def _best(sizes, sent, per_machine, fast, slow, pick=min, total=sum, **changes):
    costs = {
        order: total(_times(order, sizes, sent, per_machine, (fast, slow), **changes))
        for order in itertools.permutations(sizes)
    }
    order = pick(costs, key=costs.get)
    return order, costs[order]


@right("7.5")
def builds_from_the_inside_out(sizes, sent, per_machine, inside, between):
    """Recursively: which dimension comes last, then which before it."""

    def search(left, stride):
        if not left:
            return (), 0.0
        found = []
        for name in left:
            fits = _inside(stride, sizes[name], math.prod(sizes.values()), per_machine)
            own = sent[name] / (inside if fits else between) if sizes[name] > 1 else 0.0
            before, seconds = search([n for n in left if n != name], stride * sizes[name])
            found.append(((*before, name), seconds + own))
        return min(found, key=lambda one: one[1])

    return search(list(sizes), 1)


@right("7.5")
def takes_the_last_of_equals(sizes, sent, per_machine, inside, between):
    backwards = dict(reversed(sizes.items()))
    return _best(backwards, sent, per_machine, inside, between)


@wrong("7.5", names="not-a-pair")
def returns_the_order_alone(*given):
    return _best(*given)[0]


@wrong("7.5", names="not-an-order")
def returns_the_last_dimension(*given):
    order, seconds = _best(*given)
    return order[-1:], seconds


@wrong("7.5", names="reversed")
def returns_the_fastest_first(*given):
    order, seconds = _best(*given)
    return order[::-1], seconds


@wrong("7.5", names="most-expensive")
def takes_the_largest(*given):
    return _best(*given, pick=max)


@wrong("7.5", names="rates-swapped")
def swaps_the_rates(sizes, sent, per_machine, inside, between):
    return _best(sizes, sent, per_machine, between, inside)


@wrong("7.5", names="stride-ignored")
def compares_sizes_with_the_machine(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: size <= room)


@wrong("7.5", names="last-only")
def keeps_one_dimension_inside(*given):
    def inside(stride, size, ranks, room):
        return stride == 1 and _inside(stride, size, ranks, room)

    return _best(*given, inside=inside)


@wrong("7.5", names="most-bytes-last")
def sorts_by_bytes(sizes, sent, per_machine, inside, between):
    order = tuple(sorted(sizes, key=sent.get))
    return order, sum(_times(order, sizes, sent, per_machine, (inside, between)))


@wrong("7.5", names="most-bytes-last")
def fills_the_machine_greedily(sizes, sent, per_machine, inside, between):
    """What does not fit is put beside the others all the same."""
    order, room, seconds = (), per_machine, 0.0
    for name in sorted(sizes, key=sent.get, reverse=True):
        fits = sizes[name] <= room
        room = room // sizes[name] if fits else room
        order = (name, *order)
        seconds += sent[name] / (inside if fits else between)
    return order, seconds


@wrong("7.5", names="straddles")
def compares_products_with_the_machine(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: stride * size <= room)


@wrong("7.5", names="straddles")
def looks_at_rank_0s_group(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: stride * (size - 1) < room)


@wrong("7.5", names="divisors-only")
def wants_sizes_that_divide(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: room % (stride * size) == 0)


@wrong("7.5", names="slowest-only")
def takes_the_slowest_dimension(*given):
    return _best(*given, total=lambda times: max([0.0, *times]))


@wrong("7.5", names="size-one")
def charges_for_a_dimension_of_one(sizes, sent, per_machine, inside, between):
    order, seconds = _best(sizes, sent, per_machine, inside, between)
    alone = sum(sent[name] for name in sizes if sizes[name] == 1)
    return order, seconds + alone / inside


@wrong("7.5", names="first-order")
def keeps_the_order_given(sizes, sent, per_machine, inside, between):
    order = tuple(sizes)
    return order, sum(_times(order, sizes, sent, per_machine, (inside, between)))


@wrong("7.5", names="other-seconds")
def leaves_the_last_dimension_out(sizes, sent, per_machine, inside, between):
    order, seconds = _best(sizes, sent, per_machine, inside, between)
    return order, seconds - sent[order[-1]] / inside


@wrong("7.5", names="not-cheapest")
def tries_rotations_only(sizes, sent, per_machine, inside, between):
    names = tuple(sizes)
    costs = {}
    for i in range(len(names)):
        order = names[i:] + names[:i]
        costs[order] = sum(_times(order, sizes, sent, per_machine, (inside, between)))
    order = min(costs, key=costs.get)
    return order, costs[order]


@wrong("7.5", names="neither")
def strides_from_the_first_dimension(sizes, sent, per_machine, inside, between):
    """Counts the first of the order as the one that changes fastest, and adds everything up."""
    costs = {
        order: sum(_times(order[::-1], sizes, sent, per_machine, (inside, between)))
        + sum(sent.values()) / between
        for order in itertools.permutations(sizes)
    }
    order = min(costs, key=costs.get)
    return order, costs[order]


@wrong("7.5", names="inputs-changed")
def takes_names_away(sizes, sent, per_machine, inside, between):
    result = _best(sizes, sent, per_machine, inside, between)
    sizes.clear()
    return result
