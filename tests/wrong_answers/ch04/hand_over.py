"""Answers to 4.2, `hand_over`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong


def _send_forward(stage, data):
    tensors = stage(data)
    for tensor in tensors:
        dist.send(tensor.detach().contiguous(), 1)
    return tensors


def _receive(room):
    """The leaves of rank 1's graph."""
    leaves = []
    for tensor in room:
        dist.recv(tensor, 0)
        leaves.append(tensor.detach().requires_grad_(tensor.is_floating_point()))
    return leaves


def _gradient(leaf):
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()


def _loss_and_back(stage, data, room, send=lambda leaf: dist.send(_gradient(leaf), 0)):
    """Rank 1's half; `send` sends what belongs to one leaf."""
    leaves = _receive(room)
    loss = stage(*leaves, data)
    loss.backward()
    for leaf in leaves:
        if leaf.is_floating_point():
            send(leaf)
    return loss.item()


def _gradients(tensors, room):
    """What rank 0 receives: (tensor, gradient) for those that backward may begin with."""
    pairs = []
    for tensor, gradient in zip(tensors, room):
        if tensor.is_floating_point():
            dist.recv(gradient, 1)
            if tensor.requires_grad:
                pairs.append((tensor, gradient))
    return pairs


def _back_from(pairs):
    torch.autograd.backward(*zip(*pairs))


@right("4.2")
def adds_a_scalar_product(stage, data, room):
    """The gradient of the sum of t * g, with g fixed, begins backward at t with g."""
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    pairs = _gradients(_send_forward(stage, data), room)
    sum((tensor * gradient).sum() for tensor, gradient in pairs).backward()


@right("4.2")
def keeps_the_graph_between(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    for tensor, gradient in _gradients(_send_forward(stage, data), room):
        tensor.backward(gradient, retain_graph=True)


@wrong("4.2", names="unanswered")
def never_hands_back(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room, send=lambda leaf: None)
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="unanswered")
def hands_back_the_first_gradient(stage, data, room):
    if dist.get_rank() == 1:
        leaves = _receive(room)
        loss = stage(*leaves, data)
        loss.backward()
        dist.send(_gradient(leaves[0]), 0)
        return loss.item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="messages-differ")
def hands_back_the_sum_over_the_batch(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room, send=lambda leaf: dist.send(leaf.grad.sum(0), 0))
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="no-leaf")
def receives_plain_tensors(stage, data, room):
    if dist.get_rank() == 1:
        for tensor in room:
            dist.recv(tensor, 0)
        loss = stage(*room, data)
        loss.backward()
        for tensor in room:
            dist.send(tensor.grad, 0)
        return loss.item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="no-leaf")
def sends_zeros_for_plain_tensors(stage, data, room):
    if dist.get_rank() == 1:
        for tensor in room:
            dist.recv(tensor, 0)
        loss = stage(*room, data)
        loss.backward()
        for tensor in room:
            dist.send(_gradient(tensor), 0)
        return loss.item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="room-is-leaf")
def makes_leaves_of_the_room(stage, data, room):
    if dist.get_rank() == 1:
        for tensor in room:
            dist.recv(tensor, 0)
            tensor.requires_grad_(tensor.is_floating_point())
        loss = stage(*room, data)
        loss.backward()
        for tensor in room:
            if tensor.is_floating_point():
                dist.send(_gradient(tensor), 0)
        return loss.item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="zeros-for-none")
def fills_in_missing_gradients(stage, data, room):
    loss = adds_a_scalar_product(stage, data, room)
    for parameter in stage.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return loss


@wrong("4.2", names="float32-only")
def sends_gradients_in_float32(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(
            stage, data, room, send=lambda leaf: dist.send(_gradient(leaf).float(), 0)
        )
    narrow = [t.float() if t.is_floating_point() else t for t in room]
    pairs = _gradients(_send_forward(stage, data), narrow)
    _back_from([(tensor, gradient.to(tensor.dtype)) for tensor, gradient in pairs])


@wrong("4.2", names="loss-not-a-float")
def returns_the_tensor(stage, data, room):
    if dist.get_rank() == 1:
        return torch.tensor(_loss_and_back(stage, data, room))
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="forward-twice")
def runs_the_last_stage_again(stage, data, room):
    if dist.get_rank() == 1:
        _loss_and_back(stage, data, room)
        with torch.no_grad():
            return stage(*room, data).item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="order-turned")
def hands_back_in_reverse_order_on_both_sides(stage, data, room):
    if dist.get_rank() == 1:
        leaves = _receive(room)
        loss = stage(*leaves, data)
        loss.backward()
        for leaf in reversed(leaves):
            if leaf.is_floating_point():
                dist.send(_gradient(leaf), 0)
        return loss.item()
    tensors = _send_forward(stage, data)
    _back_from(_gradients(tensors[::-1], room[::-1]))


