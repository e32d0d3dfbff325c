"""Rarer wrong answers to 9.1, `Checkpoints`."""

import io
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils.hardware import device
from tests.wrong_answers import rarer
from tests.wrong_answers.ch09.checkpoints import _Checkpoints, _put, _read, _serialised


def _with(called, **methods):
    rarer("9.1")(type(called, (_Checkpoints,), methods))


def _by_time(files):
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


_with("StartsAtZero", load=lambda self: _Checkpoints.load(self) or (0, {}))
_with(
    "TakesTheNewestFile", latest_first=lambda self: _by_time(self.folder.glob("step-*.ckpt"))[::-1]
)
_with("KeepsOneLess", kept=lambda self, step: self.until(step)[: max(1, self.keep - 1)])
_with("KeepsTheNewestFiles", kept=lambda self, step: _by_time(self.folder.iterdir())[-self.keep :])


def _until_as_text(self, step):
    """As text, 999999 comes after 1000000, and counts as later."""
    until_now = sorted(p for p in self.folder.glob("step-*.ckpt") if p <= self.path(step))
    return until_now[-self.keep :]


_with("RemovesByName", name="step-{:06d}.ckpt", kept=_until_as_text)


@rarer("9.1")
class LetsRank0MakeTheFolder(_Checkpoints):
    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True)


@rarer("9.1")
class AsksTheState(_Checkpoints):
    def load(self):
        found = super().load()
        return found and (found[1].get("step", found[0]), found[1])


@rarer("9.1")
class LooksForMoreThanStep0(_Checkpoints):
    def load(self):
        found = super().load()
        return found if found and found[0] > 0 else None


@rarer("9.1")
class ReducesToRank0(_Checkpoints):
    def save(self, step, state):
        if dist.get_rank() == 0:
            self.make(step, state)
        dist.reduce(torch.zeros(1, device=device()), dst=0)


@rarer("9.1")
class Rank0LeavesEarly(_Checkpoints):
    def load(self):
        found = [None]
        if dist.get_rank() == 0:
            found = [super().load()]
            if found[0] is None:
                return None
        dist.broadcast_object_list(found, src=0)
        return found[0]


@rarer("9.1")
class SlicesToMinusZero(_Checkpoints):
    """With keep=1 nothing is older than all."""

    def kept(self, step):
        newest, *older = self.until(step)
        surplus = older[::-1][: -(self.keep - 1)]
        return [newest, *(path for path in older if path not in surplus)]


@rarer("9.1")
class RemovesWhatItHasSaved(_Checkpoints):
    def __init__(self, folder, keep=2):
        super().__init__(folder, keep)
        self.saved = []

    def kept(self, step):
        self.saved = [s for s in self.saved if s < step] + [step]
        surplus = [self.path(s) for s in self.saved[: -self.keep]]
        return [path for path in self.until(step) if path not in surplus]


@rarer("9.1")
class LeavesLaterSteps(_Checkpoints):
    def kept(self, step):
        later = set(self.latest_first()) - set(self.until(step))
        return [*super().kept(step), *later]


@rarer("9.1")
class ChecksumInTheName(_Checkpoints):
    """As the chapter has it, which never saves a step again."""

    def make(self, step, state):
        content = _serialised(state)
        self.write(self.folder / f"step-{step}-{zlib.crc32(content):08x}.ckpt", content)
        self.remove(step)

    def unpacked(self, path):
        content = path.read_bytes()
        return _read(content) if path.stem.endswith(f"{zlib.crc32(content):08x}") else None


@rarer("9.1")
class LeavesRubbish(_Checkpoints):
    def unfinished(self, path):
        return path.with_suffix(".new")

    def kept(self, step):
        return [*super().kept(step), *self.folder.glob("*.new")]


@rarer("9.1")
class LooksAtTwo(_Checkpoints):
    def load(self):
        for path in self.latest_first()[:2]:
            state = self.unpacked(path)
            if state is not None:
                return self.step(path), state
        return None


@rarer("9.1")
class SetsTheDamagedAside(_Checkpoints):
    def unpacked(self, path):
        state = super().unpacked(path)
        if state is None:
            path.rename(path.with_suffix(".damaged"))
        return state


@rarer("9.1")
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


@rarer("9.1")
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


@rarer("9.1")
class RewritesWhatItHasRenamed(_Checkpoints):
    def write(self, path, data):
        super().write(path, data)
        path.write_bytes(data)


@rarer("9.1")
class FindsTheUnfinished(_Checkpoints):
    """Its hidden name fits the pattern of those that `load` reads."""

    def latest_first(self):
        return sorted(self.folder.glob("*.ckpt"), key=self.step, reverse=True)

    def unfinished(self, path):
        return path.with_name("." + path.name.removeprefix("step-"))


@rarer("9.1")
class CountsTheUnfinished(FindsTheUnfinished):
    """What a killed save has left is one of those that it keeps."""

    def step(self, path):
        return int(path.stem.removeprefix(".").removeprefix("step-"))


@rarer("9.1")
class WritesWhereTemporaryFilesAre(_Checkpoints):
    def write(self, path, data):
        other = Path(tempfile.mkdtemp(), "unfinished")
        _put(other, data)
        shutil.move(other, path)


@rarer("9.1")
class WritesOnce(_Checkpoints):
    def write(self, path, data):
        other = self.unfinished(path)
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
        other.rename(path)


@rarer("9.1")
class RemovesTheSameStepFirst(_Checkpoints):
    def write(self, path, data):
        _put(self.unfinished(path), data)
        path.unlink(missing_ok=True)
        self.unfinished(path).rename(path)


@rarer("9.1")
class RemovesLaterStepsFirst(_Checkpoints):
    def make(self, step, state):
        for path in set(self.latest_first()) - set(self.until(step)):
            path.unlink()
        super().make(step, state)


@rarer("9.1")
class SyncsAfterTheRename(_Checkpoints):
    def write(self, path, data):
        other = self.unfinished(path)
        with other.open("wb") as file:
            file.write(data)
            file.flush()
            other.rename(path)
            os.fsync(file.fileno())


@rarer("9.1")
class UnpicklesAnything(_Checkpoints):
    """The one mistake for which a file is read without weights_only=True."""

    def unpacked(self, path):
        stored = path.read_bytes()
        content = stored[4:]
        whole = stored and stored[:4] == zlib.crc32(content).to_bytes(4, "big")
        return torch.load(io.BytesIO(content), weights_only=False) if whole else None
