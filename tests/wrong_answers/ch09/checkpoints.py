"""Answers to 9.1, `Checkpoints`: wrong in a plausible way, or right in another."""

import hashlib
import io
import os
import shutil
import tempfile
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


class _Checkpoints:
    """A right answer in parts, each of which a wrong one replaces."""

    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep
        os.makedirs(self.folder, exist_ok=True)

    def path(self, step):
        return self.folder / f"step-{step}.ckpt"

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

    def write(self, path, data):
        other = self.folder / "unfinished"
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        other.rename(path)

    def remove(self, step):
        until_now = [path for path in self.latest_first() if self.step(path) <= step]
        for path in self.folder.iterdir():
            if path not in until_now[: self.keep]:
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


@wrong("9.1", names="nothing-there")
class ExpectsACheckpoint(_Checkpoints):
    def load(self):
        path = self.latest_first()[0]
        return self.step(path), self.unpacked(path)


@wrong("9.1", names="nothing-there")
class StartsAtZero(_Checkpoints):
    def load(self):
        return super().load() or (0, {})


@wrong("9.1", names="folder-missing")
class ExpectsTheFolder(_Checkpoints):
    def __init__(self, folder, keep=2):
        self.folder, self.keep = folder, keep


@wrong("9.1", names="folder-missing")
class MakesTheLastFolderOnly(_Checkpoints):
    def __init__(self, folder, keep=2):
        self.folder, self.keep = folder, keep
        folder.mkdir(exist_ok=True)


@wrong("9.1", names="not-found")
class LooksForOtherNames(_Checkpoints):
    def latest_first(self):
        return sorted(self.folder.glob("checkpoint-*.pt"), key=self.step, reverse=True)

    def remove(self, step):
        pass


@wrong("9.1", names="sorted-as-text")
class SortsNames(_Checkpoints):
    def latest_first(self):
        return sorted(self.folder.glob("step-*.ckpt"), reverse=True)


@wrong("9.1", names="newest-by-time")
class TakesTheNewestFile(_Checkpoints):
    def latest_first(self):
        files = self.folder.glob("step-*.ckpt")
        return sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)


@wrong("9.1", names="every-rank-writes")
class SavesEverywhere(_Checkpoints):
    def save(self, step, state):
        self.make(step, state)
        dist.barrier()


@wrong("9.1", names="returns-early")
class NobodyWaits(_Checkpoints):
    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)


@wrong("9.1", names="returns-early")
class WaitsBeforeItWrites(_Checkpoints):
    def save(self, step, state):
        dist.barrier()
        if dist.get_rank() == 0:
            self.make(step, state)


@wrong("9.1", names="one-rank-waits")
class BarrierInsideTheBranch(_Checkpoints):
    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)
            dist.barrier()


@wrong("9.1", names="load-not-on-all")
class Rank0LeavesEarly(_Checkpoints):
    def load(self):
        found = [None]
        if dist.get_rank() == 0:
            found = [super().load()]
            if found[0] is None:
                return None
        dist.broadcast_object_list(found, src=0)
        return found[0]


@wrong("9.1", names="loads-on-one-rank")
class Rank0Reads(_Checkpoints):
    def load(self):
        return super().load() if dist.get_rank() == 0 else None


@wrong("9.1", names="no-fallback")
class TakesTheLatestOnly(_Checkpoints):
    def load(self):
        files = self.latest_first()
        return (self.step(files[0]), self.unpacked(files[0])) if files else None


@wrong("9.1", names="no-fallback")
class StopsAtTheDamaged(_Checkpoints):
    def unpacked(self, path):
        state = super().unpacked(path)
        if state is None:
            raise RuntimeError(f"{path.name} is damaged")
        return state


@wrong("9.1", names="one-step-back")
class LooksAtTwo(_Checkpoints):
    def latest_first(self):
        return super().latest_first()

    def load(self):
        for path in self.latest_first()[:2]:
            state = self.unpacked(path)
            if state is not None:
                return self.step(path), state
        return None


@wrong("9.1", names="byte-unnoticed")
class TrustsTorchLoad(_Checkpoints):
    def packed(self, state):
        return _serialised(state)

    def unpacked(self, path):
        try:
            return _read(path.read_bytes())
        except Exception:  # noqa: BLE001 - as a learner would
            return None


