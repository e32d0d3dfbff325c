"""What the comparisons of chapter 11 with one process rest on."""

import torch

from tests.techniques import alone
from tests.techniques.experts import layer_of
from tests.techniques.jobs import make_jobs


def smallest_margin(job) -> float:
    """How far a token's last chosen expert and the first that is not chosen are apart, at least."""
    margins, make = [], job.make_model

    def note(router, inputs, logits: torch.Tensor) -> None:
        best = logits.topk(3).values
        margins.append((best[:, 1] - best[:, 2]).min().item())

    def watched():
        model = make()
        layer_of(model).router.register_forward_hook(note)
        return model

    alone(0, type(job)(watched, job.batches, job.loss))
    return min(margins)


def test_no_route_hangs_on_a_digit():
    """Sums in another order differ by about 1e-6; a route that flips would be a large difference."""
    margins = {name: smallest_margin(job) for name, job in make_jobs().items() if "experts" in name}
    assert margins, "no job has experts"
    assert {name: margin for name, margin in margins.items() if not margin > 1e-4} == {}
