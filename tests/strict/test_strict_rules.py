"""Each of NCCL's rules that launch(..., rules="nccl") replays: a program that breaks it is refused in
PyTorch's words, one that is near it and right goes on."""

import copy
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from course_exercises.authoring import load_answer, load_code
from course_exercises.authoring.ranks import following
from course_strict.rules import RULES
from course_utils import hardware
from course_utils.comm import host_waits, intercept, versions
from course_utils.hardware import device
from course_utils.launch import RankFailure, launch
from course_utils.trace.meters import Sampling, storage_bytes
from tests.support.needing_rules import needs_rules

pytestmark = needs_rules
RANKS = 2


def ones(*shape: int, **kind) -> Tensor:
    return torch.ones(*shape, device=device(), **kind)


def other() -> int:
    return 1 - dist.get_rank()


# ---- refused at once: name -> (what is wrong, what is right, the words) --------------------------


def all_reduce_of(tensor: Tensor, **how) -> list:
    dist.all_reduce(tensor, **how)
    return tensor.tolist()


def passed_round(tensor: Tensor) -> list:
    """A message to the other rank, and the other's."""
    received = torch.zeros_like(tensor)
    calls = [dist.P2POp(dist.isend, tensor, other()), dist.P2POp(dist.irecv, received, other())]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received.tolist()


def received(**source) -> None:
    dist.recv(ones(2), **source) if dist.get_rank() else dist.send(ones(2), 1)


def used_early(then) -> float:
    result = ones(2)
    work = dist.all_reduce(result, async_op=True)
    try:
        then(work)
        return result.sum().item()
    finally:
        work.wait()


def used_behind_another_group() -> float:
    """Another communicator has another queue: waiting there says nothing about this one."""
    group = dist.new_group([0, 1])
    return used_early(lambda work: dist.all_reduce(ones(1), group=group))


def batch_used_early() -> list:
    received = torch.zeros(2, device=device())
    calls = [dist.P2POp(dist.isend, ones(2), other()), dist.P2POp(dist.irecv, received, other())]
    works = dist.batch_isend_irecv(calls)
    try:
        return received.tolist()
    finally:
        works[0].wait()


def last_of_two() -> list:
    """NCCL's queue is in order: who has waited for the second has waited for the first."""
    first, second = ones(1), ones(1)
    dist.all_reduce(first, async_op=True)
    dist.all_reduce(second, async_op=True).wait()
    return [first.item(), second.item()]


def loaded(folder: str, **where) -> float:
    path = os.path.join(folder, "saved.pt")
    if dist.get_rank() == 0:
        torch.save(ones(1), path)
    dist.barrier()
    try:
        return torch.load(path, weights_only=True, **where).to(device()).item()
    finally:
        dist.barrier()


def loaded_by_the_other(folder: str) -> float | None:
    """Rank 0 gets its own file back; the other has no GPU 0."""
    try:
        return loaded(folder)
    except RuntimeError:
        if dist.get_rank() == 0:
            return None
        raise


def drawn(on: torch.device) -> list:
    torch.manual_seed(0)
    random = torch.rand(2, generator=torch.Generator().manual_seed(0), device=on)
    return list(random.to(device()).shape)


def gathered(*sizes: int) -> list:
    """Rank r hands over 2 + r numbers, and expects sizes[s] of rank s."""
    rank, parts = dist.get_rank(), [torch.zeros(n, device=device()) for n in sizes]
    dist.all_gather(parts, ones(2 + rank) * rank)
    return [part.tolist() for part in parts]


def gathered_by_0(*sizes: int) -> None:
    parts = [ones(n) for n in sizes] if dist.get_rank() == 0 else None
    dist.gather(ones(2), parts, dst=0)


def scattered_by_1(*sizes: int) -> None:
    parts = [ones(n) for n in sizes] if dist.get_rank() == 1 else None
    dist.scatter(ones(2), parts, src=1)


def reduced_and_scattered(*sizes: int) -> list:
    own = ones(2 + dist.get_rank())
    dist.reduce_scatter(own, [ones(n) for n in sizes])
    return own.tolist()


