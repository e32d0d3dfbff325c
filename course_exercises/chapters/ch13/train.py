"""Exercise 13.2, `train`: what it asks for, and how it is checked."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import kill_in_a_write
from course_utils.launch import RankFailure

loop = Exercise(
    "13.2",
    "train",
    points=4,
    minutes=40,
    kind="core",
    at_home=True,  # its folder is the answer's own
    parameters=("training", "images", "labels", "folder", "steps", "batch", "every"),
    hints=[
        (
            "What does the next step depend on? That, and nothing else, has to be in the file. And what of it belongs to "
            "a rank?"
        ),
        (
            "The number of steps done says it all: which epoch, which place in it. The order of an epoch comes from a "
            "generator with the epoch's number as its seed."
        ),
        (
            "At the start: from the newest file to the oldest, take the first whose checksum is right, load the state, and "
            "go on at its number of steps. In the loop: all ranks call `state_dict`, rank 0 writes under another "
            "name, flushes, renames, removes all but the last few; then all wait at a barrier."
        ),
    ],
    misconceptions={
        "other-batch": "A step gets other rows than the next `batch` of the epoch with their labels. Hand the same global batch to "
        "`training.step` on every rank: all draw it with the same seed, and sharing it out is the training's business.",
        "not-each-once": "An epoch does not have each row once. Draw one order for all its steps, let the last one take what is left over, "
        "however few rows, and fill nothing up.",
        "same-order": "The rows come in their own order, or in the same one in every epoch. Shuffle them with a generator that has "
        "the epoch's number as its seed.",
        "other-steps": "Another number of steps is made than asked. `steps` counts those of all lives together, so a life begins where the "
        "last checkpoint is, and makes none where all are done.",
        "folder-missing": "The folder is not there at first: make it, with `parents=True` and `exist_ok=True`.",
        "not-the-newest": "The second life does not go on from the newest checkpoint: it finds none, looks for none, or takes an older one. "
        "Begin with the one of the most steps, as numbers: as text, 9 comes after 12.",
        "position-lost": "The second life goes on with other rows than the next ones: it begins an epoch again, skips a step, or does one "
        "twice. Save how many steps are done, after the step, and go on there.",
        "another-order": "The second life has another order of rows. Let it depend on the epoch only, not on what was drawn "
        "before, and not on the ranks.",
        "state-not-loaded": "The rows go on in the right place, and the training is not what it was. Save all that `state_dict` returns, "
        "model and momentum, and load all of it.",
        "not-complete": "You go on while another rank still writes, so that a death in the next step can find the checkpoint half "
        "written. Let all ranks wait after a save for the one that writes: a barrier.",
        "written-in-place": "A save that was killed has spoilt what was there, or is taken for a checkpoint. Write under another name, and "
        "rename when all is written.",
        "damaged-file": "The newest file is damaged, and it is loaded, or the run does not go on from the one before. Keep two, and compare a "
        "checksum of your own before you load: `torch.load` does not notice a byte that has changed.",
        "last-not-saved": "After the last step there is no checkpoint: a life that begins later does steps again. Save there too.",
    },
    failures={
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
        "FileNotFoundError": "folder-missing",
    },
)

KEPT = 7 / 8  # of a state, after a step
STATE = 20_000  # numbers in a state: a file that can be torn in the middle
TORN = 20_000  # bytes of a file at which it is torn: less than a state, compressed or cut in two


@dataclass(frozen=True)
class _Run:
    """A run of the loop: what it is asked for."""

    rows: int
    batch: int
    steps: int
    every: int
    folder: Path

    @property
    def in_an_epoch(self) -> int:
        return -(-self.rows // self.batch)


class _Noting:
    """A training that notes what it is handed. Its state follows from all that it got, in its order.

    `dies` is the step before which the last rank is killed; `torn` the save during which a rank is,
    whichever writes.
    """

    def __init__(self, notes: Path, folder: Path, dies: int | None, torn: int | None) -> None:
        self.notes, self.folder, self.dies, self.torn = notes, folder, dies, torn
        self.steps = self.saves = 0
        self.value, self.momentum = torch.linspace(1, 2, STATE), torch.zeros(STATE)

    def step(self, images: Tensor, labels: Tensor) -> float:
        before = set(self.folder.rglob("*"))
        _meet()
        written = set(self.folder.rglob("*")) - before  # by a rank that was still at its save
        if self.steps == self.dies and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.dies:
            _meet()  # nobody goes on without the one that is killed
        self.steps += 1
        rows = [round(row) for row in images[:, 0].tolist()]
        with (self.notes / str(dist.get_rank())).open("a") as file:
            print(json.dumps([rows, labels.tolist(), bool(written)]), file=file)
        self.value, self.momentum = _followed(self.value, self.momentum, rows)
        return 0.0

    def state_dict(self) -> dict:
        _meet()
        if dist.get_rank() < dist.get_world_size() - 1:
            time.sleep(0.02)  # the last rank is early: if it does not wait, it begins the next step
        self.saves += 1
        if self.saves == self.torn:
            kill_in_a_write(TORN)
        state = {"model": self.value, "momentum": self.momentum}
        return {kind: {"value": tensor.clone()} for kind, tensor in state.items()}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["model"]["value"].clone()
        self.momentum = state["momentum"]["value"].clone()


def _meet() -> None:
    """All ranks are here, as in a call of any training: not with a barrier, which could meet one of the answer's."""
    dist.all_reduce(torch.zeros(()))


