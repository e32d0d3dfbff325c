"""A real program as one rank among thousands: nothing is computed, nothing is sent.

PyTorch has both halves of it. With the fake process group a process is one rank of as many as it
likes, and each collective is over at once. With fake tensors an operation finds the shape of its
result and no number, and a tensor has no memory. So FSDP2, `parallelize_module` and a pipeline's
stage run as they are. `_Watching` stands under all of it, where each operation on what this rank
holds passes, and notes calls, FLOPs and storages.
"""

import sys
import time
import traceback
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import flop_counter

from course_planner.descriptions import GROUPS, Layout, require
from course_planner.traffic import Call as Row
from course_utils.comm import private, versions
from course_utils.trace import Call, Record, describe, on_a_ring
from course_utils.trace.meters import local

Program = Callable[[DeviceMesh, Layout], Callable[[], object]]


@dataclass(frozen=True)
class Trace:
    """One step of one rank.

    calls: what it sends, as rows like those of `estimate.traffic`. A call outside of autograd is of
    the pass that it follows, a gather of the one that it precedes, and of "step" if none follows.
    flops: of matrix products, convolutions and attention, on this rank; attention whole, also where
    a mask hides half of it. peak: the most bytes of tensors that it has at a time. seconds: what
    tracing took, and no estimate of the step. held: the peak by kind; "gathered" is what FSDP makes
    whole for a while, "activations" all that is nothing else. kept: what it has after the step, by the
    same kinds. building: the most before the first step. record: each call by itself, in order,
    as `course_utils.trace` records a real rank's; groups: the name of each one's group; lines: the file,
    line and function of the program that made it.
    """

    calls: list[Row]
    flops: int
    peak: int
    seconds: float
    held: dict[str, int]
    kept: dict[str, int]
    building: int
    record: Record = field(repr=False)
    groups: list[str] = field(repr=False)
    lines: list[tuple[str, int, str] | None] = field(repr=False)


def trace(
    program: Program,
    layout: Layout,
    rank: int = 0,
    progress: Callable[[str], object] = lambda phase: None,
) -> Trace:
    """Runs two steps of `program` as `rank` of `layout.gpus` ranks and returns what the second does.

    `program(mesh, layout)` builds what a rank trains and returns its step, a function without
    arguments. `mesh` is that of `mesh_of`, and `layout` the one given here:

        def program(mesh, layout):
            with torch.device("meta"):
                model = Net()
            parallelize_module(model, mesh["tp"], PLAN)
            fully_shard(model, mesh=mesh["dp"])
            model.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(model.parameters())

            def step():
                tokens = torch.randint(VOCABULARY, (layout.micro_batch, SEQ + 1))
                logits = model(tokens[:, :-1])
                cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

    The same function trains on real ranks, of any number. The first step makes what stays (the
    optimizer's state), so the second is the one to look at. Tensors have no values: a program that
    asks for one (`loss.item()`, a split whose sizes a router chooses) is refused, with its line. A
    PipelineStage needs `input_args` and `output_args` with requires_grad=True, since no other stage
    is there to tell them. `progress` hears with each operation how far it is: "building", "first
    step", "second step".

    Memory is that of the tensors, as on the CPU: not an allocator's fragments, a library's buffers,
    a kernel's own space, or what other operations a GPU would choose (foreach, fused attention).
    Raises RuntimeError where this process is a rank of real ones, and ImportError where PyTorch has
    no such parts.
    """
    last = layout.gpus - 1
    require(0 <= rank <= last, f"rank is a whole number from 0 to {last}, not {rank!r}.")
    _refuse_real_ranks()
    start = time.perf_counter()
    with _fake_ranks(layout.gpus, rank):
        mesh = mesh_of(layout)
        watching = _Watching(mesh, progress)
        with private.fake_mode(allow_non_fake_inputs=True), _shapes_as_given(), watching:
            step = _step_of(program, mesh, layout)
            watching.built()
            _with_sentence(step)
            watching.phase = "second step"
            watching.start()
            _with_sentence(step)
        return watching.result(rank, time.perf_counter() - start)


def mesh_of(layout: Layout, device: str = "cpu") -> DeviceMesh:
    """The mesh of all ranks of `layout`: "pp", "dp", "cp" and "tp", in its order, outermost first.

    All four are there, also those of one rank, so that `mesh["tp"]` is never missing.
    """
    names = tuple(reversed(layout.order))
    sizes = tuple(getattr(layout, name) for name in names)
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def _refuse_real_ranks() -> None:
    if dist.is_initialized():
        raise RuntimeError(
            "This process is a rank already, and cannot be one of fake ranks too: trace where no "
            "process group is open, such as in the notebook's kernel."
        )


@contextmanager
def _fake_ranks(ranks: int, rank: int) -> Iterator[None]:
    """This process is `rank` of `ranks`, whose collectives are over at once."""
    store = private.fake_store()
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_groups()


