"""3.2, `ring_all_reduce`: answers written from the stub alone."""

import torch
import torch.distributed as dist


def _neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank - 1) % n, (rank + 1) % n


def all_send_first(tensor):
    """In each step every rank calls the blocking send before its recv."""
    rank, n, left, right = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(n - 1):
        theirs = chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(theirs)
        dist.send(chunks[(rank - step) % n], right)
        dist.recv(arrived, left)
        theirs += arrived
    for step in range(n - 1):
        dist.send(chunks[(rank + 1 - step) % n], right)
        dist.recv(chunks[(rank - step) % n], left)
    tensor.copy_(flat.view_as(tensor))


def torch_chunk(tensor):
    """torch.chunk makes fewer than n chunks of few elements, and then one is missing."""
    rank, n, left, right = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.chunk(n)
    for step in range(n - 1):
        theirs = chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(theirs)
        sending = dist.isend(chunks[(rank - step) % n], right)
        dist.recv(arrived, left)
        sending.wait()
        theirs += arrived
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank + 1 - step) % n], right)
        dist.recv(chunks[(rank - step) % n], left)
        sending.wait()
    tensor.copy_(flat.view_as(tensor))


def the_copy_is_summed(tensor):
    """reshape(-1) copies a tensor that is not contiguous; the sum stays in the copy."""
    rank, n, left, right = _neighbours()
    chunks = tensor.reshape(-1).tensor_split(n)
    for step in range(n - 1):
        theirs = chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(theirs)
        sending = dist.isend(chunks[(rank - step) % n], right)
        dist.recv(arrived, left)
        sending.wait()
        theirs += arrived
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank + 1 - step) % n], right)
        dist.recv(chunks[(rank - step) % n], left)
        sending.wait()


def adds_in_both_rounds(tensor):
    """In the all-gather, too, what arrives is added; there it has to replace."""
    rank, n, left, right = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        theirs = chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(theirs)
        sending = dist.isend(chunks[(rank - step) % n], right)
        dist.recv(arrived, left)
        sending.wait()
        theirs += arrived
    tensor.copy_(flat.view_as(tensor))


def only_the_reduce_scatter(tensor):
    """Stops after the first n - 1 steps: each rank has one chunk of the sum."""
    rank, n, left, right = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(n - 1):
        theirs = chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(theirs)
        sending = dist.isend(chunks[(rank - step) % n], right)
        dist.recv(arrived, left)
        sending.wait()
        theirs += arrived
    tensor.copy_(flat.view_as(tensor))


def gathers_from_its_own_number(tensor):
    """The all-gather begins with chunk `rank`, though the finished one is chunk rank + 1."""
    rank, n, left, right = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(n - 1):
        theirs = chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(theirs)
        sending = dist.isend(chunks[(rank - step) % n], right)
        dist.recv(arrived, left)
        sending.wait()
        theirs += arrived
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank - step) % n], right)
        dist.recv(chunks[(rank - step - 1) % n], left)
        sending.wait()
    tensor.copy_(flat.view_as(tensor))


def whole_tensor_round(tensor):
    """Passes the whole tensor round n - 1 times: right sum, n / 2 times the bytes."""
    _, n, left, right = _neighbours()
    passing = tensor.contiguous().clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(passing)
        sending = dist.isend(passing, right)
        dist.recv(arrived, left)
        sending.wait()
        tensor += arrived
        passing = arrived


def adds_before_it_arrived(tensor):
    """irecv without wait in the first round: adds the buffer's zeros."""
    rank, n, left, right = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(n - 1):
        theirs = chunks[(rank - step - 1) % n]
        arrived = torch.zeros_like(theirs)
        dist.irecv(arrived, left)
        theirs += arrived
        dist.isend(chunks[(rank - step) % n], right).wait()
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank + 1 - step) % n], right)
        dist.recv(chunks[(rank - step) % n], left)
        sending.wait()
    tensor.copy_(flat.view_as(tensor))


ANSWERS = {
    "3.2": [
        all_send_first,
        torch_chunk,
        the_copy_is_summed,
        adds_in_both_rounds,
        only_the_reduce_scatter,
        gathers_from_its_own_number,
        whole_tensor_round,
        adds_before_it_arrived,
    ]
}
