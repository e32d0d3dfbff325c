# %% [markdown]
# # 1. Two ways to grow a factory
#
# There are two basic ways to use more than one processor for one training run. You copy the model
# and share out the data: **data parallelism**. Or you cut the model and pass the data through the
# pieces: **model parallelism**. Every later chapter refines one of the two, or mixes them.
#
# In this chapter you run both on two real ranks. You predict what each of them moves, stores and
# waits for, and you learn to decide between them.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch01
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist
from course_utils.lesson.predictions import compare

hardware.report()

# %% [markdown]
# ## 1. The factory: copy the workshop, or lengthen the line
#
# A factory gets an order: a pile of raw material, to be worked through by the rules of a blueprint.
# When the pile is done, the blueprint is improved a little, and the next pile comes. One building
# is too slow, so you build more. There are two ways.
#
# **Copies.** You build a second factory of the same kind, with the same blueprint. Each gets half of
# the material. When both are done they send their notes on the blueprint to the head office, which
# averages them, so that both start the next pile with the same improved blueprint. This works as
# long as the whole blueprint fits into one building.
#
# **A line.** You cut the blueprint. The first building does the first half of the work on *every*
# piece of material. A truck takes the half-finished pieces to the second building, which does the
# rest. No building holds the whole blueprint. While one building works, the other waits.

# %%
figure = ch01.two_ways()
plt.show()

# %% [markdown]
# *Left: two factories, each with the whole blueprint and half of the material; the head office
# averages their notes. Right: two buildings, each with half of the blueprint; all of the material
# goes through both, and a truck drives between them.*
#
# | in the factory | in PyTorch | copies | a line |
# |---|---|---|---|
# | building | **rank**: one process, on a GPU of its own where there is one | the whole model | some of the layers |
# | raw material | the batch | a share for each rank | the whole batch for each rank |
# | blueprint | the parameters | on every rank | cut over the ranks |
# | notes on the blueprint | the gradients of the parameters | averaged over the ranks | stay where the layers are |
# | half-finished pieces | **activations**: what one layer hands to the next | stay on the rank | sent to the next rank; their gradients come back |
# | head office | **all-reduce**: every rank hands in a tensor and gets the sum of all | once a step | not needed |
# | truck | **send** and **recv**: one rank hands a tensor to one other | not needed | there and back, each step |
#
# So the copies' head office gets the *blueprint's* worth, however large the batch is. The line's trucks
# carry the *batch's* worth, however large the blueprint is. Much of the decision between the two
# lies in this sentence, and section 3 puts numbers to it.

# %% [markdown]
# ## 2. The smallest real run: half the batch each, then half the layers each
#
# The network has 784 inputs, 50 hidden values and 10 outputs. The batch is 64
# images of MNIST. Both functions below do one **training step** without the update: forward,
# backward, and whatever the ranks must tell each other. They return the gradients.

# %%
from course_utils.lesson.models import MnistNet

torch.manual_seed(0)
net = MnistNet()
images, labels = mnist.tensors(train=True, limit=64)


def half_the_batch(rank, net, images, labels):
    mine, their_labels = images.chunk(2)[rank], labels.chunk(2)[rank]  # 32 images each
    cross_entropy(net(mine), their_labels).backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)  # the sum over both ranks, on both ranks
        parameter.grad /= 2  # the mean
    return {name: p.grad for name, p in net.named_parameters()}


# %% [markdown]
# In the line, rank 0 owns the first layer and rank 1 the second. Autograd records operations inside
# one process only, so you carry its work across the border yourself: the activations forward with
# one message, and the gradient of these activations backward with another.


# %%
def half_the_layers(rank, net, images, labels):
    hidden = torch.empty(len(images), 50, device=images.device)
    if rank == 0:
        hidden = torch.relu(net.linear1(images.flatten(1)))
        dist.send(hidden.detach(), dst=1)  # the truck leaves
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, src=1)  # and comes back
        hidden.backward(gradient)
    else:
        dist.recv(hidden, src=0)
        hidden.requires_grad_()  # so that backward fills hidden.grad
        cross_entropy(net.linear2(hidden), labels).backward()
        dist.send(hidden.grad, dst=0)
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


# %% [markdown]
# Run both on two ranks. `on_device` moves everything to the device of the rank, which is a GPU of
# its own where there are two. Compare with one process that does the whole step.


# %%
def on_device(rank, way, net, *tensors):
    device = hardware.device()
    return way(rank, net.to(device), *(tensor.to(device) for tensor in tensors))


def largest_difference(one, other):
    return max((one[name].cpu() - other[name].cpu()).abs().max().item() for name in one)


cross_entropy(net(images), labels).backward()
expected = {name: p.grad for name, p in net.named_parameters()}
net.zero_grad()

for rank, gradients in enumerate(launch(on_device, 2, half_the_batch, net, images, labels)):
    close = largest_difference(gradients, expected) <= 1e-6
    print(f"half the batch:  rank {rank}, gradients of {list(gradients)} within 1e-6: {close}")
for rank, gradients in enumerate(launch(on_device, 2, half_the_layers, net, images, labels)):
    close = largest_difference(gradients, expected) <= 1e-6
    print(f"half the layers: rank {rank}, gradients of {list(gradients)} within 1e-6: {close}")

