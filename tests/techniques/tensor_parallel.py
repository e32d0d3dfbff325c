"""Chapter 6: every rank has a part of every large matrix of a language model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from course_utils.lesson.models import Attention, GroupedAttention, LanguageModel
from tests.techniques import Job, Trained, mistake, sgd, technique

JOBS = ("language",)

cut_dimension, tensor_parallel = load_code(6, "cut_dimension"), load_code(6, "tensor_parallel")
local, local_gradient = load_code(6, "local"), load_code(6, "local_gradient")
gather_tokens = load_code(6, "gather_tokens")
sum_gradients = load_code(6, "sum_gradients_of_whole_parameters")
sequence_parallel = load_code(6, "sequence_parallel")
torch_model = load_code(6, "tensor_parallel_model_with_pytorch")
torch_sequence_parallel = load_code(6, "sequence_parallel_with_pytorch")
mesh, THREE, ENTER_ONCE = load_code(6, "mesh"), load_code(6, "THREE"), load_code(6, "ENTER_ONCE")
ColumnParallelLinear, RowParallelLinear = load_answer("6.1"), load_answer("6.2")
HeadParallelAttention = load_answer("6.3")
vocabulary_parallel_cross_entropy = load_answer("6.4")
SequenceParallelNorm = load_answer("6.5")


def cut_of_blocks(name: str) -> int | None:
    """As the lesson cuts blocks by hand; all else is whole."""
    return cut_dimension(name) if "blocks" in name else None


def cut_with_head(name: str) -> int | None:
    return 0 if name == "head.weight" else cut_of_blocks(name)


def put_together(
    name: str,
    part: Tensor,
    cut: Callable[[str], int | None],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The whole parameter, or gradient, of which each rank of `group` has its part.

    `cut` tells the dimension along which a parameter is cut, None where every rank has all of it.
    """
    dim = cut(name)
    if dim is None:
        return part
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    if "qkv" not in name:
        return torch.cat(parts, dim)
    queries_keys_values = zip(*(part.chunk(3) for part in parts), strict=True)
    return torch.cat([section for sections in queries_keys_values for section in sections])


def train(
    job: Job,
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    context: Callable[[], AbstractContextManager] = nullcontext,
    finish: Callable[[], None] = lambda: None,
    cut: Callable[[str], int | None] = cut_with_head,
) -> Trained:
    """Every rank has all tokens; `loss_of` gets the logits that this rank has."""
    optimizer, named = sgd(model), list(model.named_parameters())
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        with context():
            logits = model(inputs.to(device())).flatten(0, 1)
            loss_of(logits, targets.flatten().to(device())).backward()
        finish()
        optimizer.step()
    return Trained(
        {_named(n): put_together(n, local(p.detach()), cut).cpu() for n, p in named},
        {_named(n): put_together(n, local_gradient(p), cut).cpu() for n, p in named},
    )


def _named(name: str) -> str:
    """Exercise 6.5 keeps a norm in a module of its own."""
    return name.replace("norm.norm.", "norm.")


def blocks_by_hand(model: LanguageModel) -> LanguageModel:
    for block in model.blocks:
        tensor_parallel(block)
    return model


@technique([1, 2, 3, 4], [*JOBS, "tied language"])
def tensor_parallel_by_hand(rank: int, job: Job) -> Trained:
    return train(job, blocks_by_hand(job.model()), cross_entropy, cut=cut_of_blocks)


def grouped(attention: Attention) -> GroupedAttention:
    """The same attention, as one with a head of keys for each head of queries."""
    same = GroupedAttention(attention.out.in_features, attention.heads, attention.heads)
    same.load_state_dict(attention.state_dict())
    return same.to(device())


def cut_layers(model: LanguageModel) -> LanguageModel:
    """Cuts a model with the layers of the exercises; the embeddings stay whole."""
    for block in model.blocks:
        block.attention = HeadParallelAttention(grouped(block.attention))
        block.feed_forward.up = ColumnParallelLinear(block.feed_forward.up)
        block.feed_forward.down = RowParallelLinear(block.feed_forward.down)
    model.head = ColumnParallelLinear(model.head)
    return model


@technique([2, 3, 4], JOBS)
def tensor_parallel_layers(rank: int, job: Job) -> Trained:
    return train(job, cut_layers(job.model()), vocabulary_parallel_cross_entropy)


# ---- three matrices ------------------------------------------------------------------------------

GATED = ("gated language",)


