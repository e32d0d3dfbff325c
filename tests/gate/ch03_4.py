"""3.4, `OverlappedDDP`: answers written from the stub alone.

Each is a whole answer; what they have in common, and what is right, stands in `_Bucketed`.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class _Bucketed(nn.Module):
    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.module = module
        self.synchronise = True
        for tensor in self.tensors_of_rank_0():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            with torch.no_grad():
                tensor.copy_(whole)
        self.buckets = self.fill_buckets(bucket_bytes)
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.begin_step()
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def tensors_of_rank_0(self):
        return [*self.module.parameters(), *self.module.buffers()]

    def in_order(self):
        return reversed([p for p in self.module.parameters() if p.requires_grad])

    def fill_buckets(self, bucket_bytes):
        buckets, size = [], 0
        for parameter in self.in_order():
            if not buckets or size + parameter.nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.nbytes
        return buckets

    def begin_step(self):
        self.arrived = [set() for _ in self.buckets]
        self.under_way = {}  # by bucket: its flat gradients and the all-reduce

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def is_full(self, index):
        return len(self.arrived[index]) == len(self.buckets[index])

    def ready(self, parameter):
        if self.synchronise:
            self.arrived[self.bucket_of[parameter]].add(parameter)
            self.send_full_buckets()

    def send_full_buckets(self):
        while (index := len(self.under_way)) < len(self.buckets) and self.is_full(index):
            self.start(index)

    def start(self, index):
        bucket = self.buckets[index]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.under_way[index] = flat, dist.all_reduce(flat, async_op=True)

    def used_anywhere(self):
        used = torch.tensor([p.grad is not None for p in self.bucket_of], dtype=torch.int32)
        used = used.to(next(self.module.parameters()).device)
        dist.all_reduce(used)
        return dict(zip(self.bucket_of, used.tolist()))

    def finish_gradient_synchronization(self):
        if not self.buckets:
            return
        for index in range(len(self.under_way), len(self.buckets)):
            self.start(index)
        used = self.used_anywhere()
        for index, (flat, work) in self.under_way.items():
            work.wait()
            flat /= dist.get_world_size()
            bucket = self.buckets[index]
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                if used[parameter]:
                    self.put_back(parameter, part.view_as(parameter))
        self.begin_step()

    def put_back(self, parameter, gradient):
        parameter.grad = gradient.clone()

    @contextmanager
    def no_sync(self):
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before


class BuffersStayDifferent(_Bucketed):
    """Broadcasts the parameters at the start and forgets the buffers."""

    def tensors_of_rank_0(self):
        return self.module.parameters()


class LeavesOutOfOrder(_Bucketed):
    """A bucket leaves as soon as it is full, whether or not those before it have left."""

    def send_full_buckets(self):
        for index in range(len(self.buckets)):
            if self.is_full(index) and index not in self.under_way:
                self.start(index)

    def finish_gradient_synchronization(self):
        for index in range(len(self.buckets)):
            if index not in self.under_way:
                self.start(index)
        super().finish_gradient_synchronization()


class UnfilledBucketStays(_Bucketed):
    """At the end it waits for what has left; a bucket with an unused parameter never leaves."""

    def finish_gradient_synchronization(self):
        for index, (flat, work) in self.under_way.items():
            work.wait()
            flat /= dist.get_world_size()
            bucket = self.buckets[index]
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                self.put_back(parameter, part.view_as(parameter))
        self.begin_step()


class ZerosWhereNobodyUsed(_Bucketed):
    """Writes back every part of a bucket, so a parameter that no rank used gets zeros, not None."""

    def used_anywhere(self):
        return dict.fromkeys(self.bucket_of, True)


class WaitsInTheHook(_Bucketed):
    """The hook calls a blocking all-reduce, so that backward stands still meanwhile."""

    class Done:
        def wait(self):
            pass

    def start(self, index):
        bucket = self.buckets[index]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        self.under_way[index] = flat, self.Done()


class StaysInTheBucket(_Bucketed):
    """torch.cat made a copy: the mean stays in the bucket and never comes back into `.grad`."""

    def put_back(self, parameter, gradient):
        pass


class NoSyncAlwaysEndsOn(_Bucketed):
    """Leaving a no_sync() block switches on, also inside another one; no finally either."""

    @contextmanager
    def no_sync(self):
        self.synchronise = False
        yield
        self.synchronise = True


class FirstLayersFirst(_Bucketed):
    """Buckets in the order of parameters(): the first one is full only when backward ends."""

    def in_order(self):
        return [p for p in self.module.parameters() if p.requires_grad]


ANSWERS = {
    "3.4": [
        BuffersStayDifferent,
        LeavesOutOfOrder,
        UnfilledBucketStays,
        ZerosWhereNobodyUsed,
        WaitsInTheHook,
        StaysInTheBucket,
        NoSyncAlwaysEndsOn,
        FirstLayersFirst,
    ]
}