IN_FLIGHT = host_waits.USED_EARLY
REFUSED = {
    "a CPU tensor": (
        lambda _: all_reduce_of(torch.ones(2)),
        lambda _: all_reduce_of(torch.ones(2).to(device())),
        "No backend type associated with device type cpu",
    ),
    "a CPU tensor among others": (
        lambda _: (ones(2) + torch.ones(2)).tolist(),
        lambda _: (ones(2) + torch.tensor(1.0)).tolist(),  # a number may come from the CPU
        "Expected all tensors to be on the same device",
    ),
    "a CPU tensor in a matmul": (
        lambda _: (ones(2, 2) @ torch.ones(2, 2)).tolist(),
        lambda _: (ones(2, 2)[torch.tensor([1])] @ ones(2, 2)).tolist(),  # so may indices
        "Expected all tensors to be on the same device",
    ),
    "a batch on the CPU": (
        lambda _: nn.Linear(2, 2).to(device())(torch.ones(1, 2)).shape,
        lambda _: nn.Linear(2, 2).to(device())(ones(1, 2)).shape,
        "Expected all tensors to be on the same device",
    ),
    "numpy": (
        lambda _: ones(2).numpy().tolist(),
        lambda _: ones(2).cpu().numpy().tolist(),
        "Use Tensor.cpu() to copy the tensor to host memory first",
    ),
    "a generator of the CPU": (
        lambda _: drawn(device()),
        lambda _: drawn(torch.device("cpu")),
        RULES["generator"].text,
    ),
    "a dtype": (
        lambda _: all_reduce_of(ones(2, dtype=torch.int16)),
        lambda _: all_reduce_of(ones(2, dtype=torch.int32)),
        "Input tensor data type is not supported for NCCL process group: Short",
    ),
    "a tensor with gaps": (
        lambda _: all_reduce_of(ones(2, 2)[:, 0]),
        lambda _: all_reduce_of(ones(2, 2)[0]),
        "Tensors must be contiguous",
    ),
    "a message with gaps": (
        lambda _: dist.isend(ones(2, 2)[:, 0], other()),
        lambda _: passed_round(ones(2, 2)[:, 0].contiguous()),
        "Tensors must be contiguous",
    ),
    "a reduction": (
        lambda _: all_reduce_of(ones(2, dtype=torch.int32), op=dist.ReduceOp.BOR),
        lambda _: all_reduce_of(ones(2), op=dist.ReduceOp.AVG),  # which gloo has not
        "Cannot use ReduceOp.BOR with NCCL",
    ),
    "any source": (
        lambda _: dist.recv(ones(2)),
        lambda _: received(src=0),
        "does not support recvAnysource",
    ),
    "a monitored barrier": (
        lambda _: dist.monitored_barrier(),
        lambda _: dist.barrier(),
        "GLOO",  # the rest of the sentence differs between versions
    ),
    "a result in flight": (
        lambda _: used_early(lambda work: None),
        lambda _: used_early(lambda work: work.wait()),
        IN_FLIGHT,
    ),
    "a message in flight": (
        lambda _: batch_used_early(),
        lambda _: passed_round(ones(2)),
        IN_FLIGHT,
    ),
    "a result in flight before another": (
        lambda _: used_behind_another_group(),
        lambda _: last_of_two(),
        IN_FLIGHT,
    ),
    "a list that has no place for a rank's own part": (
        lambda _: gathered(1, 4),
        lambda _: gathered(2, 3),
        "ProcessGroupNCCL::allgather: invalid tensor size at index 1 (expected (3), got (4))",
    ),
    "a list without an entry for each rank": (
        lambda _: gathered(2),
        lambda _: gathered(2, 3),
        "ProcessGroupNCCL::allgather: Incorrect output list size 1. Output list size should be 2",
    ),
    "a part of a reduced list that does not fit": (
        lambda _: reduced_and_scattered(1, 4),
        lambda _: reduced_and_scattered(2, 3),
        "ProcessGroupNCCL::reduce_scatter: invalid tensor size at index 1 (expected (3), got (4))",
    ),
    "an output of another size": (
        lambda _: dist.all_gather_single(ones(5), ones(2)),
        lambda _: dist.all_gather_single(ones(4), ones(2, 1)),
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "an output of another type": (
        lambda _: dist.all_gather_single(ones(4).double(), ones(2)),
        lambda _: dist.all_gather_single(ones(4), ones(2)),
        "output tensor must have the same type as input tensor",
    ),
    "an input of another size": (
        lambda _: dist.reduce_scatter_single(ones(2), ones(5)),
        lambda _: dist.reduce_scatter_single(ones(2, 1), ones(4)),
        "input tensor size must be equal to world_size times output tensor size",
    ),
    "a file of another rank": (
        loaded_by_the_other,
        lambda folder: loaded(folder, map_location=device()),
        "Please use torch.load with map_location",
    ),
}


def try_all(rank: int, which: int, folder: str) -> dict[str, str | None]:
    """For each entry what it raised, or None."""
    said = {}
    for name, entry in REFUSED.items():
        try:
            entry[which](folder)
            said[name] = None
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("wrong"))
    return launch(try_all, RANKS, 0, folder, rules="nccl")


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("right"))
    return launch(try_all, RANKS, 1, folder, rules="nccl")


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_a_rule_is_refused_in_pytorchs_words(name, wrong):
    assert REFUSED[name][2] in (wrong[1][name] or "nothing was raised")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_near_the_rule_and_right_goes_on(name, right):
    assert [said[name] for said in right] == [None] * RANKS


