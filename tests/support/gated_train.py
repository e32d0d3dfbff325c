"""cluster/train.py whose steps wait for a gate, so that a test decides how far a run may get.

The environment's GATE names a file that holds the number of steps that may be done. With LEAVE_AT_GATE
a rank that is told to leave while it waits does so at once, and does not end a step first. A rank that
was told leaves a file told-PID beside the gate.
"""

import os
import signal
import sys
import time
from pathlib import Path

GATE = Path(os.environ["GATE"])
GATE.with_name(f"began-{os.getpid()}").write_text(str(time.time()))  # before PyTorch is imported

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cluster"))
import train  # notes its parent before it imports PyTorch

train_step, on_signal = train.Training.train_step, train.Leaving.on_signal
waiting = False


def gated(training: train.Training):
    global waiting
    waiting = True
    while int(GATE.read_text()) <= training.step:
        time.sleep(0.01)
    waiting = False
    return train_step(training)


def on_signal_at_gate(leaving: train.Leaving, number: int, frame=None) -> None:
    if waiting and number == signal.SIGTERM and "LEAVE_AT_GATE" in os.environ:
        os._exit(train.Left(agent_too=False).code)
    on_signal(leaving, number, frame)
    GATE.with_name(f"told-{os.getpid()}").touch()


if __name__ == "__main__":
    train.Training.train_step = gated
    train.Leaving.on_signal = on_signal_at_gate
    train.main()
