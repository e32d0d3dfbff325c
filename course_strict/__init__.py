"""NCCL's rules on a machine without GPUs: `launch(..., rules="nccl")`.

Ranks compute on the CPU and gloo carries the bytes, on a device and in process groups that take and
refuse what a GPU with NCCL does. README.md lists the files.
"""

from course_utils.comm import intercept

OLDEST = "2.14"  # of PyTorch; 2.11 lets nobody else make groups that are called "nccl"


def install():
    """In a rank, before it joins its group: gives the process the device and the groups. Returns
    the device."""
    from course_strict import device, group, memory  # only ranks under rules need them

    intercept.stand_between(__name__)
    device.install()
    group.install()
    return memory.device()
