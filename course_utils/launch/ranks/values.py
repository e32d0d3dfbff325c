"""A learner's variables in words: short, whatever they are, and without waiting for another rank."""

import contextlib
import itertools
import reprlib
import types

import torch

from course_utils import hardware

_LENGTH, _VARIABLES = 200, 100  # characters of each, and how many
_SHOWN = 8  # values of a tensor
# no tensor in it
_PLAIN = (int, float, complex, bool, type(None), bytes, torch.device, torch.dtype)
_COUNTED = 10_000_000  # values that are looked through for their minimum


def in_words(variables: dict) -> dict[str, str]:
    """Returns for each variable its repr, cut; a tensor's type, shape, device and values, or what they
    are like. Modules and names that Python has given are left out."""
    short = _Short(device_is_idle=_device_is_idle())
    names = (  # a comprehension's iterator is no identifier
        name
        for name, value in variables.items()
        if name.isidentifier() and name[:2] != "__" and not isinstance(value, types.ModuleType)
    )
    return {name: _word(short, variables[name]) for name in itertools.islice(names, _VARIABLES)}


def _device_is_idle():
    """Else its values may depend on a call that another rank never makes."""
    device = hardware.device()
    try:
        return device.type == "cpu" or torch.get_device_module(device).current_stream().query()
    except Exception:  # noqa: BLE001 - a device that has failed raises anything
        return False


def _word(short, value):
    try:
        text = short.repr(value)
    except BaseException as error:  # noqa: BLE001 - a repr is anybody's code, and may also exit
        text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= _LENGTH else text[: _LENGTH - 4] + " ..."


class _Short(reprlib.Repr):
    def __init__(self, device_is_idle):
        super().__init__()
        self.maxstring = self.maxother = _LENGTH
        self._idle = device_is_idle

    def repr_instance(self, value, level):
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        plain = self._idle or isinstance(value, _PLAIN)
        return repr(value) if plain else f"<{type(value).__name__}>"

    def _tensor(self, tensor):
        kind = "" if type(tensor) is torch.Tensor else f"{type(tensor).__name__}, "
        about = [f"{kind}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"]
        if tensor.device.type != "cpu":
            about.append(f"on {tensor.device}")
        # Of another kind, such as a DTensor, values may come from other ranks.
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and (
            self._idle or tensor.device.type == "cpu"
        ):
            with contextlib.suppress(Exception):  # sparse, meta, float8: not all can do all
                about.append(_values(tensor.detach()))
        return ", ".join(about)


def _values(tensor):
    if tensor.numel() <= _SHOWN:
        return "values " + ", ".join(map(_number, tensor.flatten().tolist()))
    if tensor.numel() > _COUNTED:
        return "many values"
    mean = tensor.mean(dtype=torch.float64).item()
    low, high = map(_number, (tensor.min().item(), tensor.max().item()))
    return f"from {low} to {high}, mean {_number(mean)}"


def _number(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)
