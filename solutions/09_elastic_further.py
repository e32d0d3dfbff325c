# %% [markdown]
# # 9. Elastic training, further: who died and why, who hangs, and what waiting costs
#
# In the lesson a run goes on when workers and nodes are killed. This notebook is about what remains open there: why a
# worker died, why a position in the data can be wrong although it is saved, how an agent finds a rank that
# hangs, what torchrun's options cost, how a group goes on without a restart, what a killed launcher leaves behind, and
# how cells run over several hosts.
#
# Run the parts in their order. None of them needs an answer from the lesson. The notebook kills processes with signals
# and needs Linux or macOS.

# %% tags=["nbval-ignore-output"]
import os
import subprocess
import sys
import time
from pathlib import Path

from course_exercises import check, hint
from course_utils import hardware
from course_utils.lesson.predictions import compare

hardware.report()

# %% [markdown]
# ## 1. The factory: what a foreman does not see
#
# The lesson's foreman sees which building has stopped. He does not see why, and he does not see a building in which
# nobody moves any more. If the foreman himself is gone, his buildings wait all night. And the list of material that
# was handed out is not the list of material that was used.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | a note at the door | **error file** | why a worker died, for its agent |
# | a bell after every piece | **heartbeat** | says that a worker still does something |
# | buildings without a foreman | **orphans** | processes that outlive their launcher |
# | material handed out ahead | `prefetch_factor` | batches that a loader asks for before they are needed |
#
# ## 2. The smallest real run: a note at the door
#
# Worker 1 of two fails, and worker 0 waits for it. All that an agent sees of a process that has ended is its exit
# code. With the decorator `record` a worker leaves more: it writes its exception into an error file, whose name it
# got from the agent ([error propagation](https://docs.pytorch.org/docs/stable/elastic/errors.html)).

# %%
from course_utils.lesson.terminal import scratch, torchrun

script = scratch() / "reported.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/reported.py
"""Worker 1 fails. Started with the word "recorded", it says why."""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import record


def main():
    if os.environ["RANK"] == "1":
        raise FileNotFoundError("shard-0017.tar is not there")
    signal.pause()  # as a rank that waits for another one


if "recorded" in sys.argv:
    main = record(main)
main()


# %%
def root_cause(*arguments):
    """Of the agent's report: what it says of the first worker that failed."""
    report = torchrun(2, script, *arguments).split("Root Cause")[1]
    told = ("rank", "exitcode", "traceback", "FileNotFoundError")
    lines = [line.strip() for line in report.splitlines()]
    return [line.split(" (")[0] for line in lines if line.startswith(told)]


for arguments in ([], ["recorded"]):
    print(*root_cause(*arguments), sep="\n", end="\n\n")

# %% [markdown]
# Without `record`, the agent's report has a link to the manual. With it, the report has the exception and its lines.
# On a hundred nodes a worker's own traceback is in one of a hundred logs, and the agent's report is what you read
# first. This costs one line: `@record` above `main`.
#
# ## 3. Predict, then measure: the loader runs ahead
#
# A checkpoint holds the position in the data. A sampler that counts what it hands out, as in exercise 9.2, seems to
# know it. But a `DataLoader` with worker processes fetches batches before the loop asks for them, so that the loop
# does not wait: `prefetch_factor=2` batches ahead for each worker process.
#
# **Predict** how many batches the sampler has handed out when the loop has trained on 3.

# %% tags=["prediction"]
predicted = {"no worker process": 3, "two worker processes": 7}

# %%
from torch.utils.data import DataLoader, Sampler


class CountingSampler(Sampler):
    """Hands out lists of 4 rows, and counts the lists."""

    def __init__(self):
        self.handed_out = 0

    def __iter__(self):
        for start in range(0, 480, 4):
            self.handed_out += 1
            yield list(range(start, start + 4))


def handed_out(trained=3, **options):
    sampler = CountingSampler()
    batches = iter(DataLoader(range(480), batch_sampler=sampler, **options))
    for _ in range(trained):
        next(batches)
    return sampler.handed_out


measured = {
    "no worker process": handed_out(),
    "two worker processes": handed_out(num_workers=2),
}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if the loader asked when the loop does.": {"two worker processes": 3},
        "Two batches ahead for each of two processes.": {"two worker processes": 5},
        "That is what is under way. The 3 that were trained on come on top.": {
            "two worker processes": 4
        },
    },
)

# %% [markdown]
# A checkpoint with the sampler's own count loses the difference: 4 batches that nobody trains on, at each restart.
# Nothing fails, and no loss shows it. There are two repairs.
#
# * The training loop counts: the position is the number of steps done times the global batch, and the sampler is
#   *told* where to begin.
# * The loader counts. `StatefulDataLoader` of torchdata takes the place of `DataLoader`, and its `state_dict` counts
#   the batches that the loop has got
#   ([documentation](https://docs.pytorch.org/data/0.8/_sources/torchdata.stateful_dataloader.rst.txt)). It knows only
#   its own rank, so the global order of the lesson remains your task.
#
# ## 4. By hand, then with PyTorch: an agent that listens, and what waiting costs
#
# ### An agent that listens
#
# The lesson's agent watches for processes that end. A process that hangs has not ended. The remedy is a heartbeat: a
# worker gives a sign after every step, here by touching its file, and the agent acts when no sign comes for longer than
# its `patience`.


# %%
def start_workers(program, workers, life):
    """Starts them; each learns from its environment who it is, and which file to touch."""
    beats = [Path(f"scratch/beat-{rank}") for rank in range(workers)]
    group = []
    for rank, beat in enumerate(beats):
        beat.unlink(missing_ok=True)
        own = {"RANK": str(rank), "LIFE": str(life), "BEAT": str(beat)}
        group.append(subprocess.Popen([sys.executable, program], env=os.environ | own))
    return group, beats


# %%
def what_is_wrong(group, beats, patience):
    """A sentence about a worker that ended badly, or was silent for too long, or None."""
    heard = []  # (when, from whom): of the workers that live
    for rank, (worker, beat) in enumerate(zip(group, beats)):
        if worker.poll() not in (None, 0):
            return f"worker {rank} ended with code {worker.returncode}"
        if worker.poll() is None and beat.exists():
            heard.append((beat.stat().st_mtime, rank))
    if heard and time.time() - min(heard)[0] > patience:
        return f"worker {min(heard)[1]} lives, but was silent for more than {patience} s"
    return None


# %%
def supervise(program, workers, max_restarts, patience):
    """The lesson's agent, with heartbeats. Prints what happens."""
    for life in range(max_restarts + 1):
        group, beats = start_workers(program, workers, life)
        try:
            while not (wrong := what_is_wrong(group, beats, patience)):
                if all(worker.poll() == 0 for worker in group):
                    print(f"life {life}: all workers ended well")
                    return
                time.sleep(0.02)  # the monitor interval
        finally:
            for worker in group:
                worker.kill()
                worker.wait()
        print(f"life {life}: {wrong}")


# %%
program = Path("scratch/silent.py")
program.unlink(missing_ok=True)

# %%
# %%writefile scratch/silent.py
"""A worker. In their first life number 1 hangs and the others are well."""

import os
import time
from pathlib import Path

first_life, number = os.environ["LIFE"] == "0", os.environ["RANK"]
while first_life and number != "1" and not Path("scratch/beat-1").exists():
    time.sleep(0.02)  # worker 1 gives the first sign, so that it is the one silent for longest
Path(os.environ["BEAT"]).touch()
if first_life and number == "1":
    time.sleep(1000)
while first_life:  # the others wait, and are well
    Path(os.environ["BEAT"]).touch()
    time.sleep(0.1)

# %%
supervise(program, workers=3, max_restarts=2, patience=5)

