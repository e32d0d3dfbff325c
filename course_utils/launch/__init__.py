"""Real ranks from a notebook cell: `launch(fn, nprocs, *args)`.

The rooms, in the order in which a call passes through them:

    launching    the call itself: check, start, watch, explain, clean up
    interrupts   what an interrupt must not break off
    job          what a rank needs to know: of its call, and of the host that it is on
    arguments    what launch accepts, and one sentence for everything else
    packing      functions, arguments and results as bytes; tensors beside the pickle stream
    unpicklable  which argument, or which variable of the function, cannot be sent
    server       the fork server that has torch in memory already (preloaded: what else it does;
                 huge_pages: why it forks in 2 ms)
    sockets      where the fork server's sockets lie, however long the temporary folder's name
    family       processes below others: handles that mean no other process, and orphans
    guardian     what the fork server does for all below it, also when the kernel is gone
    view         a rank as the kernel sees it, wherever it is
    process      a rank on this machine: start, read, end
    hosts        ranks on other hosts, and how the kernel hears of them; agent: a host's own side
    rank         a rank as it sees itself: join the group, run the function, report
    peers        no message to a rank that is not there
    calls        each rank's record of its collective calls; matching: do they match?
    output       what the ranks print, in an order that is the same in every run
    figures      what the ranks draw: shown under the cell (figure_backend: Matplotlib's side)
    supervise    the kernel's loop: until all have delivered, one has failed or nothing can move
    stacks       where each rank is right now, even inside of a C++ collective
    threads      what the threads of a rank can still do: nothing that moves any rank on?
    states       what each rank did, in words; frames: with the learner's own lines
    diagnosis    who failed first and why: one message for a learner, a RankFailure (failure)
    janitor      ends ranks and jobs, and removes folders, when the kernel itself is killed
"""

from course_utils.launch.keepers import server
from course_utils.launch.ranks.launching import launch
from course_utils.launch.story.failure import RankFailure

__all__ = ["RankFailure", "launch"]

server.preload()
