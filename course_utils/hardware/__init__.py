"""What this machine has, which device and backend each rank gets, and why a GPU may be idle.

The rule of the course: where there are at least as many GPUs as ranks, each rank gets one GPU
and NCCL; where there are fewer, ranks share them, if NCCL lets them (`gpu_sharing`). Otherwise every
rank runs on the CPU with gloo, and beside a single GPU that nobody can share so does all the rest:
what is compared is computed on the same kind of device. Exercises are checked on the CPU everywhere.

    snapshot    the machine, as this process sees it
    places      the device and the backend of each rank; what a notebook says of them
    diagnosis   the doctor
"""

from course_utils.hardware.diagnosis import CAUSES, Diagnosis, Finding, Setup, doctor
from course_utils.hardware.places import (
    QUIET,
    Placement,
    compute_alike,
    device,
    on_cpu,
    placement,
    report,
    settle,
    without_gpus,
)
from course_utils.hardware.snapshot import Machine, cores, machine

__all__ = [
    "CAUSES",
    "QUIET",
    "Diagnosis",
    "Finding",
    "Machine",
    "Placement",
    "Setup",
    "compute_alike",
    "cores",
    "device",
    "doctor",
    "machine",
    "on_cpu",
    "placement",
    "report",
    "settle",
    "without_gpus",
]
