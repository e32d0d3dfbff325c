"""4.2, `hand_over`: answers written from the stub alone."""

import torch
import torch.distributed as dist


def _forward_on_rank_0(stage, data):
    crossing = stage(data)
    for tensor in crossing:
        dist.send(tensor.detach().contiguous(), dst=1)
    return crossing


def _back_on_rank_0(crossing):
    roots, gradients = [], []
    for tensor in crossing:
        if tensor.is_floating_point():
            gradient = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            dist.recv(gradient, src=1)
            if tensor.requires_grad:
                roots.append(tensor)
                gradients.append(gradient)
    if roots:
        torch.autograd.backward(roots, gradients)


def _receive(room):
    """Copies of what arrived, leaves for autograd where they are floating point."""
    for tensor in room:
        dist.recv(tensor, src=0)
    return [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in room]


def _send_back(arrived):
    for tensor in arrived:
        if tensor.is_floating_point():
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            dist.send(gradient.contiguous(), dst=0)


def _rank_1(stage, data, room):
    arrived = _receive(room)
    loss = stage(*arrived, data)
    loss.backward()
    _send_back(arrived)
    return loss.item()


def one_backward_after_the_other(stage, data, room):
    """Rank 0 calls tensor.backward(gradient) for each, twice through what the tensors share."""
    if dist.get_rank() == 1:
        return _rank_1(stage, data, room)
    for tensor in _forward_on_rank_0(stage, data):
        if tensor.is_floating_point():
            gradient = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            dist.recv(gradient, src=1)
            if tensor.requires_grad:
                tensor.backward(gradient)


def unused_is_not_sent(stage, data, room):
    """Rank 1 sends back only the gradients that exist; rank 0 waits for one of each tensor."""
    if dist.get_rank() == 0:
        return _back_on_rank_0(_forward_on_rank_0(stage, data))
    arrived = _receive(room)
    loss = stage(*arrived, data)
    loss.backward()
    for tensor in arrived:
        if tensor.grad is not None:
            dist.send(tensor.grad.contiguous(), dst=0)
    return loss.item()


def integers_come_back_too(stage, data, room):
    """Zeros travel back for the integer tensors as well, and rank 0 takes them."""
    if dist.get_rank() == 0:
        crossing = _forward_on_rank_0(stage, data)
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in crossing]
        for gradient in gradients:
            dist.recv(gradient, src=1)
        pairs = [(t, g) for t, g in zip(crossing, gradients) if t.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs))
        return None
    arrived = _receive(room)
    loss = stage(*arrived, data)
    loss.backward()
    for tensor in arrived:
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        dist.send(gradient.contiguous(), dst=0)
    return loss.item()


def gradients_in_reverse(stage, data, room):
    """Rank 1 sends the last tensor's gradient first, as a stack would; rank 0 goes by the list."""
    if dist.get_rank() == 0:
        return _back_on_rank_0(_forward_on_rank_0(stage, data))
    arrived = _receive(room)
    loss = stage(*arrived, data)
    loss.backward()
    _send_back(arrived[::-1])
    return loss.item()


def no_gradient_asked_for(stage, data, room):
    """What arrives is no leaf that requires a gradient, so only zeros go back."""
    if dist.get_rank() == 0:
        return _back_on_rank_0(_forward_on_rank_0(stage, data))
    for tensor in room:
        dist.recv(tensor, src=0)
    loss = stage(*room, data)
    loss.backward()
    _send_back(room)
    return loss.item()


def sends_as_it_lies(stage, data, room):
    """Sends tensor.detach() without contiguous()."""
    if dist.get_rank() == 1:
        return _rank_1(stage, data, room)
    crossing = stage(data)
    for tensor in crossing:
        dist.send(tensor.detach(), dst=1)
    return _back_on_rank_0(crossing)


def room_keeps_its_gradient(stage, data, room):
    """Makes the tensors of `room` the leaves: their .grad of this step is still there in the next."""
    if dist.get_rank() == 0:
        return _back_on_rank_0(_forward_on_rank_0(stage, data))
    for tensor in room:
        dist.recv(tensor.detach(), src=0)
        if tensor.is_floating_point():
            tensor.requires_grad_()
    loss = stage(*room, data)
    loss.backward()
    _send_back(room)
    return loss.item()


def backward_from_every_float(stage, data, room):
    """Rank 0 goes back from all floating-point tensors, also from those that need no gradient."""
    if dist.get_rank() == 1:
        return _rank_1(stage, data, room)
    floats = [t for t in _forward_on_rank_0(stage, data) if t.is_floating_point()]
    gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in floats]
    for gradient in gradients:
        dist.recv(gradient, src=1)
    torch.autograd.backward(floats, gradients)


ANSWERS = {
    "4.2": [
        one_backward_after_the_other,
        unused_is_not_sent,
        integers_come_back_too,
        gradients_in_reverse,
        no_gradient_asked_for,
        sends_as_it_lies,
        room_keeps_its_gradient,
        backward_from_every_float,
    ]
}
