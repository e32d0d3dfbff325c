"""What the ranks print, in an order that is the same in every run.

Each rank's file descriptors 1 and 2 lead into a pipe of its own, so nothing is lost: what C code
writes, what a rank writes just before it dies, half a line. Rank 0's lines appear as they come;
the others' follow in rank order when the call ends.
"""

import ctypes
import io
import os
import sys

LIMIT = 64 * 1024  # bytes shown of a rank's output: half from its start, half from its end


def redirect(pipe) -> None:
    """In a rank: file descriptors 1 and 2, Python's and C's streams all write into `pipe`."""
    for fd in (1, 2):
        os.dup2(pipe.fileno(), fd)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    libc = ctypes.CDLL(None)
    for name in ("stdout", "__stdoutp"):  # Linux, macOS
        try:
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 2, 0)  # 2: unbuffered
        except ValueError:
            pass  # the other system's name


def _stream(fd):
    # Nothing stays in a buffer that a dying rank would take with it.
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True)


class Output:
    """The output of one rank as it arrives, cut in its middle when it is enormous."""

    def __init__(self, rank: int, live: bool):
        self._prefix = f"[rank {rank}] ".encode()
        self._live = live
        self._line = b""  # the last line, as long as it is incomplete
        self._head, self._room = [], LIMIT // 2
        self._tail, self._left_out = b"", 0

    def add(self, data: bytes) -> None:
        """Takes the next bytes that the rank has written."""
        if self._room <= 0:
            self._keep_end(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        while lines and self._room > 0:
            self._add_line(lines.pop(0))
        if self._room <= 0 or len(self._line) > self._room:
            self._room = 0
            rest = b"\n".join([*lines, self._line])
            self._line = b""
            self._keep_end(rest)

    def _add_line(self, line):
        self._room -= len(line) + 1
        self._emit(line)

    def _keep_end(self, data):
        self._tail += data
        if len(self._tail) > 2 * LIMIT:
            self._left_out += len(self._tail) - LIMIT // 2
            self._tail = self._tail[-LIMIT // 2 :]

    def finish(self) -> None:
        """Shows what has not been shown yet."""
        if self._line:
            self._emit(self._line)
        for line in self._end():
            self._emit(line)
        self._line = self._tail = b""
        self._print(self._head)
        self._head = []

    def _end(self):
        if not self._tail:
            return []
        left_out = self._left_out + max(0, len(self._tail) - LIMIT // 2)
        tail = self._tail[-LIMIT // 2 :]
        if left_out:
            # The tail starts at a whole line if it has one.
            before, newline, after = tail.partition(b"\n")
            if newline:
                left_out, tail = left_out + len(before) + 1, after
            yield f"... {left_out:,} bytes left out ...".encode()
        yield from tail.removesuffix(b"\n").split(b"\n")

    def _emit(self, line):
        if self._live:
            self._print([line])
        else:
            self._head.append(line)

    def _print(self, lines):
        if lines:
            text = b"".join(self._prefix + line + b"\n" for line in lines)
            sys.stdout.write(text.decode(errors="replace"))
            sys.stdout.flush()
