"""The group of ranks: who is in it and on which device, and how a rank leaves it.

Exit codes, which agent.py hands on to whoever starts jobs (torchrun alone always exits with 1):

    0    done
    2    wrong options, and
    78   STOP: another start would end in the same way
    203  AGAIN: saved and left, as it was told to; start the job again

Above 127 another start may help, as Kubeflow's restartPolicy ExitCode has it.
"""

import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

AGAIN, STOP, WRONG_OPTIONS = 203, 78, 2
EXIT_CODE_FILE = "TRAIN_EXIT_CODE_FILE"  # where agent.py looks for the code of its workers
WARNED = "warned"  # a file beside it: SIGUSR1 has reached the agent


class Stop(SystemExit):
    """Ends the run for good, with the reason: another start would end in the same way."""

    def __init__(self, reason: str) -> None:
        super().__init__(STOP)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Left(SystemExit):
    """The rank has saved and leaves, as it was told to; `agent_too` if nobody shall restart it."""

    def __init__(self, agent_too: bool) -> None:
        super().__init__(AGAIN)
        self.agent_too = agent_too


# --- joining ------------------------------------------------------------------------------------


def leave_with_agent(agent: int) -> None:
    """Asks Linux to kill this process when torchrun's agent dies: no orphan keeps the GPU's memory.

    `agent` is the parent that this process began with; if that one has gone, so does this.
    """
    if has_agent() and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != agent:
            sys.exit(f"process {os.getpid()} leaves: its agent has died while it began")


def has_agent() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ  # otherwise the parent may be a shell


