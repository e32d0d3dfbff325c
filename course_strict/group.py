"""The strict device's process groups: NCCL's by name and by what they refuse, gloo's by transport.

A group of the backend "nccl" has a backend for the strict device only. So a CPU tensor is refused by
PyTorch itself. Each operator of c10d gets a kernel for the device here: it judges the call by NCCL's
rules, puts it in the queue of the communicator, and there hands the same bytes, as CPU tensors, to a
group of gloo that nobody else sees.
"""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from course_strict import memory, queues, rules
from course_strict.queues import Flight, Queue
from course_utils.comm import host_waits, intercept, private
from course_utils.comm.collectives import tensors_in

_SENDS_ONLY = ("send", "barrier")
_libraries = []


class Communicator(dist.ProcessGroupGloo):
    """What PyTorch sees as the backend of a group, and takes for NCCL's."""

    supports_splitting = True
    supports_coalescing = True

    def __init__(self, options) -> None:
        super().__init__(options.store, options.group_rank, options.group_size, options.timeout)
        self.queue = Queue()
        self.batch: _Batch | None = None
        self._store, self._splits = options.store, 0
        self.transport = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        private.set_default_backend(self.transport, dist.ProcessGroup.BackendType.GLOO)
        private.register_backend(
            self.transport, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self
        )
        private.set_group_name(self.transport, f"carries {options.group_id}")

    def eager_connect_single_device(self, device) -> None:
        """Gloo has connected when it was made."""

    def perform_nocolor_split(self, device) -> None:
        """ncclCommSplit, as a rank calls it that will not be in the new group."""
        self.split()

    def split(self) -> None:
        """Returns when all ranks of this communicator have called it."""
        self._splits += 1
        flight = Flight("new_group", self.queue, [], watched=False)
        self.queue.put(flight, [lambda: lambda: self._all_split(f"split {self._splits}")])
        host_waits.behind_a_collective(flight.ended.is_set)
        if flight.error is not None:
            raise flight.error

    def _all_split(self, name) -> None:
        """By the store: a barrier of the transport would meet the barriers of those who do not split."""
        if self._store.add(name, 1) == self.size():
            self._store.set(f"{name}: all", "")
        self._store.wait([f"{name}: all"], timedelta(days=365))


class _Batch:
    """The calls between the beginning and the end of a batch: they start together."""

    def __init__(self, communicator):
        self.starts: list[Callable] = []
        self.flight = Flight("batch_isend_irecv", communicator.queue, [], watched=True)


_communicators: dict[str, Communicator] = {}  # by the name of the group


def install() -> None:
    """Makes "nccl" mean this, in this process."""
    device = memory.NAME
    private.plugins.value["NCCL"] = private.Plugin(_create, True)
    c10d.Backend.backend_capability["nccl"] = [device]
    c10d.Backend.backend_capability["gloo"] = ["cpu", device]  # as it takes tensors of CUDA
    c10d.Backend.default_device_backend_map[device] = "nccl"
    # DDP's logger has no clock for such a device, and says so to every cell
    dist.Logger.set_runtime_stats_and_log = lambda logger: None
    _reducer_waits()
    _batch_calls()
    intercept.show_batches()
    for module in (c10d, dist, dist.device_mesh):
        module.split_group = _split_group
    queues.install()
    library = torch.library.Library("c10d", "IMPL")
    for name, operator in intercept.operators():
        if name != "monitored_barrier_":
            library.impl(name, _kernel(name, operator), "PrivateUse1", allow_override=True)
    _libraries.append(library)


def _create(options, _):
    if options.split_from is not None:
        options.split_from.split()
    communicator = _communicators[options.group_id] = Communicator(options)
    return communicator


def _split_group(parent_pg=None, split_ranks=None, *_, group_desc=None, **__):
    """Stands in for dist.split_group, which meshes call: C++ would make groups of plain gloo of it."""
    of_parent = dist.get_process_group_ranks(parent_pg)
    groups = [
        dist.new_group([of_parent[r] for r in ranks], group_desc=group_desc)
        for ranks in split_ranks
    ]
    return next((g for g in groups if g != dist.GroupMember.NON_GROUP_MEMBER), None)


def _kernel(name, operator):
    names = [argument.name for argument in private.schema.of(operator).arguments]
    one_result = len(private.schema.of(operator).returns) == 1

    def kernel(*args):
        given = dict(zip(names, args))
        group = dist.ProcessGroup.unbox(given["process_group"])
        if not _is_nccls(group):  # gloo copies to the CPU and back
            result = operator.redispatch(memory.CPU, *map(_seen, args))
            return result if one_result else (args[0], result[-1])
        communicator = _communicators[group.group_name]
        rules.check_call(name, given)
        outputs = [] if name in _SENDS_ONLY else tensors_in(args[0])
        queues.called_with(tensors_in(list(args)))
        start = _start(name, operator, given, communicator)
        work = _put(communicator, start, outputs)
        return work.boxed() if one_result else (args[0], work.boxed())

    return kernel


