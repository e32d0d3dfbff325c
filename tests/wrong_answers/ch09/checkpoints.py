"""Answers to 9.1, `Checkpoints`: wrong in a plausible way, or right in another."""

import hashlib
import io
import os
import shutil
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils.hardware import device
from tests.wrong_answers import right, wrong


def _serialised(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _read(content):
    return torch.load(io.BytesIO(content), weights_only=True)


def _put(path, data):
    """Writes a file whose bytes are on the disk then."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class _Checkpoints:
    """A right answer in parts, each of which a wrong one replaces."""

    name = "step-{}.ckpt"

    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep
        os.makedirs(self.folder, exist_ok=True)

    def path(self, step):
        return self.folder / self.name.format(step)

    def step(self, path):
        return int(path.stem.split("-")[1])

    def latest_first(self):
        return sorted(self.folder.glob("step-*.ckpt"), key=self.step, reverse=True)

    def packed(self, state):
        content = _serialised(state)
        return zlib.crc32(content).to_bytes(4, "big") + content

    def unpacked(self, path):
        """The state, or None where the file is damaged."""
        stored = path.read_bytes()
        content = stored[4:]
        whole = stored and stored[:4] == zlib.crc32(content).to_bytes(4, "big")
        return _read(content) if whole else None

    def unfinished(self, path):
        return self.folder / "unfinished"

    def write(self, path, data):
        other = self.unfinished(path)
        _put(other, data)
        other.rename(path)

    def until(self, step):
        return [path for path in self.latest_first() if self.step(path) <= step]

    def kept(self, step):
        """The files that stay after a save."""
        return self.until(step)[: self.keep]

    def remove(self, step):
        for path in set(self.folder.iterdir()) - set(self.kept(step)):
            path.unlink()

    def make(self, step, state):
        self.write(self.path(step), self.packed(state))
        self.remove(step)

    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)
        dist.barrier()

    def load(self):
        for path in self.latest_first():
            state = self.unpacked(path)
            if state is not None:
                return self.step(path), state
        return None


@right("9.1")
class WaitsByBroadcast(_Checkpoints):
    """Rank 0 tells the others with a number, and hands them what it has read."""

    def save(self, step, state):
        done = torch.zeros(1, device=device())
        if dist.get_rank() == 0:
            self.make(step, state)
            done += 1
        dist.broadcast(done, src=0)
        done.item()  # with NCCL the call returns before the number is there

    def load(self):
        found = [super().load() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]


@right("9.1")
class ChecksumInside(_Checkpoints):
    """torch.save of a digest and the bytes; the file is found damaged by whatever goes wrong."""

    def packed(self, state):
        content = _serialised(state)
        digest = hashlib.blake2b(content).hexdigest()
        return _serialised(
            {"digest": digest, "content": torch.frombuffer(content, dtype=torch.uint8)}
        )

    def unpacked(self, path):
        try:
            stored = _read(path.read_bytes())
            content = stored["content"].numpy().tobytes()
            if hashlib.blake2b(content).hexdigest() == stored["digest"]:
                return _read(content)
        except Exception:  # noqa: BLE001 - damage shows in many ways
            return None
        return None


@right("9.1")
class WritesThroughADescriptor(_Checkpoints):
    def write(self, path, data):
        other = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
        os.close(descriptor)
        os.replace(other, path)


@right("9.1")
class SyncsTheFileItself(_Checkpoints):
    """os.fsync takes whatever has a descriptor; and the arguments by name."""

    def write(self, path, data):
        other = path.with_suffix(".new")
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file)
        os.replace(src=other, dst=path)


@right("9.1")
class WritesInAFolderBelow(_Checkpoints):
    """The unfinished file has a folder of its own, below that of the checkpoints."""

    def unfinished(self, path):
        path = self.folder / "unfinished" / path.name
        path.parent.mkdir(exist_ok=True)
        return path

    def remove(self, step):
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.kept(step):
                path.unlink()


@right("9.1")
class NamesFilesWithinTheFolder(_Checkpoints):
    """All names are relative to the folder's descriptor."""

    def write(self, path, data):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        new = os.open("unfinished", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=folder)
        with os.fdopen(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file)
        os.replace("unfinished", path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.close(folder)


@wrong("9.1", names="nothing-there")
class ExpectsTheFolder(_Checkpoints):
    def __init__(self, folder, keep=2):
        self.folder, self.keep = folder, keep


@wrong("9.1", names="not-latest")
class SortsNames(_Checkpoints):
    def latest_first(self):
        return sorted(self.folder.glob("step-*.ckpt"), reverse=True)


@wrong("9.1", names="rank-0s-part")
class SavesEverywhere(_Checkpoints):
    def save(self, step, state):
        self.make(step, state)
        dist.barrier()


@wrong("9.1", names="rank-0s-part")
class Rank0Reads(_Checkpoints):
    def load(self):
        return super().load() if dist.get_rank() == 0 else None


@wrong("9.1", names="returns-early")
class WaitsBeforeItWrites(_Checkpoints):
    def save(self, step, state):
        dist.barrier()
        if dist.get_rank() == 0:
            self.make(step, state)


@wrong("9.1", names="not-waited")
class StartsABarrier(_Checkpoints):
    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)
        dist.barrier(async_op=True)


@wrong("9.1", names="not-every-rank")
class BarrierInsideTheBranch(_Checkpoints):
    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)
            dist.barrier()


@wrong("9.1", names="other-files")
class KeepsTheHighest(_Checkpoints):
    def kept(self, step):
        return self.latest_first()[: self.keep]


@wrong("9.1", names="other-files")
class NamesTheLatest(_Checkpoints):
    """A file that says which checkpoint is the latest."""

    def make(self, step, state):
        super().make(step, state)
        (self.folder / "latest").write_text(self.path(step).name)


@wrong("9.1", names="no-fallback")
class TakesTheLatestOnly(_Checkpoints):
    def load(self):
        files = self.latest_first()
        return (self.step(files[0]), self.unpacked(files[0])) if files else None


@wrong("9.1", names="no-fallback")
class RemembersTheBytes(_Checkpoints):
    last = None

    def save(self, step, state):
        super().save(step, state)
        self.last = step, _serialised(state)

    def load(self):
        return (self.last[0], _read(self.last[1])) if self.last else super().load()


@wrong("9.1", names="bit-unnoticed")
class TrustsTorchLoad(_Checkpoints):
    def packed(self, state):
        return _serialised(state)

    def unpacked(self, path):
        try:
            return _read(path.read_bytes())
        except Exception:  # noqa: BLE001 - as a learner would
            return None


@wrong("9.1", names="torn")
class WritesUnderTheName(_Checkpoints):
    def write(self, path, data):
        _put(path, data)


@wrong("9.1", names="torn")
class CopiesIntoPlace(_Checkpoints):
    """Without any fsync."""

    def write(self, path, data):
        other = path.with_suffix(".new")
        other.write_bytes(data)
        shutil.copyfile(other, path)


@wrong("9.1", names="removed-first")
class MakesRoomFirst(_Checkpoints):
    def make(self, step, state):
        for path in self.until(step - 1)[self.keep - 1 :]:
            path.unlink()
        super().make(step, state)


@wrong("9.1", names="no-fsync")
class RenamesAtOnce(_Checkpoints):
    def write(self, path, data):
        self.unfinished(path).write_bytes(data)
        self.unfinished(path).rename(path)


@wrong("9.1", names="no-fsync")
class LeavesBytesInTheBuffer(_Checkpoints):
    """A large state gets through the buffer and a small one does not."""

    def write(self, path, data):
        with self.unfinished(path).open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        self.unfinished(path).rename(path)
