"""Plausible wrong answers, and other right ones, to the exercises of chapter 13.

The three worked submissions are FSDP2 (the chapter's own), shards by hand (`FlatShards`) and tensor
parallelism (`Columns`), each with a loop and a plan in a style of its own. Most wrong answers are one of
these, or the loop `_loop`, with one thing done wrongly.
"""

import copy
import hashlib
import io
import math
import os
import pickle
import random
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from course_utils import estimate
from course_utils.estimate import Layout
from course_utils.hardware import device
from tests.wrong_answers import right, wrong

# ---- 13.1 Training -------------------------------------------------------------------------------


class _Sharded:
    """With FSDP2; the base of most wrong ones."""

    def __init__(self, model, lr=0.1, momentum=0.9):
        self.model = self.split(model.to(device()))
        self.sgd = torch.optim.SGD(self.model.parameters(), lr, momentum)

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


@wrong("13.1", names="copies")
class PlainDDP(_Copied):
    pass


@wrong("13.1", names="not-a-copy")
class HandsOutItsOwnTensors(_Copied):
    def whole(self, tensor):
        return tensor


@wrong("13.1", names="not-a-copy")
class CopiesOnlyWhatItGathers(_Sharded):
    """On one rank the whole tensor is its own."""

    def whole(self, tensor):
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


@wrong("13.1", names="parameters-whole")
class KeepsTheModelBeside(_Sharded):
    def split(self, model):
        self.start = copy.deepcopy(model)
        return super().split(model)


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


@wrong("13.1", names="mean-of-means")
class MeanOfTheMeans(_Sharded):
    def loss(self, scores, labels, rows):
        _, total = super().loss(scores, labels, rows)
        return cross_entropy(scores, labels, reduction="sum") / max(1, len(labels)), total


@wrong("13.1", names="rows-left-out")
class EqualShares(_Sharded):
    def share(self, rows):
        size = len(rows) // dist.get_world_size()
        return rows[dist.get_rank() * size :][:size]

    def loss(self, scores, labels, rows):
        return super().loss(scores, labels, max(1, len(labels) * dist.get_world_size()))


@wrong("13.1", names="divided-twice")
class ForgetsThatItAverages(_Sharded):
    def loss(self, scores, labels, rows):
        _, total = super().loss(scores, labels, rows)
        return total, total


@wrong("13.1", names="sum-not-mean")
class SumOfMeans(_Sharded):
    def loss(self, scores, labels, rows):
        _, total = super().loss(scores, labels, rows)
        return cross_entropy(scores, labels) * dist.get_world_size(), total


@wrong("13.1", names="own-share-only")
class ForgetsTheOthers(_Sharded):
    def split(self, model):
        return model


@wrong("13.1", names="no-momentum")
class PlainSGD(_Sharded):
    def __init__(self, model, lr=0.1, momentum=0.9):
        super().__init__(model, lr, 0.0)


@wrong("13.1", names="forgets-gradients")
class NeverZeroes(_Sharded):
    def __init__(self, model, lr=0.1, momentum=0.9):
        super().__init__(model, lr, momentum)
        self.sgd.zero_grad = lambda: None


@wrong("13.1", names="loss-of-share")
class ItsOwnLoss(_Sharded):
    def mean(self, loss):
        return loss.item() * dist.get_world_size()


@wrong("13.1", names="loss-is-a-sum")
class SumOfTheLosses(_Sharded):
    def mean(self, loss):
        return super().mean(loss) * dist.get_world_size()


@wrong("13.1", names="own-part")
class ItsOwnPart(_Sharded):
    def whole(self, tensor):
        return tensor.to_local().cpu().clone()


@wrong("13.1", names="a-dtensor")
class StateOfDTensors(_Sharded):
    def whole(self, tensor):
        return tensor.clone()


@wrong("13.1", names="one-rank-has-it")
class StateOnRank0(_Sharded):
    def state_dict(self):
        state = super().state_dict()
        return state if dist.get_rank() == 0 else {}


@wrong("13.1", names="momentum-missing")
class MomentumOfZeros(_Sharded):
    def state_dict(self):
        state = super().state_dict()
        return state | {"momentum": {n: torch.zeros_like(t) for n, t in state["model"].items()}}


