"""What a submission may use."""

from dataclasses import dataclass

MB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The limits of one exercise, with all processes that it starts; `notebook` is the file's.

    seconds: wall time. A right answer takes up to 20 seconds on a busy machine.
    memory: bytes of memory that its processes hold together.
    processes: how many there may be at once. A check needs up to a dozen: ranks, their server.
    file: bytes of any file that it writes.
    notebook: bytes of the submitted file.
    """

    seconds: float = 120.0
    memory: int = 4096 * MB
    processes: int = 64
    file: int = 256 * MB
    notebook: int = 50 * MB


DEFAULT_LIMITS = Limits()
