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
AVERAGE = "        gradient = parameter.grad.to_local()\n"
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)\n"

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
        ("        [summed] = sum_over_ranks(summed, device=device)\n", ""),
        ("summed / world / len", "summed / len"),
    ],
    ("3.6", "sum-not-mean"): [("summed / world / len", "summed / len")],
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
WRONG |= {
    ("6.7", "refused-options"): [
        ('"--tensor"', '"--parts"'),
        (
            "options = options_of_the_command_line()\n",
            "options = options_of_the_command_line()\n    options.tensor = 1\n",
        ),
    ],
    ("6.7", "not-cut"): [
        ('    cut(model, mesh["tensor"])\n', ""),
        (AVERAGE, AVERAGE.replace(".to_local()", "")),
        ("part.full_tensor()", "part"),
    ],
    ("6.7", "optimizer-first"): [
        ('    cut(model, mesh["tensor"])\n', ""),
        (OPTIMIZER, OPTIMIZER + '    cut(model, mesh["tensor"])\n'),
    ],
    ("6.7", "tensor-ranks-differ"): [
        ("DistributedSampler(train, data_ranks, rank, seed", "DistributedSampler(train, seed")
    ],
    ("6.7", "divided-by-all"): [
        (
            "DataLoader(train, options.batch // data_ranks",
            "DataLoader(train, options.batch // dist.get_world_size()",
        )
    ],
    ("6.7", "not-averaged"): [("            average_gradients(model, mesh)\n", "")],
    ("6.7", "other-steps"): [
        (
            '        dist.all_reduce(gradient, group=mesh.get_group("data"))',
            "        dist.all_reduce(gradient)",
        ),
        ('mesh["data"].size()\n\n\ndef options', "dist.get_world_size()\n\n\ndef options"),
    ],
    ("6.7", "own-loss"): [
        ("        [summed] = sum_over_data_ranks(summed, mesh=mesh)\n", ""),
        ("summed / data_ranks / len", "summed / len"),
    ],
    ("6.7", "parts-saved"): [("part.full_tensor()", "part")],
}
WRONG |= {
    ("8.6", "not-sharded"): [('shard(model, mesh["data"],', 'shard(model, mesh["tensor"],')],
    ("8.6", "one-unit"): [
        ("        fully_shard(block, mesh=mesh, mp_policy=policy)", "        pass")
    ],
    ("8.6", "whole-at-first"): [('torch.device("meta"):', 'torch.device("cpu"):')],
    ("8.6", "other-start"): [("1000 * seed + number)", "1000 * seed + number + dist.get_rank())")],
    ("8.6", "other-steps"): [
        ("            loss.backward()", "            (loss / data_ranks).backward()")
    ],
    ("8.6", "no-checkpoint"): [('dcp.save({"model": model', 'dcp.save({"state": model')],
    ("8.6", "kept-in-bfloat16"): [
        (
            "    initialize(model, options.seed)",
            "    initialize(model, options.seed)\n    model.to(torch.bfloat16 if options.bfloat16 else None)",
        ),
        ("computing = torch.bfloat16 if bfloat16 else None", "computing = None"),
    ],
    ("8.6", "still-float32"): [("param_dtype=computing", "param_dtype=None")],
}
RIGHT = {
    ("8.6", "a policy of its own for the last layer"): [
        (
            "    fully_shard(model, mesh=mesh, mp_policy=policy)",
            "    fully_shard(model.output, mesh=mesh, mp_policy=policy)\n    fully_shard(model, mesh=mesh, mp_policy=policy)",
        )
    ],
    ("6.7", "without a cut sequence"): [
        (
            'output_layouts=sequence),\n        "positions"',
            'output_layouts=whole),\n        "positions"',
        ),
        ("output_layouts=Shard(0)", "output_layouts=whole"),
        ('        "norm": SequenceParallel(),\n', ""),
        (
            "ColwiseParallel(input_layouts=sequence, output_layouts=whole)",
            "ColwiseParallel(output_layouts=whole)",
        ),
        ('        "attention_norm": SequenceParallel(),\n        "attention": gathered,\n', ""),
        (
            '"attention.wo": RowwiseParallel(output_layouts=sequence)',
            '"attention.wo": RowwiseParallel()',
        ),
        (
            '        "feed_forward_norm": SequenceParallel(),\n        "feed_forward": gathered,\n',
            "",
        ),
        (
            '"feed_forward.w2": RowwiseParallel(output_layouts=sequence)',
            '"feed_forward.w2": RowwiseParallel()',
        ),
        ("parameter.grad.to_local()", "getattr(parameter.grad, '_local_tensor', parameter.grad)"),
        ("part.full_tensor()", 'part.full_tensor() if hasattr(part, "full_tensor") else part'),
    ],
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


def test_a_later_version_passes_what_an_earlier_chapter_asks_for():
    chapters = [catalogue.find(id).chapter for id in STAGES]
    for id, later in zip(STAGES, chapters[1:], strict=False):
        outcome = examine(id, scripts.version(later))
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
    assert set(catalogue.find(id).own) <= {name for of, name in WRONG if of == id}
