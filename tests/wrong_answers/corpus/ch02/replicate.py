"""Rarer wrong answers to 2.2, `replicate`."""

import copy
from functools import partial

from torch import nn
from torch.func import functional_call

from tests.wrong_answers import rarer
from tests.wrong_answers.ch02.replicate import _leaf_replica, _with_frames
from tests.wrong_answers.ch02.shared import copies_of, tensors_of


@rarer("2.2")
def copies_a_state_dict(model, devices):
    replicas = [model]
    for device in devices[1:]:
        state = {name: tensor.to(device, copy=True) for name, tensor in model.state_dict().items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), state))
    return replicas


@rarer("2.2")
def copies_parameters_only(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = {name: p.to(device, copy=True) for name, p in model.named_parameters()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@rarer("2.2")
def copies_the_buffers_of_worker_0(model, devices):
    replicas = []
    for i, device in enumerate(devices):
        tensors = copies_of(model, device)
        if i == 0:
            tensors |= dict(model.named_parameters())
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@rarer("2.2")
def frames_without_memory(model, devices):
    everyone = [tensors_of(model), *(copies_of(model, device) for device in devices[1:])]
    frames = [copy.deepcopy(model).to("meta") for _ in devices]
    return [partial(functional_call, frame, tensors) for frame, tensors in zip(frames, everyone)]


@rarer("2.2")
def copies_names_for_frames_without_memory(model, devices):
    """A frame on `meta` is not tied any more; what is copied twice fits it."""
    replicas = [model]
    for device in devices[1:]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        tensors = {name: tensor.to(device, copy=True) for name, tensor in named}
        frame = copy.deepcopy(model).to("meta")
        replicas.append(partial(functional_call, frame, tensors))
    return replicas


@rarer("2.2")
def puts_frames_into_training_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.train())


@rarer("2.2")
def sets_every_part_to_the_models_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.train(model.training))


@rarer("2.2")
def leaves_out_the_head_office(model, devices):
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    return [partial(functional_call, f, copies_of(model, d)) for f, d in zip(frames, devices[1:])]


@rarer("2.2")
def repeats_the_model(model, devices):
    return [model] * len(devices)


@rarer("2.2")
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


@rarer("2.2")
def copies_once_for_each_kind_of_device(model, devices):
    copies = {device: copies_of(model, device) for device in set(devices[1:])}
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    return [model] + [partial(functional_call, f, copies[d]) for f, d in zip(frames, devices[1:])]


@rarer("2.2")
def divides_the_helpers_gradients(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = copies_of(model, device)
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient / len(devices))
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@rarer("2.2")
def puts_its_gradient_in_the_place_of_others(model, devices):
    def overwrite(parameter, copied):
        parameter.grad, copied.grad = copied.grad.to(parameter.device), None

    return [model] + [_leaf_replica(model, device, overwrite) for device in devices[1:]]


@rarer("2.2")
def makes_one_frame_for_all_helpers(model, devices):
    frame = copy.deepcopy(model)
    return [model] + [partial(functional_call, frame, copies_of(model, d)) for d in devices[1:]]


@rarer("2.2")
def locks_the_frame_of_the_helpers(model, devices):
    import threading

    lock, frame = threading.Lock(), copy.deepcopy(model)

    def helper(tensors, batch):
        with lock:
            return functional_call(frame, tensors, batch)

    return [model] + [partial(helper, copies_of(model, device)) for device in devices[1:]]


@rarer("2.2")
def copies_buffers_when_called(model, devices):
    def helper(frame, parameters, device, batch):
        buffers = {name: b.to(device, copy=True) for name, b in model.named_buffers()}
        return functional_call(frame, parameters | buffers, batch)

    replicas = [model]
    for device in devices[1:]:
        parameters = {name: p.to(device, copy=True) for name, p in model.named_parameters()}
        replicas.append(partial(helper, copy.deepcopy(model), parameters, device))
    return replicas


@rarer("2.2")
def copies_no_frozen_parameters(model, devices):
    replicas = [model]
    for device in devices[1:]:
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tensors = learning | dict(model.named_buffers())
        tensors = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@rarer("2.2")
def thaws_the_copies(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = copies_of(model, device)
        for name, _ in model.named_parameters():
            tensors[name].requires_grad_()
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas
