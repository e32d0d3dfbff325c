"""Trains a sharded model so that killed workers and lost hosts change nothing but the time it takes.

    torchrun --nproc-per-node 2 cluster/train.py --checkpoints runs/first --data data/MNIST/raw

One file, nothing but PyTorch: take it away, and put your own model and data in place of `Classifier`
and `load_data`. With GPUs the ranks use NCCL, without they use gloo on the CPU. Without torchrun it
is one process.

What makes a restart exact:

* The global batch is the same on any number of ranks; each takes its share, in pieces of at most
  --micro-batch rows. The samples of step s follow from seed and s alone, so that the position in the
  data is one number, and every sample is used once per epoch.
* A checkpoint holds everything that the next step depends on: parameters, optimizer, scheduler, step,
  random states. It is written under another name, forced to the disk, and renamed when it is whole;
  a manifest holds the SHA-256 of each file, and a resume takes the newest checkpoint that fits its own.
* torch.distributed.checkpoint saves shards and loads them on any number of ranks.
* Every start of the group is an *incarnation* with a name of its own. The newest one owns the folder:
  ranks that were cut off and went on alone find at their next save that they do not, and leave.

The folder of the checkpoints has to be one that all hosts see. It is trusted: loading unpickles.
"""

import argparse
import ctypes
import gzip
import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.nn.utils import clip_grad_norm_

KEEP = 3  # checkpoints; more than one, since the newest may turn out to be damaged
CLIP = 1.0  # largest norm of the whole gradient
WARM_UP = 0.1  # share of the steps in which the learning rate rises


# --- yours: the model and the data --------------------------------------------------------------


