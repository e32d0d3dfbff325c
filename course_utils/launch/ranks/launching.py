"""The call itself: check, start, watch, explain, clean up."""

from contextlib import contextmanager

from course_utils.comm.events import note
from course_utils.launch.keepers import server, sockets
from course_utils.launch.keepers.interrupts import uninterrupted
from course_utils.launch.ranks import arguments, elsewhere, job, live, packing, rank, unpicklable
from course_utils.launch.ranks.process import RankProcess
from course_utils.launch.story import diagnosis
from course_utils.launch.story.supervise import Supervision


def launch(
    fn,
    nprocs: int,
    *args,
    timeout: float = 60.0,
    rules: str | None = None,
    backend: str | None = None,
) -> list:
    """Runs fn(rank, *args) in `nprocs` fresh processes that form a process group.

    fn may be defined in a cell. Returns the list of what the ranks returned, indexed by rank;
    tensors come back on the CPU. With at least `nprocs` GPUs each rank has one, and NCCL; with fewer
    they share them, where NCCL can; otherwise ranks run on the CPU with gloo. What ranks print
    appears marked with their number, and so do the figures that they show. JupyterLab and a terminal
    also show what each rank's newest line is meanwhile, and after 3 s who is ready and has called what.

    rules="nccl" replays NCCL where ranks run on the CPU: what a GPU with NCCL refuses is refused, in
    its words. Left out, the environment's COURSE_RULES counts.

    backend="gloo" is for programs about gloo itself, its words and what it refuses: all ranks run on
    the CPU with gloo, whatever GPUs there are and whatever COURSE_RULES says.

    Each rank of each launch begins with a random state of its own (torch, numpy, random), as under
    torchrun: ranks that have to draw the same numbers call torch.manual_seed.

    Raises RankFailure when a rank raises, exits, is killed, waits for ever or is still busy
    `timeout` seconds after all have begun (without those in which a busy machine had no processor for
    it), when collective calls do not match, or when something cannot be pickled; TypeError or ValueError for arguments that make no sense; OSError when the
    temporary folder cannot be written. The stop button and Ctrl-C end the ranks, too.
    """
    if rank.inside:
        raise RuntimeError(
            "launch was called inside a rank; start all ranks with one launch, and form smaller "
            "groups among them with dist.new_group."
        )
    nprocs = arguments.check(fn, nprocs, args, timeout)
    arguments.check_backend(backend, rules)
    rules = None if backend else arguments.check_rules(rules)
    call = job.Launch(nprocs, timeout, rules, backend)
    packed = _packed(fn, arguments.of_ranks(args, nprocs))
    note("asked", f"{nprocs} ranks of {getattr(fn, '__name__', type(fn).__name__)}, {timeout:g} s")
    try:
        with (elsewhere.starts() or _start_here)(call, packed) as ranks:
            return _run(ranks, timeout)
    except KeyboardInterrupt:
        pass  # where in this package it arrived tells a learner nothing
    raise KeyboardInterrupt("launch was interrupted, and its ranks have ended.")


def _packed(fn, args_of_ranks):
    """The call of each rank; what is the same for all is packed once."""
    packed = {}
    try:
        for args in args_of_ranks:
            packed[id(args)] = packed.get(id(args)) or packing.pack((fn, args))
    except Exception as error:  # noqa: BLE001 - whatever an object's pickling raises is explained
        failure = unpicklable.explain(fn, args, error)
    else:
        return [packed[id(args)] for args in args_of_ranks]
    raise failure


@contextmanager
def _start_here(call, packed):
    """The ranks of a call on this machine, as long as the block goes on."""
    with (
        job.temporary_folder(range(call.nprocs)) as (folder, records),
        sockets.near(folder) as place,
        server.in_use(),
    ):
        ranks = []
        try:
            placement = call.placement(call.nprocs)
            told = packing.pack(call.for_ranks() | job.on_this_host(call, placement, folder, place))
            for record, own in zip(records, packed, strict=True):
                _start(ranks, record)
                ranks[-1].give(told)  # it begins while the next one starts
                ranks[-1].give(own)
            yield ranks
        finally:
            _end(ranks)


def _start(ranks, record):
    with uninterrupted():  # a rank that was started but is not in the list would stay
        ranks.append(RankProcess(len(ranks), record))


def _end(ranks):
    with uninterrupted():
        for r in ranks:
            r.kill()
        for r in ranks:
            r.close()
        server.end_strays()
        note("ended", "all ranks, and what they had started")


def _run(ranks, timeout):
    view = live.View(ranks)
    with Supervision(ranks, timeout, view.tick) as supervision:
        try:
            reason = supervision.watch()
            note("over", reason)
            if reason == "failed" and any(host.orphaned() for host in {r.host for r in ranks}):
                reason = "orphaned"
            failure = diagnosis.explain(reason, ranks, timeout)
        finally:
            view.close()
            for r in ranks:
                r.read_output()
                r.output.finish()
    if failure:
        raise failure
    return [r.report["result"] for r in ranks]