@pytest.mark.parametrize(
    ("program", "sizes", "guilty", "words"),
    [
        (
            gathered_by_0,
            (2, 3),
            0,
            "gather: invalid tensor size at index 1 (expected (2), got (3))",
        ),
        (
            gathered_by_0,
            (2,),
            0,
            "gather: Incorrect output list size 1. Output list size should be 2",
        ),
        (
            scattered_by_1,
            (2, 3),
            1,
            "scatter: invalid tensor size at index 1 (expected (2), got (3))",
        ),
        (
            scattered_by_1,
            (2,),
            1,
            "scatter: Incorrect input list size 1. Input list size should be 2",
        ),
    ],
)
def test_a_roots_list_is_refused_at_its_call(program, sizes, guilty, words):
    with pytest.raises(RankFailure) as caught:
        launch(lambda rank: program(*sizes), RANKS, rules="nccl", timeout=30)
    failure = caught.value
    assert (failure.rank, failure.error) == (guilty, "ValueError"), str(failure)
    assert "ProcessGroupNCCL::" + words in str(failure)
    assert "in " + program.__name__ in str(failure)


# ---- refused within backward ---------------------------------------------------------------------


class Watches(TorchDispatchMode):
    """Kernels run in a function of Python, as in the checks of chapter 7."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def backward_with(hook, place: str, gradient: Tensor | None = None) -> None:
    weight = ones(2).requires_grad_()
    output = weight * 2
    getattr(weight, place)(hook)
    output.backward(ones(2) if gradient is None else gradient)


def refused_in_a_hook(place: str) -> None:
    backward_with(lambda _: all_reduce_of(ones(2, dtype=torch.int16)), place)


def refused_in_a_mode(_) -> None:
    gradient = ones(2)
    work = dist.all_reduce(gradient, async_op=True)
    with Watches():
        backward_with(lambda _: None, "register_hook", gradient)
    work.wait()


def survives(rank: int, refused, place: str) -> tuple[str, list]:
    """What backward raised, and that the rank goes on, with autograd too."""
    with pytest.raises((RuntimeError, TypeError)) as caught:
        refused(place)
    weight = ones(2).requires_grad_()
    (weight * 3).sum().backward()
    return str(caught.value), weight.grad.tolist()


@pytest.mark.parametrize(
    ("refused", "place", "words"),
    [
        (refused_in_a_hook, "register_hook", "Input tensor data type is not supported"),
        (
            refused_in_a_hook,
            "register_post_accumulate_grad_hook",
            "Input tensor data type is not supported",
        ),
        (refused_in_a_mode, "", IN_FLIGHT),
    ],
    ids=["in a tensor's hook", "in a hook after the gradient", "in a dispatch mode"],
)
def test_what_is_refused_within_backward_ends_in_a_sentence(refused, place, words):
    for said, gradient in launch(survives, RANKS, refused, place, rules="nccl"):
        assert words in said
        assert gradient == [3.0, 3.0]


# ---- never ends under NCCL -----------------------------------------------------------------------


def isend_before_irecv(rank: int) -> list:
    """Gloo takes both at once; NCCL's queue keeps each irecv behind an isend that has no partner."""
    result = torch.zeros(1, device=device())
    works = [dist.isend(ones(1), other()), dist.irecv(result, other())]
    for work in works:
        work.wait()
    return result.tolist()


def one_after_the_other(rank: int) -> list:
    result = torch.zeros(1, device=device())
    calls = [lambda: dist.isend(ones(1), other()), lambda: dist.irecv(result, other())]
    for work in [call() for call in calls[:: 1 if rank else -1]]:
        work.wait()
    return result.tolist()


