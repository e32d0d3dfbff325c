"""Where the ranks of a group lie, and how quickly they reach each other."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from course_planner.descriptions import Hardware, Layout
from course_utils.comm.rings import PASSES

DATA = ("dp", "edp", "ep", "replicas")  # groups within the ranks of data and context


@dataclass(frozen=True)
class Place:
    """A group of `ranks`, of which `beside` share a node."""

    ranks: int
    beside: int

    @property
    def nodes(self) -> int:
        """The nodes that the group spans."""
        return -(-self.ranks // self.beside)


def place_of(group: str, layout: Layout, node: int) -> Place:
    """Where a group that `traffic` names lies, on nodes of `node` GPUs.

    Ranks are numbered as layout.order has it, and a node takes the next `node` of them, or as many
    as divide the ranks evenly (64 of 72). "pp" are two neighbouring stages, at the worst boundary;
    "ends" the first and the last stage.
    """
    node = _used(layout.gpus, node)
    if group in ("pp", "ends"):
        far = layout.gpus > node if group == "ends" else _inside("pp", layout, node) < layout.pp
        return Place(2, 1 if far else 2)
    beside = 1
    for kind in ("dp", "cp") if group in DATA else (group,):
        beside *= _inside(kind, layout, node)
    ranks = {
        "tp": layout.tp,
        "cp": layout.cp,
        "dp": layout.sharding,
        "replicas": layout.replicas,
        "ep": layout.ep,
        "edp": layout.shards // layout.ep,
    }[group]
    if group in ("edp", "replicas"):
        beside = max(beside // (layout.ep if group == "edp" else layout.sharding), 1)
    return Place(ranks, min(beside, ranks))


def _used(gpus: int, node: int) -> int:
    """The GPUs of each node that a job of `gpus` takes: equally many, where that leaves few idle."""
    even = max(size for size in range(1, node + 1) if gpus % size == 0)
    return node if gpus <= node or even < 0.75 * node else even


def place_of_ranks(ranks: Sequence[int], node: int) -> Place:
    """Where a group of these ranks lies, on nodes of `node` GPUs; at its fullest node."""
    return Place(len(ranks), max(Counter(rank // node for rank in ranks).values()))


def _inside(kind: str, layout: Layout, node: int) -> int:
    """How many neighbours along one of a layout's sizes share a node, in the group that has fewest."""
    stride = 1
    for other in layout.order[: layout.order.index(kind)]:
        stride *= getattr(layout, other)
    size = getattr(layout, kind)
    if stride * size <= node and node % (stride * size) and layout.gpus > node:
        return -(-size // 2)  # some of these groups lie on two nodes
    return max(min(node // stride, size), 1)


def latency_of(op: str, place: Place, hardware: Hardware) -> float:
    """Seconds that a collective or message takes beside its bytes: hops one after the other.

    A ring's pass has a hop to each node and the others inside nodes; an all-reduce goes up and down
    a tree of nodes where that is shorter (NCCL's src/graph/tuning.cc, whose hops are the two
    latencies). A message, and all that an all-to-all sends at once, are one hop.
    """
    inside, between, nodes = hardware.intra_latency, hardware.inter_latency, place.nodes
    if op not in PASSES or op == "all_to_all":
        return between if nodes > 1 else inside
    ring = PASSES[op] * ((place.ranks - nodes) * inside + (nodes - 1) * between)
    if op != "all_reduce":
        return ring
    return min(ring, 2 * ((place.beside - 1) * inside + math.log2(nodes) * between))