def _is_nccls(group):
    return private.backend(group, memory.device()) is _communicators.get(group.group_name)


def _put(communicator, start, outputs):
    batch = communicator.batch
    if batch is not None:
        batch.starts.append(start)
        batch.flight.fills(outputs)
        return batch.flight.work
    caller = intercept.python_caller()
    flight = Flight(caller, communicator.queue, outputs, watched=caller is not None)
    communicator.queue.put(flight, [start])
    return flight.work


def _start(name, operator, given, communicator):
    """A function that makes the call by gloo, and returns what waits for its end."""
    average = rules.averages(given)
    limit = given.get("timeout", -1)  # in milliseconds
    if limit <= 0:
        limit = private.timeout.of(communicator.options) // timedelta(milliseconds=1)
    given = given | {"process_group": communicator.transport.boxed()}
    if average:
        given["reduce_op"] = torch.classes.c10d.ReduceOp()  # SUM
    if "tag" in given:
        given["tag"] = 0  # NCCL knows no tags: messages of a pair arrive in their order
    # NCCL knows no shapes, but in an all_to_all_single a split is so many rows
    seen = _seen if name == "alltoall_base_" else _seen_flat
    arguments = [seen(value) for value in given.values()]

    def start():
        begun = time.monotonic()
        if name in _LISTS_OF_ANY_SIZES:
            works, lists, arrive = _LISTS_OF_ANY_SIZES[name](communicator, *arguments[:2])
        else:
            result = operator.redispatch(memory.CPU, *arguments)
            works = [dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)]
            lists = arrive = ()

        def finish():
            try:
                for work in works:
                    work.wait()
            except RuntimeError:
                if time.monotonic() - begun < limit / 1000:
                    raise
                raise rules.timed_out(name, limit) from None
            for tensor, part in zip(lists, arrive):
                tensor.copy_(part)
            if average:
                for tensor in tensors_in(arguments[0]):
                    whole = not (tensor.is_floating_point() or tensor.is_complex())
                    tensor.div_(communicator.size(), rounding_mode="trunc" if whole else None)

        return finish

    return start


def _all_gather(gloo, lists, own):
    """Each rank broadcasts its part; not into the lists, where a tensor may stand twice."""
    arrive = [torch.empty_like(part) for part in lists[0]]
    arrive[gloo.rank()] = own[0]
    return [gloo.broadcast(part, root) for root, part in enumerate(arrive)], lists[0], arrive


def _all_to_all(gloo, outputs, inputs):
    sizes = [[part.numel() for part in parts] for parts in (outputs, inputs)]
    arrive = torch.cat(outputs)
    work = gloo.alltoall_base(arrive, torch.cat(inputs), *sizes)
    return [work], outputs, arrive.split(sizes[0])


# what gloo does for parts of one size only: to wait for, the lists, and what is to be copied into them
_LISTS_OF_ANY_SIZES = {"allgather_": _all_gather, "alltoall_": _all_to_all}


def _batch_calls():
    """Gives PyTorch's group calls the batches that gloo has not."""
    start, end = private.start_batch.value, private.end_batch.value

    def start_batch(group, device):
        if device.type != memory.NAME:
            return start(group, device)
        communicator = _communicators[group.group_name]
        communicator.batch = _Batch(communicator)
        return None

    def end_batch(group, device):
        if device.type != memory.NAME:
            return end(group, device)
        communicator = _communicators[group.group_name]
        batch, communicator.batch = communicator.batch, None
        communicator.queue.put(batch.flight, batch.starts)
        return batch.flight.work

    private.start_batch.put(start_batch)
    private.end_batch.put(end_batch)


def _reducer_waits():
    """Under Join, Python makes a call and hands its Work to DDP's reducer, which waits in C++."""
    take = private.reducer_waits.value

    def take_and_wait(reducer, work, *options):
        queues.awaited(work)
        take(reducer, work, *options)

    private.reducer_waits.put(take_and_wait)


def _seen(value):
    if isinstance(value, Tensor):
        return memory.seen_from_cpu(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_seen(entry) for entry in value)
    return value


def _seen_flat(value):
    if isinstance(value, (list, tuple)):
        return type(value)(map(_seen_flat, value))
    return _seen(value).view(-1) if isinstance(value, Tensor) else value
