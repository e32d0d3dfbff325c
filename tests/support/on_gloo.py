"""`launch` and `Ranks` for tests whose ranks use CPU tensors, because they are about launch itself, about gloo,
or about numbers: with gloo on every machine. What ranks do under NCCL has tests of its own."""

import functools

from course_utils import launch as _launch

launch = functools.partial(_launch.launch, backend="gloo")
Ranks = functools.partial(_launch.Ranks, backend="gloo")
