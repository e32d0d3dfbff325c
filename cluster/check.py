"""What `train.py --check` tries before the first run, on all hosts at once, in less than a minute.

Each rank says what it has and what it sees; what is wrong is named by host.
"""

import argparse
import os
import platform
import shutil
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from group import Stop, everywhere

CLOCK = 1.0  # seconds that clocks may be apart: newer checkpoints are told by their time
MEGABYTES = 64  # of the all-reduce that is timed
SHARED_MEMORY = 1 << 30  # bytes; a container has 64 MB unless it asks for more


@dataclass
class Facts:
    """What one rank found on its host."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    clock: float = 0.0  # seconds since 1970, at about the same moment on all ranks
    shared_memory: int = SHARED_MEMORY
    locked_memory: int = -1  # bytes that may be locked, -1 without a limit
    wrote: str = ""  # why it could not write to the folder
    unread: list[str] = field(default_factory=list)  # files of other ranks that it does not see


def check_hosts(options: argparse.Namespace, device: torch.device) -> None:
    """Prints what was found, and stops with what is wrong, if anything is."""
    facts = look(device)
    dist.barrier()
    facts.clock = time.time()
    try_folder(options.checkpoints, facts)
    ranks = everywhere(lambda: facts)
    speed = bandwidth(device)
    wrong = problems(ranks)
    if facts.rank == 0:
        print(table(ranks, speed), flush=True)
        print("nothing is wrong" if not wrong else f"{len(wrong)} things are wrong", flush=True)
    if wrong:
        raise Stop("\n".join(f"wrong: {line}" for line in wrong))


def look(device: torch.device) -> Facts:
    """What this rank sees without the others."""
    gpu = device.type == "cuda"
    versions = {"Python": platform.python_version(), "PyTorch": torch.__version__}
    if gpu:
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["GPU"] = torch.cuda.get_device_name(device)
    facts = Facts(dist.get_rank(), socket.gethostname(), str(device), versions)
    if gpu and sys.platform == "linux":
        import resource  # Unix only

        facts.shared_memory = shutil.disk_usage("/dev/shm").total
        facts.locked_memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return facts


def try_folder(folder: Path, facts: Facts) -> None:
    """Every rank writes a file, then reads those of all."""
    mine = folder / f"check-{facts.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(facts.host)
    except OSError as error:
        facts.wrote = str(error)
    dist.barrier()
    for rank in range(dist.get_world_size()):
        try:
            (folder / f"check-{rank}").read_text()
        except OSError as error:
            facts.unread.append(f"check-{rank}: {error.strerror}")
    dist.barrier()
    if not facts.wrote:
        mine.unlink(missing_ok=True)


def bandwidth(device: torch.device) -> float:
    """GB/s of an all-reduce, as nccl-tests counts them: 2 (n - 1) / n bytes for each byte (busbw)."""
    numbers = torch.ones(MEGABYTES << 18, device=device)  # float32
    world, seconds = dist.get_world_size(), []
    for _ in range(4):
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(numbers)
        numbers[0].item()  # waits for a GPU
        seconds.append(time.monotonic() - start)
    share = 2 * (world - 1) / world
    return share * MEGABYTES * 2**20 / min(seconds[1:]) / 1e9


def problems(ranks: list[Facts]) -> list[str]:
    """What is wrong, in lines that begin with the host."""
    lines = []
    for name in ranks[0].versions | ranks[-1].versions:
        common = Counter(facts.versions.get(name) for facts in ranks).most_common(1)[0][0]
        lines += [
            f"{facts.host}: {name} is {facts.versions.get(name)}, on most ranks it is {common}"
            for facts in ranks
            if facts.versions.get(name) != common
        ]
    middle = sorted(facts.clock for facts in ranks)[len(ranks) // 2]
    for facts in ranks:
        if abs(facts.clock - middle) > CLOCK:
            lines.append(f"{facts.host}: its clock is off by {facts.clock - middle:+.1f} s")
        if facts.shared_memory < SHARED_MEMORY:
            lines.append(
                f"{facts.host}: /dev/shm has {facts.shared_memory >> 20} MiB, NCCL wants 1024"
            )
        if 0 <= facts.locked_memory < 1 << 30:
            lines.append(
                f"{facts.host}: only {facts.locked_memory >> 20} MiB may be locked (ulimit -l): "
                "InfiniBand needs unlimited"
            )
        if facts.wrote:
            lines.append(f"{facts.host}: cannot write to the folder of checkpoints: {facts.wrote}")
        silent = {f"check-{other.rank}" for other in ranks if other.wrote}
        unread = [text for text in facts.unread if text.split(":")[0] not in silent]
        if unread:
            lines.append(f"{facts.host}: does not see what others wrote to the folder: {unread[0]}")
    return list(dict.fromkeys(lines))  # once for each host, not for each of its ranks


def table(ranks: list[Facts], speed: float) -> str:
    """A line for each host, and the bandwidth."""
    lines = []
    for host in dict.fromkeys(facts.host for facts in ranks):
        own = [facts for facts in ranks if facts.host == host]
        versions = ", ".join(f"{name} {value}" for name, value in own[0].versions.items())
        devices = " ".join(facts.device for facts in own)
        lines.append(f"{host}: ranks {own[0].rank} to {own[-1].rank} on {devices}; {versions}")
    wires = {
        name: os.environ.get(name, "not set")
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    }
    lines.append(", ".join(f"{name}: {value}" for name, value in wires.items()))
    lines.append(f"all-reduce of {MEGABYTES} MiB over {len(ranks)} ranks: {speed:.2f} GB/s")
    return "\n".join(lines)
