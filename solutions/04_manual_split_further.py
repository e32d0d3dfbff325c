# %% [markdown]
# # 4. Manual split, further: a model planned to the byte, and a cut on the clock
#
# The lesson cut small models. This notebook plans a large one, with 1.4 billion parameters, to the byte and without a GPU,
# and says how many stages it needs. It sends a stream of batches through two cuts and looks at the clock. It takes
# apart three classes from the web that look cut and are not right. And it has two exercises: a model to repair, and an
# experiment with three strategies.
#
# None of it needs an answer of the lesson.

# %% tags=["nbval-ignore-output"]
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.launch import launch
from course_utils.lesson.predictions import compare

hardware.report()

# %% [markdown]
# ## 1. The factory: a plan before the first wall
#
# Nobody builds two halls and then looks whether the machines fit in. The factory draws a plan: what each station
# keeps on its shelves, what each building has to hold at the busiest hour, and how many items an hour the slowest building
# lets through. The plan costs paper. A hall that turns out too small costs a hall.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | a plan on paper | a model on the device **meta** | shapes and types of all tensors, and no memory |
# | what a station keeps until the notes come back | what autograd keeps for backward | the activations of a stage |
# | the fullest building | the stage with most memory | what has to fit on a device |
# | the slowest building | the stage with most work | what sets the pace |
#
# ## 2. The smallest real run: a language model in two halves
#
# The two halves of the lesson's language model, both in this process and on the CPU, so that you can count what
# autograd keeps of each: `kept_for_backward` does. The `clone`s have a reason: a batch that is a slice
# keeps the memory of the whole tensor it was cut from.

# %%
from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel
from course_utils.trace import kept_for_backward, memory_ledger


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
SENTENCES = 16  # in a batch
tokens, next_tokens = text.windows(SMALL["context"], SENTENCES, seed=0)


