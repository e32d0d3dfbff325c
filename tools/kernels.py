"""Kernels without ports: what they say goes through Unix sockets in a folder of their own.

Over TCP, jupyter_client notes five free ports, and the kernel takes them about a second later. Who
took one in between, another kernel or a rank's store, ends that kernel: "Kernel died before
replying to kernel_info". JupyterLab tries again with other ports; nbval and nbclient do not.
"""

import tempfile

from jupyter_client.manager import AsyncKernelManager, KernelManager


class _WithoutPorts:
    """For a kernel manager: no two managers, of whichever process, have a name in common."""

    def _transport_default(self) -> str:
        return "ipc"

    def _ip_default(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="course-kernel-")
        return f"{self._folder.name}/socket"

    def cleanup_ipc_files(self) -> None:
        """Remove the sockets, once the kernel has ended."""
        super().cleanup_ipc_files()
        self._folder.cleanup()


class KernelWithoutPorts(_WithoutPorts, KernelManager):
    """What nbval and the tests start."""


class AsyncKernelWithoutPorts(_WithoutPorts, AsyncKernelManager):
    """What nbclient starts."""
