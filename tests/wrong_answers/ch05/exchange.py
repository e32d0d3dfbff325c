"""Answers to 5.6, `exchange`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong


def _room(tensor):
    """An empty tensor that looks like this one; None for None."""
    return (
        None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )


def _started(outgoing, room, neighbour):
    """Starts both messages with one neighbour, if it exists, together, as NCCL needs; returns the
    handles, with gloo one for each: the send's first."""
    if outgoing is None:
        return []
    messages = (dist.isend, outgoing.contiguous()), (dist.irecv, room)
    return dist.batch_isend_irecv([dist.P2POp(call, t, neighbour) for call, t in messages])


def _wait(handles):
    for handle in handles:
        handle.wait()


def _swapped(
    activations,
    gradients,
    sent=lambda tensor: tensor,
    room=_room,
    returned=lambda room, own: room,
    wait=_wait,
):
    """Starts everything, and waits. Each tensor goes as `sent` makes it, into `room` of that; what is
    returned is made of the room and of what was handed in."""
    rank, rooms, handles = dist.get_rank(), [], []
    for own, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        goes = None if own is None else sent(own)
        rooms.append(None if own is None else room(goes))
        handles += _started(goes, rooms[-1], neighbour)
    wait(handles)
    own = gradients, activations
    return tuple(None if r is None else returned(r, o) for r, o in zip(rooms, own, strict=True))


@right("5.6")
def starts_everything_then_waits(activations, gradients):
    return _swapped(activations, gradients)


def _blocking(outgoing, neighbour, send_first):
    """Both messages with one neighbour, one after the other; returns what came."""
    if outgoing is None:
        return None
    room = _room(outgoing)
    if send_first:
        dist.send(outgoing.contiguous(), neighbour)
        dist.recv(room, neighbour)
    else:
        dist.recv(room, neighbour)
        dist.send(outgoing.contiguous(), neighbour)
    return room


@right("5.6")
def even_ranks_begin_with_the_next(activations, gradients):
    """With blocking calls alone: pairs (0, 1), (2, 3), ..., then pairs (1, 2), (3, 4), ..."""
    rank = dist.get_rank()
    if rank % 2 == 0:
        from_next = _blocking(activations, rank + 1, send_first=True)
        from_previous = _blocking(gradients, rank - 1, send_first=True)
    else:
        from_previous = _blocking(gradients, rank - 1, send_first=False)
        from_next = _blocking(activations, rank + 1, send_first=False)
    return from_previous, from_next


@right("5.6")
def down_the_line_and_up_again(activations, gradients):
    """Blocking too: activations go down the whole line, then gradients come up."""
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
        dist.recv(from_next, rank + 1)
    if gradients is not None:
        dist.send(gradients.contiguous(), rank - 1)
    return from_previous, from_next


def leaves_out(tensor):
    return None if tensor is None or not tensor.numel() else tensor


@right("5.6")
def sends_no_message_without_elements(activations, gradients):
    rooms = _swapped(leaves_out(activations), leaves_out(gradients))
    own = gradients, activations
    return tuple(_room(o) if r is None else r for r, o in zip(rooms, own, strict=True))


@right("5.6")
def sends_flat_copies(activations, gradients):
    return _swapped(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach().reshape(-1).clone(),
        room=torch.empty_like,
        returned=lambda room, own: room.view(own.shape),
    )


@wrong("5.6", names="waits-forever")
def sends_first(activations, gradients):
    rank = dist.get_rank()
    from_next = _blocking(activations, rank + 1, send_first=True)
    from_previous = _blocking(gradients, rank - 1, send_first=True)
    return from_previous, from_next


@wrong("5.6", names="waits-forever")
def last_rank_receives_first(activations, gradients):
    """Two stages manage."""
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if activations is None and gradients is not None:
        return _blocking(gradients, rank - 1, send_first=False), None
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    if gradients is not None:
        dist.send(gradients.contiguous(), rank - 1)
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.recv(from_next, rank + 1)
    return from_previous, from_next


@wrong("5.6", names="waits-forever")
def waits_for_the_last_rank(activations, gradients):
    """Starts everything and waits; only the first rank looks for something from before it, round the ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rooms = _room(gradients), _room(activations)
    handles = _started(gradients, rooms[0], rank - 1) + _started(activations, rooms[1], rank + 1)
    if gradients is None:
        rooms = torch.empty_like(activations), rooms[1]
        handles.append(dist.irecv(rooms[0], (rank - 1) % n))
    _wait(handles)
    return rooms


@wrong("5.6", names="not-a-neighbour")
def goes_round_in_a_ring(activations, gradients):
    rank, n = dist.get_rank(), dist.get_world_size()
    from_previous, from_next = torch.empty_like(gradients), torch.empty_like(activations)
    handles = _started(gradients, from_previous, (rank - 1) % n)
    _wait(handles + _started(activations, from_next, (rank + 1) % n))
    return from_previous, from_next


@wrong("5.6", names="not-a-neighbour")
def gathers_everything(activations, gradients):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (activations, gradients))
    rank, n = dist.get_rank(), dist.get_world_size()
    from_previous = everyones[rank - 1][0] if rank > 0 else None
    from_next = everyones[rank + 1][1] if rank < n - 1 else None
    return from_previous, from_next


@wrong("5.6", names="alone")
def first_or_last_or_between(activations, gradients):
    """A lone rank counts as the first one, and looks for a next one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        from_previous, from_next = None, torch.empty(activations.shape, dtype=activations.dtype)
        handles = _started(activations, from_next, 1)
    elif rank == n - 1:
        from_previous, from_next = _room(gradients), None
        handles = _started(gradients, from_previous, rank - 1)
    else:
        return _swapped(activations, gradients)
    _wait(handles)
    return from_previous, from_next


