"""The stages of the learner's script: the course's own version passes, others that are right do, and each mistake is
named. A wrong version is the course's own with lines replaced."""

from pathlib import Path

import pytest

from course_exercises.checks import catalogue, examine
from course_exercises.checks.learner import render
from course_exercises.sources import versions
from tests.support.failures import SEED, failures

STAGES = catalogue.stages()

SAMPLER = "sampler = DistributedSampler(train, seed=options.seed)"
BATCHES = "batches = DataLoader(train, options.batch // world, sampler=sampler, drop_last=True)"
HELD_OUT = "held_out_batches = DataLoader(held_out, options.batch // world)"
SAVE = """    if rank == 0:
        torch.save(model.state_dict(), options.out / "model.pt")
"""
SUM = "    total, windows = sum_over_ranks(total, windows, device=device)\n"
DDP = "parallel = DistributedDataParallel(model, device_ids=[device] if gpu else None)"
WHOLE = "    whole = {name: part.full_tensor() for name, part in model.state_dict().items()}\n"
AVERAGE = "        gradient = parameter.grad.to_local()\n"
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)\n"

WRONG = {
    ("3.6", "learns-nothing"): [("            loss.backward()\n", "")],
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
    ("3.6", "summed-loss"): [("summed / world / len", "summed / len")],
    ("3.6", "last-batch"): [("sampler=sampler, drop_last=True", "sampler=sampler")],
    ("3.6", "all-log"): [
        (
            '(options.out / "log.jsonl").open("w") if rank == 0 else None',
            '(options.out / "log.jsonl").open("w")',
        )
    ],
    ("3.6", "all-print"): [
        ("        if rank == 0:\n            print(", "        if True:\n            print("),
        ("            log.write(", "            log and log.write("),
    ],
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
    ("6.7", "other-calls"): [
        (
            "range(learned + rank, len(windows), data_ranks)",
            "range(learned + dist.get_rank(), len(windows), dist.get_world_size())",
        )
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
    ("6.7", "parts-saved"): [("part.full_tensor()", "part.to_local()")],
    ("6.7", "not-every-rank"): [
        (WHOLE, ""),
        ("        torch.save(whole,", f"    {WHOLE}        torch.save(whole,"),
    ],
}
WRONG |= {
    ("8.6", "not-sharded"): [('shard(model, mesh["data"],', 'shard(model, mesh["tensor"],')],
    ("8.6", "optimizer-first"): [
        (OPTIMIZER, ""),
        (
            '    shard(model, mesh["data"], options',
            OPTIMIZER + '    shard(model, mesh["data"], options',
        ),
    ],
    ("8.6", "parts-saved"): [("part.full_tensor()", "part")],
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
    ("8.6", "held-out-waits"): [
        ("sampler=held_out_sampler", "sampler=range(rank, len(held_out), data_ranks)")
    ],
    ("8.6", "held-out-repeated"): [
        ("own = len(range(rank, len(held_out), data_ranks))", "own = len(held_out_sampler)")
    ],
}
IN_STEP = "            [in_step] = sum_over_ranks(own, device=device)\n"
BACKWARD = "(loss * world / in_step).backward()"
WRONG |= {
    ("3.7", "read-by-all-ranks"): [
        ("range(self.rank, self.micro_batches, self.world):", "range(self.micro_batches):"),
        ("if number // self.world % workers", "if number % workers"),
    ],
    ("3.7", "read-by-all-workers"): [
        ("            if number // self.world % workers == worker:", "            if True:")
    ],
    ("3.7", "left-out"): [
        ("number in range(self.rank, self", "number in range(self.rank + 1, self")
    ],
    ("3.7", "by-micro-batch"): [
        (BACKWARD, "(loss / characters(targets) / options.accumulate).backward()")
    ],
    ("3.7", "by-rank"): [
        (IN_STEP, ""),
        (BACKWARD, "(loss / own).backward()"),
        ("+= in_step", "+= own"),
    ],
    ("3.7", "divided-by-world"): [(BACKWARD, "(loss / in_step).backward()")],
    ("3.7", "synced-each-time"): [("if last else parallel.no_sync()", "if True else None")],
    ("3.7", "never-synced"): [
        ("contextlib.nullcontext() if last else parallel.no_sync()", "parallel.no_sync()"),
        (
            "            optimizer.step()",
            (
                "            for each in model.parameters():\n"
                "                dist.all_reduce(each.grad)\n"
                "                each.grad /= world\n"
                "            optimizer.step()"
            ),
        ),
    ],
    ("3.7", "loss-by-batch"): [
        ("summed += loss.item()", "summed += loss.item() / characters(targets)"),
        ("            count += in_step", "            count += world * options.accumulate"),
    ],
    ("3.7", "held-out-by-batch"): [
        (
            "targets.to(device)).item()\n        count += characters(targets)",
            "targets.to(device)).item() / characters(targets)\n        count += 1",
        )
    ],
    ("3.7", "not-every-rank"): [
        (
            "self.micro_batches = self.steps * options.accumulate * self.world",
            "self.micro_batches = self.steps * options.accumulate * self.world - (self.world > 1)",
        ),
        ("for _ in range(steps):", "while True:"),
        (
            "list(itertools.islice(reading, options.accumulate))\n",
            (
                "list(itertools.islice(reading, options.accumulate))\n"
                "            if not micro_batches:\n"
                "                break\n"
            ),
        ),
    ],
}
LOAD = "    checkpoints.load(position)\n"
SAVED = '{"model": model, "optimizer": optimizer, "position": position}'
WRONG |= {
    ("9.6", "starts-over"): [(LOAD, "")],
    ("9.6", "seldom-saved"): [("% options.save_every == 0:", "% (options.save_every + 1) == 0:")],
    ("9.6", "position-lost"): [("unread.read = done * share", "unread.read = 0")],
    ("9.6", "other-order"): [
        ("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + 7 * bool(done))")
    ],
    ("9.6", "optimizer-lost"): [
        (
            "        dist.barrier()  # all",
            "        self.optimizer.state.clear()\n        dist.barrier()  # all",
        )
    ],
    ("9.6", "other-steps"): [
        (
            "            dcp.load(",
            "            state['model'] = {n: v.clone() for n, v in state['model'].items()}\n            dcp.load(",
        ),
        ('model_state_dict=state["model"]', "model_state_dict={}"),
    ],
    ("9.6", "rank-bound"): [
        (
            "dcp.save(self._state(position), checkpoint_id=partial)",
            (
                "partial.mkdir(parents=True, exist_ok=True)\n"
                "        dist.barrier()\n"
                "        torch.save(self._own(position), partial / str(dist.get_rank()))\n"
                "        dist.barrier()"
            ),
        ),
        (
            "dcp.load(state, checkpoint_id=whole[-1])",
            (
                "own = torch.load(whole[-1] / str(dist.get_rank()), weights_only=True)\n"
                "            position.copy_(own['position'])\n"
                "            for name, part in self._own(position).items():\n"
                "                part.copy_(own[name])"
            ),
        ),
        (
            "    def _whole(self)",
            (
                "    def _own(self, position):\n"
                "        model, optimizer = get_state_dict(self.model, self.optimizer)\n"
                "        own = {n: v.to_local() for n, v in model.items()}\n"
                "        own |= {n + '!': v['momentum_buffer'].to_local() for n, v in optimizer['state'].items()}\n"
                "        return own | {'position': position}\n\n"
                "    def _whole(self)"
            ),
        ),
    ],
    ("9.6", "died-of-sigterm"): [
        ("    signal.signal(signal.SIGTERM, lambda *_: told_to_leave.append(True))\n", "")
    ],
    ("9.6", "trained-on"): [("            if told:\n", "            if False:\n")],
    ("9.6", "left-unsaved"): [("            if told or (", "            if (")],
    ("9.6", "not-whole"): [
        ('self.folder / "partial", self', 'self.folder / f"{steps:09}", self'),
        ("            partial.rename(whole)\n", ""),
        ("        if whole.exists():  # nothing has happened since\n            return\n", ""),
    ],
    ("9.6", "log-lost"): [("lines[:epochs]", "[]")],
    ("9.6", "part-of-an-epoch"): [
        ("int(position[0]), int(position[1]), position[2].item()", "*map(int, position[:2]), 0.0")
    ],
    ("9.6", "left-alone"): [
        (
            "losses, told = sum_over_ranks(loss.item(), len(told_to_leave), device=device)",
            "[losses] = sum_over_ranks(loss.item(), device=device)\n            told = told_to_leave",
        )
    ],
}
META = '    with torch.device("meta"):  # shapes without memory, until each rank knows its part\n'
CUT = '        cut(model, mesh["tensor"])\n'
SHARD = '    shard(model, mesh["data"], options.bfloat16)\n'
STEP = "        loss.backward()\n        optimizer.step()\n        return loss.detach()"
USED = "    model, optimizer, step = program(mesh, options, len(windows.characters))\n"
WRONG |= {
    ("12.5", "no-program"): [("def program(", "def build("), ("= program(", "= build(")],
    ("12.5", "runs-on-import"): [('if __name__ == "__main__":\n    main()', "main()")],
    ("12.5", "returns-something-else"): [
        ("return model, optimizer, step", "return model, step"),
        (USED, "    model, step = program(mesh, options, len(windows.characters))\n"),
        (
            '"checkpoints", model, optimizer)',
            '"checkpoints", model, torch.optim.SGD(model.parameters(), lr=options.rate))',
        ),
    ],
    ("12.5", "asks-for-a-value"): [
        ("return loss.detach()", "return loss.item()"),
        ("loss.item(), len(told_to_leave)", "loss, len(told_to_leave)"),
    ],
    ("12.5", "reads-the-environment"): [
        ('if mesh["tensor"].size() > 1', 'if options.tensor * int(os.environ["WORLD_SIZE"]) > 1')
    ],
    ("12.5", "own-group"): [(META, "    dist.init_process_group()\n" + META)],
    ("12.5", "adds-up"): [("        optimizer.zero_grad()\n", "")],
    ("12.5", "not-used"): [
        (
            "            loss = step(inputs.to(device), targets.to(device))\n",
            (
                "            loss = loss_of(model, inputs.to(device), targets.to(device))\n"
                "            optimizer.zero_grad()\n"
                "            loss.backward()\n"
                "            optimizer.step()\n"
            ),
        ),
    ],
    ("12.5", "optimizer-first"): [
        (OPTIMIZER, ""),
        (SHARD, OPTIMIZER + SHARD),
    ],
    ("12.5", "not-cut"): [('    if mesh["tensor"].size() > 1:\n' + CUT, "")],
    ("12.5", "not-sharded"): [(SHARD, "    else:\n    " + SHARD)],
    ("12.5", "whole-state"): [
        (
            STEP,
            STEP.replace(
                "        return",
                "        for each in model.parameters():\n"
                "            optimizer.state[each].setdefault('average', torch.zeros(each.shape))\n"
                "        return",
            ),
        )
    ],
    ("12.5", "kept-whole"): [
        (
            "    def step(inputs",
            "    kept = {name: part.full_tensor() for name, part in model.named_parameters()}\n\n    def step(inputs",
        ),
        (
            "loss = loss_of(model, inputs, targets)\n        opt",
            "loss = loss_of(model, inputs, targets) + 0 * len(kept)\n        opt",
        ),
    ],
    ("12.5", "whole-at-first"): [(META, META.replace("meta", "cpu"))],
    ("12.5", "dimensions-swapped"): [
        (CUT, CUT.replace("tensor", "data")),
        ('if mesh["tensor"].size() > 1', 'if mesh["data"].size() > 1'),
        (SHARD, SHARD.replace("data", "tensor")),
    ],
    ("12.5", "one-unit"): [
        ("        fully_shard(block, mesh=mesh, mp_policy=policy)", "        pass")
    ],
    ("12.5", "not-summed"): [
        (
            OPTIMIZER,
            '    model.set_requires_gradient_sync(mesh["data"].size() == 1)\n' + OPTIMIZER,
        )
    ],
    ("12.5", "averaged-again"): [
        (
            "        optimizer.step()\n        return",
            (
                "        for each in model.parameters():\n"
                '            dist.all_reduce(each.grad.to_local(), group=mesh.get_group("data"))\n'
                "        optimizer.step()\n        return"
            ),
        )
    ],
    ("12.5", "gathers-whole"): [
        (
            "        optimizer.step()\n        return",
            (
                "        _ = [each.grad.full_tensor().norm() for each in model.parameters()]\n"
                "        optimizer.step()\n        return"
            ),
        )
    ],
    ("12.5", "still-float32"): [(SHARD, SHARD.replace("options.bfloat16", "False"))],
    ("12.5", "other-steps"): [
        (
            "        optimizer.zero_grad()\n        loss.backward()",
            '        optimizer.zero_grad()\n        (loss / mesh["data"].size()).backward()',
        )
    ],
}
PARTS = "for part in zip(inputs.split(options.micro_batch), targets.split(options.micro_batch)):"
BACK = "            of_part.backward()"
WEIGHT = " * len(part[0]) / len(inputs)"
RECOMPUTED = "x = checkpoint(block, x, use_reentrant=False)"
SHARDED = """    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
"""
SHARDS = '    dcp.save({"model": model.state_dict()}, checkpoint_id=options.out / "checkpoint")\n'
WRONG |= {
    ("13.4", "not-sharded"): [('shard(model, mesh["data"],', 'shard(model, mesh["tensor"],')],
    ("13.4", "whole-at-first"): [('torch.device("meta"):', 'torch.device("cpu"):')],
    ("13.4", "one-unit"): [(SHARDED, "")],
    ("13.4", "whole-share"): [(PARTS, PARTS.replace("options.micro_batch", "len(inputs)"))],
    ("13.4", "activations-kept"): [(RECOMPUTED, "x = block(x)")],
    ("13.4", "whole-gradients"): [
        (
            f"        {PARTS}",
            f"        left = -(-len(inputs) // options.micro_batch)\n        {PARTS}",
        ),
        (
            BACK,
            f"            left -= 1\n            model.set_requires_gradient_sync(left == 0)\n{BACK}",
        ),
    ],
    ("13.4", "whole-at-resume"): [
        (
            "            dcp.load(",
            (
                "            large = [torch.empty(p.shape) for p in self.model.parameters()]\n"
                "            large += [torch.empty(p.shape) for p in self.model.parameters()]\n"
                "            dcp.load("
            ),
        )
    ],
    ("13.4", "whole-at-the-end"): [
        (
            SHARDS,
            SHARDS
            + "    whole = {n: part.full_tensor() for n, part in model.state_dict().items()}\n"
            "    if log:\n"
            '        torch.save(whole, options.out / "model.pt")\n',
        )
    ],
    ("13.4", "too-much"): [
        (
            "        optimizer.step()\n        return loss",
            (
                "        whole = [part.full_tensor() for part in model.parameters()]\n"
                "        optimizer.step()\n        return loss"
            ),
        )
    ],
    ("13.4", "no-gradient-found"): [
        (OPTIMIZER, "    model.set_requires_gradient_sync(False)\n" + OPTIMIZER)
    ],
    ("13.4", "summed-micro-batches"): [(WEIGHT, "")],
    ("13.4", "uneven-micro-batches"): [(WEIGHT, " / -(-len(inputs) // options.micro_batch)")],
    ("13.4", "other-steps"): [(BACK, "            optimizer.zero_grad()\n" + BACK)],
    ("13.4", "own-loss"): [("loss += of_part.detach()", "loss = of_part.detach()")],
    ("13.4", "held-out"): [
        (
            "logits, targets = model(inputs.to(device))[:left], targets.to(device)[:left]",
            "logits, targets = model(inputs.to(device)), targets.to(device)",
        )
    ],
    ("13.4", "starts-over"): [(LOAD, "")],
    ("13.4", "not-every-rank"): [
        ("sampler=held_out_sampler", "sampler=range(rank, len(held_out), data_ranks)")
    ],
}
WITHOUT_A_CUT_SEQUENCE = [
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
]
RIGHT = {
    ("13.4", "blocks that are wrapped"): [
        (RECOMPUTED, "x = block(x)"),
        (
            "from torch.utils.checkpoint import checkpoint\n",
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n",
        ),
        (
            SHARDED,
            (
                "    for i, block in enumerate(model.blocks):\n"
                "        model.blocks[i] = checkpoint_wrapper(block)\n"
                "        fully_shard(model.blocks[i], mesh=mesh, mp_policy=policy)\n"
            ),
        ),
    ],
    ("13.4", "whole parameters one after the other"): [
        (
            SHARDS,
            SHARDS + "    for name, part in model.state_dict().items():\n"
            "        whole = part.full_tensor()\n"
            "        if log:\n"
            '            torch.save(whole, options.out / f"{name}.pt")\n',
        )
    ],
    ("12.5", "first values in main, and a step that ends without gradients"): [
        ("    initialize(model, options.seed)\n", ""),
        (USED, USED + "    initialize(model, options.seed)\n"),
        ("        optimizer.zero_grad()\n        loss.backward()", "        loss.backward()"),
        (
            "        optimizer.step()\n        return",
            "        optimizer.step()\n        optimizer.zero_grad()\n        return",
        ),
    ],
    ("12.5", "blocks that stay whole until their backward pass"): [
        (
            "fully_shard(block, mesh=mesh,",
            "fully_shard(block, mesh=mesh, reshard_after_forward=False,",
        )
    ],
    ("12.5", "another optimizer"): [
        (
            "torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)",
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )
    ],
    ("12.5", "without a cut sequence"): WITHOUT_A_CUT_SEQUENCE,
    ("3.7", "the flag of DDP in place of its context"): [
        (
            "                with contextlib.nullcontext() if last else parallel.no_sync():\n",
            "                parallel.require_backward_grad_sync = last\n                if True:\n",
        )
    ],
    ("9.6", "reads what it leaves out"): [
        ("unread.read = done * share", "skipped = done"),
        (
            "        for inputs, targets in batches:\n            loss =",
            (
                "        for inputs, targets in batches:\n"
                "            if skipped:\n"
                "                skipped -= 1\n"
                "                continue\n"
                "            loss ="
            ),
        ),
    ],
    ("9.6", "a checkpoint is whole when DCP's own file says so"): [
        ('self.folder / "partial", self', 'self.folder / f"{steps:09}", self'),
        ("            partial.rename(whole)\n", ""),
        ("        if whole.exists():  # nothing has happened since\n            return\n", ""),
        ('self.folder.glob("[0-9]*"))', 'p.parent for p in self.folder.glob("[0-9]*/.metadata"))'),
    ],
    ("8.6", "a policy of its own for the last layer"): [
        (
            "    fully_shard(model, mesh=mesh, mp_policy=policy)",
            "    fully_shard(model.output, mesh=mesh, mp_policy=policy)\n    fully_shard(model, mesh=mesh, mp_policy=policy)",
        )
    ],
    ("6.7", "without a cut sequence"): [
        *WITHOUT_A_CUT_SEQUENCE,
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
    text = catalogue.find(id).version.read_text()
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize("id", STAGES)
def test_the_course_s_own_version_passes(id):
    outcome = examine(id, catalogue.find(id).version, SEED)
    assert outcome.status == "passed", render(outcome)


@pytest.mark.parametrize(
    ("id", "later"),
    [
        ("3.6", "3.7"),
        ("3.6", "6.7"),
        ("6.7", "8.6"),
        ("8.6", "9.6"),
        ("9.6", "12.5"),
        ("9.6", "13.4"),
    ],
)
def test_a_later_version_passes_what_an_earlier_chapter_asks_for(id, later):
    outcome = examine(id, catalogue.find(later).version, SEED)
    assert outcome.status == "passed", render(outcome)


@pytest.mark.parametrize("id", STAGES)
def test_the_version_before_is_not_attempted(id):
    stage = catalogue.find(id)
    assert examine(id, versions.before(stage.chapter, stage.further)).status == "not attempted"


@pytest.mark.parametrize(("id", "what"), RIGHT, ids=str)
def test_another_right_version_passes(id, what, tmp_path):
    outcome = examine(id, changed(id, RIGHT[id, what], tmp_path), SEED)
    assert outcome.status == "passed", render(outcome)


@pytest.mark.parametrize(("id", "name"), WRONG, ids=str)
def test_a_mistake_is_named(id, name, tmp_path):
    failed = failures(id, changed(id, WRONG[id, name], tmp_path))
    assert failed and failed[-1].misconception == name, failed


def test_what_is_no_python_is_said_as_python_says_it(tmp_path):
    script = changed(
        "9.6", [("            loss.backward()\n", "            loss.backward(\n")], tmp_path
    )
    said = render(examine("9.6", script))
    assert "SyntaxError: '(' was never closed" in said
    assert "could not use" not in said, said


@pytest.mark.parametrize("id", STAGES)
def test_each_sentence_has_a_version(id):
    assert set(catalogue.find(id).own) <= {name for of, name in WRONG if of == id}
