"""cluster/train.py whose steps wait for a gate, so that a test decides how far a run may get.

The environment's GATE names a file that holds the number of steps that may be done.
"""

import os
import sys
import time
from pathlib import Path

GATE = Path(os.environ["GATE"])
GATE.with_name(f"began-{os.getpid()}").write_text(str(time.time()))  # before PyTorch is imported

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
import train

train_step = train.Training.train_step


def gated(training: train.Training):
    while int(GATE.read_text()) <= training.step:
        time.sleep(0.01)
    return train_step(training)


if __name__ == "__main__":
    train.Training.train_step = gated
    train.main()