# %% [markdown]
# The collective's time limit (lesson, section 5) says that some rank hangs. The heartbeat says which: the one silent
# for longest.
#
# ### With PyTorch: what each option of torchrun costs
#
# Each of these decides how long everybody waits when something fails, or how often an agent starts again:
#
# | option | default | what it decides |
# |---|---|---|
# | `--monitor-interval` | 0.1 s | how soon an agent sees that its own worker died |
# | `keep_alive_interval` x `keep_alive_max_attempt` | 5 s x 3 | how long a silent node still counts as a member |
# | `last_call_timeout` | 30 s | how long a round waits for more than the minimum |
# | `join_timeout` | 600 s | how long to wait for the minimum before giving up |
# | `--max-restarts` | 0 | how many failures of its own workers an agent forgives |
#
# (These are the defaults of PyTorch 2.14; those with underscores go into `--rdzv-conf`. The lesson's nodes have 1 s x
# 8, so that a busy machine is not taken for a dead node, and a last call of 2 s.)
#
# Shorter times are not simply better. A keep-alive of 3 s declares a node dead that was only busy for a moment. One
# of 10 s makes everybody wait for a node that is really gone. A last call of 2 s starts without a node that would
# have come a second later, and then everybody restarts for it.
#
# The variable in front of the lesson's command is about the second of two stores. The agents' rendezvous has one, and
# the workers have one through which `init_process_group` finds the other ranks. With
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` every worker group gets a new one. By default an agent keeps one store for
# all of its groups, and that has not always survived a change of members ([issue
# 135712](https://github.com/pytorch/pytorch/issues/135712), [pull request
# 167302](https://github.com/pytorch/pytorch/pull/167302)).

# %% [markdown]
# ### 9.5 Minimum, maximum and restarts for four situations (1 point)
#
# `torchrun --nnodes=MIN:MAX --max-restarts=N` needs three numbers. Here are four runs:
#
# | run | nodes that you may get | fewest that hold the model | most that have work | nodes or workers lost | nodes that join |
# |---|---|---|---|---|---|
# | new code, tried for the first time | 16 | 2 | 16 | unknown | unknown |
# | sharded over everything that you have | 16 | 16 | 64 | 9 | 9 |
# | two spare nodes beside eight | 10 | 4 | 8 | 6 | 2 |
# | cheap nodes that come and go | 32 | 4 | 64 | 120 | 110 |
#
# A node has work if the global batch has a sample for each of its ranks. You have to know this about torchrun:
#
# * It starts with `MIN` nodes if no more come in time, and goes on with as few.
# * A node beyond `MAX` waits, and takes the place of one that is lost.
# * A failure of its own workers costs an agent one of its restarts. Where a worker or a node is lost, the workers
#   that are left fail in their next collective: that is one restart everywhere.
# * A node that joins restarts the workers too, but that is not counted.
#
# The aim is the same each time: never stop while the run could go on, never start where it cannot, and allow no more
# restarts than you expect to need. New code is the exception. Its first failures are bugs: a restart only repeats
# them, and each further node is one more log to read.


# %% nbgrader={"grade_id": "9.5", "solution": true}
def elastic_limits(
    available: int, fits: int, useful: int, losses: int, joins: int, new_code: bool
) -> tuple[int, int, int]:
    """Returns the minimum and maximum of `--nnodes`, and `--max-restarts`.

    Of `available` nodes that the run may get, at least `fits` are needed to hold the model, and at
    most `useful` have work; `fits` is the smallest of the three. The maximum is as many as the run
    may get and has work for. `losses` nodes or workers are expected to fail in the course of the run,
    and `joins` nodes to come back or to be added. `new_code` runs on as few nodes as hold it, and stops
    at its first failure.
    """
    ### BEGIN SOLUTION
    if new_code:
        return fits, fits, 0
    return fits, min(available, useful), losses
    ### END SOLUTION


# %% nbgrader={"grade_id": "9.5-check", "grade": true, "points": 1, "locked": true}
check("9.5", elastic_limits)

# %% [markdown]
# ### No restart at all: a group that shrinks and grows
#
# Every agent so far stops all workers when one is lost, since a process group is what it was when it was made. From
# PyTorch 2.14 on it can be made anew, in processes that go on: `init_process_group(enable_reconfigure=True)` gives each
# process a handle, and `torch.distributed._reconfigure(uuid=..., handles=[...])` builds the group of all whose handles
# it gets. The underscore says that PyTorch calls it experimental; `Member.meet` below is the only place that calls it.
# Somebody has to say who belongs to the group: here a list in a store of this notebook does, and every new list gets a
# new number.
#
# A member that is killed takes nothing with it. In data parallelism each rank has the whole model, so the others go
# on with the step that failed, and share its samples out anew. One that comes late gets parameters and optimizer
# state from another member, and nobody reads a checkpoint.

# %% tags=["nbval-ignore-output"]
from course_hosts.growing import Members, batch, recorded, why_not

print(why_not() or "The members train here.")
program = Path("scratch/member.py")
program.unlink(missing_ok=True)

# %%
# %%writefile scratch/member.py
"""A member of a group that shrinks and grows. It ends after 20 steps."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_hosts.growing import Member, batch

torch.manual_seed(0)
model = nn.Linear(6, 1)
adam = torch.optim.Adam(model.parameters(), lr=0.1)
adam.zero_grad()  # the first call of an optimizer imports for seconds: before the others wait
member, step = Member(*sys.argv[1:]), 0  # a folder with a gate at which steps wait, and its name


def take_over():
    """All get the state of the member that is furthest; returns its step."""
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    furthest = steps.index(max(steps))
    state = [model.state_dict(), adam.state_dict()]
    dist.broadcast_object_list(state, furthest)
    model.load_state_dict(state[0])
    adam.load_state_dict(state[1])
    member.note("state", max(steps), of_rank=furthest)
    return max(steps)


def train_step():
    inputs, targets = batch(step)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    errors = (model(inputs[mine]) - targets[mine]).square()
    adam.zero_grad()
    (errors.sum() / len(inputs)).backward()  # the mean over the samples of all members
    member.wait_at_gate(step)
    gradient = parameters_to_vector(p.grad for p in model.parameters())
    dist.all_reduce(gradient)  # raises where a member is gone
    vector_to_parameters(gradient, [p.grad for p in model.parameters()])
    adam.step()
    member.note("step", step, ranks=dist.get_world_size(), samples=len(errors))


while step < 20:
    member.meet()
    try:
        step = take_over()
        while step < 20 and not member.called():
            train_step()
            step += 1
    except RuntimeError:
        member.note("lost", step)
member.leave(step, parameters_to_vector(model.parameters()))

# %% [markdown]
# Members a, b and c train together. In step 5, when all have computed their gradients, b is killed. Members a and c go
# on. When they are in step 10, d is started. It says that it is ready, a new list calls all three together, and they
# meet when step 10 is done.
#
# **Predict** how often a computes gradients, for steps 0 to 19; how many samples in all contribute gradients to the
# result (a step has 24); and how many steps d trains.

# %% tags=["prediction"]
predicted = {"steps that a computes": 20 + 1, "samples in the result": 20 * 24, "steps of d": 9}


# %%
def disturbed(members):
    members.start("a", "b", "c")
    members.train(until=5)  # into step 5
    members.kill("b")
    members.train(until=10)
    members.start("d")
    members.train(until=20)


if why_not():
    events = recorded()
else:
    with Members(Path("scratch/members"), program) as members:
        disturbed(members)
        events = members.events()


# %%
from itertools import groupby

steps = [event for event in events if event["event"] == "step"]
by_step = {step: [e["member"] for e in steps if e["step"] == step] for step in range(20)}
for names, those in groupby(range(20), lambda step: " ".join(sorted(by_step[step]))):
    first, *_, last = those
    print(f"steps {first:2} to {last:2}: {names}")
of_a = [e["event"] for e in events if e["member"] == "a" and e["event"] in ("step", "lost")]
measured = {
    "steps that a computes": len(of_a),
    "samples in the result": sum(event["samples"] for event in steps),
    "steps of d": sum(event["member"] == "d" for event in steps),
}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if the step in which b was killed had counted: its sum was never complete.": {
            "steps that a computes": 20
        },
        "As if the samples that b had computed were lost: the step is done again by those who are left.": {
            "samples in the result": 20 * 24 - 8
        },
        "As if d were in step 10: the group of a and c ends that step first.": {"steps of d": 10},
    },
)

# %% [markdown]
# Each sample counts once, however many members share a step. So the result is that of one process that never heard of
# them:

# %%
import torch
from torch import nn

from course_utils.lesson.equality import check_equal


def in_one_process():
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(20):
        inputs, targets = batch(step)
        adam.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        adam.step()
    return nn.utils.parameters_to_vector(model.parameters())


# %%
ends = {e["member"]: torch.tensor(e["parameters"]) for e in events if e["event"] == "end"}
print("members at the end:", *sorted(ends))
print("largest difference from one process:", check_equal(in_one_process(), list(ends.values())))

# %% tags=["nbval-ignore-output"]
when = {(e["event"], e["member"], e["step"]): e["time"] for e in events}
print(f"from the kill until step 5 counted:    {when['step', 'a', 5] - when['held', 'a', 5]:.2f} s")
print(
    f"d, from being ready to its first step: {when['step', 'd', 11] - when['ready', 'd', 0]:.2f} s"
)

# %% [markdown]
# Starting d takes seconds, in which a and c could go on training. The meeting takes a fraction of a second.
#
# **The price.**
#
# * Somebody has to notice who is gone, and call the others. Here the notebook kills and calls. On a cluster an agent
#   has to look, and a member that *hangs* is found only by the time limit of a collective.
# * A step in which some members had their sum and others had not leaves them one step apart. So when members meet they
#   first compare their steps, and all take the state of the one that is furthest.
# * When the last member dies, only a checkpoint helps. The same is true where no member has the whole model, as with
#   FSDP over all ranks.
# * Where a bug ends one member, it ends the next one too.
#
# [torchft](https://github.com/meta-pytorch/torchft) (Meta) does the same for replicas of many ranks each: a
# *lighthouse* hears the heartbeats and says in each step who takes part, and a manager in each replica lets the
# optimizer step only if the exchange went well. Its global batch shrinks while a replica is away. We tried torchft
# 0.2.0 with two tiny replicas on two busy cores. After a kill it took 5.1 s, in each of three runs, until a step
# counted again: a replica is given up when its heartbeat has been missing for 5 s. A step took 6 to 8 ms, and one with
# a plain `all_reduce` 1.3 to 1.7 ms.
#
# A restart, by torchrun, costs a new rendezvous, new processes with their imports, a checkpoint to read, and the
# steps since it was written. In three runs of the lesson's job, also on two busy cores, it took 9 to 14 s after a
# worker was killed, and 12 to 21 s after a node.

# %%
import matplotlib.pyplot as plt

from course_utils.figures import ch09

seconds = {
    "the group above": [when["step", "a", 5] - when["held", "a", 5]],
    "torchft, a replica": [5.1, 5.1, 5.1],
    "torchrun, a worker": [8.9, 11.0, 13.8],
    "torchrun, a node": [12.4, 18.6, 20.6],
}
ch09.until_a_step_counts(seconds)
plt.show()

# %% [markdown]
# *A dot is a run; the first was measured above. A member that goes on starts no Python, loads no PyTorch and reads no
# checkpoint.*
#
# ### 9.7 Who gives what to whom (2 points)
#
# Above, every member has the whole model, and the one that is furthest ahead gives its state to all. With sharding inside
# a replica a member has a part, and the group can only begin from a step at which *every* part is there. If a replica
# is killed during the update, some members are a step ahead, and they cannot undo that step. (In torchft the ranks of a
# replica vote before the optimizer steps, so that no replica holds parts of two steps.) Write the function that plans
# such a meeting.


# %% nbgrader={"grade_id": "9.7", "solution": true}
def who_gives(parts: list[int], steps: list[int | None], count: int) -> tuple[int, dict[int, int]]:
    """Returns the step from which all go on, and {rank that needs its part: rank that gives it}.

    Rank r holds part parts[r] of the `count` parts of the model, numbered from 0, after steps[r]
    steps, or None: a newcomer has nothing to give. All go on from the latest step at which every part
    is held by some member. Every member that is not at this step gets its part from one that has it
    at this step, and no giver gives more often than it must: of 2 givers and 5 who need the same
    part, none gives more than 3 times. Where no step has every part, raises a ValueError: only a
    checkpoint helps. Neither list is changed.
    """
    ### BEGIN SOLUTION
    ranks = range(len(parts))
    there = [{steps[r] for r in ranks if parts[r] == part} for part in range(count)]
    whole = set.intersection(*there) - {None}
    if not whole:
        raise ValueError("no step has every part: read a checkpoint")
    step, plan = max(whole), {}
    for part in range(count):
        givers = [r for r in ranks if parts[r] == part and steps[r] == step]
        needy = [r for r in ranks if parts[r] == part and steps[r] != step]
        plan |= {r: givers[turn % len(givers)] for turn, r in enumerate(needy)}
    return step, plan
    ### END SOLUTION


# %% nbgrader={"grade_id": "9.7-check", "grade": true, "points": 2, "locked": true}
check("9.7", who_gives)

# %% [markdown]
# ### How others do it
#
# * **Spare nodes and health checks.** A restart on a broken machine fails again. Large installations test each GPU
#   and each link before a node may join, and keep healthy nodes in reserve. ByteDance's MegaScale stops, tests,
#   evicts and replaces by itself ([Jiang et al. 2024](https://arxiv.org/abs/2402.15627), section 4). Some nodes fail
#   far more often than others; these "lemon nodes" are found by their history and taken out ([Kokolis et al.
#   2024](https://arxiv.org/abs/2410.21680)).
# * **Saves that hardly stop the training.** `torch.distributed.checkpoint.async_save` copies the state to the CPU's
#   memory and writes it in the background
#   ([recipe](https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html)). Gemini keeps the
#   copies in other machines' memory and reads the disk only if several machines fail at once ([Wang et al.
#   2023](https://doi.org/10.1145/3600006.3613145)).
# * **Fast diagnosis.** On 16,384 GPUs one rank that waits looks like all the others. Meta records each rank's
#   collectives to find the first that is missing (Llama 3 paper, section 3.3.4), as `launch` does here. PyTorch's
#   **flight recorder** writes the last collectives of each rank to files when NCCL's time limit has run out
#   ([tutorial](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)).
#
# ## 5. Break it: what a killed launcher leaves behind
#
# A launcher that is killed with `kill -9` cannot end its workers. They live on without a parent: such a process is an
# **orphan**. (A zombie is the opposite: a process that has ended, and whose parent has not asked for its exit code.)
# An orphan keeps its memory, its GPU and its port, and the next start of a script with a fixed port fails.

# %%
import errno

from course_hosts.nodes import JOB, no_survivors, processes_of, store_on

launcher = Path("scratch/launcher.py")
launcher.unlink(missing_ok=True)

# %%
# %%writefile scratch/launcher.py
"""Starts a worker that listens on a port, as rank 0 does, and waits for it."""

import subprocess
import sys

WORKER = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    time.sleep(1000)
"""
subprocess.run([sys.executable, "-c", WORKER], check=True)


# %%
def listen_on(port):
    """As rank 0 of a new run would, on a fixed port."""
    try:
        store_on(port)
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]


# %%
with no_survivors() as job:  # ends all processes that carry its name in their environment
    own = os.environ | {JOB: job}
    command = [sys.executable, launcher]
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as parent:
        port = int(parent.stdout.readline())  # a free one, instead of everybody's 12355
        print("the worker is listening")
        parent.kill()
        parent.stdout.close()
    print("the launcher is dead; a new run on the same port:", listen_on(port))
    for orphan in processes_of(job):
        held = [c.laddr.port for c in orphan.net_connections() if c.status == "LISTEN"]
        print("orphans that hold the port:", held.count(port))
        orphan.kill()
        orphan.wait()
    print("after it was ended, by its id:", listen_on(port))

# %% [markdown]
# On a terminal, `ss -ltnp` or `lsof -i :12355` names the process that holds a port. End an orphan by its id: `pkill
# python` ends your other work as well. The repair is to have no fixed port. With port 0 the system chooses one, and
# torchrun with the c10d rendezvous chooses a free one.