@wrong("9.1", names="byte-unnoticed")
class ComparesTheLength(_Checkpoints):
    def packed(self, state):
        content = _serialised(state)
        return len(content).to_bytes(8, "big") + content

    def unpacked(self, path):
        stored = path.read_bytes()
        whole = stored and int.from_bytes(stored[:8], "big") == len(stored) - 8
        return _read(stored[8:]) if whole else None


@wrong("9.1", names="in-place")
class WritesUnderTheName(_Checkpoints):
    def write(self, path, data):
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


@wrong("9.1", names="never-renamed")
class CopiesIntoPlace(_Checkpoints):
    def write(self, path, data):
        other = path.with_suffix(".new")
        other.write_bytes(data)
        shutil.copyfile(other, path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        other.unlink()


@wrong("9.1", names="never-renamed")
class CopiesFromTheTemporaryFolder(_Checkpoints):
    """Without any fsync."""

    def write(self, path, data):
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            shutil.copy(file.name, path)


@wrong("9.1", names="written-after-rename")
class RewritesWhatItHasRenamed(_Checkpoints):
    """The same bytes once more, in place."""

    def write(self, path, data):
        super().write(path, data)
        path.write_bytes(data)


@wrong("9.1", names="takes-the-torn")
class TakesAnythingThatHasAStep(_Checkpoints):
    """Reads the unfinished file first: it has the step in its name."""

    def write(self, path, data):
        other = path.with_suffix(".new")
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        other.replace(path)

    def load(self):
        for path in self.folder.glob("*.new"):
            return self.step(path), _read(path.read_bytes()[4:])
        return super().load()


@wrong("9.1", names="deletes-first")
class MakesRoomFirst(_Checkpoints):
    def make(self, step, state):
        earlier = [path for path in self.latest_first() if self.step(path) < step]
        for path in earlier[self.keep - 1 :]:
            path.unlink()
        super().make(step, state)


@wrong("9.1", names="never-deletes")
class KeepsAll(_Checkpoints):
    def remove(self, step):
        pass


@wrong("9.1", names="deletes-too-much")
class KeepsOneLess(_Checkpoints):
    def remove(self, step):
        for path in self.latest_first()[max(1, self.keep - 1) :]:
            path.unlink()


@wrong("9.1", names="keeps-later")
class KeepsTheHighest(_Checkpoints):
    def remove(self, step):
        for path in set(self.folder.iterdir()) - set(self.latest_first()[: self.keep]):
            path.unlink()


@wrong("9.1", names="saved-twice")
class ChecksumInTheName(_Checkpoints):
    """As the chapter has it, which never saves a step again."""

    def make(self, step, state):
        content = _serialised(state)
        self.write(self.folder / f"step-{step}-{zlib.crc32(content):08x}.ckpt", content)
        self.remove(step)

    def unpacked(self, path):
        content = path.read_bytes()
        return _read(content) if path.stem.endswith(f"{zlib.crc32(content):08x}") else None


@wrong("9.1", names="leftovers")
class LeavesRubbish(_Checkpoints):
    def write(self, path, data):
        other = path.with_suffix(".new")
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        other.replace(path)

    def remove(self, step):
        until_now = [path for path in self.latest_first() if self.step(path) <= step]
        for path in set(self.latest_first()) - set(until_now[: self.keep]):
            path.unlink()


@wrong("9.1", names="makes-any-object")
class UnpicklesAnything(_Checkpoints):
    """The one mistake for which a file is read without weights_only=True."""

    def unpacked(self, path):
        stored = path.read_bytes()
        content = stored[4:]
        whole = stored and stored[:4] == zlib.crc32(content).to_bytes(4, "big")
        return torch.load(io.BytesIO(content), weights_only=False) if whole else None


@wrong("9.1", names="no-fsync")
class RenamesAtOnce(_Checkpoints):
    def write(self, path, data):
        other = self.folder / "unfinished"
        other.write_bytes(data)
        other.rename(path)


@wrong("9.1", names="no-fsync")
class SyncsAfterTheRename(_Checkpoints):
    def write(self, path, data):
        other = self.folder / "unfinished"
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            other.rename(path)
            os.fsync(file.fileno())


@wrong("9.1", names="fsync-unflushed")
class ForgetsToFlush(_Checkpoints):
    """Two writes: the second is smaller than Python's buffer and stays in it."""

    def write(self, path, data):
        other = self.folder / "unfinished"
        with other.open("wb", buffering=2**20) as file:
            file.write(data)
            os.fsync(file.fileno())
        other.rename(path)


@wrong("9.1", names="fsync-unflushed")
class LeavesBytesInTheBuffer(_Checkpoints):
    """One write, which a large state gets through the buffer and a small one does not."""

    def write(self, path, data):
        other = self.folder / "unfinished"
        with other.open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        other.rename(path)


@wrong("9.1", names="state-only")
class ReturnsTheState(_Checkpoints):
    def load(self):
        found = super().load()
        return found and found[1]


@wrong("9.1", names="two-files")
class ChecksumBeside(_Checkpoints):
    """The checksum in a file of its own."""

    def save(self, step, state):
        super().save(step, state)
        if dist.get_rank() == 0:
            digest = hashlib.sha256(_serialised(state)).hexdigest()
            self.path(step).with_suffix(".sha256").write_text(digest)


@wrong("9.1", names="two-files")
class NamesTheLatest(_Checkpoints):
    """A file that says which checkpoint is the latest."""

    def save(self, step, state):
        super().save(step, state)
        if dist.get_rank() == 0:
            (self.folder / "latest").write_text(self.path(step).name)


@wrong("9.1", names="too-few-digits")
class WritesFourDigits(_Checkpoints):
    """As text, 10000 comes before 9999."""

    def path(self, step):
        return self.folder / f"step-{step:04d}.ckpt"

    def latest_first(self):
        return sorted(self.folder.glob("step-*.ckpt"), reverse=True)


@wrong("9.1", names="too-few-digits")
class RemovesByName(_Checkpoints):
    """As text, 999999 comes after 1000000, and counts as later."""

    def path(self, step):
        return self.folder / f"step-{step:06d}.ckpt"

    def remove(self, step):
        until_now = sorted(p for p in self.folder.glob("step-*.ckpt") if p <= self.path(step))
        for path in set(self.folder.iterdir()) - set(until_now[-self.keep :]):
            path.unlink()


@wrong("9.1", names="load-removes")
class RemovesWhatIsDamaged(_Checkpoints):
    def unpacked(self, path):
        state = super().unpacked(path)
        if state is None:
            path.unlink()
        return state


@wrong("9.1", names="load-removes")
class SetsTheDamagedAside(_Checkpoints):
    def unpacked(self, path):
        state = super().unpacked(path)
        if state is None:
            path.rename(path.with_suffix(".damaged"))
        return state


@wrong("9.1", names="dies-between")
class RemovesTheSameStepFirst(_Checkpoints):
    def write(self, path, data):
        other = path.with_suffix(".part")
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        path.unlink(missing_ok=True)
        other.rename(path)


@wrong("9.1", names="takes-the-torn")
class FindsTheUnfinished(_Checkpoints):
    """Its hidden name fits the pattern of those that `load` reads."""

    def latest_first(self):
        return sorted(self.folder.glob("*.ckpt"), key=self.step, reverse=True)

    def write(self, path, data):
        other = path.with_name("." + path.name.removeprefix("step-"))
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        other.rename(path)


@wrong("9.1", names="from-another-folder")
class WritesWhereTemporaryFilesAre(_Checkpoints):
    def write(self, path, data):
        descriptor, other = tempfile.mkstemp()
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.move(other, path)


@wrong("9.1", names="step-of-the-state")
class AsksTheState(_Checkpoints):
    def load(self):
        found = super().load()
        return found and (found[1].get("step", found[0]), found[1])


@wrong("9.1", names="folder-missing")
class LetsRank0MakeTheFolder(_Checkpoints):
    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True)


