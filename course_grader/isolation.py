"""What Linux can do so that a submission reaches nothing but itself.

In namespaces of its own (namespaces(7)) a submission sees no process but those it started, so it
cannot send a signal to any other, and all of them end with the first one. It has a network with
nothing but 127.0.0.1 in it. Its root holds only what outside.py lists, read-only, devices and
terminals of its own, and a folder to write to that is memory, which nobody sees afterwards. No
privilege is needed for this where the system lets users make namespaces. Another user would need
one, and could not read a Python that lies in somebody's home. Some systems and most containers let
nobody make any. Elsewhere, macOS among them, the keeper still ends everything that a submission has
started, but code that is out to kill the grader itself, or to change the user's files, can do so.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import tempfile

from course_grader import outside

_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if _LINUX else None

# <sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/capability.h>, <linux/mount.h>, <net/if.h>
_NEW_USER, _NEW_PROCESSES = 0x10000000, 0x20000000
_NEW_MOUNTS, _NEW_MESSAGES, _NEW_NETWORK = 0x00020000, 0x08000000, 0x40000000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _BIND = 0x2, 0x4, 0x8, 0x1000
_RECURSIVE, _PRIVATE, _DETACH = 0x4000, 0x40000, 0x2
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
_SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 36, 38
_CAPABILITY_VERSION = 0x20080522
_MOUNT_SETATTR, _HERE, _WHOLE_TREE, _READ_ONLY = 442, -100, 0x8000, 0x1  # one number everywhere
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
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


def hide_memory() -> None:
    """Other processes of this user can neither read nor trace this one any more."""
    if _LINUX:
        _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


def be_killed_first() -> None:
    """If the machine runs out of memory, this process and those that it starts are what goes."""
    if _LINUX:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


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
    with tempfile.TemporaryDirectory(prefix="grade-") as folder:
        tried = os.fork()
        if tried == 0:
            try:
                detach()
                first = os.fork()
                if first == 0:
                    close_in(folder, 1 << 20)  # all of it is gone with this process
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
    """For that first child: nothing but what outside.py lists is there from now on, nothing but
    `folder`, `size` bytes at most, can be written, and nothing but 127.0.0.1 can be reached. Raises
    OSError."""
    visible, hidden, user = outside.visible(), outside.hidden(), outside.user()
    _call("unshare", _NEW_MOUNTS | _NEW_MESSAGES | _NEW_NETWORK)
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    root = folder.encode()
    _mount(b"tmpfs", root, _NO_SETUID, b"size=%d" % (1 << 20))
    for path in visible:
        _show(path.encode(), root)
    empty = root + b"/etc/empty"
    os.makedirs(root + b"/etc", exist_ok=True)
    for path, text in ((empty, ""), (root + b"/etc/passwd", user)):
        with open(path, "w") as file:
            file.write(text)
    for path in hidden:
        _hide(root + path.encode(), empty)
    _make_devices(root + b"/dev")
    os.makedirs(root + b"/sys", exist_ok=True)
    try:  # gloo asks it about the interfaces, and PyTorch about processors
        _mount(b"sysfs", root + b"/sys", _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS, None)
    except OSError:  # as in some containers
        _call("mount", b"/sys", root + b"/sys", None, _BIND | _RECURSIVE, None)
    places = [root + name for name in (b"/proc", b"/dev/shm", os.path.abspath(root))]
    for place in places:
        os.makedirs(place, exist_ok=True)
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _HERE, root, _WHOLE_TREE, attributes, len(attributes))
    # read-only: whoever has root's number may write to /proc/sys, without any privilege
    _mount(b"proc", places[0], _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS, None)
    for place in places[1:]:
        _mount(b"tmpfs", place, _NO_SETUID | _NO_DEVICES, b"size=%d" % size)
    _mount(b"devpts", root + b"/dev/pts", _NO_SETUID, b"newinstance,ptmxmode=0666")
    os.chdir(root)
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        loopback = struct.pack("16sh14x", b"lo", _UP)
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, loopback)


def _mount(kind: bytes, place: bytes, flags: int, options: bytes | None) -> None:
    _call("mount", kind, place, kind, flags, options)


def _show(path: bytes, root: bytes) -> None:
    """Makes a file or folder of the system visible below a new root. A link stays one."""
    place = root + path
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
    _call("mount", path, place, None, _BIND | _RECURSIVE, None)


def _hide(place: bytes, empty: bytes) -> None:
    if os.path.isdir(place):
        _mount(b"tmpfs", place, _NO_SETUID | _NO_DEVICES, None)
    elif os.path.exists(place):
        _call("mount", empty, place, None, _BIND, None)


def _make_devices(folder: bytes) -> None:
    """The links that programs expect, and a place for terminals that nobody else has."""
    os.makedirs(folder + b"/pts", exist_ok=True)
    links = {b"ptmx": b"pts/ptmx", b"fd": b"/proc/self/fd"}
    links |= {
        name: b"/proc/self/fd/%d" % i for i, name in enumerate((b"stdin", b"stdout", b"stderr"))
    }
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            os.symlink(target, folder + b"/" + name)


def _call(function, *arguments):
    result = getattr(_libc, function)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