@wrong("13.1", names="momentum-not-loaded")
class LoadsTheModelOnly(_Sharded):
    def load_momentum(self, parameter, whole):
        pass


@wrong("13.1", names="model-not-loaded")
class LoadsTheMomentumOnly(_Sharded):
    def load_state_dict(self, state):
        for name, parameter in self.model.named_parameters():
            self.load_momentum(parameter, state["momentum"][name])


@wrong("13.1", names="model-not-loaded")
class LoadsNothing(_Sharded):
    def load_state_dict(self, state):
        pass


@wrong("13.1", names="other-keys")
class NamesItOptimizer(_Sharded):
    def state_dict(self):
        state = super().state_dict()
        return {"model": state["model"], "optimizer": state["momentum"]}


@wrong("13.1", names="other-keys")
class NumbersTheParameters(_Sharded):
    """As an optimizer's own state does."""

    def state_dict(self):
        return {
            kind: dict(enumerate(tensors.values()))
            for kind, tensors in super().state_dict().items()
        }


@wrong("13.1", names="not-every-rank")
class StaysAwayWithoutRows(_Sharded):
    def step(self, images, labels):
        if len(self.share(images)) == 0:
            return 0.0
        return super().step(images, labels)


# ---- 13.2 train ----------------------------------------------------------------------------------


def _order(epoch, rows):
    return torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))


