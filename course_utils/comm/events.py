"""What happens in a launch, a line an event, from all of its processes: COURSE_LOG=/path/of/a/file.

    10:47:03.214  4711  asked      2 ranks of average, 60 s
    10:47:03.221  4730  joined     rank 0

Time, process, event, and what it is about. docs/processes.md says how to read it.
"""

import contextlib
import os
import time


def note(event: str, about: str) -> None:
    """Adds a line, whole, if the environment asks for it; a log that cannot be written stops nothing."""
    path = os.environ.get("COURSE_LOG")
    if not path:
        return
    now = time.time()
    clock = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03}"
    line = f"{clock}  {os.getpid():>6}  {event:<9}  {about}\n"
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