def two_groups(rank: int, order: int) -> list:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    result = ones(1)
    for group in groups[::order] if rank else groups:
        dist.all_reduce(result, group=group)
    return result.tolist()


def a_group_that_one_rank_forgets(rank: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.barrier()


def groups_that_all_make(rank: int) -> list:
    groups = [dist.new_group([r]) for r in range(RANKS)]
    return all_reduce_of(ones(1), group=groups[rank])


@pytest.mark.parametrize(
    ("program", "arguments"),
    [(isend_before_irecv, ()), (two_groups, (-1,)), (a_group_that_one_rank_forgets, ())],
    ids=["isend before irecv", "groups in another order", "a split that lacks a rank"],
)
def test_what_would_wait_for_ever_fails(program, arguments):
    with pytest.raises(RankFailure) as caught:
        launch(program, RANKS, *arguments, rules="nccl", timeout=30)
    assert caught.value.kind in ("timeout", "mismatch")


@pytest.mark.parametrize(
    ("program", "arguments", "result"),
    [
        (one_after_the_other, (), [1.0]),
        (two_groups, (1,), [4.0]),
        (groups_that_all_make, (), [1.0]),
    ],
    ids=["one after the other", "groups in one order", "groups that all make"],
)
def test_what_nccl_can_do_ends(program, arguments, result):
    assert launch(program, RANKS, *arguments, rules="nccl") == [result] * RANKS


# ---- lists of any sizes --------------------------------------------------------------------------


def lists_of_any_sizes(rank: int) -> dict[str, list]:
    """Of 3 ranks; rank r hands over numbers r, to rank s in an all-to-all 2 * r + s of them."""

    def parts(sizes):
        return [torch.full((n, 1), -1.0, device=device()) for n in sizes]

    gathered, swapped = parts([1, 0, 3]), parts(2 * r + rank for r in range(3))
    dist.all_gather(gathered, torch.full((len(gathered[rank]),), float(rank), device=device()))
    mean, means = ones(rank + 1), [rank * ones(n) for n in (1, 2, 3)]
    dist.reduce_scatter(mean, means, op=dist.ReduceOp.AVG)
    given = [torch.full((2 * rank + s,), float(rank), device=device()) for s in range(3)]
    dist.all_to_all(swapped, given)
    last = [ones(1)] * 3
    dist.all_gather(last, rank * ones(1))
    found = {"gathered": gathered, "means": means, "mean": [mean], "swapped": swapped, "last": last}
    return {name: [tensor.flatten().tolist() for tensor in each] for name, each in found.items()}


def test_lists_may_have_parts_of_any_sizes():
    for rank, found in enumerate(launch(lists_of_any_sizes, 3, rules="nccl")):
        assert found == {
            "gathered": [[0.0], [], [2.0] * 3],
            "means": [[float(rank)] * n for n in (1, 2, 3)],  # what was handed over stays
            "mean": [[1.0] * (rank + 1)],
            "swapped": [[float(r)] * (2 * r + rank) for r in range(3)],
            "last": [[2.0]] * 3,
        }


# ---- the same numbers ----------------------------------------------------------------------------


def a_step(rank: int, wrap: str) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).to(device())
    model = layers if wrap == "none" else wrapped(layers, wrap)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(4, 1, 4, 4)[rank::RANKS].to(device())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model)


@pytest.mark.parametrize("wrap", ["none", "ddp", "fsdp"])
def test_the_device_computes_what_the_cpu_computes(wrap):
    for replayed, plain in zip(
        launch(a_step, RANKS, wrap, rules="nccl"), launch(a_step, RANKS, wrap)
    ):
        assert all(torch.allclose(s, p, atol=1e-6) for s, p in zip(replayed, plain, strict=True))


def copied(rank: int) -> tuple[list, list, str]:
    """A part of a tensor, and a module, as copy.deepcopy gives them: new memory on the device."""
    part = torch.arange(4.0, device=device())[1:3]
    module = nn.Linear(1, 1).to(device())
    other = copy.deepcopy(module)
    other.weight.data.fill_(module.weight.item() + 1)
    changed = (other.weight - module.weight).item()
    return copy.deepcopy(part).tolist(), [round(changed, 3)], other.weight.device.type


