"""Wrong and other right answers to the exercises of chapter 09."""

import hashlib
import io
import math
import os
import random
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from tests.wrong_answers import right, wrong

# ---- 9.1 Checkpoints -----------------------------------------------------------------------------


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
        done = torch.zeros(1)
        if dist.get_rank() == 0:
            self.make(step, state)
            done += 1
        dist.broadcast(done, src=0)

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
        for path in [path for path in self.latest_first() if path != self.path(step)][
            self.keep - 1 :
        ]:
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


# ---- 9.2 ElasticSampler --------------------------------------------------------------------------


class _Sampler(Sampler):
    """A right answer in parts: the position is a number of steps, not of samples."""

    def __init__(self, samples, global_batch, rank, world_size, seed=0):
        self.samples, self.global_batch, self.seed = samples, global_batch, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = self.done = 0

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def order(self):
        generator = torch.Generator()
        generator.manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator).tolist()

    def steps(self):
        """The samples of each step, of all ranks together."""
        order = self.order()
        return [
            order[start : start + self.global_batch]
            for start in range(0, self.samples, self.global_batch)
        ]

    def share(self, batch):
        return batch[self.rank :: self.world_size]

    def __iter__(self):
        for batch in self.steps()[self.done :]:
            self.done += 1
            yield self.share(batch)

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


@right("9.2")
class SharesBlocks(_Sampler):
    """Consecutive blocks, the first ones longer, and an order of Python's."""

    def order(self):
        order = list(range(self.samples))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def share(self, batch):
        ends = [len(batch) * rank // self.world_size for rank in range(self.world_size + 1)]
        return batch[ends[self.rank] : ends[self.rank + 1]]


@right("9.2")
class SavesWhatIsLeft(_Sampler):
    """The state holds the samples that nobody has used yet."""

    def __init__(self, *args):
        super().__init__(*args)
        self.left = self.order()

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch = epoch
            self.left = self.order()

    def __iter__(self):
        while self.left:
            batch, self.left = self.left[: self.global_batch], self.left[self.global_batch :]
            yield self.share(batch)

    def state_dict(self):
        return {"epoch": self.epoch, "left": self.left}

    def load_state_dict(self, state):
        self.epoch, self.left = state["epoch"], list(state["left"])


@wrong("9.2", names="not-lists")
class YieldsIndices(_Sampler):
    def __iter__(self):
        for share in super().__iter__():
            yield from share


@wrong("9.2", names="never-ends")
class StartsOverByItself(_Sampler):
    def __iter__(self):
        while True:
            yield from super().__iter__()
            self.epoch, self.done = self.epoch + 1, 0


@wrong("9.2", names="not-shuffled")
class TakesThemInOrder(_Sampler):
    def order(self):
        return list(range(self.samples))


@wrong("9.2", names="drops-last")
class DropsTheRest(_Sampler):
    def steps(self):
        return [batch for batch in super().steps() if len(batch) == self.global_batch]


@wrong("9.2", names="padded")
class FillsUpTheLastStep(_Sampler):
    def steps(self):
        steps = super().steps()
        steps[-1] = (steps[-1] + self.order())[: self.global_batch]
        return steps


@wrong("9.2", names="padded")
class FillsUpEachShare(_Sampler):
    """As DistributedSampler does, in each step."""

    def share(self, batch):
        missing = -len(batch) % self.world_size
        return super().share((batch * self.world_size)[: len(batch) + missing])


@wrong("9.2", names="own-order")
class RankInTheSeed(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch + self.rank)
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="own-order")
class ProcessesNumbers(_Sampler):
    def order(self):
        return torch.randperm(self.samples).tolist()


@wrong("9.2", names="global-batch-changes")
class BatchPerRank(_Sampler):
    def steps(self):
        order, size = self.order(), self.global_batch * self.world_size
        return [order[start : start + size] for start in range(0, self.samples, size)]


@wrong("9.2", names="remainder-lost")
class RoundsTheShareDown(_Sampler):
    def share(self, batch):
        size = len(batch) // self.world_size
        return batch[self.rank * size : (self.rank + 1) * size] if size else super().share(batch)


