"""What the layout page says of ranks on machines, as JSON: which group crosses, and what that costs.

A rank's number counts the innermost group first, and a machine takes the next ranks. What a rank sends,
what it holds and how long a step takes are the planner's (`traffic`, `fullest`, `step_time`).
"""

import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import prod
from typing import NamedTuple

from course_planner.catalogue import hardware_called, model_called
from course_planner.descriptions import Hardware, Layout, Model
from course_planner.memory import fits, fullest, tensors
from course_planner.timing import step_time
from course_planner.traffic import traffic
from playground.guesses import guesses as _guesses

SEQ = 4096
GROUPS = {"tp": "its tensor group", "dp": "its data group", "pp": "a neighbouring stage"}
KINDS = {"tp": "tensor", "dp": "data", "pp": "messages"}  # of a step's seconds
_LINK = re.compile(r"(\dx\d)/([a-z\d.]+)")
_SIZE = re.compile(r"([tdp]p)(\d+)")


class Board(NamedTuple):
    """Machines of equal GPUs, what trains on them, with how many sequences in a step."""

    machines: int
    node: int
    model: str
    batch: int

    @property
    def gpus(self) -> int:
        return self.machines * self.node


BOARDS = {
    "2x4": Board(2, 4, "Llama-2-7B", 32),
    "2x8": Board(2, 8, "Llama-3-8B", 64),
    "4x8": Board(4, 8, "Llama-3-70B", 64),
}


def view(link: str) -> str:
    """All that the page shows of a position, "2x8/dp2.pp2.tp4": the groups from the one whose ranks are
    neighbours outwards. Of one that cannot be, why not."""
    try:
        board, layout = read(link)
    except ValueError as error:
        return json.dumps({"why": str(error)})
    model, hardware = _described(board)
    time, held = step_time(model, layout, SEQ, hardware), fullest(model, layout, SEQ)
    best, par = _shortest(link.split("/")[0])
    shown = {
        "machines": board.machines,
        "node": board.node,
        "places": _places(layout),
        "groups": [
            {
                "name": name,
                "ranks": getattr(layout, name),
                "crosses": any(_away(layout, board.node, name)),
                "sent": _sent(model, layout)[name] / 1e9,
                "seconds": time.parts.get(KINDS[name], 0),
            }
            for name in _order(layout)
        ],
        "seconds": time.seconds,
        "held": tensors(held) / 2**30,
        "room": hardware.hbm_bytes / 2**30,
        "fits": fits(held, hardware),
        "par": par,
        "best": best,
        "crossing": crossing(link),
    }
    return json.dumps(shown)


def read(link: str) -> tuple[Board, Layout]:
    """The board and the layout of an address. Raises ValueError, with a sentence, where it cannot be."""
    found = _LINK.fullmatch(link)
    sizes = _SIZE.findall(found[2]) if found else []
    if not found or found[1] not in BOARDS or sorted(n for n, _ in sizes) != sorted(GROUPS):
        raise ValueError(f"{link!r} is no position of the layout page.")
    board, counts = BOARDS[found[1]], {name: int(size) for name, size in sizes}
    if prod(counts.values()) != board.gpus:
        raise ValueError(f"{' x '.join(size for _, size in sizes)} ranks are not {board.gpus}.")
    if board.batch % counts["dp"]:
        raise ValueError(
            f"{board.batch} sequences cannot be split among {counts['dp']} data ranks."
        )
    rows = board.batch // counts["dp"]
    layout = Layout(**counts, zero=1, micro_batches=rows, order=(*counts, "cp"))
    layout.check(_described(board)[0], SEQ)
    return board, layout


def words(link: str) -> str:
    """What is asked about: the board, and what a rank sends to each of its groups."""
    board, layout = read(link)
    sent = _sent(_described(board)[0], layout)
    names = {"tp": "tensor ranks", "dp": "data ranks", "pp": "stages"}
    told = [f"{sent[name] / 1e9:.3g} GB to {GROUPS[name]}" for name in GROUPS if sent[name]]
    apart, near = 1, []
    for name in _order(layout):
        near.append(
            f"{names[name]} are neighbours (0 and {apart})"
            if not near
            else f"{names[name]} (0 and {apart})"
        )
        apart *= getattr(layout, name)
    return (
        f"{board.model} trains on {board.machines} machines of {board.node} GPUs: {layout.tp} tensor ranks, {layout.dp} "
        f"data ranks, {layout.pp} stages. In a step the busiest rank sends {', '.join(told)}. First "
        f"{', then come '.join(near)}. Ranks 0 to {board.node - 1} are on the first machine."
    )


def crossing(link: str) -> float:
    """The GB that the busiest rank sends to another machine in a step."""
    board, layout = read(link)
    sent = _sent(_described(board)[0], layout)
    away = {name: _away(layout, board.node, name) for name in GROUPS}
    return max(sum(away[n][rank] * sent[n] for n in GROUPS) for rank in range(layout.gpus)) / 1e9


