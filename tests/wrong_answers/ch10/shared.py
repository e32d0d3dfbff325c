"""What the answers of chapter 10 share."""

import torch
import torch.distributed as dist

from course_exercises.authoring import load_code

attend, attend_backward = load_code(10, "attend"), load_code(10, "attend_backward")
merged, pass_on = load_code(10, "merged"), load_code(10, "pass_on")


def place_of():
    return dist.get_rank(), dist.get_world_size()


def must_divide(length, ranks):
    if length % (2 * ranks):
        raise ValueError(f"{length} does not divide by {2 * ranks}")


def triangle(q):
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()


class RingOf:
    """A right ring, in which a subclass gets one thing wrong. Called like a function."""

    __name__ = "ring"

    def __call__(self, q, k, v):
        rank, ranks = place_of()
        result = self.own(q, k, v)
        for hop in range(1, self.hops(ranks) + 1):
            k, v = self.turn(k, v)
            result = self.merge_in(result, q, k, v, self.earlier(rank, hop), rank, ranks, hop)
        return result[0]

    def hops(self, ranks):
        return ranks - 1

    def turn(self, k, v):
        return pass_on(k, v)

    def earlier(self, rank, hop):
        return hop <= rank

    def own(self, q, k, v):
        return attend(q, k, v, triangle(q))

    def merge(self, one, other):
        return merged(one, other)

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        half = q.shape[2] // 2
        if earlier:
            return self.merge(result, attend(q, k[:, :, :half], v[:, :, :half]))
        old = tuple(x[:, :, half:] for x in result)
        new = self.merge(old, attend(q[:, :, half:], k, v))
        return tuple(
            torch.cat([x[:, :, :half], y], dim=2) for x, y in zip(result, new, strict=True)
        )


def function(ring, name):
    def answer(q, k, v):
        return ring(q, k, v)

    answer.__name__ = name
    return answer
