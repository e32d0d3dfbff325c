"""Answers to 8.4, `MiniFSDP`: wrong in a plausible way, or right in another."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from course_exercises.authoring import load_answer
from course_utils.hardware import device
from tests.wrong_answers import right, wrong

MiniFSDP = load_answer("8.4")


@right("8.4")
class GathersCopiesAndDividesFirst(MiniFSDP):
    """Gathers into tensors of their own, averages before it adds, and frees at the next chance."""

    def _start_gather(self, weights):
        for weight in weights:
            memory = weight.flat.untyped_storage()
            if memory.nbytes() > 0:
                continue
            memory.resize_(weight.bytes)
            kept = weight.kept.detach().to(weight.flat.dtype)
            weight.pieces = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
            if weight.sharded:
                weight.work = dist.all_gather(
                    weight.pieces, kept, group=self.gathers, async_op=True
                )
            else:
                weight.whole.data.copy_(kept)

    def _wait(self, weights):
        for weight in weights:
            if weight.work is not None:
                weight.work.wait()
                weight.flat.copy_(torch.cat(weight.pieces))
                weight.work = weight.pieces = None

    def _gradient_ready(self, weight, whole):
        whole.grad /= dist.get_world_size()
        super()._gradient_ready(weight, whole)

    def _finish_reductions(self):
        for work, kept, total in self.pending:
            work.wait()
            kept.grad = total if kept.grad is None else kept.grad + total
        self.pending.clear()


class _WholeOf(torch.autograd.Function):
    """From a shard to its whole matrix; in backward from the gradient to what is reduced."""

    @staticmethod
    def forward(ctx, kept, call):
        ctx.kept, ctx.call = kept, call
        return call.whole_of(kept)

    @staticmethod
    def backward(ctx, gradient):
        ctx.call.wholes.pop(ctx.kept, None)
        ctx.call.model.reduce(ctx.kept, gradient)
        return None, None


class _Call:
    """One call of a layer: which matrices are whole for it right now."""

    def __init__(self, model, kept):
        self.model, self.matrices = model, [k for k in kept if k in model.shape_of]
        self.wholes, self.running = {}, {}
        self.index = 0

    def start(self):
        for kept in self.matrices:
            if kept not in self.wholes and kept not in self.running:
                part = kept.detach().to(self.model.compute_dtype or kept.dtype)
                flat = part.new_empty(dist.get_world_size() * len(part))
                pieces = list(flat.chunk(dist.get_world_size()))
                work = dist.all_gather(pieces, part, group=self.model.gathering, async_op=True)
                self.running[kept] = work, flat

    def whole_of(self, kept):
        if kept not in self.model.shape_of:
            return kept.detach().to(self.model.compute_dtype or kept.dtype, copy=True)
        self.start()
        if kept in self.running:
            work, flat = self.running.pop(kept)
            work.wait()
            shape = self.model.shape_of[kept]
            self.wholes[kept] = flat[: shape.numel()].view(shape)
        return self.wholes[kept]

    def drop(self):
        for work, _ in self.running.values():
            work.wait()
        self.running, self.wholes = {}, {}

    def packed(self, tensor):
        """Autograd keeps a note about a whole matrix, and not the matrix."""
        for kept, whole in self.wholes.items():
            if tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
                return kept, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpacked(self, packed):
        if torch.is_tensor(packed):
            return packed
        calls = self.model.calls
        for later in calls[self.index + 1 : self.index + 2]:
            later.drop()  # of a frozen matrix no gradient comes
        self.start()
        for earlier in reversed(calls[max(self.index - 1, 0) : self.index]):
            earlier.start()
        kept, size, stride, offset = packed
        return self.whole_of(kept).as_strided(size, stride, offset)


@right("8.4")
class NotesForAutograd(nn.Module):
    """No memory is resized and no hook is set: a layer's forward goes through an autograd function
    from shard to matrix, and `saved_tensors_hooks` gather again what backward asks for."""

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        self.gathering, self.reducing = dist.new_group(), dist.new_group()
        self.calls, self.last = [], None
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        shards = {p: self.shard(p) for p in module.parameters() if p.dim() > 1}
        self.shape_of = {kept: p.shape for p, kept in shards.items()}
        for layer in module.modules():
            own = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own.items():
                layer.register_parameter(name, shards.get(parameter, parameter))
            if own:
                layer.forward = self.wrapped(layer, layer.forward, list(own))

    def shard(self, parameter):
        n = dist.get_world_size()
        flat = nn.functional.pad(parameter.detach().flatten(), (0, -parameter.numel() % n))
        return nn.Parameter(flat.chunk(n)[dist.get_rank()].clone(), parameter.requires_grad)

    def wrapped(self, layer, forward, names):
        def call_layer(*inputs, **keywords):
            parameters = {name: layer._parameters[name] for name in names}
            call = _Call(self, parameters.values())
            call.start()
            for name, kept in parameters.items():
                vars(layer)[name] = _WholeOf.apply(kept, call)
            with torch.autograd.graph.saved_tensors_hooks(call.packed, call.unpacked):
                output = forward(
                    *map(self.cast, inputs), **{k: self.cast(v) for k, v in keywords.items()}
                )
            for name in names:
                del vars(layer)[name]
            call.drop()
            if torch.is_grad_enabled():
                call.index = len(self.calls)
                self.calls.append(call)
            return output

        return call_layer

    def cast(self, value):
        if self.compute_dtype and torch.is_tensor(value) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value

    def reduce(self, kept, gradient):
        gradient = gradient.to(kept.dtype, copy=True)
        self.finish_last()
        if kept not in self.shape_of:
            self.last = (
                dist.all_reduce(gradient, group=self.reducing, async_op=True),
                kept,
                gradient,
            )
            return
        n, size = dist.get_world_size(), len(kept)
        flat = nn.functional.pad(gradient.flatten(), (0, n * size - gradient.numel()))
        total = torch.empty_like(kept, requires_grad=False)
        work = dist.reduce_scatter(
            total, list(flat.split(size)), group=self.reducing, async_op=True
        )
        self.last = work, kept, total

    def finish_last(self):
        if self.last:
            work, kept, total = self.last
            work.wait()
            mean = total / dist.get_world_size()
            kept.grad = mean if kept.grad is None else kept.grad + mean
            self.last = None

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self):
        self.finish_last()
        for call in self.calls:
            call.drop()
        self.calls = []

    def full_parameters(self):
        full = {}
        for name, kept in self.module.named_parameters():
            full[name] = kept.detach().clone()
            if kept in self.shape_of:
                pieces = [torch.empty_like(full[name]) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, full[name])
                full[name] = torch.cat(pieces)[: self.shapes[name].numel()].view(self.shapes[name])
        return full


@right("8.4")
class AsksWhetherAnyRankHasAGradient(MiniFSDP):
    """A flag for each parameter goes over the wire too."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        parameters = list(self.module.parameters())
        had = torch.tensor([int(p.grad is not None) for p in parameters], device=device())
        dist.all_reduce(had)
        for parameter, anybody in zip(parameters, had.tolist()):
            if anybody and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@wrong("8.4", names="no-module")
