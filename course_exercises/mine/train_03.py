"""Trains a small transformer to continue a text, one character at a time, with a device for each rank.

torchrun --nproc-per-node 2 mine/train.py --text ../data/text/the_long_shed.txt --out runs/first
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

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
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, device: torch.device) -> float:
    """The mean loss over all windows, those of the other ranks included."""
    model.eval()
    total, windows = 0.0, 0
    for inputs, targets in batches:
        total += len(inputs) * loss_of(model, inputs.to(device), targets.to(device)).item()
        windows += len(inputs)
    model.train()
    total, windows = sum_over_ranks(total, windows, device=device)
    return total / windows


def sum_over_ranks(*numbers: float, device: torch.device) -> list[float]:
    """Each number, added up over all ranks."""
    summed = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()


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
    return parser.parse_args()


def main() -> None:
    options = options_of_the_command_line()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()

    windows = Windows(options.text.read_text(), options.context)
    learned = len(windows) * 9 // 10
    train = Subset(windows, range(learned))
    # Not with a DistributedSampler, which repeats windows until all ranks have as many.
    held_out = Subset(windows, range(learned + rank, len(windows), world))
    sampler = DistributedSampler(train, seed=options.seed)
    batches = DataLoader(train, options.batch // world, sampler=sampler, drop_last=True)
    held_out_batches = DataLoader(held_out, options.batch // world)

    torch.manual_seed(options.seed)
    model = Transformer(len(windows.characters), options).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)

    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / "log.jsonl").open("w") if rank == 0 else None
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        summed = 0.0
        for inputs, targets in batches:
            loss = loss_of(parallel, inputs.to(device), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            summed += loss.item()
        [summed] = sum_over_ranks(summed, device=device)
        line = {
            "epoch": epoch,
            "loss": summed / world / len(batches),
            "held_out_loss": evaluate(model, held_out_batches, device),
        }
        if rank == 0:
            print("epoch {epoch}: loss {loss:.2f}, held out {held_out_loss:.2f}".format(**line))
            log.write(json.dumps(line) + "\n")
    if rank == 0:
        torch.save(model.state_dict(), options.out / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