# %% [markdown]
# ## 6. Exercises
#
# | | points | where |
# |---|---|---|
# | 9.5 Minimum, maximum and restarts for four situations | 1 | section 4 |
# | 9.7 Who gives what to whom | 2 | section 4 |

# %% [markdown]
# ## 7. See it: failures by dice
#
# The lesson has a formula, to first order, for the share of time that is lost. Here failures come at random, with the
# same probability at every moment, also while the job saves, but not while it recovers. The points are simulated, and
# the line is the formula.

# %%
import math
import random


def simulated_loss(interval, save, recovery, mtbf, intervals=20_000):
    """Time lost for each minute of lasting work, with random failures; all in minutes."""
    dice = random.Random(0)
    clock, next_failure = 0.0, dice.expovariate(1 / mtbf)
    for _ in range(intervals):
        while clock + interval + save > next_failure:  # this interval never reached the disk
            clock = next_failure + recovery
            next_failure = clock + dice.expovariate(1 / mtbf)
        clock += interval + save
    return clock / (intervals * interval) - 1


# %%
M = 54 * 24 * 60 / 419  # minutes; Llama 3 paper, section 3.3.4
save, recovery = 1.0, 3.0
simulated = {
    tau: simulated_loss(tau, save, recovery, M) for tau in (3, 6, 12, 19, 30, 60, 120, 200)
}
ch09.time_lost(save, recovery, M, simulated)
plt.show()

