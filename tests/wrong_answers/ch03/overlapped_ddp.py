"""Answers to 3.4, `OverlappedDDP`: wrong in a plausible way, or right in another."""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from tests.wrong_answers import right, wrong


@right("3.4")
class Bucketed(nn.Module):
    """Packs with torch.cat when a bucket is full, and copies the means back at the end."""

    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.module = module
        self.silent = False
        self.share_start()
        self.buckets = self.fill_buckets(bucket_bytes)
        self.reset()
        self.register_hooks()

    def share_start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=0)

    def trainable(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def fill_buckets(self, bucket_bytes):
        buckets, room = [], 0
        for parameter in reversed(self.trainable()):
            if parameter.nbytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(parameter)
            room -= parameter.nbytes
        return buckets

    def register_hooks(self):
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, index))

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.running = {}  # bucket's index: its flat tensor and its work

    def on_gradient(self, index, parameter):
        if not self.silent:
            self.missing[index] -= 1
            self.start_full_buckets()

    def start_full_buckets(self):
        while len(self.running) < len(self.buckets) and not self.missing[len(self.running)]:
            self.start(len(self.running))

    def start(self, index):
        self.running[index] = self.all_reduce(self.pack(self.buckets[index]))

    def pack(self, bucket):
        """The gradients divided by the world size, then for each whether there is one."""
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket]
        there = parts[0].new_tensor([p.grad is not None for p in bucket])
        return torch.cat([self.divide(torch.cat(parts)), there])

    def divide(self, flat):
        return flat / dist.get_world_size()

    def all_reduce(self, flat):
        return flat, dist.all_reduce(flat, async_op=True)

    def start_the_rest(self):
        for index in range(len(self.buckets)):
            if index not in self.running:
                self.start(index)

    def finish_gradient_synchronization(self):
        self.start_the_rest()
        for index, (flat, work) in self.running.items():
            work.wait()
            self.unpack(self.buckets[index], flat)
        self.reset()

    def unpack(self, bucket, flat):
        *parts, users = flat.split([*(p.numel() for p in bucket), len(bucket)])
        for parameter, part, count in zip(bucket, parts, users, strict=True):
            if count > 0:
                self.write(parameter, part.view_as(parameter), count)

    def write(self, parameter, mean, users):
        parameter.grad = mean.clone()

    @contextmanager
    def no_sync(self):
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def forward(self, *inputs):
        return self.module(*inputs)


@right("3.4")
class SilentByAnObject(Bucketed):
    """no_sync without a generator."""

    def no_sync(self):
        model = self

        class Silence:
            def __enter__(self):
                self.before, model.silent = model.silent, True

            def __exit__(self, *_):
                model.silent = self.before

        return Silence()


@wrong("3.4", names="torchs-own")
class WrapsDDP(nn.Module):
    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.ddp = nn.parallel.DistributedDataParallel(
            module, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=True
        )
        self.module, self.no_sync = module, self.ddp.no_sync

    def forward(self, *inputs):
        return self.ddp(*inputs)

    def finish_gradient_synchronization(self):
        """Nothing is left to do after backward."""


@wrong("3.4", names="buffers")
class BuffersForgotten(Bucketed):
    def share_start(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=0)


@wrong("3.4", names="no-module")
class CalledModel(Bucketed):
    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__(module, bucket_bytes)
        self.model = module
        del self.module


@wrong("3.4", names="sum-not-mean")
class Sums(Bucketed):
    def divide(self, flat):
        return flat


@wrong("3.4", names="divided-twice")
class DividesTwice(Bucketed):
    def write(self, parameter, mean, users):
        parameter.grad = mean / dist.get_world_size()


@wrong("3.4", names="unchanged")
class ForgetsToWriteBack(Bucketed):
    def write(self, parameter, mean, users):
        """The means stay in the buckets."""


@wrong("3.4", names="not-waited")
class NeverWaits(Bucketed):
    def finish_gradient_synchronization(self):
        self.start_the_rest()
        for index, (flat, _) in self.running.items():
            self.unpack(self.buckets[index], flat)
        self.reset()


@wrong("3.4", names="first-step-only")
class NeverResets(Bucketed):
    def reset(self):
        if not hasattr(self, "running"):
            super().reset()


@wrong("3.4", names="starts-at-the-end")
class StartsAtTheEnd(Bucketed):
    def start_full_buckets(self):
        """Everything is left to finish_gradient_synchronization."""


