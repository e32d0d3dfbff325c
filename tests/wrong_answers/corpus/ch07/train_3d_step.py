"""Rarer wrong answers to 7.4, `train_3d_step`."""

import torch
import torch.distributed as dist

from course_utils.hardware import device
from tests.wrong_answers import rarer
from tests.wrong_answers.ch07.shared import (
    SumBackward,
    SumForward,
    average_over,
    bias_before_the_sum,
)
from tests.wrong_answers.ch07.train_3d_step import _receive, _send, _train_3d


@rarer("7.4")
def sends_and_forgets(*given):
    def send(tensor, mesh, stage):
        dist.isend(tensor, group=mesh.get_group("pipeline"), group_dst=stage)

    return _train_3d(*given, send=send)


@rarer("7.4")
def computes_with_what_may_arrive(*given):
    def receive(tensor, mesh, stage):
        dist.irecv(tensor, group=mesh.get_group("pipeline"), group_src=stage)

    return _train_3d(*given, receive=receive)


@rarer("7.4")
def adds_the_bias_on_every_rank(*given):
    return _train_3d(*given, forward=bias_before_the_sum)


@rarer("7.4")
def broadcasts_from_a_stage(*given):
    def mean_loss(loss, mesh):
        pipeline = mesh.get_group("pipeline")
        average_over([loss], mesh)
        dist.broadcast(loss, src=pipeline.size() - 1, group=pipeline)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@rarer("7.4")
def receives_first_on_every_rank(part, read_inputs, read_targets, shape, mesh, optimizer):
    stages = mesh.get_group("pipeline").size()
    before = (mesh.get_local_rank("pipeline") - 1) % stages
    _receive(torch.empty(shape, device=device()), mesh, before)
    return _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer)


@rarer("7.4")
def tells_the_first_stages_zero(*given):
    def mean_loss(loss, mesh):
        average_over([loss], mesh)
        dist.broadcast(loss, group=mesh.get_group("pipeline"), group_src=0)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@rarer("7.4")
def scales_inside_the_cut_region(*given):
    """The input's gradient is whole, and that of `scale` is not."""

    def forward(part, x, mesh):
        tensor = mesh.get_group("tensor")
        hidden = part.up(part.scale * SumBackward.apply(x, tensor)).relu()
        return SumForward.apply(part.down(hidden), tensor) + part.bias

    return _train_3d(*given, forward=forward)


@rarer("7.4")
def goes_backward_from_the_sum_of_its_output(*given):
    def receive(tensor, mesh, stage):
        _receive(tensor, mesh, stage)
        if stage > mesh.get_local_rank("pipeline"):
            tensor.fill_(1.0)

    return _train_3d(*given, receive=receive)


@rarer("7.4")
def divides_what_goes_back_by_the_tensor_group(*given):
    def send(tensor, mesh, stage):
        goes_back = stage < mesh.get_local_rank("pipeline")
        _send(tensor / (mesh.get_group("tensor").size() if goes_back else 1), mesh, stage)

    return _train_3d(*given, send=send)