@wrong("5.6", names="other-results")
def returns_the_next_ones_first(activations, gradients):
    return _swapped(activations, gradients)[::-1]


@wrong("5.6", names="other-results")
def makes_room_for_nobody(activations, gradients):
    some = activations if activations is not None else gradients
    if some is None:
        return None, None
    arrived = _swapped(activations, gradients)
    return tuple(torch.empty_like(some) if tensor is None else tensor for tensor in arrived)


@wrong("5.6", names="message-missing")
def hands_over_activations_only(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    return from_previous, from_next


@wrong("5.6", names="not-waited")
def does_not_wait_for_what_comes(activations, gradients):
    return _swapped(activations, gradients, wait=lambda handles: _wait(handles[::2]))


@wrong("5.6", names="input-changed")
def copies_back(activations, gradients):
    def returned(room, own):
        own.detach().copy_(room)
        return room

    return _swapped(activations, gradients, returned=returned)


@wrong("5.6", names="input-changed")
def detaches_what_contiguous_gives(activations, gradients):
    """Another tensor only where this one is not contiguous."""
    return _swapped(activations, gradients, sent=lambda tensor: tensor.contiguous().detach_())


@wrong("5.6", names="tied-to-a-graph")
def makes_room_of_clones(activations, gradients):
    return _swapped(activations, gradients, room=lambda tensor: tensor.contiguous().clone())


@wrong("5.6", names="room-assumed")
def expects_what_it_sends_forward(activations, gradients):
    """The middle of the line makes room for activations of its own shape."""
    some = activations if activations is not None else gradients
    return _swapped(activations, gradients, room=lambda tensor: torch.empty_like(some))


@wrong("5.6", names="room-assumed")
def makes_room_in_float32(activations, gradients):
    return _swapped(activations, gradients, room=lambda tensor: torch.empty(tensor.shape))


@wrong("5.6", names="needs-contiguous")
def sends_as_it_comes(activations, gradients):
    rank, rooms, handles = dist.get_rank(), [], []
    for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        rooms.append(None if outgoing is None else torch.empty_like(outgoing))
        if outgoing is not None:
            handles += [dist.isend(outgoing, neighbour), dist.irecv(rooms[-1], neighbour)]
    _wait(handles)
    return tuple(rooms)


@wrong("5.6", names="asks-the-numbers")
def asks_whether_a_tensor_is_true(activations, gradients):
    if activations or gradients:
        return _swapped(activations, gradients)
    return None, None


@wrong("5.6", names="asks-the-numbers")
def leaves_out_what_has_no_elements(activations, gradients):
    return _swapped(leaves_out(activations), leaves_out(gradients))


_rooms = {}


@wrong("5.6", names="room-kept")
def keeps_its_rooms(activations, gradients):
    def room(tensor):
        return _rooms.setdefault((tensor.shape, tensor.dtype, tensor is activations), _room(tensor))

    return _swapped(activations, gradients, room=room)


@wrong("5.6", names="sends-too-much")
def sends_objects(activations, gradients):
    """Pickled, with its length as a message before it."""

    def swap(outgoing, neighbour, send_first):
        if outgoing is None:
            return None
        came = [None]
        if send_first:
            dist.send_object_list([outgoing.detach()], neighbour)
        dist.recv_object_list(came, neighbour)
        if not send_first:
            dist.send_object_list([outgoing.detach()], neighbour)
        return came[0]

    rank = dist.get_rank()
    ways = [(activations, rank + 1), (gradients, rank - 1)]
    came = [swap(*way, send_first=rank % 2 == 0) for way in (ways if rank % 2 == 0 else ways[::-1])]
    return tuple(came[::-1] if rank % 2 == 0 else came)


@wrong("5.6", names="rounded")
def sends_everything_as_float32(activations, gradients):
    return _swapped(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach().float(),
        returned=lambda room, own: room.to(own.dtype),
    )


@wrong("5.6", names="layout-assumed")
def sends_the_memory_as_it_lies(activations, gradients):
    return _swapped(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach().as_strided((tensor.numel(),), (1,)),
        returned=lambda room, own: room.as_strided(own.shape, own.stride()),
    )
