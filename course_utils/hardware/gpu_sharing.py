"""Whether several ranks can share a GPU under NCCL, found out by two ranks that try.

NCCL refuses two ranks on one GPU unless it is told otherwise: "Multiple Ranks are using the same
GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration" (NCCL 2.30,
src/init.cc); older ones know no such variable. So two processes add up two numbers on GPU 0. That
takes some seconds, once: a success is remembered in the user's cache folder, for this PyTorch, this
NCCL and this GPU.
"""

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import platformdirs
import torch
import torch.distributed as dist

# Each rank takes one of the GPU's blocks for its collectives, and no multicast between GPUs.
ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
}
MEMORY = 0.9  # of a GPU, what all its ranks may take together; the rest is the notebook's
_SECONDS = 10  # for two ranks to meet and to add; importing PyTorch comes before that
_STARTING = 120  # seconds for that import on a busy machine


@functools.cache
def works() -> bool:
    """Whether two ranks on one GPU have added up two numbers with NCCL. Starts CUDA in processes of
    its own only."""
    remembered = _remembered()
    if remembered.is_file():
        return True
    if not _two_ranks_agree():
        return False
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.touch()
    except OSError:
        pass  # an unwritable home: the next notebook tries again
    return True


def _remembered() -> Path:
    gpu = nvidia_smi("driver_version", "name", "mig.mode.current")
    about = (torch.__version__, torch.cuda.nccl.version(), gpu, sorted(ENVIRONMENT.items()))
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("parallelism-course") / f"gpu-sharing-{name}"


def nvidia_smi(*fields: str) -> str | None:
    """What the driver says of these fields, a line for each GPU, without starting CUDA here; None
    where nvidia-smi is missing or fails."""
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def _two_ranks_agree():
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_started(rank, folder) for rank in (0, 1)]
        try:
            return all(rank.wait(_STARTING) == 0 for rank in ranks)
        except subprocess.TimeoutExpired:
            return False
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _started(rank, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "course_utils.hardware.gpu_sharing", str(rank), folder],
        env=os.environ | ENVIRONMENT | {"NCCL_SOCKET_IFNAME": "lo"},
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _try(rank: int, folder: str, backend: str = "nccl", device: str = "cuda:0") -> bool:
    """One of the two ranks. NCCL may wait in C for ever: a thread ends the process then."""
    clock = threading.Timer(_SECONDS, os._exit, (1,))
    clock.daemon = True
    clock.start()
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    limit = timedelta(seconds=_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
    total = torch.full((1,), float(rank + 1), device=device)
    dist.all_reduce(total)
    return total.item() == 3.0


if __name__ == "__main__":
    agreed = _try(int(sys.argv[1]), sys.argv[2])
    os._exit(not agreed)  # what NCCL does on its way out is of no interest
