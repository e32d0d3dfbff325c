"""A collective or a message: who takes part in it, and what each rank hands over."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from course_utils.comm.collectives import OPERATORS, tensors_in
from course_utils.comm.rings import PASSES, bus_factor


@dataclass(frozen=True)
class Call:
    """A collective or a message. `bytes`, `elements` and `dtype` describe its payload.

    `sends` is False where this rank only receives. `ranks` are those that take part, for a message
    (from, to); `root` is the rank at the centre of a broadcast, scatter, gather or reduce.
    """

    op: str
    bytes: int
    elements: int
    dtype: str
    sends: bool = True
    ranks: tuple[int, ...] = ()
    root: int | None = None


def describe(name: str, arguments: dict) -> Call | None:
    """The call that the operator `name` of c10d makes with these arguments; None if it makes none."""
    if (operator := OPERATORS.get(name)) is None:
        return None
    payload, received = operator.payload, operator.received
    ranks, root, sends = (), None, payload is not None
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    members = dist.get_process_group_ranks(group)
    if name == "send":
        ranks = (members[group.rank()], members[arguments["dst"]])
    elif name == "recv_":
        ranks = (members[arguments["src"]], members[group.rank()])
    elif name != "recv_any_source_":
        ranks = tuple(members)
    if "root_rank" in arguments:
        root = members[arguments["root_rank"]]
        sends = received is None or root == members[group.rank()]
    tensors = tensors_in(arguments[payload if sends else received]) if payload or received else []
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    elements = sum(tensor.numel() for tensor in tensors)
    size = sum(tensor.nbytes for tensor in tensors)
    return Call(operator.op, size, elements, dtype, sends, ranks, root)


def on_a_ring(call: Call) -> tuple[int, float]:
    """The payload of a call as nccl-tests counts it, and the bytes that this rank sends for it.

    A collective goes around a ring (`rings.bus_factor`); of an all-gather the payload is what a rank
    holds afterwards, n times what it hands over. Any other call is sent as it is.
    """
    ranks = len(call.ranks)
    payload = call.bytes * (ranks if call.op == "all_gather" else 1)
    if call.op in PASSES:
        return payload, payload * bus_factor(call.op, ranks)
    return payload, call.bytes if call.sends else 0


def ring_bytes(calls: Iterable[Call]) -> int:
    """Returns the bytes that rings would send from this rank for `calls`, collectives of `Call`.

    On a ring of n ranks an all-reduce of S bytes sends 2(n - 1)/n times S from each rank, a
    reduce-scatter of S bytes (n - 1)/n times S, and an all-gather n - 1 times what the rank hands
    over (Thakur, Rabenseifner, Gropp 2005, sections 4.1 to 4.3). Raises ValueError for other calls.
    """
    total = 0.0
    for call in calls:
        if call.op not in PASSES:
            raise ValueError(
                f"The bytes of {call.op} on a ring are not known here; there are {', '.join(PASSES)}."
            )
        total += on_a_ring(call)[1]
    return round(total)
