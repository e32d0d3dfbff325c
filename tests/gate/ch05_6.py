"""5.6, `exchange`: answers written from the stub alone."""

import torch
import torch.distributed as dist


def all_send_first(activations, gradients):
    """Both blocking sends come before both receives, on every rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    from_previous = from_next = None
    if rank < last:
        dist.send(activations.detach().contiguous(), rank + 1)
    if rank > 0:
        dist.send(gradients.detach().contiguous(), rank - 1)
        from_previous = torch.empty_like(gradients, memory_format=torch.contiguous_format)
        dist.recv(from_previous, rank - 1)
    if rank < last:
        from_next = torch.empty_like(activations, memory_format=torch.contiguous_format)
        dist.recv(from_next, rank + 1)
    return from_previous, from_next


def _calls(activations, gradients, previous, following, buffers):
    """The isend and irecv calls of one rank, for the neighbours that are not None."""
    calls = []
    if following is not None:
        calls.append(dist.isend(activations.detach().contiguous(), following))
        calls.append(dist.irecv(buffers[1], following))
    if previous is not None:
        calls.append(dist.isend(gradients.detach().contiguous(), previous))
        calls.append(dist.irecv(buffers[0], previous))
    return calls


def _neighbours():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return (rank - 1 if rank > 0 else None), (rank + 1 if rank < last else None)


def _like(tensor):
    if tensor is None:
        return None
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def a_ring(activations, gradients):
    """The neighbours are counted modulo the world size, so the last stage is next to the first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    buffers = _like(gradients), _like(activations)
    calls = []
    if activations is not None:
        calls.append(dist.isend(activations.detach().contiguous(), (rank + 1) % n))
    if gradients is not None:
        calls.append(dist.isend(gradients.detach().contiguous(), (rank - 1) % n))
    own = activations if gradients is None else gradients
    from_previous = torch.empty_like(own, memory_format=torch.contiguous_format)
    calls.append(dist.irecv(from_previous, (rank - 1) % n))
    if activations is not None:
        calls.append(dist.irecv(buffers[1], (rank + 1) % n))
    for call in calls:
        call.wait()
    return from_previous, buffers[1]


def results_swapped(activations, gradients):
    """Returns the next rank's gradients first."""
    buffers = _like(gradients), _like(activations)
    for call in _calls(activations, gradients, *_neighbours(), buffers):
        call.wait()
    return buffers[1], buffers[0]


def sends_as_they_lie(activations, gradients):
    """No contiguous(): neither for what is sent nor for the buffers."""
    previous, following = _neighbours()
    calls, from_previous, from_next = [], None, None
    if following is not None:
        from_next = torch.empty_like(activations)
        calls += [dist.isend(activations.detach(), following), dist.irecv(from_next, following)]
    if previous is not None:
        from_previous = torch.empty_like(gradients)
        calls += [dist.isend(gradients.detach(), previous), dist.irecv(from_previous, previous)]
    for call in calls:
        call.wait()
    return from_previous, from_next


def buffers_by_name(activations, gradients):
    """Activations arrive in a buffer like `activations`, gradients in one like `gradients`."""
    previous, following = _neighbours()
    for_activations = _like(gradients if activations is None else activations)
    for_gradients = _like(activations if gradients is None else gradients)
    buffers = for_activations, for_gradients
    for call in _calls(activations, gradients, previous, following, buffers):
        call.wait()
    return (
        None if previous is None else for_activations,
        None if following is None else for_gradients,
    )


def arrivals_require_a_gradient(activations, gradients):
    """Calls requires_grad_() on what arrives, as the stage will need it."""
    buffers = _like(gradients), _like(activations)
    for call in _calls(activations, gradients, *_neighbours(), buffers):
        call.wait()
    return tuple(None if buffer is None else buffer.requires_grad_() for buffer in buffers)


def receives_not_waited_for(activations, gradients):
    """Waits for what it sends and not for what it receives."""
    previous, following = _neighbours()
    from_previous = None if previous is None else torch.zeros_like(_like(gradients))
    from_next = None if following is None else torch.zeros_like(_like(activations))
    calls = _calls(activations, gradients, previous, following, (from_previous, from_next))
    for call in calls[::2]:
        call.wait()
    return from_previous, from_next


def one_rank_has_no_calls(activations, gradients):
    """batch_isend_irecv gets an empty list where there is one rank, and refuses it."""
    previous, following = _neighbours()
    buffers = _like(gradients), _like(activations)
    calls = []
    if following is not None:
        calls.append(dist.P2POp(dist.isend, activations.detach().contiguous(), following))
        calls.append(dist.P2POp(dist.irecv, buffers[1], following))
    if previous is not None:
        calls.append(dist.P2POp(dist.isend, gradients.detach().contiguous(), previous))
        calls.append(dist.P2POp(dist.irecv, buffers[0], previous))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return buffers


ANSWERS = {
    "5.6": [
        all_send_first,
        a_ring,
        results_swapped,
        sends_as_they_lie,
        buffers_by_name,
        arrivals_require_a_gradient,
        receives_not_waited_for,
        one_rank_has_no_calls,
    ]
}