best = math.sqrt(2 * save * M)
lowest = min(simulated, key=simulated.get)
print(f"least time lost: simulated at {lowest} minutes, by the formula at {best:.0f}")
for tau in (best, 200):
    formula = save / tau + (tau / 2 + recovery) / M
    dice = simulated_loss(tau, save, recovery, M)
    print(f"an interval of {tau:3.0f} minutes: formula {formula:.1%}, simulated {dice:.1%}")

# %% [markdown]
# *The points follow the line around its lowest point. Far to the right they lie above it: there failures also hit
# work that is being repeated, which the first order leaves out.*
#
# ## 8. On a cluster
#
# ### The same cells on a cluster
#
# `launch` starts its ranks on one machine. For several hosts one usually leaves the notebook and writes a script for
# torchrun, but a cell can run over several hosts too. Each host runs an *engine*, a process of
# [ipyparallel](https://ipyparallel.readthedocs.io) that runs calls for somebody elsewhere. A *controller* carries the
# calls between a notebook and its engines. An *agent* in each engine starts the ranks there as they are started here.
#
# To try it you need a second host. The next cell makes one where it may (Linux, as root): a *network namespace*,
# which has its own interfaces and addresses, and a virtual cable to this machine. Elsewhere two engines on this
# machine play the hosts. The output is the same. Without ipyparallel, which the course does not install by itself,
# the launches of this section stay on this machine.

