"""Rarer wrong answers to 3.4, `overlapped_ddp`."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from tests.wrong_answers import rarer
from tests.wrong_answers.ch03.overlapped_ddp import AveragesTheNewGradient, Bucketed


@rarer("3.4")
class OnTopOfDDP(nn.Module):
    """PyTorch's own, with a communication hook; its backward waits at its very end."""

    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.ddp = nn.parallel.DistributedDataParallel(
            module, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=True
        )
        self.ddp.register_comm_hook(None, self.start)

    @staticmethod
    def start(state, bucket):
        flat = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(flat, async_op=True).get_future()
        return future.then(lambda finished: finished.value()[0])

    @property
    def module(self):
        return self.ddp.module

    def forward(self, *inputs):
        return self.ddp(*inputs)

    def finish_gradient_synchronization(self):
        """Nothing is left to do after backward."""

    def no_sync(self):
        return self.ddp.no_sync()


@rarer("3.4")
class TrainableBroadcast(Bucketed):
    def share_start(self):
        for tensor in [*self.trainable(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=0)


@rarer("3.4")
class AveragesStart(Bucketed):
    def share_start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if tensor.is_floating_point():
                dist.all_reduce(tensor.data)
                tensor.data /= dist.get_world_size()


@rarer("3.4")
class FillsFirstLayerFirst(Bucketed):
    def trainable(self):
        return super().trainable()[::-1]


@rarer("3.4")
class GradientsAreViewsOnce(Bucketed):
    """Makes every gradient a view of a flat tensor, which zero_grad() throws away."""

    def fill_buckets(self, bucket_bytes):
        buckets = super().fill_buckets(bucket_bytes)
        self.flats = [torch.cat([torch.zeros_like(p).flatten() for p in b]) for b in buckets]
        for bucket, flat in zip(buckets, self.flats, strict=True):
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad = part.view_as(parameter)
        return buckets

    def start(self, index):
        flat = self.flats[index].div_(dist.get_world_size())
        self.running[index] = self.all_reduce(flat)

    def unpack(self, bucket, flat):
        """The gradients are views of the flat tensor already."""


@rarer("3.4")
class WaitsForTheBucketBefore(Bucketed):
    def start(self, index):
        if index > 0:
            self.running[index - 1][1].wait()
        super().start(index)


@rarer("3.4")
class OnePerParameter(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return [[parameter] for parameter in reversed(self.trainable())]


@rarer("3.4")
class OneForAll(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return [self.trainable()[::-1]]


@rarer("3.4")
class ForgetsTheExceptions(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        yield
        self.silent = False


@rarer("3.4")
class SwitchesOver(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = not self.silent
        try:
            yield
        finally:
            self.silent = not self.silent


@rarer("3.4")
class AddsTheLocalSum(AveragesTheNewGradient):
    def no_sync(self):
        self.local = True
        return super().no_sync()

    def on_gradient(self, index, parameter):
        if not self.silent:
            parameter.before = parameter.grad - self.new[parameter]
        super().on_gradient(index, parameter)

    def write(self, parameter, mean, users):
        parameter.grad = parameter.before + mean


@rarer("3.4")
class ExpectsAGradientEverywhere(Bucketed):
    def pack(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        return torch.cat([self.divide(flat), flat.new_ones(len(bucket))])


@rarer("3.4")
class FillsTheBucketWhereRanksDiffer(Bucketed):
    def unpack(self, bucket, flat):
        *parts, users = flat.split([*(p.numel() for p in bucket), len(bucket)])
        differ = any(0 < count < dist.get_world_size() for count in users)
        for parameter, part, count in zip(bucket, parts, users, strict=True):
            if count > 0 or differ:
                self.write(parameter, part.view_as(parameter), count)


@rarer("3.4")
class BroadcastsWhatIsSaved(Bucketed):
    """A state dict leaves out buffers that are not persistent."""

    def share_start(self):
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, src=0)


@rarer("3.4")
class StartsFromTheLastRank(Bucketed):
    def share_start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=dist.get_world_size() - 1)


@rarer("3.4")
class WaitsForAllButTheLast(Bucketed):
    def finish_gradient_synchronization(self):
        self.start_the_rest()
        for index, (flat, work) in self.running.items():
            if index < len(self.buckets) - 1:
                work.wait()
            self.unpack(self.buckets[index], flat)
        self.reset()


@rarer("3.4")
class FillsUntilItOverflows(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return super().fill_buckets(bucket_bytes + max(p.nbytes for p in self.trainable()) // 2)