@wrong("9.2", names="batches-differ")
class CutsTheOrderFirst(_Sampler):
    """Each rank has every n-th sample of the epoch, then makes steps of them."""

    def share(self, batch):
        own = self.order()[self.rank :: self.world_size]
        steps = math.ceil(self.samples / self.global_batch)
        step = self.done - 1
        return (
            own[len(own) * step // steps : len(own) * (step + 1) // steps]
            if (self.world_size > 1)
            else batch
        )


@wrong("9.2", names="uneven")
class LastRankTakesTheRest(_Sampler):
    def share(self, batch):
        size = len(batch) // self.world_size
        last = self.rank == self.world_size - 1
        return (
            batch[self.rank * size :] if last else batch[self.rank * size : (self.rank + 1) * size]
        )


@wrong("9.2", names="steps-differ")
class SkipsEmptyLists(_Sampler):
    def __iter__(self):
        return (share for share in super().__iter__() if share)


@wrong("9.2", names="starts-late")
class CountsStepsFromOne(_Sampler):
    """Goes to step 1 of an epoch, which is its second."""

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 1


@wrong("9.2", names="same-order")
class ForgetsTheEpoch(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="seed-ignored")
class ForgetsTheSeed(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="global-random")
class SeedsTheProcess(_Sampler):
    def order(self):
        torch.manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(self.samples).tolist()


@wrong("9.2", names="global-random")
class SeedsPython(_Sampler):
    def order(self):
        random.seed(1000 * self.seed + self.epoch)
        return random.sample(range(self.samples), self.samples)


@wrong("9.2", names="not-plain")
class SavesAnArray(_Sampler):
    def state_dict(self):
        return {"epoch": self.epoch, "done": np.array(self.done)}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], int(state["done"])


@wrong("9.2", names="from-zero")
class LoadsTheEpochOnly(_Sampler):
    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], 0


@wrong("9.2", names="from-zero")
class IteratesFromTheStart(_Sampler):
    def __iter__(self):
        self.done = 0
        yield from super().__iter__()


@wrong("9.2", names="epoch-lost")
class LoadsThePositionOnly(_Sampler):
    def load_state_dict(self, state):
        self.done = state["done"]


@wrong("9.2", names="one-behind")
class CountsAfterTheYield(_Sampler):
    def __iter__(self):
        for batch in self.steps()[self.done :]:
            yield self.share(batch)
            self.done += 1


@wrong("9.2", names="one-ahead")
class PreparesAllLists(_Sampler):
    def __iter__(self):
        return iter(list(super().__iter__()))


@wrong("9.2", names="one-ahead")
class PreparesOneList(_Sampler):
    """As a loader with a worker does."""

    def __iter__(self):
        lists = super().__iter__()
        waiting = next(lists, None)
        while waiting is not None:
            following = next(lists, None)
            yield waiting
            waiting = following


@wrong("9.2", names="reshuffles")
class ShufflesTheRest(_Sampler):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.resumed_at = self.done

    def order(self):
        order = super().order()
        if not hasattr(self, "resumed_at"):
            return order
        used = self.resumed_at * self.global_batch
        rest = order[used:]
        random.Random(self.seed).shuffle(rest)
        return order[:used] + rest


@wrong("9.2", names="set-epoch-resets")
class StartsTheEpochAnew(_Sampler):
    def set_epoch(self, epoch):
        self.epoch, self.done = epoch, 0


@wrong("9.2", names="position-kept")
class KeepsThePosition(_Sampler):
    def set_epoch(self, epoch):
        self.epoch = epoch


@wrong("9.2", names="position-per-rank")
class CountsItsOwnSamples(_Sampler):
    """What one rank has used, times the ranks that there are now."""

    def __init__(self, *args):
        super().__init__(*args)
        self.own = 0

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.own = epoch, 0

    def __iter__(self):
        order, position = self.order(), self.own * self.world_size
        while position < self.samples:
            share = self.share(order[position : position + self.global_batch])
            position += self.global_batch
            self.own += len(share)
            yield share

    def state_dict(self):
        return {"epoch": self.epoch, "own": self.own}

    def load_state_dict(self, state):
        self.epoch, self.own = state["epoch"], state["own"]


@wrong("9.2", names="restores-rank")
class SavesEverything(_Sampler):
    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


@wrong("9.2", names="states-differ")
class SavesItsRank(_Sampler):
    def state_dict(self):
        return {**super().state_dict(), "rank": self.rank}