# %% [markdown]
# Both ways compute the gradient of the whole batch. With copies, every rank ends with all of it.
# With a line, each rank has the part that belongs to its own layers.

# %% [markdown]
# ## 3. Predict, then measure: what is moved, what is stored, how long it takes
#
# **Moved.** Call the number of parameters $W$, the batch $N$ and the number of values that a truck
# carries for one image $H$. A float32 takes 4 bytes. With copies each rank hands $4W$ bytes to the
# all-reduces of a step. In the line, rank 0 sends $4NH$ bytes of activations, and rank 1 sends $4NH$
# bytes of their gradients.
#
# **Stored.** Each rank holds the parameters that it works with, and a gradient for each of them.
#
# The first layer has 784 x 50 weights and 50 biases, the second one 50 x 10 weights and 10 biases.
# Write your predictions in place of the dots, before you run the next two cells.

# %% tags=["prediction"]
predicted = {
    "copies: bytes that rank 0 hands over": 4 * (784 * 50 + 50 + 50 * 10 + 10),
    "copies: bytes that rank 1 hands over": 4 * (784 * 50 + 50 + 50 * 10 + 10),
    "copies: parameters and gradients on rank 0": 2 * 4 * (784 * 50 + 50 + 50 * 10 + 10),
    "copies: parameters and gradients on rank 1": 2 * 4 * (784 * 50 + 50 + 50 * 10 + 10),
    "line: bytes that rank 0 hands over": 4 * 64 * 50,
    "line: bytes that rank 1 hands over": 4 * 64 * 50,
    "line: parameters and gradients on rank 0": 2 * 4 * (784 * 50 + 50),
    "line: parameters and gradients on rank 1": 2 * 4 * (50 * 10 + 10),
}

# %% [markdown]
# `Trace` records what a rank hands to every collective and message inside its block.
# `memory_ledger` counts the bytes of a model by kind.


# %%
from course_utils.trace import Trace, memory_ledger


def weigh(rank, way, net, images, labels):
    part = net if way is half_the_batch else (net.linear1, net.linear2)[rank]
    with Trace() as trace:
        on_device(rank, way, net, images, labels)
    ledger = memory_ledger(part)
    return trace.record().sent(), ledger["parameters"] + ledger["gradients"]


whole = 4 * sum(p.numel() for p in net.parameters())

# %%
measured = {}
for name, way in (("copies", half_the_batch), ("line", half_the_layers)):
    for rank, (sent, stored) in enumerate(launch(weigh, 2, way, net, images, labels)):
        measured[f"{name}: bytes that rank {rank} hands over"] = sent
        measured[f"{name}: parameters and gradients on rank {rank}"] = stored
compare(
    predicted,
    measured,
    likely={
        "As if half of the images gave half of the gradients: each rank has one for each parameter.": {
            f"copies: bytes that rank {rank} hands over": whole // 2 for rank in range(2)
        },
        "As if half of the layers were half of the parameters.": {
            f"line: parameters and gradients on rank {rank}": whole for rank in range(2)
        },
        "As if the trucks carried gradients of parameters: they stay where the layers are.": {
            f"line: bytes that rank {rank} hands over": whole // 2 for rank in range(2)
        },
    },
)

# %% [markdown]
# Two things to take from the table. The copies moved twelve times as many bytes as the line, and a
# larger batch would turn that around. And "half the layers" is not half the memory: the first layer
# has 99 % of the parameters. Where you cut a model decides what a cut is worth.
#
# **How long it takes.** Now a model of the factory itself. It is a **discrete-event simulation**:
# nothing happens between two events, so it jumps from one to the next. An event is a piece of work
# that starts or ends. A piece of work starts when its place is free and all that it needs is there.


# %%
def simulate(work):
    """Returns {piece: (start, end)} for work = {piece: (place, minutes, pieces that it needs)}.

    A place does one piece at a time, in the order of the dict.
    """
    free_from, times = {}, {}
    for piece, (place, minutes, needs) in work.items():
        start = max([free_from.get(place, 0), *(times[need][1] for need in needs)])
        times[piece] = (start, start + minutes)
        free_from[place] = start + minutes
    return times


simulate({"cut": ("saw", 3, []), "drill": ("drill", 2, ["cut"]), "cut again": ("saw", 3, [])})

# %% [markdown]
# One training step of a whole company: $F$ factories, copies of a line of $B$ buildings each. The
# batch of $N$ items is shared out over the factories, the $P$ pages of the blueprint over the
# buildings. Shares are as equal as they can be: the first ones get one more where it does not come
# out even.
#
# * Forward: one minute per item and page. Backward takes twice as long, because it computes two
#   products where forward computes one: the gradient of the input and that of the weights.
# * A truck takes `product` minutes for the half-finished product of one item.
# * The head office takes $2\,(F-1)/F$ times `page` minutes for each page: the cost of an all-reduce
#   in a ring, which chapter 3 derives.


