"""Plausible wrong answers, and other right ones, to the exercises of chapter 04."""

from bisect import bisect_left
from functools import cache
from itertools import accumulate, combinations, pairwise

import torch
import torch.distributed as dist
from torch import nn

from course_utils.trace import kept_for_backward
from tests.wrong_answers import right, wrong

# ---- 4.1 ThreeBuildings --------------------------------------------------------------------------


def _thirds(layers):
    """Three lists whose lengths differ by one at most; the last ones are the longer."""
    n = len(layers)
    return [layers[i * n // 3 : (i + 1) * n // 3] for i in range(3)]


class _Line(nn.Module):
    """Right, but for what its children replace."""

    def __init__(self, layers, devices):
        super().__init__()
        self.devices = devices
        parts = [nn.Sequential(*part) for part in self.cut(layers)]
        self.part0, self.part1, self.part2 = parts
        for part, device in zip(parts, devices):
            self.place(part, device)

    def cut(self, layers):
        return _thirds(layers)

    def place(self, part, device):
        part.to(device)

    def forward(self, x):
        first, second, third = self.devices
        x = self.part0(x.to(first))
        x = self.part1(x.to(second))
        return self.part2(x.to(third))


@right("4.1")
class ThreeNamedParts(_Line):
    pass


@right("4.1")
class AsksEachLayerWhereItIs(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        n = len(layers)
        self.layers = nn.ModuleList(
            layer.to(devices[3 * number // n]) for number, layer in enumerate(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).device))
        return x


@wrong("4.1", names="not-registered")
class PartsInAList(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        self.parts = [nn.Sequential(*part).to(d) for part, d in zip(_thirds(layers), devices)]
        self.devices = devices

    def forward(self, x):
        for part, device in zip(self.parts, self.devices):
            x = part(x.to(device))
        return x


@wrong("4.1", names="layers-lost")
class LosesTheRest(_Line):
    def cut(self, layers):
        size = len(layers) // 3
        return [layers[i * size : (i + 1) * size] for i in range(3)]


@wrong("4.1", names="layers-repeated")
class OverlapsAtTheEnd(_Line):
    def cut(self, layers):
        size = -(-len(layers) // 3)
        return layers[:size], layers[size : 2 * size], layers[-size:]


@wrong("4.1", names="layers-out-of-order")
class DealsTheLayersOut(_Line):
    def cut(self, layers):
        return [layers[i::3] for i in range(3)]


@wrong("4.1", names="uneven")
class RestInTheLastPart(_Line):
    def cut(self, layers):
        size = len(layers) // 3
        return layers[:size], layers[size : 2 * size], layers[2 * size :]


@wrong("4.1", names="uneven")
class RoundsUp(_Line):
    def cut(self, layers):
        size = -(-len(layers) // 3)
        return layers[:size], layers[size : 2 * size], layers[2 * size :]


@wrong("4.1", names="gradient-lost")
class DetachesWhatItMoves(_Line):
    def forward(self, x):
        for part, device in zip((self.part0, self.part1, self.part2), self.devices):
            x = part(x.detach().to(device))
        return x


@wrong("4.1", names="gradient-lost")
class MovesTheData(_Line):
    def forward(self, x):
        for part, device in zip((self.part0, self.part1, self.part2), self.devices):
            x = part(x.data.to(device))
        return x


@wrong("4.1", names="devices-fixed")
class NamesGpus(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, ["cuda:7", "cuda:8", "cuda:9"])


@wrong("4.1", names="frozen-thawed")
class ThawsEverything(_Line):
    def place(self, part, device):
        part.to(device).requires_grad_()


@wrong("4.1", names="nothing-placed")
class PlacesNothing(_Line):
    def place(self, part, device):
        pass


@wrong("4.1", names="devices-mixed-up")
class BackToFront(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, devices[::-1])


@wrong("4.1", names="buffers-left")
class MovesParametersAlone(_Line):
    def place(self, part, device):
        for layer in part:
            moved = layer.weight.detach().to(device)
            layer.weight = nn.Parameter(moved, requires_grad=layer.weight.requires_grad)


@wrong("4.1", names="input-not-moved")
class ExpectsItsInputInPlace(_Line):
    def forward(self, x):
        x = self.part0(x)
        x = self.part1(x.to(self.devices[1]))
        return self.part2(x.to(self.devices[2]))


@wrong("4.1", names="activation-not-moved")
class ForgetsTheResultOfTo(_Line):
    def forward(self, x):
        x = self.part0(x.to(self.devices[0]))
        x.to(self.devices[1])
        x = self.part1(x)
        x.to(self.devices[2])
        return self.part2(x)


@wrong("4.1", names="output-elsewhere")
class BringsTheOutputHome(_Line):
    def forward(self, x):
        home = x.device
        return super().forward(x).to(home)


@wrong("4.1", names="list-not-module")
class MovesASlice(_Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        for part, device in zip(_thirds(layers), devices):
            part.to(device)


@wrong("4.1", names="list-not-module")
class ForgetsTheStar(_Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        self.part0, self.part1, self.part2 = (nn.Sequential(part) for part in _thirds(layers))


@wrong("4.1", names="container-called")
class CallsAModuleList(_Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        self.devices = devices
        self.part0, self.part1, self.part2 = map(nn.ModuleList, _thirds(layers))
        for part, device in zip(self.children(), devices):
            part.to(device)


@wrong("4.1", names="result-dropped")
class DropsTheResults(_Line):
    def forward(self, x):
        for part, device in zip(self.children(), self.devices):
            output = part(x.to(device))
        return output


@wrong("4.1", names="nothing-placed")
class PlacesInForward(_Line):
    def place(self, part, device):
        pass

    def forward(self, x):
        for part, device in zip(self.children(), self.devices):
            x = part.to(device)(x.to(device))
        return x


@wrong("4.1", names="devices-fixed")
class MakesACudaNameOfIt(_Line):
    def place(self, part, device):
        part.to(f"cuda:{device}")


@wrong("4.1", names="device-unused")
class UsesTwoOfThree(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, [devices[0], devices[0], devices[2]])


@wrong("4.1", names="mode-changed")
class EndsInEvaluationMode(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, devices)
        self.eval()


@wrong("4.1", names="dtype-changed")
class MakesFloat32OfItsInputs(_Line):
    def forward(self, x):
        return super().forward(x.float())


@wrong("4.1", names="list-changed")
class TakesTheLayersAway(_Line):
    def cut(self, layers):
        return [[layers.pop(0) for _ in part] for part in _thirds(layers)]


# ---- 4.2 hand_over -------------------------------------------------------------------------------


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


# ---- 4.3 balanced_cuts ---------------------------------------------------------------------------


def _refuse(costs, stages):
    if stages < 1 or stages > len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers: each needs at least one.")


def _first_fit(costs, limit):
    """As many layers a stage as the limit allows."""
    cuts, load = [], 0
    for i, cost in enumerate(costs):
        if load + cost > limit:
            cuts.append(i)
            load = 0
        load += cost
    return cuts


def _all_stages_filled(cuts, layers, stages):
    """More cuts never make the slowest stage slower: adds cuts until there are enough."""
    free = [c for c in range(1, layers) if c not in cuts]
    return sorted(cuts + free[: stages - 1 - len(cuts)])


@right("4.3")
def searches_the_sums_that_occur(costs, stages):
    _refuse(costs, stages)
    total = [0, *accumulate(costs)]
    sums = sorted({b - a for a, b in combinations(total, 2) if b - a >= max(costs)})
    fits = [len(_first_fit(costs, limit * (1 + 1e-12))) < stages for limit in sums]
    limit = sums[fits.index(True)] * (1 + 1e-12)
    return _all_stages_filled(_first_fit(costs, limit), len(costs), stages)


@right("4.3")
def remembers_what_it_solved(costs, stages):
    _refuse(costs, stages)
    total = [0, *accumulate(costs)]

    @cache
    def solve(start, left):
        """(slowest stage, cuts) for the layers from start on."""
        if left == 1:
            return total[-1] - total[start], ()
        options = []
        for cut in range(start + 1, len(costs) - left + 2):
            slowest, cuts = solve(cut, left - 1)
            options.append((max(total[cut] - total[start], slowest), (cut, *cuts)))
        return min(options)

    return list(solve(0, stages)[1])


def _misled(costs, stages, rule):
    """A wrong rule with everything else right: refuses, and has as many stages as asked."""
    _refuse(costs, stages)
    return _all_stages_filled(rule(), len(costs), stages)


@wrong("4.3", names="equal-layers")
def counts_layers(costs, stages):
    _refuse(costs, stages)
    parts = torch.arange(len(costs)).tensor_split(stages)
    return [int(part[0]) for part in parts[1:]]


@wrong("4.3", names="stops-early")
def fills_to_the_mean(costs, stages):
    _refuse(costs, stages)
    share, cuts, load = sum(costs) / stages, [], 0
    for i, cost in enumerate(costs):
        left = stages - 1 - len(cuts)
        if left and load and (load + cost > share or len(costs) - i == left):
            cuts.append(i)
            load = 0
        load += cost
    return cuts


@wrong("4.3", names="stops-late")
def fills_until_the_mean_is_reached(costs, stages):
    _refuse(costs, stages)
    share, cuts, load = sum(costs) / stages, [], 0
    for i, cost in enumerate(costs):
        left = stages - 1 - len(cuts)
        if left and i and (load >= share or len(costs) - i == left):
            cuts.append(i)
            load = 0
        load += cost
    return cuts


@wrong("4.3", names="stops-late")
def fills_from_the_end(costs, stages):
    cuts = fills_until_the_mean_is_reached(costs[::-1], stages)
    return [len(costs) - cut for cut in reversed(cuts)]


@wrong("4.3", names="nearest-share")
def looks_up_the_quantiles(costs, stages):
    _refuse(costs, stages)
    total, cuts = [0, *accumulate(costs)], []
    for stage in range(1, stages):
        wanted = sum(costs) * stage / stages
        at = bisect_left(total, wanted)
        at -= wanted - total[at - 1] <= total[at] - wanted
        low = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(at, low), len(costs) - (stages - stage)))
    return cuts


@wrong("4.3", names="share-of-the-rest")
def takes_its_share_of_the_rest(costs, stages):
    _refuse(costs, stages)
    cuts, start = [], 0
    for left in range(stages, 1, -1):
        share, end = sum(costs[start:]) / left, start + 1
        while end < len(costs) - left + 1 and sum(costs[start : end + 1]) <= share:
            end += 1
        cuts.append(end)
        start = end
    return cuts


@wrong("4.3", names="halved")
def cuts_in_halves(costs, stages):
    _refuse(costs, stages)

    def halve(start, end, stages):
        if stages == 1:
            return []
        few, many = stages // 2, stages - stages // 2
        cut = min(
            range(start + few, end - many + 1),
            key=lambda c: max(sum(costs[start:c]) / few, sum(costs[c:end]) / many),
        )
        return [*halve(start, cut, few), cut, *halve(cut, end, many)]

    return halve(0, len(costs), stages)


def _least(costs, stages, measure):
    """The best of all cuts: only for lists that are short."""
    _refuse(costs, stages)

    def loads(cuts):
        return [sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs)))]

    every = combinations(range(1, len(costs)), stages - 1)
    return list(min(every, key=lambda cuts: measure(loads(cuts))))


@wrong("4.3", names="spread-not-slowest")
def minimises_the_variance(costs, stages):
    return _least(costs, stages, lambda loads: sum(load**2 for load in loads))


@wrong("4.3", names="sorted")
def sorts_the_costs(costs, stages):
    return remembers_what_it_solved(sorted(costs, reverse=True), stages)


@wrong("4.3", names="not-best")
def minimises_the_range(costs, stages):
    return _least(costs, stages, lambda loads: max(loads) - min(loads))


@wrong("4.3", names="too-slow")
def tries_all_cuts(costs, stages):
    return _least(costs, stages, max)


@wrong("4.3", names="fractions")
def searches_whole_numbers(costs, stages):
    def rule():
        low, high = max(costs), sum(costs)
        while low < high:
            middle = (low + high) // 2
            if len(_first_fit(costs, middle)) < stages:
                high = middle
            else:
                low = middle + 1
        return _first_fit(costs, high)

    return _misled(costs, stages, rule)


def _halves_the_limit(costs, stages, width):
    """Looks for the least limit between two, until they are nearer than `width`."""
    low, high = max(costs), sum(costs)
    while high - low > width:
        middle = (low + high) / 2
        if len(_first_fit(costs, middle)) < stages:
            high = middle
        else:
            low = middle
    return _all_stages_filled(_first_fit(costs, high), len(costs), stages)


@right("4.3")
def halves_the_limit_relative_to_the_costs(costs, stages):
    _refuse(costs, stages)
    return _halves_the_limit(costs, stages, 1e-12 * sum(costs))


@wrong("4.3", names="too-coarse")
def halves_the_limit_to_a_thousandth(costs, stages):
    _refuse(costs, stages)
    return _halves_the_limit(costs, stages, 1e-3)


@wrong("4.3", names="too-coarse")
def rounds_the_costs(costs, stages):
    return searches_the_sums_that_occur([round(cost, 6) for cost in costs], stages)


@wrong("4.3", names="number-of-cuts")
def leaves_stages_empty(costs, stages):
    _refuse(costs, stages)
    total = [0, *accumulate(costs)]
    sums = sorted({b - a for a, b in combinations(total, 2)})
    limit = next(s for s in sums if s >= max(costs) and len(_first_fit(costs, s)) < stages)
    return _first_fit(costs, limit)


@wrong("4.3", names="empty-stage")
def repeats_the_last_cut(costs, stages):
    _refuse(costs, stages)
    total = [0, *accumulate(costs)]
    cuts = _first_fit(costs, min(s for s in total if len(_first_fit(costs, s)) < stages))
    return cuts + [len(costs)] * (stages - 1 - len(cuts))


@wrong("4.3", names="sizes-not-cuts")
def returns_sizes(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    return [b - a for a, b in pairwise([0, *cuts, len(costs)])]


@wrong("4.3", names="ends-included")
def returns_the_ends_too(costs, stages):
    return [0, *remembers_what_it_solved(costs, stages), len(costs)]


@wrong("4.3", names="cut-after")
def returns_the_last_layers(costs, stages):
    return [cut - 1 for cut in remembers_what_it_solved(costs, stages)]


@wrong("4.3", names="stages-not-cuts")
def returns_the_stages(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    return [costs[a:b] for a, b in pairwise([0, *cuts, len(costs)])]


@wrong("4.3", names="cost-not-cuts")
def returns_the_least_cost(costs, stages):
    return max(map(sum, returns_the_stages(costs, stages)))


@wrong("4.3", names="cost-not-cuts")
def returns_the_cost_too(costs, stages):
    return returns_the_least_cost(costs, stages), remembers_what_it_solved(costs, stages)


@wrong("4.3", names="unhashable")
@cache
def caches_the_whole_function(costs, stages):
    return remembers_what_it_solved(costs, stages)


@wrong("4.3", names="fractions")
def tries_every_whole_limit(costs, stages):
    def rule():
        limits = range(max(costs), sum(costs) + 1)
        return next(cuts for cuts in (_first_fit(costs, x) for x in limits) if len(cuts) < stages)

    return _misled(costs, stages, rule)


@wrong("4.3", names="number-of-cuts")
def cuts_once(costs, stages):
    _refuse(costs, stages)
    return [min(range(1, len(costs)), key=lambda c: max(sum(costs[:c]), sum(costs[c:])))]


@wrong("4.3", names="costs-changed")
def pops_the_costs(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    while costs:
        costs.pop()
    return cuts


@wrong("4.3", names="not-refused")
def makes_do_with_fewer_stages(costs, stages):
    return remembers_what_it_solved(costs, max(1, min(stages, len(costs)))) if costs else []


@wrong("4.3", names="accident")
def refuses_by_accident(costs, stages):
    cuts, end = [], len(costs)
    total = [0, *accumulate(costs)]
    best = {i: [total[i]] for i in range(end + 1)}
    for stage in range(1, max(stages, 1)):
        for i in range(end, stage - 1, -1):
            options = [max(best[c][-1], total[i] - total[c]) for c in range(stage, i)]
            best[i].append(min(options) if i == end else min(options, default=float("inf")))
    for stage in range(stages - 1, 0, -1):
        slowest = {c: max(best[c][stage - 1], total[end] - total[c]) for c in range(stage, end)}
        end = min(slowest, key=slowest.get)
        cuts.insert(0, end)
    return cuts


@wrong("4.3", names="other-error")
def refuses_with_an_assert(costs, stages):
    assert 1 <= stages <= len(costs), "impossible"
    return remembers_what_it_solved(costs, stages)


@wrong("4.3", names="refuses-too-much")
def wants_more_layers_than_stages(costs, stages):
    if not 1 <= stages < len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers")
    return cuts_at_the_best_last_stage(costs, stages)


@right("4.3")
def cuts_at_the_best_last_stage(costs, stages):
    _refuse(costs, stages)
    total = [0, *accumulate(costs)]

    @cache
    def best(end, left):
        """The least slowest stage of the first `end` layers in `left` stages, and its cuts."""
        if left == 1:
            return total[end], ()
        choices = ((c, best(c, left - 1)) for c in range(left - 1, end))
        return min((max(s, total[end] - total[c]), (*cuts, c)) for c, (s, cuts) in choices)

    return list(best(len(costs), stages)[1])


# ---- 4.4 RepairedConvNet -------------------------------------------------------------------------


def _pooled(pixels):
    return ((pixels - 1) // 2) // 2 + 1


def _eyes():
    return (
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _head():
    return nn.Sequential(nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


class _ConvNet(nn.Module):
    """Right, but for what its children replace."""

    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        self.part1, self.part2 = self.first(image_size), self.second()
        self.place(devices)

    def features(self, image_size):
        height, width = image_size
        return 64 * _pooled(height) * _pooled(width)

    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten(), nn.Linear(self.features(image_size), 512))

    def second(self):
        return _head()

    def place(self, devices):
        self.part1.to(devices[0])
        self.part2.to(devices[1])

    def forward(self, x):
        x = self.part1(x.to(self.devices[0]))
        return self.part2(x.to(self.devices[1]))


@right("4.4")
class CountsWithTheFormula(_ConvNet):
    pass


@right("4.4")
class FlattensInForward(nn.Module):
    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        self.eyes = nn.Sequential(*_eyes()).to(devices[0])
        count = self.eyes(torch.zeros(2, 3, *image_size, device=devices[0]))[0].numel()
        self.last = nn.Linear(count, 512, device=devices[0])
        self.head = _head().to(devices[1])

    def forward(self, x):
        x = self.eyes(x.to(self.devices[0]))
        x = self.last(x.view(len(x), -1))
        return self.head(x.to(self.devices[1]))


@wrong("4.4", names="no-super")
class ForgetsSuper(nn.Module):
    def __init__(self, image_size, devices):
        self.part1 = nn.Sequential(*_eyes())


@wrong("4.4", names="no-self")
class ForgetsSelf(_ConvNet):
    def forward(x):
        x = x.part1(x)
        return x.part2(x)


@wrong("4.4", names="no-flatten")
class ForgetsFlatten(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Linear(self.features(image_size), 512))


@wrong("4.4", names="batch-flattened")
class FlattensTheBatch(_ConvNet):
    def first(self, image_size):
        linear = nn.Linear(self.features(image_size), 512)
        return nn.Sequential(*_eyes(), nn.Flatten(start_dim=0), linear)


@wrong("4.4", names="in-features-wrong")
class AddsFlattenAlone(_ConvNet):
    def features(self, image_size):
        return 1024


@wrong("4.4", names="in-features-wrong")
class ForgetsToRoundUp(_ConvNet):
    def features(self, image_size):
        height, width = image_size
        return 64 * (height // 4) * (width // 4)


@wrong("4.4", names="in-features-wrong")
class CountsThePixelsOfTheImage(_ConvNet):
    def features(self, image_size):
        return 64 * image_size[0] * image_size[1]


@wrong("4.4", names="batch-mixed")
class ViewsAThousand(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Unflatten(0, (1, -1)), nn.Linear(1024, 512))

    def forward(self, x):
        eyes, linear = self.part1[:3], self.part1[-1]
        x = linear(eyes(x.to(self.devices[0])).view(-1, 1024))
        return self.part2(x.to(self.devices[1]))


@wrong("4.4", names="adaptive-pool")
class PoolsToOneSize(_ConvNet):
    def first(self, image_size):
        pool = nn.AdaptiveAvgPool2d(4)
        return nn.Sequential(*_eyes(), pool, nn.Flatten(), nn.Linear(1024, 512))


@wrong("4.4", names="square-only")
class SquaresTheHeight(_ConvNet):
    def features(self, image_size):
        return 64 * _pooled(image_size[0]) ** 2


@wrong("4.4", names="lazy-parameters")
class LeavesItToTheFirstBatch(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten(), nn.LazyLinear(512))


@wrong("4.4", names="layer-changed")
class LosesARelu(_ConvNet):
    def second(self):
        return _head()[1:]


@wrong("4.4", names="layer-changed")
class TakesAnotherWidth(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten(), nn.Linear(self.features(image_size), 256))

    def second(self):
        return nn.Sequential(nn.ReLU(), nn.Linear(256, 10))


@wrong("4.4", names="softmax-added")
class ReturnsProbabilities(_ConvNet):
    def second(self):
        return nn.Sequential(*_head(), nn.Softmax(dim=1))


@wrong("4.4", names="devices-fixed")
class NamesTwoGpus(_ConvNet):
    def __init__(self, image_size, devices):
        super().__init__(image_size, ["cuda:8", "cuda:9"])


@wrong("4.4", names="nothing-placed")
class StaysAtHome(_ConvNet):
    def place(self, devices):
        pass


@wrong("4.4", names="wrong-part")
class CutsBeforeTheLinearLayer(nn.Module):
    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        linear = nn.Linear(64 * _pooled(image_size[0]) * _pooled(image_size[1]), 512)
        self.part1 = nn.Sequential(*_eyes(), nn.Flatten()).to(devices[0])
        self.part2 = nn.Sequential(linear, *_head()).to(devices[1])

    def forward(self, x):
        x = self.part1(x.to(self.devices[0]))
        return self.part2(x.to(self.devices[1]))


@wrong("4.4", names="activation-not-moved")
class MovesNothingBetween(_ConvNet):
    def forward(self, x):
        return self.part2(self.part1(x.to(self.devices[0])))


@wrong("4.4", names="input-not-moved")
class ExpectsImagesInPlace(_ConvNet):
    def forward(self, x):
        return self.part2(self.part1(x).to(self.devices[1]))


@wrong("4.4", names="output-elsewhere")
class BringsTheLogitsHome(_ConvNet):
    def forward(self, x):
        home = x.device
        return super().forward(x).to(home)


@wrong("4.4", names="class-not-module")
class ForgetsTheParentheses(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten, nn.Linear(self.features(image_size), 512))


@wrong("4.4", names="size-is-a-pair")
class TakesTheSizeForANumber(_ConvNet):
    def features(self, image_size):
        return 64 * _pooled(image_size) ** 2


@wrong("4.4", names="in-features-wrong")
class DividesWithAStroke(_ConvNet):
    def features(self, image_size):
        height, width = ((pixels + 2 * 3 - 7) / 2 + 1 for pixels in image_size)
        return 64 * (height / 2) * (width / 2)


@wrong("4.4", names="in-features-wrong")
class RoundsAtTheEndOnly(_ConvNet):
    def features(self, image_size):
        height, width = (((pixels - 1) / 2 + 1 - 1) / 2 + 1 for pixels in image_size)
        return int(64 * height * width)


@wrong("4.4", names="classes-not-logits")
class ReturnsTheClass(_ConvNet):
    def forward(self, x):
        return super().forward(x).argmax(1)


@wrong("4.4", names="pooling-changed")
class PoolsWithoutPadding(_ConvNet):
    def first(self, image_size):
        eyes = nn.Sequential(*_eyes()[:2], nn.MaxPool2d(kernel_size=3, stride=2))
        features = eyes(torch.zeros(1, 3, *image_size)).numel()
        return nn.Sequential(*eyes, nn.Flatten(), nn.Linear(features, 512))


@wrong("4.4", names="gradient-lost")
class DetachesBetween(_ConvNet):
    def forward(self, x):
        x = self.part1(x.to(self.devices[0])).detach()
        return self.part2(x.to(self.devices[1]))


@wrong("4.4", names="batch-dropped")
class Squeezes(_ConvNet):
    def forward(self, x):
        return super().forward(x).squeeze()


@wrong("4.4", names="wrong-part")
class PutsBothOnTheFirst(_ConvNet):
    def place(self, devices):
        self.to(devices[0])

    def forward(self, x):
        return self.part2(self.part1(x.to(self.devices[0]))).to(self.devices[1])


# ---- 4.5 compare_cuts ----------------------------------------------------------------------------


class _Comparison:
    """Right, but for what its children replace."""

    def __call__(self, layers, inputs, seconds, stages, cut):
        self.layers, self.inputs, self.seconds, self.stages = layers, inputs, seconds, stages
        return {
            "equal layers": self.row(self.equal_layers()),
            "equal parameters": self.row(cut([self.size(layer) for layer in layers], stages)),
            "profiled time": self.row(cut(seconds, stages)),
        }

    def equal_layers(self):
        parts = torch.arange(len(self.layers)).tensor_split(self.stages)
        return [int(part[0]) for part in parts[1:]]

    def size(self, layer):
        return sum(p.numel() for p in layer.parameters())

    def row(self, cuts):
        spans = list(pairwise([0, *cuts, len(self.layers)]))
        times = [sum(self.seconds[a:b]) for a, b in spans]
        return {
            "cuts": list(cuts),
            "memory": self.memory([self.layers[a:b] for a, b in spans]),
            "slowest": self.slowest(times),
            "idle": self.idle(times),
        }

    def slowest(self, times):
        return max(times)

    def idle(self, times):
        return sum(max(times) - t for t in times) / (len(times) * max(times))

    def memory(self, parts):
        result, arriving = [], self.inputs
        for part in parts:
            with kept_for_backward(part) as kept:
                outputs = part(arriving)
            result.append(kept.bytes + self.held(part))
            arriving = self.over_the_cut(outputs)
        return result

    def over_the_cut(self, outputs):
        return outputs.detach().requires_grad_()

    def held(self, part):
        tensors = [*part.parameters(), *part.buffers()]
        return sum(map(self.bytes, tensors)) + sum(map(self.gradient, part.parameters()))

    def bytes(self, tensor):
        return tensor.numel() * tensor.element_size()

    def gradient(self, parameter):
        return self.bytes(parameter) if parameter.requires_grad else 0


def _as_function(kind):
    def compare(layers, inputs, seconds, stages, cut):
        return kind()(layers, inputs, seconds, stages, cut)

    compare.__name__ = kind.__name__
    return compare


def _right(kind):
    right("4.5")(_as_function(kind))
    return kind


def _wrong(names):
    def add(kind):
        wrong("4.5", names=names)(_as_function(kind))
        return kind

    return add


@_right
class MeasuresStageByStage(_Comparison):
    pass


@_wrong("rows-missing")
class LeavesOutARow(_Comparison):
    def __call__(self, *arguments):
        table = super().__call__(*arguments)
        del table["equal parameters"]
        return table


@_wrong("remainder-last")
class RestToTheLastStage(_Comparison):
    def equal_layers(self):
        size = len(self.layers) // self.stages
        return [size * stage for stage in range(1, self.stages)]


@_wrong("cut-of-ones")
class CutsEqualCosts(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        self.cuts = cut([1] * len(layers), stages)
        return super().__call__(layers, inputs, seconds, stages, cut)

    def equal_layers(self):
        return self.cuts


@_wrong("shares-rounded")
class RoundsTheShares(_Comparison):
    def equal_layers(self):
        return [round(i * len(self.layers) / self.stages) for i in range(1, self.stages)]


@_wrong("kept-by-layer")
class AsksLayerByLayer(_Comparison):
    def memory(self, parts):
        result, arriving = [], self.inputs
        for part in parts:
            total = self.held(part)
            for layer in part:
                with kept_for_backward(layer) as kept:
                    arriving = layer(arriving)
                total += kept.bytes
            result.append(total)
            arriving = self.over_the_cut(arriving)
        return result


@_wrong("input-needs-gradient")
class HandsTheOutputOn(_Comparison):
    """Right where something before the cut learns."""

    def over_the_cut(self, outputs):
        return outputs


@_wrong("evaluation-mode")
class MeasuresInEvaluationMode(_Comparison):
    def memory(self, parts):
        return super().memory([part.eval() for part in parts])


@_wrong("evaluation-mode")
class MeasuresInEvaluationModeAndRestores(_Comparison):
    def memory(self, parts):
        result = super().memory([part.eval() for part in parts])
        self.layers.train()
        return result


@_wrong("four-bytes")
class CountsFourBytesForParameters(_Comparison):
    def bytes(self, tensor):
        return 4 * tensor.numel() if isinstance(tensor, nn.Parameter) else tensor.nbytes


@_wrong("same-cuts")
class ProfilesTheEqualLayersToo(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        table = super().__call__(layers, inputs, seconds, stages, cut)
        return dict.fromkeys(table, table["profiled time"])


@_wrong("trainable-only")
class CountsWhatLearns(_Comparison):
    def size(self, layer):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)


@_wrong("sum-not-slowest")
class AddsTheStages(_Comparison):
    def slowest(self, times):
        return sum(times)


@_wrong("mean-not-slowest")
class AveragesTheStages(_Comparison):
    def slowest(self, times):
        return sum(times) / len(times)


@_wrong("slowest-layer")
class LooksForTheSlowestLayer(_Comparison):
    def slowest(self, times):
        return max(self.seconds)


@_wrong("costs-not-seconds")
class BalancesAndReportsCosts(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        table = super().__call__(layers, inputs, seconds, stages, cut)
        costs = [1] * len(layers), [self.size(layer) for layer in layers], seconds
        for row, cost in zip(table.values(), costs):
            edges = pairwise([0, *row["cuts"], len(layers)])
            row["slowest"] = max(sum(cost[a:b]) for a, b in edges)
        return table


@_wrong("idle-one-batch")
class LetsOneBatchThrough(_Comparison):
    def idle(self, times):
        return 1 - 1 / self.stages


@_wrong("one-number")
class ReturnsEachStagesIdleShare(_Comparison):
    def idle(self, times):
        return [1 - t / max(times) for t in times]


@_wrong("one-number")
class ReturnsTheSecondsOfAllStages(_Comparison):
    def slowest(self, times):
        return times


@_wrong("idle-of-one-stage")
class ComparesFastestWithSlowest(_Comparison):
    def idle(self, times):
        return 1 - min(times) / max(times)


@_wrong("busy-not-idle")
class ReturnsTheBusyShare(_Comparison):
    def idle(self, times):
        return sum(times) / (len(times) * max(times))


@_wrong("idle-not-share")
class ReturnsIdleSeconds(_Comparison):
    def idle(self, times):
        return sum(max(times) - t for t in times)


@_wrong("list-of-stages")
class ReportsTheFullestStage(_Comparison):
    def memory(self, parts):
        return max(super().memory(parts))


@_wrong("gradients-forgotten")
class ForgetsTheGradients(_Comparison):
    def gradient(self, parameter):
        return 0


@_wrong("gradients-forgotten")
class CountsWhatBackwardAdds(_Comparison):
    def held(self, part):
        return sum(map(self.gradient, part.parameters())) + sum(map(self.bytes, part.buffers()))


@_wrong("activations-forgotten")
class ForgetsTheActivations(_Comparison):
    def memory(self, parts):
        return [self.held(part) for part in parts]


@_wrong("input-needs-gradient")
class DetachesAndLeavesIt(_Comparison):
    def over_the_cut(self, outputs):
        return outputs.detach()


@_wrong("first-input-leaf")
class TreatsTheBatchLikeACut(_Comparison):
    def memory(self, parts):
        if self.inputs.is_floating_point():
            self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@_wrong("whole-model")
class MeasuresTheWholeModel(_Comparison):
    def memory(self, parts):
        return super().memory([self.layers]) * self.stages


@_wrong("frozen-gradient")
class GivesEveryParameterAGradient(_Comparison):
    def gradient(self, parameter):
        return self.bytes(parameter)


@_wrong("buffers-forgotten")
class ForgetsTheBuffers(_Comparison):
    def held(self, part):
        return sum(self.bytes(p) + self.gradient(p) for p in part.parameters())


@_wrong("tied-twice")
class WalksOverTheLayers(_Comparison):
    def held(self, part):
        return sum(super(WalksOverTheLayers, self).held(layer) for layer in part)


@_wrong("four-bytes")
class AssumesFourBytes(_Comparison):
    def bytes(self, tensor):
        return 4 * tensor.numel()


@_wrong("ends-included")
class CutsAtBothEnds(_Comparison):
    def row(self, cuts):
        return super().row(cuts) | {"cuts": [0, *cuts, len(self.layers)]}


@_wrong("index-not-seconds")
class SaysWhichIsSlowest(_Comparison):
    def slowest(self, times):
        return times.index(max(times))


@_wrong("inputs-not-handed-on")
class FeedsTheBatchToEveryStage(_Comparison):
    def over_the_cut(self, outputs):
        return self.inputs


@_wrong("report-not-bytes")
class AddsTheReport(_Comparison):
    def memory(self, parts):
        with kept_for_backward(parts[0]) as kept:
            parts[0](self.inputs)
        return [kept + self.held(part) for part in parts]


@_wrong("first-input-leaf")
class RequiresGradientsOfEveryInput(_Comparison):
    def memory(self, parts):
        self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@_wrong("optimizer-counted")
class AddsAMomentum(_Comparison):
    def gradient(self, parameter):
        return 2 * super().gradient(parameter)


@_wrong("outputs-counted")
class AddsTheOutputs(_Comparison):
    def memory(self, parts):
        result, arriving = [], self.inputs
        for part in parts:
            [held] = super().memory([part])
            self.inputs = self.over_the_cut(part(self.inputs))
            result.append(held + self.bytes(self.inputs))
        self.inputs = arriving
        return result


@_wrong("bytes-not-numbers")
class BalancesBytes(_Comparison):
    def size(self, layer):
        return sum(p.nbytes for p in layer.parameters())


@_wrong("not-what-cut-returns")
class CountsTensors(_Comparison):
    def size(self, layer):
        return len(list(layer.parameters()))


@_wrong("not-what-cut-returns")
class CutsByItself(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        return super().__call__(layers, inputs, seconds, stages, cuts_at_the_best_last_stage)


@_wrong("rounded")
class RoundsTheIdleShare(_Comparison):
    def idle(self, times):
        return round(super().idle(times), 2)


@_wrong("training-mode")
class MeasuresInTrainingMode(_Comparison):
    def memory(self, parts):
        modes = {module: module.training for module in self.layers.modules()}
        result = super().memory([part.train() for part in parts])
        for module, training in modes.items():
            module.training = training
        return result
