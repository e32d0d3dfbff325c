# %% [markdown]
# # 3. Distributed data parallel
#
# Chapter 3 of the course.

# %% tags=["nbval-ignore-output"]
from course_utils import hardware

hardware.report()

# %% [markdown]
# ## 1. The factory: equal factories and no head office

# %% [markdown]
# ## 2. The smallest real run: processes that add their gradients

# %% [markdown]
# ## 3. Predict, then measure: how many bytes every collective moves

# %% [markdown]
# ## 4. By hand, then with PyTorch: the same parameters on 1, 2 and 4 ranks

# %% [markdown]
# ## 5. Break it: ten ways to train the wrong model

# %% [markdown]
# ## 6. Exercises: write the parts of DDP yourself

# %% [markdown]
# <!-- exercises begin: this section is written by the EX03 engineer -->

# %% [markdown]
# Five parts of DDP, from the few lines at its heart to the machinery around them. Every answer runs
# on real ranks: `check` starts them, hands your code fresh random tensors and awkward models, and
# prints one line per requirement. `hint("3.1")` prints the next of three hints. Wherever your code
# runs, the process group is ready: `dist.get_rank()` and `dist.get_world_size()` work.

# %%
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.checks import check

# %% [markdown]
# ### 3.1 Average the gradients (2 points)
#
# Every rank has run its own backward pass. Each `.grad` now holds the gradient of that rank's loss.
# Replace it by the mean over all ranks, so that every rank takes the same step.
#
# A **frozen** parameter (`requires_grad=False`) and one that the loss did not use have no gradient:
# their `.grad` is `None` and stays so. A **tied** parameter is one tensor that two layers share; it
# has one gradient.

# %% nbgrader={"grade_id": "3.1", "solution": true}
def average_gradients(model: nn.Module) -> None:
    """Replaces every gradient of `model` by its mean over all ranks, in place.

    Called on every rank after `backward()`. A parameter has a gradient on all ranks or on none;
    where `.grad` is None it stays None. The parameters themselves do not change.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.1-check", "grade": true, "points": 2, "locked": true}
check("3.1", average_gradients)

# %% [markdown]
# ### 3.2 All-reduce on a ring (3 points)
#
# Build `all_reduce` from `send` and `recv`. Cut the tensor into as many chunks as there are ranks.
# Every rank talks to its neighbours only: it sends to the rank on its right and receives from the
# rank on its left. In each of the first n - 1 steps, a rank adds the chunk that arrives to its own.
# After them, each rank owns one chunk that is summed over all ranks: a **reduce-scatter**. In the
# other n - 1 steps the summed chunks travel on round the ring: an **all-gather**.
#
# A step sends one n-th of the tensor. Each rank sends 2(n - 1)/n of the tensor's bytes in all: less
# than twice the tensor, however many ranks there are. The check counts them.

# %% nbgrader={"grade_id": "3.2", "solution": true}
def ring_all_reduce(tensor: Tensor) -> None:
    """Replaces `tensor` by its sum over all ranks, in place.

    `tensor` has the same shape and dtype (floating point or integer) on every rank. Any shape: also
    one with fewer elements than ranks, with none at all, or not contiguous in memory. Any world
    size.

    Communicates with `dist.send`, `dist.recv`, `dist.isend`, `dist.irecv` or
    `dist.batch_isend_irecv` alone. Each rank sends 2(n-1)/n of the tensor's bytes; chunks may
    differ by one element.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    flat = tensor.contiguous().view(-1)  # the tensor's own memory, or a copy of it
    chunks = flat.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        summing = step < world_size - 1  # reduce-scatter first, then all-gather
        outgoing, kept = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(kept) if summing else kept
        both = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        if summing:
            kept += incoming
    tensor.copy_(flat.view_as(tensor))
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.2-check", "grade": true, "points": 3, "locked": true}
check("3.2", ring_all_reduce)

# %% [markdown]
# ### 3.3 Who reads which sample (2 points)
#
# `DistributedSampler` shuffles the indices of the dataset, repeats some so that the ranks' shares are
# equal, and gives each rank every n-th index. It sends nothing: all ranks shuffle with the same
# seed, and so they agree. Write it. Return exactly what
# `DistributedSampler(dataset, world_size, rank, shuffle=True, seed=seed)` gives after
# `set_epoch(epoch)`.

