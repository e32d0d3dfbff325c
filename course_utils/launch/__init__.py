"""Real ranks from a notebook cell: `launch(fn, nprocs, *args)`.

The rooms, in the order in which a call passes through them:

    arguments   what launch accepts, and one sentence for everything else
    packing     functions, arguments and results as bytes; tensors beside the pickle stream
    server      the fork server that has torch in memory already
    process     a rank as the kernel sees it: start, read, end
    rank        a rank as it sees itself: join the group, run the function, report
    calls       each rank's record of its collective calls, readable after its death
    output      what the ranks print, in an order that is the same in every run
    stacks      where each rank is right now, even inside of a C++ collective
    supervise   the kernel's loop: until all have delivered, one has failed or nothing can move
    diagnosis   who failed first and why, in words for a learner
    janitor     ends ranks and removes folders when the kernel itself is killed
"""

from course_utils.launch import server
from course_utils.launch.failure import RankFailure
from course_utils.launch.parent import launch

__all__ = ["RankFailure", "launch"]

server.preload()
