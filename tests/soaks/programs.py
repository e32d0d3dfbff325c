"""Random distributed programs for `launch`: right ones, and ones with exactly one mistake.

A program is the text of `program(rank)`, put together from the blocks of blocks.txt, which says how
one is written. A mistake is a block's own; or one that can be made at any call (it is left out, made
once more, or something goes wrong before it); or one around a block; or a call at the very end that
nobody answers. What a learner has to be told about it is known with the program.
"""

import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from textwrap import indent

HEAD = """\
import os, queue, shutil, signal, socket, subprocess, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.distributed._functional_collectives as funcol
from course_utils import hardware
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""
# A message says by one of these that ranks missed each other.
MISSED = r"do(es)? not match|finished|without|\bwait|did not|never|\bless\b"
SYNC = "dist.$C($DO)  #: $C"
ASYNC = """works_ = [dist.barrier(async_op=True)]  #? barrier
works_.append(dist.$C($DO, async_op=True))  #: $C
for w_ in $ORDER: w_.wait()  #? wait"""

DEATHS = {  # the statement, what a message says of it; whether anything can see its line
    "sys.exit": ("sys.exit(3)", [r"exit\(3\)|SystemExit: 3"], True),
    "os._exit": ("os._exit(4)", ["exit|ended", r"\b4\b"], False),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ["SIGKILL"], False),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", ["SIGSEGV"], True),
    "abort": ("os.abort()", ["SIGABRT"], True),
}
RAISED = {  # the statement, what a message says of it
    "raises": ("raise ValueError('bad batch 17')", ["ValueError", "bad batch 17"]),
    "raises three levels deep": ("load(rank)", ["KeyError", "shard 17"]),
    "raises from another": ("config()", ["RuntimeError", "cannot read config", "x7"]),
}
DEEP = """
def read(rank):
    raise KeyError('shard 17')
def batch(rank):
    return read(rank)
def load(rank):
    return batch(rank)
def config():
    try:
        return int('x7')
    except ValueError as error:
        raise RuntimeError('cannot read config') from error
"""
RAISING = [line.strip() for line in DEEP.splitlines() if "raise " in line]
MARK = re.compile(r"^( *)(.*\S)  #([:!?]) (.+?)(?: @(\[.*\]))?$")
SLIP = re.compile(r"!! (.+?)(?: \? (.+?))?: (.+?) >> (.+)\n   (.+?)(?: ~ (.+))?$", re.MULTILINE)


@dataclass
class Mistake:
    """What a learner has to be told: patterns of the cause, and of what the guilty rank did; the
    lines of which one has to be quoted."""

    name: str
    guilty: int
    says: list[str]
    did: str = "."
    lines: set[str] = field(default_factory=set)
    loops: bool = False  # in the learner's own code, so that the time limit may pass
    unseen: bool = False  # nothing can see its line: the place where others were is enough
    exact: bool = False  # its own lines are known, and the calls around it are not enough


@dataclass
class Program:
    seed: int
    world: int
    text: str
    want: dict[str, list]  # what each rank has to return, by name; None where only: all the same
    mistake: Mistake | None = None


class Block:
    """One block, drawn: its text still has its marks."""

    def __init__(self, rng, source, words):
        head, *rows = source.splitlines()
        self.name, _, *flags = re.split(", *", head)
        self.once, self.last = "once" in flags, "last" in flags
        cases = [case for row in rows if row.startswith(": ") and (case := case_of(row[2:], words))]
        words = words | (rng.choice(cases) if cases else {})
        body = "\n".join(row for row in rows if not row.startswith(": "))
        text, _, value = body.split("\n!! ")[0].partition("\n=> ")
        self.lines = fill(text, words).strip("\n").splitlines()
        value, _, self.right = fill(value, words).strip().partition(" ~ ")
        self.returns = bool(value)
        if value:
            self.lines.append(f"out['{self.name}_'] = {value}")
        slips = [[fill(part, words) for part in slip] for slip in SLIP.findall(body)]
        self.slips = [slip for slip in slips if not slip[1] or eval(slip[1])]

    def wants(self, n):
        """What each rank has to have as the block's value; [] where only all the same."""
        places = ({"rank": r, "world": n} for r in range(n))
        return [eval(self.right, place) for place in places] if self.right else []

    def calls(self, g):
        """The marked lines at which rank g makes the call, where others take part in it."""
        marks = [(i, MARK.match(line)) for i, line in enumerate(self.lines)]
        marks = [(i, m) for i, m in marks if m and m[3] != "?"]
        return [(i, m) for i, m in marks if not m[5] or g in eval(m[5])]


def case_of(row, words):
    """What a row of alternatives puts for which words; nothing if its condition does not hold."""
    if row.startswith("? "):
        condition, _, row = row[2:].partition(" ; ")
        if not eval(fill(condition, words)):
            return {}
    return dict(word.split("=", 1) for word in row.split(" ; "))


