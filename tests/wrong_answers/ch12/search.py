"""Answers to 12.4, `search`: wrong in a plausible way, or right in another."""

import itertools

import course_planner as estimate
from course_planner import Layout
from tests.wrong_answers import right, wrong

RECOMPUTE = ("none", "selective", "full")


def _divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


RULES = ("batch", "heads", "seq", "layers", "zero")


def _but(rule):
    return tuple(other for other in RULES if other != rule)


def _layouts(model, gpus, batch, seq, rules=RULES):
    for tp, pp in itertools.product(_divisors(gpus), repeat=2):
        dp, left = divmod(gpus, tp * pp)
        if left or dp == 0 or batch < dp or pp > model.layers:
            continue
        if "batch" in rules and batch % dp:
            continue
        if "heads" in rules and model.heads % tp or "seq" in rules and seq % tp:
            continue
        if "layers" in rules and model.layers % pp:
            continue
        for b, recompute in itertools.product(_divisors(batch // dp), RECOMPUTE):
            for zero in range(3 if "zero" in rules and pp > 1 else 4):
                split = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "recompute": recompute}
                yield Layout(**split, micro_batch=b, micro_batches=batch // dp // b)


def _fitting(model, gpus, batch, seq, hardware, judge, keep=lambda layout: True, **more):
    """(bytes, seconds, layout) of those that fit."""
    judged = [(*judge(e), e) for e in _layouts(model, gpus, batch, seq, **more) if keep(e)]
    return [each for each in judged if each[0] <= hardware.hbm_bytes]


def _first(judged, key=lambda each: each[1]):
    if not judged:
        raise ValueError("Nothing fits.")
    return min(judged, key=key)[2]


@right("12.4")
def takes_the_least_of_all(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge))


@right("12.4")
def goes_by_seconds_and_looks_at_memory_last(model, gpus, batch, seq, hardware, judge):
    by_seconds = sorted(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[1])
    for layout in by_seconds:
        if judge(layout)[0] <= hardware.hbm_bytes:
            return layout
    raise ValueError(f"No split of {model.layers} layers over {gpus} GPUs fits.")


@right("12.4")
def never_leaves_the_node_with_tensor_ranks(model, gpus, batch, seq, hardware, judge):
    """A rule of thumb, within the regret: tensor groups stay inside a node, if anything fits there."""
    inside = _fitting(
        model, gpus, batch, seq, hardware, judge, lambda layout: layout.tp <= hardware.node
    )
    return _first(inside or _fitting(model, gpus, batch, seq, hardware, judge))


def _restricted(keep):
    def answer(model, gpus, batch, seq, hardware, judge):
        return _first(_fitting(model, gpus, batch, seq, hardware, judge, keep))

    return answer


@wrong("12.4", names="uses-estimate")
def lets_estimate_search(model, gpus, batch, seq, hardware, judge):
    return estimate.search(model, gpus, batch, seq, hardware)[0][0].layout


@wrong("12.4", names="no-layout")
def returns_the_seconds_too(model, gpus, batch, seq, hardware, judge):
    layout = takes_the_least_of_all(model, gpus, batch, seq, hardware, judge)
    return layout, judge(layout)[1]


@wrong("12.4", names="illegal")
def forgets_the_micro_batches(model, gpus, batch, seq, hardware, judge):
    layout = takes_the_least_of_all(model, gpus, batch, seq, hardware, judge)
    sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "zero": layout.zero}
    return Layout(**sizes, micro_batches=batch)


@wrong("12.4", names="illegal")
def splits_heads(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("heads")))


@wrong("12.4", names="does-not-fit")
def forgets_the_memory(model, gpus, batch, seq, hardware, judge):
    return min(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[1])


@wrong("12.4", names="other-aim")
def takes_the_smallest(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: each[0])


@wrong("12.4", names="other-aim")
def takes_the_most_data_ranks(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: (-each[2].dp, each[1]))


@wrong("12.4", names="tries-too-few")
def never_shards(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.zero == 0)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="tries-too-few")
def makes_no_stages(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.pp == 1)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="at-most")
def leaves_a_byte_free(model, gpus, batch, seq, hardware, judge):
    def less(layout):
        return judge(layout)[0] < hardware.hbm_bytes

    return _first(_fitting(model, gpus, batch, seq, hardware, judge, less))


@wrong("12.4", names="no-error")
def returns_nothing_if_nothing_fits(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting) if fitting else None


@wrong("12.4", names="no-error")
def lets_min_complain(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return min(fitting, key=lambda each: each[1])[2]


@wrong("12.4", names="gives-up")
def gives_up_early(model, gpus, batch, seq, hardware, judge):
    raise ValueError("It needs too much memory.")


@wrong("12.4", names="gives-up")
def never_leaves_the_node(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.tp <= hardware.node)
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="slow")
def takes_one_in_the_middle(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    if not fitting:
        raise ValueError("No layout is legal and fits.")
    return sorted(fitting, key=lambda each: each[1])[len(fitting) // 2][2]
