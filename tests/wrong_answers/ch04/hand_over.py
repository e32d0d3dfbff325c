"""Answers to 4.2, `hand_over`: wrong in a plausible way, or right in another."""

import functools

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong


def send_forward(stage, data):
    tensors = stage(data)
    for tensor in tensors:
        dist.send(tensor.detach().contiguous(), 1)
    return tensors


def receive(room):
    """The leaves of rank 1's graph."""
    leaves = []
    for tensor in room:
        dist.recv(tensor, 0)
        leaves.append(tensor.detach().requires_grad_(tensor.is_floating_point()))
    return leaves


def gradient_of(leaf):
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()


def rank_1s_half(stage, data, room, send=lambda leaf: dist.send(gradient_of(leaf), 0)):
    """`send` sends what belongs to one leaf."""
    leaves = receive(room)
    loss = stage(*leaves, data)
    loss.backward()
    for leaf in leaves:
        if leaf.is_floating_point():
            send(leaf)
    return loss.item()


def received(tensors, room):
    """What rank 0 receives: (tensor, gradient) for those that backward may begin with."""
    pairs = []
    for tensor, gradient in zip(tensors, room):
        if tensor.is_floating_point():
            dist.recv(gradient, 1)
            if tensor.requires_grad:
                pairs.append((tensor, gradient))
    return pairs


def back_from(pairs):
    torch.autograd.backward(*zip(*pairs))


def rank_0s_half(stage, data, room):
    back_from(received(send_forward(stage, data), room))


def on_rank(rank):
    """A maker: an answer whose function is one rank's half, and the other's is right."""

    def make(half):
        @functools.wraps(half)
        def answer(stage, data, room):
            if dist.get_rank() == rank:
                return half(stage, data, room)
            return (rank_0s_half, rank_1s_half)[1 - rank](stage, data, room)

        return answer

    return make


@right("4.2")
@on_rank(0)
def adds_a_scalar_product(stage, data, room):
    """The gradient of the sum of t * g, with g fixed, begins backward at t with g."""
    pairs = received(send_forward(stage, data), room)
    sum((tensor * gradient).sum() for tensor, gradient in pairs).backward()


@right("4.2")
@on_rank(0)
def keeps_the_graph_between(stage, data, room):
    for tensor, gradient in received(send_forward(stage, data), room):
        tensor.backward(gradient, retain_graph=True)


@wrong("4.2", names="unanswered")
@on_rank(1)
def never_hands_back(stage, data, room):
    return rank_1s_half(stage, data, room, send=lambda leaf: None)


@wrong("4.2", names="unanswered")
@on_rank(0)
def goes_there_and_back_for_each(stage, data, room):
    """Works as long as one tensor crosses; with two, both ranks wait."""
    tensors = stage(data)
    for tensor, gradient in zip(tensors, room):
        dist.send(tensor.detach().contiguous(), 1)
        dist.recv(gradient, 1)
    back_from(list(zip(tensors, room)))


@wrong("4.2", names="not-as-asked")
@on_rank(1)
def hands_back_the_activations(stage, data, room):
    return rank_1s_half(stage, data, room, send=lambda leaf: dist.send(leaf.detach(), 0))


@wrong("4.2", names="not-as-asked")
@on_rank(0)
def makes_room_in_float32(stage, data, room):
    pairs = received(send_forward(stage, data), [torch.empty(r.shape) for r in room])
    back_from(pairs)


@wrong("4.2", names="not-waited")
@on_rank(0)
def starts_messages_and_goes_on(stage, data, room):
    """Often right, by luck."""
    tensors = stage(data)
    for tensor in tensors:
        dist.isend(tensor.detach().contiguous(), 1)
    back_from(received(tensors, room))


@wrong("4.2", names="wrong-peer")
def plays_the_others_half(stage, data, room):
    if dist.get_rank() == 0:
        return rank_1s_half(stage, data, room)
    rank_0s_half(stage, data, room)


@wrong("4.2", names="tuple-not-tensor")
@on_rank(0)
def takes_the_tuple_for_a_tensor(stage, data, room):
    crossing = stage(data)
    dist.send(crossing.detach(), 1)
    dist.recv(room[0], 1)
    crossing.backward(room[0])


@wrong("4.2", names="tuple-not-tensor")
@on_rank(1)
def hands_the_list_over(stage, data, room):
    return rank_1s_half(lambda *tensors: stage(tensors[:-1], tensors[-1]), data, room)


@wrong("4.2", names="no-leaf")
@on_rank(1)
def sends_zeros_for_plain_tensors(stage, data, room):
    for tensor in room:
        dist.recv(tensor, 0)
    loss = stage(*room, data)
    loss.backward()
    for tensor in room:
        dist.send(gradient_of(tensor), 0)
    return loss.item()


@wrong("4.2", names="no-leaf")
@on_rank(1)
def differentiates_the_leaves_alone(stage, data, room):
    leaves = receive(room)
    loss = stage(*leaves, data)
    for gradient in torch.autograd.grad(loss, leaves):
        dist.send(gradient, 0)
    return loss.item()


@wrong("4.2", names="room-is-leaf")
@on_rank(1)
def makes_leaves_of_the_room(stage, data, room):
    for tensor in room:
        dist.recv(tensor, 0)
        tensor.requires_grad_(tensor.is_floating_point())
    loss = stage(*room, data)
    loss.backward()
    for tensor in room:
        if tensor.is_floating_point():
            dist.send(gradient_of(tensor), 0)
    return loss.item()


@wrong("4.2", names="rank-0-backward")
@on_rank(0)
def begins_with_ones(stage, data, room):
    tensors = send_forward(stage, data)
    received(tensors, room)
    sum(tensor.sum() for tensor in tensors).backward()


@wrong("4.2", names="backward-each")
@on_rank(0)
def goes_back_once_for_each(stage, data, room):
    for tensor, gradient in received(send_forward(stage, data), room):
        tensor.backward(gradient)


@wrong("4.2", names="gradients-replaced")
def clears_the_gradients_first(stage, data, room):
    stage.zero_grad()
    return adds_a_scalar_product(stage, data, room)


@wrong("4.2", names="zeros-for-none")
def fills_in_missing_gradients(stage, data, room):
    loss = adds_a_scalar_product(stage, data, room)
    for parameter in stage.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return loss


@wrong("4.2", names="needs-contiguous")
@on_rank(0)
def sends_what_it_has(stage, data, room):
    tensors = stage(data)
    for tensor in tensors:
        dist.send(tensor.detach(), 1)
    back_from(received(tensors, room))


@wrong("4.2", names="without-gradient")
@on_rank(0)
def begins_with_the_numbers_too(stage, data, room):
    tensors = send_forward(stage, data)
    received(tensors, room)
    torch.autograd.backward(tensors, room)


@wrong("4.2", names="without-gradient")
@on_rank(1)
def expects_that_all_is_used(stage, data, room):
    return rank_1s_half(stage, data, room, send=lambda leaf: dist.send(leaf.grad, 0))


@wrong("4.2", names="loss")
@on_rank(1)
def returns_the_tensor(stage, data, room):
    return torch.tensor(rank_1s_half(stage, data, room))


@wrong("4.2", names="mode-changed")
def trains_every_part(stage, data, room):
    return adds_a_scalar_product(stage.train(), data, room)
