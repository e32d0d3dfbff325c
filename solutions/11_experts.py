# %% [markdown]
# # 11. Experts: which rank has the specialist?

# %% tags=["nbval-ignore-output"]
import functools
import math

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from course_utils import hardware, text
from course_utils.launch import RankFailure, launch
from course_utils.models import FeedForward, LanguageModel

hardware.report()


# %%
def best_experts(logits, k):
    """The k most probable experts of each token, and their weights, which add up to 1: (T, k)."""
    best = logits.softmax(-1).topk(k)
    return best.indices, best.values / best.values.sum(-1, keepdim=True)


def run_experts(experts, pieces, chosen):
    """Sends each piece through the expert whose number it has chosen; returns their results."""
    order = chosen.argsort(stable=True)
    queues = pieces[order].split([(chosen == int(e)).sum().item() for e in experts])
    results = [expert(queue) for expert, queue in zip(experts.values(), queues)]
    return torch.cat(results)[order.argsort()]


# %%
def fits(choices, experts, capacity_factor):
    """Which pieces find a place, (T, k); tokens join the queues of their experts in their order."""
    joins = one_hot(choices.flatten(), experts)  # (T k, E)
    place = (joins.cumsum(0) * joins).sum(1) - 1  # of each piece in its queue, from 0
    return (place < capacity_factor * choices.numel() / experts).view_as(choices)


def share_of_balance(logits, everyone):
    """This rank's share of the balance loss; `everyone` are the choices of all ranks."""
    experts = logits.shape[-1]
    load = one_hot(everyone.flatten(), experts).mean(0, dtype=logits.dtype)
    probability = logits.softmax(-1).sum(0) / len(everyone)
    return experts * (load * probability).sum()


# %%
class MoE(nn.Module):
    """A router and its experts in one process: (N, T, W) to (N, T, W)."""

    def __init__(self, width, experts, k, capacity_factor):
        super().__init__()
        self.k, self.capacity_factor = k, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleDict({str(e): FeedForward(width) for e in range(experts)})
        self.gather = lambda choices: (choices, 0)  # all ranks' choices, and where mine begin
        self.run = run_experts

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (T, W)
        logits = self.router(tokens)
        choices, weights = best_experts(logits, self.k)
        everyone, first = self.gather(choices)
        kept = fits(everyone, logits.shape[-1], self.capacity_factor)[first:][: len(tokens)]
        self.balance = share_of_balance(logits, everyone)
        token, which = kept.nonzero(as_tuple=True)
        results = self.run(self.experts, tokens[token], choices[token, which])
        weighted = weights[token, which, None] * results
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(x)


# %%
CONTEXT, WIDTH, EXPERTS, K, BALANCE = 12, 24, 4, 2, 0.01


class MixtureModel(LanguageModel):
    """Two blocks, experts in the second; returns the logits and the balance loss."""

    def __init__(self, capacity_factor=math.inf):
        super().__init__(len(text.vocabulary()), WIDTH, heads=4, layers=2, context=CONTEXT)
        self.blocks[1].feed_forward = MoE(WIDTH, EXPERTS, K, capacity_factor)

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits, self.blocks[1].feed_forward.balance


# %%
class Exchange(torch.autograd.Function):
    """Rows to other ranks; in backward, their gradients the same way home."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.way_back = receive, send, group
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None, None


# %%
def run_experts_of_group(group, experts, pieces, chosen):
    """As `run_experts`, where each rank of `group` has the next len(experts) of all experts."""
    home = chosen // len(experts)  # the rank in the group that has the expert
    order = home.argsort(stable=True)
    send = home.bincount(minlength=dist.get_world_size(group))
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)  # how many come from each rank
    splits, back = (send.tolist(), receive.tolist()), (receive.tolist(), send.tolist())
    arrived = Exchange.apply(pieces[order], *splits, group)  # dispatch
    wanted = Exchange.apply(chosen[order], *splits, group)
    results = run_experts(experts, arrived, wanted)
    return Exchange.apply(results, *back, group)[order.argsort()]  # combine


def choices_of_all(choices):
    """The choices of all ranks, in their order, and where those of this rank begin."""
    everyone = [torch.empty_like(choices) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, choices)
    return torch.cat(everyone), dist.get_rank() * len(choices)


def expert_parallel(model, group):
    """Leaves each rank of `group` its own experts, under the names that they have."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for layer in [module for module in model.modules() if hasattr(module, "experts")]:
        share = len(layer.experts) // ranks
        mine = list(layer.experts.items())[rank * share :][:share]
        layer.experts = nn.ModuleDict(mine)
        layer.run = functools.partial(run_experts_of_group, group)
        layer.gather = choices_of_all
    return model


# %%
def is_expert(name):
    return ".experts." in name


def add_up_gradients(model, data):
    """Sums over all ranks, but an expert's over its copies only, the ranks of `data`."""
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=data if is_expert(name) else None)


def share_of_loss(outputs, targets, tokens):
    """What these rows contribute to the loss of a batch of so many tokens."""
    logits, balance = outputs
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens + BALANCE * balance
