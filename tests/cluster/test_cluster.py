"""cluster/train.py: the same result on any number of ranks and after any restart."""

import contextlib
import ctypes
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_utils.lesson import mnist
from tests.support.elastic_runs import (
    ROOT,
    TRAIN,
    ElasticRun,
    EventLog,
    check_samples,
    difference,
    undisturbed,
)
from tests.support.on_gloo import launch

CLUSTER = TRAIN.parent
sys.path.insert(0, str(CLUSTER))
import train

# 33 samples: the last batch has one row, so that other ranks have none
SAMPLES, BATCH, EPOCHS = 33, 16, 3
STEPS = 9
SMALL = (
    f"--samples {SAMPLES} --batch {BATCH} --micro-batch 3 --epochs {EPOCHS} --width 8 --layers 2 "
    "--save-every 2"
)


class Killed(Exception):
    """Stands for kill -9 on all ranks at once."""


@dataclass
class Run:
    """A start of train.py: where, with what, and how many steps until it is killed."""

    folder: str
    options: str = ""
    steps: int = STEPS
    before: Callable[[Path], None] | None = None  # what happens to the folder first
    bug: int = STEPS  # the step, counted from 0, that raises
    log: str = "--log-samples"


def run_all(rank: int, base: Path, runs: list[Run]) -> list[str]:
    """Runs on a rank: one start after the other; returns how each ended."""
    sys.path.insert(0, str(CLUSTER))
    import train

    torch.set_num_threads(1)
    train_step, done = train.Training.train_step, []

    def killed_after_steps(training):
        if len(done) == run.steps:
            raise Killed
        if training.step == run.bug:
            raise ValueError("a bug")
        done.append(training.step)
        return train_step(training)

    train.Training.train_step = killed_after_steps
    ends = []
    for run in runs:
        done.clear()
        if run.before and rank == 0:
            run.before(base / run.folder)
        dist.barrier()
        arguments = f"--checkpoints {base / run.folder} {SMALL} {run.log} {run.options}".split()
        try:
            train.run(train.parse(arguments), torch.device("cpu"))
            ends.append("done")
        except Killed:
            ends.append("killed")
        except (SystemExit, OSError, ValueError) as end:
            ends.append(str(end))
    return ends


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def steps_resumed(folder: Path) -> list[int]:
    log = EventLog(folder)
    resumed = [log.of(name, "resume") for name in sorted(log.incarnations)]
    return [ranks[0]["step"] for ranks in resumed if ranks]  # a start can fail before it resumes


# --- what can have happened to the newest checkpoint ----------------------------------------------


def flip_a_bit(folder: Path) -> None:
    path = next(checkpoints(folder)[-1].glob("__1_*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_a_file_short(folder: Path) -> None:
    path = next(checkpoints(folder)[-1].glob("__0_*"))
    path.write_bytes(path.read_bytes()[:100])


def lose_a_file(folder: Path) -> None:
    next(checkpoints(folder)[-1].glob("__1_*")).unlink()


def lose_the_manifest(folder: Path) -> None:
    (checkpoints(folder)[-1] / "manifest.json").unlink()


def tear_the_manifest(folder: Path) -> None:
    path = checkpoints(folder)[-1] / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])


def take_the_name_back(folder: Path) -> None:
    newest = checkpoints(folder)[-1]  # as if the kill had come just before the rename
    newest.rename(newest.with_name(newest.name.replace("step", "partial")))


DAMAGES = {
    flip_a_bit: "__1_0.distcp has another SHA-256",
    cut_a_file_short: "__0_0.distcp has another SHA-256",
    lose_a_file: "__1_0.distcp is missing",
    lose_the_manifest: "manifest.json is missing",
    tear_the_manifest: "manifest.json is torn",
}


def damage_all(folder: Path) -> None:
    for path in folder.glob("step-*/manifest.json"):
        path.write_bytes(b"{")


def read_nothing_for_a_moment(folder: Path) -> None:
    """On rank 0, as a host whose mount has gone stale."""
    import checkpoints

    digest = checkpoints.digest

    def stale(path: Path) -> str:
        checkpoints.digest = digest
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    checkpoints.digest = stale