def fill(text, words):
    """The text with its $WORDS, which may have $WORDS in them."""
    for _ in range(4):
        text = Template(text).safe_substitute(words)
    return text


def drawn_words(rng, n, g):
    o = rng.choice([r for r in range(n) if r != g])
    t = next((r for r in range(n) if r not in (g, o)), None)
    root = rng.choice([g, o])
    a, b = rng.sample([g, o], 2)
    return {
        "G": g, "O": o, "T": t, "A": a, "B": b, "R": root, "W": (root + 1) % n, "N": n,
        "S": n * (n + 1) // 2, "N6": 6 * n, "N4": 4 * n, "TWO": (g + 2) % n,
        "REST": [r for r in range(n) if r != root], "OTHERS": [r for r in range(n) if r != o],
        "PAIR": sorted([g, o]), "STRANGERS": sorted([o, t or 0]),
        "NEAR": [r for r in range(n) if r // 2 == g // 2],
        "ODD": [r for r in range(n) if r % 2 == g % 2],
        "LIST": "[torch.empty_like(x_) for _ in range(world)]", "MAKE": "None",
        "HERE": f"if rank == {g} else", "MISSED": MISSED, "TURNS": rng.choice([300, 600]),
        "CALLS": rng.choice([SYNC, ASYNC]), "ORDER": rng.choice(["works_", "reversed(works_)"]),
    }  # fmt: skip


SOURCES = [s.strip() for s in Path(__file__).with_name("blocks.txt").read_text().split("\n## ")[1:]]
WEIGHTS = [int(s.splitlines()[0].split(",")[1]) for s in SOURCES]


def own(rng, block, g):
    """One of the block's own mistakes, made in its text."""
    name, _, old, new, says, did = rng.choice(block.slips)
    old, new = old.replace("\\n", "\n"), new.replace("\\n", "\n")
    text = "\n".join(block.lines)
    assert text.count(old) == 1, (block.name, name)  # one mistake, in one place
    # What comes is one or several lines, indented like what goes.
    space = re.search(r"(?m)^( *).*" + re.escape(old.split("\n")[0]), text)[1]
    first, *rest = new.split("\n")
    changed = text.replace(old, "\n".join([first, *(space * (old[0] != " ") + r for r in rest)]))
    lines = {line for line in changed.splitlines() if line not in block.lines}
    block.lines = changed.splitlines()
    return Mistake(name, g, says.split(" ; "), did or ".", lines, exact="raise " in new)


def at_a_call(rng, block, g):
    """A mistake at one of the block's calls."""
    i, found = rng.choice(block.calls(g))
    space, _, mark, _, members = found.groups()
    alone = mark == "!" or (members and len(eval(members)) == 1)
    weights = [4, 4, 3, 1, 0 if alone else 16]
    kind = rng.choices(["raise", "die", "return", "busy", "missed"], weights)[0]
    if kind == "raise":
        kind, (new, says) = rng.choice([*RAISED.items()])
        mistake = Mistake(kind, g, says, says[0], {*RAISING}, exact=True)
    elif kind == "die":
        kind, (new, says, seen) = rng.choice([*DEATHS.items()])
        mistake = Mistake(kind, g, says, says[0], unseen=not seen, exact=seen)
    elif kind == "return":
        loops = any("while not" in line for line in block.lines[i:])  # the others' own
        new, mistake = "return out", Mistake("returns", g, [MISSED], loops=loops)
    elif kind == "busy":
        new, mistake = "pass", Mistake("loops for ever", g, ["."], loops=True)
    else:
        return missed_call(rng, block, g, i)
    new = f"{'while' if kind == 'busy' else 'if'} rank == {g}: {new}"
    block.lines.insert(i, space + new)
    mistake.lines.add(new)
    return mistake


def missed_call(rng, block, g, i):
    """A call, the block's line i, that one rank leaves out or makes once more."""
    space, call, _, name, _ = MARK.match(block.lines[i]).groups()
    kind = rng.choice(["one too many", "left out", "a branch", "swallows", "swallows"])
    if re.match(r"\w+ = ", call):  # its result is needed by what follows
        kind = "one too many"
    new = {
        "one too many": f"{call}\nif rank == {g}: {call}",
        "left out": f"if rank != {g}: {call}",
        "a branch": f"if rank != {g}:\n    {call}",
        "swallows": f"try:\n    if rank == {g}: raise OSError('no shard')\n    {call}\n"
        "except OSError: pass",
    }[kind].splitlines()
    says = ["OSError"] if kind == "swallows" and sys.version_info >= (3, 12) else []
    block.lines[i : i + 1] = [space + line for line in new]
    return Mistake(kind, g, [name, MISSED, *says], lines=set(new))


def around(rng, block, g):
    """A mistake around a whole block."""
    names = [m[4] for line in block.lines if (m := MARK.match(line))]
    kind, head = "a branch around", f"if rank != {g}:  # only some"
    if not block.once and rng.random() < 0.5:
        kind, head = "a turn less", f"for turn_ in range(3 - (rank == {g})):"
    block.lines = [head, *(f"    {line}" for line in block.lines)]
    return Mistake(kind, g, ["|".join(names), MISSED], lines={head})


def dressed(rng, block, i):
    """The i-th block's lines in the program, and functions above it."""
    body = number("\n".join(block.lines), i)
    kind = rng.choice(["as it is", "as it is", "in a function", "levels", "finally", "loop"])
    if block.last or kind == "as it is" or (kind == "loop" and block.once):
        return body, ""
    if kind == "loop":
        return f"for again{i} in range({rng.choice([2, 3])}):\n" + indent(body, "    "), ""
    if kind == "finally":
        return f"try:\n{indent(body, '    ')}\nfinally:\n    ended{i} = True", ""
    above = f"def part{i}(rank, world, out):\n{indent(body, '    ')}\n"
    if kind == "in a function":
        return f"part{i}(rank, world, out)", above
    above += f"def middle{i}(*given):\n    return part{i}(*given)\n"
    return f"outer{i}(rank, world, out)", above + f"def outer{i}(*given):\n    middle{i}(*given)\n"


def break_one(rng, blocks, g):
    """Makes one mistake: (which block it is in, the mistake), none where it has to be at the end."""
    i = rng.randrange(len(blocks))
    block, ways = blocks[i], {None: 1}
    if block.slips:
        ways[own] = 10
    if block.calls(g):
        ways[at_a_call] = 8
    if not block.last and any(m and m[3] == ":" and not m[5] for m in map(MARK.match, block.lines)):
        ways[around] = 2
    (way,) = rng.choices([*ways], [*ways.values()])
    return (i, way(rng, block, g)) if way else (len(blocks), None)


def unanswered(rng, n, g):
    """The last line: a call that no rank answers, and for which none waits."""
    to = rng.choice([r for r in range(n) if r != g])
    name, call, says = rng.choice([
        ("isend", f"dist.isend(torch.ones(2), {to})", ["send", f"to rank {to}"]),
        ("all_reduce", "dist.all_reduce(torch.ones(5), async_op=True)", ["all_reduce", MISSED]),
    ])  # fmt: skip
    line = f"if rank == {g}: {call}"
    return line, Mistake(f"unanswered {name}, no wait", g, says, lines={line})


def number(text, i):
    return re.sub(r"\b([A-Za-z]\w*)_\b", rf"\g<1>{i}", text)


def plain(text):
    """Without the marks."""
    return "\n".join(MARK.sub(r"\1\2", line) for line in text.splitlines())


def make(seed, broken, rules=False):
    """The program of a seed; for NCCL's rules its tensors lie on the device."""
    rng = random.Random(f"{seed} {broken}")
    n = rng.choice([2, 2, 3, 4])
    g = rng.choice([0, 1, n - 1])
    other = ", gloo" if rules else ", nccl"
    weights = [w * (other not in s.split("\n")[0]) for s, w in zip(SOURCES, WEIGHTS)]
    some = rng.choices(SOURCES, weights, k=rng.choice([1, 1, 2, 2, 3, 4]))
    blocks = [Block(rng, source, drawn_words(rng, n, g) | {"RULES": rules}) for source in some]
    blocks = [b for b in blocks if not b.last] + [b for b in blocks if b.last][:1]
    end, at, mistake = rng.choice(["", "dist.barrier()  #? barrier"]), len(blocks), None
    if broken:
        at, mistake = break_one(rng, blocks, g)
        if not mistake:
            end, mistake = unanswered(rng, n, g)
        elif mistake.name == "returns":  # without a call behind it that would be right
            end = "dist.barrier()  #? barrier"
    main, above = zip(*(dressed(rng, block, i) for i, block in enumerate(blocks)), strict=True)
    begin = "torch.set_default_device(hardware.device())" if rules else ""
    main = indent("\n".join([begin, *main, end]), "    ")
    text = plain(
        f"{HEAD}{DEEP if mistake and mistake.name in RAISED else ''}\n" + "\n".join(above)
        + f"\ndef program(rank):\n    world, out = dist.get_world_size(), {{}}\n{main}\n    return out\n"
    )  # fmt: skip
    if mistake:
        last = len(blocks) if mistake.name == "returns" else at
        lines = [number(line, i) for i, b in enumerate(blocks) for line in b.lines
                 if at <= i <= last and MARK.match(line)] + [end] * (last >= len(blocks))  # fmt: skip
        lines = [] if mistake.exact else lines
        lines += [number(line, at) for line in mistake.lines]
        mistake.lines = {plain(line).strip() for line in lines} - {"", "else:", "try:"}
        mistake.says = [number(pattern, at) for pattern in mistake.says]
    want = {f"{b.name}{i}": b.wants(n) for i, b in enumerate(blocks) if b.returns}
    return Program(seed, n, text, want, mistake)