@contextmanager
def _shapes_as_given() -> Iterator[None]:
    """PyTorch 2.12 and 2.13 let a pipeline's stages vote on how they learn of shapes, and fake ranks hear
    no vote. From 2.14 on a stage of fake ranks takes those that it was given, as here."""
    if versions.older_than("2.12") or not versions.older_than("2.14"):
        yield
        return
    vote = private.vote.value

    def take_given(schedule, stages, *_):
        for stage in stages:
            setattr(stage, private.STAGE_MODE, private.static.value)

    private.vote.put(take_given)
    try:
        yield
    finally:
        private.vote.put(vote)


def _forget_groups() -> None:
    """DTensor keeps, for equal meshes, what it once found, and with it groups that are no more."""
    private.forget_shardings()
    private.transforms.value.cache_clear()


def _step_of(program: Program, mesh: DeviceMesh, layout: Layout) -> Callable[[], object]:
    step = _with_sentence(partial(program, mesh, layout))
    if not callable(step):
        name = getattr(program, "__name__", repr(program))
        raise TypeError(
            f"{name}(mesh, layout) returns a step, a function without arguments, and this one "
            f"returned {step!r}."
        )
    return step


def _with_sentence(part: Callable[[], object]) -> object:
    """Runs a part of the program; a value that it asks for is none that there is."""
    try:
        return part()
    except (private.needs_value.value, private.needs_shape.value) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_own(f.filename)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"
        raise RuntimeError(
            f"The program needs the value of a tensor, and among fake ranks tensors have shapes "
            f"only ({error.args[0] if error.args else 'data-dependent'}), at {where}"
        ) from error


def _is_own(file: str) -> bool:
    """Whether a line of `file` is the program's: neither PyTorch's nor of this module."""
    return file != __file__ and "torch" not in file.replace("\\", "/").split("/")


def _own_line() -> tuple[str, int, str] | None:
    """The innermost line of the program that is being run."""
    frame = sys._getframe(1)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


# ---- what stands under the program ---------------------------------------------------------------