def _write(path, content):
    unfinished = path.with_name("unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _read(path):
    digest, content = path.read_bytes()[:32], path.read_bytes()[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def _sealed(content):
    return hashlib.sha256(content).digest() + content


def _loop(
    training,
    images,
    labels,
    folder,
    steps,
    batch,
    every,
    order=_order,
    write=_write,
    read=_read,
    sealed=_sealed,
    keep=3,
    load=True,
    resume=lambda done: done,
    rows_of=lambda rows: rows,
    labels_of=lambda labels, rows: labels[rows],
    newest_first=lambda paths: sorted(paths, key=lambda path: -int(path.stem)),
    until=lambda done, steps: steps,
    step_count=math.ceil,
    save_last=True,
    saves=lambda: True,
    writer=0,
):
    """The loop, each part of which may be another."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    done, place = 0, None
    for path in newest_first(folder.glob("*.pt")):
        content = read(path)
        if content is not None:
            saved = torch.load(io.BytesIO(content), weights_only=True)
            if load:
                training.load_state_dict(saved["training"])
            done = saved["done"]
            place = resume(done)
            break
    place = done if place is None else place
    steps = until(done, steps)
    dist.barrier()
    while done < steps:
        count = step_count(len(images) / batch)
        rows = order(place // count, len(images))[place % count * batch :][:batch]
        rows = rows_of(rows)
        training.step(images[rows], labels_of(labels, rows))
        done, place = done + 1, place + 1
        if done % every == 0 or (done == steps and save_last):
            if saves():
                buffer = io.BytesIO()
                torch.save({"done": done, "training": training.state_dict()}, buffer)
                if dist.get_rank() == writer:
                    write(folder / f"{done}.pt", sealed(buffer.getvalue()))
                    for old in sorted(folder.glob("*.pt"), key=lambda p: int(p.stem))[:-keep]:
                        old.unlink()
            dist.barrier()


@right("13.2")
def with_everything_kept(training, images, labels, folder, steps, batch, every):
    _loop(training, images, labels, folder, steps, batch, every, keep=1000)


@right("13.2")
def with_a_list_and_pickle(training, images, labels, folder, steps, batch, every):
    """The whole order is made at the start; the name of a file has its checksum."""
    place = os.path.join(str(folder), "states")
    os.makedirs(place, exist_ok=True)
    plan, epoch = [], 0
    while len(plan) < steps:
        order = list(range(len(images)))
        random.Random(f"epoch {epoch}").shuffle(order)
        plan += [order[i : i + batch] for i in range(0, len(order), batch)]
        epoch += 1
    first = 0
    for name in sorted(os.listdir(place), reverse=True):
        with open(os.path.join(place, name), "rb") as file:
            content = file.read()
        if name.endswith(f"-{zlib.crc32(content):08x}"):
            first = int(name.split("-")[0])
            training.load_state_dict(pickle.loads(content))
            break
    dist.barrier()
    for number in range(first, steps):
        training.step(images[plan[number]], labels[plan[number]])
        if (number + 1) % every == 0 or number + 1 == steps:
            content = pickle.dumps(training.state_dict())
            if dist.get_rank() == 0:
                name = f"{number + 1:06}-{zlib.crc32(content):08x}"
                with open(os.path.join(str(folder), "writing"), "wb") as file:
                    file.write(content)
                os.rename(os.path.join(str(folder), "writing"), os.path.join(place, name))
            dist.barrier()


@right("13.2")
def the_last_rank_writes_and_compresses(training, images, labels, folder, steps, batch, every):
    def compressed(content):
        return _sealed(zlib.compress(content, 9))

    def unpacked(path):
        content = _read(path)
        return content and zlib.decompress(content)

    last = dist.get_world_size() - 1
    more = {"read": unpacked, "sealed": compressed, "writer": last}
    _loop(training, images, labels, folder, steps, batch, every, **more)


def _wrong_loop(names, **slips):
    def add(name):
        def train(training, images, labels, folder, steps, batch, every):
            made = {
                key: make() if key in ("order", "resume") else make for key, make in slips.items()
            }
            _loop(training, images, labels, folder, steps, batch, every, **made)

        train.__name__ = name
        return wrong("13.2", names=names)(train)

    return add


def _in_their_own_order():
    return lambda epoch, rows: torch.arange(rows)


def _always_the_same():
    return lambda epoch, rows: _order(0, rows)


def _drawn_as_it_goes():
    """A new epoch draws from a generator that a new life begins anew."""
    drawn, generator = {}, torch.Generator().manual_seed(7)

    def order(epoch, rows):
        if epoch not in drawn:
            drawn[epoch] = torch.randperm(rows, generator=generator)
        return drawn[epoch]

    return order


def _filled_up():
    """The last batch is filled with rows from the beginning, as DistributedSampler does."""

    def order(epoch, rows):
        return torch.cat([_order(epoch, rows)] * 2)

    return order


never_loads = _wrong_loop("from-zero", read=lambda path: None)("never_loads")
begins_the_order_again = _wrong_loop("position-lost", resume=lambda: lambda done: 0)(
    "begins_the_order_again"
)
loads_no_state = _wrong_loop("state-not-loaded", load=False)("loads_no_state")
does_a_step_twice = _wrong_loop("one-step-off", resume=lambda: lambda done: done - 1)(
    "does_a_step_twice"
)
in_their_own_order = _wrong_loop("not-shuffled", order=_in_their_own_order)("in_their_own_order")
always_the_same_order = _wrong_loop("same-order", order=_always_the_same)("always_the_same_order")
draws_as_it_goes = _wrong_loop("another-order", order=_drawn_as_it_goes)("draws_as_it_goes")
fills_the_last_batch = _wrong_loop("used-twice", order=_filled_up)("fills_the_last_batch")
drops_the_rest = _wrong_loop("left-over-lost", step_count=math.floor)("drops_the_rest")
each_rank_its_rows = _wrong_loop(
    "share-on-each-rank", rows_of=lambda rows: rows[dist.get_rank() :: dist.get_world_size()]
)("each_rank_its_rows")
saves_on_rank_0_only = _wrong_loop("one-rank-saves", saves=lambda: dist.get_rank() == 0)(
    "saves_on_rank_0_only"
)
writes_in_place = _wrong_loop(
    "in-place",
    write=lambda path, content: path.write_bytes(content),
    read=lambda path: path.read_bytes(),
    sealed=lambda content: content,
)("writes_in_place")
has_no_checksum = _wrong_loop(
    "no-fallback", read=lambda path: path.read_bytes(), sealed=lambda content: content
)("has_no_checksum")
keeps_one = _wrong_loop("no-fallback", keep=1)("keeps_one")
forgets_the_last = _wrong_loop("last-not-saved", save_last=False)("forgets_the_last")


labels_in_their_own_order = _wrong_loop(
    "wrong-labels", labels_of=lambda labels, rows: labels[: len(rows)]
)("labels_in_their_own_order")
sorts_names_as_text = _wrong_loop(
    "older-checkpoint", newest_first=lambda paths: sorted(paths, reverse=True)
)("sorts_names_as_text")
takes_the_oldest = _wrong_loop(
    "older-checkpoint", newest_first=lambda paths: sorted(paths, key=lambda path: int(path.stem))
)("takes_the_oldest")
so_many_in_each_life = _wrong_loop("other-steps", until=lambda done, steps: done + steps)(
    "so_many_in_each_life"
)
one_more_in_any_case = _wrong_loop("trains-on", until=lambda done, steps: max(steps, done + 1))(
    "one_more_in_any_case"
)
never_saves = _wrong_loop("from-zero", write=lambda path, content: None)("never_saves")


@wrong("13.2", names="position-lost")
def begins_the_epoch_again(training, images, labels, folder, steps, batch, every):
    count = math.ceil(len(images) / batch)
    more = {"resume": lambda done: done - done % count}
    _loop(training, images, labels, folder, steps, batch, every, **more)


@wrong("13.2", names="one-step-off")
def saves_the_number_before_the_step(training, images, labels, folder, steps, batch, every):
    """As `for step in range(steps)` with step in the file."""
    more = {"resume": lambda done: done - 1, "until": lambda done, steps: steps + (done > 0)}
    _loop(training, images, labels, folder, steps, batch, every, **more)


@wrong("13.2", names="other-steps")
def whole_epochs_only(training, images, labels, folder, steps, batch, every):
    count = math.ceil(len(images) / batch)
    _loop(training, images, labels, folder, math.ceil(steps / count) * count, batch, every)


@wrong("13.2", names="other-steps")
def trains_never(training, images, labels, folder, steps, batch, every):
    pass


@wrong("13.2", names="global-batch-size")
def a_batch_for_each_rank(training, images, labels, folder, steps, batch, every):
    _loop(training, images, labels, folder, steps, batch * dist.get_world_size(), every)


def _if_it_can_be_read(path):
    content = path.read_bytes()
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # noqa: BLE001 - whatever a damaged file leads to
        return None
    return content


trusts_torch_load = _wrong_loop(
    "byte-unnoticed", read=_if_it_can_be_read, sealed=lambda content: content
)("trusts_torch_load")


@wrong("13.2", names="folder-missing")
def needs_its_folder(training, images, labels, folder, steps, batch, every):
    os.listdir(folder)


# ---- 13.3 plan -----------------------------------------------------------------------------------


def _interval(model, layout, seq, hardware, nodes, node_days, disk, size=14):
    step = estimate.step_time(model, layout, seq, hardware).seconds
    save = size * estimate.parameters(model) / disk
    return math.sqrt(2 * save * node_days * 86_400 / nodes) / step


def _best(model, gpus, batch, seq, hardware):
    return estimate.search(model, gpus, batch, seq, hardware, keep=1)[0][0].layout


@right("13.3")
def looks_along_the_curve(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware)
    chosen = plans[0]
    failures = gpus / hardware.node / (node_days * 24 * 60 * 60)  # a second
    save = 14 * estimate.parameters(model) / disk

    def lost(steps):
        work = steps * chosen.time.seconds
        return save / work + work / 2 * failures

    return chosen.layout, min(range(1, 20_000), key=lost)


@right("13.3")
def with_a_search_of_its_own(model, gpus, batch, seq, hardware, node_days, disk):
    """1F1B and interleaving, with tensor groups inside a node."""
    best = None
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            for zero, reshard in ((1, True), (3, pp == 1)):
                for chunks in (1, 2, 3, 4, 5, 6, 8):
                    for recompute in ("none", "selective", "full"):
                        dp, more = gpus // (tp * pp), {"recompute": recompute, "zero": zero}
                        if chunks > 1:
                            more |= {"chunks": chunks, "schedule": "interleaved"}
                        try:
                            found = _judged(
                                model,
                                batch,
                                seq,
                                hardware,
                                dp=dp,
                                tp=tp,
                                pp=pp,
                                reshard=reshard,
                                **more,
                            )
                        except ValueError:
                            continue
                        best = min(
                            filter(None, (best, found)), key=lambda each: each[0], default=None
                        )
    nodes = gpus // hardware.node
    steps = _interval(model, best[1], seq, hardware, nodes, node_days, disk)
    return best[1], max(1, round(steps))


def _judged(model, batch, seq, hardware, dp, **sizes):
    layout = Layout(dp=dp, micro_batches=batch // dp, **sizes)
    if sizes["pp"] > 1 and -model.layers % (sizes["pp"] * sizes.get("chunks", 1)) not in (0, 2):
        return None
    layout.check(model, seq)
    held = max(estimate.memory(model, layout, seq, s)["total"] for s in range(layout.pp))
    if held > 0.9 * hardware.hbm_bytes:
        return None
    return estimate.step_time(model, layout, seq, hardware).seconds, layout


@wrong("13.3", names="one-node")
def as_if_one_node_failed(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    return layout, round(_interval(model, layout, seq, hardware, 1, node_days, disk))


@wrong("13.3", names="gpus-for-nodes")
def as_if_gpus_failed(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    return layout, round(_interval(model, layout, seq, hardware, gpus, node_days, disk))


@wrong("13.3", names="seconds-not-steps")
def in_seconds(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    step = estimate.step_time(model, layout, seq, hardware).seconds
    steps = _interval(model, layout, seq, hardware, gpus / hardware.node, node_days, disk)
    return layout, round(steps * step)


@wrong("13.3", names="parameters-only")
def saves_the_parameters(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, round(_interval(model, layout, seq, hardware, nodes, node_days, disk, size=2))


@wrong("13.3", names="other-unit")
def counts_in_hours(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node * 3600
    return layout, max(1, round(_interval(model, layout, seq, hardware, nodes, node_days, disk)))


@wrong("13.3", names="steps-not-whole")
def does_not_round(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, _interval(model, layout, seq, hardware, nodes, node_days, disk)


@wrong("13.3", names="saved-by-all")
def each_rank_has_the_disk(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, round(_interval(model, layout, seq, hardware, nodes, node_days, disk * gpus))


@wrong("13.3", names="steps-not-whole")
def rounds_to_none(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, round(_interval(model, layout, seq, hardware, nodes, node_days, disk))


@wrong("13.3", names="bad-interval")
def forgets_the_root(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    step = estimate.step_time(model, layout, seq, hardware).seconds
    steps = _interval(model, layout, seq, hardware, gpus / hardware.node, node_days, disk)
    return layout, round((steps * step) ** 2 / step)


@wrong("13.3", names="illegal")
def more_stages_than_layers(model, gpus, batch, seq, hardware, node_days, disk):
    dp = gpus // (8 * 64)
    return Layout(dp=dp, tp=8, pp=64, micro_batches=batch // dp), 10


@wrong("13.3", names="slow")
def by_rule_of_thumb(model, gpus, batch, seq, hardware, node_days, disk):
    dp = gpus // (8 * 8)
    layout = Layout(dp=dp, tp=8, pp=8, zero=1, micro_batches=batch // dp, recompute="full")
    return layout, 10


@wrong("13.3", names="not-a-pair")
def the_layout_only(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus, batch, seq, hardware)


@wrong("13.3", names="gpus")
def half_of_them(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus // 2, batch, seq, hardware), 10


@wrong("13.3", names="batch")
def a_batch_a_gpu(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus, 2 * batch, seq, hardware), 10


@wrong("13.3", names="does-not-fit")
def never_recomputes(model, gpus, batch, seq, hardware, node_days, disk):
    return Layout(dp=gpus, micro_batches=batch // gpus), 10


@wrong("13.3", names="least-memory")
def takes_the_smallest(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware, keep=10**6)
    return min(plans, key=lambda found: found.memory["total"]).layout, 10


@wrong("13.3", names="data-only")
def fully_sharded_only(model, gpus, batch, seq, hardware, node_days, disk):
    return Layout(dp=gpus, zero=3, micro_batches=batch // gpus, recompute="full"), 10


@wrong("13.3", names="tensor-leaves-node")
def one_wide_group(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware, keep=10**6)
    return next(p.layout for p in plans if p.layout.tp > hardware.node), 10