def cut_of_gates(name: str) -> int | None:
    return {"w1.weight": 0, "w3.weight": 0, "w2.weight": 1}.get(name.partition("feed_forward.")[2])


def cut_with_gates(name: str) -> int | None:
    return cut_with_head(name) if cut_of_gates(name) is None else cut_of_gates(name)


def cut_gated(model: LanguageModel) -> LanguageModel:
    """Cuts attention and the three matrices with the layers of the exercises."""
    for block in model.blocks:
        block.attention = HeadParallelAttention(grouped(block.attention))
        gated = block.feed_forward
        gated.w1, gated.w3 = ColumnParallelLinear(gated.w1), ColumnParallelLinear(gated.w3)
        gated.w2 = RowParallelLinear(gated.w2)
    model.head = ColumnParallelLinear(model.head)
    return model


@technique([2, 3, 4], GATED)
def gated_layers(rank: int, job: Job) -> Trained:
    model = cut_gated(job.model())
    return train(job, model, vocabulary_parallel_cross_entropy, cut=cut_with_gates)


def torch_gated(plan: dict, rank: int, job: Job) -> Trained:
    """By PyTorch's plan; all else is whole."""
    model = job.model()
    for block in model.blocks:
        parallelize_module(block.feed_forward, mesh(), plan)
    return train(job, model, cross_entropy, cut=cut_of_gates)


for name, plan in (("three", THREE), ("one", {"": ENTER_ONCE} | THREE)):
    technique([2, 3], GATED, f"torch_gated_{name}")(partial(torch_gated, plan))


@mistake([2], GATED)
def gate_without_sum_in_backward(rank: int, job: Job) -> Trained:
    """`w1` has its own f, and `w3` forgot it."""
    model = cut_gated(job.model())
    for block in model.blocks:
        block.feed_forward.w3.forward = partial(nn.Linear.forward, block.feed_forward.w3)
    return train(job, model, vocabulary_parallel_cross_entropy, cut=cut_with_gates)


class OwnTokens(torch.autograd.Function):
    """This rank's stretch of a sequence that all ranks have; the whole gradient on all ranks."""

    @staticmethod
    def forward(ctx, whole: Tensor) -> Tensor:
        return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gather_tokens(gradient.contiguous())


def sequence_parallel_model(model: LanguageModel, cut: Callable) -> LanguageModel:
    """The blocks and the last norm see a rank's own tokens, the embedding and the head all."""
    own_words = model.head.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: OwnTokens.apply(*inputs))
    for block in model.blocks:
        cut(block)
    model.norm = SequenceParallelNorm(model.norm)  # gathers, and sums the head's gradients
    model.head.weight = nn.Parameter(own_words.clone())
    return model


@technique([2, 3, 4], JOBS)
def sequence_parallel_by_hand(rank: int, job: Job) -> Trained:
    model = sequence_parallel_model(job.model(), sequence_parallel)
    finish = partial(sum_gradients, model.blocks)
    return train(job, model, vocabulary_parallel_cross_entropy, finish=finish)


@technique([2, 3], JOBS)
def torch_sequence_parallel_blocks(rank: int, job: Job) -> Trained:
    model = sequence_parallel_model(job.model(), torch_sequence_parallel)
    return train(job, model, vocabulary_parallel_cross_entropy)


@technique([2, 3, 4], JOBS)
def torch_parallelize_module(rank: int, job: Job) -> Trained:
    model = torch_model(job.model())
    return train(job, model, cross_entropy, context=loss_parallel, cut=cut_dimension)


@mistake([2], JOBS)
def norms_that_drift_apart(rank: int, job: Job) -> Trained:
    """Nobody adds up what each rank has found from its own tokens."""
    model = sequence_parallel_model(job.model(), sequence_parallel)
    return train(job, model, vocabulary_parallel_cross_entropy)


@mistake([2], JOBS)
def no_sum_in_backward(rank: int, job: Job) -> Trained:
    """A column cut whose input gets only this rank's share of the gradient."""
    model = cut_layers(job.model())
    for block in model.blocks:
        block.feed_forward.up.forward = partial(nn.Linear.forward, block.feed_forward.up)
    return train(job, model, vocabulary_parallel_cross_entropy)


@mistake([2], JOBS)
def bias_once_more_per_rank(rank: int, job: Job) -> Trained:
    model = blocks_by_hand(job.model())
    for block in model.blocks:
        block.feed_forward.down.forward = partial(nn.Linear.forward, block.feed_forward.down)
    return train(job, model, cross_entropy, cut=cut_of_blocks)