# %% nbgrader={"grade_id": "3.3", "solution": true}
def shard_indices(length: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    """Returns the indices of the samples that `rank` reads in `epoch`, in order.

    `length` is the number of samples in the dataset. The order of an epoch is
    `torch.randperm(length)`, drawn from a `torch.Generator` of its own with seed `seed + epoch`.
    Every rank gets ceil(length / world_size) indices: where the order is too short, it starts again
    from its beginning, as often as needed. No communication, no process group.
    """
    ### BEGIN SOLUTION
    import math
    from itertools import cycle, islice

    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    padded_length = math.ceil(length / world_size) * world_size
    return list(islice(cycle(order), rank, padded_length, world_size))
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.3-check", "grade": true, "points": 2, "locked": true}
check("3.3", shard_indices)

# %% [markdown]
# ### 3.4 DDP that overlaps (5 points)
#
# With `average_gradients`, the network rests while backward runs, and then every rank rests while the
# network works. DDP starts earlier. Backward computes the last layer's gradients first. As soon as a
# **bucket** of gradients is complete, DDP starts its all-reduce with `async_op=True` and lets
# backward go on. Communication hides behind the computation that remains.
#
# Three things decide whether the result is right.
#
# * **Order.** All ranks start the same all-reduces in the same order, even if on one rank the
#   gradients are ready in another order, or some do not come at all.
# * **Unused parameters.** A bucket with a parameter that the loss did not use never fills by itself.
#   Where only some ranks used a parameter, its gradient counts as zero on the others. Where none
#   did, its `.grad` stays `None`.
# * **Accumulation.** Under `no_sync()` every rank adds up its own gradients and sends nothing. The
#   next backward outside averages the whole sum.
#
# `parameter.register_post_accumulate_grad_hook(function)` has `function(parameter)` called each time
# that backward has finished this parameter's `.grad`.

# %% nbgrader={"grade_id": "3.4", "solution": true}
class OverlappedDDP(nn.Module):
    """Averages the gradients of `module` over all ranks while backward is still running.

    Constructed on every rank around modules of the same architecture. After construction every rank
    has rank 0's parameters and buffers. One step of training:

        loss_function(model(inputs), targets).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()

    Gradients travel in buckets of at most `bucket_bytes` bytes, the last layer's first; a larger
    parameter has a bucket to itself. Parameters that are frozen at construction are left alone.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 * 2**20) -> None:
        """Broadcasts rank 0's parameters and buffers, and prepares the buckets and hooks."""
        super().__init__()
        self.module = module
        ### BEGIN SOLUTION
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.synchronize = True
        self.buckets: list[SimpleNamespace] = []  # in the order in which backward fills them
        group, size = [], 0
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            full = size + parameter.nbytes > bucket_bytes
            if group and (full or parameter.dtype != group[0].dtype):
                self._add_bucket(group)
                group, size = [], 0
            group.append(parameter)
            size += parameter.nbytes
        if group:
            self._add_bucket(group)

    def _add_bucket(self, parameters: list[nn.Parameter]) -> None:
        # One flat buffer: the gradients, then for each parameter how many ranks have a gradient.
        sizes = [parameter.numel() for parameter in parameters]
        buffer = parameters[0].new_empty(sum(sizes) + len(sizes))
        *parts, users = buffer.split([*sizes, len(sizes)])
        views = [part.view_as(parameter) for part, parameter in zip(parts, parameters)]
        bucket = SimpleNamespace(parameters=parameters, buffer=buffer, views=views, users=users)
        bucket.missing, bucket.work = len(parameters), None
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket))
        self.buckets.append(bucket)

    def _gradient_ready(self, bucket: SimpleNamespace, parameter: nn.Parameter) -> None:
        if not self.synchronize:
            return
        if bucket.work is not None:
            raise RuntimeError("backward() again before finish_gradient_synchronization().")
        bucket.missing -= 1
        for following in self.buckets:  # in order: the buckets must match on all ranks
            if following.missing:
                break
            if following.work is None:
                self._start(following)

    def _start(self, bucket: SimpleNamespace) -> None:
        bucket.users.copy_(torch.tensor([p.grad is not None for p in bucket.parameters]))
        for parameter, view in zip(bucket.parameters, bucket.views):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.div(parameter.grad, dist.get_world_size(), out=view)
                parameter.grad = view  # the mean arrives in place: nothing to copy back
        bucket.work = dist.all_reduce(bucket.buffer, async_op=True)
        ### END SOLUTION

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self) -> None:
        """Returns when every gradient is the mean over all ranks; call it before the optimizer."""
        ### BEGIN SOLUTION
        for bucket in self.buckets:
            if bucket.work is None:  # a parameter was not used
                self._start(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.missing, bucket.work = len(bucket.parameters), None
            for parameter, view, users in zip(bucket.parameters, bucket.views, bucket.users):
                if parameter.grad is None and users > 0:  # used, but on other ranks only
                    parameter.grad = view
        ### END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within `with model.no_sync():`, backward adds up local gradients and sends nothing."""
        ### BEGIN SOLUTION
        self.synchronize = False
        try:
            yield
        finally:
            self.synchronize = True
        ### END SOLUTION


# %% nbgrader={"grade_id": "3.4-check", "grade": true, "points": 5, "locked": true}
check("3.4", OverlappedDDP)

# %% [markdown]
# ### 3.5 Evaluate every image once (3 points)
#
# `DistributedSampler` repeats samples so that the ranks' shares are equal. For training this does
# little harm. For an evaluation it counts some images twice, and the accuracy depends on the number
# of ranks. Share the images out without repeats, and return the accuracy over all of them.
#
# Now the shares differ: a rank may have one image fewer than another, one batch fewer, or no image
# at all. Every rank must still take part in the same collectives.

# %% nbgrader={"grade_id": "3.5", "solution": true}
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> float:
    """Returns the share of `images` (0 to 1) that `model` classifies correctly.

    Called on every rank with the same model and the whole test set: `images` (N, ...) and `labels`
    (N,) int64, N > 0. `model(images)` returns scores (batch, classes). Every image goes through the
    model once, on one rank; no rank takes more than ceil(N / world_size) images, and no batch is
    larger than `batch_size`. Returns the same number on every rank. The model is in evaluation
    mode meanwhile, and afterwards in the mode in which it came. No gradients are computed.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    my_images, my_labels = images[rank::world_size], labels[rank::world_size]
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for start in range(0, len(my_images), batch_size):
            batch = slice(start, start + batch_size)
            correct += (model(my_images[batch]).argmax(dim=1) == my_labels[batch]).sum()
    model.train(was_training)
    dist.all_reduce(correct)
    return correct.item() / len(images)
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.5-check", "grade": true, "points": 3, "locked": true}
check("3.5", evaluate)

# %% [markdown]
# <!-- exercises end -->

# %% [markdown]
# ## 7. See it: when communication hides behind the backward pass

# %% [markdown]
# ## 8. On a cluster: the same script under torchrun

# %% [markdown]
# ## 9. Remember
