"""Exercise 3.5, `evaluate`: what it asks for, and how it is checked."""

import math
from collections import Counter
from dataclasses import dataclass
from numbers import Number

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_from_each, run, same, signs
from course_exercises.authoring.ranks import Sent, come_late, following, must_have_sent
from course_utils.hardware import device

evaluation = Exercise(
    "3.5",
    "evaluate",
    points=3,
    minutes=30,
    kind="core",
    parameters=("model", "images", "labels", "batch_size"),
    hints=[
        (
            "Which images belong to this rank? A slice with a stride deals them out without repeats; "
            "the shares then differ by at most one image."
        ),
        "Do not average averages. What can be added over the ranks, whatever their shares are?",
        (
            "Every rank counts its correct images in an integer tensor, batch by batch. One all-reduce "
            "after the loop adds the counts, also on a rank without images. Divide by the number of "
            "all images."
        ),
    ],
    misconceptions={
        "repeated": "Some images go through the model more than once. Either the shares were made equal by repeating "
        "images, as DistributedSampler does, or ranks do not take different images. Deal each image to one rank, and "
        "let the shares differ by one.",
        "never-seen": "Some images never go through the model. Deal them out to `dist.get_world_size()` ranks, and look at "
        "the last ones, where the number does not divide.",
        "uneven": "One rank evaluates more than ceil(N / world_size) images. Give no rank the whole remainder: shares "
        "differ by one image at most.",
        "mean-of-shares": "You average the accuracies of the ranks or of the batches, though the ranks or batches "
        "differ in size. Add the counts of correct images and divide once, by the number of all images.",
        "not-added": "Each rank returns what its own images give. The counts of the ranks were not added, or not "
        "waited for.",
        "not-the-share": "The images are counted right, and that is not yet the result: it may be their number, "
        "percent, the share of the wrong ones, or divided by one rank's images. The accuracy is from 0 to 1: the "
        "correct images of all ranks, divided by the number of all images.",
        "number-not-tensor": "Collectives take tensors: make one of your count, "
        "`torch.tensor(count)`, and read it with `.item()` afterwards.",
        "miscounted": "Each image went through the model once, so the counting is off, or the division by the number "
        "of all images. An image is correct where `argmax(dim=1)` of its scores equals its label; add these up over "
        "the batches and over the ranks, in whole numbers.",
        "empty-batch": "The model is called with a batch without images: not every model can take that. "
        "Either the loop goes one step too far, or a rank has no images, of which `split` makes one "
        "empty batch.",
        "uneven-gather": "The ranks' shares differ by an image, and all_gather takes tensors of one "
        "shape. Send what always has the same shape: the count of correct images.",
        "collective-per-batch": "A rank waits in a collective for ranks that have no batch left. Keep "
        "collectives out of the loop over batches.",
        "empty-rank": "A rank may be without images. It has nothing to divide by, and must take part in the "
        "collective all the same. `chunk` gives fewer pieces than ranks then, and a `torch.arange` may not begin "
        "behind its end; a slice may, and is empty.",
        "train-mode": "The model is in training mode while it is evaluated: dropout and BatchNorm "
        "then change the result. Call `model.eval()`.",
        "mode-not-restored": "The model, or a part of it, comes back in another mode than it had. `model.train()` and "
        "`model.eval()` set every part, and a frozen BatchNorm may be in evaluation mode all the time. Remember the "
        "`training` of each of `model.modules()` and restore it, on every rank.",
        "not-a-float": "Return a number of Python's: `.item()` takes it out of a tensor.",
        "autograd": "Autograd records the evaluation, which costs memory. Evaluate in `with torch.no_grad():`.",
        "autograd-not-restored": "After the evaluation autograd is not as it was before. `with torch.no_grad():` "
        "restores it by itself.",
        "thawed": "A parameter's `requires_grad` has changed. `torch.no_grad()` needs no change of the parameters.",
        "batch-too-large": "A batch is larger than `batch_size`.",
    },
    things="accuracies",
    failures={
        "Expected parameter `tensor` of type torch.Tensor": "number-not-tensor",
        ": all_gather of ": "uneven-gather",
        "timeout": "collective-per-batch",
        "mismatch": "collective-per-batch",
    },
)


