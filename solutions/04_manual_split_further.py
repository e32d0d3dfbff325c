# %% [markdown]
# # 4. Manual split, further: a model planned to the byte, and a cut on the clock
#
# The lesson cut small models. This notebook plans a large one to the byte, without a GPU, and shows what more stages
# change. It sends a stream of batches through two cuts and looks at the clock. Two exercises follow: a model to repair,
# and an experiment with three ways to choose a cut. You need no answer from the lesson.

# %% tags=["nbval-ignore-output"]
from collections.abc import Callable
from itertools import combinations, pairwise
from time import perf_counter

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch04 as figures
from course_utils.launch import launch
from course_utils.lesson import mnist, text
from course_utils.lesson.models import LanguageModel, uneven_line
from course_utils.lesson.predictions import compare
from course_utils.trace import kept_for_backward, memory_ledger

hardware.report()

# %% [markdown]
# ## 1. The factory: a plan before the first wall
#
# A hall that turns out too small has to be built again. So the factory draws a plan first: what each station keeps on
# its shelf until the change notes come back, what each building has to hold at the busiest hour, and how many pieces an
# hour the slowest building lets through.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | a plan on paper | a model on the device **meta** | shapes and types of all tensors, and no memory |
# | shelf | what autograd keeps for backward | the activations of a stage |
#
# ## 2. The smallest real run: a language model in two halves
#
# `LanguageModel` has the parts of the lesson's language model: tables, blocks, a norm and a head. Both halves are in
# this process, so that `kept_for_backward` can count what autograd keeps of each. The `clone`s are there because a
# batch that is a slice keeps the memory of the whole tensor from which it was cut.


# %%
class FirstHalf(nn.Module):
    """The tables and the first blocks of a LanguageModel."""

    def __init__(self, model, cut):
        super().__init__()
        self.token, self.position, self.blocks = model.token, model.position, model.blocks[:cut]

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


# %%
class SecondHalf(nn.Module):
    """The remaining blocks of a LanguageModel, its norm and its head."""

    def __init__(self, model, cut):
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[cut:], model.norm, model.head

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %%
SMALL = {"vocabulary": len(text.vocabulary()), "width": 64, "heads": 4, "layers": 4, "context": 32}
TEXTS = 16  # in a batch
tokens, next_tokens = text.windows(SMALL["context"], TEXTS, seed=0)


def halves_of(model):
    cut = len(model.blocks) // 2
    return FirstHalf(model, cut), SecondHalf(model, cut)


first, second = halves_of(LanguageModel(**SMALL))
with kept_for_backward(first) as kept_0:
    activations = first(tokens.clone())
arrived = activations.detach().requires_grad_()
with kept_for_backward(second) as kept_1:
    loss = cross_entropy(second(arrived).flatten(0, 1), next_tokens.clone().flatten())
loss.backward()
activations.backward(arrived.grad)
print(
    f"kept for backward: {kept_0.bytes:,} bytes in the first half, {kept_1.bytes:,} in the second"
)

# %% [markdown]
# ## 3. Predict, then measure: a model for two devices
#
# ### The planned model: 24 layers of width 2,048
#
# A widely read tutorial spreads a language model over two GPUs: 24 layers of width 2,048 with 16 heads, a vocabulary of
# 50,000, and a batch of 4 texts of 512 tokens. Take these sizes for a `LanguageModel`. A block of width $W$ has
# $4W^2 + 4W$ parameters in its attention, $8W^2 + 5W$ in its two linear layers and $4W$ in its two norms. The tables
# and the head have a row for each token or position.
#
# **Predict** the number of parameters, and how many GiB (2^30 bytes) they take in float32, with their gradients and
# Adam's state.

# %% tags=["prediction"]
predicted_plan = {"billions of parameters": 1.4, "GiB of model states": 21}

# %% [markdown]
# On the device meta a tensor has a shape but no memory, so any laptop can build the whole model, run a training step of
# each half, and count:

# %%
PLANNED = {"vocabulary": 50_000, "width": 2048, "heads": 16, "layers": 24, "context": 512}

with torch.device("meta"):
    planned = LanguageModel(**PLANNED)
    inputs = torch.empty(4, 512, dtype=torch.int64), torch.empty(4, 512, 2048)

ledgers = []
for half, batch in zip(halves_of(planned), inputs):
    optimizer = torch.optim.Adam(half.parameters())
    half(batch).sum().backward()
    optimizer.step()
    ledgers.append(memory_ledger(half, optimizer))


