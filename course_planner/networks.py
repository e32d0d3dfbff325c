"""Where the ranks of a group lie, and how quickly they reach each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from course_planner.descriptions import Hardware, Layout

MEMBERS = {"tp": "tp", "cp": "cp", "dp": "dp cp", "edp": "dp cp", "ep": "dp cp", "pp": "pp"}


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

    Ranks are numbered as layout.order has it, and a node takes the next `node` of them. "pp" are
    two neighbouring stages, at the worst boundary; "ends" the first and the last stage.
    """
    if group in ("pp", "ends"):
        far = layout.gpus > node if group == "ends" else _inside("pp", layout, node) < layout.pp
        return Place(2, 1 if far else 2)
    beside = 1
    for kind in MEMBERS[group].split():
        beside *= _inside(kind, layout, node)
    ranks = {
        "tp": layout.tp,
        "cp": layout.cp,
        "dp": layout.shards,
        "ep": layout.ep,
        "edp": layout.shards // layout.ep,
    }[group]
    if group == "edp":
        beside = max(beside // layout.ep, 1)
    return Place(ranks, min(beside, ranks))


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


def latency_of(place: Place, hardware: Hardware) -> float:
    """Seconds of one round: of a ring, all wait for the slowest hop."""
    return hardware.intra_latency if place.nodes == 1 else hardware.inter_latency
