"""Makers of the usual wrong answers, out of a right one that works with `dist.all_reduce` on ranks.

Most replace functions of `torch.distributed` while the answer runs; the others spoil what it returns.
`tests.wrong_answers.usual` names them by the mistake of the vocabulary that they make. `neighbours` and
`exchange` are for answers that send messages round.
"""

import functools
import itertools
import pickle
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist


def neighbours() -> tuple[int, int, int, int]:
    """This rank, the number of ranks, and the ranks to the right and to the left on the ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Sends to the right while receiving from the left."""
    _, _, right_rank, left_rank = neighbours()
    swap(outgoing, right_rank, incoming, left_rank)


def swap(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Sends while receiving: started together, since NCCL's queue would keep the receive behind the send."""
    send = dist.P2POp(dist.isend, outgoing.contiguous(), to)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, incoming, source)]):
        work.wait()


def replacing(**calls: Callable) -> Callable:
    """A maker: while the answer runs, each of these functions of `torch.distributed` is another one, which
    gets the plain function before its arguments."""

    def make(answer: Callable) -> Callable:
        def made(*args):
            replaced = {n: functools.partial(call, getattr(dist, n)) for n, call in calls.items()}
            with mock.patch.multiple(dist, **replaced):
                return answer(*args)

        return made

    return make


def giving(spoil: Callable) -> Callable:
    """A maker: the answer gives what `spoil` makes of its result."""

    def make(answer: Callable) -> Callable:
        return lambda *args: spoil(answer(*args))

    return make


def _broadcast_of(source: int) -> Callable:
    def call(plain, tensor):
        dist.broadcast(tensor, src=source % len(dist.get_process_group_ranks(None)))

    return call


def _first_rank_alone(plain, tensor):
    if dist.get_rank() == 0:
        plain(tensor)


def _to_the_first_rank(plain, tensor):
    before = tensor.clone()
    dist.reduce(tensor, dst=0)
    if dist.get_rank() > 0:
        tensor.copy_(before)


def _in_half_precision(plain, tensor):
    narrow = tensor.bfloat16()
    plain(narrow)
    tensor.copy_(narrow)


def _of_the_extremes(plain, tensor):
    smallest = tensor.clone()
    plain(smallest, dist.ReduceOp.MIN)
    plain(tensor, dist.ReduceOp.MAX)
    tensor += smallest


def _with_a_partner(plain, tensor):
    partner = 1 - dist.get_rank()
    theirs = torch.empty_like(tensor)
    swap(tensor.clone(), partner, theirs, partner)
    tensor += theirs


def _keeping(answer: Callable) -> Callable:
    found = {}

    def made(value):
        if value.shape not in found:
            found[value.shape] = answer(value)
        return found[value.shape]

    return made


def _nothing(plain, tensor):
    pass


def _one(plain):
    return 1


_turns = itertools.count()


def through_the_store(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, which come through the group's store, as they could through files."""
    store, turn = dist.distributed_c10d._get_default_store(), next(_turns)
    store.set(f"{turn}-{dist.get_rank()}", pickle.dumps(tensor))
    ranks = range(dist.get_world_size())
    return [pickle.loads(store.get(f"{turn}-{rank}")) for rank in ranks]


def _sum_from_the_store(plain, tensor):
    tensor.copy_(sum(through_the_store(tensor)))


MAKERS = {
    "around-the-calls": replacing(all_reduce=_sum_from_the_store),
    "sum-not-mean": replacing(get_world_size=_one),
    "unchanged": replacing(get_world_size=_one, all_reduce=_nothing),
    "not-finite": replacing(get_world_size=lambda plain: dist.get_rank()),
    "nothing-sent": replacing(all_reduce=_nothing),
    "divided-twice": replacing(get_world_size=lambda plain: plain() ** 2),
    "fixed-number": replacing(get_world_size=lambda plain: 2),
    "rank-0s": replacing(all_reduce=_broadcast_of(0)),
    "last-ranks": replacing(get_world_size=_one, all_reduce=_broadcast_of(-1)),
    "rounded": replacing(all_reduce=_in_half_precision),
    "one-rank-only": replacing(all_reduce=_to_the_first_rank),
    "another-reduction": replacing(get_world_size=lambda plain: 2, all_reduce=_of_the_extremes),
    "not-waited": replacing(all_reduce=lambda plain, tensor: plain(tensor, async_op=True) and None),
    "not-every-rank": replacing(all_reduce=_first_rank_alone),
    "two-ranks": replacing(all_reduce=_with_a_partner),
    "kept-from-before": _keeping,
    "returns-nothing": giving(lambda result: None),
    "one-rank-returns": giving(lambda result: result if dist.get_rank() == 0 else None),
    "not-a-tensor": giving(torch.Tensor.tolist),
    "rounded-down": giving(torch.floor),
    "other-dtype": giving(torch.Tensor.double),
    "shape-lost": giving(torch.flatten),
    "one-number": giving(torch.mean),
}
