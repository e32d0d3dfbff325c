"""The call itself: check, start, watch, explain, clean up."""

from contextlib import contextmanager

from course_utils.comm.events import note
from course_utils.launch.keepers import server, sockets
from course_utils.launch.keepers.interrupts import uninterrupted
from course_utils.launch.ranks import arguments, elsewhere, job, live, packing, rank, unpicklable
from course_utils.launch.ranks.process import RankProcess
from course_utils.launch.story import diagnosis
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.supervise import Supervision

_STILL, _WHOLE = 60.0, 600.0  # seconds: a launch's limits by default


def launch(
    fn,
    nprocs: int,
    *args,
    timeout: float | None = None,
    rules: str | None = None,
    backend: str | None = None,
    debug: bool = False,
    **kwargs,
) -> list:
    """Runs fn(rank, *args, **kwargs) in `nprocs` fresh processes that form a process group.

    fn may be defined in a cell. Returns the list of what the ranks returned, indexed by rank;
    tensors come back on the CPU. With at least `nprocs` GPUs each rank has one, and NCCL; with fewer
    they share them, where NCCL can; otherwise ranks run on the CPU with gloo. What ranks print
    appears marked with their number, and so do the figures that they show. JupyterLab and a terminal
    also show what each rank's newest line is meanwhile, and after 3 s who is ready and has called what.

    timeout, rules, backend and debug are launch's own; any other keyword is passed to fn.

    rules="nccl" replays NCCL where ranks run on the CPU: what a GPU with NCCL refuses is refused, in
    its words. Left out, the environment's COURSE_RULES counts.

    backend="gloo" is for programs about gloo itself, its words and what it refuses: all ranks run on
    the CPU with gloo, whatever GPUs there are and whatever COURSE_RULES says.

    debug=True holds a rank that raises, or that calls breakpoint(), and pdb talks through the cell: one
    rank at a time, with the rank's number in its prompt. The others wait as long as that takes. `c`, or
    `q`, lets it go.

    Each rank of each launch begins with a random state of its own (torch, numpy, random), as under
    torchrun: ranks that have to draw the same numbers call torch.manual_seed.

    A script for torchrun runs in a rank as it is: its own init_process_group takes over the group, and
    RANK, WORLD_SIZE, MASTER_ADDR and the like are set.

    Raises RankFailure when a rank raises, exits, is killed, waits for ever or is still busy
    `timeout` seconds after all have begun, when collective calls do not match or lack their partner, or
    when something cannot be pickled; TypeError or ValueError for arguments that make no sense; OSError
    when the temporary folder cannot be written. A failure's traceback(rank) and locals(rank) tell more
    than its message; in the next cell it is sys.last_value. The stop button and Ctrl-C end the ranks, too.

    Without a `timeout` ranks may stand still for a minute: none makes a call, and not all of them compute.
    Those that go on have ten minutes. Time in which a busy machine had no processor for them, or was
    asleep, does not count.
    """
    if rank.inside:
        raise RuntimeError(
            "launch was called inside a rank; start all ranks with one launch, and form smaller "
            "groups among them with dist.new_group."
        )
    own = {
        "timeout": timeout is not None,
        "rules": rules is not None,
        "backend": backend is not None,
        "debug": debug is not False,
    }
    still, whole = (_STILL, _WHOLE) if timeout is None else (timeout, timeout)
    nprocs = arguments.check(fn, nprocs, args, kwargs, own, still)
    arguments.check_backend(backend, rules)
    asked, rules = rules, None if backend else arguments.check_rules(rules)
    call = job.Launch(nprocs, still, whole, rules, backend, debug)
    packed = _packed(fn, arguments.of_ranks(args, kwargs, nprocs))
    note("asked", f"{nprocs} ranks of {getattr(fn, '__name__', type(fn).__name__)}, {still:g} s")
    start = elsewhere.starts()
    if start and debug:
        raise ValueError("launch(debug=True) is for ranks on this machine, not on other hosts.")
    try:
        with (start or start_here)(call, packed) as ranks:
            return run(ranks, call, nccl=asked is not None)
    except KeyboardInterrupt:
        pass  # where in this package it arrived tells a learner nothing
    raise KeyboardInterrupt("launch was interrupted, and its ranks have ended.")


def _packed(fn, of_ranks):
    """The call of each rank; what is the same for all is packed once."""
    packed = {}
    try:
        for given in of_ranks:
            packed[id(given)] = packed.get(id(given)) or packing.pack((fn, *given))
    except Exception as error:  # noqa: BLE001 - whatever an object's pickling raises is explained
        failure = unpicklable.explain(fn, *given, error)
    else:
        return [packed[id(given)] for given in of_ranks]
    raise failure


@contextmanager
def start_here(call, packed):
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
        note("ended", "all ranks, and what they had started")


def run(ranks, call, nccl):
    meetings = Meetings([rank.record for rank in ranks])
    view = live.View(ranks, meetings)
    with Supervision(ranks, meetings, call.still, call.whole, view.tick) as supervision:
        try:
            reason = supervision.watch()
            note("over", reason)
            if reason == "failed" and any(host.orphaned() for host in {r.host for r in ranks}):
                reason = "orphaned"
            failure = diagnosis.explain(reason, ranks, meetings, supervision.limit, nccl)
        finally:
            view.close()
            for r in ranks:
                r.read_output()
                r.output.finish()
    if failure:
        raise failure
    return [r.report["result"] for r in ranks]