@wrong("9.2", names="state-moves")
class HandsOutItsOwnDict(_Sampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.state = {}

    def state_dict(self):
        self.state |= super().state_dict()
        return self.state


@wrong("9.2", names="state-moves")
class CountsInTheDictThatItLoads(_Sampler):
    def __iter__(self):
        for share in super().__iter__():
            vars(self).get("state", {}).update(self.state_dict())
            yield share

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.state = state


@wrong("9.2", names="never-goes-back")
class GoesForwardOnly(_Sampler):
    def set_epoch(self, epoch):
        if epoch > self.epoch:
            super().set_epoch(epoch)


@wrong("9.2", names="uneven")
class RoundsSharesUp(_Sampler):
    def share(self, batch):
        size = -(-len(batch) // self.world_size)
        return batch[self.rank * size : (self.rank + 1) * size]


@wrong("9.2", names="end-forgotten")
class StartsOverAtTheEnd(_Sampler):
    """Ready for the next epoch, as it seems."""

    def __iter__(self):
        yield from super().__iter__()
        self.done = 0


@wrong("9.2", names="not-lists")
class YieldsTensors(_Sampler):
    def __iter__(self):
        for batch in super().__iter__():
            yield torch.tensor(batch)


# ---- 9.3 TrainingState ---------------------------------------------------------------------------

PARTS = "model", "optimizer", "scheduler", "sampler"


class _State:
    """A right answer in parts."""

    saved = PARTS
    generators = "python", "numpy", "torch"

    def __init__(self, model, optimizer, scheduler, sampler):
        self.optimizer, self.scheduler, self.sampler = optimizer, scheduler, sampler
        self.model = self.unwrapped(model)

    def unwrapped(self, model):
        return model.module if isinstance(model, DistributedDataParallel) else model

    def state_dict(self):
        state = {part: getattr(self, part).state_dict() for part in self.saved}
        return {**state, **{name: getattr(self, f"get_{name}")() for name in self.generators}}

    def load_state_dict(self, state):
        self.load_parts(state)
        self.load_generators(state)

    def load_parts(self, state):
        for part in self.saved:
            getattr(self, part).load_state_dict(state[part])

    def load_generators(self, state):
        for name in self.generators:
            getattr(self, f"set_{name}")(state[name])

    def get_python(self):
        return random.getstate()

    def set_python(self, state):
        random.setstate(state)

    def get_numpy(self):
        name, words, *rest = np.random.get_state()
        return [name, torch.from_numpy(words.astype(np.int64)), *rest]

    def set_numpy(self, state):
        name, words, *rest = state
        np.random.set_state((name, words.numpy().astype(np.uint32), *rest))

    def get_torch(self):
        states = [torch.get_rng_state()]
        return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])

    def set_torch(self, state):
        torch.set_rng_state(state[0])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state[1:])


@right("9.3")
class NumbersAsTensors(_State):
    pass


@right("9.3")
class StripsThePrefix(_State):
    """Names without `module.` in the state, and with it where the model has it."""

    def unwrapped(self, model):
        return model

    def prefix(self):
        return "module." if isinstance(self.model, DistributedDataParallel) else ""

    def state_dict(self):
        state = super().state_dict()
        state["model"] = {k.removeprefix(self.prefix()): v for k, v in state["model"].items()}
        return state

    def load_parts(self, state):
        prefix = self.prefix()
        model = {prefix + name: value for name, value in state["model"].items()}
        super().load_parts({**state, "model": model})


@wrong("9.3", names="not-plain")
class SavesNumpysArray(_State):
    def get_numpy(self):
        return np.random.get_state()

    def set_numpy(self, state):
        np.random.set_state(state)


@wrong("9.3", names="not-plain")
class SavesTheObjects(_State):
    def state_dict(self):
        return {**super().state_dict(), "optimizer": self.optimizer}


@wrong("9.3", names="model-lost")
class LoadsIntoACopy(_State):
    def load_parts(self, state):
        fresh = {name: value.clone() for name, value in self.model.state_dict().items()}
        fresh.update(state["model"])
        super().load_parts({**state, "model": self.model.state_dict()})


@wrong("9.3", names="buffers-lost")
class SavesParametersOnly(_State):
    saved = PARTS[1:]

    def state_dict(self):
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        return {**super().state_dict(), "parameters": parameters}

    @torch.no_grad()
    def load_parts(self, state):
        super().load_parts(state)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state["parameters"][name])


