"""Chapter 10: every rank has some of the tokens of every sequence.

Attention itself is a job, a module whose parameters are queries, keys and values: dQ, dK and dV are
then gradients like any other.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import Job, Trained, mistake, sgd, technique, trained

ATTENTION, LANGUAGE = ("attention",), ("long language",)

blocks, zigzag, positions = (load_code(10, name) for name in ("blocks", "zigzag", "positions"))
ring, gathered, by_heads = (load_code(10, name) for name in ("ring", "gathered", "by_heads"))
by_both = load_code(10, "by_both")
attend, mask_for = load_code(10, "attend"), load_code(10, "mask_for")
for_part, average = load_code(10, "for_part"), load_code(10, "average")
zigzag_indices = load_answer("10.2")
ring_attention, RingAttention = load_answer("10.3"), load_answer("10.4")
heads_for_sequence = load_answer("10.5")

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- a layer of attention alone: its parameters are the queries, keys and values themselves ------


def mixed_alone(job: Job, mix: Mix, layout: Callable) -> Trained:
    """Output, dQ, dK and dV: a rank trains its own tokens, and puts all of them together."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = job.model()
    length = model.q.shape[2]
    mine = positions(layout, rank, ranks, length)
    own = {name: nn.Parameter(p.detach()[:, :, mine]) for name, p in model.named_parameters()}
    optimizer = sgd(nn.ParameterDict(own), job.momentum)
    for _, targets in job.batches:
        optimizer.zero_grad()
        out = mix(own["q"], own["k"], own["v"])
        # the mean over all numbers of the whole: every rank has 1 / ranks of them
        (job.loss(out, targets[:, :, mine].to(device())) / ranks).backward()
        optimizer.step()
    together = partial(put_together, layout=layout, length=length)
    return Trained(
        {name: together(p.detach()) for name, p in own.items()},
        {name: together(p.grad) for name, p in own.items()},
    )


def put_together(part: Tensor, layout: Callable, length: int) -> Tensor:
    """All tokens in the order of the document, from every rank's own."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    whole = torch.empty(*part.shape[:2], length, part.shape[3])
    for rank, tokens in enumerate(parts):
        whole[:, :, positions(layout, rank, len(parts), length)] = tokens.cpu()
    return whole


@technique([1, 2, 4], ATTENTION)
def ring_by_hand(rank: int, job: Job) -> Trained:
    return mixed_alone(job, partial(ring, layout=zigzag), zigzag)


@technique([2, 4], ATTENTION)
def ring_in_blocks(rank: int, job: Job) -> Trained:
    return mixed_alone(job, partial(ring, layout=blocks), blocks)


@technique([2, 4], ATTENTION)
def gathered_keys(rank: int, job: Job) -> Trained:
    return mixed_alone(job, partial(gathered, layout=zigzag), zigzag)


@technique([2, 4], ATTENTION)
def swapped_heads(rank: int, job: Job) -> Trained:
    return mixed_alone(job, partial(by_heads, layout=zigzag), zigzag)


# ---- a language model ----------------------------------------------------------------------------


def train_cut(
    job: Job,
    mix: Mix,
    data: int = 1,
    layout: Callable = zigzag,
    prepare: Callable = for_part,
    targets_of: Callable = lambda tokens, targets, mine: targets[:, mine],
    finish: Callable = lambda mesh, gradients: average(*gradients),
) -> Trained:
    """Trains on this rank's rows and tokens, as section 4 of the chapter does."""
    context = dist.get_world_size() // data
    shape, names = (data, context), ("data", "context")
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=names)
    row, place = mesh.get_coordinate()
    length = job.batches[0][0].shape[1]
    mine = positions(layout, place, context, length)
    model = prepare(job.model(), mine, partial(mix, group=mesh.get_group("context")))
    optimizer = sgd(model, job.momentum)
    for inputs, targets in job.batches:
        tokens, wanted = inputs.chunk(data)[row], targets.chunk(data)[row]
        wanted = targets_of(tokens, wanted, mine)
        optimizer.zero_grad()
        job.loss(model(tokens[:, mine].to(device())), wanted.to(device())).backward()
        finish(mesh, [p.grad for p in model.parameters()])
        optimizer.step()
    return trained(model)


@technique([1, 2, 4], LANGUAGE)
def context_parallel_ring(rank: int, job: Job) -> Trained:
    return train_cut(job, partial(ring, layout=zigzag))


@technique([2], LANGUAGE)
def context_parallel_ring_in_blocks(rank: int, job: Job) -> Trained:
    return train_cut(job, partial(ring, layout=blocks), layout=blocks)


@technique([4], LANGUAGE)
def context_parallel_gathered(rank: int, job: Job) -> Trained:
    return train_cut(job, partial(gathered, layout=zigzag))


@technique([4], LANGUAGE)
def context_parallel_by_heads(rank: int, job: Job) -> Trained:
    return train_cut(job, partial(by_heads, layout=zigzag))


@technique([4], LANGUAGE)
def data_x_context_ring(rank: int, job: Job) -> Trained:
    return train_cut(job, partial(ring, layout=zigzag), data=2)


@technique([4], LANGUAGE)
def data_x_context_gathered(rank: int, job: Job) -> Trained:
    return train_cut(job, partial(gathered, layout=zigzag), data=2)


@technique([4], LANGUAGE)
def data_x_context_by_heads(rank: int, job: Job) -> Trained:
    return train_cut(job, partial(by_heads, layout=zigzag), data=2)