def test_a_deep_copy_lies_on_the_device():
    assert launch(copied, 1, rules="nccl") == [([1.0, 2.0], [1.0], "strict")]


def moved_though_watched(rank: int) -> str:
    """torch.export keeps weak references to parameters, which therefore cannot be swapped."""
    module = nn.Linear(1, 1)
    watch = weakref.ref(module.weight)
    module.to(device())
    assert watch is not None
    return module.weight.device.type


def test_a_parameter_with_a_weak_reference_is_moved():
    assert launch(moved_though_watched, 1, rules="nccl") == ["strict"]


def uneven(rank: int) -> int:
    """Join hands the Work of a call on to C++, which waits for it."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).to(device()))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(rank + 1):
            model(ones(1, 2)).sum().backward()
    return rank + 1


def test_ranks_with_unequal_work_join():
    assert launch(uneven, RANKS, rules="nccl") == [1, 2]


def sampled(rank: int) -> list[int]:
    """A step of DDP in the meter, which is a mode of dispatch: the calls pass its method."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(200, 100).to(device()))
    with Sampling() as memory:
        model(ones(1, 200)).sum().backward()
    return [memory.held(), storage_bytes(model.parameters())]


def test_in_a_meter_the_reducer_still_waits_and_no_tensor_counts_twice():
    for held, of_parameters in launch(sampled, RANKS, rules="nccl"):
        assert 2 * of_parameters <= held < 3.2 * of_parameters  # gradients, and DDP's bucket


def sampled_call(rank: int) -> int:
    """What a functional collective makes: the tensor that it brings, and one around it."""
    given = ones(100)
    with Sampling() as memory:
        before = memory.held()
        total = all_reduce(given, "sum", dist.group.WORLD)
        made = memory.held() - before
    assert total.tolist() == [float(RANKS)] * 100
    return made


@pytest.mark.parametrize("rules", [None, "nccl"])
def test_a_tensor_around_another_has_no_memory_of_its_own(rules):
    assert launch(sampled_call, RANKS, rules=rules) == [400] * RANKS


def heard_in_a_batch(rank: int) -> bool:
    """A listener whose call has no Work, as with NCCL, gets that of the batch."""
    got, received = [], torch.zeros(2, device=device())
    batch = c10d._coalescing_manager(device=device(), async_ops=True)
    with batch as calls:
        dist.isend(ones(2), other())
        dist.irecv(received, other())
        intercept.hand_work(None, got.append)
        intercept.hand_work(dist.Work.boxed(None), got.append)  # what NCCL's operators return
        assert got == []
    calls.wait()
    return got == 2 * calls.works


def test_a_listener_gets_the_work_of_a_batch():
    assert launch(heard_in_a_batch, RANKS, rules="nccl") == [True] * RANKS


def waits_for_the_first_only(rank: int) -> list[str]:
    with following() as sent:
        dist.all_reduce(ones(1), async_op=True).wait()
        dist.all_reduce(ones(1), async_op=True)
    return sent.unwaited


def test_checks_excuse_no_call_that_nobody_waits_for():
    assert launch(waits_for_the_first_only, RANKS, rules="nccl") == [["all_reduce"]] * RANKS


# ---- code of chapters that was written for the CPU once ------------------------------------------


def test_half_a_layer_computes_on_the_device():
    parts = launch(load_code(8, "half_a_layer_each"), RANKS, True, rules="nccl")
    assert [part.shape for part in parts] == [(4, 4)] * RANKS


def test_a_wait_with_a_limit_is_for_a_call_on_the_device(tmp_path):
    said = launch(load_code(9, "rank_1_hangs"), RANKS, tmp_path / "done", rules="nccl")
    assert said == ["timed out", "was hanging"]


def restored(rank: int, restore) -> str:
    """The device of a momentum that was loaded to the CPU."""
    layer = nn.Linear(2, 1, bias=False).to(device())
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    saved = {"weight": torch.ones(1, 2)}
    checkpoint = {
        "parameters": saved,
        "optimizer": {"weight": {"momentum_buffer": saved["weight"]}},
    }
    restore(SimpleNamespace(module=layer), optimizer, checkpoint)
    return optimizer.state[layer.weight]["momentum_buffer"].device.type


def test_a_restored_momentum_is_beside_its_parameter():
    assert launch(restored, 1, load_code(8, "restore"), rules="nccl") == ["strict"]