def choose_device(local_rank: int, local_world: int, gpus: int) -> tuple[torch.device, str]:
    """One GPU for each rank of this host, or the CPU for all of them; and that in words."""
    if gpus >= local_world:
        return torch.device("cuda", local_rank), f"a GPU for each of {local_world} ranks"
    ranks = "1 rank" if local_world == 1 else f"{local_world} ranks"
    having = {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")
    return torch.device("cpu"), f"{ranks} and {having} on this host: all ranks on the CPU"


def start_group(timeout: int) -> torch.device:
    """Joins the group that torchrun describes, or is one process; returns the rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, words = choose_device(local_rank, local_world, torch.cuda.device_count())
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gloo for the few bytes of Python objects
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    with gives_up_after(timeout, "the other ranks were not there"):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **alone)
    same_device_everywhere(everywhere(lambda: (socket.gethostname(), words, device.type)))
    a_gpu_for_each(everywhere(lambda: (socket.gethostname(), gpu_of(device))))
    if dist.get_rank() == 0:
        print(words, flush=True)
    return device


@contextmanager
def gives_up_after(seconds: float, reason: str) -> Iterator[None]:
    """Ends this process where the block takes longer. (PyTorch tries twice to reach the store of a rank
    that has gone, each time for its whole timeout.)"""

    def give_up() -> None:
        print(f"{reason} within {seconds:g} s (--timeout)", file=sys.stderr, flush=True)
        os._exit(1)  # the thread that waits is in C++, and hears of no exception

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def same_device_everywhere(ranks: list[tuple[str, str, str]]) -> None:
    """Stops where some hosts (name, words, type of device, for each rank) have too few GPUs."""
    if len({kind for _, _, kind in ranks}) > 1:
        lacking = sorted({f"{host}: {words}" for host, words, kind in ranks if kind == "cpu"})
        raise Stop(f"some hosts have too few GPUs, others enough: {'; '.join(lacking)}")


def gpu_of(device: torch.device) -> str | None:
    """What a GPU is called whatever CUDA_VISIBLE_DEVICES shows; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def a_gpu_for_each(ranks: list[tuple[str, str | None]]) -> None:
    """Stops where ranks, (host, GPU) for each, share a GPU: several agents run on their host, and each
    counts its own workers only. NCCL would refuse it in the first collective."""
    shared = sorted({host for host, gpu in ranks if gpu and ranks.count((host, gpu)) > 1})
    if shared:
        raise Stop(
            f"ranks of several agents use the same GPU of {', '.join(shared)}: start one agent a host, "
            "or give each its own GPUs with CUDA_VISIBLE_DEVICES"
        )


# --- what ranks tell each other -----------------------------------------------------------------


def broadcast(value):
    """Returns rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def everywhere(action: Callable) -> list:
    """Returns what `action()` gave on each rank. If it failed on one, all raise, and name the host."""
    value = error = None
    try:
        value = action()
    except OSError as failure:  # others would wait for this rank in the next collective
        error = f"{socket.gethostname()}, rank {dist.get_rank()}: {failure}"
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (value, error))
    errors = [error for _, error in answers if error]
    if errors:
        raise OSError(errors[0])
    return [value for value, _ in answers]


def on_rank_0(action: Callable):
    """Returns what `action()` gives on rank 0, on every rank; raises on all where it fails."""
    return everywhere(lambda: action() if dist.get_rank() == 0 else None)[0]


# --- being told to leave ------------------------------------------------------------------------


class Leaving:
    """Remembers that this process was told to save and leave.

    SIGTERM: by torchrun, when the group changes, or by the scheduler. SIGUSR1: by the scheduler, ahead
    of the time limit. A rank may be waiting for one that is dead, and then it never gets to its
    save: it is ended after `grace` seconds, less than the 30 s after which torchrun and SLURM
    kill.
    """

    def __init__(self) -> None:
        self.signalled = {signal.SIGTERM: False, signal.SIGUSR1: False}

    def listen(self, grace: float) -> None:
        """From now on signals are noted; `grace` seconds after a SIGTERM this process ends, saved or not."""
        awake, wake = os.pipe()
        os.set_blocking(wake, False)
        for number in self.signalled:
            signal.signal(number, self.on_signal)
        # Python calls `on_signal` between two of its own instructions, so never in a collective that
        # waits. The number of the signal comes through the pipe at once, to another thread.
        signal.set_wakeup_fd(wake)
        threading.Thread(target=self._end_after, args=(awake, grace), daemon=True).start()
        path = os.environ.get(EXIT_CODE_FILE)
        if path and Path(path).with_name(WARNED).exists():  # while no worker listened
            self.signalled[signal.SIGUSR1] = True

    def on_signal(self, number: int, frame=None) -> None:
        """Notes a signal."""
        self.signalled[signal.Signals(number)] = True

    def _end_after(self, awake: int, grace: float) -> None:
        while os.read(awake, 1)[0] != signal.SIGTERM:
            pass
        time.sleep(grace)
        os._exit(AGAIN)

    def agreed(self, *others: bool) -> tuple[int, ...]:
        """How many ranks were told by SIGTERM, by SIGUSR1, and have each of `others`."""
        mine = torch.tensor([*self.signalled.values(), *others], dtype=torch.int32)
        dist.all_reduce(mine)
        return tuple(mine.tolist())


# --- ending -------------------------------------------------------------------------------------


class Life:
    """One start of the group. An error that ended the life before in the same place ends the run.

    last_error.json    the error of a life, and the step of its newest checkpoint
    stopped.json       why the run has ended for good; the next start removes it
    """

    def __init__(self, folder: Path, incarnation: str) -> None:
        self.folder, self.incarnation = folder, incarnation
        self.before, self.saved = on_rank_0(self._begin)  # saved: step of the newest checkpoint

    def _begin(self) -> tuple[dict | None, int]:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "stopped.json").unlink(missing_ok=True)
        steps = [int(path.name.split("-")[1]) for path in self.folder.glob("step-*")]
        return read_json(self.folder / "last_error.json"), max(steps, default=0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the error that the block ends with; makes it a Stop if it is the second one."""
        try:
            yield
        except Stop as stop:
            self._write("stopped.json", reason=str(stop))
            raise
        except (Exception, CheckpointException) as error:
            if reason := self._reason_to_stop(error):
                raise Stop(reason) from error
            raise

    def _reason_to_stop(self, error: BaseException) -> str | None:
        text = own_error(error)
        if text is None:  # another rank has gone; perhaps for good
            stopped = read_json(self.folder / "stopped.json") or {}
            return stopped["reason"] if stopped.get("incarnation") == self.incarnation else None
        self._write("last_error.json", error=text, step=self.saved)
        before = self.before or {}
        alike = without_numbers(before.get("error", "")) == without_numbers(text)
        if not alike or before["step"] != self.saved:
            return None
        reason = f"two starts in a row ended alike and gained no step: {text}"
        self._write("stopped.json", reason=reason)
        return reason

    def _write(self, name: str, **fields) -> None:
        partial = self.folder / f".{name}.{socket.gethostname()}.{os.getpid()}"
        with suppress(OSError):  # the folder may be what is broken
            partial.write_text(json.dumps({"incarnation": self.incarnation, **fields}))
            partial.rename(self.folder / name)


def read_json(path: Path) -> dict | None:
    """What a file holds, None where it is not there or not whole."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return None


def own_error(error: BaseException) -> str | None:
    """The error in one line; None where it only tells that another rank has gone."""
    if isinstance(error, CheckpointException):  # holds the errors of all ranks
        error = next(iter(error.failures.values()))[0]
    text = (str(error).splitlines() or [""])[0]
    lost = isinstance(error, dist.DistError) or any(
        word in text.lower() for word in ("gloo", "nccl", "connection closed", "connection reset")
    )
    return None if lost else f"{type(error).__name__}: {text}"


def without_numbers(text: str) -> str:
    """Errors that repeat differ in them: processes, ports, bytes that are free on a GPU."""
    return re.sub(r"\d+", "#", text)


@contextmanager
def ending_agent_too() -> Iterator[None]:
    """An exit that says "do not start again" ends torchrun too, which otherwise restarts for any."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end, Stop) and (os.environ.get("LOCAL_RANK", "0") == "0" or end.__cause__):
            print(end.reason, file=sys.stderr, flush=True)
        final = end.code in (STOP, WRONG_OPTIONS) or (isinstance(end, Left) and end.agent_too)
        if final and has_agent():
            end_agent(end.code)
        raise


def end_agent(code: int) -> None:
    """Sends SIGTERM to the agent; of several ranks only the first, if it is agent.py."""
    if path := os.environ.get(EXIT_CODE_FILE):
        try:
            with Path(path).open("x") as file:
                file.write(str(code))
        except OSError:  # another rank was faster, or the agent has left
            return
    os.kill(os.getppid(), signal.SIGTERM)
