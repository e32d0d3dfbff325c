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
    handles, with gloo one for each."""
    if outgoing is None:
        return []
    messages = (dist.isend, outgoing.contiguous()), (dist.irecv, room)
    return dist.batch_isend_irecv([dist.P2POp(call, t, neighbour) for call, t in messages])


@right("5.6")
def starts_everything_then_waits(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


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


@wrong("5.6", names="both-send")
def sends_first(activations, gradients):
    rank = dist.get_rank()
    from_next = _blocking(activations, rank + 1, send_first=True)
    from_previous = _blocking(gradients, rank - 1, send_first=True)
    return from_previous, from_next


@wrong("5.6", names="both-receive")
def receives_first(activations, gradients):
    rank = dist.get_rank()
    from_previous = _blocking(gradients, rank - 1, send_first=False)
    from_next = _blocking(activations, rank + 1, send_first=False)
    return from_previous, from_next


@wrong("5.6", names="unanswered")
def only_receives(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if activations is not None:
        dist.isend(activations.contiguous(), rank + 1).wait()
        dist.recv(from_next, rank + 1)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    return from_previous, from_next


@wrong("5.6", names="two-stages-only")
def last_rank_receives_first(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if activations is None and gradients is not None:
        dist.recv(from_previous, rank - 1)
        dist.send(gradients.contiguous(), rank - 1)
        return from_previous, None
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    if gradients is not None:
        dist.send(gradients.contiguous(), rank - 1)
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.recv(from_next, rank + 1)
    return from_previous, from_next


@wrong("5.6", names="beyond-the-ends")
def goes_round_in_a_ring(activations, gradients):
    rank, n = dist.get_rank(), dist.get_world_size()
    from_previous, from_next = torch.empty_like(gradients), torch.empty_like(activations)
    handles = _started(gradients, from_previous, (rank - 1) % n)
    handles += _started(activations, from_next, (rank + 1) % n)
    for handle in handles:
        handle.wait()
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
        return starts_everything_then_waits(activations, gradients)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="swapped-results")
def returns_the_next_ones_first(activations, gradients):
    from_previous, from_next = starts_everything_then_waits(activations, gradients)
    return from_next, from_previous


@wrong("5.6", names="own-returned")
def returns_what_it_had(activations, gradients):
    starts_everything_then_waits(activations, gradients)
    return gradients, activations


@wrong("5.6", names="one-way-only")
def hands_over_activations_only(activations, gradients):
    rank = dist.get_rank()
    from_previous = _room(gradients)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    return from_previous, None


@wrong("5.6", names="not-waited")
def does_not_wait_for_what_comes(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for send in handles[::2]:
        send.wait()
    return from_previous, from_next


@wrong("5.6", names="not-waited")
def does_not_wait_for_what_goes(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for recv in handles[1::2]:
        recv.wait()
    return from_previous, from_next


@wrong("5.6", names="into-what-is-sent")
def needs_no_room(activations, gradients):
    """Receives into what it has sent, as early as it can: harmless, and against the contract."""
    rank = dist.get_rank()
    for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        if outgoing is not None:
            sent = dist.isend(outgoing.clone(), neighbour)
            dist.recv(outgoing, neighbour)
            sent.wait()
    return gradients, activations


@wrong("5.6", names="handed-in-changed")
def copies_back(activations, gradients):
    from_previous, from_next = starts_everything_then_waits(activations, gradients)
    for own, arrived in ((gradients, from_previous), (activations, from_next)):
        if own is not None:
            own.detach().copy_(arrived)
    return from_previous, from_next


@wrong("5.6", names="built-in-collective")
def gathers_everything(activations, gradients):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (activations, gradients))
    rank, n = dist.get_rank(), dist.get_world_size()
    from_previous = everyones[rank - 1][0] if rank > 0 else None
    from_next = everyones[rank + 1][1] if rank < n - 1 else None
    return from_previous, from_next


@wrong("5.6", names="not-a-neighbour")
def tells_rank_0_that_it_is_there(activations, gradients):
    rank, n = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    if rank == 0:
        for other in range(1, n):
            dist.recv(token, other)
    else:
        dist.send(token, 0)
    return starts_everything_then_waits(activations, gradients)


# What comes first has the size of another message, now and then.
@wrong("5.6", names="not-a-neighbour")
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
    for send in sends:
        send.wait()
    return rooms[rank - 1], rooms[rank + 1]


@wrong("5.6", names="shapes-assumed")
def expects_what_it_sends_forward(activations, gradients):
    """The middle of the line makes room for activations of its own shape."""
    rank = dist.get_rank()
    some = activations if activations is not None else gradients
    if some is None:
        return None, None
    from_previous = None if gradients is None else torch.empty_like(some)
    from_next = None if activations is None else torch.empty_like(some)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="dtype-lost")
def makes_room_in_float32(activations, gradients):
    rank = dist.get_rank()
    from_previous = None if gradients is None else torch.empty(gradients.shape)
    from_next = None if activations is None else torch.empty(activations.shape)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="needs-contiguous")
def sends_as_it_comes(activations, gradients):
    rank = dist.get_rank()
    from_previous = None if gradients is None else torch.empty_like(gradients)
    from_next = None if activations is None else torch.empty_like(activations)
    handles = []
    for outgoing, room, neighbour in (
        (gradients, from_previous, rank - 1),
        (activations, from_next, rank + 1),
    ):
        if outgoing is not None:
            handles += [dist.isend(outgoing, neighbour), dist.irecv(room, neighbour)]
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="room-at-the-ends")
def makes_room_for_nobody(activations, gradients):
    some = activations if activations is not None else gradients
    if some is None:
        return None, None
    arrived = even_ranks_begin_with_the_next(activations, gradients)
    return tuple(torch.empty_like(some) if tensor is None else tensor for tensor in arrived)


@wrong("5.6", names="truth-of-a-tensor")
def asks_whether_a_tensor_is_true(activations, gradients):
    if activations or gradients:
        return starts_everything_then_waits(activations, gradients)
    return None, None


@wrong("5.6", names="not-waited")
def waits_for_no_batch(activations, gradients):
    """`batch_isend_irecv` starts its messages, like each of them."""
    rank = dist.get_rank()
    arrived = _room(gradients), _room(activations)
    messages = []
    for outgoing, room, other in zip((gradients, activations), arrived, (rank - 1, rank + 1)):
        if outgoing is not None:
            messages.append(dist.P2POp(dist.isend, outgoing.contiguous(), other))
            messages.append(dist.P2POp(dist.irecv, room, other))
    if messages:
        dist.batch_isend_irecv(messages)
    return arrived


_rooms = {}


@wrong("5.6", names="room-kept")
def keeps_its_rooms(activations, gradients):
    def room(tensor):
        if tensor is None:
            return None
        return _rooms.setdefault((tensor.shape, tensor.dtype), _room(tensor))

    rank = dist.get_rank()
    from_previous, from_next = room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="handed-in-changed")
def lays_what_it_is_handed_out_anew(activations, gradients):
    for tensor in (activations, gradients):
        if tensor is not None:
            tensor.data = tensor.data.contiguous()
    return starts_everything_then_waits(activations, gradients)


@wrong("5.6", names="alone")
def starts_an_empty_batch(activations, gradients):
    if activations is None and gradients is None:
        dist.batch_isend_irecv([])
    return starts_everything_then_waits(activations, gradients)


@wrong("5.6", names="both-send")
def sends_and_returns_nothing(activations, gradients):
    rank = dist.get_rank()
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    if gradients is not None:
        dist.send(gradients.contiguous(), rank - 1)


@wrong("5.6", names="beyond-the-ends")
def sends_both_ways_everywhere(activations, gradients):
    rank = dist.get_rank()
    sends = dist.isend(activations, rank + 1), dist.isend(gradients, rank - 1)
    arrived = torch.empty_like(gradients), torch.empty_like(activations)
    dist.recv(arrived[0], rank - 1)
    dist.recv(arrived[1], rank + 1)
    for send in sends:
        send.wait()
    return arrived


@wrong("5.6", names="talks-to-itself")
def takes_itself_for_the_previous(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(activations, from_next, rank + 1)
    handles += _started(gradients, from_previous, rank)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="beyond-the-ends")
def goes_the_wrong_way(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(activations, from_next, rank - 1)
    handles += _started(gradients, from_previous, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="belongs-to-a-graph")
def makes_room_of_clones(activations, gradients):
    rank = dist.get_rank()
    rooms, handles = [], []
    for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        rooms.append(None if outgoing is None else outgoing.contiguous().clone())
        handles += _started(outgoing, rooms[-1], neighbour)
    for handle in handles:
        handle.wait()
    return tuple(rooms)


@wrong("5.6", names="zeros-left-out")
def asks_whether_there_is_a_number(activations, gradients):
    def something(tensor):
        return None if tensor is None or not tensor.any() else tensor

    return starts_everything_then_waits(something(activations), something(gradients))


@wrong("5.6", names="more-than-the-tensors")
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


def _as_they_are_sent(activations, gradients, sent, room, returned=lambda room, own: room):
    """Starts everything and waits; each tensor goes as `sent` makes it, into `room` of that."""
    rank = dist.get_rank()
    rooms, handles = [], []
    for own, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        goes = None if own is None else sent(own)
        rooms.append(None if own is None else room(goes))
        handles += _started(goes, rooms[-1], neighbour)
    for handle in handles:
        handle.wait()
    own = gradients, activations
    return tuple(None if r is None else returned(r, o) for r, o in zip(rooms, own, strict=True))


@wrong("5.6", names="cut-from-its-graph")
def detaches_in_place(activations, gradients):
    return _as_they_are_sent(activations, gradients, lambda t: t.detach_().contiguous(), _room)


@wrong("5.6", names="cut-from-its-graph")
def detaches_what_contiguous_gives(activations, gradients):
    """Another tensor only where this one is not contiguous."""
    return _as_they_are_sent(activations, gradients, lambda t: t.contiguous().detach_(), _room)


@wrong("5.6", names="dtype-lost")
def makes_both_rooms_of_one_dtype(activations, gradients):
    some = activations if activations is not None else gradients
    return _as_they_are_sent(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach().contiguous(),
        room=lambda tensor: torch.empty_like(tensor, dtype=some.dtype),
    )


@wrong("5.6", names="precision-lost")
def sends_everything_as_float32(activations, gradients):
    return _as_they_are_sent(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach().float().contiguous(),
        room=torch.empty_like,
        returned=lambda room, own: room.to(own.dtype),
    )


@wrong("5.6", names="layout-assumed")
def sends_the_transposed_tensor(activations, gradients):
    """As if what is not contiguous were transposed, and at both ends of a link."""

    def turned(tensor):
        return tensor if tensor.is_contiguous() else tensor.t()

    return _as_they_are_sent(
        activations,
        gradients,
        sent=lambda tensor: turned(tensor.detach()),
        room=torch.empty_like,
        returned=lambda room, own: room if own.is_contiguous() else room.t(),
    )


@wrong("5.6", names="layout-assumed")
def sends_the_memory_as_it_lies(activations, gradients):
    return _as_they_are_sent(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach().as_strided((tensor.numel(),), (1,)),
        room=torch.empty_like,
        returned=lambda room, own: room.as_strided(own.shape, own.stride()),
    )


@wrong("5.6", names="zeros-left-out")
def leaves_out_what_has_no_elements(activations, gradients):
    def something(tensor):
        return None if tensor is None or not tensor.numel() else tensor

    return starts_everything_then_waits(something(activations), something(gradients))


@right("5.6")
def sends_no_message_without_elements(activations, gradients):
    rooms = leaves_out_what_has_no_elements(activations, gradients)
    own = gradients, activations
    return tuple(_room(o) if r is None else r for r, o in zip(rooms, own, strict=True))


@wrong("5.6", names="not-waited")
def only_asks(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        if not handle.is_completed():
            pass  # it will come
    return from_previous, from_next


@wrong("5.6", names="requires-a-gradient")
def prepares_the_next_forward_pass(activations, gradients):
    from_previous, from_next = starts_everything_then_waits(activations, gradients)
    if from_previous is not None:
        from_previous.requires_grad_()
    return from_previous, from_next


@wrong("5.6", names="handed-in-changed")
def lets_what_goes_out_learn(activations, gradients):
    if activations is not None:
        activations.requires_grad_()
    return starts_everything_then_waits(activations, gradients)


@right("5.6")
def sends_flat_copies(activations, gradients):
    return _as_they_are_sent(
        activations,
        gradients,
        sent=lambda tensor: tensor.detach().reshape(-1).clone(),
        room=torch.empty_like,
        returned=lambda room, own: room.view(own.shape),
    )