@wrong("9.3", names="optimizer-lost")
class SavesTheModelOnly(_State):
    saved = ("model",)
    generators = ()


@wrong("9.3", names="optimizer-lost")
class LearningRatesOnly(_State):
    """The optimizer's groups without its momenta."""

    def state_dict(self):
        state = super().state_dict()
        state["optimizer"] = {**state["optimizer"], "state": {}}
        return state


@wrong("9.3", names="scheduler-lost")
class ForgetsTheScheduler(_State):
    saved = "model", "optimizer", "sampler"


@wrong("9.3", names="sampler-lost")
class ForgetsTheSampler(_State):
    saved = PARTS[:3]


@wrong("9.3", names="python-lost")
class ForgetsPython(_State):
    generators = "numpy", "torch"


@wrong("9.3", names="numpy-lost")
class ForgetsNumpy(_State):
    generators = "python", "torch"


@wrong("9.3", names="torch-lost")
class ForgetsTorch(_State):
    generators = "python", "numpy"


@wrong("9.3", names="gpu-lost")
class ForgetsTheGPU(_State):
    def get_torch(self):
        return [torch.get_rng_state()]

    def set_torch(self, state):
        torch.set_rng_state(state[0])


@wrong("9.3", names="gpu-lost")
class LeavesTheGPUAsItIs(_State):
    def set_torch(self, state):
        torch.set_rng_state(state[0])


@wrong("9.3", names="torch-lost")
class SavesTheSeed(_State):
    """The seed says where the generator began, not where it is."""

    def get_torch(self):
        return torch.initial_seed()

    def set_torch(self, state):
        torch.manual_seed(state)


@wrong("9.3", names="half-a-pair")
class WordsAndPosition(_State):
    def set_numpy(self, state):
        name, words, position, *_ = state
        np.random.set_state((name, words.numpy().astype(np.uint32), position))


@wrong("9.3", names="half-a-pair")
class ForgetsPythonsPair(_State):
    def set_python(self, state):
        version, words, _ = state
        random.setstate((version, words, None))


@wrong("9.3", names="random-first")
class RandomNumbersFirst(_State):
    def load_state_dict(self, state):
        self.load_generators(state)
        self.load_parts(state)


@wrong("9.3", names="not-strict")
class LoadsWhatFits(_State):
    def load_parts(self, state):
        self.model.load_state_dict(state["model"], strict=False)
        for part in self.saved[1:]:
            getattr(self, part).load_state_dict(state[part])


@wrong("9.3", names="module-prefix")
class KeepsTheWrapper(_State):
    def unwrapped(self, model):
        return model


@wrong("9.3", names="wrapped-only")
class AlwaysUnwraps(_State):
    def unwrapped(self, model):
        return model.module


@wrong("9.3", names="own-module")
class UnwrapsWhatHasAModule(_State):
    def unwrapped(self, model):
        return getattr(model, "module", model)


@wrong("9.3", names="own-module")
class StripsEveryPrefix(_State):
    def state_dict(self):
        state = super().state_dict()
        state["model"] = {k.removeprefix("module."): v for k, v in state["model"].items()}
        return state


@wrong("9.3", names="save-draws")
class SeedsAnewAtASave(_State):
    """The seed comes back, and with it the numbers after the save."""

    def state_dict(self):
        seed = random.getrandbits(31)
        self.load_generators({"seed": seed})
        return {part: getattr(self, part).state_dict() for part in self.saved} | {"seed": seed}

    def load_generators(self, state):
        random.seed(state["seed"])
        np.random.seed(state["seed"])
        torch.manual_seed(state["seed"])


@wrong("9.3", names="save-draws")
class NumbersItsSaves(_State):
    def state_dict(self):
        number = torch.randint(1_000_000, ()).item()
        return super().state_dict() | {"number": number}


@wrong("9.3", names="taken-early")
class TakesTheRandomStatesOnce(_State):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.taken = {name: getattr(self, f"get_{name}")() for name in self.generators}

    def state_dict(self):
        return super().state_dict() | self.taken


# ---- 9.4 best_interval ---------------------------------------------------------------------------


def _mtbf(nodes, hours):
    return hours * 3600 / nodes