@right("9.1")
class WritesInAFolderBelow(_Checkpoints):
    """The unfinished file has a folder of its own, below that of the checkpoints."""

    def write(self, path, data):
        other = self.folder / "unfinished" / path.name
        other.parent.mkdir(exist_ok=True)
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        other.replace(path)

    def remove(self, step):
        until_now = [path for path in self.latest_first() if self.step(path) <= step]
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in until_now[: self.keep]:
                path.unlink()


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


@wrong("9.1", names="zero-is-none")
class LooksForMoreThanStep0(_Checkpoints):
    def load(self):
        best, found = 0, None
        for path in self.latest_first():
            state = self.unpacked(path)
            if state is not None and self.step(path) > best:
                best, found = self.step(path), (self.step(path), state)
        return found


@wrong("9.1", names="one-way")
class ReducesToRank0(_Checkpoints):
    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)
        dist.reduce(torch.zeros(1, device=device()), dst=0)


@wrong("9.1", names="not-waited")
class StartsABarrier(_Checkpoints):
    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)
        dist.barrier(async_op=True)


@wrong("9.1", names="never-deletes")
class SlicesToMinusZero(_Checkpoints):
    """With keep=1 nothing is older than all."""

    def remove(self, step):
        until_now = [path for path in self.latest_first() if self.step(path) <= step][::-1]
        for path in set(self.folder.iterdir()) - set(until_now):
            path.unlink()
        for path in until_now[:-1][: -(self.keep - 1)]:
            path.unlink()


