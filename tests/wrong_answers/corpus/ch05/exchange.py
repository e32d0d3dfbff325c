"""Rarer wrong answers to 5.6, `exchange`."""

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch05.exchange import _room, _swapped, _wait


@rarer("5.6")
def only_receives(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if activations is not None:
        dist.isend(activations.contiguous(), rank + 1).wait()
        dist.recv(from_next, rank + 1)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    return from_previous, from_next


@rarer("5.6")
def needs_no_room(activations, gradients):
    """Receives into what it has sent, as early as it can: harmless, and against the contract."""
    rank = dist.get_rank()
    for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        if outgoing is not None:
            sent = dist.isend(outgoing.clone(), neighbour)
            dist.recv(outgoing, neighbour)
            sent.wait()
    return gradients, activations


# What comes first has the size of another message, now and then.
@rarer("5.6")
def receives_from_anybody(activations, gradients):
    rank = dist.get_rank()
    rooms = {rank - 1: _room(gradients), rank + 1: _room(activations)}
    sends = [
        dist.isend(outgoing.contiguous(), neighbour)
        for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1))
        if outgoing is not None
    ]
    for room in rooms.values():
        if room is not None:
            dist.recv(room)
    _wait(sends)
    return rooms[rank - 1], rooms[rank + 1]


@rarer("5.6")
def only_asks(activations, gradients):
    return _swapped(activations, gradients, wait=lambda all: [each.is_completed() for each in all])


@rarer("5.6")
def does_not_wait_for_what_goes(activations, gradients):
    return _swapped(activations, gradients, wait=lambda handles: _wait(handles[1::2]))


@rarer("5.6")
def lays_what_it_is_handed_out_anew(activations, gradients):
    for tensor in (activations, gradients):
        if tensor is not None:
            tensor.data = tensor.data.contiguous()
    return _swapped(activations, gradients)


@rarer("5.6")
def lets_what_goes_out_learn(activations, gradients):
    if activations is not None:
        activations.requires_grad_()
    return _swapped(activations, gradients)


@rarer("5.6")
def starts_an_empty_batch(activations, gradients):
    if activations is None and gradients is None:
        dist.batch_isend_irecv([])
    return _swapped(activations, gradients)


@rarer("5.6")
def asks_whether_there_is_a_number(activations, gradients):
    def something(tensor):
        return None if tensor is None or not tensor.any() else tensor

    return _swapped(something(activations), something(gradients))


@rarer("5.6")
def makes_both_rooms_of_one_dtype(activations, gradients):
    some = activations if activations is not None else gradients
    return _swapped(
        activations, gradients, room=lambda tensor: _room(tensor.detach()).to(some.dtype)
    )


@rarer("5.6")
def sends_the_transposed_tensor(activations, gradients):
    """As if what is not contiguous were transposed, and at both ends of a link."""
    return _swapped(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach() if tensor.is_contiguous() else tensor.detach().t(),
        room=torch.empty_like,
        returned=lambda room, own: room if own.is_contiguous() else room.t(),
    )


@rarer("5.6")
def prepares_the_next_forward_pass(activations, gradients):
    from_previous, from_next = _swapped(activations, gradients)
    if from_previous is not None:
        from_previous.requires_grad_()
    return from_previous, from_next
