"""Random programs: launch runs the right ones and explains the wrong ones.

    python -m tests.soaks.soak_programs --programs 500

Each seed makes a program of collectives in groups, messages with tags, asynchronous work, threads,
sleeps and computation, a step a line. It has to run. Then one rank leaves out a step, does it later
or sooner, does another in its place or brings another tensor; the failure has to name the line of
the first step in which the ranks disagree, and that rank. No two steps look alike, so that it is
known which step that is.
"""

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils.launch import RankFailure
from tests.soaks import random_programs
from tests.support.on_gloo import launch

_HEAD = """\
def work(rank):
    world = dist.group.WORLD
    groups = {{ranks: dist.new_group(ranks) for ranks in {groups}}} | {{{world}: world}}
    for_threads = dist.new_group()
"""
_OPERATIONS = ("SUM", "MAX", "MIN")


@dataclass(frozen=True)
class Step:
    """A step of all `ranks`: code for each of them, with one more number of elements than any step
    before it. `wrong`: other code, that does not fit what the other ranks do. `together`: every rank
    waits in it for every other; in a broadcast only for the root."""

    ranks: tuple[int, ...]
    code: dict[int, str]
    wrong: str | None = None
    together: bool = False


@dataclass(frozen=True)
class Program:
    """Its steps, and what one rank does differently, if anything: `changed` is its code by step."""

    world: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    odd: int | None = None
    changed: dict[int, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        everyone = tuple(range(self.world))
        head = _HEAD.format(groups=list(self.groups), world=everyone)
        return head + "".join(self._line(i, step) for i, step in enumerate(self.steps))

    def line(self, index: int) -> int:
        """The line of a step, counted from 1."""
        return _HEAD.count("\n") + 1 + index

    def _line(self, index, step):
        code = dict(step.code)
        if index in self.changed:
            code[self.odd] = self.changed[index]
        cases = ", ".join(f"{rank}: lambda: {code[rank]}" for rank in step.ranks)
        return f"    {{{cases}}}.get(rank, int)()\n"


def right(seed: int, threads: bool = True) -> Program:
    """The program of a seed, with steps in `threads` or without."""
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4])
    everyone = tuple(range(world))
    groups = {tuple(sorted(draw.sample(everyone, draw.randint(2, world)))) for _ in range(2)}
    groups = tuple(sorted(groups - {everyone}))
    kinds = [_collective, _collective, _message, _pause] + threads * [_in_thread]
    steps = [
        draw.choice(kinds)(draw, [everyone, *groups], elements)
        for elements in range(2, 2 + draw.randint(4, 12))
    ]
    return Program(world, groups, tuple(steps))


def wrong(seed: int) -> Program:
    """The program of a seed with a step that one rank does not do as it has to."""
    draw = random.Random(f"wrong {seed}")
    program = right(seed)
    able = [i for i, step in enumerate(program.steps) if step.wrong]
    if not able:
        step = _collective(draw, [tuple(range(program.world))], 2 + len(program.steps))
        program = replace(program, steps=(*program.steps, step))
        able = [len(program.steps) - 1]
    index = draw.choice(able)
    step = program.steps[index]
    rank = draw.choice(step.ranks)
    changes = [{index: "None"}, {index: step.wrong}, *_moves(program.steps, index, rank)]
    return replace(program, odd=rank, changed=draw.choice(changes))


def _moves(steps, index, rank):
    """Two changes: the rank does a step after the next in which it meets a rank that the step needs,
    or before the last one. That rank waits for it in one of the two, and it waits in the other."""
    step = steps[index]
    met = set(step.ranks) - {rank}
    places = [
        (i, other.code[rank])
        for i, other in enumerate(steps)
        if rank in other.ranks
        and met.intersection(other.ranks)
        and step.together
        and other.together
    ]
    for i, code in [(i, code) for i, code in places if i > index][:1]:
        yield {index: "None", i: f"({code}, {step.code[rank]})"}
    for i, code in [(i, code) for i, code in places if i < index][-1:]:
        yield {i: f"({step.code[rank]}, {code})", index: "None"}


