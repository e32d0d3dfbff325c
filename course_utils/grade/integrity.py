"""Notices a submission that changes what its check is made of.

An answer runs in the process of its check, so it can replace functions there. That changes no
other submission's marks, and here it is seen. Who reads this can get around it: an answer that
nobody trusts is read by a person.
"""

import sys
import types

_TORCH = ("torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.functional")
_Snapshot = dict[str, tuple[object, object]]


def snapshot() -> _Snapshot:
    """The functions and classes of the course and of PyTorch, as they are now, by their names."""
    found: _Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "course_utils" or name in _TORCH:
            _note(found, name, module)
    return found


def changed(before: _Snapshot) -> list[str]:
    """The names that mean something else now."""
    now = snapshot()
    return sorted(name for name in before if now.get(name) != before[name])


def _note(found, name, holder):
    for key, value in list(vars(holder).items()):
        own = isinstance(value, type) and value.__module__.startswith("course_utils")
        if (own or value is sys.modules["torch"].Tensor) and f"{name}.{key}" not in found:
            found[f"{name}.{key}"] = (value, None)
            _note(found, f"{name}.{key}", value)
        elif isinstance(value, types.FunctionType):
            found[f"{name}.{key}"] = (value, value.__code__)
        elif callable(value):
            found[f"{name}.{key}"] = (value, None)
