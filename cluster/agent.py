"""torchrun, with an exit code that says whether to start the job again.

    python cluster/agent.py --nproc-per-node 2 --max-restarts 100 cluster/train.py ...

Its options are torchrun's. torchrun exits with 1 for any reason; this with the code of the workers
where that one says whether to start again (see group.py), and otherwise with one above 127: it may
help. SIGUSR1, which a scheduler sends once, to all processes of a job, is for the workers: the agent
notes it for those that it starts later, and ends one that cannot listen yet by the signal itself.
"""

import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch.distributed.run as torchrun
from group import AGAIN, EXIT_CODE_FILE, WARNED, WRONG_OPTIONS
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

FAILED = 129


def meeting(arguments: list[str], node: str | None) -> list[str]:
    """Options that say which agent hosts the rendezvous store under SLURM: that of the `node` which
    the endpoint names. torchrun would ask the machine for its own name and address, which need not
    be those of SLURM; then nobody hosts it, and all give up."""
    ends = [word.partition("=")[2] for word in arguments if word.startswith("--rdzv-endpoint=")]
    if not (node and ends):
        return []
    return [f"--rdzv-conf=is_host={str(ends[0].rpartition(':')[0] == node).lower()}"]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        path = Path(folder) / "exit-code"
        os.environ[EXIT_CODE_FILE] = str(path)
        signal.signal(signal.SIGUSR1, lambda *_: path.with_name(WARNED).touch())
        try:
            # first, so that whoever says it otherwise is heard
            torchrun.main(
                [*meeting(sys.argv[1:], os.environ.get("SLURMD_NODENAME")), *sys.argv[1:]]
            )
        except SignalException as received:
            code = AGAIN if received.sigval == signal.SIGTERM else 128 + received.sigval
            sys.exit(int(path.read_text()) if path.exists() else code)
        except (AssertionError, ValueError) as wrong:  # for wrong options, as --nnodes=3:2
            print(f"agent.py: {wrong}", file=sys.stderr)
            sys.exit(WRONG_OPTIONS)
        except (ChildFailedError, RendezvousError, RuntimeError, OSError):
            # torchrun has given up: too many restarts, or nobody to meet
            traceback.print_exc()
            sys.exit(FAILED)


if __name__ == "__main__":
    main()
