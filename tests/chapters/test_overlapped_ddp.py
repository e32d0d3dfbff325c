"""The answer to exercise 3.4 beyond what its check asks of a learner."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_exercises.authoring import load_answer
from course_utils.launch import RankFailure
from course_utils.trace import Trace
from tests.support.on_gloo import launch


@pytest.fixture(scope="module")
def overlapped_ddp():
    return load_answer("3.4")


def mixed_precision() -> nn.Module:
    """float64 between float32 layers; a bucket has room for both."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.middle = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x):
            return self.last(self.middle(self.first(x).double()).float())

    return Mixed()


def convolutions() -> nn.Module:
    """Weights whose memory is not laid out in the order of their dimensions."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, 2))
    return model.to(memory_format=torch.channels_last)


def gradients_of_both(rank, overlapped_ddp, make, shape):
    torch.manual_seed(rank)
    ours = overlapped_ddp(make(), bucket_bytes=1000)
    torchs = DistributedDataParallel(make())
    torchs.module.load_state_dict(ours.module.state_dict())
    inputs = torch.randn(shape)
    for model in (ours, torchs):
        model(inputs).square().mean().backward()
    ours.finish_gradient_synchronization()
    return [[p.grad for p in model.module.parameters()] for model in (ours, torchs)]


@pytest.mark.parametrize(
    ("make", "shape"), [(mixed_precision, (5, 6)), (convolutions, (2, 3, 8, 8))]
)
def test_gradients_keep_their_dtype_and_layout(overlapped_ddp, make, shape):
    for ours, torchs in launch(gradients_of_both, 2, overlapped_ddp, make, shape):
        torch.testing.assert_close(ours, torchs)


def second_backward(rank, overlapped_ddp):
    model = overlapped_ddp(nn.Linear(4, 2))
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()


def test_a_second_backward_before_finish_says_what_to_do(overlapped_ddp):
    with pytest.raises(RankFailure, match="before finish_gradient_synchronization"):
        launch(second_backward, 2, overlapped_ddp)


def everything_frozen(rank, overlapped_ddp):
    torch.manual_seed(rank)
    model = overlapped_ddp(nn.Linear(4, 2).requires_grad_(False))
    model.finish_gradient_synchronization()
    return model.module.weight


def test_a_module_without_trainable_parameters_is_broadcast(overlapped_ddp):
    first, second = launch(everything_frozen, 2, overlapped_ddp)
    assert torch.equal(first, second)


def after_an_error_in_no_sync(rank, overlapped_ddp):
    model = overlapped_ddp(nn.Linear(4, 2))
    try:
        with model.no_sync():
            raise KeyError
    except KeyError:
        pass
    with Trace() as trace:
        model(torch.randn(3, 4)).sum().backward()  # starts the only bucket, or nothing
    model.finish_gradient_synchronization()
    return trace.record().count("all_reduce")


def test_no_sync_ends_with_an_error_too(overlapped_ddp):
    assert launch(after_an_error_in_no_sync, 2, overlapped_ddp) == [1, 1]


def extra_bytes(rank, overlapped_ddp):
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = overlapped_ddp(module, bucket_bytes=4 * 64 * 64 * 3)
    with Trace() as trace:
        model(torch.randn(3, 64)).sum().backward()
        model.finish_gradient_synchronization()
    payload = sum(p.nbytes for p in module.parameters())
    return trace.record().sent("all_reduce") - payload, len(list(module.parameters()))


def test_a_step_sends_the_gradients_and_one_number_per_parameter(overlapped_ddp):
    for extra, parameters in launch(extra_bytes, 2, overlapped_ddp):
        assert extra == 4 * parameters


def test_a_checkpoint_has_the_names_that_ddp_gives(overlapped_ddp):
    [names] = launch(lambda rank: list(overlapped_ddp(nn.Linear(4, 2)).state_dict()), 1)
    assert names == ["module.weight", "module.bias"]
