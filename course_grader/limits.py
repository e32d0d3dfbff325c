"""What a submission may use."""

from dataclasses import dataclass

MB = 1 << 20
NOTEBOOK = 50 * MB  # the largest file that is read, in an archive or by itself
PATIENCE = 10  # so many times `seconds` may pass where a busy machine has no processor for the code


@dataclass(frozen=True)
class Limits:
    """The limits of one exercise, with all processes that it starts; `notebook` is the file's.

    seconds: in which its processes compute, or wait; not those in which a busy machine has no
        processor for them.
    memory: bytes of memory that its processes hold together.
    processes: how many there may be at once. A check needs up to a dozen: ranks, their server.
    file: bytes of any file that it writes.
    notebook: bytes of the submitted file.
    """

    seconds: float = 120.0
    memory: int = 4096 * MB
    processes: int = 64
    file: int = 256 * MB
    notebook: int = NOTEBOOK