class Block(nn.Module):
    """A residual block of two linear layers; takes and returns (N, W)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """Takes images (N, 784) and returns logits (N, 10)."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(784, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def load_data(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns inputs (N, 784), float32 from 0 to 1, and targets (N,), the same on every rank."""
    if options.data is None:  # made-up images, so that the script runs anywhere
        generator = torch.Generator().manual_seed(options.seed)
        images = torch.rand(options.samples, 784, generator=generator)
        return images, images[:, :10].argmax(dim=1)
    with gzip.open(options.data / "train-images-idx3-ubyte.gz") as file:
        pixels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[16:]
    with gzip.open(options.data / "train-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[8:]
    images = pixels.view(-1, 784)[: options.samples].float() / 255
    return images, labels[: options.samples].long()


# --- which samples a step uses ------------------------------------------------------------------


class Order:
    """The order of the samples: a new permutation for each epoch, cut into global batches.

    It knows nothing of ranks. The last batch of an epoch may be smaller; none is left out.
    """

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        self.samples, self.batch, self.seed = samples, batch, seed
        self.steps_per_epoch = -(-samples // batch)
        self._epoch, self._permutation = -1, torch.empty(0)

    def __getitem__(self, step: int) -> Tensor:
        """Returns the indices of the global batch of `step`, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            self._epoch = epoch
            self._permutation = torch.randperm(self.samples, generator=generator)
        return self._permutation[position * self.batch : (position + 1) * self.batch]


def seed_of(*numbers: int) -> int:
    """Returns a seed that looks unrelated to that of any other numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


# --- checkpoints --------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of a run, in one folder that all ranks see; every rank calls every method.

    step-00000012-<incarnation>/     after 12 steps: the shards, and manifest.json
    partial-...                      one that is being written, or whose writer was killed
    damaged-...                      one that did not fit its manifest, set aside
    owner                            the incarnation that may write here
    """

    def __init__(self, folder: Path, incarnation: str) -> None:
        self.folder, self.incarnation = folder, incarnation
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "owner", incarnation.encode())
        dist.barrier()

    def save(self, step: int, state: dict, notes: dict) -> None:
        """Writes `state` (tensors) and `notes` (for JSON) as the checkpoint after `step` steps."""
        name = f"{step:08d}-{self.incarnation}"
        partial = self.folder / f"partial-{name}"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
        mine = partial.glob(f"__{self.rank}_*")
        files = {path.name: digest(path) for path in mine}
        everyone: list = [None] * self.world
        dist.all_gather_object(everyone, files)
        if self.rank > 0:
            return
        self._leave_if_not_owner()
        files = {name: value for part in everyone for name, value in part.items()}
        files[".metadata"] = digest(partial / ".metadata")
        manifest = {"step": step, "incarnation": self.incarnation, "files": files, **notes}
        write_whole(partial / "manifest.json", json.dumps(manifest).encode())
        partial.rename(self.folder / f"step-{name}")  # from here on it exists
        flush_folder(self.folder)
        self._tidy()

    def newest_good(self) -> tuple[Path, dict] | None:
        """Returns folder and manifest of the newest checkpoint that fits its manifest."""
        names = sorted(path.name for path in self.folder.glob("step-*"))
        for name in reversed(broadcast(names)):
            folder = self.folder / name
            manifest = self._verified(folder)
            if manifest is not None:
                return folder, manifest
            if self.rank == 0:
                print(f"{folder} is damaged; an older checkpoint is used", flush=True)
                with suppress(OSError):
                    folder.rename(self.folder / f"damaged-{name}")
        return None

    def _verified(self, folder: Path) -> dict | None:
        """Each rank reads a share of the files; None if any rank found one that does not fit."""
        manifest, fits = None, False
        with suppress(OSError, ValueError):
            manifest = json.loads((folder / "manifest.json").read_bytes())
            share = sorted(manifest["files"].items())[self.rank :: self.world]
            fits = all(digest(folder / name) == expected for name, expected in share)
        good = torch.tensor(fits, dtype=torch.int32)
        dist.all_reduce(good, dist.ReduceOp.MIN)
        return manifest if good else None

    def _leave_if_not_owner(self) -> None:
        owner = (self.folder / "owner").read_text()
        if owner != self.incarnation:
            sys.exit(f"incarnation {self.incarnation} leaves: {owner} has taken over")

    def _tidy(self) -> None:
        """Removes old checkpoints, and what killed writers left."""
        old = sorted(self.folder.glob("step-*"))[:-KEEP]
        torn = [p for p in self.folder.glob("partial-*") if self.incarnation not in p.name]
        for folder in [*old, *torn]:
            # a checkpoint without its manifest is none: nobody finds half of one
            for path in sorted(folder.iterdir(), key=lambda path: path.name != "manifest.json"):
                path.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all, also after the power has failed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk; a rename alone may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def broadcast(value):
    """Returns rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


# --- everything that the next step depends on ---------------------------------------------------


class Training:
    """Model, optimizer, scheduler and step, and how they are saved and resumed."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0  # steps done
        self.inputs, self.targets = load_data(options)
        self.order = Order(len(self.targets), options.batch, options.seed)
        self.steps = options.epochs * self.order.steps_per_epoch
        self.model = self._sharded_model()
        # After the sharding: the optimizer has to hold the shards, not the whole parameters.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=options.rate, momentum=0.9, weight_decay=1e-4
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        torch.manual_seed(seed_of(options.seed, 0, self.rank))  # dropout differs between ranks

    def _sharded_model(self) -> FSDPModule:
        options = self.options
        torch.manual_seed(options.seed)  # the same parameters everywhere, whatever the world size
        model = Classifier(options.width, options.layers, options.dropout).to(self.device)
        mesh = init_device_mesh(self.device.type, (self.world,))
        computing = torch.bfloat16 if options.bfloat16 else None
        policy = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def _rate(self, step: int) -> float:
        warm_up = max(1, round(WARM_UP * self.steps))
        return min((step + 1) / warm_up, (self.steps - step) / max(1, self.steps - warm_up))

    def train_step(self) -> tuple[float, Tensor]:
        """Trains on the next global batch; returns its mean loss and this rank's samples."""
        batch = self.order[self.step]
        mine = batch[self.rank :: self.world]
        # As many pieces on every rank: each forward and backward is a collective.
        largest_share = -(-len(batch) // self.world)
        pieces = -(-largest_share // self.options.micro_batch)
        total = torch.zeros((), device=self.device)
        for number, rows in enumerate(mine.tensor_split(pieces)):
            self.model.set_requires_gradient_sync(number == pieces - 1)
            logits = self.model(self.inputs[rows].to(self.device))
            loss = cross_entropy(
                logits.float(), self.targets[rows].to(self.device), reduction="sum"
            )
            # FSDP averages over ranks, whose shares may differ: a sum over all rows, then one mean
            (loss * self.world / len(batch)).backward()
            total += loss.detach()
        clip_grad_norm_(self.model.parameters(), CLIP)  # the norm over all shards
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        dist.all_reduce(total)
        return total.item() / len(batch), mine

    def state(self) -> dict:
        """The tensors of a checkpoint; the random states only fit the same number of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, f"random{self.rank}": random_states()}

    def save(self, checkpoints: Checkpoints) -> None:
        notes = {
            "world": self.world,
            "scheduler": self.scheduler.state_dict(),
            "order": [self.order.samples, self.order.batch, self.order.seed],
        }
        checkpoints.save(self.step, self.state(), notes)

    def resume(self, folder: Path, manifest: dict) -> None:
        """Goes on from a checkpoint, of any number of ranks."""
        order = [self.order.samples, self.order.batch, self.order.seed]
        if manifest["order"] != order:
            sys.exit(
                f"{folder} was made with samples, batch, seed {manifest['order']}, this run has "
                f"{order}: the order of the samples would change. Choose another folder."
            )
        state = self.state()
        randoms = state.pop(f"random{self.rank}")
        if manifest["world"] == self.world:
            state[f"random{self.rank}"] = randoms
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(manifest["scheduler"])
        self.step = manifest["step"]
        if manifest["world"] == self.world:
            set_random_states(state[f"random{self.rank}"])
        else:  # another number of ranks draws other random numbers: new ones, the same in each try
            torch.manual_seed(seed_of(self.options.seed, self.step, self.rank))

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters by name, on rank 0; every rank calls this."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)


def random_states() -> dict[str, Tensor]:
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(random.getstate()[1]),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    random.setstate((3, tuple(states["python"].tolist()), None))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# --- what happened, as lines of JSON ------------------------------------------------------------


class Events:
    """A file for each rank of each incarnation: start, resume, step with its samples, saved, done."""

    def __init__(self, folder: Path, incarnation: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rank = dist.get_rank()
        self._fields = {"incarnation": incarnation, "rank": self.rank}
        self._file = (folder / f"{incarnation}-{self.rank}.jsonl").open("ab", buffering=0)

    def __call__(self, event: str, **fields) -> None:
        line = {"time": time.time(), "event": event, **self._fields, **fields}
        self._file.write(json.dumps(line).encode() + b"\n")  # one write: whole or not there


# --- the run ------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoints", type=Path, required=True, help="a folder that all hosts see")
    add("--data", type=Path, help="folder of MNIST's .gz files; made-up images without it")
    add("--samples", type=int, default=60_000, help="use only the first ones")
    add("--epochs", type=int, default=1)
    add("--batch", type=int, default=256, help="rows of a step, on all ranks together")
    add("--micro-batch", type=int, default=128, help="most rows of a rank at a time")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--rate", type=float, default=0.05, help="largest learning rate")
    add("--bfloat16", action="store_true", help="compute in bfloat16, keep and update in float32")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=50, help="steps from one checkpoint to the next")
    add(
        "--timeout", type=int, default=600, help="seconds after which a rank gives up on the others"
    )
    return parser.parse_args(arguments)


def leave_with_agent() -> None:
    """Asks Linux to kill this process when torchrun's agent dies: no zombie keeps the GPU's memory."""
    has_agent = "TORCHELASTIC_RUN_ID" in os.environ  # otherwise the parent may be a shell
    if has_agent and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def start_group(timeout: int) -> torch.device:
    """Joins the group that torchrun describes, or is one process; returns the rank's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gloo for the few bytes of Python objects
    else:
        device, backend = torch.device("cpu"), "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **alone)
    return device


def run(options: argparse.Namespace, device: torch.device) -> None:
    incarnation = broadcast(f"{time.time_ns():016x}-{os.getpid()}")  # they sort by time
    training = Training(options, device)
    checkpoints = Checkpoints(options.checkpoints, incarnation)
    events = Events(options.checkpoints / "events", incarnation)
    events("start", host=socket.gethostname(), pid=os.getpid(), world=training.world)
    found = checkpoints.newest_good()
    if found is not None:
        training.resume(*found)
    events("resume", step=training.step, of=found and found[1]["incarnation"])
    while training.step < training.steps:
        loss, samples = training.train_step()
        events("step", step=training.step, loss=loss, samples=samples.tolist())
        if training.step % options.save_every == 0 or training.step == training.steps:
            training.save(checkpoints)
            events("saved", step=training.step)
            if events.rank == 0:
                print(f"step {training.step} of {training.steps}: loss {loss:.4f}", flush=True)
    parameters = training.parameters()
    if events.rank == 0:
        partial = options.checkpoints / ".parameters.pt"
        torch.save(parameters, partial)
        partial.rename(options.checkpoints / "parameters.pt")
    events("done", step=training.step)


@record  # torchrun shows the traceback of the rank that failed first
def main() -> None:
    options = parse()
    leave_with_agent()
    device = start_group(options.timeout)
    run(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
