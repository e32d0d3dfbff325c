"""What autograd asks the device while it is on its way out with an error of Python.

A hook that raises leaves its error with the interpreter until the engine fetches it. In between the
engine puts back the stream of the node that failed, for which PyTorch calls Python again
(torch/csrc/acc/Module.cpp, PythonDeviceGuard) in a function that must not raise. But a call beside a
waiting error is an error for Python: the process would abort, where a GPU's raises. So the call takes
the waiting error, and who has started backward gets it back.
"""

import ctypes
import functools

from course_utils.comm import private

_KIND = private.device_kind.value
_raise_what_waits = ctypes.pythonapi.PyErr_Occurred  # as ctypes looks for an error after each call
_taken: list[BaseException] = []


class DeviceGuard(private.DeviceGuard.value):
    """PyTorch asks for the kind of the device wherever it changes the stream. Whatever Python does before
    it takes a waiting error may lose it: so no lookup, and no method, which would be made anew."""

    @staticmethod
    def type_():
        try:
            _raise_what_waits()
        except BaseException as error:  # noqa: BLE001 - it is somebody else's, and goes on
            _taken.append(error.with_traceback(error.__traceback__.tb_next))
        return _KIND


def install() -> None:
    """Lets backward raise what was taken. To be called once in a process."""
    run = private.run_backward[0].value

    @functools.wraps(run)
    def run_and_give_back(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except SystemError:  # an error without an error: its own was taken
            if not _taken:
                raise
            error = _taken[0]
            _taken.clear()
        raise error

    for each in private.run_backward:
        each.put(run_and_give_back)
