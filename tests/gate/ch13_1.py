"""13.1, `Training`: answers written from the stub alone."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import cross_entropy

from course_utils import hardware


class Right:
    """A right answer with FSDP2, of which the wrong ones change a method."""

    def __init__(self, model, lr=0.1, momentum=0.9):
        self.model = model.to(hardware.device())
        self.shard()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr, momentum)

    def shard(self):
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)

    def loss_of(self, images, labels):
        """This rank's loss, of which FSDP averages the gradients, and its share of the batch's."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        scores = self.model(images[rank::ranks])
        share = cross_entropy(scores, labels[rank::ranks], reduction="sum") / len(images)
        return share * ranks, share

    def mean_of(self, share):
        total = share.detach().clone()
        dist.all_reduce(total)
        return total.item()

    def step(self, images, labels):
        self.sgd.zero_grad()
        loss, share = self.loss_of(images, labels)
        loss.backward()
        self.sgd.step()
        return self.mean_of(share)

    def whole(self, tensor):
        return tensor.detach().full_tensor().cpu().clone()

    def momentum_of(self, parameter):
        buffer = self.sgd.state[parameter].get("momentum_buffer")
        return torch.zeros_like(parameter) if buffer is None else buffer

    def state_dict(self):
        parameters = dict(self.model.named_parameters())
        return {
            "model": {name: self.whole(p) for name, p in parameters.items()},
            "momentum": {name: self.whole(self.momentum_of(p)) for name, p in parameters.items()},
        }

    def spread(self, value, parameter):
        value = value.to(hardware.device())
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)

    def load_momentum(self, parameter, value):
        self.sgd.state[parameter]["momentum_buffer"] = self.spread(value, parameter)

    def load_state_dict(self, state):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.spread(state["model"][name], parameter))
                self.load_momentum(parameter, state["momentum"][name])


class AveragesTheRanksMeans(Right):
    """Lets each rank take the mean loss of its own rows: right where the rows divide."""

    def loss_of(self, images, labels):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        loss = cross_entropy(self.model(images[rank::ranks]), labels[rank::ranks])
        return loss, loss / ranks


class ForgetsThatGradientsAreAveraged(Right):
    """Divides its sum by N, and FSDP divides by the ranks once more."""

    def loss_of(self, images, labels):
        _, share = super().loss_of(images, labels)
        return share, share


class ReturnsTheLossOfItsRows(Right):
    """Returns the mean loss of its own rows, without a collective."""

    def mean_of(self, share):
        return share.item() * dist.get_world_size()


class HasNoMomentumBeforeTheFirstStep(Right):
    """Reads the optimizer's momentum buffers, which are not there before the first step."""

    def momentum_of(self, parameter):
        return self.sgd.state[parameter]["momentum_buffer"]


class HandsOutItsOwnTensors(Right):
    """Makes no copies: where a rank is alone, `full_tensor` gives the parameter's own memory."""

    def whole(self, tensor):
        return tensor.detach().full_tensor().cpu()


class LoadsTheParametersOnly(Right):
    """Goes on from the loaded parameters with the momentum that it had."""

    def load_momentum(self, parameter, value):
        pass


class ShardsTheModelAsOnePiece(Right):
    """Calls `fully_shard` on the model alone, so that all of it is gathered at once."""

    def shard(self):
        fully_shard(self.model)


class SitsOutWithoutRows(Right):
    """A rank without rows skips forward and backward, and the collectives in them."""

    def step(self, images, labels):
        if len(labels[dist.get_rank() :: dist.get_world_size()]) == 0:
            return self.mean_of(torch.zeros((), device=hardware.device()))
        return super().step(images, labels)


ANSWERS = {
    "13.1": [
        AveragesTheRanksMeans,
        ForgetsThatGradientsAreAveraged,
        ReturnsTheLossOfItsRows,
        HasNoMomentumBeforeTheFirstStep,
        HandsOutItsOwnTensors,
        LoadsTheParametersOnly,
        ShardsTheModelAsOnePiece,
        SitsOutWithoutRows,
    ]
}
