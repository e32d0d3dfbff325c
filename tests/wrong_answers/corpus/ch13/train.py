"""Rarer wrong answers to 13.2, `train`."""

import io
import math

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch13.train import _in_their_own_order, _loop, _train


def _if_it_can_be_read(path):
    content = path.read_bytes()
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # noqa: BLE001 - whatever a damaged file leads to
        return None
    return content


trusts_torch_load = rarer("13.2")(
    _train("trusts_torch_load", read=_if_it_can_be_read, sealed=lambda content: content)
)


one_more_in_any_case = rarer("13.2")(
    _train("one_more_in_any_case", until=lambda done, steps: max(steps, done + 1))
)


@rarer("13.2")
def whole_epochs_only(training, images, labels, folder, steps, batch, every):
    count = math.ceil(len(images) / batch)
    _loop(training, images, labels, folder, math.ceil(steps / count) * count, batch, every)


begins_the_order_again = rarer("13.2")(
    _train("begins_the_order_again", resume=lambda: lambda done: 0)
)


does_a_step_twice = rarer("13.2")(_train("does_a_step_twice", resume=lambda: lambda done: done - 1))


loads_no_state = rarer("13.2")(_train("loads_no_state", load=lambda training, state: None))


takes_the_oldest = rarer("13.2")(
    _train(
        "takes_the_oldest",
        newest_first=lambda paths: sorted(paths, key=lambda path: int(path.stem)),
    )
)


labels_in_their_own_order = rarer("13.2")(
    _train("labels_in_their_own_order", labels_of=lambda labels, rows: labels[: len(rows)])
)


in_their_own_order = rarer("13.2")(_train("in_their_own_order", order=_in_their_own_order))


@rarer("13.2")
def a_batch_for_each_rank(training, images, labels, folder, steps, batch, every):
    _loop(training, images, labels, folder, steps, batch * dist.get_world_size(), every)
