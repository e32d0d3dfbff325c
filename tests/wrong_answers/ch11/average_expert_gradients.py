"""Answers to 11.5, `average_expert_gradients`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong


def _is_expert(name):
    return "experts" in name.split(".")


def _average(model, mesh, expert, other=None, is_expert=_is_expert):
    """`expert` and `other` are pairs (group, divisor)."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        group, divisor = expert if is_expert(name) else other or (None, mesh.size())
        dist.all_reduce(p.grad, group=group)
        p.grad /= divisor


@right("11.5")
def divides_first(model, mesh):
    data = mesh.get_group("data")
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad / mesh.size()
            dist.all_reduce(gradient, group=data if ".experts." in f".{name}" else None)
            p.grad = gradient


@right("11.5")
def one_flat_buffer_for_each_kind(model, mesh):
    for kind, group in ((True, mesh.get_group("data")), (False, dist.group.WORLD)):
        own = [p for n, p in model.named_parameters() if _is_expert(n) is kind and p.requires_grad]
        for p in own:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten() for p in own])
        dist.all_reduce(flat, group=group)
        for p, part in zip(own, flat.split([p.numel() for p in own])):
            p.grad.copy_(part.view_as(p) / mesh.size())


@wrong("11.5", names="other-divisor")
def mean_over_the_copies(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), mesh["data"].size()))


@wrong("11.5", names="experts-over-others")
def averages_everything_over_all(model, mesh):
    _average(model, mesh, (None, mesh.size()))


@wrong("11.5", names="experts-over-others")
def wants_a_dot_in_front(model, mesh):
    """As the chapter's `is_expert`: of a name that begins with experts it takes no notice."""
    ranks = mesh.size()
    _average(model, mesh, (mesh.get_group("data"), ranks), is_expert=lambda n: ".experts." in n)


@wrong("11.5", names="others-over-a-part")
def everything_over_data(model, mesh):
    pair = mesh.get_group("data"), mesh["data"].size()
    _average(model, mesh, (pair[0], mesh.size()), pair)


@wrong("11.5", names="unchanged")
def averages_copies_of_the_gradients(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(gradient, group=mesh.get_group("data") if _is_expert(name) else None)
            gradient /= mesh.size()


@wrong("11.5", names="another-reduction")
def takes_the_largest(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            group = mesh.get_group("data") if _is_expert(name) else None
            dist.all_reduce(p.grad, op=dist.ReduceOp.MAX, group=group)


@wrong("11.5", names="by-name")
def looks_for_the_letters(model, mesh):
    pair = mesh.get_group("data"), mesh.size()
    _average(model, mesh, pair, is_expert=lambda name: "experts" in name)


@wrong("11.5", names="first-dimension")
def takes_the_first_dimension(model, mesh):
    _average(model, mesh, (mesh.get_group(0), mesh.size()))


@wrong("11.5", names="missing")
def skips_what_is_missing(model, mesh):
    for name, p in model.named_parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=mesh.get_group("data") if _is_expert(name) else None)
            p.grad /= mesh.size()


@wrong("11.5", names="zeros-for-none")
def fills_the_frozen(model, mesh):
    for name, p in model.named_parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad, group=mesh.get_group("data") if _is_expert(name) else None)
        p.grad /= mesh.size()


@wrong("11.5", names="not-waited")
def does_not_wait_for_the_sums(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            group = mesh.get_group("data") if _is_expert(name) else None
            dist.all_reduce(p.grad, group=group, async_op=True)
            p.grad /= mesh.size()


@wrong("11.5", names="other-divisor")
def divides_everything_by_the_copies(model, mesh):
    """Two ranks' terms came by dispatch already, so only the copies seem to be left to divide by."""
    _average(
        model, mesh, (mesh.get_group("data"), mesh["data"].size()), (None, mesh["data"].size())
    )