def guesses(link: str) -> str:
    """What one may predict of `crossing`."""
    board, layout = read(link)
    sent = {name: size / 1e9 for name, size in _sent(_described(board)[0], layout).items()}
    right = crossing(link)
    mistakes = [
        (sum(sent.values()), "You count what stays inside a machine as well."),
        (
            right / board.machines,
            "You share it out. In a ring, the rank at a machine's edge sends all to the next machine.",
        ),
        *(
            (sent[name], f"You let what goes to {GROUPS[name]} cross. It stays on a machine here.")
            for name in GROUPS
            if not any(_away(layout, board.node, name))
        ),
        (0, "You let nothing cross. The outermost group has ranks on every machine."),
    ]
    return _guesses(right, mistakes)


def positions(board: str) -> list[str]:
    """All addresses of a board that the model and the batch allow."""
    gpus = BOARDS[board].gpus
    sizes = [s for s in range(1, gpus + 1) if gpus % s == 0]
    found = []
    for tp in sizes:
        for pp in (s for s in sizes if gpus % (tp * s) == 0):
            counts = {"tp": tp, "pp": pp, "dp": gpus // tp // pp}
            for order in permutations(counts):
                link = f"{board}/{'.'.join(f'{name}{counts[name]}' for name in order)}"
                with suppress(ValueError):
                    read(link)
                    found.append(link)
    return found


def cell(link: str) -> str:
    """The cell of a notebook that sends as many kB in these groups as the page has GB."""
    board, layout = read(link)
    sent = _sent(_described(board)[0], layout)
    sizes = {name: getattr(layout, name) for name in reversed(_order(layout))}
    named = {"SIZES": sizes, "SENT": {name: sent[name] // 10**6 for name in GROUPS}}
    text = CELL.replace("NODE", str(board.node)).replace("RANKS", str(board.gpus))
    for name, value in named.items():
        text = text.replace(name, repr(value))
    return text


CELL = """import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_utils import hardware
from course_utils.launch import launch
from course_utils.trace import Trace, on_a_ring


def send(rank, sizes, sent):
    device, crossing = hardware.device(), 0
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name, n in sizes.items():
        ranks, at = dist.get_process_group_ranks(mesh.get_group(name)), mesh.get_local_rank(name)
        if n == 1:
            continue
        with Trace() as trace:
            if name == "pp":  # activations to the next stage, gradients to the one before
                to = [ranks[stage] for stage in (at - 1, at + 1) if 0 <= stage < n]
                message = torch.ones(sent[name] // 4, device=device)
                ops = [dist.P2POp(dist.isend, message, each) for each in to]
                ops += [dist.P2POp(dist.irecv, message.clone(), each) for each in to]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            else:  # a ring sends 2 (n - 1) / n of it, to the next rank
                to = [ranks[(at + 1) % n]]
                tensor = torch.ones(sent[name] * n // (n - 1) // 8, device=device)
                dist.all_reduce(tensor, group=mesh.get_group(name))
        share = sum(each // NODE != rank // NODE for each in to) / len(to)
        crossing += share * sum(on_a_ring(call)[1] for call in trace.record().calls)
    return crossing


sizes, sent = SIZES, SENT
print(f"busiest: {max(launch(send, RANKS, sizes, sent)) / 1e3:.3g} kB to another machine")
"""


@cache
def _described(board: Board) -> tuple[Model, Hardware]:
    return model_called(board.model), replace(hardware_called("H100"), node=board.node)


@cache
def _sent(model: Model, layout: Layout) -> dict[str, int]:
    """The bytes that the busiest rank sends in a step: to its groups, and to each stage beside its own."""
    stages = [traffic(model, layout, SEQ, stage) for stage in range(layout.pp)]
    sums = [Counter() for _ in stages]
    for calls, sent in zip(stages, sums):
        for call in calls:
            sent[call.group] += call.sent
    return {**{name: max(sent[name] for sent in sums) for name in GROUPS}, "pp": sums[-1]["pp"]}


def _away(layout: Layout, node: int, name: str) -> list[int]:
    """Of each rank, to how many ranks of other machines it sends in one of its groups.

    In a ring to the next rank, around the edge to the first; a stage to those before and behind it.
    """
    places = _places(layout)
    numbers = {tuple(place.items()): rank for rank, place in enumerate(places)}
    size, away = getattr(layout, name), []
    for rank, place in enumerate(places):
        near = [place[name] + 1, place[name] - 1]
        near = [each for each in near if 0 <= each < size] if name == "pp" else [near[0] % size]
        to = [numbers[tuple((place | {name: each}).items())] for each in near]
        away.append(sum(each // node != rank // node for each in to))
    return away


def _order(layout: Layout) -> list[str]:
    return [name for name in layout.order if name in GROUPS]


def _places(layout: Layout) -> list[dict[str, int]]:
    """Of each rank, its place in each of its groups."""
    places = []
    for rank in range(layout.gpus):
        place = {}
        for name in _order(layout):
            rank, place[name] = divmod(rank, getattr(layout, name))
        places.append(place)
    return places


@cache
def _shortest(board: str) -> tuple[str, float]:
    """The position with the shortest step among those that fit, and its seconds."""
    times = {}
    for link in positions(board):
        model, hardware = _described(BOARDS[board])
        layout = read(link)[1]
        if fits(fullest(model, layout, SEQ), hardware):
            times[link] = step_time(model, layout, SEQ, hardware).seconds
    best = min(times, key=times.get)
    return best, times[best]