# %%
def split(total, parts):
    return [total // parts + (i < total % parts) for i in range(parts)]


def training_step(factories, buildings, batch, pages, product, page):
    shares, parts = split(batch, factories), split(pages, buildings)
    work, last = {}, buildings - 1
    for f, items in enumerate(shares):
        for b in range(buildings):
            arrived = [("out", f, b - 1)] if b > 0 else []
            work["forward", f, b] = ((f, b), items * parts[b], arrived)
            if b < last:
                work["out", f, b] = (("road", f, b), items * product, [("forward", f, b)])
        for b in reversed(range(buildings)):
            arrived = [("back", f, b + 1)] if b < last else []
            work["backward", f, b] = ((f, b), 2 * items * parts[b], arrived)
            if b > 0:
                work["back", f, b] = (("road", f, b - 1), items * product, [("backward", f, b)])
    share = 2 * (factories - 1) / factories
    for b in range(buildings):
        notes = [("backward", f, b) for f in range(factories)]
        for f in range(factories):
            work["exchange", f, b] = ((f, b), share * parts[b] * page, notes)
    return work


# %% [markdown]
# A simulation can be wrong, so you check it against a formula. In a line, no two buildings ever work
# at the same time: each waits for the truck of the one before. So the time of a step is the sum of
# everything that happens to the *largest* share of the batch, $n = \lceil N/F \rceil$, and the
# exchange of the first building, which is the last to finish and has the largest part of the pages,
# $p = \lceil P/B \rceil$:
#
# $$T = \underbrace{3\,n\,P}_{\text{forward, backward}} + \underbrace{2\,(B-1)\,n\,t_\text{product}}_{\text{trucks}}
# + \underbrace{2\,\tfrac{F-1}{F}\;p\;t_\text{page}}_{\text{head office}}$$


# %%
import math


def step_minutes(factories, buildings, batch, pages, product, page):
    n, p = math.ceil(batch / factories), math.ceil(pages / buildings)
    head_office = 2 * (factories - 1) / factories * p * page
    return 3 * n * pages + 2 * (buildings - 1) * n * product + head_office


agree = total = 0
for factories in range(1, 6):
    for buildings in range(1, 6):
        for batch, pages in ((5, 5), (7, 6), (12, 12), (13, 20)):
            for product, page in ((0, 0), (0.5, 2), (3, 0.25)):
                company = (factories, buildings, batch, pages, product, page)
                end = max(end for _, end in simulate(training_step(*company)).values())
                agree += math.isclose(end, step_minutes(*company))
                total += 1
print(f"simulation and formula agree for {agree} of {total} companies")

# %% [markdown]
# Read the formula for the two pure cases, with trucks and a head office that cost nothing. Copies
# ($B = 1$): the step takes $1/F$ of the time. A line ($F = 1$): the step takes *as long as before*. A
# line makes room. It does not make a training step shorter.
#
# The **idle share** is the part of all building time in which nobody computes. The work of a step is
# $3NP$ minutes whoever does it, and $FB$ buildings have $FB \cdot T$ minutes, so
#
# $$\text{idle share} = 1 - \frac{3 N P}{F B\,T},$$
#
# which is $(B-1)/B$ for a line with free trucks: with two buildings, half of all that you pay for.

# %%
work_of_a_step = 3 * 12 * 8
for factories, buildings in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2)):
    minutes = step_minutes(factories, buildings, batch=12, pages=8, product=0, page=0)
    idle = 1 - work_of_a_step / (factories * buildings * minutes)
    print(f"{factories} x {buildings} buildings: {minutes:3.0f} minutes a step, {idle:.0%} idle")

# %% [markdown]
# ## 4. By hand, then with PyTorch: the same parameters four times, and two timelines
#
# The 784-50-10 network is too small to see time pass. For the rest of the chapter the blueprint has
# four wide layers and a narrow one, 2,469,610 parameters, and the batch has 1024 images. It is cut
# after the second wide layer.

# %%
images, labels = mnist.tensors(train=True, limit=1024)
STEPS, RATE = 4, 0.1


def build():
    torch.manual_seed(0)
    layers = [nn.Flatten()]
    for _ in range(4):
        layers += [nn.Linear(784, 784), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(784, 10))


def pieces(net):
    return net[:5], net[5:]  # two wide layers; two wide layers and the narrow one


print("parameters:", sum(p.numel() for p in build().parameters()))

# %% [markdown]
# One function for each way to do a step. `span` names what a rank computes, for the timeline.


# %%
def alone_step(rank, net, images, labels, span):
    with span("forward"):
        loss = cross_entropy(net(images), labels)
    with span("backward"):
        loss.backward()


def copies_step(rank, net, images, labels, span):
    ranks = dist.get_world_size()
    alone_step(rank, net, images.chunk(ranks)[rank], labels.chunk(ranks)[rank], span)
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


# %%
def line_step(rank, piece, images, labels, span):
    if rank == 0:
        with span("forward"):
            hidden = piece(images)
        dist.send(hidden.detach(), dst=1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, src=1)
        with span("backward"):
            hidden.backward(gradient)
    else:
        hidden = torch.empty(len(images), 784, device=images.device)
        dist.recv(hidden, src=0)
        alone_step(rank, piece, hidden.requires_grad_(), labels, span)
        dist.send(hidden.grad, dst=0)


# %% [markdown]
# Training is the same loop for all of them: gradients, then plain SGD. Each step is traced.
# `torch.set_num_threads(1)` gives every process one core, so that one process and two ranks can be
# compared: a rank stands for a building of fixed size.


# %%
def train(rank, step, images, labels):
    torch.set_num_threads(1)
    device = hardware.device()
    net = build().to(device)
    images, labels = images.to(device), labels.to(device)
    part = pieces(net)[rank] if step is line_step else net
    optimizer, records = torch.optim.SGD(part.parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with Trace() as trace:
            step(rank, part, images, labels, trace.span)
            with trace.span("update"):
                optimizer.step()
        records.append(trace.record())
    gradients = {name: p.grad for name, p in part.named_parameters()}
    return part.state_dict(), gradients, records, memory_ledger(part, optimizer)


alone = launch(train, 1, alone_step, images, labels)
copies = launch(train, 2, copies_step, images, labels)
line = launch(train, 2, line_step, images, labels)

# %% [markdown]
# PyTorch has its own interface for both. `DistributedDataParallel` wraps a copy and averages the
# gradients during `backward`; chapter 3 takes it apart.


# %%
from torch.nn.parallel import DistributedDataParallel


def pytorch_copies(rank, images, labels):
    torch.set_num_threads(1)
    device = hardware.device()
    net = build().to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    mine = images.chunk(2)[rank].to(device), labels.chunk(2)[rank].to(device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(mine[0]), mine[1]).backward()
        optimizer.step()
    return net.state_dict(), {name: p.grad for name, p in net.named_parameters()}


# %% [markdown]
# `torch.distributed.pipelining` wraps a piece of a model and does the sends and receives; chapter 5
# takes that apart. With one **micro-batch**, that is with the batch in one piece, it is the line that
# you wrote.

# %%
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def pytorch_line(rank, images, labels):
    torch.set_num_threads(1)
    device = hardware.device()
    piece = pieces(build().to(device))[rank]
    stage = PipelineStage(piece, stage_index=rank, num_stages=2, device=device)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(piece.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(images.to(device))
        else:
            schedule.step(target=labels.to(device))
        optimizer.step()
    return piece.state_dict(), {name: p.grad for name, p in piece.named_parameters()}


# %% [markdown]
# All four must end where a single process ends if it does every step on the whole batch.

# %%
ways = {
    "copies by hand": copies,
    "copies with DistributedDataParallel": launch(pytorch_copies, 2, images, labels),
    "line by hand": line,
    "line with torch.distributed.pipelining": launch(pytorch_line, 2, images, labels),
}
for name, results in ways.items():
    for what, index in (("parameters", 0), ("gradients", 1)):
        worst = max(largest_difference(result[index], alone[0][index]) for result in results)
        complete = {key for result in results for key in result[index]} == set(alone[0][index])
        print(f"{name}: {what} within 1e-5 of one process: {worst <= 1e-5 and complete}")

# %% [markdown]
# Now the time of these steps, beside the model's. The simulation needs three numbers from this
# machine: the minutes of a step of one process, of a truck with the batch's activations, and of an
# exchange of all gradients. You measure them on their own, and predict the timelines from them.


# %%
def drive(rank, batch):
    """Returns the seconds of a truck's way with one batch of activations, and of one exchange."""
    device = hardware.device()
    products = torch.ones(batch, 784, device=device)
    blueprint = [torch.ones_like(p, device=device) for p in build().parameters()]
    for _ in range(3):  # the last round counts: by then, everything is warm
        with Trace() as truck:
            dist.send(products, dst=1) if rank == 0 else dist.recv(products, src=0)
        with Trace() as exchange:
            for page in blueprint:
                dist.all_reduce(page)
    return [trace.record().seconds("communication") for trace in (truck, exchange)]


def seconds(records):
    return max(span.end for record in records for span in record.spans)


def fastest_step(results):
    """The records of all ranks in the step that other programs disturbed the least."""
    return min(zip(*(records for _, _, records, _ in results)), key=seconds)


one_step = seconds(fastest_step(alone))
truck_seconds, exchange_seconds = (min(both) for both in zip(*launch(drive, 2, len(images))))

# %% [markdown]
# For the simulation, the blueprint has four pages of equal work, and a minute is what one process
# takes for the forward pass of one image through one of them. `as_records` turns the simulation's
# times into the form that a `Trace` gives, so that one function draws both.


# %%
from course_utils.trace import Record, Span


def as_records(schedule, buildings, minute=1.0):
    """Returns one record per building; its times are those of `simulate`, times `minute`."""
    factories = 1 + max(f for _, f, _ in schedule)
    spans = [[] for _ in range(factories * buildings)]
    for (name, f, b), (start, end) in schedule.items():
        home = f * buildings + b
        kind = "compute" if name in ("forward", "backward") else "communication"
        neighbour = {"out": [home + 1], "back": [home - 1]}.get(name, [])
        for lane in [home, *neighbour]:  # a truck keeps both of its ends busy
            spans[lane].append(Span(name, kind, start * minute, end * minute))
    return [Record(lane, with_waiting(found)) for lane, found in enumerate(spans)]


def with_waiting(spans):
    now, filled = 0.0, []
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > now:
            filled.append(Span("wait", "waiting", now, span.start))
        filled.append(span)
        now = span.end
    return filled


# %%
N, PAGES = len(images), 4
minute = one_step / (3 * N * PAGES)
roads = {"product": truck_seconds / N / minute, "page": exchange_seconds / PAGES / minute}
real = hardware.placement(2).timing
panels = {
    "copies, simulated": as_records(simulate(training_step(2, 1, N, PAGES, **roads)), 1, minute),
    f"copies, {real}": fastest_step(copies),
    "line, simulated": as_records(simulate(training_step(1, 2, N, PAGES, **roads)), 2, minute),
    f"line, {real}": fastest_step(line),
}
plots.timelines(panels, unit="steps of one process", seconds=one_step)
plt.show()

# %% [markdown]
# *In the simulation the copies compute at the same time, half of the work each, and the exchange at
# the end is what a step takes beyond half of the time of one process. In the line only one rank computes
# at any moment, and the step takes as long as alone, plus the trucks. Real ranks do it in the same order;
# their bars are longer where they share the cores. The simulation does not draw the update (the thin
# green bar): its time is spread over the minutes of the pages.*
#
# What the simulation says and what the clock says, as a ratio. A ratio near 1 means that three
# measured numbers and one formula explain the step. On a busy machine it can be far from 1: two
# ranks on two cores have nowhere to go when another program wants a core.

# %% tags=["nbval-ignore-output"]
for name in ("copies", "line"):
    simulated, clock = (seconds(panels[f"{name}, {kind}"]) for kind in ("simulated", real))
    print(
        f"{name}: {clock / one_step:.2f} steps of one process; {clock / simulated:.2f} x predicted"
    )

# %% [markdown]
# ## 5. Break it: four ways to go wrong with two buildings
#
# **Unequal halves.** In section 2 each rank took the mean over its 32 images, and the mean of these
# two means was the mean over 64. Give the same function five images. `chunk` makes three and two of
# them, and the mean of the means counts each image of the smaller share more.

# %%
five = images[:5], labels[:5]
cross_entropy(net(five[0]), five[1]).backward()
whole_batch = {name: p.grad for name, p in net.named_parameters()}
net.zero_grad()

first, second = launch(on_device, 2, half_the_batch, net, *five)
print("both ranks agree:", largest_difference(first, second) == 0)
print("within 1e-6 of the whole batch:", largest_difference(first, whole_batch) <= 1e-6)

# %% [markdown]
# Nothing warns you: both ranks agree on a wrong gradient. The last batch of an epoch is often such a
# batch. The repair is to divide by the size of the *whole* batch on every rank, and then to sum:


# %%
def sum_over_the_batch(rank, net, images, labels):
    mine, their_labels = images.chunk(2)[rank], labels.chunk(2)[rank]
    (cross_entropy(net(mine), their_labels, reduction="sum") / len(images)).backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
    return {name: p.grad for name, p in net.named_parameters()}


repaired, _ = launch(on_device, 2, sum_over_the_batch, net, *five)
print("within 1e-6 of the whole batch:", largest_difference(repaired, whole_batch) <= 1e-6)

# %% [markdown]
# **A truck that never comes.** Both ends of a road must agree on how many trucks there are. Here the
# second building counts the batches itself, and rounds the last one up.


# %%
def deliver(rank, items, batch):
    crate = torch.zeros(batch, device=hardware.device())
    if rank == 0:
        for _ in range(items // batch):
            dist.send(crate, dst=1)
    else:
        for _ in range(math.ceil(items / batch)):
            dist.recv(crate, src=0)


try:
    launch(deliver, 2, 100, 32)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# Rank 0 sent three times and went home. Rank 1 waited for a fourth truck. Without a launcher that
# looks after its ranks, rank 1 waits without a message, or fails once rank 0's process has ended. The
# repair is one number that both ends share: send the count first, or compute it by the same line of
# code.
#
# **Bug hunt: the half that never learns.** "Backpropagation works automatically across GPUs", says the
# web article *Data Parallelism & Model Parallelism*. In one process it does: `.to("cuda:1")` is an operation that autograd records. A
# reader has moved such a model to two processes, one for each half, and replaced `.to` by `send` and
# `recv`. It runs, and the loss falls. Find what is wrong before you read on.


# %%
def train_the_line(rank, images, labels):
    device = hardware.device()
    piece = pieces(build().to(device))[rank]
    optimizer = torch.optim.SGD(piece.parameters(), lr=RATE)
    before, losses = [p.detach().clone() for p in piece.parameters()], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            dist.send(piece(images.to(device)).detach(), dst=1)
        else:
            hidden = torch.empty(len(images), 784, device=device)
            dist.recv(hidden, src=0)
            loss = cross_entropy(piece(hidden), labels.to(device))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    learned = any(not torch.equal(a, b) for a, b in zip(before, piece.parameters()))
    return learned, losses


# %%
(first_learned, _), (second_learned, losses) = launch(train_the_line, 2, images, labels)
print("the loss falls:", losses == sorted(losses, reverse=True))
print("building 0 has changed its pages:", first_learned)
print("building 1 has changed its pages:", second_learned)

# %% [markdown]
# No truck drives back. `send` and `recv` are not recorded by autograd, so `backward` ends at the
# border, the first half has no gradients, and an optimizer skips parameters without a gradient
# silently. The second half learns alone from the random features of the first, and that is enough to
# make the loss fall. What finds the mistake is the comparison with one process, or one line that
# asks whether every parameter has a gradient. The repair is `line_step`.
#
# **A claim to test.** "The speedup is roughly proportional to the number of GPUs" (the web article
# *Parallelize Your Way to Faster Deep Learning: Exploring DataParallel*). Take a batch of 16
# and a blueprint of 8 pages, and count the minutes of a step with the formula of section 3.

# %%
for page in (0, 3, 12):
    alone_minutes = step_minutes(1, 1, 16, 8, product=0, page=page)
    speedups = [
        alone_minutes / step_minutes(f, 1, 16, 8, product=0, page=page) for f in range(1, 13)
    ]
    shown = "  ".join(f"{f}: {speedups[f - 1]:4.1f}" for f in (1, 2, 3, 4, 6, 8, 12))
    print(f"{page:2} minutes a page   speed-up by factories   {shown}")

# %% [markdown]
# In the first line the head office is free, and still 6 factories give 5.3 and 12 give 8: the largest
# share counts, and 16 items over 12 factories make a share of 2. With a slower head office the
# exchange, which more factories do not make shorter, takes over. The claim holds while the compute of
# one share is much longer than the exchange. Now a real case in which it is not: the 784-50-10
# network of section 2, with its 64 images.


# %%
def whole_batch_alone(rank, net, images, labels):
    cross_entropy(net(images), labels).backward()


def small_step(rank, way, net, images, labels):
    torch.set_num_threads(1)
    durations = []
    for _ in range(50):
        with Trace() as trace, trace.span("step"):
            on_device(rank, way, net, images, labels)
        net.zero_grad()
        durations.append(seconds([trace.record()]))
    return sorted(durations)[len(durations) // 2]  # the median


small = net, images[:64], labels[:64]
one_small = launch(small_step, 1, whole_batch_alone, *small)[0]
two_small = max(launch(small_step, 2, half_the_batch, *small))

# %% tags=["nbval-ignore-output"]
print(f"two ranks take {two_small / one_small:.1f} x the time of one process")

# %% [markdown]
# Half of the compute for each, and still no gain: the two ranks meet four times, once for each
# parameter, and a meeting takes longer than the arithmetic that it saves.

# %% [markdown]
# ## 6. Exercises: a line that delivers, a line that stalls, six decisions
#
# The first two exercises are about a line that only **delivers**: a trained model that answers
# requests. There is no way back and no head office. The next order may enter a building as soon as
# the one before has left it, so several orders are in the line at once, one behind the other.
#
# Two numbers describe such a line, and they are not each other's inverse. **Throughput** is how many
# orders leave per minute, once the line is full. **Latency**, or delivery time, is how long one order
# is under way, from its entry into the first building until it leaves the last.
#
# **1.1 Throughput and delivery time** (2 points). The company has `factories` identical lines. In
# each, building $b$ works `minutes[b]` on an order. Between two buildings an order travels `truck`
# minutes; there are always enough trucks, and a building works on while its truck is under way.


# %% nbgrader={"grade_id": "1.1", "solution": true}
def deliveries(minutes: list[float], truck: float, factories: int) -> tuple[float, float]:
    """Return (throughput, delivery time) of the whole company.

    minutes: what each building of a line needs for one order, in the order of the line.
    truck: minutes from one building to the next.
    factories: how many such lines work side by side, each on orders of its own.
    Throughput is in orders per minute, of all lines together, when all of them are full.
    Delivery time is in minutes, of one order, in a line in which it never has to wait.
    """
    ### BEGIN SOLUTION
    throughput = factories / max(minutes)  # the slowest building sets the pace of its line
    return throughput, sum(minutes) + truck * (len(minutes) - 1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "1.1-check", "grade": true, "points": 2, "locked": true}
check("1.1", deliveries)

# %% [markdown]
# **1.2 Where the line stalls** (3 points). The orders all lie ready at minute 0. Count for each
# building the minutes in which it does nothing, from minute 0 until the last order has left the
# *last* building. You may simulate it, or find a formula.


# %% nbgrader={"grade_id": "1.2", "solution": true}
def idle_minutes(minutes: list[float], truck: float, orders: int) -> list[float]:
    """Return for each building how many minutes it does nothing.

    minutes: what each building needs for one order, in the order of the line.
    truck: minutes from one building to the next; there are always enough trucks.
    orders: how many orders go through the line, one after the other.
    Counted from minute 0 until the last order has left the last building, for all buildings.
    """
    ### BEGIN SOLUTION
    free_from = [0.0] * len(minutes)
    for _ in range(orders):
        arrival = 0.0
        for b, work in enumerate(minutes):
            free_from[b] = (
                max(arrival, free_from[b]) + work
            )  # waits for the order, or the order waits
            arrival = free_from[b] + truck
    return [free_from[-1] - orders * work for work in minutes]
    ### END SOLUTION


# %% nbgrader={"grade_id": "1.2-check", "grade": true, "points": 3, "locked": true}
check("1.2", idle_minutes)

# %% [markdown]
# **1.3 Decide** (3 points). Training again, and real models. A `Job` says what has to be trained and
# on what. Cut only what does not fit, copy only where a copy pays.


# %%
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    gpus: int
    gpu_bytes: float  # memory of one GPU
    state_bytes: float  # parameters, gradients and optimizer state of one whole copy
    sample_bytes: float  # activations of one sample; a copy that works needs room for one
    compute_seconds: float  # one step of the whole batch on one GPU, if it had room
    exchange_seconds: float  # one all-reduce of all gradients over all GPUs


def transformer(parameters, layers, hidden, heads, sequence, batch, gpus, gpu_gb, link_gb):
    attention = 5 * heads * sequence / hidden
    return Job(
        gpus=gpus,
        gpu_bytes=gpu_gb * 1e9,
        state_bytes=16 * parameters,
        sample_bytes=layers * sequence * hidden * (34 + attention),
        compute_seconds=6 * parameters * sequence * batch / 140e12,
        exchange_seconds=2 * (gpus - 1) / gpus * 2 * parameters / (link_gb * 1e9),
    )


# %% [markdown]
# One rule for all six keeps them comparable: every GPU computes at the same speed, and there are two
# kinds of links. A card of 24 GB and an office PC compute more slowly, and no two cards of 24 GB have
# an A100's NVLink between them, which changes their seconds and none of the six answers. The activations are those of a GPT layer that keeps its attention matrix, on
# 2,048 tokens at most; chapters 4, 6 and 8 show what takes less, and with it some models need fewer cuts.
#
# Where the numbers come from: 16 bytes of state per parameter with Adam in mixed precision (ZeRO,
# section 3.1). Activations of a layer, $s h (34 + 5 a s / h)$ bytes a sample (Korthikanti et al.,
# equation 1). Six floating-point operations per parameter and token (Kaplan et al., section 2.1), at
# the 140 Tflop/s that Narayanan et al. report for a GPU. An exchange moves $2(n-1)/n$ of the 2-byte
# gradients over the link. The six jobs, with the models' published sizes:

# %%
link = {"NVLink of an A100": 300, "Ethernet, 1 Gbit/s": 0.125}  # GB/s, each direction
fast, slow = link.values()
jobs = {
    "BERT-large, 8 GPUs of 80 GB": transformer(340e6, 24, 1024, 16, 512, 32, 8, 80, fast),
    "BERT-large, 2 PCs on an office network": transformer(340e6, 24, 1024, 16, 512, 4, 2, 24, slow),
    "GPT-2 of 1.5 billion, 2 GPUs of 24 GB": transformer(1.5e9, 48, 1600, 25, 1024, 8, 2, 24, fast),
    "Llama 3 8B, 8 GPUs of 80 GB": transformer(8.03e9, 32, 4096, 32, 2048, 32, 8, 80, fast),
    "Megatron 22B, 8 GPUs of 80 GB": transformer(22e9, 48, 6144, 64, 2048, 4, 8, 80, fast),
    "GPT-3 175B, 32 GPUs of 80 GB": transformer(175e9, 96, 12288, 96, 2048, 64, 32, 80, fast),
}
for name, job in jobs.items():
    copy = (job.state_bytes + job.sample_bytes) / 1e9
    print(f"{name:40} a copy: {copy:7.1f} GB   compute {job.compute_seconds:7.3f} s", end="   ")
    print(f"exchange {job.exchange_seconds:6.3f} s")

# %% [markdown]
# Decide the six for yourself first: with pencil and paper it takes three minutes. Then write down
# the rule that you used.


# %% nbgrader={"grade_id": "1.3", "solution": true}
def decide(job: Job) -> str:
    """Return how to train: "one", "data", "model", "both" or "none".

    A copy of the model needs room for its state and the activations of one sample. Cutting spreads
    them evenly over the GPUs of the copy; use as few GPUs a copy as it can be done with.
    "none":  a copy does not fit, not even cut over all GPUs.
    "model": a copy has to be cut, and only one copy fits on the GPUs.
    "both":  a copy has to be cut, and two or more copies fit on the GPUs.
    "data":  a copy fits on one GPU, and sharing the batch over all GPUs makes a step faster:
             the compute is divided by their number, the exchange comes on top.
    "one":   a copy fits on one GPU, and sharing the batch does not make a step faster.
    """
    ### BEGIN SOLUTION
    gpus_a_copy = math.ceil((job.state_bytes + job.sample_bytes) / job.gpu_bytes)
    if gpus_a_copy > job.gpus:
        return "none"
    if gpus_a_copy > 1:
        return "both" if job.gpus // gpus_a_copy >= 2 else "model"
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared < job.compute_seconds else "one"
    ### END SOLUTION


# %% nbgrader={"grade_id": "1.3-check", "grade": true, "points": 3, "locked": true}
check("1.3", decide)

# %% [markdown]
# If you are stuck, ask for a hint, as often as you like: `hint("1.3")`.
#
# ## 7. See it: a company with sliders
#
# Everything of section 3 in one picture. One shelf is the room that a page takes. A building stores
# its pages, as many shelves of notes, and for each item in work an eighth of a shelf a page. It has
# 16 shelves.

# %%
SHELVES, ITEM, PAGE = 16, 1 / 8, 4  # a page is as heavy on the road as four products


def storage(factories, buildings, batch, pages):
    """Returns the shelves that each building fills, by kind, in the order of the lanes."""
    return [
        {"parameters": part, "gradients": part, "activations": items * part * ITEM}
        for items in split(batch, factories)
        for part in split(pages, buildings)
    ]


# %%
from course_utils.lesson.explore import Explorer


def draw_company(factories, buildings, batch, pages, truck):
    company = (factories, buildings, batch, pages, truck, truck * PAGE)
    records = as_records(simulate(training_step(*company)), buildings)
    minutes, alone = step_minutes(*company), step_minutes(1, 1, batch, pages, 0, 0)
    names = [f"factory {f}, building {b}" for f in range(factories) for b in range(buildings)]
    ledgers = storage(factories, buildings, batch, pages)
    figure = ch01.company(records, names, ledgers, minutes, alone, SHELVES)
    idle = 1 - 3 * batch * pages / (factories * buildings * minutes)
    figure.suptitle(
        f"throughput {batch / minutes:.3f} items a minute     "
        f"latency {minutes:.0f} minutes a step     {idle:.0%} idle",
        weight="bold",
    )
    return figure


Explorer(
    draw_company,
    factories=(1, 4, 2),
    buildings=(1, 4, 2),
    batch=(4, 32, 16),
    pages=(2, 24, 10),
    truck=(0.0, 4.0, 1.0),
)

# %% [markdown]
# *Two factories of two buildings each, on a batch of 16. In each factory one building works while
# the other waits, so more than half of the time is idle; the step is still faster than one building
# alone, because there are two factories, and each building holds half of the pages.*
#
# Things to try, with a guess first:
#
# 1. Four factories of one building. No other four buildings are faster, but each of them is too full.
# 2. One factory of four buildings. Everything fits, and the step is slower than one building alone.
# 3. Two factories of one building, trucks of 4 minutes, 24 pages: the head office takes two fifths of
#    the step. Make the batch larger, and its share shrinks.
#
# The memory of the real runs of section 4, as each rank counted it at its last step:

# %%
ledgers = [ledger for results in (alone, copies, line) for *_, ledger in results]
names = ["one process", "copies, rank 0", "copies, rank 1", "line, rank 0", "line, rank 1"]
plots.memory(ledgers, names, title="Memory of a rank in training with SGD")
plt.show()
print("the two ranks of the line hold together what one process holds:", end=" ")
print(sum(ledgers[3].values()) + sum(ledgers[4].values()) == sum(ledgers[0].values()))

# %% [markdown]
# *Of parameters and gradients every copy stores as much as one process; the two ranks of the line share
# them out. Plain SGD has no state of its own. Activations are not in this picture: they follow the images,
# so a copy holds those of its own share.*

# %% [markdown]
# ## 8. On a cluster: fast roads inside a machine, slow roads between machines
#
# `copies_step` needs no change on a cluster: it asks for a process group, its size and a rank, and
# there `torchrun` provides them. (`line_step` is written for two ranks.) What you add is the frame:
#
# ```python
# # train.py, started on each of two machines by
# # torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT train.py
# dist.init_process_group("nccl")
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# train(dist.get_rank(), copies_step, images, labels)
# dist.destroy_process_group()
# ```
#
# What changes is the price of a truck. Inside a machine GPUs talk over links of their own; between
# machines they share the network, which is slower. So the way that moves more, or more often, stays
# inside: a model is cut over the GPUs of *one* machine first, and copies are made across machines.
# Chapter 7 does both at once, with a mesh of ranks that says which of them are neighbours.
#
# And for training, a line with the whole batch in one piece is a last resort. (To *use* a trained model
# that is too large for one GPU, people do run it so: `device_map="auto"` of the library accelerate.)
# Chapter 5 cuts the batch too, so that
# several pieces are under way and all buildings work: what your exercise 1.2 computes.

# %% [markdown]
# ## 9. Remember
#
# * Data parallelism copies the model and shares the batch; model parallelism cuts the model and
#   passes the whole batch through.
# * Copies hand over the size of the parameters once a step. A line hands over the activations of the
#   batch at every cut, forward, and their gradients back.
# * Copies make a step shorter, up to the largest share and the exchange. A line with the batch in one
#   piece makes room, not speed: of B buildings, at most one works.
# * Both end with the parameters of one process on the whole batch. If they do not, something is
#   wrong: unequal shares averaged as if equal, or a gradient that never travelled back.
# * Cut only what does not fit. Copy only where the compute that you save is more than the exchange.
#
# **Sources.** S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training*, VLDB 2020 (arXiv 2006.15704), section 2. D. Narayanan et al., *Efficient Large-Scale
# Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021 (arXiv 2104.04473), sections 2.2
# and 5. S. Rajbhandari et al., *ZeRO*, SC 2020 (arXiv 1910.02054), section 3.1. V. Korthikanti et
# al., *Reducing Activation Recomputation in Large Transformer Models*, 2022 (arXiv 2205.05198),
# equation 1. J. Kaplan et al., *Scaling Laws for Neural Language Models*, 2020 (arXiv 2001.08361),
# section 2.1. Sizes of the models: Devlin et al. 2019 (BERT), Radford et al. 2019 (GPT-2), Brown et
# al. 2020 (GPT-3), Grattafiori et al. 2024 (Llama 3). PyTorch documentation: *Distributed
# communication package*, section "Point-to-point communication"; *Pipeline Parallelism*.