@wrong("3.4", names="waits-in-backward")
class WaitsInTheHook(Bucketed):
    def all_reduce(self, flat):
        work = dist.all_reduce(flat, async_op=True)
        work.wait()
        return flat, work


@wrong("3.4", names="buckets")
class CountsElements(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return super().fill_buckets(2 * bucket_bytes)


@wrong("3.4", names="sends-in-no-sync")
class IgnoresNoSync(Bucketed):
    @contextmanager
    def no_sync(self):
        yield
        self.finish_gradient_synchronization()


@wrong("3.4", names="no-context-manager")
class ForgetsTheDecorator(Bucketed):
    def no_sync(self):
        self.silent = True
        yield
        self.silent = False


@wrong("3.4", names="nested")
class SpeaksAfterTheInnerBlock(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        try:
            yield
        finally:
            self.silent = False


@wrong("3.4", names="silent-for-good")
class NeverSpeaksAgain(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        yield


@wrong("3.4", names="frozen-hook")
class HooksEverything(Bucketed):
    def trainable(self):
        return list(self.module.parameters())


@wrong("3.4", names="tied-twice")
class DividesLayerByLayer(Bucketed):
    def divide(self, flat):
        return flat

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for layer in self.module.modules():
            for parameter in layer.parameters(recurse=False):
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size()


@wrong("3.4", names="bucket-never-full")
class LeavesUnfilledBuckets(Bucketed):
    def start_the_rest(self):
        """Only buckets that filled are sent."""


@wrong("3.4", names="zeros-for-none")
class WritesZeros(Bucketed):
    def unpack(self, bucket, flat):
        flat[-len(bucket) :] = 1
        super().unpack(bucket, flat)


@wrong("3.4", names="order-differs")
class StartsInAnyOrder(Bucketed):
    def start_full_buckets(self):
        for index, missing in enumerate(self.missing):
            if not missing and index not in self.running:
                self.start(index)


@wrong("3.4", names="used-elsewhere")
class KeepsNone(Bucketed):
    def write(self, parameter, mean, users):
        if parameter.grad is not None:
            parameter.grad = mean.clone()


@wrong("3.4", names="users-only")
class DividesByUsers(Bucketed):
    def write(self, parameter, mean, users):
        parameter.grad = mean * dist.get_world_size() / users


@wrong("3.4", names="hook-too-early")
class HooksBeforeTheGradient(Bucketed):
    def register_hooks(self):
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_hook(lambda _, i=index, p=parameter: self.on_gradient(i, p))

    def pack(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        return torch.cat([self.divide(flat), flat.new_ones(len(bucket))])


@wrong("3.4", names="no-handle")
class ForgetsAsync(Bucketed):
    def all_reduce(self, flat):
        return flat, dist.all_reduce(flat)


@wrong("3.4", names="fixed-number")
class DividesByTwo(Bucketed):
    def divide(self, flat):
        return flat / 2


@wrong("3.4", names="not-every-rank")
class BroadcastsOnRank0(Bucketed):
    def share_start(self):
        if dist.get_rank() == 0:
            super().share_start()


@wrong("3.4", names="rounded")
class AveragesInHalfPrecision(Bucketed):
    def all_reduce(self, flat):
        narrow = flat.bfloat16()
        return narrow, dist.all_reduce(narrow, async_op=True)

    def write(self, parameter, mean, users):
        parameter.grad = mean.to(parameter.dtype)


@wrong("3.4", names="error-swallowed")
class CatchesEverything(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the mistake
            print(error)
        self.silent = False


@wrong("3.4", names="accumulated")
class AveragesTheNewGradient(Bucketed):
    """Takes what each backward hands in, and not what has added up in .grad."""

    def register_hooks(self):
        self.new = {}
        for parameter in self.trainable():
            parameter.register_hook(partial(self.new.__setitem__, parameter))
        super().register_hooks()

    def pack(self, bucket):
        there = bucket[0].new_tensor([p in self.new for p in bucket])
        new = [self.new.pop(p, torch.zeros_like(p)).flatten() for p in bucket]
        return torch.cat([self.divide(torch.cat(new)), there])


@wrong("3.4", names="start")
class NoBroadcast(Bucketed):
    def share_start(self):
        """Everybody keeps what it has."""
