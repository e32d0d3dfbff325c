"""Answers to 13.1, `Training`: wrong in a plausible way, or right in another."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from course_utils.hardware import device
from tests.wrong_answers import right, wrong


class _Sharded:
    """With FSDP2; the base of most wrong ones."""

    def __init__(self, model, lr=0.1, momentum=0.9):
        self.model = self.split(model.to(device()))
        # on a GPU the default takes all tensors in one call, and `Columns` has DTensors beside plain ones
        self.sgd = torch.optim.SGD(self.model.parameters(), lr, momentum, foreach=False)

    def split(self, model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def share(self, rows):
        return rows.tensor_split(dist.get_world_size())[dist.get_rank()]

    def loss(self, scores, labels, rows):
        total = cross_entropy(scores, labels, reduction="sum") / rows
        return total * dist.get_world_size(), total

    def mean(self, loss):
        dist.all_reduce(loss)
        return loss.item()

    def step(self, images, labels):
        self.sgd.zero_grad()
        own = self.share(images), self.share(labels)
        steering, loss = self.loss(self.model(own[0]), own[1], len(images))
        steering.backward()
        self.sgd.step()
        self.sgd.zero_grad()
        return self.mean(loss.detach().clone())

    def whole(self, tensor):
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()

    def state_dict(self):
        names = dict(self.model.named_parameters())
        velocity = {
            name: self.sgd.state[p].get("momentum_buffer", torch.zeros_like(p))
            for name, p in names.items()
        }
        return {
            "model": {name: self.whole(p.detach()) for name, p in names.items()},
            "momentum": {name: self.whole(v.detach()) for name, v in velocity.items()},
        }

    def cut(self, whole, like):
        whole = whole.to(device())
        if isinstance(like, DTensor):
            return distribute_tensor(whole, like.device_mesh, like.placements)
        return whole.clone()

    def load_state_dict(self, state):
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(self.cut(state["model"][name], parameter))
            self.load_momentum(parameter, state["momentum"][name])

    def load_momentum(self, parameter, whole):
        self.sgd.state[parameter]["momentum_buffer"] = self.cut(whole, parameter)


@right("13.1")
class FlatShards:
    """ZeRO 3 by hand: a part is whole only while it computes, and computes twice."""

    def __init__(self, model, lr=0.1, momentum=0.9):
        self.lr, self.momentum = lr, momentum
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        parts = {"first": model.first}
        parts |= {f"blocks.{n}": block for n, block in enumerate(model.blocks)}
        parts["last"] = model.last
        self.shapes = {name: copy.deepcopy(part).to("meta") for name, part in parts.items()}
        self.shards = {
            name: self.own({n: p.detach() for n, p in part.named_parameters()})
            for name, part in parts.items()
        }
        self.speed = {name: torch.zeros_like(shard) for name, shard in self.shards.items()}

    def own(self, named):
        flat = torch.cat([tensor.flatten() for tensor in named.values()])
        return self.padded(flat).chunk(self.ranks)[self.rank].clone()

    def padded(self, flat):
        return pad(flat, (0, -len(flat) % self.ranks))

    def whole(self, name, shards):
        pieces = [torch.empty_like(shards[name]) for _ in range(self.ranks)]
        dist.all_gather(pieces, shards[name])
        flat, named = torch.cat(pieces), {}
        for key, parameter in self.shapes[name].named_parameters():
            named[key], flat = (
                flat[: parameter.numel()].view(parameter.shape),
                flat[parameter.numel() :],
            )
        return named

    def through(self, name, x, named):
        y = functional_call(self.shapes[name], named, (x,))
        return x + y if name.startswith("blocks") else y

    def step(self, images, labels):
        mine = slice(self.rank, None, self.ranks)
        x, inputs = images[mine], {}
        with torch.no_grad():
            for name in self.shards:
                inputs[name] = x
                x = self.through(name, x, self.whole(name, self.shards))
        scores = x.requires_grad_()
        loss = cross_entropy(scores, labels[mine], reduction="sum") / len(images)
        (gradient,) = torch.autograd.grad(loss, [scores])
        for name in reversed(self.shards):
            gradient = self.backward(name, inputs.pop(name), gradient)
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item()

    def backward(self, name, x, gradient):
        named = {key: p.requires_grad_() for key, p in self.whole(name, self.shards).items()}
        x = x.detach().requires_grad_()
        y = self.through(name, x, named)
        gradient, *own = torch.autograd.grad(y, [x, *named.values()], gradient)
        flat = self.padded(torch.cat([each.flatten() for each in own]))
        mine = torch.empty_like(self.shards[name])
        dist.reduce_scatter(mine, [piece.contiguous() for piece in flat.chunk(self.ranks)])
        self.speed[name].mul_(self.momentum).add_(mine)
        self.shards[name].sub_(self.speed[name], alpha=self.lr)
        return gradient

    def state_dict(self):
        def named(shards):
            return {
                f"{name}.{key}": tensor.cpu().clone()
                for name in shards
                for key, tensor in self.whole(name, shards).items()
            }

        return {"model": named(self.shards), "momentum": named(self.speed)}

    def load_state_dict(self, state):
        for kind, shards in (("model", self.shards), ("momentum", self.speed)):
            for name, part in self.shapes.items():
                keys = [key for key, _ in part.named_parameters()]
                whole = {key: state[kind][f"{name}.{key}"] for key in keys}
                shards[name].copy_(self.own(whole))


@right("13.1")
class Columns(_Sharded):
    """Tensor parallelism: every rank computes all rows with its columns and rows of the blocks."""

    def split(self, model):
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return model

    def share(self, rows):
        return rows

    def loss(self, scores, labels, rows):
        loss = cross_entropy(scores, labels)
        return loss, loss

    def mean(self, loss):
        return loss.item()


@right("13.1")
class PairsOfRanks(_Sharded):
    """Hybrid: shards within pairs of ranks, where they come in pairs, and the pairs are copies."""

    def split(self, model):
        ranks = dist.get_world_size()
        sizes = (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)
        mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("copies", "shards"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class _Copied(_Sharded):
    def split(self, model):
        self.copy = [DistributedDataParallel(model)]
        return model

    def step(self, images, labels):
        own = self.share(images), self.share(labels)
        steering, loss = self.loss(self.copy[0](own[0]), own[1], len(images))
        steering.backward()
        self.sgd.step()
        self.sgd.zero_grad()
        return self.mean(loss.detach().clone())


@wrong("13.1", names="whole-between-steps")
class PlainDDP(_Copied):
    pass


@wrong("13.1", names="not-a-copy")
class CopiesOnlyWhatItGathers(_Sharded):
    """On one rank the whole tensor is its own."""

    def whole(self, tensor):
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


@wrong("13.1", names="all-at-once")
class ShardsTheModelOnly(_Sharded):
    def split(self, model):
        return fully_shard(model)


@wrong("13.1", names="too-many-bytes")
class LooksAtEachParameter(_Sharded):
    def step(self, images, labels):
        loss = super().step(images, labels)
        for parameter in self.model.parameters():
            assert parameter.detach().full_tensor().isfinite().all()
        return loss


@wrong("13.1", names="rows-count-unevenly")
class MeanOfTheMeans(_Sharded):
    def loss(self, scores, labels, rows):
        _, total = super().loss(scores, labels, rows)
        return cross_entropy(scores, labels, reduction="sum") / max(1, len(labels)), total


@wrong("13.1", names="other-factor")
class ForgetsThatItAverages(_Sharded):
    def loss(self, scores, labels, rows):
        _, total = super().loss(scores, labels, rows)
        return total, total


@wrong("13.1", names="other-factor")
class SumOfMeans(_Sharded):
    def loss(self, scores, labels, rows):
        _, total = super().loss(scores, labels, rows)
        return cross_entropy(scores, labels) * dist.get_world_size(), total


@wrong("13.1", names="own-share-only")
class ForgetsTheOthers(_Sharded):
    def split(self, model):
        return model


@wrong("13.1", names="momentum-missing")
class PlainSGD(_Sharded):
    def __init__(self, model, lr=0.1, momentum=0.9):
        super().__init__(model, lr, 0.0)


@wrong("13.1", names="old-gradients")
class NeverZeroes(_Sharded):
    def __init__(self, model, lr=0.1, momentum=0.9):
        super().__init__(model, lr, momentum)
        self.sgd.zero_grad = lambda: None


class _LooksAgain(_Sharded):
    def step(self, images, labels):
        super().step(images, labels)
        own = self.share(images), self.share(labels)
        with torch.no_grad():
            _, loss = self.loss(self.model(own[0]), own[1], len(images))
        return self.mean(loss)


@wrong("13.1", names="other-loss")
class LooksAgain(_LooksAgain, _Copied):
    pass


@wrong("13.1", names="plain-parameter")
class LooksAgainAtWhatIsSharded(_LooksAgain):
    def whole(self, tensor):
        return tensor.full_tensor().cpu().clone()


@wrong("13.1", names="another-form")
class StateOfDTensors(_Sharded):
    def whole(self, tensor):
        return tensor.clone()


@wrong("13.1", names="another-form")
class StateOnRank0(_Sharded):
    def state_dict(self):
        state = super().state_dict()
        return state if dist.get_rank() == 0 else {}


@wrong("13.1", names="not-loaded")
class LoadsTheModelOnly(_Sharded):
    def load_momentum(self, parameter, whole):
        pass


@wrong("13.1", names="not-every-rank")
class StaysAwayWithoutRows(_Sharded):
    def step(self, images, labels):
        if len(self.share(images)) == 0:
            return 0.0
        return super().step(images, labels)


@wrong("13.1", names="not-stepped")
class MakesTheOptimizerFirst(_Sharded):
    def __init__(self, model, lr=0.1, momentum=0.9):
        before = torch.optim.SGD(model.to(device()).parameters(), lr, momentum)
        super().__init__(model, lr, momentum)
        self.sgd.step = before.step


@wrong("13.1", names="momentum-before")
class HasNoMomentumBeforeTheFirstStep(_Sharded):
    def state_dict(self):
        for parameter in self.model.parameters():
            self.sgd.state[parameter]["momentum_buffer"]
        return super().state_dict()