def _collective(draw, groups, elements):
    ranks = draw.choice(groups)
    x, group, root = f"torch.ones({elements})", f"group=groups[{ranks}]", draw.choice(ranks)
    operation = draw.choice(_OPERATIONS)
    code, other = draw.choice(
        [
            (f"dist.all_reduce({x}, dist.ReduceOp.{operation}, {group})", "all_gather"),
            (f"dist.all_reduce({x}, {group}, async_op=True).wait()", "float64"),
            (f"dist.broadcast({x}, {root}, {group})", "operation"),
            (f"dist.reduce({x}, {root}, {group})", "shape"),
            (f"dist.all_gather([{x}] * {len(ranks)}, {x}, {group})", "shape"),
        ]
    )
    changes = {
        "all_gather": f"dist.all_gather([{x}] * {len(ranks)}, {x}, {group})",
        "float64": f"dist.all_reduce({x}.double(), {group})",
        "operation": f"dist.all_reduce({x}, dist.ReduceOp.{operation}, {group})",
        "shape": f"dist.all_reduce(torch.ones({elements}, 2), {group})",
    }
    together = code.startswith(("dist.all_reduce", "dist.all_gather"))
    return Step(ranks, dict.fromkeys(ranks, code), changes[other], together)


def _message(draw, groups, elements):
    source, target = draw.sample(groups[0], 2)
    tag = draw.choice([0, 0, 3])
    x = f"torch.ones({elements})"
    send = draw.choice(["dist.send({}, {}, tag={})", "dist.isend({}, {}, tag={}).wait()"])
    receive = draw.choice(["dist.recv({}, {}, tag={})", "dist.irecv({}, {}, tag={}).wait()"])
    code = {
        source: send.format(x, target, tag),
        target: receive.format(x, source, tag),
    }
    return Step((source, target), code, "time.sleep(0)", together=True)


def _pause(draw, groups, _):
    ranks = tuple(draw.sample(groups[0], draw.randint(1, len(groups[0]))))
    code = draw.choice(
        ["time.sleep({:.2f})", "(torch.ones(300, 300) @ torch.ones(300, 300), time.sleep({:.2f}))"]
    )
    return Step(ranks, {rank: code.format(draw.random() / 2) for rank in ranks})


def _in_thread(draw, groups, elements):
    thread = (
        "(t := threading.Timer({:.2f}, dist.all_reduce, [torch.ones({})], dict(group=for_threads)), "
        "t.start(), t.join())"
    )
    return Step(groups[0], {rank: thread.format(draw.random() / 4, elements) for rank in groups[0]})


def compiled(program: Program, folder: Path, name: str) -> Callable[[int], None]:
    """The program as a function."""
    space = {m.__name__: m for m in (torch, time, threading)} | {"dist": dist}
    return random_programs.compiled(program.source, folder / f"{name}.py", space)


def complaint(seed: int, folder: Path) -> str | None:
    """What is wrong with how launch took both programs of a seed; None if nothing is."""
    program = right(seed)
    try:
        launch(compiled(program, folder, f"right_{seed}"), program.world)
    except RankFailure as failure:
        return f"seed {seed}, a right program was refused:\n{program.source}\n{failure}"
    program = wrong(seed)
    try:
        launch(compiled(program, folder, f"wrong_{seed}"), program.world)
    except RankFailure as failure:
        if unexplained := _unexplained(program, failure):
            return f"seed {seed}, {unexplained}:\n{program.source}\n{failure}"
        return None
    return f"seed {seed}, a wrong program was not noticed:\n{program.source}"


def _unexplained(program, failure):
    text = str(failure)
    named = {
        int(n)
        for words in re.findall(r"ranks? ([\d, and]+)", text)
        for n in re.findall(r"\d+", words)
    }
    if failure.kind not in ("mismatch", "timeout") or "when the time was up" in text:
        return "a wrong program was not explained"
    line = program.line(min(program.changed))
    if f", line {line}," not in text:
        return f"line {line} is not named"
    return None if program.odd in named else f"rank {program.odd} is not named"


if __name__ == "__main__":
    words = "right programs and as many wrong ones"
    random_programs.soak(__doc__, complaint, words, programs=500, at_once=4)