def _followed(value: Tensor, momentum: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Both keep most of what was, so that it can be seen for a whole run; the momentum adds what depends
    on the rows, and the value the momentum."""
    momentum = KEPT * momentum + sum((n + 1) * row for n, row in enumerate(rows)) / 1000
    return KEPT * value + momentum, momentum


def _live(rank, answer, asked: _Run, notes: Path, dies: int | None, torn: int | None) -> float:
    """A life of the loop. Returns what the training's state has become."""
    torch.set_num_threads(1)
    noting = _Noting(notes, asked.folder, dies, torn)
    images = torch.arange(asked.rows, dtype=torch.float32).unsqueeze(1).expand(-1, 49).clone()
    labels = torch.arange(asked.rows) * 10
    answer(noting, images, labels, asked.folder, asked.steps, asked.batch, asked.every)
    return noting.value[0].item()


@dataclass(frozen=True)
class _Life:
    """What was handed over: for each rank, for each step, the rows. None: the life was cut off."""

    rows: list[list[list[int]]]
    labels_fit: bool
    overlapping: bool  # a rank has begun a step while another still wrote
    value: float | None


def _lived(
    answer, ranks: int, asked: _Run, dies: int | None = None, torn: int | None = None
) -> _Life:
    notes = Path(tempfile.mkdtemp(dir=asked.folder.parent))
    value = None
    try:
        value = run(_live, ranks, answer, asked, notes, dies, torn)[0]
    except RankFailure as failure:
        if failure.kind != "signal" or (dies is None and torn is None):
            raise
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in (notes / str(rank) for rank in range(ranks))
    ]
    steps = [step for own in lines for step in own]
    fit = all(labels == [10 * row for row in rows] for rows, labels, _ in steps)
    overlapping = any(written for *_, written in steps)
    return _Life([[rows for rows, *_ in own] for own in lines], fit, overlapping, value)


@contextlib.contextmanager
def _asked(draw, every: int | None = None, in_an_epoch: int | None = None) -> Iterator[_Run]:
    """A run in a folder that is there as long as the block."""
    batch, every = draw.integer(4, 6), every or draw.choice([2, 3])
    in_an_epoch = in_an_epoch or draw.integer(4, 5)
    rows = batch * (in_an_epoch - 1) + draw.integer(1, batch - 1)
    with tempfile.TemporaryDirectory() as parent:
        Path(parent, "runs").mkdir()
        yield _Run(rows, batch, 4 * in_an_epoch + 3, every, Path(parent, "runs", "mine"))


def _judge_rows(life: _Life, asked: _Run) -> None:
    """A whole life, from the first step to the last."""
    first = life.rows[0]
    _judge_batches(life)
    if first and len(first[0]) != asked.batch:
        raise Wrong("other-batch", expected=f"{asked.batch} rows", got=f"{len(first[0])}")
    steps = {"expected": f"{asked.steps} steps", "got": f"{len(first)}"}
    if len(first) < 2 * asked.in_an_epoch:
        raise Wrong("other-steps", **steps)
    epochs = [
        [row for rows in first[start : start + asked.in_an_epoch] for row in rows]
        for start in (0, asked.in_an_epoch)
    ]
    for number, epoch in enumerate(epochs, start=1):
        what, likely = f"the rows of epoch {number}, sorted", {"not-each-once": True}
        expect(sorted(epoch), list(range(asked.rows)), what=what, likely=likely)
    if epochs[0] in (sorted(epochs[0]), epochs[1]):
        expected = "a shuffled order, and another one in the second epoch"
        raise Wrong("same-order", expected=expected, got=epochs[0])
    if len(first) != asked.steps:
        raise Wrong("other-steps", **steps)
    if life.overlapping:
        got = "a file that appears after a rank has begun the next step"
        raise Wrong("not-complete", expected="a checkpoint that is complete before it", got=got)


def _judge_batches(life: _Life) -> None:
    if any(own != life.rows[0] for own in life.rows):
        raise Wrong("other-batch", expected="the same rows on all ranks", got="others")
    if not life.labels_fit:
        raise Wrong("other-batch", expected="the labels of the rows", got="others")


def _value_after(rows: list[list[int]], forgets: int | None = None) -> float:
    """What becomes of the value; the momentum is forgotten before step `forgets`."""
    value, momentum = torch.ones(1), torch.zeros(1)
    for n, batch in enumerate(rows):
        value, momentum = _followed(value, momentum * (n != forgets), batch)
    return value.item()