def states(ledger):
    """The bytes of parameters, gradients and optimizer state."""
    return ledger["parameters"] + ledger["gradients"] + ledger["optimizer"]


numbers = sum(p.numel() for p in planned.parameters())
measured = {
    "billions of parameters": round(numbers / 1e9, 1),
    "GiB of model states": round(sum(map(states, ledgers)) / 2**30),
}

# %%
compare(
    predicted_plan,
    measured,
    likely={
        "The parameters alone. Gradients take as much, and Adam's state twice as much.": {
            "GiB of model states": round(4 * numbers / 2**30)
        },
        "Adam keeps two numbers for each parameter, not one.": {
            "GiB of model states": round(12 * numbers / 2**30)
        },
    },
)

# %% [markdown]
# ### What autograd keeps
#
# On meta every address is 0, so `kept_for_backward` cannot tell which tensors share memory: activations need a
# formula. Walk through a block. With $N$ texts of $T$ tokens, autograd keeps tensors of $NTW$ numbers: the block's
# input, the norm's output, queries, keys and values (three), what the heads return, the sum after the attention, the
# second norm's output, and the activation function's input and output, four times as wide (eight). That is 16. Each
# norm also keeps a mean and a scale for each token, and the attention one number for each head and token. In bytes:
# $4NT\,(16W + 4 + \text{heads})$.

# %%
figures.kept_of_a_block()
plt.show()

# %% [markdown]
# *Each square is one tensor of NTW numbers. Half of them are the activation function's input and output.*


# %%
def stage_bytes(stage, vocabulary, width, heads, layers, context, texts):
    """The bytes of stage 0 or 1 of a language model that is cut in the middle, with Adam."""
    tokens, blocks = texts * context, layers // 2
    numbers, tensors = blocks * (12 * width**2 + 13 * width), 12 * blocks
    activations = blocks * 4 * tokens * (16 * width + 4 + heads)
    if stage == 0:
        numbers += (vocabulary + context) * width
        tensors += 2
        activations += 8 * tokens  # the token numbers, for the table's gradient
    else:
        numbers += 2 * width + vocabulary * width
        tensors += 3
        activations += 4 * tokens * (2 * width + 2) + 4 * tokens * vocabulary + 8 * tokens + 4
    return {
        "parameters": 4 * numbers,
        "gradients": 4 * numbers,
        "optimizer": 8 * numbers + 4 * tensors,  # and a step counter for each tensor
        "activations": activations,
    }


# %% [markdown]
# Is the formula right? Autograd's count tests it for the small model; the ledgers test all but activations for the
# planned one:

# %%
for stage, kept in enumerate((kept_0, kept_1)):
    formula = stage_bytes(stage, **SMALL, texts=TEXTS)["activations"]
    print(f"small model, stage {stage}: {kept.bytes:,} bytes kept, formula {formula:,}")

bars = [stage_bytes(stage, **PLANNED, texts=4) for stage in (0, 1)]
for stage, (ledger, bar) in enumerate(zip(ledgers, bars)):
    print(
        f"planned model, stage {stage}: {states(ledger):,} bytes of states, formula {states(bar):,}"
    )

# %%
both = {kind: sum(bar[kind] for bar in bars) for kind in bars[0]}
title = "Each half fits on a GPU of 24 GiB, the whole model does not (computed)"
plots.memory([*bars, both], ["stage 0", "stage 1", "both in one"], title)
plt.show()
print(f"a step sends {4 * 4 * 512 * 2048:,} bytes in each direction")

# %% [markdown]
# *The whole model needs 27.5 GiB, each half less than 14 GiB. Most of it goes to the parameters, their gradients and
# the optimizer's state.*
#
# Compare the last line with the bars: 16 MiB cross the cut in each direction, while data parallelism would send the
# gradients of all parameters, 5.3 GiB, in each step. The 16 MiB are for 2,048 tokens. They grow with the tokens of a
# step, and gradients do not: at about 690,000 tokens the two are equal, and large runs have more.
#
# The bars add up all four kinds. During backward, activations are freed as gradients appear, so the two are never in
# memory in full together. On the other hand, single operations need temporary memory, and on a GPU the allocator and
# the libraries come on top.
#
# In float32 a parameter costs 4 bytes, its gradient 4 and Adam's averages 8, together 16. With the usual mixed
# precision it is 16 again: 2, 2, and 12 for the optimizer, which also keeps the parameters in float32 ([Rajbhandari et
# al. 2019](https://arxiv.org/abs/1910.02054), section 3.1). If the gradients are kept in float32 too, it is 18. So 16
# bits make activations and messages smaller, but not this sum.
#
# The tutorial's own model is smaller than the planned one. Its blocks are
# [`nn.TransformerEncoderLayer`](https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html),
# which is 2,048 wide inside unless you ask for more, and the model has no table of positions.