@wrong("4.2", names="first-stage-left")
def receives_and_forgets(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    _gradients(_send_forward(stage, data), room)


@wrong("4.2", names="own-gradient")
def begins_with_ones(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    tensors = _send_forward(stage, data)
    _gradients(tensors, room)
    sum(tensor.sum() for tensor in tensors).backward()


@wrong("4.2", names="activations-returned")
def returns_the_activations(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room, send=lambda leaf: dist.send(leaf.detach(), 0))
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="last-stage-left")
def differentiates_the_leaves_alone(stage, data, room):
    if dist.get_rank() == 1:
        leaves = _receive(room)
        loss = stage(*leaves, data)
        for gradient in torch.autograd.grad(loss, leaves):
            dist.send(gradient, 0)
        return loss.item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="loss-not-returned")
def keeps_the_loss(stage, data, room):
    if dist.get_rank() == 1:
        _loss_and_back(stage, data, room)
    else:
        _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="order-swapped")
def hands_back_in_backwards_order(stage, data, room):
    if dist.get_rank() == 1:
        leaves = _receive(room)
        loss = stage(*leaves, data)
        loss.backward()
        for leaf in reversed(leaves):
            dist.send(_gradient(leaf), 0)
        return loss.item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="one-tensor-only")
def goes_back_through_one_tensor(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    _back_from(_gradients(_send_forward(stage, data), room)[:1])


@wrong("4.2", names="graph-twice")
def goes_back_once_for_each(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    for tensor, gradient in _gradients(_send_forward(stage, data), room):
        tensor.backward(gradient)


@wrong("4.2", names="float32-only")
def makes_room_in_float32(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    _back_from(_gradients(_send_forward(stage, data), [torch.empty(r.shape) for r in room]))


@wrong("4.2", names="gradients-replaced")
def clears_the_gradients_first(stage, data, room):
    stage.zero_grad()
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="not-contiguous")
def sends_what_it_has(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    tensors = stage(data)
    for tensor in tensors:
        dist.send(tensor.detach(), 1)
    _back_from(_gradients(tensors, room))


@wrong("4.2", names="not-contiguous")
def makes_room_like_the_tensors(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    tensors = _send_forward(stage, data)
    _back_from(_gradients(tensors, [torch.empty_like(tensor) for tensor in tensors]))


@wrong("4.2", names="tuple-not-tensor")
def sends_what_the_stage_returns(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    products = stage(data)
    dist.send(products, 1)
    dist.recv(room[0], 1)
    products.backward(room[0])


@wrong("4.2", names="tuple-not-tensor")
def takes_the_tuple_for_a_tensor(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    products = stage(data)
    dist.send(products.detach(), 1)
    dist.recv(room[0], 1)
    products.backward(room[0])


@wrong("4.2", names="integer-leaf")
def begins_with_the_numbers_too(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    tensors = _send_forward(stage, data)
    _gradients(tensors, room)
    torch.autograd.backward(tensors, room)


@wrong("4.2", names="integer-leaf")
def requires_gradients_of_all(stage, data, room):
    if dist.get_rank() == 1:
        for tensor in room:
            dist.recv(tensor, 0)
        leaves = [tensor.detach().requires_grad_() for tensor in room]
        loss = stage(*leaves, data)
        loss.backward()
        for leaf in leaves:
            dist.send(_gradient(leaf), 0)
        return loss.item()
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="unused-tensor")
def expects_that_all_is_used(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room, send=lambda leaf: dist.send(leaf.grad, 0))
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="unused-tensor")
def leaves_out_what_is_unused(stage, data, room):
    def send(leaf):
        if leaf.grad is not None:
            dist.send(leaf.grad, 0)

    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room, send)
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="constant-tensor")
def begins_with_all(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    pairs = []
    for tensor, gradient in zip(_send_forward(stage, data), room):
        if tensor.is_floating_point():
            dist.recv(gradient, 1)
            pairs.append((tensor, gradient))
    _back_from(pairs)


@wrong("4.2", names="constant-tensor")
def receives_for_what_learns_only(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    pairs = []
    for tensor, gradient in zip(_send_forward(stage, data), room):
        if tensor.requires_grad:
            dist.recv(gradient, 1)
            pairs.append((tensor, gradient))
    _back_from(pairs)


@wrong("4.2", names="waits-too-early")
def goes_there_and_back_for_each(stage, data, room):
    """Works as long as one tensor crosses; with two, both ranks wait."""
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    tensors = stage(data)
    for tensor, gradient in zip(tensors, room):
        dist.send(tensor.detach().contiguous(), 1)
        dist.recv(gradient, 1)
    _back_from(list(zip(tensors, room)))


@wrong("4.2", names="not-waited")
def starts_messages_and_goes_on(stage, data, room):
    """Often right, by luck."""
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    tensors = stage(data)
    for tensor in tensors:
        dist.isend(tensor.detach().contiguous(), 1)
    _back_from(_gradients(tensors, room))


@wrong("4.2", names="not-waited")
def reads_before_it_has_come(stage, data, room):
    """Silently wrong: the stage runs on what was in the room before."""
    if dist.get_rank() == 0:
        return _back_from(_gradients(_send_forward(stage, data), room))
    for tensor in room:
        dist.irecv(tensor, 0)
        tensor.requires_grad_(tensor.is_floating_point())
    loss = stage(*room, data)
    loss.backward()
    for tensor in room:
        if tensor.is_floating_point():
            dist.send(_gradient(tensor), 0)
    return loss.item()


@wrong("4.2", names="no-leaf")
def sends_before_backward(stage, data, room):
    if dist.get_rank() == 0:
        return _back_from(_gradients(_send_forward(stage, data), room))
    leaves = _receive(room)
    loss = stage(*leaves, data)
    for leaf in leaves:
        dist.send(leaf.grad, 0)
    loss.backward()
    return loss.item()


@wrong("4.2", names="no-leaf")
def asks_autograd_for_plain_tensors(stage, data, room):
    if dist.get_rank() == 0:
        return _back_from(_gradients(_send_forward(stage, data), room))
    for tensor in room:
        dist.recv(tensor, 0)
    loss = stage(*room, data)
    for gradient in torch.autograd.grad(loss, room):
        dist.send(gradient, 0)
    return loss.item()


@wrong("4.2", names="wrong-peer")
def sends_to_itself(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room, send=lambda leaf: dist.send(leaf.grad, 1))
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="own-gradient")
def calls_backward_on_activations(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    for tensor, _ in _gradients(_send_forward(stage, data), room):
        tensor.backward()


@wrong("4.2", names="called-otherwise")
def hands_the_list_over(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(lambda *leaves: stage(leaves[:-1], leaves[-1]), data, room)
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="called-otherwise")
def forgets_the_targets(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(lambda *leaves: stage(*leaves[:-1]), data, room)
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="one-tensor-only")
def keeps_the_last_pair(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    _back_from(_gradients(_send_forward(stage, data), room)[-1:])


@wrong("4.2", names="wrong-peer")
def plays_the_others_half(stage, data, room):
    if dist.get_rank() == 0:
        return _loss_and_back(stage, data, room)
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="wrong-peer")
def counts_ranks_from_one(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    for tensor in stage(data):
        dist.send(tensor.detach().contiguous(), 2)


@wrong("4.2", names="wrong-peer")
def runs_the_stage_first_on_both_ranks(stage, data, room):
    products = stage(data)
    if dist.get_rank() == 0:
        dist.send(products[0].detach(), 1)


@wrong("4.2", names="rank-0-returns")
def returns_a_loss_on_both_ranks(stage, data, room):
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    _back_from(_gradients(_send_forward(stage, data), room))
    return 0.0


@wrong("4.2", names="divided")
def divides_by_the_tensors(stage, data, room):
    if dist.get_rank() == 1:
        shared = lambda *tensors: stage(*tensors) / len(room)
        return len(room) * _loss_and_back(shared, data, room)
    _back_from(_gradients(_send_forward(stage, data), room))


@wrong("4.2", names="order-turned")
def hands_over_in_reverse_order_on_both_sides(stage, data, room):
    if dist.get_rank() == 1:
        turned = lambda *arguments: stage(*arguments[-2::-1], arguments[-1])
        leaves = _receive(room[::-1])
        loss = turned(*leaves, data)
        loss.backward()
        for leaf in reversed(leaves):
            if leaf.is_floating_point():
                dist.send(_gradient(leaf), 0)
        return loss.item()
    tensors = stage(data)
    for tensor in reversed(tensors):
        dist.send(tensor.detach().contiguous(), 1)
    _back_from(_gradients(tensors, room))


@wrong("4.2", names="not-as-asked")
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
    _back_from([(t, g) for t, g in pairs if t.requires_grad and g is not None])


@wrong("4.2", names="mode-changed")
def trains_every_part(stage, data, room):
    stage.train()
    if dist.get_rank() == 1:
        return _loss_and_back(stage, data, room)
    _back_from(_gradients(_send_forward(stage, data), room))
