"""Ports of 127.0.0.1 for servers that want to be told theirs.

The system hands out ports from 32768 on to whoever asks for any: a rank's store, a connection that
goes out, a kernel. One that was free a moment ago may be gone when the server takes it. These lie
below, where nobody is put unasked.
"""

import contextlib
import random
import socket

BELOW_WHAT_THE_SYSTEM_HANDS_OUT = range(20_000, 32_768)


def free_ports(count: int) -> list[int]:
    """As many ports that nobody listens on, all different."""
    tries = random.SystemRandom().sample(BELOW_WHAT_THE_SYSTEM_HANDS_OUT, k=1000)
    with contextlib.ExitStack() as held:
        free = []
        while len(free) < count:
            port = tries.pop()
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                free.append(port)
        return free
