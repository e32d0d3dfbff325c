"""Plausible wrong answers, and other right ones, to the exercises of chapter 00."""

import io
import math
import sys

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


@wrong("0.2", names="values-not-bytes")
def counts_values(tensor):
    return tensor.numel()


@wrong("0.2", names="four-bytes")
def everything_is_float32(tensor):
    return 4 * tensor.numel()


@wrong("0.2", names="first-dimension")
def counts_rows(tensor):
    return (len(tensor) if tensor.dim() else 1) * tensor.element_size()


@wrong("0.2", names="bits-not-bytes")
def counts_bits(tensor):
    return 8 * tensor.numel() * tensor.element_size()


@wrong("0.2", names="whole-storage")
def measures_the_storage(tensor):
    return tensor.untyped_storage().nbytes()


@wrong("0.2", names="python-object")
def asks_python(tensor):
    return sys.getsizeof(tensor)


@wrong("0.2", names="one-value")
def measures_one_value(tensor):
    return tensor.element_size()


@wrong("0.2", names="dimensions-added")
def adds_the_dimensions(tensor):
    return sum(tensor.shape) * tensor.element_size()


@wrong("0.2", names="two-dimensions")
def counts_rows_and_columns(tensor):
    return tensor.shape[0] * tensor.shape[1] * tensor.element_size()


@wrong("0.2", names="dimensions-counted")
def counts_the_dimensions(tensor):
    return tensor.dim() * tensor.element_size()


@wrong("0.2", names="divided-by-eight")
def takes_element_size_for_bits(tensor):
    return tensor.numel() * tensor.element_size() // 8


@wrong("0.2", names="divided-by-eight")
def takes_values_for_bits(tensor):
    return tensor.numel() // 8


@wrong("0.2", names="first-dimension")
def takes_len_for_the_number_of_values(tensor):
    return len(tensor) * tensor.itemsize


@wrong("0.2", names="not-in-bytes")
def counts_kilobytes(tensor):
    return tensor.numel() * tensor.element_size() / 1024


@wrong("0.2", names="not-a-whole-number")
def divides_the_bits(tensor):
    return tensor.numel() * tensor.element_size() * 8 / 8


@wrong("0.2", names="shape-not-number")
def takes_the_shape_for_a_number(tensor):
    return tensor.size() * tensor.element_size()


@wrong("0.2", names="not-called")
def forgets_the_brackets(tensor):
    return tensor.numel * tensor.element_size


@wrong("0.2", names="dtype-no-number")
def multiplies_by_the_dtype(tensor):
    return tensor.numel() * tensor.dtype


@wrong("0.2", names="floats-only")
def asks_finfo(tensor):
    return tensor.numel() * torch.finfo(tensor.dtype).bits // 8


@wrong("0.2", names="dtype-table")
def looks_it_up(tensor):
    return tensor.numel() * {torch.float32: 4, torch.float64: 8, torch.float16: 2}[tensor.dtype]


@wrong("0.2", names="numpy-lacks-dtypes")
def asks_numpy(tensor):
    return tensor.numpy().nbytes


@wrong("0.2", names="returns-nothing")
def prints_it(tensor):
    print(tensor.nbytes)


@right("0.2")
def asks_the_tensor(tensor):
    return tensor.nbytes


@wrong("0.2", names="half-a-complex")
def asks_finfo_for_complex_numbers_too(tensor):
    if tensor.dtype == torch.bool:
        return tensor.numel()
    floating = tensor.is_floating_point() or tensor.is_complex()
    info = torch.finfo(tensor.dtype) if floating else torch.iinfo(tensor.dtype)
    return tensor.numel() * info.bits // 8


@wrong("0.2", names="bool-as-a-bit")
def packs_bools(tensor):
    return math.ceil(tensor.numel() / 8) if tensor.dtype == torch.bool else tensor.nbytes


@wrong("0.2", names="whole-storage")
def from_the_first_value_to_the_last(tensor):
    steps = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape))
    return (steps + 1) * tensor.element_size() if tensor.numel() else 0


@wrong("0.2", names="no-dimensions-no-value")
def goes_through_the_rows(tensor):
    return sum(row.nbytes for row in tensor) if tensor.dim() else 0


@wrong("0.2", names="empty-holds-none")
def counts_one_value_at_least(tensor):
    return max(tensor.numel(), 1) * tensor.element_size()


@wrong("0.2", names="memory-not-values")
def counts_an_expanded_size_once(tensor):
    sizes = [size for size, step in zip(tensor.shape, tensor.stride()) if step or not size]
    return math.prod(sizes) * tensor.element_size()


@wrong("0.2", names="zeros-count")
def counts_what_is_not_zero(tensor):
    return int(tensor.count_nonzero()) * tensor.element_size()


@wrong("0.2", names="rows-by-stride")
def multiplies_rows_and_stride(tensor):
    rows = tensor.shape[0] * tensor.stride(0) if tensor.dim() else 1
    return rows * tensor.element_size()