class _Scores(nn.Module):
    """A model whose scores stand in the image itself, after the image's number; keeps a diary."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []
        self.modes: set[bool] = set()
        self.recorded: set[bool] = set()
        self.part = nn.Sequential(nn.Identity())
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        numbers = images.flatten(1)
        self.batches.append(numbers[:, 0].long().tolist())
        self.modes |= {module.training for module in self.modules()}
        self.recorded.add(torch.is_grad_enabled())
        return numbers[:, 1:]


@dataclass(frozen=True)
class _Evaluated:
    value: float
    batches: list[list[int]]  # the numbers of the images, batch by batch
    modes: set[bool]
    recorded: set[bool]
    mode_after: bool
    parts_after: list[bool]  # the modes of the model's parts
    grad_after: bool  # is autograd on? Before, it was where the model was in training mode
    learning: list[bool]  # which of the two parameters learns afterwards
    sent: Sent

    def seen(self) -> list[int]:
        return [image for batch in self.batches for image in batch]


def _evaluated(rank, answer, images, labels, batch_size, training, *parts) -> _Evaluated:
    model = _Scores().train(training)
    for module, mode in zip(model.part.modules(), parts, strict=True):
        module.training = mode
    come_late(rank)
    # Autograd may be off, as where somebody evaluates within `no_grad`.
    with torch.set_grad_enabled(training), following() as sent:
        value = answer(model, images.to(device()), labels.to(device()), batch_size)
        on = torch.is_grad_enabled()
    after = [module.training for module in model.part.modules()]
    learning = [model.scale.requires_grad, model.frozen.requires_grad]
    seen = model.batches, model.modes, model.recorded
    return _Evaluated(value, *seen, model.training, after, on, learning, sent)


def _evaluate(answer, draw, count, ranks, batch_size, modes=(True, True, True)):
    """Returns the ranks' reports, and for each image whether the model is right about it. `modes`
    says whether the model, its part, and the part in it come in training mode."""
    classes = draw.choice([5, 7, 9])
    scores = draw.tensor(count, classes)
    numbers = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    images = torch.cat([numbers, scores], dim=1).view(count, 1, 2, (classes + 1) // 2)
    # more than half, but not all: then no two mistakes give the same number on two ranks
    correct = draw.integer(count // 2 + 1, count - 1) if count > 2 else 1
    if count > 4096:
        correct -= 1 - correct % 2  # half precision has no odd numbers above 2048
    right = torch.tensor(draw.sample([i < correct for i in range(count)], count))
    labels = torch.where(right, scores.argmax(dim=1), scores.argmin(dim=1))
    return run(_evaluated, ranks, answer, images, labels, batch_size, *modes), right.tolist()


def _share(images: list[int], right: list[bool]) -> float:
    return sum(right[i] for i in images) / len(images) if images else math.nan


def _check_evaluation(answer, draw, count, ranks, batch_size) -> None:
    reports, right = _evaluate(answer, draw, count, ranks, batch_size)
    _check_seen([report.seen() for report in reports], count)
    own = [_share(report.seen(), right) for report in reports]
    batches = [[_share(batch, right) for batch in report.batches] for report in reports]
    by_batch = [sum(shares) / len(shares) if shares else math.nan for shares in batches]
    every_batch = [share for shares in batches for share in shares]
    means = [sum(own) / ranks, sum(by_batch) / ranks, sum(every_batch) / len(every_batch)]
    means.append(sum(0 if math.isnan(share) else share for share in own) / ranks)
    correct = [sum(right[i] for i in report.seen()) for report in reports]
    accuracy = sum(right) / count
    others = sum(right), 100 * accuracy, 1 - accuracy
    by_share = [sum(right) / max(1, len(report.seen())) for report in reports]
    got = [report.value for report in reports]
    likely = {
        "empty-rank": lambda got: any(math.isnan(value) for value in got),
        "not-added": lambda got: same(got, own) or same(got, [own / count for own in correct]),
        "mean-of-shares": lambda got: any(same(got, [mean] * ranks) for mean in means),
        "not-the-share": lambda got: (
            same(got, by_share) or any(same(got, [other] * ranks) for other in others)
        ),
        "one-rank-only": signs(own, [accuracy] * ranks)["one-rank-only"],
        "miscounted": lambda got: all(isinstance(value, Number) for value in got),
    }
    expect(got, [accuracy] * ranks, each="rank", what="the accuracy", likely=likely)
    expect_from_each(got, (float, int), "not-a-float")
    for report in reports:
        sizes = [len(batch) for batch in report.batches]
        if 0 in sizes:
            raise Wrong("empty-batch", expected="batches with images", got=f"batches of {sizes}")
    must_have_sent([report.sent for report in reports])


def _check_seen(seen: list[list[int]], count: int) -> None:
    """Raises Wrong unless every image was seen once, by ranks with equal shares, up to one image."""
    times = Counter(image for images in seen for image in images)
    twice, most = sum(n > 1 for n in times.values()), math.ceil(count / len(seen))
    if twice or len(times) < count:
        got = f"{len(times)} of {count} images, {twice} of them more than once"
        slug = "repeated" if twice else "never-seen"
        raise Wrong(slug, expected=f"{count} images, each once", got=got)
    if max(map(len, seen)) > most:
        got = f"{max(map(len, seen))} on one rank"
        raise Wrong("uneven", expected=f"at most {most} of {count} on a rank", got=got)


@evaluation.requires(
    "two ranks share the images and agree on the accuracy",
    # here every rank has as many batches as the other
    failures=dict.fromkeys(("timeout", "mismatch"), "not-every-rank"),
)
def two_ranks_share_the_images_and_agree_on(answer, draw):
    batch_size = draw.integer(3, 5)
    _check_evaluation(answer, draw, 2 * batch_size * draw.integer(2, 4), 2, batch_size)


@evaluation.requires("image counts that divide neither by ranks nor by batches; one rank")
def image_counts_that_divide_neither_by_ranks_nor(answer, draw):
    # one rank has an image more than the others, and with it a batch more
    ranks, batch_size = draw.integer(3, 4), draw.integer(3, 5)
    count = ranks * batch_size * draw.integer(2, 3) + 1
    _check_evaluation(answer, draw, count, ranks, batch_size)
    ranks = 7 - ranks
    _check_evaluation(answer, draw, ranks * draw.integer(3, 6) - 1, ranks, 3)
    _check_evaluation(answer, draw, draw.integer(5, 9), 1, 4)
    # more images than a count in half precision can tell apart
    _check_evaluation(answer, draw, 2 * draw.integer(2100, 2400) + 1, 1, 500)


@evaluation.requires(
    "fewer images than ranks", failures={"exception": "empty-rank", "timeout": "empty-rank"}
)
def fewer_images_than_ranks(answer, draw):
    _check_evaluation(answer, draw, 3, 4, 4)
    _check_evaluation(answer, draw, 2, 4, 4)  # the last rank begins behind the end


@evaluation.requires("no batch is larger than batch_size")
def no_batch_is_larger_than_batch_size(answer, draw):
    limit = draw.integer(2, 5)
    reports, _ = _evaluate(answer, draw, draw.integer(17, 23), draw.integer(2, 3), limit)
    largest = max(len(batch) for report in reports for batch in report.batches)
    if largest > limit:
        raise Wrong("batch-too-large", expected=f"at most {limit}", got=largest)


@evaluation.requires("evaluation mode meanwhile, then the mode it had; no gradients")
def evaluation_mode_meanwhile(answer, draw):
    alike = (True, True, True), (False, False, False), (True, False, False), (False, True, True)
    for modes in (*alike, (True, True, False)):
        [report], _ = _evaluate(answer, draw, draw.integer(5, 9), 1, 3, modes)
        _check_afterwards(report, *modes)
    reports, _ = _evaluate(answer, draw, 2, 3, 4, alike[0])  # one of them has no images
    for report in reports:
        _check_afterwards(report, *alike[0])


def _check_afterwards(report: _Evaluated, training: bool, *parts: bool) -> None:
    if True in report.modes:
        raise Wrong("train-mode", expected="model.training is False", got="True")
    likely = {"mode-not-restored": True}
    after = [report.mode_after, *report.parts_after]
    what = "training afterwards, of the model and its parts"
    expect(after, [training, *parts], what=what, each="module", likely=likely)
    if True in report.recorded:
        raise Wrong("autograd", expected="no autograd", got="autograd records")
    likely = {"autograd-not-restored": True}
    expect(report.grad_after, training, what="autograd on afterwards", likely=likely)
    what = "requires_grad of a parameter and a frozen one"
    expect(report.learning, [True, False], what=what, likely={"thawed": True})
