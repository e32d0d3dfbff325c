"""Real ranks from a notebook cell: `launch(fn, nprocs, *args)`; `Ranks` for several calls.

    ranks      what starts them, runs them and gives back what they return
    story      what tells why they stopped
    keepers    what leaves nothing behind, however a call ends

`ranks` uses the other two, which know nothing of it or of each other.
"""

from course_utils.launch.keepers import server
from course_utils.launch.ranks.kept import kept
from course_utils.launch.ranks.launching import Ranks, launch
from course_utils.launch.story.failure import RankFailure

__all__ = ["RankFailure", "Ranks", "kept", "launch"]

server.preload()
