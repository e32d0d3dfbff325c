r"""Trains a sharded model so that killed workers and lost hosts change nothing but the time it takes.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 100 \
        cluster/train.py --checkpoints runs/first --data data/MNIST/raw

This folder needs nothing but PyTorch: take it away, and put your own model and data into task.py. With
a GPU for each rank the ranks use NCCL, otherwise gloo on the CPU. Without torchrun it is one process.

What makes a restart exact:

* The global batch is the same on any number of ranks; each takes its share, in pieces of at most
  --micro-batch rows. The samples of step s follow from seed and s alone, so that the position in the
  data is one number, and every sample is used once per epoch.
* A checkpoint holds everything that the next step depends on: parameters, optimizer, scheduler, step,
  random states. It is whole or is none, and is verified when it is read (checkpoints.py).
* torch.distributed.checkpoint saves shards and loads them on any number of ranks.
* Every start of the group is an *incarnation* with a name of its own. The newest one owns the folder:
  ranks that were cut off and went on alone find at their next save that they do not, and leave.
* Told by SIGTERM or SIGUSR1, all ranks end their step, save and leave. A start that ends as the one
  before it, with no step gained, is the last (group.py).
"""

import argparse
import copy
import hashlib
import json
import os
import random
import socket
import time
from pathlib import Path

PARENT = os.getppid()  # before PyTorch, which takes seconds: the agent may die meanwhile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from check import check_hosts
from checkpoints import Checkpoints
from group import (
    Leaving,
    Left,
    Life,
    Stop,
    broadcast,
    ending_agent_too,
    leave_with_agent,
    start_group,
)
from sizes import reduction, smallest_nodes
from task import Classifier, load_data
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

CLIP = 1.0  # largest norm of the whole gradient
WARM_UP = 0.1  # share of the steps in which the learning rate rises


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


