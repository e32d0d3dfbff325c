"""cluster/train.py: the same result on any number of ranks and after any restart; the launch files."""

import json
import sys
from pathlib import Path

import pytest
import torch
from elastic_runs import (
    ROOT,
    TRAIN,
    ElasticRun,
    EventLog,
    check_samples,
    difference,
    undisturbed,
)

from course_utils import mnist
from course_utils.launch import launch

sys.path.insert(0, str(TRAIN.parent))
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


def run_rank(rank: int, folder: Path, options: str, steps: int) -> str:
    """Runs train.py on a rank, at most so many steps in this incarnation; returns how it ended."""
    sys.path.insert(0, str(TRAIN.parent))
    import train

    torch.set_num_threads(1)
    train_step = train.Training.train_step
    done = []

    def killed_after_steps(training):
        if len(done) == steps:
            raise Killed
        done.append(training.step)
        return train_step(training)

    train.Training.train_step = killed_after_steps
    try:
        arguments = ["--checkpoints", str(folder), *options.split()]
        train.run(train.parse(arguments), torch.device("cpu"))
    except Killed:
        return "killed"
    except SystemExit as end:
        return str(end)
    return "done"


def run(folder: Path, world: int, options: str = "", steps: int = STEPS) -> list[str]:
    return launch(run_rank, world, folder, f"{SMALL} {options}", steps)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    assert run(folder, 1) == ["done"]
    return folder


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def steps_resumed(folder: Path) -> list[int]:
    log = EventLog(folder)
    return [log.of(name, "resume")[0]["step"] for name in sorted(log.incarnations)]


# --- any number of ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_ends_with_the_parameters_of_one(one_process, tmp_path, world):
    assert run(tmp_path, world) == ["done"] * world
    assert difference(one_process, tmp_path) <= 1e-6
    check_samples(tmp_path, SAMPLES, BATCH, EPOCHS)


def test_pieces_of_any_size_give_the_same_parameters(one_process, tmp_path):
    run(tmp_path, 2, "--micro-batch 100")
    assert difference(one_process, tmp_path) <= 1e-6


def test_the_equality_would_show_a_batch_that_grows_with_the_ranks(one_process, tmp_path):
    run(tmp_path, 1, f"--batch {2 * BATCH}")
    assert difference(one_process, tmp_path) > 1e-3


