"""What a training run will need, before anybody rents the GPUs: the arithmetic, in one place.

README.md lists the files. Bytes are counted and given as bytes, times are seconds, rates FLOP/s and B/s;
nothing here is in GB or GiB. Each function names the paper and the equation it follows, and what it
leaves out. What runs a program (`fake`, `traced`) needs PyTorch, which comes with it when it is asked for.
"""

from importlib import import_module

from course_planner.calibrating import Row, calibrate
from course_planner.collectives import collective_time
from course_planner.counting import flops, parameters
from course_planner.descriptions import Hardware, Layout, Model, described
from course_planner.memory import activations_per_layer, fits, memory, model_states
from course_planner.pipelining import bubble
from course_planner.searching import REASONS, Plan, search
from course_planner.timing import Calibration, StepTime, step_time
from course_planner.traffic import Call, traffic

_RUN = {"Trace": "fake", "mesh_of": "fake", "trace": "fake", "traced_seconds": "traced"}

__all__ = [
    "REASONS",
    "Calibration",
    "Call",
    "Hardware",
    "Layout",
    "Model",
    "Plan",
    "Row",
    "StepTime",
    "Trace",
    "activations_per_layer",
    "bubble",
    "calibrate",
    "collective_time",
    "described",
    "fits",
    "flops",
    "memory",
    "mesh_of",
    "model_states",
    "parameters",
    "search",
    "step_time",
    "trace",
    "traced_seconds",
    "traffic",
]


def __getattr__(name: str) -> object:
    if name not in _RUN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_RUN[name]}"), name)
