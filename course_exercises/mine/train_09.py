"""Trains a small transformer to continue a text, one character at a time, with a device for each rank.

torchrun --nproc-per-node 2 mine/train.py --text ../data/text/the_long_shed.txt --out runs/first

Started again with the same --out, on any number of ranks, it goes on from the newest checkpoint.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset

# Shapes: N windows in a batch, T characters in a window, W the width, H heads.


class Windows(Dataset):
    """A text cut into windows of `context` characters; a target is the character that follows."""

    def __init__(self, text: str, context: int) -> None:
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.tokens = torch.tensor([number[character] for character in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * self.context
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class Unread(Sampler):
    """What a rank's sampler gives after its first `read` windows."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self.sampler, self.read = sampler, 0

    def __len__(self) -> int:
        return len(self.sampler) - self.read

    def __iter__(self):
        return itertools.islice(self.sampler, self.read, None)


class Attention(nn.Module):
    """Causal self-attention; `heads` heads of queries share `kv_heads` heads of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.wq = nn.Linear(width, heads * self.head_width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (  # each (N, its heads, T, head width)
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one product decides how much of the other passes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(options.context, width)
        self.blocks = nn.ModuleList(
            Block(width, options.heads, options.kv_heads) for _ in range(options.layers)
        )
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits (N, T, V) of tokens (N, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch, per character."""
    return cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, windows: int, device: torch.device) -> float:
    """The mean loss over all windows, those of the other ranks included. This rank's first `windows` count; what
    follows is there because a forward pass gathers, so that all ranks have to make as many."""
    model.eval()
    total, left = 0.0, windows
    for inputs, targets in batches:
        logits, targets = model(inputs.to(device))[:left], targets.to(device)[:left]
        total += cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        ).item()
        left -= len(targets)
    model.train()
    total, windows = sum_over_ranks(total, windows, device=device)
    return total / windows / batches.dataset.dataset.context


def sum_over_ranks(*numbers: float, device: torch.device) -> list[float]:
    """Each number, added up over all ranks; those that share layers have the same numbers, and each counts."""
    summed = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()


def cut(model: Transformer, mesh: DeviceMesh) -> None:
    """Cuts every large matrix between the tensor ranks; between the cut parts, each has a share of the sequence."""
    sequence, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole)
    plan = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "positions": RowwiseParallel(input_layouts=whole, output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
    }
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.wq": ColwiseParallel(),  # whole heads, since each has rows of its own
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": gathered,
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "feed_forward.w3": ColwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)


def shard(model: Transformer, mesh: DeviceMesh, bfloat16: bool) -> None:
    """Shares the parts out over the data ranks; a block is whole only while it computes."""
    computing = torch.bfloat16 if bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Gives each parameter its first values, the same on any number of ranks, one whole matrix at a time."""
    for number, (name, part) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        whole = torch.randn(part.shape, generator=generator)
        if "norm" in name:
            whole = torch.ones(part.shape)
        elif not name.startswith(
            ("tokens", "positions")
        ):  # the spread of PyTorch's own linear layers
            whole /= (3 * part.shape[-1]) ** 0.5
        # every rank has the whole, so that nothing has to be sent
        own = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
        part.to_local().copy_(own.to_local())


class Checkpoints:
    """Training states on the disk. Each has all that the next step depends on, and is whole or is not there."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    def save(self, steps: int, position: Tensor) -> None:
        """Called by all ranks after `steps` steps; a checkpoint gets its name when all have written their part."""
        partial, whole = self.folder / "partial", self.folder / f"{steps:09}"
        if whole.exists():  # nothing has happened since
            return
        dcp.save(self._state(position), checkpoint_id=partial)
        if dist.get_rank() == 0:
            partial.rename(whole)
            for old in self._whole()[:-2]:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, position: Tensor) -> None:
        """Fills the model, the optimizer and `position` from the newest one, which any number of ranks may have
        written."""
        if whole := self._whole():
            state = self._state(position)
            dcp.load(state, checkpoint_id=whole[-1])
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        dist.barrier()  # all have looked before anybody writes
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / "partial", ignore_errors=True)  # of a save that was killed
        dist.barrier()

    def _whole(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*"))

    def _state(self, position: Tensor) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "position": position}


