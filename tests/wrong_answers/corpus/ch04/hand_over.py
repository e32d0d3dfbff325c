"""Rarer wrong answers to 4.2, `hand_over`."""

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch04.hand_over import (
    back_from,
    gradient_of,
    on_rank,
    rank_0s_half,
    rank_1s_half,
    receive,
    received,
    send_forward,
)


@rarer("4.2")
@on_rank(0)
def makes_room_like_the_tensors(stage, data, room):
    """`empty_like` copies the order in memory as well."""
    tensors = send_forward(stage, data)
    back_from(received(tensors, [torch.empty_like(tensor) for tensor in tensors]))


@rarer("4.2")
@on_rank(0)
def begins_with_all(stage, data, room):
    tensors, pairs = send_forward(stage, data), []
    for tensor, gradient in zip(tensors, room):
        if tensor.is_floating_point():
            dist.recv(gradient, 1)
            pairs.append((tensor, gradient))
    back_from(pairs)


@rarer("4.2")
@on_rank(0)
def receives_for_what_learns_only(stage, data, room):
    tensors, pairs = send_forward(stage, data), []
    for tensor, gradient in zip(tensors, room):
        if tensor.requires_grad:
            dist.recv(gradient, 1)
            pairs.append((tensor, gradient))
    back_from(pairs)


@rarer("4.2")
@on_rank(1)
def reads_before_it_has_come(stage, data, room):
    """The stage runs on what was in the room before."""
    for tensor in room:
        dist.irecv(tensor, 0)
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in room]
    loss = stage(*leaves, data)
    loss.backward()
    for leaf in leaves:
        if leaf.is_floating_point():
            dist.send(gradient_of(leaf), 0)
    return loss.item()


def _turned_back(stage, data, room):
    leaves = receive(room[::-1])[::-1]
    loss = stage(*leaves, data)
    loss.backward()
    for leaf in reversed(leaves):
        if leaf.is_floating_point():
            dist.send(gradient_of(leaf), 0)
    return loss.item()


@rarer("4.2")
def hands_over_in_reverse_order_on_both_sides(stage, data, room):
    if dist.get_rank() == 1:
        return _turned_back(stage, data, room)
    tensors = stage(data)
    for tensor in reversed(tensors):
        dist.send(tensor.detach().contiguous(), 1)
    back_from(received(tensors[::-1], room[::-1]))


@rarer("4.2")
def sends_gradients_in_float32(stage, data, room):
    if dist.get_rank() == 1:
        narrow = lambda leaf: dist.send(gradient_of(leaf).float(), 0)
        return rank_1s_half(stage, data, room, send=narrow)
    narrow = [t.float() if t.is_floating_point() else t for t in room]
    pairs = received(send_forward(stage, data), narrow)
    back_from([(tensor, gradient.to(tensor.dtype)) for tensor, gradient in pairs])


@rarer("4.2")
@on_rank(1)
def runs_the_last_stage_again(stage, data, room):
    rank_1s_half(stage, data, room)
    with torch.no_grad():
        return stage(*room, data).item()


@rarer("4.2")
def hands_over_objects(stage, data, room):
    parcel = [None]
    if dist.get_rank() == 1:
        dist.recv_object_list(parcel, 0)
        leaves = [t.requires_grad_(t.is_floating_point()) for t in parcel[0]]
        loss = stage(*leaves, data)
        loss.backward()
        dist.send_object_list([[leaf.grad for leaf in leaves]], 0)
        return loss.item()
    tensors = stage(data)
    dist.send_object_list([[tensor.detach() for tensor in tensors]], 1)
    dist.recv_object_list(parcel, 1)
    pairs = zip(tensors, parcel[0])
    back_from([(t, g) for t, g in pairs if t.requires_grad and g is not None])


@rarer("4.2")
@on_rank(0)
def returns_a_loss_on_both_ranks(stage, data, room):
    rank_0s_half(stage, data, room)
    return 0.0