def test_an_order_uses_every_sample_once_per_epoch_and_differs_between_epochs():
    order = train.Order(samples=10, batch=4, seed=3)
    epochs = [torch.cat([order[3 * epoch + step] for step in range(3)]) for epoch in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert order[1].tolist() == epochs[0][4:8].tolist()  # also after a later epoch was asked for


def test_bfloat16_computes_in_bfloat16_and_keeps_float32(one_process, tmp_path):
    run(tmp_path, 2, "--bfloat16")
    parameters = torch.load(tmp_path / "parameters.pt", weights_only=True)
    assert {value.dtype for value in parameters.values()} == {torch.float32}
    assert 1e-6 < difference(one_process, tmp_path) < 0.05


def test_the_data_is_mnist(tmp_path):
    folder = ROOT / "data" / "MNIST" / "raw"
    options = train.parse(["--checkpoints", "", "--data", str(folder), "--samples", "100"])
    images, labels = train.load_data(options)
    expected, expected_labels = mnist.tensors(train=True, limit=100)
    assert torch.equal(images, expected.flatten(1)) and torch.equal(labels, expected_labels)


# --- checkpoints ----------------------------------------------------------------------------------


def test_resumes_on_two_ranks_and_on_one_what_four_began(one_process, tmp_path):
    for world, steps in [(4, 3), (2, 3), (1, STEPS)]:
        ends = run(tmp_path, world, steps=steps)
    assert ends == ["done"]
    assert steps_resumed(tmp_path) == [0, 2, 4]  # the third and the fifth step were done twice
    assert difference(one_process, tmp_path) <= 1e-6
    check_samples(tmp_path, SAMPLES, BATCH, EPOCHS)


def test_a_resume_on_as_many_ranks_is_exact_to_the_bit_also_with_dropout(tmp_path):
    run(tmp_path / "whole", 2, "--dropout 0.5")
    run(tmp_path / "resumed", 2, "--dropout 0.5", steps=5)
    run(tmp_path / "resumed", 2, "--dropout 0.5")
    assert steps_resumed(tmp_path / "resumed") == [0, 4]
    assert difference(tmp_path / "whole", tmp_path / "resumed") == 0


def test_a_run_that_is_done_does_nothing_more(one_process, tmp_path):
    run(tmp_path, 2)
    assert run(tmp_path, 2, steps=0) == ["done", "done"]
    assert difference(one_process, tmp_path) <= 1e-6


def flip_a_bit(checkpoint: Path) -> None:
    path = next(checkpoint.glob("__1_*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(checkpoint: Path) -> None:
    path = next(checkpoint.glob("__0_*"))
    path.write_bytes(path.read_bytes()[:100])


def lose_a_file(checkpoint: Path) -> None:
    next(checkpoint.glob("__1_*")).unlink()


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def tear_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    "damage", [flip_a_bit, cut_short, lose_a_file, lose_the_manifest, tear_the_manifest]
)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    one_process, tmp_path, capsys, damage
):
    run(tmp_path, 2, steps=5)
    newest = checkpoints(tmp_path)[-1]
    damage(newest)
    assert run(tmp_path, 2) == ["done", "done"]
    assert "is damaged; an older checkpoint is used" in capsys.readouterr().out
    assert steps_resumed(tmp_path) == [0, 2]
    assert (tmp_path / f"damaged-{newest.name}").is_dir()
    assert difference(one_process, tmp_path) <= 1e-6


def test_a_checkpoint_that_was_never_finished_is_not_one(one_process, tmp_path):
    run(tmp_path, 2, steps=5)
    newest = checkpoints(tmp_path)[-1]
    torn = newest.with_name(newest.name.replace("step", "partial"))
    newest.rename(torn)  # as if the kill had come just before the rename
    run(tmp_path, 2)
    assert steps_resumed(tmp_path) == [0, 2] and not torn.exists()
    assert difference(one_process, tmp_path) <= 1e-6


def test_only_the_newest_checkpoints_are_kept(one_process):
    assert [path.name[:13] for path in checkpoints(one_process)] == [
        "step-00000006",
        "step-00000008",
        "step-00000009",
    ]
    assert not list(one_process.glob("partial-*"))


def test_a_manifest_says_how_the_checkpoint_came_about(one_process):
    manifest = json.loads((checkpoints(one_process)[-1] / "manifest.json").read_bytes())
    assert manifest["step"] == 9 and manifest["world"] == 1
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp"}


def test_ranks_leave_when_another_incarnation_owns_the_folder(tmp_path):
    def overtaken(rank, folder):
        sys.path.insert(0, str(TRAIN.parent))
        import train

        checkpoints = train.Checkpoints(folder, "old")
        (folder / "owner").write_text("new")
        try:
            checkpoints.save(1, {"value": torch.zeros(2)}, {})
        except SystemExit as end:
            return str(end)

    assert launch(overtaken, 1, tmp_path) == ["incarnation old leaves: new has taken over"]
    assert checkpoints(tmp_path) == []


def test_another_batch_is_refused_because_the_order_of_the_samples_would_change(tmp_path):
    run(tmp_path, 1, steps=3)
    (end,) = run(tmp_path, 1, "--batch 8")
    assert end.endswith(
        "was made with samples, batch, seed [33, 16, 0], this run has [33, 8, 0]: "
        "the order of the samples would change. Choose another folder."
    )


# --- under torchrun -------------------------------------------------------------------------------


def test_two_agents_then_one_then_two_change_no_parameter(tmp_path):
    samples, batch, epochs = 100, 16, 3
    options = (
        f"--samples {samples} --batch {batch} --epochs {epochs} --width 16 --layers 1 "
        "--save-every 2"
    ).split()
    undisturbed(tmp_path / "one process", options)
    folder = tmp_path / "elastic"
    with ElasticRun(folder, options, nodes="1:2") as run:
        run.start_agent("a")
        run.start_agent("b")
        run.gate.open_to(5)
        run.wait_for_step(5, world=2)
        run.kill_node("b")
        run.gate.open_to(9)
        run.wait_for_step(9, world=1)
        run.start_agent("b")
        run.wait_for_group(2)
        run.gate.open_to(13)
        run.wait_for_step(13, world=2)
        assert run.kill_worker("a")
        run.wait_for_group(2)
        run.gate.open()
        run.wait_until_done()
    worlds = EventLog(folder).worlds()
    assert worlds[0] == worlds[-1] == 2 and 1 in worlds
    check_samples(folder, samples, batch, epochs)
    assert difference(tmp_path / "one process", folder) <= 1e-5


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[0, 1], [2, 2]], "lost or used twice"),
        ([[0, 1], [2]], "assert"),
    ],
)
def test_the_log_would_show_a_sample_that_was_lost(tmp_path, steps, message):
    (tmp_path / "events").mkdir()
    ours = {"incarnation": "1", "rank": 0}
    events = [{"event": "start", "world": 1}, {"event": "resume", "step": 0, "of": None}]
    events += [
        {"event": "step", "step": n, "samples": samples} for n, samples in enumerate(steps, 1)
    ]
    events += [{"event": "done", "step": 2}]
    lines = [json.dumps(ours | event) + "\n" for event in events]
    (tmp_path / "events" / "1-0.jsonl").write_text("".join(lines))
    with pytest.raises(AssertionError, match=message):
        check_samples(tmp_path, samples=4, batch=2, epochs=1)
