"""What a rank holds at a moment, read from the storages under its tensors."""

import gc
import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_utils.comm import private
from course_utils.hardware import device


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages under `tensors`, each counted once; a freed storage has none."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Meter:
    """Reads at every layer, in forward and backward, the bytes of parameters and gradients.

    `readings` are (layers passed, bytes of parameters, bytes of gradients).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.passed, self.readings = model, 0, []
        self.kept = list(model.parameters())  # a rank keeps its shards while a unit is gathered
        for layer in model.modules():
            if not list(layer.children()):
                layer.register_forward_hook(self._after_forward)
        for parameter in self.kept:
            parameter.register_post_accumulate_grad_hook(lambda _: self.read())

    def _after_forward(self, layer, inputs, output):
        self._pass_layer()
        output.register_hook(lambda gradient: self._pass_layer())  # backward comes to the layer

    def _pass_layer(self):
        self.read()
        self.passed += 1

    def read(self) -> None:
        """Adds a reading of now."""
        parameters = [*self.kept, *self.model.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        held = storage_bytes(map(local, parameters)), storage_bytes(map(local, gradients))
        self.readings.append((self.passed, *held))


class Sampling(private.dispatch_mode.value):
    """Adds up, after each operation, what all storages on this process's device (`hardware.device()`)
    have at that moment.

    `peak` is the most of it, in bytes. PyTorch's profiler does not hear what gloo's threads free, and
    its peak is too high by it.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        self.place = device().type
        self.alive: dict[int, tuple[weakref.ref, int]] = {}  # with the bytes that were seen last
        self.freed: deque[weakref.KeyedRef] = deque()  # gloo's threads free storages too
        self.peak = self.bound = 0  # bound: at least what is held; a storage may shrink unseen
        self._add([local(tensor) for tensor in found])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with this rank's part
        result = func(*args, **kwargs or {})
        # The arguments too: FSDP gives memory to what it then fills.
        self._add((*args, *(kwargs or {}).values(), result))
        self._take_off()
        if self.bound > self.peak:
            self.peak = max(self.peak, self.held())
        return result

    def held(self) -> int:
        """The bytes at this moment."""
        self._take_off()
        for address, (reference, _) in list(self.alive.items()):
            if (storage := reference()) is not None:
                self.alive[address] = reference, storage.nbytes()
        self.bound = sum(size for _, size in self.alive.values())
        return self.bound

    def _add(self, things: Iterable) -> None:
        """A tensor around others, such as the result of a functional collective, has no memory itself."""
        for thing in things:
            if isinstance(thing, list | tuple):
                self._add(thing)
            elif (
                isinstance(thing, Tensor)
                and thing.device.type == self.place
                and not hasattr(thing, "__tensor_flatten__")
            ):
                storage = thing.untyped_storage()
                address, size = private.address.of(storage), storage.nbytes()
                reference, seen = self.alive.get(address, (None, 0))
                known = reference is not None and reference() is storage
                if not known or size > seen:
                    self.bound += size - seen
                    self.alive[address] = (
                        weakref.KeyedRef(storage, self.freed.append, address),
                        size,
                    )

    def _take_off(self) -> None:
        """What was freed since the last call; its address may have another storage by now."""
        while self.freed:
            reference = self.freed.popleft()
            if self.alive.get(reference.key, (None, 0))[0] is reference:
                self.bound -= self.alive.pop(reference.key)[1]