def see_nothing_for_a_moment(folder: Path) -> None:
    """On rank 0, as a host whose file system is behind: the file is there for the others."""
    import checkpoints

    judge = checkpoints.judge

    def behind(path: Path, expected: str) -> str:
        checkpoints.judge = judge
        return f"{path.name} is missing"

    checkpoints.judge = behind


MOMENTS = [read_nothing_for_a_moment, see_nothing_for_a_moment]

# By world size, in this order; one launch each, since starting the ranks is what takes long.
RUNS = {
    4: [
        Run("resharded", steps=3),
        Run("copies", "--shard-within 2", steps=3),
        Run("epoch_ended", "--save-every 3", steps=3),
    ],
    3: [Run("three"), Run("epoch_ended", "--save-every 3")],
    2: [
        Run("two"),
        Run("two", steps=0),
        Run("pieces", "--micro-batch 100"),
        Run("quiet", log=""),
        Run("every", "--reduce every"),
        Run("recompute", "--recompute"),
        Run("dropout_recompute", "--dropout 0.5 --recompute"),
        Run("copies", "--shard-within 1", steps=3),
        Run("background", "--save-in-background", steps=5),
        Run("background", "--save-in-background"),
        *[Run(moment.__name__, steps=5) for moment in MOMENTS],
        *[Run(moment.__name__, before=moment) for moment in MOMENTS],
        *[Run(moment.__name__) for moment in MOMENTS],
        Run("all_damaged", steps=5),
        Run("all_damaged", before=damage_all),
        Run("all_damaged"),
        Run("all_damaged", "--start-anew"),
        Run("bug", bug=3),
        Run("bug", bug=5),
        Run("bug", bug=5),
        Run("bfloat16", "--bfloat16"),
        Run("resharded", steps=3),
        Run("dropout", "--dropout 0.5"),
        Run("dropout_resumed", "--dropout 0.5", steps=5),
        Run("dropout_resumed", "--dropout 0.5"),
        *[Run(damage.__name__, steps=5) for damage in [*DAMAGES, take_the_name_back]],
        *[Run(d.__name__, before=d) for d in [*DAMAGES, take_the_name_back]],
    ],
    1: [
        Run("one"),
        Run("resharded"),
        Run("copies"),
        Run("larger_batch", f"--batch {2 * BATCH}"),
        Run("larger_batch"),
    ],
}


# of the folders whose runs do not all end well
EXPECTED_ENDS = {
    "larger_batch": ["done", "was made with samples, batch, seed [33, 32, 0], this run has"],
    "all_damaged": ["killed", "are damaged", "are damaged", "done"],
    "bug": ["a bug", "a bug", "two starts in a row ended alike and gained no step: ValueError: a"],
}