# ---- by heads inside a row of ranks, in a ring along the columns ---------------------------------

ROW = 2  # ranks that share the heads out


def mixed_by_both(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    shape, names = (dist.get_world_size() // ROW, ROW), ("ring", "heads")
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=names)
    return by_both(q, k, v, zigzag, mesh)


def zigzag_of_rows(rank: int, ranks: int) -> list[int]:
    """The chunks of a rank whose row has one place in the zig-zag, and shares its tokens out in order."""
    place, piece = divmod(rank, ROW)
    of_row = [ROW * wide + i for wide in zigzag(place, ranks // ROW) for i in range(ROW)]
    return of_row[2 * piece :][:2]


@technique([2, 4], ATTENTION)
def heads_x_ring(rank: int, job: Job) -> Trained:
    return mixed_alone(job, mixed_by_both, zigzag_of_rows)


@technique([4], LANGUAGE)
def context_parallel_heads_x_ring(rank: int, job: Job) -> Trained:
    return train_cut(job, mixed_by_both, layout=zigzag_of_rows)


# ---- the answers to the exercises, on the default group ------------------------------------------


@technique([1, 2, 4], LANGUAGE)
def context_parallel_answers(rank: int, job: Job) -> Trained:
    """10.4 in the model, and the cut of 10.2 must be the chapter's."""
    ranks, length = dist.get_world_size(), job.batches[0][0].shape[1]
    assert torch.equal(
        zigzag_indices([length], ranks, rank), positions(zigzag, rank, ranks, length)
    )
    return train_cut(job, lambda q, k, v, group: RingAttention.apply(q, k, v))


class RingWithoutBackward(torch.autograd.Function):
    """10.3 forward; backward from what the chapter has."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return ring_attention(q, k, v)

    @staticmethod
    def backward(ctx, d_out):
        q, k, v = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            ring(q, k, v, zigzag).backward(d_out)
        return q.grad, k.grad, v.grad


@technique([2, 4], ATTENTION)
def answer_forward(rank: int, job: Job) -> Trained:
    return mixed_alone(job, RingWithoutBackward.apply, zigzag)


@technique([2, 4], ATTENTION)
def answer_by_heads(rank: int, job: Job) -> Trained:
    """10.5 makes the heads of q, k and v; the way back of the outputs is the chapter's."""
    ranks, swap = dist.get_world_size(), load_code(10, "Swap")

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = heads_for_sequence(q, k, v)
        order = torch.cat([positions(blocks, r, ranks, q.shape[2]) for r in range(ranks)])
        out, _ = attend(q, k, v, mask_for(order, blocks, ranks, q.shape[2]))
        return swap.apply(out, 2, 1, None)

    return mixed_alone(job, mix, blocks)


# ---- what must be seen ---------------------------------------------------------------------------


@mistake([4], ATTENTION)
def heads_x_ring_in_a_zigzag_of_ranks(rank: int, job: Job) -> Trained:
    return mixed_alone(job, mixed_by_both, zigzag)


def ring_with(**changed) -> Callable:
    """The chapter's ring in which a function is another one."""
    altered = load_code(10, "ring")  # each call has globals of its own
    altered.__globals__.update(changed)
    return partial(altered, layout=zigzag)


def mean_of_parts(one, other):
    """Two partial results, as if each counted as much as the other."""
    return (one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1])


def whole_chunk(size: int, device: torch.device) -> Tensor:
    """A mask by chunk: a query sees all of its own chunk, also what comes later."""
    return torch.ones(size, size, dtype=torch.bool, device=device)


@mistake([2], ATTENTION)
def merged_without_rescaling(rank: int, job: Job) -> Trained:
    return mixed_alone(job, ring_with(merged=mean_of_parts), zigzag)


@mistake([2], ATTENTION)
def masked_by_chunk(rank: int, job: Job) -> Trained:
    return mixed_alone(job, ring_with(triangle=whole_chunk), zigzag)


@mistake([2, 4], ATTENTION)
def gradients_one_hop_late(rank: int, job: Job) -> Trained:
    return mixed_alone(job, ring_with(add_and_pass=load_code(10, "pass_then_add")), zigzag)


@mistake([2], LANGUAGE)
def positions_not_cut(rank: int, job: Job) -> Trained:
    """Every rank numbers its tokens from 0."""

    def prepare(model, mine, mix):
        return for_part(model, torch.arange(len(mine)), mix)

    return train_cut(job, partial(ring, layout=zigzag), prepare=prepare)


@mistake([2], LANGUAGE)
def labels_shifted_after_the_cut(rank: int, job: Job) -> Trained:
    """The next token on this rank is not always the next token of the document."""

    def targets_of(tokens, targets, mine):
        return torch.cat([tokens[:, mine[1:]], targets[:, mine[-1:]]], dim=1)

    return train_cut(job, partial(ring, layout=zigzag), targets_of=targets_of)


@mistake([4], LANGUAGE)
def averaged_over_data_only(rank: int, job: Job) -> Trained:
    """A rank's gradients have terms of its own tokens only: the context group averages, too."""

    def over_data(mesh, gradients):
        for gradient in gradients:
            dist.all_reduce(gradient, group=mesh.get_group("data"))
            gradient /= mesh["data"].size()

    return train_cut(job, partial(ring, layout=zigzag), data=2, finish=over_data)
