"""Answers to 12.4, `search`: wrong in a plausible way, or right in another."""

import itertools
import math

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


@wrong("12.4", names="uses-estimate")
def lets_estimate_search(model, gpus, batch, seq, hardware, judge):
    return estimate.search(model, gpus, batch, seq, hardware)[0][0].layout


@wrong("12.4", names="no-layout")
def returns_the_seconds_too(model, gpus, batch, seq, hardware, judge):
    layout = takes_the_least_of_all(model, gpus, batch, seq, hardware, judge)
    return layout, judge(layout)[1]


@wrong("12.4", names="gpus")
def uses_half_of_the_gpus(model, gpus, batch, seq, hardware, judge):
    return takes_the_least_of_all(model, gpus // 2, batch, seq, hardware, judge)


@wrong("12.4", names="batch")
def forgets_the_micro_batches(model, gpus, batch, seq, hardware, judge):
    layout = takes_the_least_of_all(model, gpus, batch, seq, hardware, judge)
    sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "zero": layout.zero}
    return Layout(**sizes, micro_batches=batch)


@wrong("12.4", names="does-not-fit")
def forgets_the_memory(model, gpus, batch, seq, hardware, judge):
    return min(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[1])


@wrong("12.4", names="heads")
def splits_heads(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("heads")))


@wrong("12.4", names="sequence")
def splits_tokens(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("seq")))


@wrong("12.4", names="layers")
def splits_layers(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("layers")))


@wrong("12.4", names="least-memory")
def takes_the_smallest(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: each[0])


@wrong("12.4", names="slowest")
def takes_the_slowest(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: -each[1])


@wrong("12.4", names="data-first")
def takes_the_most_data_ranks(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: (-each[2].dp, each[1]))


def _restricted(keep):
    def answer(model, gpus, batch, seq, hardware, judge):
        return _first(_fitting(model, gpus, batch, seq, hardware, judge, keep))

    return answer


@wrong("12.4", names="no-zero")
def never_shards(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.zero == 0)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-recomputation")
def never_recomputes(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute == "none")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-full")
def recomputes_attention_at_most(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute != "full")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="always-selective")
def recomputes_attention_only(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute == "selective")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="batch")
def drops_the_rest_of_the_batch(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("batch")))


@wrong("12.4", names="no-sentence")
def lets_min_complain(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return min(fitting, key=lambda each: each[1])[2]


@wrong("12.4", names="no-sentence")
def raises_without_a_word(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    if not fitting:
        raise ValueError
    return _first(fitting)


@wrong("12.4", names="no-selective")
def recomputes_all_or_nothing(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute != "selective")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="always-full")
def always_recomputes(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute == "full")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="always-zero-3")
def always_shards(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.zero == 3)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="zero-up-to-2")
def shards_no_parameters(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.zero < 3)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-pipeline")
def makes_no_stages(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.pp == 1)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-tensor")
def cuts_no_layer(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.tp == 1)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="one-sequence")
def takes_single_sequences(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.micro_batch == 1)
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="powers-of-two")
def tries_powers_of_two(model, gpus, batch, seq, hardware, judge):
    def even(layout):
        sizes = layout.dp, layout.tp, layout.pp, layout.micro_batch
        return all(math.log2(size).is_integer() for size in sizes)

    return _restricted(even)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="never-all-in-one")
def ends_the_range_too_early(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.tp in range(1, gpus))
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="one-node")
def never_leaves_the_node(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.tp <= hardware.node)
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="always-copies")
def keeps_two_copies(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.dp > 1)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-zero-2-in-stages")
def shards_the_optimizer_alone_in_stages(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.pp == 1 or layout.zero < 2)
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="zero-3-in-stages")
def shards_parameters_in_stages(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("zero")))


@wrong("12.4", names="at-most")
def leaves_a_byte_free(model, gpus, batch, seq, hardware, judge):
    def less(layout):
        return judge(layout)[0] < hardware.hbm_bytes

    return _first(_fitting(model, gpus, batch, seq, hardware, judge, less))


@wrong("12.4", names="no-error")
def returns_what_needs_least(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    if not fitting:
        return min(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[0])
    return _first(fitting)


@wrong("12.4", names="returns-none")
def returns_nothing_if_nothing_fits(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting) if fitting else None


@wrong("12.4", names="other-error")
def runs_into_an_empty_list(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    fitting.sort(key=lambda each: each[1])
    return fitting[0][2]


@wrong("12.4", names="gives-up")
def gives_up_early(model, gpus, batch, seq, hardware, judge):
    raise ValueError("It needs too much memory.")
