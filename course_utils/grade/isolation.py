"""What Linux can do so that a submission reaches nothing but itself.

In namespaces of its own (namespaces(7)) a submission sees no process but those it started, so it
cannot send a signal to any other, and all of them end with the first one. It has a network with
nothing but 127.0.0.1 in it, finds every file read-only and only its own folder writable, and that
is memory which nobody sees afterwards. No privilege is needed for this where the system lets
users make namespaces; some systems and most containers do not. Elsewhere, macOS among them, the
keeper still ends everything that a submission has started, but code that is out to kill the
grader itself, or to change the user's files, can do so.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if _LINUX else None

# <sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/capability.h>, <linux/mount.h>, <net/if.h>
_NEW_USER, _NEW_PROCESSES = 0x10000000, 0x20000000
_NEW_MOUNTS, _NEW_MESSAGES, _NEW_NETWORK = 0x00020000, 0x08000000, 0x40000000
_NO_SETUID, _NO_DEVICES, _RECURSIVE, _PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 36, 38
_CAPABILITY_VERSION = 0x20080522
_MOUNT_SETATTR, _HERE, _WHOLE_TREE, _READ_ONLY = 442, -100, 0x8000, 0x1  # one number everywhere
_SET_INTERFACE_FLAGS, _UP = 0x8914, 0x1


def adopt_orphans() -> None:
    """Descendants of this process whose parent dies become its children, however they detached
    themselves, so that they can be found."""
    if _LINUX:
        _call("prctl", _SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """This process is killed when its parent ends."""
    if _LINUX:
        _call("prctl", _SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def give_up_privileges() -> None:
    """Takes from this process, and from all that it starts, what root may do beyond others."""
    if _LINUX:
        _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        header, nothing = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
        _call("capset", header, nothing)


def possible() -> bool:
    """Whether this system lets us make namespaces; found out in a process of its own."""
    if not _LINUX:
        return False
    tried = os.fork()
    if tried == 0:
        try:
            detach()
            first = os.fork()
            if first == 0:
                close_in("/tmp", 1 << 20)  # everything here is gone with this process
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        finally:
            os._exit(1)
    return os.waitpid(tried, 0)[1] == 0


def detach() -> None:
    """The next child of this process is the first of a new process namespace. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER | _NEW_PROCESSES)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def close_in(folder: str, size: int) -> None:
    """For that first child: nothing but `folder`, `size` bytes at most, can be written from now
    on, and nothing but 127.0.0.1 can be reached. Raises OSError."""
    _call("unshare", _NEW_MOUNTS | _NEW_MESSAGES | _NEW_NETWORK)
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _HERE, b"/", _WHOLE_TREE, attributes, len(attributes))
    for place in (folder.encode(), b"/dev/shm"):
        _call("mount", b"tmpfs", place, b"tmpfs", _NO_SETUID | _NO_DEVICES, b"size=%d" % size)
    _call("mount", b"proc", b"/proc", b"proc", _NO_SETUID | _NO_DEVICES, None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        loopback = struct.pack("16sh14x", b"lo", _UP)
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, loopback)


def _call(function, *arguments):
    result = getattr(_libc, function)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
