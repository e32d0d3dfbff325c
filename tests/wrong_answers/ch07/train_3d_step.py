"""Answers to 7.4, `train_3d_step`: wrong in a plausible way, or right in another."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from course_utils.hardware import device
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch07.shared import (
    NAMES,
    Untouched,
    average_all,
    average_over,
    average_parameters,
    average_replicated_only,
    averaging,
    forward_of,
    over_all_ranks,
    own_block,
    summing_twice,
    without_sum_backward,
)


def _send(tensor, mesh, stage):
    dist.send(tensor, group=mesh.get_group("pipeline"), group_dst=stage)


def _receive(tensor, mesh, stage):
    dist.recv(tensor, group=mesh.get_group("pipeline"), group_src=stage)


def _received_input(shape, mesh, stage, receive):
    x = torch.empty(shape, device=device())
    receive(x, mesh, stage - 1)
    return x.requires_grad_()


def _last_stages_loss(loss, mesh):
    """Average over the data group, then tell the other stages; they bring a zero."""
    pipeline = mesh.get_group("pipeline")
    average_over([loss], mesh)
    dist.broadcast(loss, group=pipeline, group_src=pipeline.size() - 1)
    return loss.item()


def _train_3d(
    part,
    read_inputs,
    read_targets,
    shape,
    mesh,
    optimizer,
    *,
    block=own_block,
    forward=forward_of,
    take_input=_received_input,
    send=_send,
    receive=_receive,
    sends_back=True,
    average=average_all,
    mean_loss=_last_stages_loss,
):
    """A right answer, of which each wrong one replaces a part."""
    stage, last = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline").size() - 1
    loss = torch.zeros((), device=device())
    optimizer.zero_grad()
    x = read_inputs(*block(mesh)) if stage == 0 else take_input(shape, mesh, stage, receive)
    y = forward(part, x, mesh)
    if stage < last:
        send(y.detach(), mesh, stage + 1)
        if sends_back:
            gradient = torch.empty_like(y)
            receive(gradient, mesh, stage + 1)
            y.backward(gradient)
    else:
        own = mse_loss(y, read_targets(*block(mesh)))
        own.backward()
        loss += own.detach()
    if stage > 0 and sends_back:
        send(x.grad, mesh, stage - 1)
    average(part, mesh)
    optimizer.step()
    return mean_loss(loss, mesh)


def _zeros_of_others_summed(loss, mesh):
    """Only the last stages bring a loss: as many as there are ranks in data and tensor."""
    dist.all_reduce(loss)
    return loss.item() / (mesh.get_group("data").size() * mesh.get_group("tensor").size())


@right("7.4")
def sends_by_global_ranks(*given):
    """Asynchronously, and with one all-reduce over all ranks for the loss."""

    def peer(mesh, stage):
        return dist.get_global_rank(mesh.get_group("pipeline"), stage)

    return _train_3d(
        *given,
        send=lambda tensor, mesh, stage: dist.isend(tensor, dst=peer(mesh, stage)).wait(),
        receive=lambda tensor, mesh, stage: dist.irecv(tensor, src=peer(mesh, stage)).wait(),
        mean_loss=_zeros_of_others_summed,
    )


@right("7.4")
def lets_autograd_multiply(part, read_inputs, read_targets, shape, mesh, optimizer):
    """Backward starts from the sum of output times gradient."""
    pipeline, stage = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    x, slope = torch.empty(shape, device=device()), torch.empty(shape, device=device())
    if stage > 0:
        _receive(x, mesh, stage - 1)
    else:
        x.copy_(read_inputs(*own_block(mesh)))
    x.requires_grad_()
    y = forward_of(part, x, mesh)
    loss, is_last = torch.zeros((), device=device()), stage == pipeline.size() - 1
    if is_last:
        loss = mse_loss(y, read_targets(*own_block(mesh)))
    else:
        _send(y.detach(), mesh, stage + 1)
        _receive(slope, mesh, stage + 1)
    optimizer.zero_grad()
    (loss if is_last else (y * slope).sum()).backward()
    if stage > 0:
        _send(x.grad, mesh, stage - 1)
    average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(loss.detach(), mesh)


@right("7.4")
def adds_up_shares_of_the_loss(part, read_inputs, read_targets, shape, mesh, optimizer):
    """The loss is divided by the copies before backward, as the lesson does it, and gradients are summed."""
    pipeline, stage = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    last, data = pipeline.size() - 1, mesh.get_group("data")
    optimizer.zero_grad()
    x = _received_input(shape, mesh, stage, _receive) if stage else read_inputs(*own_block(mesh))
    y = forward_of(part, x, mesh)
    share = torch.zeros((), device=device())
    if stage == last:
        own = mse_loss(y, read_targets(*own_block(mesh))) / data.size()
        own.backward()
        share += own.detach()
    else:
        _send(y.detach(), mesh, stage + 1)
        slope = torch.empty_like(y)
        _receive(slope, mesh, stage + 1)
        y.backward(slope)
    if stage > 0:
        _send(x.grad, mesh, stage - 1)
    average_over([p.grad for p in part.parameters() if p.requires_grad], mesh, divisor=1)
    optimizer.step()
    dist.all_reduce(share, group=data)
    dist.broadcast(share, group=pipeline, group_src=last)
    return share.item()


@wrong("7.4", names="not-waited")
def waits_after_computing(*given):
    """What was received is right in nearly every run, because it has come by then."""
    works = []

    def receive(tensor, mesh, stage):
        works.append(dist.irecv(tensor, group=mesh.get_group("pipeline"), group_src=stage))

    def average(part, mesh):
        for work in works:
            work.wait()
        average_all(part, mesh)

    return _train_3d(*given, receive=receive, average=average)


@wrong("7.4", names="not-stepped")
def steps_nothing(part, read_inputs, read_targets, shape, mesh, optimizer):
    idle = torch.optim.SGD(part.parameters(), lr=0.0)
    return _train_3d(part, read_inputs, read_targets, shape, mesh, idle)


@wrong("7.4", names="other-rows")
def every_rank_reads_its_own(*given):
    return _train_3d(*given, block=lambda mesh: (dist.get_rank(), dist.get_world_size()))


@wrong("7.4", names="other-output")
def sends_terms_of_the_sum(*given):
    return _train_3d(*given, forward=partial(forward_of, leaves=Untouched))


@wrong("7.4", names="input-gradient-partial")
def sends_back_a_part_of_the_gradient(*given):
    return _train_3d(*given, forward=without_sum_backward)


@wrong("7.4", names="summed-too-often")
def sums_output_gradients(*given):
    return _train_3d(*given, forward=summing_twice)


@wrong("7.4", names="stages-wait")
def sums_over_everyone(*given):
    return _train_3d(*given, forward=over_all_ranks)


@wrong("7.4", names="unchanged")
def trains_each_pipeline_alone(*given):
    return _train_3d(*given, average=lambda part, mesh: None)


@wrong("7.4", names="other-factor")
def divides_by_the_world_size(*given):
    return _train_3d(*given, average=averaging(("data",), dist.get_world_size()))


@wrong("7.4", names="other-group")
def averages_in_the_default_group(*given):
    """As DistributedDataParallel would without its argument `process_group`."""
    return _train_3d(*given, average=averaging(NAMES))


@wrong("7.4", names="left-out")
def averages_what_is_replicated(*given):
    return _train_3d(*given, average=average_replicated_only)


@wrong("7.4", names="parameters-averaged")
def averages_parts_after_the_step(part, *others):
    loss = _train_3d(part, *others, average=lambda part, mesh: None)
    average_parameters(part, others[3])
    return loss


@wrong("7.4", names="wrong-neighbour")
def sends_to_the_next_rank(*given):
    """The next rank is the next stage only where nothing is cut."""

    def beside(mesh, stage):
        return dist.get_rank() + stage - mesh.get_local_rank("pipeline")

    return _train_3d(
        *given,
        send=lambda tensor, mesh, stage: dist.send(tensor, dst=beside(mesh, stage)),
        receive=lambda tensor, mesh, stage: dist.recv(tensor, src=beside(mesh, stage)),
    )


@wrong("7.4", names="group-rank")
def takes_a_stage_for_a_rank(*given):
    return _train_3d(
        *given,
        send=lambda x, mesh, stage: dist.send(x, dst=stage, group=mesh.get_group("pipeline")),
        receive=lambda x, mesh, stage: dist.recv(x, src=stage, group=mesh.get_group("pipeline")),
    )


@wrong("7.4", names="graph-cut")
def asks_for_no_gradient(*given):
    def take_input(shape, mesh, stage, receive):
        return _received_input(shape, mesh, stage, receive).detach()

    return _train_3d(*given, take_input=take_input)


@wrong("7.4", names="not-handed-on")
def goes_backward_without_a_gradient(part, read_inputs, read_targets, shape, mesh, optimizer):
    pipeline, stage = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    optimizer.zero_grad()
    if stage == 0:
        x = read_inputs(*own_block(mesh))
    else:
        x = _received_input(shape, mesh, stage, _receive)
    y = forward_of(part, x, mesh)
    if stage < pipeline.size() - 1:
        _send(y.detach(), mesh, stage + 1)
    else:
        y = mse_loss(y, read_targets(*own_block(mesh)))
    y.backward()
    average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(y.detach(), mesh)


@wrong("7.4", names="not-handed-on")
def goes_backward_in_the_last_stage(*given):
    return _train_3d(
        *given,
        sends_back=False,
        average=lambda part, mesh: average_over(
            [p.grad for p in part.parameters() if p.grad is not None], mesh
        ),
    )


@wrong("7.4", names="stages-wait")
def forgets_to_send_back(*given):
    """The stage before waits for its gradient."""

    def send(tensor, mesh, stage):
        if stage > mesh.get_local_rank("pipeline"):
            _send(tensor, mesh, stage)

    return _train_3d(*given, send=send)


@wrong("7.4", names="not-every-rank")
def averages_the_loss_on_last_stages(*given):
    def mean_loss(loss, mesh):
        pipeline = mesh.get_group("pipeline")
        if mesh.get_local_rank("pipeline") == pipeline.size() - 1:
            dist.all_reduce(loss)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="every-stage-reads")
def reads_everywhere(part, read_inputs, read_targets, *more):
    block = own_block(more[1])
    inputs, targets = read_inputs(*block), read_targets(*block)
    return _train_3d(part, lambda *_: inputs, lambda *_: targets, *more)


@wrong("7.4", names="loss-on-last-only")
def keeps_the_loss_in_the_last_stage(*given):
    def mean_loss(loss, mesh):
        average_over([loss], mesh)
        return loss.item()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="loss-not-mean")
def averages_the_loss_over_all(*given):
    """The zeros of the other stages are in the mean."""

    def mean_loss(loss, mesh):
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return _train_3d(*given, mean_loss=mean_loss)


@wrong("7.4", names="other-stages")
def is_first_or_last(part, read_inputs, read_targets, shape, mesh, optimizer):
    """A stage is the first one, and otherwise a later one."""
    if mesh.get_local_rank("pipeline") > 0:
        return _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer)
    optimizer.zero_grad()
    y = forward_of(part, read_inputs(*own_block(mesh)), mesh)
    _send(y.detach(), mesh, 1)
    gradient = torch.empty_like(y)
    _receive(gradient, mesh, 1)
    y.backward(gradient)
    average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(torch.zeros((), device=device()), mesh)


@wrong("7.4", names="other-stages")
def knows_two_stages(part, read_inputs, read_targets, shape, mesh, optimizer):
    """A stage that is not the first one is the last one."""
    stage, pipeline = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    if stage == 0 or pipeline.size() == 1:
        return _train_3d(part, read_inputs, read_targets, shape, mesh, optimizer)
    optimizer.zero_grad()
    x = _received_input(shape, mesh, stage, _receive)
    loss = mse_loss(forward_of(part, x, mesh), read_targets(*own_block(mesh)))
    loss.backward()
    _send(x.grad, mesh, stage - 1)
    average_all(part, mesh)
    optimizer.step()
    return _last_stages_loss(loss.detach(), mesh)


@wrong("7.4", names="old-gradients")
def adds_to_old_gradients(part, read_inputs, read_targets, shape, mesh, optimizer):
    class NeverClears:
        def zero_grad(self):
            pass

        def step(self):
            optimizer.step()

    return _train_3d(part, read_inputs, read_targets, shape, mesh, NeverClears())


@wrong("7.4", names="frozen")
def expects_every_gradient(*given):
    return _train_3d(*given, average=averaging(("data",)))


@wrong("7.4", names="by-arithmetic")
def computes_its_block(*given):
    def block(mesh):
        pp, tp = mesh.get_group("pipeline").size(), mesh.get_group("tensor").size()
        return dist.get_rank() // (pp * tp), mesh.get_group("data").size()

    return _train_3d(*given, block=block)


@wrong("7.4", names="not-a-float")
def returns_a_tensor(*given):
    return torch.tensor(_train_3d(*given))