class Log:
    """A line of JSON for each epoch; those of epochs that are trained again are taken out."""

    def __init__(self, path: Path, epochs: int) -> None:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = path.with_suffix(".partial")
        kept.write_text("".join(lines[:epochs]))
        kept.replace(path)
        self.file = path.open("a")

    def write(self, line: dict) -> None:
        print("epoch {epoch}: loss {loss:.2f}, held out {held_out_loss:.2f}".format(**line))
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()  # a process that is killed loses what is not on the disk yet


def options_of_the_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a file to learn from")
    add("--out", type=Path, required=True, help="a folder for the log and the model")
    add("--epochs", type=int, default=3)
    add("--batch", type=int, default=32, help="windows in a step, on all ranks together")
    add("--rate", type=float, default=0.5)
    add("--seed", type=int, default=0)
    add("--context", type=int, default=32, help="characters in a window")
    add("--width", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--layers", type=int, default=2)
    add(
        "--tensor",
        type=int,
        default=1,
        help="ranks that share each layer; the others are data ranks",
    )
    add("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    add("--bfloat16", action="store_true", help="compute in bfloat16, keep and update in float32")
    return parser.parse_args()


def main() -> None:
    options = options_of_the_command_line()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    shape = (dist.get_world_size() // options.tensor, options.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    rank, data_ranks = mesh["data"].get_local_rank(), mesh["data"].size()

    windows = Windows(options.text.read_text(), options.context)
    learned = len(windows) * 9 // 10
    train = Subset(windows, range(learned))
    held_out = Subset(windows, range(learned, len(windows)))
    # It repeats windows until all ranks have as many; `own` are those that count.
    held_out_sampler = DistributedSampler(held_out, data_ranks, rank, shuffle=False)
    own = len(range(rank, len(held_out), data_ranks))
    # The windows of step s are the same on any number of ranks; without drop_last the last ones may not be.
    sampler = DistributedSampler(train, data_ranks, rank, seed=options.seed, drop_last=True)
    unread, share = Unread(sampler), options.batch // data_ranks
    batches = DataLoader(train, share, sampler=unread, drop_last=True)
    held_out_batches = DataLoader(held_out, options.batch // data_ranks, sampler=held_out_sampler)

    with torch.device("meta"):  # shapes without memory, until each rank knows its part
        model = Transformer(len(windows.characters), options)
    if options.tensor > 1:
        cut(model, mesh["tensor"])
    shard(model, mesh["data"], options.bfloat16)
    model.to_empty(device=device)
    initialize(model, options.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)

    options.out.mkdir(parents=True, exist_ok=True)
    told_to_leave = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_leave.append(True))
    position = torch.zeros(3, dtype=torch.float64)  # epoch, steps in it, the sum of their losses
    checkpoints = Checkpoints(options.out / "checkpoints", model, optimizer)
    checkpoints.load(position)
    first, done, summed = int(position[0]), int(position[1]), position[2].item()

    steps = learned // options.batch  # in an epoch
    log = Log(options.out / "log.jsonl", first) if dist.get_rank() == 0 else None
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        unread.read = done * share
        for inputs, targets in batches:
            loss = loss_of(model, inputs.to(device), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            # SIGTERM reaches the ranks at different steps: all leave when one was told to.
            losses, told = sum_over_ranks(loss.item(), len(told_to_leave), device=device)
            summed += losses / dist.get_world_size()
            if told or (epoch * steps + done) % options.save_every == 0:
                position[:] = torch.tensor([epoch, done, summed])
                checkpoints.save(epoch * steps + done, position)
            if told:
                dist.destroy_process_group()
                return
        held_out_loss = evaluate(model, held_out_batches, own, device)
        if log:
            log.write({"epoch": epoch, "loss": summed / steps, "held_out_loss": held_out_loss})
        done, summed = 0, 0.0
    dcp.save({"model": model.state_dict()}, checkpoint_id=options.out / "checkpoint")
    whole = {name: part.full_tensor() for name, part in model.state_dict().items()}
    if log:
        torch.save(whole, options.out / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