def _judge_resumed(life: _Life, whole: list[list[int]], start: int, in_an_epoch: int) -> None:
    """A life that goes on at step `start` of what an undisturbed one does."""
    _judge_batches(life)
    got = life.rows[0]
    if got != whole[start:]:
        begins = next((n for n, rows in enumerate(whole) if got and got[0] == rows), None)
        as_before = begins is not None and got == whole[begins : begins + len(got)]
        common, of_epoch = min(len(got), len(whole) - start), start - start % in_an_epoch
        if got[:common] == whole[start : start + common]:
            slug = "other-steps"
        elif as_before and begins < start - 1 and got == whole[begins:]:
            slug = "not-the-newest"
        elif as_before and begins in (0, of_epoch, start - 1, start + 1):
            slug = "position-lost"
        else:
            slug = "another-order"
        found = f"{len(got)} steps, the first with {got[:1]}"
        raise Wrong(slug, expected=f"to go on at step {start}", got=found)
    likely = {
        "state-not-loaded": lambda value: any(
            same(value, other)
            for other in (_value_after(whole[start:]), _value_after(whole, forgets=start))
        )
    }
    expect(life.value, _value_after(whole), what="the state at the end", likely=likely)


@loop.requires("each row once an epoch, in another order each time, the same batch on every rank")
def each_row_once_an_epoch(answer, draw):
    ranks = draw.choice([2, 3])
    with _asked(draw) as asked:
        _judge_rows(_lived(answer, ranks, asked), asked)


@loop.requires("killed between two saves, and started again", needs_earlier=True)
def killed_between_two_saves(answer, draw):
    _kill_and_go_on(answer, draw, before=2, after=2)


@loop.requires("started again with another number of ranks", needs_earlier=True)
def started_again_with_another_number_of_ranks(answer, draw):
    before, after = draw.choice([(1, 3), (3, 1), (3, 2)])
    _kill_and_go_on(answer, draw, before, after)


def _kill_and_go_on(answer, draw, before: int, after: int) -> None:
    every = draw.choice([2, 3])
    # The first step of two digits, because names of files may be sorted as text; and inside an epoch,
    # because at its first steps several mistakes go on with the same rows.
    start = every * -(-10 // every)
    in_an_epoch = draw.choice([n for n in range(4, 8) if start % n > 1])
    with _asked(draw, every, in_an_epoch) as asked:
        whole = _whole(answer, asked)
        _lived(answer, before, asked, dies=start + draw.integer(1, asked.every - 1))
        _judge_resumed(_lived(answer, after, asked), whole, start, asked.in_an_epoch)


def _whole(answer, asked: _Run) -> list[list[int]]:
    """What an undisturbed life on one rank hands over, in a folder of its own."""
    return _lived(answer, 1, replace(asked, folder=asked.folder.with_name("undisturbed"))).rows[0]


@loop.requires(
    "killed in the middle of a save",
    failures=dict.fromkeys(("exception", "EOFError", "RuntimeError"), "written-in-place"),
    needs_earlier=True,
)
def killed_in_the_middle_of_a_save(answer, draw):
    if not hasattr(signal, "SIGXFSZ"):  # Windows cannot kill at a byte
        return
    with _asked(draw) as asked:
        whole, torn = _whole(answer, asked), draw.choice([2, 3])
        _lived(answer, 2, asked, torn=torn)
        start = (torn - 1) * asked.every
        life = _lived(answer, 2, asked)
        if life.rows[0] == whole:
            raise Wrong(
                "written-in-place", expected=f"to go on at step {start}", got="a new beginning"
            )
        _judge_resumed(life, whole, start, asked.in_an_epoch)


@loop.requires(
    "the newest file cut, or a byte of it changed",
    failures=dict.fromkeys(("exception", "EOFError", "RuntimeError"), "damaged-file"),
    needs_earlier=True,
)
def the_newest_file_cut(answer, draw):
    for damage in (_cut, _one_bit):
        with _asked(draw) as asked:
            whole, dies = _whole(answer, asked), 3 * asked.every + 1
            _lived(answer, 2, asked, dies=dies)
            files = [path for path in asked.folder.rglob("*") if path.is_file()]
            large = [path for path in files if path.stat().st_size > TORN]
            newest = max(large, key=lambda path: path.stat().st_mtime_ns)
            newest.write_bytes(damage(newest.read_bytes()))
            life = _lived(answer, 2, asked)
            for first, got in ((3 * asked.every, "the damaged one"), (0, "a new beginning")):
                if life.rows[0] == whole[first:]:
                    raise Wrong("damaged-file", expected="the one before", got=got)
            _judge_resumed(life, whole, 2 * asked.every, asked.in_an_epoch)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _one_bit(content: bytes) -> bytes:
    place = len(content) // 3  # in the middle two tensors may meet
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@loop.requires("nothing more to do when all steps are done", needs_earlier=True)
def nothing_more_to_do_when_all_steps_are(answer, draw):
    with _asked(draw, every=4) as asked:
        asked = replace(asked, steps=4 * (asked.steps // 4) + draw.choice([1, 2, 3]))
        [done] = _lived(answer, 1, asked).rows
        more = _lived(answer, draw.choice([1, 2]), asked).rows[0]
        if more:
            slug = "last-not-saved" if more == done[-len(more) :] else "other-steps"
            raise Wrong(slug, expected="no step", got=f"{len(more)} steps")
