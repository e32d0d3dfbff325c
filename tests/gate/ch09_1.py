"""9.1, `Checkpoints`: answers written from the stub alone."""

import hashlib
import io
import os
from pathlib import Path

import torch
import torch.distributed as dist


class Right:
    """A right answer, of which the wrong ones change a method."""

    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep

    def file(self, step):
        return self.folder / f"step-{step:012d}.pt"

    def files(self):
        """The files of checkpoints, the latest step first."""
        return sorted(self.folder.glob("step-*.pt"), reverse=True)

    def pack(self, state):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()

    def unpack(self, content):
        """The state, or None where the file is not whole."""
        digest, content = content[:32], content[32:]
        if hashlib.sha256(content).digest() != digest:
            return None
        return torch.load(io.BytesIO(content), weights_only=True)

    def write(self, step, content):
        draft = self.folder / "draft"
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.file(step))

    def clean(self, step):
        kept = [file for file in self.files() if file <= self.file(step)][: self.keep]
        for file in self.folder.iterdir():
            if file not in kept:
                file.unlink()

    def wait(self):
        dist.barrier()

    def save(self, step, state):
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write(step, self.pack(state))
            self.clean(step)
        self.wait()

    def load(self):
        found = None
        for file in self.files():
            state = self.unpack(file.read_bytes())
            if state is not None:
                found = int(file.stem.removeprefix("step-")), state
                break
        dist.barrier()  # nobody saves, and removes files, while another still reads
        return found


class WritesUnderTheFinalName(Right):
    """Opens the file that has its name already, so that a kill leaves half of it."""

    def write(self, step, content):
        with self.file(step).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


class LeavesTheBytesToTheSystem(Right):
    """Renames a file that is closed, but perhaps not on the disk: no fsync."""

    def write(self, step, content):
        draft = self.folder / "draft"
        draft.write_bytes(content)
        os.replace(draft, self.file(step))


class LetsOtherRanksGoOn(Right):
    """Only rank 0 is busy; the others return from `save` before the file is there."""

    def wait(self):
        pass


class RemovesBeforeItWrites(Right):
    """Makes room first: with `keep` 1, a kill between the two leaves nothing at all."""

    def save(self, step, state):
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            older = [file for file in self.files() if file < self.file(step)]
            for file in self.folder.iterdir():
                if file not in older[: self.keep - 1]:
                    file.unlink()
            self.write(step, self.pack(state))
        dist.barrier()


class TrustsTheZipFile(Right):
    """Has no checksum, and takes what `torch.load` reads without an error for whole."""

    def pack(self, state):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def unpack(self, content):
        try:
            return torch.load(io.BytesIO(content), weights_only=True)
        except Exception:  # noqa: BLE001  as the answer has it
            return None


class SortsNamesAsText(Right):
    """Has no leading zeros in its names and sorts them as text: step 9 is after step 10."""

    def file(self, step):
        return self.folder / f"step-{step}.pt"


class KeepsLaterSteps(Right):
    """Keeps the files with the highest steps, also those later than the step that was saved."""

    def clean(self, step):
        for file in self.folder.iterdir():
            if file not in self.files()[: self.keep]:
                file.unlink()


class LooksAtTheNewestOnly(Right):
    """Reads the latest file, and returns None where that one is damaged."""

    def load(self):
        found = None
        if files := self.files():
            state = self.unpack(files[0].read_bytes())
            if state is not None:
                found = int(files[0].stem.removeprefix("step-")), state
        dist.barrier()
        return found


ANSWERS = {
    "9.1": [
        WritesUnderTheFinalName,
        LeavesTheBytesToTheSystem,
        LetsOtherRanksGoOn,
        RemovesBeforeItWrites,
        TrustsTheZipFile,
        SortsNamesAsText,
        KeepsLaterSteps,
        LooksAtTheNewestOnly,
    ]
}
