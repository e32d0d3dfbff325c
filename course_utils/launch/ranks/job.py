"""What a rank needs to know: of its call, and of the host that it is on."""

import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

from course_utils import hardware
from course_utils.hardware import gpu_sharing
from course_utils.launch.keepers import server, sockets
from course_utils.launch.keepers.janitor import janitor
from course_utils.launch.ranks import arguments, figures
from course_utils.launch.story import calls


@dataclass(frozen=True)
class Launch:
    """A call of launch, but for its function and arguments. Its limits are in seconds: `still` while
    nothing goes on, `whole` in all."""

    nprocs: int
    still: float
    whole: float
    rules: str | None
    backend: str | None
    debug: bool = False
    script: bool = False  # which makes its own group

    def for_ranks(self) -> dict:
        """What is the same for all ranks, wherever they are."""
        return {
            "nprocs": self.nprocs,
            "argv": sys.argv,
            "start_method": multiprocessing.get_start_method(allow_none=True),
            # launch's own limit comes first: it explains, where the group's would only end. And it
            # is longer by the time in which the kernel was stopped, which may be a night.
            "patience": min(self.whole, arguments.LONGEST) + 86_400,
            "limit": self.still,
            "debug": self.debug,
            "script": self.script,
        }

    def placement(self, ranks: int) -> hardware.Placement:
        """Where so many ranks of the call would be on this host."""
        return hardware.on_cpu(ranks) if self.backend else hardware.placement(ranks)


def on_this_host(
    opened: ExitStack, call: Launch, placement: hardware.Placement, folder: str
) -> dict:
    """What is the same for the ranks of a call that are on this host, and listen to it alone, until `opened` is
    closed."""
    interface = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {
        "first": 0,
        "folder": folder,
        "sockets": sockets.near(opened, folder),
        "authkey": bytes(multiprocessing.current_process().authkey),
        "store": os.path.join(folder, "store"),
        "port": port,
        "backend": placement.backend,
        "devices": placement.devices,
        "sharing": placement.sharing,
        "rules": call.rules if placement.backend == "gloo" else None,  # NCCL has its own
        "environment": os.environ
        | {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        | {"NCCL_RUNTIME_CONNECT": "0"}  # else the first collective would hold each host, in C
        | hardware.QUIET
        | (gpu_sharing.ENVIRONMENT if placement.sharing > 1 else {})
        | figures.environment(folder),
        "directory": os.getcwd(),
        "path": server.import_path(),
        "threads": max(1, hardware.cores() // len(placement.devices)),
    }


def temporary_folder(opened: ExitStack, numbers: range) -> str:
    """A private folder for the rendezvous and the records of calls of the ranks with these numbers, until
    `opened` is closed. Raises OSError where it cannot be written."""
    try:
        folder = tempfile.mkdtemp(prefix="course-launch-")
        janitor.keep_with(opened, "folder", folder)
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        for number in numbers:
            calls.prepare(calls.path(folder, number))
    except OSError as error:
        raise OSError(
            f"launch cannot write to the temporary folder ({error.strerror or error}): free "
            "some space there, or set TMPDIR to another folder and restart the kernel."
        ) from None
    return folder
