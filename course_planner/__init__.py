"""What a training run will need, before anybody rents the GPUs: the arithmetic, in one place.

    descriptions   Model, Layout and Hardware: what is trained, how it is split, and on what
    counting       parameters and FLOPs
    memory         bytes that a rank holds: model states, activations, what is held for a moment
    collectives    what a ring sends, and how long that takes
    pipelining     the bubble of a pipeline
    traffic        the collectives and messages of one rank in one step
    networks       where the ranks of a group lie, and how quickly they reach each other
    timing         how long a step takes, and where the time goes
    calibrating    timing's constants, fitted to measured steps
    here           this machine as such hardware, measured by real ranks: imported by itself
    searching      the quickest layouts of a model on a cluster
    fake           the same of a real program, run as one rank of thousands
    traced         how long such a step takes
    options        Model, Layout and Hardware out of what somebody typed
    commands       python -m course_utils trace, and plan
    example        a program for the first of them

Bytes are counted and given as bytes, times are seconds, rates FLOP/s and B/s; nothing here is in GB
or GiB. Each function names the paper and the equation it follows, and what it leaves out.
"""

from course_planner.calibrating import Row, calibrate
from course_planner.collectives import collective_time
from course_planner.counting import flops, parameters
from course_planner.descriptions import Hardware, Layout, Model, described
from course_planner.fake import Trace, mesh_of, trace
from course_planner.memory import activations_per_layer, memory, model_states
from course_planner.pipelining import bubble
from course_planner.searching import REASONS, Plan, search
from course_planner.timing import Calibration, StepTime, step_time
from course_planner.traced import traced_seconds
from course_planner.traffic import Call, traffic

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