# %% tags=["nbval-ignore-output"]
from contextlib import nullcontext

try:
    from course_hosts.cluster import cluster
    from course_hosts.two_hosts import TwoHosts

    if earlier := globals().get("two"):  # where this cell runs again
        earlier.close()
    two = TwoHosts()  # ends with the kernel, or in the last cell of this section
    print(two.about)
except ImportError as missing:
    two = None
    print(missing)


def over_both():
    """A block in which launches go over both hosts."""
    return cluster(two.client) if two else nullcontext()


# %% [markdown]
# First, chapter 3's averaging on four ranks, two on each host. Nothing in the function says where its ranks are.

# %%
import torch.distributed as dist

from course_utils.launch import launch


def gradients_of(part):
    """Of a quarter of the batch, or of all of it where `part` is None."""
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(20, 5), torch.randn(32, 20), torch.randn(32, 5)
    rows = slice(None) if part is None else slice(8 * part, 8 * part + 8)
    nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def averaged(rank):
    gradients = gradients_of(rank).to(hardware.device())
    dist.all_reduce(gradients)
    return gradients / dist.get_world_size()


with over_both():
    of_ranks = launch(averaged, 4)
one_process = gradients_of(None)
print("ranks:", len(of_ranks))
print("largest difference from one process:", check_equal(one_process, of_ranks))

