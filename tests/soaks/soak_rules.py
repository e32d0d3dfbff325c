"""Random programs under NCCL's rules: those that keep them run, and one broken rule is named.

    python -m tests.soaks.soak_rules --programs 200

Each seed makes a program of collectives, messages, asynchronous calls, batches, groups and kernels on
the ranks' device. launch(..., rules="nccl") has to run it, and the same program with one line in
which every rank breaks one rule has to be refused in that rule's words, at that line.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from course_strict.rules import RULES
from course_utils import hardware
from course_utils.comm import host_waits
from course_utils.launch import RankFailure, launch
from tests.soaks import random_programs

# `fresh` makes a tensor with which no call has to do with yet; `other` is the next rank of the ring.
_HEAD = """\
def work(rank):
    device, world = hardware.device(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    group = dist.new_group({members})
    fresh = lambda *shape, **kind: torch.ones(*shape, device=device, **kind)
    x = fresh(4, 4)
"""

# What every rank may do. {n} is a number of elements, {root} a rank, {op} a reduction.
_RIGHT = (
    "dist.all_reduce(fresh({n}), dist.ReduceOp.{op})",
    "dist.all_reduce(fresh({n}, 3)[1], dist.ReduceOp.AVG)",
    "dist.broadcast(fresh({n}, dtype=torch.bfloat16), {root})",
    "dist.reduce(fresh({n}, dtype=torch.int32), {root})",
    "dist.all_gather([fresh({n}) for _ in range(world)], fresh({n}))",
    "dist.reduce_scatter(fresh({n}), [fresh({n}) for _ in range(world)])",
    "dist.all_to_all([fresh({n}) for _ in range(world)], [fresh({n}) for _ in range(world)])",
    "dist.barrier()",
    "rank in {members} and dist.all_reduce(fresh({n}), group=group)",
    "y = fresh({n}); w = dist.all_reduce(y, async_op=True); z = x @ x; w.wait(); y.add_(1)",
    "y = fresh({n}); dist.all_reduce(y, async_op=True); dist.all_reduce(x, async_op=True).wait(); y.sum()",
    (
        "y = fresh({n}); dist.isend(fresh({n}), after).wait() if rank == 0 else "
        "dist.irecv(y, before).wait() if rank == 1 else None; y.sum().item()"
    ),
    (
        "y = fresh({n}); [w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, "
        "fresh({n}), after), dist.P2POp(dist.irecv, y, before)])]; y.sum().item()"
    ),
    "x = (x + torch.tensor(2.0)).tanh()",
    "x = x[torch.tensor([3, 2, 1, 0])]",
    "x.cpu().numpy().sum()",
    "x = torch.rand(4, 4, generator=torch.Generator().manual_seed({n})).to(device)",
    "dist.all_reduce(x.t().contiguous())",
    "dist.monitored_barrier(group=dist.new_group(backend='gloo'))",
)

# rule: (lines that break it, its words)
_IN_FLIGHT = host_waits.USED_EARLY
_BROKEN = {
    "CPU tensor": (
        (
            "dist.all_reduce(torch.ones({n}))",
            "dist.broadcast(torch.ones({n}), {root})",
            "dist.all_gather([fresh({n}).cpu() for _ in range(world)], torch.ones({n}))",
            "dist.send(torch.ones({n}), after)",
        ),
        "No backend type associated with device type cpu",
    ),
    "gaps": (
        (
            "dist.all_reduce(fresh({n}, 3)[:, 0])",
            "dist.broadcast(fresh({n}, 3).t(), {root})",
            "dist.isend(fresh({n}, 3)[:, 1], after)",
            "dist.all_gather([fresh({n}, 2)[:, 0] for _ in range(world)], fresh({n}))",
        ),
        "Tensors must be contiguous",
    ),
    "dtype": (
        (
            "dist.all_reduce(fresh({n}, dtype=torch.int16))",
            "dist.broadcast(fresh({n}, dtype=torch.int16), {root})",
            "dist.reduce(fresh({n}, dtype=torch.int16), {root})",
        ),
        "Input tensor data type is not supported for NCCL process group: Short",
    ),
    "reduction": (
        tuple(
            f"dist.all_reduce(fresh({{n}}, dtype=torch.int32), dist.ReduceOp.{op})"
            for op in ("BAND", "BOR", "BXOR")
        ),
        "with NCCL",
    ),
    "any source": (
        ("dist.recv(fresh({n}))", "dist.irecv(fresh({n}))"),
        "does not support recvAnysource",
    ),
    "in flight": (
        (
            "y = fresh({n}); w = dist.all_reduce(y, async_op=True); y.sum()",
            "y = fresh({n}); w = dist.broadcast(y, {root}, async_op=True); y.add_(1)",
            "y = fresh({n}); w = dist.all_reduce(y, async_op=True); dist.all_reduce(y)",
            (
                "y = fresh({n}); dist.batch_isend_irecv([dist.P2POp(dist.isend, fresh({n}), after), "
                "dist.P2POp(dist.irecv, y, before)]); y.tolist()"
            ),
        ),
        _IN_FLIGHT,
    ),
    "generator": (
        (
            "torch.rand({n}, generator=torch.Generator(), device=device)",
            "fresh({n}).normal_(generator=torch.Generator())",
        ),
        RULES["generator"].text,
    ),
    "mixed devices": (
        (
            "fresh({n}) + torch.ones({n})",
            "x @ torch.ones(4, 4)",
            "torch.nn.Linear(4, 2).to(device)(torch.ones(1, 4))",
            "torch.cat([fresh({n}), torch.ones({n})])",
            "fresh({n}).add_(torch.ones({n}))",
        ),
        "Expected all tensors to be on the same device",
    ),
    "numpy": (("x.numpy()",), "Use Tensor.cpu() to copy the tensor to host memory first"),
    "gloo's barrier": (("dist.monitored_barrier()",), "GLOO"),
}


@dataclass(frozen=True)
class Program:
    """Its source, and the rule that one of its lines breaks, if any."""

    world: int
    lines: tuple[str, ...]
    members: tuple[int, ...]
    rule: str | None = None
    broken: int | None = None  # which of the lines

    @property
    def source(self) -> str:
        head = _HEAD.format(members=list(self.members))
        return head + "".join(f"    {line}\n" for line in self.lines)

    @property
    def broken_line(self) -> int:
        """The number of the broken line in the source, counted from 1."""
        return _HEAD.count("\n") + 1 + self.broken


def right(seed: int) -> Program:
    """The program of a seed that keeps all rules."""
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4])
    members = tuple(sorted(draw.sample(range(world), draw.randint(1, world))))
    lines = [_filled(draw, draw.choice(_RIGHT), world, members) for _ in range(draw.randint(3, 9))]
    return Program(world, tuple(lines), members)


def wrong(seed: int) -> Program:
    """The same with one more line, which breaks one rule."""
    draw = random.Random(f"wrong {seed}")
    program = right(seed)
    rule = draw.choice(list(_BROKEN))
    line = _filled(draw, draw.choice(_BROKEN[rule][0]), program.world, program.members)
    place = draw.randint(0, len(program.lines))
    lines = (*program.lines[:place], line, *program.lines[place:])
    return Program(program.world, lines, program.members, rule, place)


def _filled(draw, line, world, members):
    return line.format(
        n=draw.randint(2, 9),
        root=draw.randrange(world),
        op=draw.choice(["SUM", "MAX", "MIN", "PRODUCT"]),
        members=list(members),
    )


def compiled(program: Program, folder: Path, name: str) -> Callable[[int], None]:
    """The program as a function."""
    space = {"torch": torch, "dist": dist, "hardware": hardware}
    return random_programs.compiled(program.source, folder / f"{name}.py", space)


def complaint(seed: int, folder: Path) -> str | None:
    """What is wrong with how both programs of a seed went under the rules; None if nothing is."""
    program = right(seed)
    try:
        launch(compiled(program, folder, f"keeps_{seed}"), program.world, rules="nccl")
    except RankFailure as failure:
        return (
            f"seed {seed}, a program that keeps the rules was refused:\n{program.source}\n{failure}"
        )
    program = wrong(seed)
    try:
        launch(compiled(program, folder, f"breaks_{seed}"), program.world, rules="nccl")
    except RankFailure as failure:
        words, place = _BROKEN[program.rule][1], f", line {program.broken_line}, in work"
        if words in re.sub(r"\s+", " ", str(failure)) and place in str(failure):
            return None
        return f"seed {seed}, {program.rule} was not named:\n{program.source}\n{failure}"
    return f"seed {seed}, {program.rule} was not noticed:\n{program.source}"


if __name__ == "__main__":
    words = "programs and as many with a broken rule"
    random_programs.soak(__doc__, complaint, words, programs=200, at_once=2)