def _lost(steps, mtbf, save, recovery, step):
    seconds = steps * step
    return save / seconds + (0.5 * seconds + recovery) / mtbf


def _better(ideal, mtbf, save, recovery, step):
    """The better of the whole numbers beside `ideal`, and its share, for a given mean time."""
    lower = max(1, int(ideal))
    steps = min((lower, lower + 1), key=lambda n: _lost(n, mtbf, save, recovery, step))
    return steps, _lost(steps, mtbf, save, recovery, step)


def _from_interval(seconds, nodes, hours, save, recovery, step):
    """The answer for another interval; the share is the right one for it."""
    steps = max(1, round(seconds / step))
    return steps, _lost(steps, _mtbf(nodes, hours), save, recovery, step)


@right("9.4")
def tries_them_all(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = 1
    while _lost(steps + 1, mtbf, save, recovery, step) < _lost(steps, mtbf, save, recovery, step):
        steps += 1
    return steps, _lost(steps, mtbf, save, recovery, step)


@right("9.4")
def compares_by_the_geometric_mean(nodes, node_mtbf_hours, save, recovery, step):
    """n is better than n + 1 where the ideal lies below the root of n * (n + 1)."""
    mtbf = _mtbf(nodes, node_mtbf_hours)
    square = 2 * save * mtbf / step**2
    steps = max(1, math.isqrt(int(square)))
    steps += square > steps * (steps + 1)
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="nodes-forgotten")
def takes_one_nodes_time(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = node_mtbf_hours * 3600
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="nodes-multiply")
def thinks_more_nodes_last_longer(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = node_mtbf_hours * 3600 * nodes
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="hours")
def leaves_hours(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = node_mtbf_hours / nodes
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="no-half")
def forgets_the_two(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(save * _mtbf(nodes, node_mtbf_hours))
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="recovery-in-interval")
def adds_the_recovery_to_the_save(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * (save + recovery) * _mtbf(nodes, node_mtbf_hours))
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="recovery-in-mtbf")
def adds_the_recovery_to_the_time_between_failures(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * save * (_mtbf(nodes, node_mtbf_hours) + recovery))
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="save-subtracted")
def takes_the_save_from_the_interval(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * save * _mtbf(nodes, node_mtbf_hours)) - save
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="recovery-per-save")
def recovers_at_every_save(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps, _ = _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)
    return steps, (save + recovery) / (steps * step) + steps * step / 2 / mtbf


@wrong("9.4", names="of-all-time")
def divides_by_work_and_losses(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps, lost = _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)
    return steps, lost / (1 + lost)


@wrong("9.4", names="in-seconds")
def returns_seconds(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * save * _mtbf(nodes, node_mtbf_hours))
    return seconds, _lost(seconds / step, _mtbf(nodes, node_mtbf_hours), save, recovery, step)