def halves_of(model):
    blocks = len(model.blocks)
    return FirstHalf(model, blocks // 2), SecondHalf(model, blocks // 2)


halves = halves_of(LanguageModel(**SMALL))
with kept_for_backward(halves[0]) as kept_0:
    products = halves[0](tokens.clone())
arrived = products.detach().requires_grad_()
with kept_for_backward(halves[1]) as kept_1:
    loss = cross_entropy(halves[1](arrived).flatten(0, 1), next_tokens.clone().flatten())
loss.backward()
products.backward(arrived.grad)
print(f"kept for backward: {kept_0.bytes:,} bytes in building 0, {kept_1.bytes:,} in building 1")

# %% [markdown]
# ## 3. Predict, then measure: a model for two devices
#
# ### The planned model: 24 layers of width 2,048
#
# How would it be with a model that needs two devices? The web article *PyTorch Model Parallelism* cuts
# a language model with 24 layers, width 2,048, 16 heads and a vocabulary of 50,000 over two GPUs,
# for 4 texts of 512 tokens. You take these sizes for the `LanguageModel` of section 2. The article's
# own model is smaller, as you will count: inside, its layers are not four times as wide, and it has
# no positions and no last norm. You need no GPU to say what each device has to hold.
#
# For the parameters of a block of width $W$, add up the shapes: $4W^2 + 4W$ for the attention,
# $8W^2 + 5W$ for the two linear layers, $4W$ for the two norms. The tables and the head have a row
# for each token or position.
#
# For the activations of a block, walk through it. With $N$ texts of $T$ tokens, autograd keeps
# tensors of $NTW$ numbers: the block's input, the norm's output, queries, keys and values (three),
# what the heads return, the sum after the attention, the second norm's output, and both sides of
# the activation function, four times as wide (eight). That is 16. Each norm keeps a mean and a
# scale for each token, and the attention one number for each head and token. Together
# $4NT\,(16W + 4 + \text{heads})$ bytes.


# %%
from course_utils.figures import ch04 as figures

figures.kept_of_a_block()
plt.show()

# %% [markdown]
# *The sixteen tensors of a block, in the order of its way. Each square is one tensor of NTW numbers. Half of
# them stand at the two sides of the activation function.*


# %%
def stage_bytes(stage, vocabulary, width, heads, layers, context, texts):
    """Predicts the bytes of stage 0 or 1 of a language model cut in the middle, with Adam."""
    N_T, blocks = texts * context, layers // 2
    numbers, tensors = blocks * (12 * width**2 + 13 * width), 12 * blocks
    activations = blocks * 4 * N_T * (16 * width + 4 + heads)
    if stage == 0:
        numbers += (vocabulary + context) * width
        tensors += 2
        activations += 8 * N_T  # the token numbers, for the table's gradient
    else:
        numbers += 2 * width + vocabulary * width
        tensors += 3
        activations += 4 * N_T * (2 * width + 2) + 4 * N_T * vocabulary + 8 * N_T + 4  # norm, loss
    return {
        "parameters": 4 * numbers,
        "gradients": 4 * numbers,
        "optimizer": 8 * numbers + 4 * tensors,
        "activations": activations,
    }


# %% [markdown]
# First the test: is the formula right for the small model of section 2, to the byte?

# %%
for stage, (half, kept) in enumerate(zip(halves, (kept_0, kept_1))):
    optimizer = torch.optim.Adam(half.parameters())
    optimizer.step()
    ledger = memory_ledger(half, optimizer) | {"activations": kept.bytes}
    print(f"small model, building {stage}")
    compare(stage_bytes(stage, **SMALL, texts=SENTENCES), ledger)

# %% [markdown]
# Now the large one. **Predict** how many parameters it has, in whole millions, and how many gibibytes (2^30 bytes)
# both halves hold together with Adam, rounded: parameters, gradients, optimizer, activations. How much of that is
# the activations' part?

# %% tags=["prediction"]
predicted_plan = {
    "parameters, in millions": 1414,
    "GiB in all": 27,
    "GiB of activations": 6,
}

# %% [markdown]
# On the device **meta** a tensor has a shape and a type, but no memory. So you
# can build the whole model on any laptop, run a training step of each half, and count. (Only the
# activations are the formula's: on meta no storage can be told from another.)

# %%
PLANNED = {"vocabulary": 50_000, "width": 2048, "heads": 16, "layers": 24, "context": 512}

with torch.device("meta"):
    planned = LanguageModel(**PLANNED)
    inputs = torch.empty(4, 512, dtype=torch.int64), torch.empty(4, 512, 2048)

planned_ledgers = []
for stage, half in enumerate(halves_of(planned)):
    optimizer = torch.optim.Adam(half.parameters())
    half(inputs[stage]).sum().backward()
    optimizer.step()
    predicted = stage_bytes(stage, **PLANNED, texts=4)
    ledger = memory_ledger(half, optimizer) | {"activations": predicted["activations"]}
    planned_ledgers.append({kind: ledger[kind] for kind in predicted})
    print(f"planned model, building {stage}: the rest as predicted:", ledger | predicted == ledger)


# %%
def added(ledgers):
    return {kind: sum(ledger[kind] for ledger in ledgers) for kind in ledgers[0]}


bars = [*planned_ledgers, added(planned_ledgers)]
numbers = sum(p.numel() for p in planned.parameters())
compare(
    predicted_plan,
    {
        "parameters, in millions": round(numbers / 1e6),
        "GiB in all": round(sum(bars[-1].values()) / 2**30),
        "GiB of activations": round(bars[-1]["activations"] / 2**30),
    },
    {
        "The parameters alone: gradients take as much, Adam twice as much, and activations come on top.": {
            "GiB in all": round(4 * numbers / 2**30)
        },
        "Without the activations.": {"GiB in all": round(16 * numbers / 2**30)},
    },
)
print(f"{numbers:,} parameters")

# %%
plots.memory(bars, ["building 0", "building 1", "both in one"], "The planned model (computed)")
plt.show()
for name, ledger in zip(("building 0", "building 1", "both in one"), bars):
    print(f"{name}: {sum(ledger.values()):,} bytes")
print(f"a step sends {4 * 4 * 512 * 2048:,} bytes there and as many back")

# %% [markdown]
# *The whole model needs 27.5 GiB and would not fit on a GPU with 24 GiB. Each half needs less than
# 14 GiB and fits. Most of it is the optimizer's, the gradients' and the parameters' share.*
#
# Compare the last line with the bars: 16 MiB cross the yard in each direction, while data
# parallelism would hand over the gradients of all 1.4 billion parameters, 5.3 GiB, in each step. That is
# for 2,048 tokens. Activations grow with the tokens of a step, gradients do not: at some 690,000 tokens
# the two are equal, and large runs have more.
#
# The bars add up all four kinds. In a step the activations go as the gradients come, so the two are
# never there in full together. On the other hand, single operations need room in between, and on a
# GPU the allocator and the libraries come on top.
#
# All this is in float32: 4 bytes of parameters, 4 of gradients and 8 of Adam's averages, 16 for each parameter. With
# the usual mixed precision it is 16 again: 2 and 2, and 12 for the optimizer, which keeps a copy of the parameters in
# float32 beside its averages ([Rajbhandari et al. 2019](https://arxiv.org/abs/1910.02054), section 3.1). Whoever keeps
# gradients in float32 too has 18. So 16 bits make activations and messages smaller, and these three not.

# %% [markdown]
# And the article's own model? Its blocks are `nn.TransformerEncoderLayer`, which PyTorch makes
# 2,048 wide inside if nobody asks for more
# ([`torch.nn.TransformerEncoderLayer`](https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html)).

# %%
with torch.device("meta"):
    blocks = [nn.TransformerEncoderLayer(2048, nhead=16) for _ in range(24)]
    article = nn.Sequential(nn.Embedding(50_000, 2048), *blocks, nn.Linear(2048, 50_000))
print(f"{sum(p.numel() for p in article.parameters()):,} parameters in the article's own model")

# %% [markdown]
# ## 4. By hand, then on the clock: a stream through two cuts
#
# The lesson looked for the best cut of an uneven line by counting operations, and found it after station 2. A stream of
# eight batches goes through two ranks now, forward only, with both cuts. Here is the count again, and the search
# that tries all cuts:

# %%
from itertools import combinations, pairwise

from torch.utils.flop_counter import FlopCounterMode

from course_utils.lesson import mnist
from course_utils.lesson.models import uneven_line

all_images, _ = mnist.tensors(train=True, limit=640)


def operations_of(line, items):
    """Multiplications and additions of each station's forward, in millions."""
    counts = []
    for station in line:
        with FlopCounterMode(display=False) as counter:
            items = station(items)
        counts.append(counter.get_total_flops() / 1e6)
    return counts


# %%
def stage_work(work, cuts):
    """The work of each stage; a cut is the number of stations before it."""
    edges = (0, *cuts, len(work))
    return [sum(work[a:b]) for a, b in pairwise(edges)]


def try_all_cuts(work, stages):
    """The cuts with the least work in the fullest stage."""
    return min(
        combinations(range(1, len(work)), stages - 1), key=lambda cuts: max(stage_work(work, cuts))
    )


work = operations_of(uneven_line(), all_images[:16])
equal_layers, best = (4,), try_all_cuts(work, 2)
pace = [sum(work) + 7 * max(stage_work(work, cuts)) for cuts in (equal_layers, best)]
print(f"predicted: the best cut takes {pace[1] / pace[0]:.2f} of the time of the equal one")

# %% [markdown]
# The prediction is the lesson's formula: the sum of all stages, and seven times the slowest. The cell below runs
# the stream several times over, and `fastest` keeps the run that other programs disturbed least.


# %%
from course_utils.trace import Trace


def stream_of_images(rank, cut, batches=8, rounds=4):
    torch.set_num_threads(1)
    device, records = hardware.device(), []
    line = uneven_line().to(device).requires_grad_(False)
    items = all_images[:16].to(device)
    products = line[:cut](items)  # on rank 1 only for its shape
    for _ in range(1 + rounds):
        crates = []
        with Trace() as trace:
            for _ in range(batches):
                if rank == 1:
                    dist.recv(products, src=0)
                with trace.span("forward"):
                    done = line[:cut](items) if rank == 0 else line[cut:](products)
                if rank == 0:
                    crates.append((done, dist.isend(done, dst=1)))
            for _, work in crates:
                work.wait()
        records.append(trace.record())
    return records[1:]


# %%
def end_of(records):
    return max(span.end for record in records for span in record.spans)


def fastest(results):
    """The records of all ranks in the round that took the least time."""
    return min(zip(*results), key=end_of)


streams = {
    "equal numbers of layers": fastest(launch(stream_of_images, 2, equal_layers[0])),
    "best cut": fastest(launch(stream_of_images, 2, best[0])),
}
figures.turns(streams)
plt.show()

# %% [markdown]
# *Above, building 1 has next to nothing to do, and the stream takes as long as in one building.
# Below, building 1 takes over a third of the work, and on two free cores the stream ends earlier.*
#
# And what the clock says. It says less than the prediction, and on a machine whose cores do something
# else it may say the opposite: the count is the argument, the clock a look at this machine. The last
# line is the best cut for the measured times instead of the counted work. On your machine it may be a different
# one: ReLU and pooling layers take time, and the count leaves them out.

# %%
from time import perf_counter


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
ends = [end_of(records) for records in streams.values()]
print(f"measured: the best cut takes {ends[1] / ends[0]:.2f} of the time of the equal one")
times = seconds_of(uneven_line().requires_grad_(False), all_images[:16])
print("shares of the time:", ", ".join(f"{share / sum(times):.0%}" for share in times))
print("best cut by time: after station", try_all_cuts(times, 2)[0])

# %% [markdown]
# ## 5. Break it: models that look cut
#
# ### Bug hunt: a class from the web
#
# This class, shortened a little, comes from Run:ai's *PyTorch Multi GPU: 4 Techniques Explained*. It says that
# it "defines where your subnetworks are placed and how both perform a forward pass". Find two
# mistakes before you run it.


# %%
class ModelParallel(nn.Module):
    def __init__(self):
        self.sub_network1 = nn.Linear(20, 500)
        self.sub_network2 = nn.Linear(500, 10)

    def forward(x):
        x = self.sub_network1(x)  # noqa: F821 - as the guide has it
        x = self.sub_network2(x)  # noqa: F821
        return x


def error_of(action):
    """What `action()` raises, as text."""
    try:
        action()
    except (AttributeError, RuntimeError, TypeError) as error:
        # newer versions of PyTorch put the name of the operation in front
        return f"{type(error).__name__}: {str(error).removeprefix('addmm: ')}"
    return "no error"


print(error_of(ModelParallel))


# %%
class WithInit(ModelParallel):
    def __init__(self):
        nn.Module.__init__(self)
        self.sub_network1 = nn.Linear(20, 500)
        self.sub_network2 = nn.Linear(500, 10)


print(error_of(lambda: WithInit()(torch.ones(2, 20))))

# %% [markdown]
# The first: without `super().__init__()` a module has no list in which it could register its parts.
# The second: a method gets the object as its first argument. `forward(x)` has no name for it, so
# `x` would be the model, and the batch is one argument too many. The error speaks of 2 arguments
# where you gave one, which is what gives it away. The repair: `def forward(self, x)`.
#
# The same guide names "the `model_parallel` class" as if PyTorch had one. It has not. The class is
# the author's own.

# %% [markdown]
# ### Bug hunt: the missing flatten
#
# The model of the web article *Data Parallelism & Model Parallelism*, again shortened. The first part
# is said to be for "cuda:0". Here it gets
# images of 64 x 64. What comes out of the pooling layer, and what does the linear layer make of it?

# %%
part1 = nn.Sequential(
    nn.Conv2d(3, 16, 7, stride=2, padding=3),
    nn.ReLU(),
    nn.MaxPool2d(3, stride=2, padding=1),
    nn.Linear(1024, 512),
)
pictures = torch.randn(4, 3, 64, 64)
print("out of the pooling layer:", tuple(part1[:3](pictures).shape))
print(error_of(lambda: part1(pictures)))

# %% [markdown]
# A linear layer works on the *last* dimension and takes all others for a batch. It sees
# 4 x 16 x 16 = 1,024 rows of 16 numbers. The two 1,024 in the message have nothing to do with each
# other. If you follow the message and write `Linear(16, 512)`, you get something worse than an error:

# %%
part1[3] = nn.Linear(16, 512)
print("no error, but the shape is", tuple(part1(pictures).shape))

features = part1[:3](pictures).flatten(start_dim=1)
print("with a flatten:", tuple(nn.Linear(16 * 16 * 16, 512)(features).shape))

# %% [markdown]
# Without the flatten, each row of each channel of each image gets 512 features of its own. The
# repair is a flatten between the two kinds of layers, and an input size that counts channels x
# height x width after the pooling. In exercise 4.4 you repair the whole model.

# %% [markdown]
# ### Bug hunt: a language model that cannot read
#
# The article from which you took the sizes in section 3 builds its layers as
# `nn.TransformerEncoderLayer(d_model=..., nhead=...)` and feeds them tokens of shape (4 texts, 512
# tokens). It runs, and the output has the right shape. Below is the article's model in small. Which
# tokens does a score depend on?


# %%
class ArticleModel(nn.Module):
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


def what_it_reads(model, **options):
    """Changes token 3 of text 0, and says which scores that changes."""
    texts = torch.arange(4 * 8).view(4, 8)
    other = texts.clone()
    other[0, 3] = 49
    changed = ((model(texts, **options) - model(other, **options)).abs() > 1e-6).any(dim=-1)
    print("  a later place of the same text:   ", changed[0, 4:].any().item())
    print("  an earlier place of the same text:", changed[0, :3].any().item())
    print("  another text:                     ", changed[1:].any().item())


# %%
print("as in the article, the changed token changes")
what_it_reads(ArticleModel())

mask = nn.Transformer.generate_square_subsequent_mask(8)
print("with batch_first=True and a causal mask it changes")
what_it_reads(ArticleModel(batch_first=True), src_mask=mask, is_causal=True)

# %% [markdown]
# By default the layer expects (tokens, texts). With (texts, tokens) it lets the texts of a batch
# look at each other, place by place, and no place ever sees what was written before it. The repair
# has two parts: `batch_first=True`, and a **causal mask**, without which a place would also see the
# tokens that it has to predict. The positions are missing too. No cut is wrong here, and no cut
# makes it right: test the model on one device first.

# %% [markdown]
# ## 6. Exercises: repair, and compare
#
# 4.4 repairs a model of the kind of section 5. 4.5 is an experiment with three strategies to cut.
#
# Where a machine has no GPU, a check needs a second device to see what you move where. It takes
# PyTorch's meta device.

# %% [markdown]
# ### 4.4 Repair the convolutional model (2 points)
#
# This model is put together from articles about model parallelism. It does not run. Read it, count
# its mistakes, then write a model of the same architecture that works. Six things are wrong or too
# narrow.
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
# Which cut is best? Some count layers, some count parameters, some measure time. Compare the
# three. The first step is a table that can be trusted, and the check goes through it to the byte.
#
# The time of each layer comes in as a list, measured before. So the table depends on nothing but
# its inputs. `cut(costs, stages)` returns the best cuts in the form of exercise 4.3: your
# `balanced_cuts`, or `try_all_cuts` from section 4.
#
# To run a stage alone, feed it what arrives there: the output of the stage before it, detached.
# It came over a cut, so it has to require a gradient, if it is floating point. Otherwise autograd
# keeps less than it does in training. `kept_for_backward` counts what a
# forward pass keeps:
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
                            one more (as `torch.tensor_split` does it)
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
        result, goods = [], inputs
        for part in parts:
            with kept_for_backward(part) as kept:
                outputs = part(goods)
            held = [*part.parameters(), *part.buffers()]
            gradients = [p for p in part.parameters() if p.requires_grad]
            result.append(kept.bytes + sum(tensor.nbytes for tensor in held + gradients))
            goods = outputs.detach().requires_grad_(outputs.is_floating_point())
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
# Now the experiment itself. It has no single right answer, so nothing checks it. As soon as your
# `compare_cuts` is written, the next cells give it `uneven_line()` from section 4, for 2, 3 and 4
# stages, and draw its tables. The counted operations stand for the seconds, so that you get the
# same picture on every machine.
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
batch = all_images[:16].clone()  # a slice would keep all images


def experiment():
    """Prints your tables, draws them and returns them, by the number of stages."""
    tables = {}
    for stages in (2, 3, 4):
        tables[stages] = compare_cuts(uneven_line(), batch, work, stages, try_all_cuts)
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
# *Once you have tables: a group of bars for each strategy, with a bar for each stage, the first on
# the left. Above, the highest bar of a group says how much memory the fullest device needs. Below,
# it sets the pace of the line.*
#
# And the clock: the stream of eight batches from section 4 goes through two ranks, with each
# strategy's cut for two stages.


# %% tags=["nbval-ignore-output"]
def clock():
    ends = {
        strategy: end_of(fastest(launch(stream_of_images, 2, found["cuts"][0])))
        for strategy, found in tables.get(2, {}).items()
    }
    for strategy, end in ends.items():
        print(f"{strategy}: {end / ends['equal layers']:.2f} of the time of equal layers")


if_written(clock)

# %%
print(if_written(conclusion) or "no conclusion yet: write it into the function `conclusion`")

# %% [markdown]
# ## 7. See it: what more buildings buy
#
# What more buildings buy, and what they cost. The figure shows the planned model of section 3, with its 24 blocks
# shared out evenly over 1 to 24 stages.


# %%
def fullest_stage(stages):
    """The ledger of the fullest stage of the planned model, which is the first or the last."""
    both = [stage_bytes(stage, **PLANNED | {"layers": 48 // stages}, texts=4) for stage in (0, 1)]
    return max(both, key=lambda ledger: sum(ledger.values()))


counts = [1, 2, 3, 4, 6, 8, 12, 24]
fullest = [bars[-1], *map(fullest_stage, counts[1:])]
figures.fullest(counts, fullest)
plt.show()
for stages, ledger in zip(counts, fullest):
    total = plots.human_bytes(sum(ledger.values()))
    print(f"stages {stages:2}: {total:>9}, idle {1 - 1 / stages:.0%}")

# %% [markdown]
# *More stages need less memory each, at first almost in proportion; later the tables and the scores
# of the vocabulary at the two ends stay. The price is on the right: with one batch at a time, all
# but one stage are idle at any moment.* Chapter 5 brings this price down.

# %% [markdown]
# ## 8. On a cluster
#
# Build the model on meta in every rank and give memory to the own stage only (`to_empty`, then the first values or a
# checkpoint). So no host ever holds the whole model, and the plan of section 3 is also the test: `memory_ledger` of the
# rank's stage has to say what the plan said. Time a profile on one device of the kind that the cluster has. The counted
# operations choose the cut, the clock confirms it.
#
# ## 9. Remember
#
# 1. Memory is arithmetic: shapes for parameters, sixteen tensors of NTW numbers for a block, and a test with a model so
#    small that it can be counted to the byte.
# 2. More stages need less memory each, until the tables and the scores of the vocabulary at the two ends are what stays.
# 3. A cut is chosen by a count or a profile, and tested by a stream on the clock.
# 4. A model that runs and has the right shape may still be no model: ask which input changes which output, on
#    one device, before you cut.
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