@wrong("9.1", names="own-files-only")
class RemovesWhatItHasSaved(_Checkpoints):
    def __init__(self, folder, keep=2):
        super().__init__(folder, keep)
        self.saved = []

    def remove(self, step):
        self.saved = [s for s in self.saved if s < step] + [step]
        for path in self.folder.iterdir():
            if path not in self.latest_first() or self.step(path) > step:
                path.unlink()
        while len(self.saved) > self.keep:
            self.path(self.saved.pop(0)).unlink()


@wrong("9.1", names="later-stays")
class LeavesLaterSteps(_Checkpoints):
    def remove(self, step):
        until_now = [path for path in self.latest_first() if self.step(path) <= step]
        later = set(self.latest_first()) - set(until_now)
        for path in set(self.folder.iterdir()) - set(until_now[: self.keep]) - later:
            path.unlink()


@wrong("9.1", names="keeps-later")
class KeepsTheNewestFiles(_Checkpoints):
    """By the time at which they were written."""

    def remove(self, step):
        files = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: -self.keep]:
            path.unlink()


@wrong("9.1", names="dies-between")
class RemovesLaterStepsFirst(_Checkpoints):
    def make(self, step, state):
        for path in self.latest_first():
            if self.step(path) > step:
                path.unlink()
        super().make(step, state)


@wrong("9.1", names="from-memory")
class RemembersTheLast(_Checkpoints):
    last = None

    def save(self, step, state):
        super().save(step, state)
        self.last = step, state

    def load(self):
        return self.last or super().load()


@wrong("9.1", names="from-memory")
class RemembersTheBytes(_Checkpoints):
    last = None

    def save(self, step, state):
        super().save(step, state)
        self.last = step, _serialised(state)

    def load(self):
        return (self.last[0], _read(self.last[1])) if self.last else super().load()


@wrong("9.1", names="partly-protected")
class PutsTheStepInFront(_Checkpoints):
    """Where the checksum does not cover it."""

    def make(self, step, state):
        self.write(self.path(step), step.to_bytes(8, "big") + self.packed(state))
        self.remove(step)

    def load(self):
        for path in self.latest_first():
            stored = path.read_bytes()
            content = stored[12:]
            if content and stored[8:12] == zlib.crc32(content).to_bytes(4, "big"):
                return int.from_bytes(stored[:8], "big"), _read(content)
        return None


def _all_tensors(value):
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _all_tensors(one)]
    return [value] if torch.is_tensor(value) else []


@wrong("9.1", names="partly-protected")
class SumsUpTheTensors(_Checkpoints):
    def digest(self, state):
        return [zlib.crc32(tensor.numpy().tobytes()) for tensor in _all_tensors(state)]

    def packed(self, state):
        return _serialised([state, self.digest(state)])

    def unpacked(self, path):
        try:
            state, digest = _read(path.read_bytes())
        except Exception:  # noqa: BLE001 - damage shows in many ways
            return None
        return state if self.digest(state) == digest else None


@wrong("9.1", names="short-write")
class WritesOnce(_Checkpoints):
    def write(self, path, data):
        other = self.folder / "unfinished"
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
        other.rename(path)


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