class _Watching(private.dispatch_mode.value):
    """Hears of every operation on this rank's own tensors, below DTensor.

    What began outside, with real numbers, stays real, and so does a mesh that is made inside: its
    slices need numbers, and it is a list of ranks. What is on "meta" stays as it is, since a module
    does not exchange its parameters where these are fake and on "meta".
    """

    def __init__(self, mesh: DeviceMesh, progress: Callable[[str], object]) -> None:
        super().__init__()
        self.phase, self.progress = "building", progress
        self.work: dist.Work | None = None  # of the last operation, if that was a call
        self.storages = _Storages()
        self.names = _group_names(mesh)
        self.calls: list[_Noted] = []
        self.flops, self.last = 0, "forward"
        self.asks = False
        self.gathers: list[_Noted] = []  # since the last product
        self.fake = private.fake_tensor.value
        self.formulas = _formulas()

    def __enter__(self):
        self.hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self.storages.open()
        self.propagate = private.shape_of.value
        private.shape_of.put(lambda *given: self._ask_for_a_shape(*given))
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        private.shape_of.put(self.propagate)
        self.storages.close()
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind is not self.fake for kind in types):
            return NotImplemented  # a DTensor: it comes back with this rank's part
        if not types and _is_real(args, kwargs):
            with private.real_mode():
                return func(*args, **kwargs)
        if self.asks:
            return func(*args, **kwargs)
        self.progress(self.phase)
        self.work = None
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as on a real rank; with fake tensors PyTorch makes a new one
        result = func(*args, **kwargs)
        formula = self.formulas.get(func.overloadpacket)
        if formula is not None:
            self._note_product(formula(*args, **kwargs, out_val=result))
        elif (describer := _DESCRIBERS.get(func.namespace)) is not None:
            self._note(describer(func, args, kwargs))
            self._keep_with_its_work(result, args)
        for leaf in private.tree_leaves(result):
            if isinstance(leaf, self.fake) and leaf.device.type != "meta":
                self.storages.add(leaf.untyped_storage())
        return result

    def _ask_for_a_shape(self, *given) -> object:
        """DTensor asks an operation on whole tensors what it would give; no rank does or has that."""
        self.asks = True
        try:
            return self.propagate(*given)
        finally:
            self.asks = False

    def built(self) -> None:
        """The program has what it needs for its first step."""
        self.phase, self.building = "first step", self.storages.peak()

    def start(self) -> None:
        """From now on counts."""
        self.calls.clear()
        self.flops, self.last = 0, "forward"
        self.storages.start()

    def result(self, rank: int, seconds: float) -> Trace:
        held, kept = self.storages.at_peak(), self.storages.at_end()
        record = Record(rank, [], [noted.call for noted in self.calls])
        groups, lines = [[getattr(each, name) for each in self.calls] for name in ("group", "line")]
        peak, building = sum(held.values()), self.building
        return Trace(
            self._rows(), self.flops, peak, seconds, held, kept, building, record, groups, lines
        )

    def _note_product(self, flops: int) -> None:
        self.flops += flops
        self.last = "backward" if _in_backward() else "forward"
        for noted in self.gathers:
            noted.when = self.last
        self.gathers.clear()

    def _note(self, described: tuple[Call, dist.ProcessGroup] | None) -> None:
        """A gather outside of autograd is for the next product, another call from the last one."""
        if described is None:
            return
        call, group = described
        when = "backward" if _in_backward() else self.last
        noted = _Noted(call, self._name(call, group), when, _own_line())
        if call.op == "all_gather" and not _in_backward():
            noted.when = "step"
            self.gathers.append(noted)
        self.calls.append(noted)

    def _keep_with_its_work(self, result: object, args: tuple) -> None:
        """A real Work holds the tensors of its call until the program lets go of it, and a fake one
        none: a stage's message would be gone before it is waited for. Python has one object for a
        Work, which is kept here until the program has it, at the next operation.
        """
        boxed = result[-1] if isinstance(result, tuple | list) and result else result
        if isinstance(boxed, torch.ScriptObject):
            self.work = dist.Work.unbox(boxed)
            weakref.finalize(self.work, lambda _: None, private.tree_leaves(args))

    def _name(self, call: Call, group: dist.ProcessGroup) -> str:
        """The name that `estimate.traffic` has for a group, or else the one in the program."""
        name = group.group_desc.removeprefix("mesh_")
        if name in (*GROUPS, "ep", "edp"):
            return name
        unnamed = name in ("default", "default_pg", "undefined")
        return self.names.get(call.ranks, f"{len(call.ranks)} ranks" if unnamed else name)

    def _rows(self) -> list[Row]:
        """Equal calls together, in the order in which the first of each came."""
        rows: dict[tuple, list[float]] = {}
        for noted in self.calls:
            if noted.call.op in RECEIVED:
                continue
            payload, sent = on_a_ring(noted.call)
            row = rows.setdefault((noted.group, noted.call.op, payload, noted.when), [0, 0.0])
            row[0] += 1
            row[1] += sent
        return [
            Row(group, op, calls, payload, round(sent), when)
            for (group, op, payload, when), (calls, sent) in rows.items()
        ]

    def _before_update(self, optimizer, *_) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.storages.label("parameters", parameters)
        self.storages.label("gradients", [p.grad for p in parameters if p.grad is not None])

    def _after_update(self, optimizer, *_) -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        self.storages.label("optimizer", [value for value in states if torch.is_tensor(value)])


@dataclass
class _Noted:
    """A call, the name of its group, and when it was made: as in `estimate.traffic`; and its line."""

    call: Call
    group: str
    when: str
    line: tuple[str, int, str] | None


RECEIVED = ("recv", "barrier")  # hand nothing over


def _in_backward() -> bool:
    return private.backward_task() != -1


def _group_names(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """The names of this rank's groups: "dp" are also the data and context ranks together."""
    own = mesh.get_coordinate()
    at = {name: slice(None) for name in ("dp", "cp")}
    index = [at.get(name, place) for name, place in zip(mesh.mesh_dim_names, own)]
    names = {tuple(sorted(mesh.mesh[tuple(index)].flatten().tolist())): "dp"}
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape))
    for name in sorted(sizes, key=sizes.get):
        names.setdefault(tuple(dist.get_process_group_ranks(mesh.get_group(name))), name)
    return names


def _is_real(args: tuple, kwargs: dict) -> bool:
    """Whether an operation without fake tensors is about real ones, about a mesh, or on "meta"."""
    tensors = filter(torch.is_tensor, private.tree_leaves((args, kwargs)))
    devices = [tensor.device.type for tensor in tensors]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    if devices:
        return device is None or "meta" not in devices  # `to_empty` leads from there to memory
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != DeviceMesh.__module__:
        frame = frame.f_back
    return frame is not None