# %% [markdown]
# ## 4. By hand, then on the clock: a stream through two cuts
#
# The lesson counted operations, and found the best cut of an uneven line after station 2. Now a stream of eight batches
# goes through two ranks, forward only, with that cut and with the one in the middle. Here is the count again, with the
# search that tries all cuts:

# %%
from torch.utils.flop_counter import FlopCounterMode

images, _ = mnist.tensors(train=True, limit=16)


def operations_of(line, items):
    """Multiplications and additions of each station's forward pass, in millions."""
    counts = []
    for station in line:
        with FlopCounterMode(display=False) as counter:
            items = station(items)
        counts.append(counter.get_total_flops() / 1e6)
    return counts


# %%
def stage_work(work, cuts):
    """The work of each stage; a cut is the number of stations before it."""
    return [sum(work[a:b]) for a, b in pairwise((0, *cuts, len(work)))]


def try_all_cuts(work, stages):
    """The cuts with the least work in the fullest stage."""
    every = combinations(range(1, len(work)), stages - 1)
    return min(every, key=lambda cuts: max(stage_work(work, cuts)))


work = operations_of(uneven_line(), images)
middle, best = (4,), try_all_cuts(work, 2)
pace = [sum(work) + 7 * max(stage_work(work, cuts)) for cuts in (middle, best)]
print(f"by the count, the best cut takes {pace[1] / pace[0]:.2f} of the time of the middle one")

# %% [markdown]
# The count uses the lesson's formula: the sum of all stages, plus seven times the slowest. On the clock, the fastest of
# a few rounds is the one that other programs disturbed least. `isend` hands the activations over and goes on at once.


# %%
def seconds_of_stream(rank, cut, batches=8, rounds=4):
    """The time of a stream of batches through two stages, in the fastest round."""
    torch.set_num_threads(1)
    line = uneven_line().requires_grad_(False).to(hardware.device())
    stage = line[:cut] if rank == 0 else line[cut:]
    inputs, seconds = images.to(hardware.device()), []
    arriving = line[:cut](inputs)  # for its shape
    for _ in range(rounds):
        in_flight = []
        dist.barrier()
        begin = perf_counter()
        for _ in range(batches):
            if rank == 0:
                activations = stage(inputs)
                in_flight.append((activations, dist.isend(activations, dst=1)))
            else:
                dist.recv(arriving, src=0)
                stage(arriving)
        for _, message in in_flight:
            message.wait()
        dist.barrier()
        seconds.append(perf_counter() - begin)
    return min(seconds)


# %% [markdown]
# The last line of the next cell cuts by measured times instead of the counted work. On your machine it may be another
# cut: ReLU and pooling layers take time, and the count leaves them out. The count holds on every machine, the times on
# yours only.


# %%
def seconds_of(line, items, rounds=5):
    """The fastest of a few forward passes of each station."""
    times = []
    for station in line:
        clock = [perf_counter()]
        for _ in range(rounds):
            result = station(items)
            clock.append(perf_counter())
        times.append(min(b - a for a, b in pairwise(clock)))
        items = result
    return times


# %% tags=["nbval-ignore-output"]
ends = [max(launch(seconds_of_stream, 2, cut)) for (cut,) in (middle, best)]
print(f"measured: the best cut takes {ends[1] / ends[0]:.2f} of the time of the middle one")
times = seconds_of(uneven_line().requires_grad_(False), images)
print("shares of the time:", ", ".join(f"{share / sum(times):.0%}" for share in times))
print("best cut by time: after station", try_all_cuts(times, 2)[0])

# %% [markdown]
# ## 5. Break it: a model that was wrong before the cut
#
# ### Bug hunt: a language model that cannot read
#
# The tutorial of section 3 builds its layers as `nn.TransformerEncoderLayer(d_model=..., nhead=...)` and feeds them
# tokens of shape (4 texts, 512 tokens). It runs, and the output has the right shape. Here is a small version. Which
# tokens does a score depend on?