# %% [markdown]
# Now the failure that one machine does not have. Ranks 2 and 3 are on the second host. When all four have begun, its
# cable is pulled (or, where an engine plays it, that engine is stopped). No connection is closed: there is silence.

# %%
from threading import Thread

from course_hosts.hosts import HostLost


def waits(rank, folder):
    Path(folder, f"rank-{rank}").touch()
    if rank < 2:
        total = torch.ones(1, device=hardware.device())
        dist.all_reduce(total)
        total.item()  # on a GPU the rank waits here, for what the call has not brought
    time.sleep(1000)


def silence_the_second(folder):
    while len(list(folder.glob("rank-*"))) < 4:
        time.sleep(0.1)
    time.sleep(1)  # into the collective
    two.fall_silent()


# %%
import tempfile

from course_utils.launch import RankFailure

if two:
    two.come_back()  # from an earlier run of this cell
    with tempfile.TemporaryDirectory() as folder, over_both() as (_, second):
        silence = Thread(target=silence_the_second, args=[Path(folder)])
        silence.start()
        try:
            launch(waits, 4, folder)
        except RankFailure as failure:
            print(str(failure).replace(second, "B"))
        try:
            launch(averaged, 4)
        except HostLost as lost:
            print("\nThe next launch:", str(lost).replace(second, "B").split(".")[0])
        silence.join()