@wrong("0.2", names="other-than-values")
def measures_a_file(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.tell()


@wrong("0.2", names="four-bytes")
def knows_two_sizes(tensor):
    return tensor.numel() * (4 if tensor.is_floating_point() else 8)


@wrong("0.2", names="dtype-table")
def asks_iinfo_for_a_bool(tensor):
    info = torch.finfo if tensor.is_floating_point() else torch.iinfo
    return tensor.numel() * info(tensor.dtype).bits // 8


@right("0.2")
def counts_the_bytes_of_a_copy(tensor):
    return tensor.contiguous().view(-1).clone().untyped_storage().nbytes()


@right("0.2")
def multiplies_sizes_and_itemsize(tensor):
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@wrong("0.3", names="all-begin-alike")
def everybody_sends_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.send(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=(rank - 1) % ranks)
    return received


@wrong("0.3", names="all-begin-alike")
def everybody_receives_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.recv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received


@wrong("0.3", names="all-begin-alike")
def passes_among_three(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks == 1:
        return received
    if rank == 0:
        dist.recv(received, src=2)
        dist.send(value, dst=1)
    else:
        dist.send(value, dst=(rank + 1) % 3)
        dist.recv(received, src=rank - 1)
    return received


@wrong("0.3", names="no-such-rank")
def sends_beyond_the_last_rank(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks == 1:
        return received
    if rank == 0:
        dist.recv(received, src=ranks - 1)
        dist.send(value, dst=rank + 1)
    else:
        dist.send(value, dst=rank + 1)
        dist.recv(received, src=rank - 1)
    return received


@wrong("0.3", names="no-such-rank")
def receives_from_before_the_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        sending = dist.isend(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=rank - 1)
        sending.wait()
    return received


@wrong("0.3", names="recv-returns-a-rank")
def takes_what_recv_returns(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    sending = dist.isend(value, dst=(rank + 1) % ranks)
    received = dist.recv(torch.empty_like(value), src=(rank - 1) % ranks)
    sending.wait()
    return received


@wrong("0.3", names="another-shape")
def has_too_little_room(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    received = torch.empty(1)
    sending = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    sending.wait()
    return received


@wrong("0.3", names="another-shape")
def receives_float32_only(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    received = torch.empty(value.shape)
    sending = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    sending.wait()
    return received


# With NCCL all ranks wait: its queue keeps what a rank receives behind what it sends.
@wrong("0.3", names="not-waited", on_nccl="all-begin-alike")
def does_not_wait_for_its_message(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.isend(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=(rank - 1) % ranks)
    return received


# With NCCL all ranks wait: its queue keeps what a rank sends behind what it receives.
@wrong("0.3", names="not-waited", on_nccl="all-begin-alike")
def does_not_wait_for_what_comes(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.irecv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received


@wrong("0.3", names="collective")
def gathers_everything(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return values[dist.get_rank() - 1]


@wrong("0.3", names="broadcast")
def passes_on_what_came(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks == 1:
        return received
    if rank == 0:
        dist.send(value, dst=1)
        dist.recv(received, src=ranks - 1)
    else:
        dist.recv(received, src=rank - 1)
        dist.send(received, dst=(rank + 1) % ranks)
    return received


@wrong("0.3", names="wrong-direction")
def passes_backwards(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        work = dist.isend(value, dst=(rank - 1) % ranks)
        dist.recv(received, src=(rank + 1) % ranks)
        work.wait()
    return received


@wrong("0.3", names="own-value")
def returns_what_it_had(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 1:
        work = dist.isend(value, dst=(rank + 1) % ranks)
        dist.recv(torch.empty_like(value), src=(rank - 1) % ranks)
        work.wait()
    return value.clone()


@wrong("0.3", names="broadcast")
def sends_one_value_to_all(value):
    received = value.clone()
    dist.broadcast(received, src=0)
    return received


@wrong("0.3", names="input-changed")
def receives_into_its_own(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    work = dist.isend(value.clone(), dst=(rank + 1) % ranks)
    dist.recv(value, src=(rank - 1) % ranks)
    work.wait()
    return value


@wrong("0.3", names="sends-to-itself")
def forgets_the_single_rank(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    work = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    work.wait()
    return received


@wrong("0.3", names="not-a-copy")
def returns_its_argument(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value
    received = torch.empty_like(value)
    work = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    work.wait()
    return received


@wrong("0.3", names="no-wrap")
def stops_at_the_last_rank(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if rank > 0:
        dist.recv(received, src=rank - 1)
    if rank < ranks - 1:
        dist.send(value, dst=rank + 1)
    return received


@wrong("0.3", names="sends-to-itself")
def even_ranks_send_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(value)
    if rank % 2 == 0:
        dist.send(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=(rank - 1) % ranks)
    else:
        dist.recv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received


@right("0.3")
def posts_both_at_once(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        send = dist.P2POp(dist.isend, value, (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):  # NCCL's queue knows one at a time
            work.wait()
    return received


@wrong("0.3", names="pairs-only")
def swaps_with_a_partner(value):
    partner = dist.get_rank() ^ 1
    received = value.clone()
    if partner >= dist.get_world_size():
        return received
    if partner > dist.get_rank():
        dist.send(value, partner)
        dist.recv(received, partner)
    else:
        dist.recv(received, partner)
        dist.send(value, partner)
    return received


def _passed(value, received):
    """Passes a message on; one rank after the other sends, and rank 0 begins."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(value, 1)
        dist.recv(received, ranks - 1)
    else:
        dist.recv(received, rank - 1)
        dist.send(value, (rank + 1) % ranks)
    return received


@wrong("0.3", names="not-as-it-is")
def passes_float32_whatever_comes(value):
    if dist.get_world_size() == 1:
        return value.clone()
    return _passed(value.float(), torch.empty(value.shape)).to(value.dtype)


@wrong("0.3", names="not-as-it-is")
def passes_objects(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    received = [None]
    if rank == 0:
        dist.send_object_list([value], 1)
        dist.recv_object_list(received, ranks - 1)
    else:
        dist.recv_object_list(received, rank - 1)
        dist.send_object_list([value], (rank + 1) % ranks)
    return received[0]


@wrong("0.3", names="another-shape")
def passes_a_vector(value):
    flat = value.flatten()
    return _passed(flat, torch.empty_like(flat)) if dist.get_world_size() > 1 else value.clone()


@right("0.3")
def one_after_the_other(value):
    if dist.get_world_size() == 1:
        return value.clone()
    return _passed(value, torch.empty_like(value))
