"""What is seen where a PyTorch has a private name no longer: python -m tests.modules.without_names

For each name of comm/private.py, a program runs in a fork of this process, in which the name is gone.
Prints {name: what the program returned or raised, in words} as JSON.
"""

import importlib
import json
import multiprocessing
import sys
import tempfile
import weakref
from contextlib import redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import course_strict
from course_exercises.authoring import ranks
from course_grader import home, integrity, plain
from course_hosts import growing
from course_planner import fake
from course_planner.descriptions import Layout
from course_utils import hardware
from course_utils.comm import private, versions
from course_utils.launch import launch as launch_anywhere
from course_utils.launch.keepers import forks, server
from course_utils.lesson.terminal import store_on
from course_utils.trace import Trace, meters
from tests.support.on_gloo import launch


def _sum(rank):
    x = torch.ones(2)
    dist.all_reduce(x)
    return x


def _compiled(rank):
    return torch.compile(_sum, backend="eager")(rank)


def _batch(rank):
    x = torch.full((1,), float(rank))
    y = torch.empty(1)
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y + rank + 1


def _own_world(rank):
    dist.new_group([0, 1])
    dist.barrier()  # one rank may have the new group while the other still connects
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return _sum(rank)


def _left_alone(rank):
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == 0:
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)  # fails by itself


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2


def _apply_double(rank):
    return _Double.apply(torch.ones(1)).item()


_Double.__module__ = _apply_double.__module__ = "__main__"  # as of a cell: they are sent whole


def _of_float8(rank):
    return torch.ones(2).to(torch.float8_e5m2)


def _typed(rank):
    return torch.ones(2).storage()


def _traced(rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with Trace():
        model(torch.ones(1, 2)).sum().backward()


def _joined(rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(hardware.device()))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            model(torch.ones(1, 2, device=hardware.device())).sum().backward()


def _ranks(fn, start=launch, **options):
    def program():
        server.fork_from_here()
        return start(fn, 2, **options)

    return program


def _metered():
    importlib.reload(meters)  # where a class of a mode is made
    with meters.Sampling():
        return torch.ones(2) + 1


def _used_early():
    with ranks.UsedEarly(SimpleNamespace(open_calls=list)):
        return torch.ones(2) + 1


def _under_rules():
    device = course_strict.install()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(2, 2, device=device)
    dist.all_reduce(x)
    with torch.autocast(device.type, torch.bfloat16):
        x = x @ x
    return torch._neg_view(x).cpu()


def _hook_under_rules():
    x = torch.ones(2, device=course_strict.install(), requires_grad=True)
    x.register_hook(lambda gradient: 1 / 0)
    (x * 2).sum().backward()


def _referred_under_rules():
    device, model = course_strict.install(), nn.Linear(2, 2)
    kept = weakref.ref(model.weight)
    return model.to(device), kept


def _planned(step):
    def plan(mesh, layout):
        model = nn.Linear(4, 4)
        parallelize_module(model, mesh["tp"], RowwiseParallel())
        return lambda: step(model(torch.ones(2, 2)))

    return lambda: fake.trace(plan, Layout(tp=2))


def _with_2_12(program):
    def run():
        versions.installed = lambda: "2.12.1"
        return program()

    return run


def _piped(mesh, layout):
    x = torch.ones(2, 2, requires_grad=True)
    stage = PipelineStage(
        nn.Linear(2, 2),
        mesh["pp"].get_local_rank(),
        2,
        x.device,
        input_args=x,
        output_args=x,
        group=mesh["pp"].get_group(),
    )
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, _: output.sum())
    return lambda: schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))


def _met():
    with tempfile.TemporaryDirectory() as folder:
        store = store_on(0)
        Path(folder, "store").write_text(str(store.port))
        Path(folder, "events").mkdir()
        member = growing.Member(folder, "a")
        store.set("list 1", "a")
        member.meet()


def _written_by_hand():
    return plain.Writer(lambda held: 0).dump(torch.ones(1))


PROGRAMS = {
    **dict.fromkeys(("all_operators", "keys_after", "key", "schema"), _ranks(_sum)),
    **dict.fromkeys(("skip", "strategy", "set_strategy"), _ranks(_compiled)),
    **dict.fromkeys(("start_batch", "end_batch"), _ranks(_batch)),
    **dict.fromkeys(("forget_compiled", "new_group", "end_groups"), _ranks(_own_world)),
    "default_store": _ranks(_own_world),
    **dict.fromkeys(("backend", "device_types", "timeout"), _ranks(_left_alone)),
    "autograd_functions": _ranks(_apply_double),
    **dict.fromkeys(("new_dtypes", "rebuild_tensor"), _ranks(_of_float8)),
    "untyped": _ranks(_typed),
    **dict.fromkeys(("dispatch_mode", "address"), _metered),
    "below": _used_early,
    "version": lambda: ranks.versions([torch.ones(2)]),
    **dict.fromkeys(("backward_task", "engine"), _ranks(_traced)),
    **dict.fromkeys(
        (
            *("keys", "make_device", "DeviceGuard", "device_kind", "negated", "is_view"),
            *("registered_for", "without_keys", "tree_map", "plugins", "Plugin"),
            *("set_default_backend", "register_backend", "set_group_name", "work_of"),
        ),
        _under_rules,
    ),
    "run_backward": _hook_under_rules,
    "apply_to_module": _referred_under_rules,
    "reducer_waits": _ranks(_joined, launch_anywhere, rules="nccl"),
    **dict.fromkeys(
        (
            *("fake_store", "fake_tensor", "fake_mode", "real_mode", "group_called"),
            *("shape_of", "forget_shardings", "transforms", "tree_leaves"),
        ),
        _planned(lambda output: output.sum().backward()),
    ),
    **dict.fromkeys(
        ("vote", "static"), _with_2_12(lambda: fake.trace(_piped, Layout(pp=2, micro_batches=2)))
    ),
    **dict.fromkeys(("needs_value", "needs_shape"), _planned(torch.Tensor.tolist)),
    **dict.fromkeys(("handle_of_group", "reconfigure"), _met),
    "plain_tensors": _written_by_hand,
    **dict.fromkeys(("replaced", "kernels_of"), partial(importlib.reload, integrity)),
    **dict.fromkeys(("function_modes", "dispatch_modes"), partial(importlib.reload, home)),
}


def _without(name, program, answer):
    named = getattr(private, name)
    for each in named if isinstance(named, list) else [named]:
        each.path += "_gone"
        vars(each).pop("value", None)
    try:
        with redirect_stdout(sys.stderr):
            answer.send(f"returned {program()}")
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is compared
        answer.send(f"{type(error).__name__}: {error}")


def main():
    """All, or those that the command line names."""
    forks.without("course_utils.launch.ranks.preloaded")  # it uses names, which are to go first
    forks.import_preloaded()
    fork, said = multiprocessing.get_context("fork"), {}
    for name in sys.argv[1:] or PROGRAMS:
        answers, answer = fork.Pipe(duplex=False)
        process = fork.Process(target=_without, args=(name, PROGRAMS[name], answer))
        process.start()
        answer.close()
        with suppress(EOFError):
            said[name] = answers.recv()
        process.join()
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
