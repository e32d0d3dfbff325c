"""Answers to 2.2, `replicate`: wrong in a plausible way, or right in another."""

import copy
from functools import partial

import torch
from torch.func import functional_call

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch02.shared import copies_of, tensors_of


@wrong("2.2", names="gradients-lost")
def deep_copies(model, devices):
    return [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]


@wrong("2.2", names="gradients-not-summed")
def averages_the_gradients(model, devices):
    def replica(tensors, batch):
        output = functional_call(copy.deepcopy(model), tensors, batch)
        return output / len(devices) + (output * (1 - 1 / len(devices))).detach()

    everyone = [tensors_of(model), *(copies_of(model, device) for device in devices[1:])]
    return [partial(replica, tensors) for tensors in everyone]


@wrong("2.2", names="not-moved")
def clones_without_moving(model, devices):
    replicas = [model]
    for _ in devices[1:]:
        tensors = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="late-binding")
def looks_up_too_late(model, devices):
    replicas = []
    for device in devices:
        frame, tensors = copy.deepcopy(model), copies_of(model, device)
        replicas.append(lambda batch: functional_call(frame, tensors, batch))  # noqa: B023
    return replicas


@wrong("2.2", names="not-replicas")
def returns_the_tensors(model, devices):
    return [tensors_of(model), *(copies_of(model, device) for device in devices[1:])]


@wrong("2.2", names="no-copies")
def moves_without_copying(model, devices):
    replicas = []
    for device in devices:
        tensors = {name: tensor.to(device) for name, tensor in tensors_of(model).items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="head-office-copied")
def copies_for_everyone(model, devices):
    frames = [copy.deepcopy(model) for _ in devices]
    return [partial(functional_call, f, copies_of(model, d)) for f, d in zip(frames, devices)]


@wrong("2.2", names="copied-late")
def copies_when_called(model, devices):
    def helper(frame, device, batch):
        return functional_call(frame, copies_of(model, device), batch)

    return [model, *(partial(helper, copy.deepcopy(model), device) for device in devices[1:])]


@wrong("2.2", names="tied-twice")
def names_tied_parameters_twice(model, devices):
    replicas = [model]
    for device in devices[1:]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        tensors = {name: tensor.to(device, copy=True) for name, tensor in named}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="tied-once")
def does_not_tie(model, devices):
    replicas = [model]
    for device in devices[1:]:
        call = partial(functional_call, copy.deepcopy(model), copies_of(model, device))
        replicas.append(partial(call, tie_weights=False))
    return replicas


@wrong("2.2", names="buffers-shared")
def shares_the_buffers(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = {name: p.to(device, copy=True) for name, p in model.named_parameters()}
        tensors |= {name: buffer.to(device) for name, buffer in model.named_buffers()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="shared-frame")
def shares_the_frame(model, devices):
    everyone = [tensors_of(model), *(copies_of(model, device) for device in devices[1:])]
    return [partial(functional_call, model, tensors) for tensors in everyone]


@wrong("2.2", names="one-at-a-time")
def locks_the_frame(model, devices):
    import threading

    lock = threading.Lock()

    def replica(tensors, batch):
        with lock:
            return functional_call(model, tensors, batch)

    everyone = [tensors_of(model), *(copies_of(model, device) for device in devices[1:])]
    return [partial(replica, tensors) for tensors in everyone]


def _with_frames(model, devices, prepare):
    frames = [prepare(copy.deepcopy(model)) for _ in devices[1:]]
    helpers = [
        partial(functional_call, f, copies_of(model, d)) for f, d in zip(frames, devices[1:])
    ]
    return [model, *helpers]


@wrong("2.2", names="other-mode")
def puts_frames_into_evaluation_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.eval())


@wrong("2.2", names="other-outputs")
def builds_new_models(model, devices):
    return [model] + [type(model)().to(device) for device in devices[1:]]


@wrong("2.2", names="frozen-thawed")
def thaws_everything(model, devices):
    model.requires_grad_(True)
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    helpers = [
        partial(functional_call, f, copies_of(model, d)) for f, d in zip(frames, devices[1:])
    ]
    return [model, *helpers]


@wrong("2.2", names="same-model")
def moves_the_model_itself(model, devices):
    return [model.to(device) for device in devices]


@wrong("2.2", names="torchs-own")
def asks_pytorch_for_replicas(model, devices):
    return torch.nn.parallel.replicate(model, devices)


@right("2.2")
def modules_with_tensors_as_attributes(model, devices):
    """As torch.nn.parallel.replicate does it: the copies are attributes, not parameters."""
    replicas = [model]
    for device in devices[1:]:
        replica, moved = copy.deepcopy(model), {}
        for ours, theirs in zip(replica.modules(), model.modules()):
            for kind in ("_parameters", "_buffers"):
                for name, tensor in list(getattr(theirs, kind).items()):
                    if tensor is None:
                        continue
                    if tensor not in moved:
                        moved[tensor] = tensor.to(device, copy=True)
                    del getattr(ours, kind)[name]
                    object.__setattr__(ours, name, moved[tensor])
        replicas.append(replica)
    return replicas


def _leaf_replica(model, device, hand_on):
    """A deep copy whose gradients a hook hands on to the model's parameters."""
    replica = copy.deepcopy(model).to(device)
    for parameter, copied in zip(model.parameters(), replica.parameters()):
        copied.grad = None
        if parameter.requires_grad:
            copied.register_post_accumulate_grad_hook(partial(hand_on, parameter))
    return replica


def _add(parameter, copied):
    gradient = copied.grad.to(parameter.device)
    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


@wrong("2.2", names="gradients-again")
def hands_on_what_has_added_up(model, devices):
    return [model] + [_leaf_replica(model, device, _add) for device in devices[1:]]


@right("2.2")
def leaves_that_hand_their_gradients_on(model, devices):
    def add_and_clear(parameter, copied):
        _add(parameter, copied)
        copied.grad = None

    return [model] + [_leaf_replica(model, device, add_and_clear) for device in devices[1:]]


@wrong("2.2", names="gradients-cleared")
def clears_the_gradients_first(model, devices):
    model.zero_grad()
    return _with_frames(model, devices, lambda frame: frame)


@right("2.2")
def makes_a_frame_for_each_call(model, devices):
    def helper(tensors, batch):
        return functional_call(copy.deepcopy(model), tensors, batch)

    return [model] + [partial(helper, copies_of(model, device)) for device in devices[1:]]


@wrong("2.2", names="one-backward-pass")
def multiplies_by_one(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = copies_of(model, device)
        for name, parameter in model.named_parameters():
            tensors[name] = (parameter * 1).to(device) if parameter.requires_grad else tensors[name]
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas
