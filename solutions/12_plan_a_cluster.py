# %% [markdown]
# # 12. Plan a cluster

# %%
from course_utils.estimate import Call, Hardware, Layout, Model

# %% [markdown]
# ## 6. Exercises: hold, send, time, search
#
# Now you write the arithmetic, for plain transformers: an MLP of 4 W with two matrices, as many KV heads as heads, and
# stages with equally many layers. Biases and norms are left out. The records `Model`, `Layout` and `Hardware` are there to be
# read; the functions of `course_utils.estimate` are what you replace, so they are forbidden in your answers.

# %%
from collections.abc import Callable

from course_utils.checks import check, hint
from course_utils.estimate import Call

# %% [markdown]
# ### 12.1 What a rank holds (3 points)
#
# The arithmetic of section 3, for any stage and any ZeRO. A table is a matrix of V x W: the embedding is on the first stage, the
# output layer on the last. A tied output layer on the same stage is the embedding itself, and on another stage a copy.


# %% nbgrader={"grade_id": "12.1", "solution": true}
def memory_of(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    """Returns the bytes that a rank of `stage` holds, by "parameters", "gradients", "optimizer", "activations".

    12 W^2 parameters a layer, and the tables; tensor ranks share out all of them. A parameter and a
    gradient have 2 bytes, Adam's state with its float32 copy has 12; dp ranks share out what
    `layout.zero` says (1 to 3). A layer keeps of a micro-batch of b sequences
    s b (34 W + 5 a s) / t bytes with recompute "none", 34 s b W / t with "selective", 2 s b W with
    "full" (a heads, t tensor ranks, sequence parallelism). Under 1F1B, stage r of p has min(m, p - r)
    of its m micro-batches in flight.
    """
    ### BEGIN SOLUTION
    layers, last = model.layers // layout.pp, layout.pp - 1
    tables = int(stage == 0) + int(stage == last)
    if last == 0 and model.tied:
        tables = 1
    count = (12 * layers * model.width**2 + tables * model.vocab * model.width) / layout.tp
    held = {"optimizer": 12 * count, "gradients": 2 * count, "parameters": 2 * count}
    for kind in list(held)[: layout.zero]:
        held[kind] /= layout.dp
    tokens = seq * layout.micro_batch
    inside = 34 * model.width + (5 * model.heads * seq if layout.recompute == "none" else 0)
    kept = 2 * tokens * model.width if layout.recompute == "full" else tokens * inside / layout.tp
    return held | {"activations": layers * kept * min(layout.micro_batches, layout.pp - stage)}
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.1-check", "grade": true, "points": 3, "locked": true}
check("12.1", memory_of)

# %% [markdown]
# ### 12.2 What a rank sends (3 points)
#
# Numbers of 2 bytes, collectives on a ring. Only the layers count here, and neither the tables nor the loss.


# %% nbgrader={"grade_id": "12.2", "solution": true}
def traffic_of(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    """Returns the bytes that a rank of `stage` sends in one step to its groups "tp", "pp" and "dp".

    Tensor ranks: a layer has two all-gathers and two reduce-scatters of s b W numbers in each pass,
    forward and backward; with recompute "full" the forward pass runs twice. Stages: for each
    micro-batch a tensor rank's part of s b W numbers to the next stage, and their gradients to the
    one before. Data ranks, of 12 W^2 / t numbers a layer: an all-reduce of the gradients, once a step,
    or with ZeRO 1 and 2 its two halves. With ZeRO 3, which comes with pp = 1 only, a reduce-scatter of the
    gradients once a step, and an all-gather of the parameters before every forward and every backward
    pass of a micro-batch (one that recomputes included).
    """
    ### BEGIN SOLUTION
    t, d, m = layout.tp, layout.dp, layout.micro_batches
    layers = model.layers // layout.pp
    hidden = 2 * seq * layout.micro_batch * model.width
    collectives = 12 if layout.recompute == "full" else 8
    neighbours = (stage > 0) + (stage < layout.pp - 1)
    rounds = 1 + 2 * m if layout.zero == 3 else 2
    weights = 2 * layers * 12 * model.width**2 / t
    return {
        "tp": m * layers * collectives * hidden * (t - 1) / t,
        "pp": m * neighbours * hidden / t,
        "dp": rounds * weights * (d - 1) / d,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.2-check", "grade": true, "points": 3, "locked": true}
check("12.2", traffic_of)

# %% [markdown]
# ### 12.3 How long a step takes (3 points)
#
# Two models in one. The **roofline** says that a kernel takes as long as its FLOPs or as its bytes, whichever is longer
# ([Williams et al. 2009](https://doi.org/10.1145/1498765.1498785)). **Alpha-beta** says that a message takes a latency and its
# bytes over a bandwidth ([Hockney 1994](https://doi.org/10.1016/S0167-8191%2806%2980021-9)). What goes on at the same time is a maximum, what waits
# for each other is a sum. That is most of the art.


# %% nbgrader={"grade_id": "12.3", "solution": true}
def step_time_of(
    kernels: list[tuple[float, float]],
    calls: list[Call],
    layout: Layout,
    bubble: float,
    hardware: Hardware,
) -> float:
    """Returns the seconds of a rank's step.

    `kernels` are (FLOPs, bytes that it reads and writes), one after the other. A `Call` has a group
    ("tp", "cp", "dp", "pp"), an op, a payload in bytes, and how many `calls` of it there are. A ring of n
    ranks takes n - 1 rounds for "all_gather" and "reduce_scatter" and 2 (n - 1) for "all_reduce";
    a round takes a latency and payload / n over a bandwidth. A "send" is one round with all of its
    payload. A group lies inside a node if its size times those of the groups before it in
    `layout.order` (innermost first) is at most `hardware.node`. The calls of "dp" go on beside all
    the rest; kernels and the other calls wait for each other, and fill 1 - `bubble` of the pipeline's time.
    """
    ### BEGIN SOLUTION
    waiting, beside = 0.0, 0.0
    for flops, moved in kernels:
        waiting += max(flops / hardware.peak, moved / hardware.hbm_bandwidth)
    for call in calls:
        n, reach = getattr(layout, call.group), 1
        for name in layout.order[: layout.order.index(call.group) + 1]:
            reach *= getattr(layout, name)
        alpha, beta = hardware.intra_latency, 1 / hardware.intra_bandwidth
        if reach > hardware.node:
            alpha, beta = hardware.inter_latency, 1 / hardware.inter_bandwidth
        rounds, piece = (2 if call.op == "all_reduce" else 1) * (n - 1), call.payload / n
        if call.op == "send":
            rounds, piece = 1, call.payload
        seconds = call.calls * rounds * (alpha + beta * piece)
        if call.group == "dp":
            beside += seconds
        else:
            waiting += seconds
    return max(waiting / (1 - bubble), beside)
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.3-check", "grade": true, "points": 3, "locked": true}
check("12.3", step_time_of)

# %% [markdown]
# ### 12.4 Search (4 points)
#
# The question of the chapter: N GPUs, a model, a batch. Your answer gets a **judge**, a function that tells what a layout needs. It
# computes, and asks no questions: also for a layout that splits a head in two. What is legal is your business. The check takes
# clusters that it draws, and accepts a plan whose **regret** is at most 10 %: the share by which the step is longer than with the best one.


# %% nbgrader={"grade_id": "12.4", "solution": true}
def search(
    model: Model,
    gpus: int,
    batch: int,
    seq: int,
    hardware: Hardware,
    judge: Callable[[Layout], tuple[float, float]],
) -> Layout:
    """Returns the fastest legal layout, of several that are equally fast any one.

    `judge(layout)` gives (bytes of the fullest rank, seconds of a step of `batch` sequences). To be
    chosen are dp, tp, pp, zero (0 to 3), micro_batch, micro_batches and recompute; the rest of
    `Layout` stays as it is. Legal: dp tp pp = gpus; dp micro_batch micro_batches = batch; tp divides
    the heads and the sequence, pp the layers; zero 3 with pp = 1 only; the bytes are at most
    `hardware.hbm_bytes`. Raises ValueError, with a sentence, where no layout is legal.
    """
    ### BEGIN SOLUTION
    best, fastest = None, float("inf")
    for tp in range(1, gpus + 1):
        for pp in range(1, gpus // tp + 1):
            dp, left = divmod(gpus, tp * pp)
            if left or batch % dp or model.heads % tp or seq % tp or model.layers % pp:
                continue
            for micro_batch in range(1, batch // dp + 1):
                micro_batches, left = divmod(batch // dp, micro_batch)
                for zero in range(0 if left else 4 if pp == 1 else 3):
                    for recompute in ("none", "selective", "full"):
                        sizes = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "recompute": recompute}
                        layout = Layout(
                            **sizes, micro_batch=micro_batch, micro_batches=micro_batches
                        )
                        held, seconds = judge(layout)
                        if held <= hardware.hbm_bytes and seconds < fastest:
                            best, fastest = layout, seconds
    if best is None:
        raise ValueError(f"No layout of {gpus} GPUs is legal and fits.")
    return best
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.4-check", "grade": true, "points": 4, "locked": true}
check("12.4", search)