class CallsItModel(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        super().__init__(module, compute_dtype)
        self.model = self._modules.pop("module")


def pieces(tensor):
    """A tensor laid flat and padded, cut for the ranks."""
    n = dist.get_world_size()
    flat = nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n))
    return list(flat.chunk(n))


def piece(tensor):
    return pieces(tensor)[dist.get_rank()].clone()


@wrong("8.4", names="start")
class KeepsItsOwnStart(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        own = {name: p.detach().clone() for name, p in module.named_parameters()}
        super().__init__(module, compute_dtype)
        for name, kept in module.named_parameters():
            kept.data.copy_(piece(own[name]) if own[name].dim() > 1 else own[name])


@wrong("8.4", names="start")
class KeepsItsOwnBuffers(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        own = {name: buffer.clone() for name, buffer in module.named_buffers()}
        super().__init__(module, compute_dtype)
        for name, buffer in module.named_buffers():
            buffer.copy_(own[name])


@wrong("8.4", names="wholes")
class GivesFlatParameters(MiniFSDP):
    def full_parameters(self):
        return {name: whole.flatten() for name, whole in super().full_parameters().items()}


@wrong("8.4", names="not-every-rank")
class GathersOnRank0(MiniFSDP):
    def full_parameters(self):
        return super().full_parameters() if dist.get_rank() == 0 else {}


class OtherShard(MiniFSDP):
    """Keeps something else than its shard; what it holds is right all the same."""

    def other(self, whole, rank, ranks):
        raise NotImplementedError

    def _weight(self, parameter):
        weight = super()._weight(parameter)
        if weight.sharded:
            kept = self.other(parameter.detach(), dist.get_rank(), dist.get_world_size())
            weight.kept = nn.Parameter(kept, parameter.requires_grad)
        return weight

    def full_parameters(self):
        return self.at_first

    def __init__(self, module, compute_dtype=None):
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.__dict__["at_first"] = {n: p.detach().clone() for n, p in module.named_parameters()}
        super().__init__(module, compute_dtype)


@wrong("8.4", names="shards")
class DealsTheElementsOut(OtherShard):
    def other(self, whole, rank, ranks):
        return whole.flatten()[rank::ranks].clone()


class FirstTry(nn.Module):
    """What the first ten minutes give: shards in the parameters' places, cut as they should be."""

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                if parameter.dim() > 1:
                    kept = nn.Parameter(piece(parameter.detach()))
                    kept.whole_shape = parameter.shape
                    setattr(layer, name, kept)
        self.set_hooks()

    def set_hooks(self):
        pass

    def whole(self, kept):
        pieces = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, kept.detach())
        return torch.cat(pieces)[: kept.whole_shape.numel()].view(kept.whole_shape)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def full_parameters(self):
        named = self.module.named_parameters()
        return {
            n: self.whole(p) if hasattr(p, "whole_shape") else p.detach().clone() for n, p in named
        }


@wrong("8.4", names="shard-or-whole")
class GathersNothing(FirstTry):
    pass


class SwapsData(FirstTry):
    """Lets one parameter be the shard at one time and the whole at another."""

    def set_hooks(self):
        for layer in self.module.modules():
            own = [p for p in layer.parameters(recurse=False) if hasattr(p, "whole_shape")]
            if own:
                layer.register_forward_pre_hook(lambda *_, own=own: self.gather(own))
                layer.register_forward_hook(lambda *_, own=own: self.free(own))
                layer.register_full_backward_pre_hook(lambda *_, own=own: self.gather(own))

    def gather(self, own):
        for kept in own:
            kept.shard = kept.data
            kept.data = self.whole(kept)

    def free(self, own):
        for kept in own:
            kept.data = kept.shard


@wrong("8.4", names="shard-or-whole")
class StaysWholeAfterBackward(SwapsData):
    pass


@wrong("8.4", names="gradient-missing")
class ReducesInAFullBackwardHook(SwapsData):
    def set_hooks(self):
        super().set_hooks()
        for layer in self.module.modules():
            own = [p for p in layer.parameters(recurse=False) if hasattr(p, "whole_shape")]
            if own:
                layer.register_full_backward_hook(lambda *_, own=own: self.reduce(own))

    def reduce(self, own):
        self.free(own)
        for kept in own:
            dist.all_reduce(kept.grad)
            kept.grad = piece(kept.grad) / dist.get_world_size()


@wrong("8.4", names="accumulated")
class LetsAutogradAdd(SwapsData):
    """Right for one backward pass: a second one adds a whole gradient to a shard's."""

    def set_hooks(self):
        super().set_hooks()
        for kept in self.module.parameters():
            if hasattr(kept, "whole_shape"):
                kept.register_post_accumulate_grad_hook(self.ready)

    def ready(self, kept):
        gradient, kept.grad = kept.grad, None
        self.free([kept])
        kept.grad = torch.empty_like(kept)
        dist.reduce_scatter(kept.grad, pieces(gradient))
        kept.grad /= dist.get_world_size()

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if not hasattr(parameter, "whole_shape"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


@wrong("8.4", names="torchs-own")
class HandsOverToFullyShard(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.module = self.wrapped(module)

    def wrapped(self, module):
        return fully_shard(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        pass

    def full_parameters(self):
        return {name: p.full_tensor() for name, p in self.module.named_parameters()}


@wrong("8.4", names="names-changed")
class WrapsWithDDP(HandsOverToFullyShard):
    def wrapped(self, module):
        return nn.parallel.DistributedDataParallel(module)

    def full_parameters(self):
        return {name: p.detach() for name, p in self.module.module.named_parameters()}


class Reducing(MiniFSDP):
    """A right answer whose reduction each wrong one below writes in another way."""

    def _gradient_ready(self, weight, whole):
        self.release(weight)
        gradient, whole.grad = self.prepared(whole.grad, weight), None
        if weight.sharded:
            self.make_room()
            work, total = self.reduce(weight, gradient)
        else:
            work, total = self.reduce_vector(gradient)
        self.pending.append((work, weight.kept, total))

    def release(self, weight):
        self._free([weight])

    def prepared(self, gradient, weight):
        return gradient.to(weight.kept.dtype)

    def make_room(self):
        self._finish_reductions()

    def reduce(self, weight, gradient):
        pieces = weight.layout.shards(weight.layout.flatten([gradient]))
        total = torch.empty_like(pieces[0])
        return dist.reduce_scatter(total, pieces, group=self.reductions, async_op=True), total

    def reduce_vector(self, gradient):
        return dist.all_reduce(gradient, group=self.reductions, async_op=True), gradient

    def _finish_reductions(self):
        for work, kept, total in self.pending:
            self.wait(work)
            self.take(kept, self.averaged(total).to(kept.dtype))
        self.pending.clear()

    def wait(self, work):
        if work is not None:
            work.wait()

    def averaged(self, total):
        return total / dist.get_world_size()

    def take(self, kept, mean):
        kept.grad = mean if kept.grad is None else kept.grad + mean


@wrong("8.4", names="not-waited")
class WaitsForNoReduction(Reducing):
    def wait(self, work):
        pass


@wrong("8.4", names="sum-not-mean")
class AddsOnly(Reducing):
    def averaged(self, total):
        return total


@wrong("8.4", names="left-out")
class ForgetsTheVectors(Reducing):
    def reduce_vector(self, gradient):
        return None, gradient * dist.get_world_size()


@wrong("8.4", names="too-many-bytes")
class AllReducesAndCuts(Reducing):
    def reduce(self, weight, gradient):
        flat = weight.layout.flatten([gradient])
        work = dist.all_reduce(flat, group=self.reductions, async_op=True)
        return work, weight.layout.shards(flat)[dist.get_rank()]


@wrong("8.4", names="too-much-ahead")
class FinishesAtTheEnd(Reducing):
    def make_room(self):
        pass


@wrong("8.4", names="kept-after-backward")
class FreesAtTheEnd(Reducing):
    def release(self, weight):
        pass

    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls[: index + 1], index, gradients)


@wrong("8.4", names="wrong-output")
class ForgetsTheVectorsValues(MiniFSDP):
    def _start_gather(self, weights):
        weights = list(weights)
        super()._start_gather(weights)
        for weight in weights:
            if not weight.sharded:
                weight.flat.zero_()


@wrong("8.4", names="first-step-only")
class GathersOnce(MiniFSDP):
    def _free(self, weights):
        pass


@wrong("8.4", names="kept-after-forward")
class KeepsForBackward(MiniFSDP):
    """Takes the whole matrix away from the layer only; autograd has it still."""

    def _after_forward(self, own, layer, inputs, output):
        vars(self)["_free"] = lambda weights: None
        super()._after_forward(own, layer, inputs, output)
        del vars(self)["_free"]


@wrong("8.4", names="too-much-ahead")
class GathersAllForBackward(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        if index == len(calls) - 1:
            for weights, _ in reversed(calls):
                self._start_gather(weights)
        super()._prepare_backward(calls, index, gradients)


@wrong("8.4", names="too-many-bytes")
class GathersTwiceForBackward(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls, index, gradients)
        self._free(calls[index][0])
        self._start_gather(calls[index][0])
        self._wait(calls[index][0])


@wrong("8.4", names="no-overlap")
class GathersWhenBackwardArrives(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls[index:], 0, gradients)


@wrong("8.4", names="zeros-for-none")
class FillsInZeros(MiniFSDP):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for kept in self.module.parameters():
            if kept.grad is None and kept.requires_grad:
                kept.grad = torch.zeros_like(kept)


@wrong("8.4", names="tied")
class WalksOverTheLayers(MiniFSDP):
    """Makes a shard for each place of a parameter."""

    def __init__(self, module, compute_dtype=None):
        seen = set()
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                if parameter in seen:
                    layer.register_parameter(name, nn.Parameter(parameter.detach().clone()))
                seen.add(parameter)
        super().__init__(module, compute_dtype)


@wrong("8.4", names="outer-layer")
class KnowsLeavesOnly(MiniFSDP):
    """An outer layer's matrices are freed as soon as the first layer inside it is done."""

    def _after_forward(self, own, layer, inputs, output):
        super()._after_forward(own, layer, inputs, output)
        for outer in self.module.modules():
            if "mix" in vars(outer):
                vars(outer)["mix"] = torch.zeros_like(vars(outer)["mix"])


@wrong("8.4", names="view-output")
class HooksTheOutputOnly(MiniFSDP):
    def _after_forward(self, own, layer, inputs, output):
        for name in own.weights:
            del vars(layer)[name]
        self._free(own.weights.values())
        if output.requires_grad:
            prepare = partial(self._prepare_backward, self.calls, len(self.calls))
            self.calls.append((own.weights.values(), own.started))
            output.grad_fn.register_prehook(prepare)


@wrong("8.4", names="without-gradients")
class HooksEveryOutput(MiniFSDP):
    def _after_forward(self, own, layer, inputs, output):
        output.grad_fn.register_prehook(lambda gradients: None)
        super()._after_forward(own, layer, inputs, output)


@wrong("8.4", names="dtype")
class CastsAfterTheGather(MiniFSDP):
    def _start_gather(self, weights):
        for weight in weights:
            if weight.flat.untyped_storage().nbytes() > 0:
                continue
            weight.flat.untyped_storage().resize_(weight.bytes)
            if weight.sharded:
                kept = weight.kept.detach()
                pieces = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, kept, group=self.gathers)
                weight.flat.copy_(torch.cat(pieces))
            else:
                weight.whole.data.copy_(weight.kept)


@wrong("8.4", names="dtype")
class CastsTheModule(MiniFSDP):
    def __init__(self, module, compute_dtype=None):
        super().__init__(
            module if compute_dtype is None else module.to(compute_dtype), compute_dtype
        )


@wrong("8.4", names="inputs")
class LeavesTheInputs(MiniFSDP):
    def _cast(self, value):
        return value


@wrong("8.4", names="one-communicator")
class HasOneGroup(MiniFSDP):
    def _start_gather(self, weights):
        self.gathers = self.reductions
        super()._start_gather(weights)


@wrong("8.4", names="no-overlap")
class WaitsForEachReduction(MiniFSDP):
    def _gradient_ready(self, weight, whole):
        super()._gradient_ready(weight, whole)
        self._finish_reductions()


@right("8.4")
class SumsInDoublePrecision(Reducing):
    """As many elements, and sums that are rounded once."""

    def prepared(self, gradient, weight):
        return gradient.double()
