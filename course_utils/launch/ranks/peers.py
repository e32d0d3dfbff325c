"""Refuses a message to, or from, a rank that is not there.

`dist.send(tensor, rank + 1)` on the last rank is the usual slip. Gloo takes the call and waits for
ever for a rank that nobody starts; for a message of a rank to itself it fails in words about
connections.
"""

import torch.distributed as dist


def refuse_impossible(name: str, arguments: dict) -> None:
    """To be called before each call, as a listener of `intercept`. Raises ValueError, in the line
    that makes the call."""
    if name not in ("send", "recv_"):
        return
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    peer = arguments["dst" if name == "send" else "src"]  # as the group counts
    if not 0 <= peer < group.size():
        raise ValueError(
            f"there is no rank {peer}: the ranks of the group are 0 to {group.size() - 1}"
        )
    if peer == group.rank():
        raise ValueError(f"rank {dist.get_rank()} names itself as the other end of a message")
