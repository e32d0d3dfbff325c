"""Answers to 2.2, `replicate`: wrong in a plausible way, or right in another."""

import copy
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch02.shared import copies_of, tensors_of


@wrong("2.2", names="gradients-lost")
def deep_copies(model, devices):
    return [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]


@wrong("2.2", names="gradients-lost")
def copies_a_state_dict(model, devices):
    replicas = [model]
    for device in devices[1:]:
        state = {name: tensor.to(device, copy=True) for name, tensor in model.state_dict().items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), state))
    return replicas


@wrong("2.2", names="gradients-averaged")
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


@wrong("2.2", names="buffers-forgotten")
def copies_parameters_only(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = {name: p.to(device, copy=True) for name, p in model.named_parameters()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="late-binding")
def looks_up_too_late(model, devices):
    replicas = []
    for device in devices:
        frame, tensors = copy.deepcopy(model), copies_of(model, device)
        replicas.append(lambda batch: functional_call(frame, tensors, batch))  # noqa: B023
    return replicas


@wrong("2.2", names="not-callable")
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


@wrong("2.2", names="buffers-lost")
def copies_the_buffers_of_worker_0(model, devices):
    replicas = []
    for i, device in enumerate(devices):
        tensors = copies_of(model, device)
        if i == 0:
            tensors |= dict(model.named_parameters())
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


@wrong("2.2", names="tied-once")
def frames_without_memory(model, devices):
    everyone = [tensors_of(model), *(copies_of(model, device) for device in devices[1:])]
    frames = [copy.deepcopy(model).to("meta") for _ in devices]
    return [partial(functional_call, frame, tensors) for frame, tensors in zip(frames, everyone)]


@wrong("2.2", names="tied-twice")
def copies_names_for_frames_without_memory(model, devices):
    """A frame on `meta` is not tied any more; what is copied twice fits it."""
    replicas = [model]
    for device in devices[1:]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        tensors = {name: tensor.to(device, copy=True) for name, tensor in named}
        frame = copy.deepcopy(model).to("meta")
        replicas.append(partial(functional_call, frame, tensors))
    return replicas


def _with_frames(model, devices, prepare):
    frames = [prepare(copy.deepcopy(model)) for _ in devices[1:]]
    helpers = [
        partial(functional_call, f, copies_of(model, d)) for f, d in zip(frames, devices[1:])
    ]
    return [model, *helpers]


@wrong("2.2", names="other-mode")
def puts_frames_into_evaluation_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.eval())


@wrong("2.2", names="other-mode")
def puts_frames_into_training_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.train())


@wrong("2.2", names="other-mode")
def sets_every_part_to_the_models_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.train(model.training))


@wrong("2.2", names="other-outputs")
def builds_new_models(model, devices):
    return [model] + [type(model)().to(device) for device in devices[1:]]


@wrong("2.2", names="wrong-count")
def leaves_out_the_head_office(model, devices):
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    return [partial(functional_call, f, copies_of(model, d)) for f, d in zip(frames, devices[1:])]


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


@wrong("2.2", names="same-model")
def repeats_the_model(model, devices):
    return [model] * len(devices)


@wrong("2.2", names="torchs-own")
def asks_pytorch_for_replicas(model, devices):
    return torch.nn.parallel.replicate(model, devices)


@wrong("2.2", names="gradients-lost")
def sets_new_parameters(model, devices):
    replicas = [model]
    for device in devices[1:]:
        replica = copy.deepcopy(model)
        for name, parameter in model.named_parameters():
            module, _, attribute = name.rpartition(".")
            copied = nn.Parameter(parameter.to(device, copy=True))
            setattr(replica.get_submodule(module), attribute, copied)
        replicas.append(replica)
    return replicas


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


@wrong("2.2", names="helpers-share")
def copies_once_for_each_kind_of_device(model, devices):
    copies = {device: copies_of(model, device) for device in set(devices[1:])}
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    return [model] + [partial(functional_call, f, copies[d]) for f, d in zip(frames, devices[1:])]


@wrong("2.2", names="gradients-averaged")
def divides_the_helpers_gradients(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = copies_of(model, device)
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient / len(devices))
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="gradients-overwritten")
def puts_its_gradient_in_the_place_of_others(model, devices):
    def overwrite(parameter, copied):
        parameter.grad, copied.grad = copied.grad.to(parameter.device), None

    return [model] + [_leaf_replica(model, device, overwrite) for device in devices[1:]]


@wrong("2.2", names="gradients-cleared")
def clears_the_gradients_first(model, devices):
    model.zero_grad()
    return _with_frames(model, devices, lambda frame: frame)


@wrong("2.2", names="shared-frame")
def makes_one_frame_for_all_helpers(model, devices):
    frame = copy.deepcopy(model)
    return [model] + [partial(functional_call, frame, copies_of(model, d)) for d in devices[1:]]


@wrong("2.2", names="one-at-a-time")
def locks_the_frame_of_the_helpers(model, devices):
    import threading

    lock, frame = threading.Lock(), copy.deepcopy(model)

    def helper(tensors, batch):
        with lock:
            return functional_call(frame, tensors, batch)

    return [model] + [partial(helper, copies_of(model, device)) for device in devices[1:]]


@wrong("2.2", names="copied-late")
def copies_buffers_when_called(model, devices):
    def helper(frame, parameters, device, batch):
        buffers = {name: b.to(device, copy=True) for name, b in model.named_buffers()}
        return functional_call(frame, parameters | buffers, batch)

    replicas = [model]
    for device in devices[1:]:
        parameters = {name: p.to(device, copy=True) for name, p in model.named_parameters()}
        replicas.append(partial(helper, copy.deepcopy(model), parameters, device))
    return replicas


@wrong("2.2", names="not-moved")
def copies_no_frozen_parameters(model, devices):
    replicas = [model]
    for device in devices[1:]:
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tensors = learning | dict(model.named_buffers())
        tensors = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="frozen-thawed")
def thaws_the_copies(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = copies_of(model, device)
        for name, _ in model.named_parameters():
            tensors[name].requires_grad_()
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


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