class _Storages:
    """The bytes of all storages of this rank, from when each is made to when it is freed.

    FSDP frees with `storage.resize_`, which is no operation: it is replaced while this is open.
    """

    def __init__(self) -> None:
        self.alive: dict[int, tuple[weakref.ref, int]] = {}  # by address: and its number
        self.sizes: list[int] = []  # by number
        self.kinds: dict[int, str] = {}  # by number
        self.numbers, self.changes = array("q"), array("q")  # what changed, by how many bytes
        self.first = 0  # the first change that counts

    def open(self) -> None:
        self.resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)

    def close(self) -> None:
        torch.UntypedStorage.resize_ = self.resize

    def add(self, storage: torch.UntypedStorage) -> None:
        address, size = private.address.of(storage), storage.nbytes()
        if address in self.alive:
            number = self.alive[address][1]
        else:
            number = len(self.sizes)
            reference = weakref.ref(storage, partial(self._freed, address))
            self.alive[address] = reference, number
            self.sizes.append(0)
        if self.sizes[number] != size:
            self._change(number, size)

    def label(self, kind: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            known = self.alive.get(private.address.of(local(tensor).untyped_storage()))
            if known is not None:
                self.kinds[known[1]] = kind

    def start(self) -> None:
        self.first = len(self.changes)

    def at_peak(self) -> dict[str, int]:
        """The bytes by kind at the moment, since `start`, at which most were held."""
        totals = [0, *accumulate(self.changes)][self.first :]
        return self._by_kind(self.first + totals.index(max(totals)))

    def at_end(self) -> dict[str, int]:
        """The bytes by kind now."""
        return self._by_kind(len(self.changes))

    def peak(self) -> int:
        """The most bytes until now."""
        return max(accumulate(self.changes), default=0)

    def _by_kind(self, until: int) -> dict[str, int]:
        held = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered", "activations"), 0)
        for number, change in zip(self.numbers[:until], self.changes[:until]):
            held[self.kinds.get(number, "activations")] += change
        return held

    def _resized(self, storage: torch.UntypedStorage, size: int):
        result = self.resize(storage, size)
        known = self.alive.get(private.address.of(storage))
        if known is not None:
            self.kinds.setdefault(known[1], "gathered")
            self._change(known[1], size)
        return result

    def _freed(self, address: int, _: weakref.ref) -> None:
        self._change(self.alive.pop(address)[1], 0)

    def _change(self, number: int, size: int) -> None:
        self.numbers.append(number)
        self.changes.append(size - self.sizes[number])
        self.sizes[number] = size


# ---- how the calls are heard ---------------------------------------------------------------------


def _of_c10d(func, args: tuple, kwargs: dict) -> tuple[Call, dist.ProcessGroup] | None:
    """A call of torch.distributed's own functions, of FSDP, of a pipeline's messages."""
    schema = private.schema.of(func)
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    arguments = defaults | dict(zip(defaults, args)) | kwargs
    call = describe(schema.name.partition("::")[2], arguments)
    return call and (call, dist.ProcessGroup.unbox(arguments["process_group"]))


# the functional collectives, and the operator of c10d that each makes on a real rank
_FUNCTIONAL = {
    "all_reduce": ("allreduce_", "tensors"),
    "all_reduce_": ("allreduce_", "tensors"),
    "all_reduce_coalesced": ("allreduce_coalesced_", "tensors"),
    "all_reduce_coalesced_": ("allreduce_coalesced_", "tensors"),
    "all_gather_into_tensor": ("_allgather_base_", "input_tensor"),
    "all_gather_into_tensor_out": ("_allgather_base_", "input_tensor"),
    "all_gather_into_tensor_coalesced": ("allgather_into_tensor_coalesced_", "inputs"),
    "reduce_scatter_tensor": ("_reduce_scatter_base_", "input_tensor"),
    "reduce_scatter_tensor_out": ("_reduce_scatter_base_", "input_tensor"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced_", "inputs"),
    "all_to_all_single": ("alltoall_base_", "input"),
}


def _functional(func, args: tuple, kwargs: dict) -> tuple[Call, dist.ProcessGroup] | None:
    """A call of DTensor: the functional collectives reach c10d in C++, below fake tensors."""
    name = private.schema.of(func).name.partition("::")[2]
    if name not in _FUNCTIONAL:
        return None
    operator, payload = _FUNCTIONAL[name]
    names = [argument.name for argument in private.schema.of(func).arguments]
    arguments = dict(zip(names, args)) | kwargs
    group = private.group_called(arguments["group_name"])
    return describe(operator, {payload: args[0], "process_group": group.boxed()}), group


_DESCRIBERS = {"c10d": _of_c10d, "_c10d_functional": _functional}


@cache
def _formulas() -> dict:
    """FLOPs by operation: PyTorch's formulas, and attention on the CPU, which has none there.

    An embedding multiplies nothing, and shows that the forward pass has begun.
    """
    own = {
        torch.ops.aten.embedding: lambda *args, **kwargs: 0,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    return own | flop_counter.flop_registry


def _attention(query, key, value, *more, **options) -> int:
    """As PyTorch counts it on a GPU, which 2.11 does not for fewer heads of keys than of queries."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * scores * (query.shape[-1] + value.shape[-1])


def _attention_backward(gradient, query, key, value, *more, **options) -> int:
    """The scores once more, and the gradients of scores, values, queries and keys."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * scores * (3 * query.shape[-1] + 2 * value.shape[-1])