def saved_and_loaded(rank: int, checkpoints: type, folder: str) -> tuple[int, list]:
    kept = checkpoints(folder)
    kept.save(1, {"weight": ones(1)})
    step, state = kept.load()
    return step, state["weight"].tolist()


def test_every_rank_loads_what_rank_0_has_saved(tmp_path):
    answer = load_answer("9.1")
    found = launch(saved_and_loaded, RANKS, answer, str(tmp_path), rules="nccl")
    assert found == [(1, [1.0])] * RANKS


def where(rank: int) -> tuple[str, str]:
    return dist.get_backend(), device().type


def test_the_environment_gives_the_rules_of_a_whole_run(monkeypatch):
    assert launch(where, 1) == [("gloo", "cpu")]
    monkeypatch.setenv("COURSE_RULES", "nccl")
    assert launch(where, 1) == [("nccl", "strict")]


def test_rules_that_nobody_knows_are_named():
    with pytest.raises(ValueError, match="is \"nccl\" or not given, not 'mpi'"):
        launch(where, 1, rules="mpi")


def test_a_program_about_gloo_gets_gloo_under_the_rules_and_on_gpus_too(monkeypatch):
    monkeypatch.setenv("COURSE_RULES", "nccl")
    monkeypatch.setattr(hardware, "placement", lambda _: pytest.fail("asked for a GPU"))
    assert launch(where, 2, backend="gloo") == [("gloo", "cpu")] * 2


def test_a_backend_that_cannot_be_asked_for_is_named():
    with pytest.raises(ValueError, match="is \"gloo\" or not given, not 'nccl'"):
        launch(where, 1, backend="nccl")
    with pytest.raises(ValueError, match="exclude each other"):
        launch(where, 1, backend="gloo", rules="nccl")


def test_a_version_without_the_rules_is_named(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: "2.11.0+cpu")
    with pytest.raises(RuntimeError, match=r"needs PyTorch 2\.14 or newer, and 2\.11\.0\+cpu is"):
        launch(where, 1, rules="nccl")


def test_complex_numbers_and_means_of_whole_ones_are_those_of_the_cpu():
    def work(rank):
        z, pair = torch.tensor([1 + 2j], device=device()), ones(1, 2)
        counts = torch.tensor([3, 4], device=device())
        dist.all_reduce(counts, op=dist.ReduceOp.AVG)
        loss = nn.functional.smooth_l1_loss(ones(2), 0 * ones(2))
        seen = (z.conj() * z, -z.conj().imag, torch.view_as_complex(pair), torch.view_as_real(z))
        return [x.tolist() for x in (*seen, counts, loss)]

    wanted = [[5 + 0j], [2.0], [1 + 1j], [[1.0, 2.0]], [3, 4], 0.5]
    assert launch(work, RANKS, rules="nccl") == [wanted] * RANKS


def mixed(rank: int) -> tuple[list[torch.dtype], float]:
    """A step in mixed precision: the types on the way, and how far the gradient is from one by hand."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    by_hand = nn.functional.linear(x.half(), layer.weight.half(), layer.bias.half()).float()
    nn.functional.cross_entropy(by_hand, y).backward()
    expected, layer.weight.grad = layer.weight.grad, None
    layer, x, y = layer.to(device()), x.to(device()), y.to(device())
    scaler = torch.amp.GradScaler(device().type)
    optimizer = torch.optim.SGD(layer.parameters())
    with torch.autocast(device().type, dtype=torch.float16):
        out = layer(x)
        loss = nn.functional.cross_entropy(out, y)
        others = nn.functional.softmax(out, 1), out + x[:, :1], x.double() @ x.double().T
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradient = layer.weight.grad
    scaler.step(optimizer)
    kinds = [t.dtype for t in (out, loss, gradient, *others)]
    return kinds, (gradient.cpu() - expected).abs().max().item()


def test_autocast_casts_what_it_casts_on_a_gpu():
    half, full = torch.float16, torch.float32
    kinds, difference = launch(mixed, 1, rules="nccl")[0]
    assert kinds == [half, full, full, full, full, torch.float64]
    assert difference < 1e-3


def test_an_operator_without_a_kernel_for_cpus_is_named():
    with pytest.raises(
        RankFailure, match="_thnn_fused_lstm_cell has no kernel for CPUs, with which"
    ):
        launch(lambda rank: nn.LSTM(4, 3).to(device())(ones(2, 1, 4)), 1, rules="nccl")
