"""System calls that no answer needs, and that the kernel refuses to one: seccomp(2).

Memory that belongs to no process's address space (memfd, System V) is in no count of the keeper's,
and what looks into other processes or into the kernel helps attacks only. Sockets are those that the
network namespace holds: AF_VSOCK, for one, reaches the machine outside of a virtual one.
"""

import ctypes
import os
import struct

# <linux/audit.h>, <linux/seccomp.h>, <linux/filter.h>
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # with EPERM
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # where they stand in what a filter is given
_SET_FILTER, _NOT_SLOWER = 1, 4
_FAMILIES = (1, 2, 10, 16)  # of sockets that are allowed: Unix, IPv4, IPv6, netlink
_OTHER_TABLE = 0x40000000  # x86-64 has its calls a second time from here on (x32)

# of the machine: its AUDIT_ARCH, seccomp itself, socket, and the refused
_TABLES = {
    "x86_64": (
        0xC000003E,
        317,
        41,
        (29, 64, 68, 101, 248, 249, 250, 298, 310, 311, 319, 321, 323, 425, 447),
    ),
    "aarch64": (
        0xC00000B7,
        277,
        198,
        (117, 186, 190, 194, 217, 218, 219, 241, 270, 271, 279, 280, 282, 425, 447),
    ),
}


def refuse() -> None:
    """From now on this process, and all that it starts, has no such call; where the machine's numbers
    are not known here, nothing changes. Raises OSError where the kernel has no filters."""
    table = _TABLES.get(os.uname().machine)
    if table is None:
        return
    architecture, seccomp, socket, refused = table
    steps = _filter(architecture, socket, refused)
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    kept = ctypes.create_string_buffer(program, len(program))
    about = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(seccomp, _SET_FILTER, _NOT_SLOWER, about) < 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _filter(architecture, socket, refused):
    """The steps of the program; it begins with the tests and ends with both answers."""
    tests = [(_LOAD, _ARCHITECTURE, None, None), (_EQUAL, architecture, None, _REFUSE)]
    tests += [(_LOAD, _NUMBER, None, None), (_AT_LEAST, _OTHER_TABLE, _REFUSE, None)]
    tests += [(_EQUAL, number, _REFUSE, None) for number in refused]
    tests += [(_EQUAL, socket, None, _ALLOW), (_LOAD, _FIRST_ARGUMENT, None, None)]
    tests += [(_EQUAL, family, _ALLOW, None) for family in _FAMILIES]
    answers = [_REFUSE, _ALLOW]
    steps = []
    for place, (what, value, true, false) in enumerate(tests, start=1):
        skips = [
            0 if to is None else len(tests) - place + answers.index(to) for to in (true, false)
        ]
        steps.append((what, *skips, value))
    return steps + [(_RETURN, 0, 0, answer) for answer in answers]
