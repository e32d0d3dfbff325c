"""What PyTorch, DDP and FSDP ask `torch.<device>` for: one device, and streams that are in order."""

import contextlib

import torch

from course_strict import memory, queues
from course_utils.comm import host_waits


class Stream:
    """The one queue of the device's own kernels: they are done when the call returns, but for those
    that will need the result of a collective."""

    def __init__(self, device=None, priority=0, **_):
        self.device = memory.device()
        self.device_index, self.device_type, self.stream_id = 0, 20, 0

    def synchronize(self) -> None:
        host_waits.until(queues.nothing_awaited)

    def wait_stream(self, stream): ...
    def wait_event(self, event): ...

    def query(self) -> bool:
        return queues.nothing_awaited()

    def record_event(self, event=None):
        return event or Event()

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0


class Event:
    """A mark in that queue."""

    def __init__(self, *_, **__): ...
    def record(self, stream=None): ...
    def wait(self, stream=None): ...
    def synchronize(self): ...

    def query(self) -> bool:
        return True


class Module:
    """`torch.strict`. The names are PyTorch's, so that what asks for torch.cuda's finds them."""

    Stream, Event = Stream, Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device) -> None: ...
    def empty_cache(self) -> None: ...
    def manual_seed(self, seed: int) -> None: ...
    def manual_seed_all(self, seed: int) -> None: ...

    def synchronize(self, device=None) -> None:
        queues.join_all()

    def device(self, device):
        return contextlib.nullcontext()

    def current_stream(self, device=None) -> Stream:
        return Stream()

    default_stream = current_stream

    def stream(self, stream):
        return contextlib.nullcontext()

    def set_stream(self, stream) -> None: ...

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device=None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]