@dataclass
class Results:
    base: Path
    ends: dict[int, list[list[str]]]  # by world size, run and rank
    printed: str

    def __getitem__(self, name: str) -> Path:
        return self.base / name

    def apart(self, name: str, other: str = "one") -> float:
        return difference(self.base / other, self.base / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Results:
    base, printed = tmp_path_factory.mktemp("runs"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        ends = {
            world: list(zip(*launch(run_all, world, base, plan, timeout=600)))
            for world, plan in RUNS.items()
        }
    return Results(base, ends, printed.getvalue())


def test_every_run_ended_as_it_should(runs):
    for world, plan in RUNS.items():
        for run, ends in zip(plan, runs.ends[world]):
            refused = [*EXPECTED_ENDS, *[moment.__name__ for moment in MOMENTS]]
            if run.folder not in refused:
                killed = run.steps not in (0, STEPS)
                assert ends == ("killed" if killed else "done",) * world, (world, run)


@pytest.mark.parametrize("folder", EXPECTED_ENDS)
def test_a_run_that_must_not_go_on_says_why(runs, folder):
    expected = EXPECTED_ENDS[folder]
    found = [
        ends
        for world, plan in RUNS.items()
        for run, ends in zip(plan, runs.ends[world])
        if run.folder == folder
    ]
    assert len(found) == len(expected)
    for ends, words in zip(found, expected):
        assert all(words in end for end in ends), (words, ends)


# --- any number of ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two", "three", "pieces", "every", "recompute", "copies"])
def test_any_number_of_ranks_and_pieces_ends_with_the_parameters_of_one(runs, name):
    assert runs.apart(name) <= 1e-6
    check_samples(runs[name], SAMPLES, BATCH, EPOCHS)


def test_an_epoch_that_ended_with_a_save_is_over_and_the_next_one_is_whole(runs):
    """pytorch/data#1437: with the position at its end restored, the next epoch was empty."""
    assert steps_resumed(runs["epoch_ended"]) == [0, 3]
    assert runs.apart("epoch_ended") <= 1e-6
    check_samples(runs["epoch_ended"], SAMPLES, BATCH, EPOCHS)


def test_without_the_option_no_rank_writes_at_each_step(runs):
    (path,) = (runs["quiet"] / "events").iterdir()  # rank 0's
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    saved = -(-STEPS // 2)  # --save-every 2, and at the end
    assert events == ["start", "resume", *["saved"] * saved, "done"]
    assert runs.apart("quiet") <= 1e-6


def test_activations_computed_twice_draw_the_same_dropout(runs):
    assert runs.apart("dropout_recompute", "dropout") <= 1e-6


def test_a_save_in_the_background_holds_the_step_that_it_was_asked_for(runs):
    assert steps_resumed(runs["background"])[0] == 0
    assert steps_resumed(runs["background"])[1] in (2, 4)  # the last may not have been finished
    assert runs.apart("background", "two") == 0
    check_samples(runs["background"], SAMPLES, BATCH, EPOCHS)


def test_the_equality_would_show_a_batch_that_grows_with_the_ranks(runs):
    assert runs.apart("larger_batch") > 1e-3


def test_an_order_uses_every_sample_once_per_epoch_and_differs_between_epochs():
    order = train.Order(samples=10, batch=4, seed=3)
    epochs = [torch.cat([order[3 * epoch + step] for step in range(3)]) for epoch in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert order[1].tolist() == epochs[0][4:8].tolist()  # also after a later epoch was asked for


def test_bfloat16_computes_in_bfloat16_and_keeps_float32(runs):
    parameters = torch.load(runs["bfloat16"] / "parameters.pt", weights_only=True)
    assert {value.dtype for value in parameters.values()} == {torch.float32}
    assert 1e-6 < runs.apart("bfloat16") < 0.05


def test_the_data_is_mnist():
    folder = ROOT / "data" / "MNIST" / "raw"
    options = train.parse(["--checkpoints", "", "--data", str(folder), "--samples", "100"])
    images, labels = train.load_data(options)
    expected, expected_labels = mnist.tensors(train=True, limit=100)
    assert torch.equal(images, expected.flatten(1)) and torch.equal(labels, expected_labels)


# --- checkpoints ----------------------------------------------------------------------------------


def test_two_ranks_and_then_one_resume_what_four_began(runs):
    assert steps_resumed(runs["resharded"]) == [0, 2, 4]  # steps 3 and 5 were done twice
    assert runs.apart("resharded") <= 1e-6
    check_samples(runs["resharded"], SAMPLES, BATCH, EPOCHS)


def test_a_resume_on_as_many_ranks_is_exact_to_the_bit_also_with_dropout(runs):
    assert steps_resumed(runs["dropout_resumed"]) == [0, 4]
    assert runs.apart("dropout_resumed", "dropout") == 0


def test_a_run_that_is_done_does_nothing_more(runs):
    assert steps_resumed(runs["two"]) == [0, STEPS]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(runs, damage):
    folder = runs[damage.__name__]
    assert steps_resumed(folder) == [0, 2]
    (aside,) = folder.glob("damaged-*")
    assert f"{folder / aside.name.removeprefix('damaged-')} is damaged: {DAMAGES[damage]}" in (
        runs.printed
    )
    assert runs.apart(damage.__name__) <= 1e-6
    check_samples(folder, SAMPLES, BATCH, EPOCHS)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_file_that_one_host_cannot_read_for_a_moment_is_not_damaged(runs, moment):
    folder = runs[moment.__name__]
    plan, ends = RUNS[2], runs.ends[2]
    (end,) = [ends for run, ends in zip(plan, ends) if run.before is moment]
    words = {MOMENTS[0]: os.strerror(errno.ESTALE), MOMENTS[1]: "is seen by some hosts"}
    assert all(words[moment] in rank for rank in end)  # on the rank that could read too
    assert not list(folder.glob("damaged-*"))
    assert steps_resumed(folder)[-1] == 4
    assert runs.apart(moment.__name__) <= 1e-6


def test_a_checkpoint_that_was_never_finished_is_not_one(runs):
    folder = runs["take_the_name_back"]
    assert steps_resumed(folder) == [0, 2]
    assert not list(folder.glob("partial-*")) and not list(folder.glob("damaged-*"))
    assert runs.apart("take_the_name_back") <= 1e-6


def test_only_the_newest_checkpoints_are_kept(runs):
    steps = [path.name.split("-")[1] for path in checkpoints(runs["one"])]
    assert steps == ["00000006", "00000008", "00000009"]
    assert not list(runs["one"].glob("partial-*"))


def test_another_batch_is_refused_because_the_order_of_the_samples_would_change(runs):
    (end,) = runs.ends[1][-1]
    assert end.endswith(
        "was made with samples, batch, seed [33, 32, 0], this run has [33, 16, 0]: "
        "the order of the samples would change. Choose another folder."
    )


def test_ranks_leave_when_another_incarnation_owns_the_folder(tmp_path):
    def overtaken(rank):
        sys.path.insert(0, str(CLUSTER))
        import train

        checkpoints = train.Checkpoints(tmp_path, "old")
        (tmp_path / "owner").write_text("new")
        try:
            checkpoints.save(1, {"value": torch.zeros(2)}, {})
            checkpoints.finish()
        except SystemExit as end:
            return str(end)

    assert launch(overtaken, 1, timeout=300) == ["incarnation old leaves: new has taken over"]
    assert checkpoints(tmp_path) == []


# --- under torchrun -------------------------------------------------------------------------------


def test_two_agents_then_one_then_two_change_no_parameter(tmp_path):
    samples, batch, epochs = 100, 16, 3
    options = (
        f"--samples {samples} --batch {batch} --epochs {epochs} --width 16 --layers 1 "
        "--save-every 2 --log-samples"
    ).split()
    undisturbed(tmp_path / "one process", options)
    folder = tmp_path / "elastic"
    with ElasticRun(folder, options, nodes="1:2", supervised=True) as run:
        run.start_agent("a")
        run.start_agent("b")
        run.wait_for_group(2)  # or a would begin alone where b is slow to start
        run.gate.open_to(5)
        run.wait_for_step(5, world=2)
        run.kill_node("b")
        run.gate.open_to(9)
        run.wait_for_step(9, world=1)
        run.start_agent("b")
        run.wait_for_group(2)
        run.gate.open_to(13)
        run.wait_for_step(13, world=2)
        run.kill_worker("a")
        run.wait_for_group(2)
        run.gate.open()
        run.wait_until_done()
    worlds = iter(EventLog(folder).worlds())
    assert all(world in worlds for world in (2, 1, 2))  # in this order
    check_samples(folder, samples, batch, epochs)
    assert difference(tmp_path / "one process", folder) <= 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told only by Linux")
@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_process_dies_with_its_parent_only_if_that_is_an_agent(monkeypatch, under_torchrun):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    prctl, found = ctypes.CDLL(None).prctl, ctypes.c_int()
    train.leave_with_agent(os.getppid())
    prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
    prctl(1, 0)  # not for the process of the tests
    assert found.value == (signal.SIGKILL if under_torchrun else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told only by Linux")
def test_a_worker_whose_agent_died_while_it_began_leaves(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    prctl = ctypes.CDLL(None).prctl
    with pytest.raises(SystemExit, match="its agent has died"):
        train.leave_with_agent(os.getppid() + 1)
    prctl(1, 0)  # not for the process of the tests


@pytest.mark.parametrize("steps", [[[0, 1], [2, 2]], [[0, 1], [2]]])
def test_the_log_would_show_a_sample_that_was_lost(tmp_path, steps):
    (tmp_path / "events").mkdir()
    ours = {"incarnation": "1", "rank": 0}
    events = [{"event": "start", "world": 1}, {"event": "resume", "step": 0, "of": None}]
    events += [
        {"event": "step", "step": n, "samples": samples} for n, samples in enumerate(steps, 1)
    ]
    events += [{"event": "done", "step": 2}]
    lines = [json.dumps(ours | event) + "\n" for event in events]
    (tmp_path / "events" / "1-0.jsonl").write_text("".join(lines))
    with pytest.raises(AssertionError):
        check_samples(tmp_path, samples=4, batch=2, epochs=1)
