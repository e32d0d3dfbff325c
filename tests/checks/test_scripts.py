"""The stages of the learner's script: the course's own version passes, others that are right do, and each mistake is
named. A wrong version is the course's own with lines replaced."""

from pathlib import Path

import pytest

from course_exercises.authoring import scripts
from course_exercises.checks import catalogue, examine
from course_exercises.checks.learner import render

STAGES = catalogue.stages()

SAMPLER = "sampler = DistributedSampler(train, seed=options.seed)"
BATCHES = "batches = DataLoader(train, options.batch // world, sampler=sampler, drop_last=True)"
HELD_OUT = "held_out_batches = DataLoader(held_out, options.batch // world)"
SAVE = """    if rank == 0:
        torch.save(model.state_dict(), options.out / "model.pt")
"""
SUM = "    total, windows = sum_over_ranks(total, windows, device=device)\n"
DDP = "parallel = DistributedDataParallel(model, device_ids=[device] if gpu else None)"

WRONG = {
    ("3.6", "no-group"): [
        (
            "    dist.init_process_group()\n    rank, world = dist.get_rank(), dist.get_world_size()",
            "    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])",
        )
    ],
    ("3.6", "sampler-and-shuffle"): [
        ("sampler=sampler, drop_last", "sampler=sampler, shuffle=True, drop_last")
    ],
    ("3.6", "no-sampler"): [
        ("sampler=sampler, drop_last", "shuffle=True, drop_last"),
        ("        sampler.set_epoch(epoch)\n", ""),
    ],
    ("3.6", "whole-batch"): [(BATCHES, BATCHES.replace(" // world", ""))],
    ("3.6", "same-order"): [("        sampler.set_epoch(epoch)\n", "")],
    ("3.6", "not-wrapped"): [("loss_of(parallel,", "loss_of(model,")],
    ("3.6", "other-steps"): [
        ("            loss.backward()", "            (loss / world).backward()")
    ],
    ("3.6", "own-loss"): [
        ("        [total] = sum_over_ranks(total, device=device)\n", ""),
        ("total / world / len", "total / len"),
    ],
    ("3.6", "sum-not-mean"): [("total / world / len", "total / len")],
    ("3.6", "held-out-repeated"): [
        ("range(learned + rank, len(windows), world)", "range(learned, len(windows))"),
        (HELD_OUT, HELD_OUT[:-1] + ", sampler=DistributedSampler(held_out, shuffle=False))"),
    ],
    ("3.6", "held-out-left-out"): [
        ("    if rank == 0:\n        torch.save", "    if rank == 0:\n        torch.save"),
        (
            "range(learned + rank, len(windows), world)",
            "range(learned + rank, len(windows) // world * world, world)",
        ),
    ],
    ("3.6", "mean-of-means"): [
        (SUM, ""),
        (
            "    return total / windows\n",
            "    [mean] = sum_over_ranks(total / windows, device=device)\n    return mean / dist.get_world_size()\n",
        ),
    ],
    ("3.6", "all-save"): [(SAVE, SAVE.replace("    if rank == 0:\n    ", ""))],
    ("3.6", "wrapped-names"): [("torch.save(model.", "torch.save(parallel.")],
    ("3.6", "no-log"): [("json.dumps(line)", "str(line)")],
    ("3.6", "not-saved"): [(SAVE, "")],
    ("3.6", "group-left-open"): [("    dist.destroy_process_group()\n", "")],
    ("3.6", "not-every-rank"): [
        (
            '            "held_out_loss": evaluate(model, held_out_batches, device),',
            '            "held_out_loss": evaluate(model, held_out_batches, device) if rank == 0 else 0,',
        )
    ],
}
RIGHT = {
    ("3.6", "another seed on each rank"): [
        ("torch.manual_seed(options.seed)", "torch.manual_seed(options.seed + rank)")
    ],
    ("3.6", "a sampler that drops"): [(SAMPLER, SAMPLER[:-1] + ", drop_last=True)")],
    ("3.6", "every rank evaluates all"): [
        ("range(learned + rank, len(windows), world)", "range(learned, len(windows))"),
        (SUM, ""),
    ],
    ("3.6", "gradients averaged by hand"): [
        (
            DDP,
            "parallel = model\n    for each in model.parameters():\n        dist.broadcast(each.data, src=0)",
        ),
        (
            "            loss.backward()\n",
            "            loss.backward()\n            for each in model.parameters():\n                dist.all_reduce(each.grad)\n                each.grad /= world\n",
        ),
    ],
}


def changed(id: str, replaced: list[tuple[str, str]], folder: Path) -> Path:
    text = scripts.version(catalogue.find(id).chapter).read_text()
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize("id", STAGES)
def test_the_course_s_own_version_passes(id):
    outcome = examine(id, scripts.version(catalogue.find(id).chapter))
    assert outcome.status == "passed", render(outcome)


@pytest.mark.parametrize("id", STAGES)
def test_the_version_before_is_not_attempted(id):
    assert examine(id, str(scripts.before(catalogue.find(id).chapter))).status == "not attempted"


@pytest.mark.parametrize(("id", "what"), RIGHT, ids=str)
def test_another_right_version_passes(id, what, tmp_path):
    outcome = examine(id, changed(id, RIGHT[id, what], tmp_path))
    assert outcome.status == "passed", render(outcome)


@pytest.mark.parametrize(("id", "name"), WRONG, ids=str)
def test_a_mistake_is_named(id, name, tmp_path):
    outcome = examine(id, changed(id, WRONG[id, name], tmp_path))
    assert outcome.misconceptions[:1] == [name], render(outcome)


@pytest.mark.parametrize("id", STAGES)
def test_each_sentence_has_a_version(id):
    own = {name for of, name in WRONG if of == id}
    assert set(catalogue.find(id).own) <= own
