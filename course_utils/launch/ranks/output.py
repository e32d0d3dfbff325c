"""What the ranks print, in an order that is the same in every run.

Each rank's file descriptors 1 and 2 lead into a pipe of its own, so nothing is lost: what C code writes, what a rank
writes just before it dies, half a line. Rank 0's lines appear as they come; the others' follow in rank order when the
call ends. `live` shows a person who watches the newest line of each before.
"""

import contextlib
import ctypes
import io
import os
import re
import sys
from collections.abc import Iterator

from course_utils.launch.ranks import figures

_TAIL = 2000  # bytes from the end that are looked at for the newest line
LIMIT = 200_000  # bytes shown of a rank's output: half from its start, half from its end

# gloo prints this when it aborts because calls do not match, on whichever rank notices first.
# That differs from run to run, so it is kept for the failure's message, which may know better.
_GLOO_ABORTS = (
    "terminate called after throwing an instance of 'gloo::",
    "  what():  [enforce fail at",
)

# What differs in every run and says nothing: the name of a cell's file, the time of a warning
# from C++. Without it, the output of a correct program is always the same.
_UNSTEADY = [
    # from the beginning of a word only: a line may be one word of 100,000 bytes
    (re.compile(rb"(?<!\S)\S*/ipykernel_\d+/\d+\.py"), b"cell"),
    (re.compile(rb"(?m)^(?:\[rank\d+\]:)?\[([EW])\d{4} [0-9:.]+ "), rb"[\1 "),
    (re.compile(rb"(?m)^\[rank\d+\]:([EW])\d{4} [0-9:.]+ \d+ "), rb"[\1 "),
]


def redirect(pipe) -> None:
    """In a rank: file descriptors 1 and 2, Python's and C's streams all write into `pipe`."""
    for fd in (1, 2):
        os.dup2(pipe.fileno(), fd)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    libc = ctypes.CDLL(None)
    for name in ("stdout", "__stdoutp"):  # Linux, macOS
        with contextlib.suppress(ValueError):  # the other system's name
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 2, 0)  # 2: unbuffered


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """In a rank: what C++ writes to file descriptor 2 in this block is lost."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _stream(fd):
    # Nothing stays in a buffer that a dying rank would take with it.
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True)


class Output:
    """The output of one rank as it arrives, cut in its middle when it is enormous."""

    def __init__(self, rank: int, folder: str, live: bool):
        self._prefix = f"[rank {rank}] "
        self._folder = folder  # where the rank's figures are
        self._live, self._flows = live, False
        self._room = LIMIT // 2
        # Both grow in place: what is there is not copied for each piece that comes.
        self._start = bytearray()  # without the lines that have been shown
        self._end = bytearray()  # what came after the room for the start was full
        self._left_out = 0
        self._aborts = []
        self.before_writing = lambda: None

    def flow(self) -> None:
        """From now on every line is shown as it comes, however many there are, and none is kept."""
        self._live, self._flows, self._room = True, True, sys.maxsize

    def add(self, data: bytes) -> None:
        """Takes the next bytes that the rank has written."""
        start, data = data[: self._room], data[self._room :]
        self._room -= len(start)
        self._start += start
        self._end += data
        if len(self._end) > 4 * LIMIT:
            self._cut()
        if self._live and b"\n" in start:
            whole, _, self._start = self._start.rpartition(b"\n")
            self._show(whole)
        if self._flows:  # a progress bar only as it stands now
            del self._start[: self._start.rfind(b"\r", 0, -1) + 1]

    @property
    def aborts(self) -> list[str]:
        """What gloo wrote as it aborted the rank."""
        held_back = self._start.decode(errors="replace").split("\n")
        return self._aborts + [line for line in held_back if line.startswith(_GLOO_ABORTS)]

    @property
    def newest(self) -> str:
        """The last line that has not been shown and is not blank: what stands there in a terminal."""
        tail = self._start[-_TAIL:] + self._end[-_TAIL:]
        lines = re.split(r"[\r\n]", tail.decode(errors="replace"))
        return next((x for x in lines[::-1] if x.strip() and not x.startswith(_GLOO_ABORTS)), "")

    def finish(self) -> None:
        """Shows all that has not been shown yet."""
        self._cut()
        if self._left_out:
            half, newline, whole = self._end.partition(b"\n")
            if newline:  # go on with a whole line
                self._left_out, self._end = self._left_out + len(half) + 1, whole
            self._start += f"\n... {self._left_out:,} bytes left out ...\n".encode()
        rest = self._start + self._end
        self._start.clear()
        self._end.clear()
        if rest:
            self._show(rest.removesuffix(b"\n"))

    def _cut(self):
        too_many = max(0, len(self._end) - LIMIT // 2)
        self._left_out += too_many
        del self._end[:too_many]

    def _show(self, whole):
        for pattern, replacement in _UNSTEADY:
            whole = pattern.sub(replacement, whole)
        lines = whole.decode(errors="replace").split("\n")
        if self._flows:
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        self._aborts += [line for line in lines if line.startswith(_GLOO_ABORTS)]
        text = []
        for line in lines:
            if figure := figures.announced(line):
                before, name, description = figure
                self._write(text + [before] * bool(before) + [description])
                figures.show(os.path.join(self._folder, name))
                text = []
            elif not line.startswith(_GLOO_ABORTS):
                text.append(line)
        self._write(text)

    def _write(self, lines):
        if lines:
            self.before_writing()
            sys.stdout.write("".join(f"{self._prefix}{line}\n" for line in lines))
            sys.stdout.flush()