# %%
class TutorialModel(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.token_embedding = nn.Embedding(50, 16)
        layers = (nn.TransformerEncoderLayer(16, 2, dropout=0.0, **options) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.output_layer = nn.Linear(16, 50)

    def forward(self, x, **options):
        x = self.token_embedding(x)
        for layer in self.layers:
            x = layer(x, **options)
        return self.output_layer(x)


# %%
def what_it_reads(model, **options):
    """Changes token 3 of text 0, and says at how many places the scores change."""
    texts = torch.arange(4 * 8).view(4, 8)
    other = texts.clone()
    other[0, 3] = 49
    changed = ((model(texts, **options) - model(other, **options)).abs() > 1e-6).any(dim=-1)
    later, earlier, others = changed[0, 4:], changed[0, :3], changed[1:]
    for name, places in (("later", later), ("earlier", earlier), ("other texts'", others)):
        print(f"  {name} places: {places.sum().item()} of {places.numel()}")


print("as in the tutorial, the changed token changes")
what_it_reads(TutorialModel())

mask = nn.Transformer.generate_square_subsequent_mask(8)
print("with batch_first=True and a causal mask it changes")
what_it_reads(TutorialModel(batch_first=True), src_mask=mask, is_causal=True)

# %% [markdown]
# By default the layer expects (tokens, texts). With (texts, tokens) the texts of a batch look at each other, place by
# place, and no place ever sees what was written before it. The repair has two parts: `batch_first=True`, and a **causal
# mask**, without which a place would also see the tokens that it has to predict. The cut is not to blame here, so test
# a model on one device first.

# %% [markdown]
# ## 6. Exercises: repair, and compare
#
# In 4.4 you repair a model. 4.5 is an experiment with three ways to choose a cut.
#
# To see what you move where, a check needs a second device. Without a GPU it takes PyTorch's meta device.

# %% [markdown]
# ### 4.4 Repair the convolutional model (2 points)
#
# You will find models like this one in articles about cutting a model by hand, each with some of its mistakes. It does
# not run. Read it, and write a model of the same architecture that works. Six things are wrong or too narrow.
#
# ```python
# class ConvNet(nn.Module):
#     def __init__(self):
#         self.part1 = nn.Sequential(
#             nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3),
#             nn.ReLU(),
#             nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
#             nn.Linear(1024, 512),
#         ).to("cuda:0")
#         self.part2 = nn.Sequential(
#             nn.ReLU(),
#             nn.Linear(512, 256),
#             nn.ReLU(),
#             nn.Linear(256, 10),
#         ).to("cuda:1")
#
#     def forward(x):
#         x = self.part1(x)
#         x = x.to("cuda:1")
#         return self.part2(x)
# ```
#
# Three of them give these messages: `cannot assign module before Module.__init__() call`,
# `takes 1 positional argument but 2 were given`, and `mat1 and mat2 shapes cannot be multiplied`.
#
# A convolution or pooling with kernel k, stride s and padding p turns a height of h into
# floor((h + 2p - k) / s) + 1.


# %% nbgrader={"grade_id": "4.4", "solution": true}
class RepairedConvNet(nn.Module):
    """The model above, for images of any size, in two parts on the two `devices`.

    `image_size` is (height, width) in pixels. `part1` reaches up to the first linear layer and is
    on `devices[0]`; the rest is `part2`, on `devices[1]`. The layers and their order are those of
    the model above; the first linear layer takes all that pooling leaves of an image. All
    parameters exist after construction, so that an optimizer can be built.

    Called with images (N, 3, height, width) on any device, it returns the logits (N, 10) on
    `devices[1]`.
    """

    def __init__(self, image_size: tuple[int, int], devices: list[torch.device]) -> None:
        ### BEGIN SOLUTION
        super().__init__()
        self.devices = devices
        see = nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten()
        with torch.no_grad():
            seen = nn.Sequential(*see)(torch.zeros(1, 3, *image_size))
        self.part1 = nn.Sequential(*see, nn.Linear(seen.shape[1], 512)).to(devices[0])
        classify = nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
        self.part2 = nn.Sequential(*classify).to(devices[1])
        ### END SOLUTION

    def forward(self, images: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        first, second = self.devices
        return self.part2(self.part1(images.to(first)).to(second))
        ### END SOLUTION


# %% nbgrader={"grade_id": "4.4-check", "grade": true, "points": 2, "locked": true}
check("4.4", RepairedConvNet)

# %% [markdown]
# ### 4.5 An experiment: three strategies (3 points)
#
# Some people cut by the number of layers, some by the number of parameters, some by time. Compare the three. The first
# step is a table that you can trust; the check compares it to the byte.
#
# Each layer's time is measured before and comes in as a list, so the table depends on its inputs only.
# `cut(costs, stages)` returns the best cuts in the form of exercise 4.3: your `balanced_cuts`, or `try_all_cuts` from
# section 4.
#
# To run a stage alone, feed it what arrives there: the output of the stage before it, detached. It comes over a cut, so
# it has to require a gradient if it is floating point. Otherwise autograd keeps less than it does in training.
# `kept_for_backward` counts what a forward pass keeps:
#
# ```python
# with kept_for_backward(stage) as kept:
#     outputs = stage(arriving)
# kept.bytes
# ```


# %% nbgrader={"grade_id": "4.5", "solution": true}
def compare_cuts(
    layers: nn.Sequential,
    inputs: Tensor,
    seconds: list[float],
    stages: int,
    cut: Callable[[list[float], int], list[int]],
) -> dict[str, dict]:
    """Returns a table of three ways to cut `layers` into `stages` consecutive stages.

    `seconds` is each layer's time for forward and backward. `inputs` is the batch that enters the
    first layer. The keys of the result are the strategies:

        "equal layers"      as many layers each; where that does not divide, the first stages have
                            one more (as `torch.tensor_split` does)
        "equal parameters"  what `cut` returns for the number of parameters of each layer, frozen
                            ones included
        "profiled time"     what `cut` returns for `seconds`

    Each row is a dict:

        "cuts"     the indices of the layers before which the chain is cut
        "memory"   for each stage, the bytes of its parameters, buffers, gradients and of what it
                   keeps for backward of this batch. A parameter that a stage uses twice counts
                   once, and so does a tensor that two layers keep; a frozen one has no gradient.
                   What comes over a cut requires a gradient. The layers stay in their mode. The
                   optimizer is plain SGD and keeps nothing.
        "slowest"  the seconds of the slowest stage
        "idle"     the share of all stages' time that is idle when batches follow each other
                   without a gap: a stage works its own seconds in every `slowest` seconds
    """

    ### BEGIN SOLUTION
    def memory_of(parts: list[nn.Sequential]) -> list[int]:
        result, arriving = [], inputs
        for part in parts:
            with kept_for_backward(part) as kept:
                outputs = part(arriving)
            held = [*part.parameters(), *part.buffers()]
            gradients = [p for p in part.parameters() if p.requires_grad]
            result.append(kept.bytes + sum(tensor.nbytes for tensor in held + gradients))
            arriving = outputs.detach().requires_grad_(outputs.is_floating_point())
        return result

    def row(cuts: list[int]) -> dict:
        spans = [slice(*span) for span in pairwise([0, *cuts, len(layers)])]
        times = [sum(seconds[span]) for span in spans]
        return {
            "cuts": cuts,
            "memory": memory_of([layers[span] for span in spans]),
            "slowest": max(times),
            "idle": 1 - sum(times) / (stages * max(times)),
        }

    numbers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    size, longer = divmod(len(layers), stages)
    return {
        "equal layers": row([i * size + min(i, longer) for i in range(1, stages)]),
        "equal parameters": row(cut(numbers, stages)),
        "profiled time": row(cut(seconds, stages)),
    }
    ### END SOLUTION


def conclusion() -> str:
    """Returns what you conclude from the experiment that follows the check. Nothing checks it."""
    ### BEGIN SOLUTION
    return (
        "The profile has the fastest slowest stage: with two stages 0.67 of the operations that\n"
        "equal layers give it, and 0.66 of those that equal parameters give. Equal parameters are\n"
        "worst in both respects: the layers with most parameters have little work and keep little\n"
        "for backward, so with 2, 3 and 4 stages this cut also has the largest stage in memory.\n"
        "Where memory is short I would take the profile for two stages, since its fuller stage is\n"
        "the smallest there too, and equal layers for three or four. They cost a quarter more\n"
        "time with three stages and nearly none with four, where station 2 alone sets the pace."
    )
    ### END SOLUTION


# %% nbgrader={"grade_id": "4.5-check", "grade": true, "points": 3, "locked": true}
check("4.5", compare_cuts)

# %% [markdown]
# Now comes the experiment itself. It has no single right answer, so nothing checks it. As soon as your `compare_cuts`
# is written, the next cells give it `uneven_line()` from section 4, for 2, 3 and 4 stages, and draw its tables. The
# counted operations stand for the seconds, so that you get the same picture on every machine.
#
# 1. **Predict** first: which strategy has the fastest slowest stage, and which has the largest
#    stage in memory?
# 2. Run the cells. Then add your own: `seconds_of` instead of the count, or better a profile with
#    backward, or a model of your own.
# 3. Return your conclusion from `conclusion`, in a few sentences. Which strategy won, and by how
#    much? Which would you take where memory is short, and why?


# %%
def if_written(answer, *inputs):
    """What `answer` returns; None while it is not written, and where it does not work yet."""
    try:
        return answer(*inputs)
    except NotImplementedError:
        return None
    except Exception as error:  # noqa: BLE001 - a half-written answer may raise anything
        print(f"not yet ({type(error).__name__}: {error}): check your answer first")
        return None


# %%
def experiment():
    """Prints your tables, draws them and returns them, by the number of stages."""
    tables = {}
    for stages in (2, 3, 4):
        tables[stages] = compare_cuts(uneven_line(), images, work, stages, try_all_cuts)
        for strategy, found in tables[stages].items():
            print(
                f"{stages} stages, {strategy:16}  slowest {found['slowest'] / sum(work):4.0%} of work, "
                f"idle {found['idle']:3.0%}, largest {max(found['memory']):>10,} bytes"
            )
    figures.strategies(tables, lambda cuts: stage_work(work, cuts))
    plt.show()
    return tables


tables = if_written(experiment) or {}
if not tables:
    print("no tables yet: they come with a compare_cuts that passes its check")

# %% [markdown]
# *Once you have tables, each strategy has a group of bars, and each stage a bar, the first on the left. Above, the
# highest bar of a group says how much memory the fullest device needs. Below, it sets the pace of the line.*
#
# Now the clock: the stream of eight batches from section 4 goes through two ranks, with each strategy's cut for two
# stages.


# %% tags=["nbval-ignore-output"]
def clock():
    ends = {
        strategy: max(launch(seconds_of_stream, 2, found["cuts"][0]))
        for strategy, found in tables.get(2, {}).items()
    }
    for strategy, end in ends.items():
        print(f"{strategy}: {end / ends['equal layers']:.2f} of the time of equal layers")


if_written(clock)

# %%
print(if_written(conclusion) or "no conclusion yet: write it into the function `conclusion`")

# %% [markdown]
# ## 7. See it: what more stages buy
#
# More stages need less memory each, and wait longer. The figure shows the planned model of section 3 with its 24 blocks
# shared out evenly over 1 to 24 stages.


# %%
def fullest_stage(stages):
    """The bytes of the fullest stage of the planned model, which is the first or the last."""
    ends = [stage_bytes(stage, **PLANNED | {"layers": 48 // stages}, texts=4) for stage in (0, 1)]
    return max(ends, key=lambda kinds: sum(kinds.values()))


counts = [1, 2, 3, 4, 6, 8, 12, 24]
fullest = [both, *map(fullest_stage, counts[1:])]
figures.fullest(counts, fullest)
plt.show()
for stages, kinds in zip(counts, fullest):
    total = plots.human_bytes(sum(kinds.values()))
    print(f"stages {stages:2}: {total:>9}, idle {1 - 1 / stages:.0%}")

# %% [markdown]
# *The memory of a stage falls almost in proportion at first. Later the tables and the head, at the two ends, remain.
# The price is on the right: with one batch at a time, all but one stage are idle.*

# %% [markdown]
# ## 8. On a cluster
#
# Build the model on meta on every rank, and give memory to the rank's stage only (`to_empty`, then initial values or
# a checkpoint). So no process ever holds the whole model, and the plan is also the test: `memory_ledger` of the stage
# has to say what the plan said. Profile on one device of the cluster's kind. The counted operations choose the cut,
# and the clock confirms it.
#
# ## 9. Remember
#
# 1. Memory is arithmetic: shapes for parameters, sixteen tensors of NTW numbers for a block, and a test with a model so
#    small that it can be counted to the byte.
# 2. More stages need less memory each, until the tables and the head at the two ends are left.
# 3. Choose a cut by a count or a profile, and test it with a stream on the clock.
# 4. A model that runs and returns the right shape may still be wrong. Ask which input changes which output, on one
#    device, before you cut.
#
# **Sources**
#
# * V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4, what
#   a block keeps for backward.
# * S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2019, [arXiv
#   1910.02054](https://arxiv.org/abs/1910.02054): section 3.1, bytes of a parameter in mixed precision.
# * PyTorch: [meta device](https://docs.pytorch.org/docs/stable/meta.html), [hooks for saved
#   tensors](https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks).
