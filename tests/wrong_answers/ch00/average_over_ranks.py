"""Answers to 0.1, `average_over_ranks`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong


@wrong("0.1", names="sum-not-mean")
def returns_the_sum(value):
    total = value.clone()
    dist.all_reduce(total)
    return total


@wrong("0.1", names="no-communication")
def divides_without_talking(value):
    return value / dist.get_world_size()


@wrong("0.1", names="fixed-number")
def always_halves(value):
    total = value.clone()
    dist.all_reduce(total)
    return total / 2


@wrong("0.1", names="rank-0-only")
def reduces_to_rank_0(value):
    total = value.clone()
    dist.reduce(total, dst=0)
    return total / dist.get_world_size() if dist.get_rank() == 0 else value


@wrong("0.1", names="input-changed")
def works_in_place(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


@wrong("0.1", names="only-rank-0-calls")
def rank_0_alone(value):
    total = value.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total / dist.get_world_size()


@wrong("0.1", names="own-value")
def forgets_to_use_the_result(value):
    total = value.clone()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    return value


@wrong("0.1", names="uses-none")
def takes_what_all_reduce_returns(value):
    total = dist.all_reduce(value.clone())
    return total / dist.get_world_size()


@wrong("0.1", names="fixed-number")
def knows_only_the_example(value):
    total = value.clone()
    dist.all_reduce(total)
    return total / 3


@wrong("0.1", names="divided-by-rank")
def divides_by_its_own_number(value):
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_rank()


@wrong("0.1", names="rounded-down")
def divides_whole_numbers(value):
    total = value.clone()
    dist.all_reduce(total)
    return total // dist.get_world_size()


@wrong("0.1", names="mean-of-values")
def takes_the_mean_twice(value):
    total = value.clone()
    dist.all_reduce(total)
    return total.mean() / dist.get_world_size()


@wrong("0.1", names="mean-of-values")
def averages_its_own_values(value):
    return value.mean()


@wrong("0.1", names="number-not-tensor")
def takes_the_number_out(value):
    total = value.clone()
    dist.all_reduce(total)
    return total.sum().item() / dist.get_world_size()


@wrong("0.1", names="one-rank-returns")
def rank_0_answers(value):
    total = value.clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        return total / dist.get_world_size()


@wrong("0.1", names="broadcast")
def takes_rank_0s_value(value):
    average = value.clone()
    dist.broadcast(average, src=0)
    return average / dist.get_world_size()


@wrong("0.1", names="one-buffer")
def gathers_into_one_tensor(value):
    values = [torch.empty_like(value)] * dist.get_world_size()
    dist.all_gather(values, value)
    return torch.stack(values).mean(dim=0)


@wrong("0.1", names="indexes-ranks")
def looks_for_the_others_in_its_own(value):
    ranks = dist.get_world_size()
    return sum(value[rank] for rank in range(ranks)) / ranks


@wrong("0.1", names="not-waited")
def does_not_wait(value):
    total = value.clone()
    dist.all_reduce(total, async_op=True)
    return total / dist.get_world_size()


@wrong("0.1", names="returns-nothing")
def forgets_the_return(value):
    total = value.clone()
    dist.all_reduce(total)
    total /= dist.get_world_size()


@right("0.1")
def gathers_and_averages(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values).mean(dim=0)


@wrong("0.1", names="middle-not-mean")
def between_smallest_and_largest(value):
    smallest, largest = value.clone(), value.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return (smallest + largest) / 2


@wrong("0.1", names="middle-not-mean")
def takes_the_median(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values).median(dim=0).values


@wrong("0.1", names="shape-lost")
def averages_a_vector(value):
    total = value.flatten().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@wrong("0.1", names="mean-of-values")
def fills_with_one_number(value):
    mean = value.mean()
    dist.all_reduce(mean)
    return torch.full_like(value, mean.item() / dist.get_world_size())


@wrong("0.1", names="another-dtype")
def averages_in_double_precision(value):
    total = value.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@wrong("0.1", names="another-dtype")
def sends_half_precision(value):
    total = value.half()
    dist.all_reduce(total)
    return total.float() / dist.get_world_size()


found_before = {}


@wrong("0.1", names="from-before")
def remembers_what_it_found(value):
    if value.shape not in found_before:
        total = value.clone()
        dist.all_reduce(total)
        found_before[value.shape] = total / dist.get_world_size()
    return found_before[value.shape]


@right("0.1")
def through_rank_0(value):
    total = value.clone()
    dist.reduce(total, dst=0)
    total /= dist.get_world_size()
    dist.broadcast(total, src=0)
    return total