@wrong("9.4", names="not-rooted")
def forgets_the_root(nodes, node_mtbf_hours, save, recovery, step):
    seconds = 2 * save * _mtbf(nodes, node_mtbf_hours)
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="not-whole")
def returns_a_fraction(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = math.sqrt(2 * save * mtbf) / step
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="zero-steps")
def rounds_down_to_nothing(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    ideal = math.sqrt(2 * save * mtbf) / step
    if ideal < 1:
        return 0, _lost(ideal, mtbf, save, recovery, step)
    return _better(ideal, mtbf, save, recovery, step)


@wrong("9.4", names="zero-steps")
def divides_by_no_steps(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    ideal = math.sqrt(2 * save * mtbf) / step
    candidates = (math.floor(ideal), math.ceil(ideal))
    steps = min(candidates, key=lambda n: _lost(n, mtbf, save, recovery, step))
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="rounded")
def rounds_by_the_nearest(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    ideal = math.sqrt(2 * save * mtbf) / step
    if ideal > 20:
        return _better(ideal, mtbf, save, recovery, step)
    steps = max(1, round(ideal))
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="rounded")
def compares_whole_intervals(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    lower = max(1, int(math.sqrt(2 * save * mtbf) / step))
    steps = min(lower, lower + 1, key=lambda n: save / (n * step) + n * step / mtbf)
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="search-ends")
def tries_the_first_ten_thousand(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = min(range(1, 10_001), key=lambda n: _lost(n, mtbf, save, recovery, step))
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="never-one")
def saves_after_two_steps_at_the_earliest(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = max(2, _right_interval(nodes, node_mtbf_hours, save, recovery, step)[0])
    return steps, _lost(steps, mtbf, save, recovery, step)


def _right_interval(nodes, hours, save, recovery, step):
    mtbf = _mtbf(nodes, hours)
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="no-saving")
def counts_failures_only(nodes, node_mtbf_hours, save, recovery, step):
    steps, share = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, share - save / (steps * step)


@wrong("9.4", names="no-recovery")
def forgets_the_recovery(nodes, node_mtbf_hours, save, recovery, step):
    return _right_interval(nodes, node_mtbf_hours, save, 0.0, step)


@wrong("9.4", names="whole-interval")
def loses_whole_intervals(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, save / (steps * step) + (steps * step + recovery) / _mtbf(nodes, node_mtbf_hours)


@wrong("9.4", names="kept-not-lost")
def returns_what_is_kept(nodes, node_mtbf_hours, save, recovery, step):
    steps, share = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, 1 - share


@wrong("9.4", names="percent")
def returns_percent(nodes, node_mtbf_hours, save, recovery, step):
    steps, share = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, 100 * share


@wrong("9.4", names="hours")
def takes_minutes(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = 60 * node_mtbf_hours / nodes
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="swapped")
def share_first(nodes, node_mtbf_hours, save, recovery, step):
    return tries_them_all(nodes, node_mtbf_hours, save, recovery, step)[::-1]


@wrong("9.4", names="interval-in-steps")
def forgets_how_long_a_step_is(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = tries_them_all(nodes, node_mtbf_hours, save, recovery, step)
    return steps, _lost(steps, _mtbf(nodes, node_mtbf_hours), save, recovery, 1)


@wrong("9.4", names="share-of-one-node")
def share_of_a_node(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = tries_them_all(nodes, node_mtbf_hours, save, recovery, step)
    return steps, _lost(steps, _mtbf(1, node_mtbf_hours), save, recovery, step)


@wrong("9.4", names="share-at-ideal")
def share_before_rounding(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = tries_them_all(nodes, node_mtbf_hours, save, recovery, step)
    mtbf = _mtbf(nodes, node_mtbf_hours)
    return steps, _lost(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


# ---- 9.5 elastic_limits --------------------------------------------------------------------------


@right("9.5")
def as_a_list(available, fits, useful, losses, joins, new_code):
    most = fits if new_code else min((available, useful))
    return [fits, most, 0 if new_code else losses]


@wrong("9.5", names="minimum-too-low")
def starts_with_one(available, fits, useful, losses, joins, new_code):
    return (1, 1, 0) if new_code else (1, min(available, useful), losses)


@wrong("9.5", names="minimum-too-high")
def never_shrinks(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (most, most, losses)


@wrong("9.5", names="minimum-too-high")
def allows_for_the_expected_losses(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (max(fits, most - losses), most, losses)


@wrong("9.5", names="minimum-too-high")
def stays_fixed_where_nothing_is_lost(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (most if losses == 0 else fits, most, losses)


@wrong("9.5", names="maximum-without-work")
def takes_all_that_it_gets(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, available, losses)


@wrong("9.5", names="maximum-not-there")
def takes_all_that_have_work(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, useful, losses)


@wrong("9.5", names="maximum-too-low")
def never_grows(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0 if new_code else losses)


@wrong("9.5", names="joins-counted")
def counts_every_change(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), losses + joins)


@wrong("9.5", names="no-restarts")
def leaves_the_default(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), 0)


@wrong("9.5", names="joins-subtracted")
def lets_joins_make_up_for_losses(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (fits, most, max(0, losses - joins))


@wrong("9.5", names="one-restart-more")
def counts_the_first_start(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), losses + 1)


@wrong("9.5", names="restarts-fixed")
def three_restarts(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), 3)


@wrong("9.5", names="new-code-restarts")
def restarts_new_code(available, fits, useful, losses, joins, new_code):
    return fits, fits if new_code else min(available, useful), losses


@wrong("9.5", names="new-code-large")
def tries_new_code_on_all(available, fits, useful, losses, joins, new_code):
    return fits, min(available, useful), 0 if new_code else losses