# %% [markdown]
# A host that has not answered for ten seconds is given up and named. What ran on it ends by itself: when an agent has
# heard nothing from the notebook for twelve seconds, it ends its ranks. When the host is back, a new block goes on.

# %%
if two:
    two.come_back()
    with over_both():
        of_ranks = launch(averaged, 4)
    print("largest difference from one process:", check_equal(one_process, of_ranks))

# %%
if two:
    two.close()
    two = None

# %% [markdown]
# ### What to type on a cluster
#
# Each host has the same Python, PyTorch and course, preferably in the same folders. Then type this where your
# notebook runs, with an address that the other hosts can reach:
#
# ```console
# ipcontroller --ip=ADDRESS --location=ADDRESS --IPController.enable_curve=True
# ```
#
# It writes two files with keys, for engines and for clients, into `~/.ipython/profile_default/security`. Anybody who
# has one can run programs on all hosts; without a key nobody can. `launch` refuses a controller without keys.
#
# | where | what starts an engine on each host |
# |---|---|
# | SSH | `scp` the engine's file to the host if it has another home, then `ssh HOST ipengine --file=ipcontroller-engine.json` |
# | SLURM | `sbatch cluster/engines.sbatch`, one task a node |
# | Kubernetes | a pod a host with the command `ipengine --file=/keys/ipcontroller-engine.json`; the file is a Secret |
#
# In the notebook, put `with cluster(ipyparallel.Client()):` around the cells. Or leave the notebook as it is and set
# `COURSE_CLUSTER` to the client's file before you start Jupyter. `python -m course_utils doctor --cluster FILE` looks
# at every host first. The SLURM job was tried under SLURM's own daemons, all on one machine; nothing was tried on a
# cluster of real hosts.
#
# ### Logs, orphans, exit codes
#
# * **Keep what workers print.** `torchrun --log-dir DIR --redirects 3` writes each worker's output into files, with a
#   folder for each restart.
# * **Orphans** are the scheduler's business if it is set up for it. SLURM with
#   [`proctrack/cgroup`](https://slurm.schedmd.com/cgroups.html) ends all processes of a step, and a container ends
#   all of its own.
# * **`cluster/agent.py`** of the course is an agent whose exit code says whether another start makes sense.
#
# ## 9. Remember
#
# 1. `@record` costs a line, and the agent's report says which worker died first, and why.
# 2. A sampler has handed out more than was trained on. The training loop has to count, or a loader that
#    counts what the loop has got.
# 3. A heartbeat says which rank hangs. A time limit says only that one does.
# 4. Every option of the rendezvous trades a restart too many against a wait too long.
# 5. Where each rank has the whole model, a group can go on without a restart, and take in members that come late.
# 6. A launcher that is killed leaves orphans. End them by their id, and have no fixed port.
# 7. A cell can run over several hosts. A host that falls silent has to be given up after a time, on both sides.
#
# **Sources**
#
# * PyTorch: [rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html),
#   [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html),
#   [`DataLoader`](https://docs.pytorch.org/docs/stable/data.html): `prefetch_factor`.
# * PyTorch 2.14, `distributed_c10d.py`: `_get_reconfigure_handle` and `_reconfigure`;
#   [torchft](https://docs.pytorch.org/torchft) 0.2.0: its `Manager`.
# * Llama Team, *The Llama 3 Herd of Models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783): section
#   3.3.4.
# * Z. Jiang et al., *MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs*, NSDI 2024, [arXiv
#   2402.15627](https://arxiv.org/abs/2402.15627): section 4 fault tolerance.
# * A. Kokolis et al., *Revisiting Reliability in Large-Scale Machine Learning Research Clusters*, HPCA 2025, [arXiv
#   2410.21680](https://arxiv.org/abs/2410.21680).
# * Z. Wang et al., *Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints*, SOSP 2023,
#   [doi 10.1145/3600006.3613145](https://doi.org/10.1145/3600006.3613145).