def seed_of(*numbers: int | str) -> int:
    """Returns a seed that looks unrelated to that of any other numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


# --- the model, in shards -----------------------------------------------------------------------


def mesh_of(device: torch.device, world: int, shard_within: int) -> DeviceMesh:
    """All ranks share one set of shards; or every `shard_within` of them, and the sets are copies."""
    if not shard_within:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world % shard_within:
        raise Stop(f"{world} ranks cannot be cut into sets of --shard-within {shard_within}")
    shape = (world // shard_within, shard_within)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def sharded_model(
    options: argparse.Namespace, device: torch.device, mesh: DeviceMesh
) -> FSDPModule:
    """The model with the values that one process gives it; no rank ever holds the whole of it."""
    with torch.device("meta"):
        model = Classifier(options)
        # Copies from before the sharding, still without memory, which make values later.
        modules = {name: copy.deepcopy(module) for name, module in model.named_modules()}
    computing = torch.bfloat16 if options.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for name, module in modules.items():
        fill(model.get_submodule(name), module, seed_of(options.seed, name), name)
    return model


@torch.no_grad()
def fill(target: nn.Module, module: nn.Module, seed: int, name: str) -> None:
    """Gives the module's own parameters and buffers their first values, and keeps this rank's part.

    The values follow from the seed and the module's name alone, whatever the number of ranks. For a
    moment one module's values exist as a whole, on the CPU.
    """
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if not own:
        return
    if not hasattr(module, "reset_parameters"):
        raise Stop(f"{name or 'the model'} has parameters or buffers, but no reset_parameters()")
    module = nn.Module.to_empty(module, device="cpu", recurse=False)
    torch.manual_seed(seed)
    module.reset_parameters()
    for key in own:
        part, whole = getattr(target, key), getattr(module, key)
        if isinstance(part, DTensor):  # src_data_rank: every rank has the whole, nothing is sent
            cut = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
            part.to_local().copy_(cut.to_local())
        else:
            part.copy_(whole)


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
        mesh = mesh_of(device, self.world, options.shard_within)
        self.model = sharded_model(options, device, mesh)
        # After the sharding: the optimizer has to hold the shards, not the whole parameters.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=options.rate, momentum=0.9, weight_decay=1e-4
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        torch.manual_seed(seed_of(options.seed, 0, self.rank))  # dropout differs between ranks

    def _rate(self, step: int) -> float:
        warm_up = max(1, round(WARM_UP * self.steps))
        return min((step + 1) / warm_up, (self.steps - step) / max(1, self.steps - warm_up))

    def pieces(self, rows: int) -> int:
        """Into how many pieces every rank cuts its share of a global batch.

        As many on every rank, since each forward and backward is a collective.
        """
        largest_share = -(-rows // self.world)
        return -(-largest_share // self.options.micro_batch)

    def train_step(self) -> tuple[float, Tensor]:
        """Trains on the next global batch; returns its mean loss and this rank's samples."""
        batch = self.order[self.step]
        mine = batch[self.rank :: self.world]
        pieces = self.pieces(len(batch))
        total = torch.zeros((), device=self.device)
        for number, rows in enumerate(mine.tensor_split(pieces)):
            last = number == pieces - 1
            self.model.set_requires_gradient_sync(last or self.options.reduce == "every")
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

    def cost(self) -> str:
        """What reducing the gradients costs, in a line."""
        pieces, when = self.pieces(self.order.batch), self.options.reduce
        shards = self.options.shard_within or self.world
        sent, held = reduction(self.model, shards, pieces, when)
        return (
            f"gradients: {pieces} micro-batches a step, reduced at {when}: each rank sends {sent:,} "
            f"bytes a step among its {shards} shards, and holds {held:,} bytes of whole gradients"
        )

    def state(self) -> dict:
        """The tensors of a checkpoint; the random states only fit as many ranks on such devices."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            f"random{self.rank}": random_states(self.device),
        }

    def save(self, checkpoints: Checkpoints) -> None:
        """Writes the state, or begins to where that goes on in the background (`Checkpoints`)."""
        notes = {
            "ranks": [self.world, self.device.type],
            "scheduler": self.scheduler.state_dict(),
            "order": [self.order.samples, self.order.batch, self.order.seed],
        }
        checkpoints.save(self.step, self.state(), notes)

    def resume(self, folder: Path, manifest: dict) -> None:
        """Goes on from a checkpoint, of any number of ranks."""
        order = [self.order.samples, self.order.batch, self.order.seed]
        if manifest["order"] != order:
            raise Stop(
                f"{folder} was made with samples, batch, seed {manifest['order']}, this run has "
                f"{order}: the order of the samples would change. Choose another folder."
            )
        state = self.state()
        same_ranks = manifest["ranks"] == [self.world, self.device.type]
        if not same_ranks:
            del state[f"random{self.rank}"]
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(manifest["scheduler"])
        self.step = manifest["step"]
        if same_ranks:
            set_random_states(state[f"random{self.rank}"])
        else:  # other ranks draw other random numbers: new ones, the same in each try
            torch.manual_seed(seed_of(self.options.seed, self.step, self.rank))

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters by name, on rank 0; every rank calls this."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Of this rank; a rank on the CPU leaves the host's GPUs alone."""
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(random.getstate()[1]),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Goes on with the random numbers that `random_states` has noted."""
    torch.set_rng_state(states["cpu"])
    random.setstate((3, tuple(states["python"].tolist()), None))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


# --- what happened, as lines of JSON ------------------------------------------------------------


class Events:
    """A file for each incarnation: start, resume, saved, done, as rank 0 sees them.

    With --log-samples a file for each rank, and a line for each step with its samples: many small
    writes to a folder that all hosts share.
    """

    def __init__(self, folder: Path, incarnation: str, log_samples: bool) -> None:
        self.rank = dist.get_rank()
        self._fields = {"incarnation": incarnation, "rank": self.rank}
        self._samples, self._file = log_samples, None
        if self.rank == 0 or log_samples:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{incarnation}-{self.rank}.jsonl").open("ab", buffering=0)

    def __call__(self, event: str, **fields) -> None:
        if self._file is not None:
            line = {"time": time.time(), "event": event, **self._fields, **fields}
            self._file.write(json.dumps(line).encode() + b"\n")  # one write: whole or not there

    def step(self, step: int, loss: float, samples: Tensor) -> None:
        """Notes a step of this rank with its samples, if samples are asked for."""
        if self._samples:
            self("step", step=step, loss=loss, samples=samples.tolist())


# --- the run ------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line; ends the program, with a sentence, where one makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoints", type=Path, required=True, help="a folder that all hosts see")
    add("--data", type=Path, help="folder of MNIST's .gz files; made-up images without it")
    add("--samples", type=int, default=60_000, help="use only the first ones")
    add("--epochs", type=int, default=1)
    add("--batch", type=int, default=256, help="rows of a step, on all ranks together")
    add("--micro-batch", type=int, default=128, help="most rows of a rank at a time")
    add(
        "--reduce",
        choices=["every", "last"],
        default="last",
        help="gradients at every micro-batch (sends more) or at the last (holds them whole until "
        "then); the cost in bytes is printed",
    )
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--recompute", action="store_true", help="checkpoint activations: less memory, more time")
    add("--rate", type=float, default=0.05, help="largest learning rate")
    add("--bfloat16", action="store_true", help="compute in bfloat16, keep and update in float32")
    add(
        "--shard-within",
        type=int,
        default=0,
        help="shard over so many ranks, those of a node, and hold copies on the others (HSDP)",
    )
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=50, help="steps from one checkpoint to the next")
    add("--save-in-background", action="store_true", help="train on while a checkpoint is written")
    add("--start-anew", action="store_true", help="at step 0 if all checkpoints are damaged")
    add("--log-samples", action="store_true", help="each rank notes its samples of each step")
    add(
        "--timeout", type=int, default=600, help="seconds after which a rank gives up on the others"
    )
    add("--grace", type=float, default=20, help="seconds to save in after SIGTERM; torchrun has 30")
    add("--check", action="store_true", help="try the hosts instead of training")
    add(
        "--smallest-nodes",
        type=int,
        metavar="RANKS",
        help="print on how many nodes of so many ranks the model fits, instead of training",
    )
    add("--gpu-memory", type=float, default=80, help="GiB of a GPU, for --smallest-nodes")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, device: torch.device, leaving: Leaving | None = None) -> None:
    """Trains as one rank of a group that exists, and leaves word of an error for who starts it again."""
    incarnation = broadcast(f"{time.time_ns():016x}-{os.getpid()}")  # they sort by time
    life = Life(options.checkpoints, incarnation)
    with life.watched():
        train(options, device, leaving or Leaving(), life)


def train(options: argparse.Namespace, device: torch.device, leaving: Leaving, life: Life) -> None:
    """Loads what was saved, trains to the end or until it is told to leave, and saves."""
    training = Training(options, device)
    checkpoints = Checkpoints(options.checkpoints, life.incarnation, options.save_in_background)
    events = Events(options.checkpoints / "events", life.incarnation, options.log_samples)
    events("start", host=socket.gethostname(), pid=os.getpid(), world=training.world)
    found = checkpoints.newest_good(options.start_anew)
    if found is not None:
        training.resume(*found)
    life.saved = training.step
    events("resume", step=training.step, of=found and found[1]["incarnation"])
    if events.rank == 0:
        print(training.cost(), flush=True)
    while training.step < training.steps:
        loss, samples = training.train_step()
        events.step(training.step, loss, samples)
        terminated, warned, written = leaving.agreed(checkpoints.is_written())
        leave = terminated or warned
        if training.step % options.save_every == 0 or training.step == training.steps or leave:
            training.save(checkpoints)
            if events.rank == 0:
                print(f"step {training.step} of {training.steps}: loss {loss:.4f}", flush=True)
        now = not options.save_in_background or leave or training.step == training.steps
        if (now or written == training.world) and (saved := checkpoints.finish()):
            life.saved = saved
            events("saved", step=saved)
        if leave and training.step < training.steps:
            events("left", step=training.step)
            raise Left(agent_too=bool(warned))
    parameters = training.parameters()
    if events.rank == 0:
        partial = options.checkpoints / ".parameters.pt"
        torch.save(parameters, partial)
        partial.rename(options.checkpoints / "parameters.pt")
    events("done", step=training.step)


def print_smallest(options: argparse.Namespace) -> None:
    """Prints how many nodes the model needs at least; Stop, with a sentence, where none are enough."""
    with torch.device("meta"):
        nodes = smallest_nodes(Classifier(options), options, options.smallest_nodes)
    if nodes is None:
        advice = "; --reduce last holds whole gradients, --reduce every does not"
        raise Stop(
            f"no number of nodes holds this model in {options.gpu_memory:g} GiB a GPU"
            f"{advice if options.reduce == 'last' else ''}"
        )
    print(nodes)


@record  # torchrun shows the traceback of the rank that failed first
def main() -> None:
    with ending_agent_too():
        options = parse()
        if options.smallest_nodes:
            print_smallest(options)
            return
        leave_with_agent(PARENT)
        leaving = Leaving()
        leaving.listen(options.grace)
        device = start_group(options.timeout)
        if options.check:
            check_hosts(options, device)
        else:
            run(options, device, leaving)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
