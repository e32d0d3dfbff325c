"""Rarer wrong answers to 12.4, `search`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch12.search import (
    _but,
    _first,
    _fitting,
    _layouts,
    _restricted,
    takes_the_least_of_all,
)

LEFT_OUT = {
    "never_recomputes": lambda layout: layout.recompute == "none",
    "recomputes_attention_at_most": lambda layout: layout.recompute != "full",
    "recomputes_attention_only": lambda layout: layout.recompute == "selective",
    "recomputes_all_or_nothing": lambda layout: layout.recompute != "selective",
    "always_recomputes": lambda layout: layout.recompute == "full",
    "always_shards": lambda layout: layout.zero == 3,
    "shards_no_parameters": lambda layout: layout.zero < 3,
    "shards_the_optimizer_alone_in_stages": lambda layout: layout.pp == 1 or layout.zero < 2,
    "tries_powers_of_two": lambda layout: all(
        size & (size - 1) == 0 for size in (layout.dp, layout.tp, layout.pp, layout.micro_batch)
    ),
    "cuts_no_layer": lambda layout: layout.tp == 1,
    "ends_the_range_too_early": lambda layout: layout.tp < layout.gpus,
    "keeps_two_copies": lambda layout: layout.dp > 1,
    "takes_single_sequences": lambda layout: layout.micro_batch == 1,
}
for name, keep in LEFT_OUT.items():
    answer = rarer("12.4")(_restricted(keep))
    answer.__name__ = name


@rarer("12.4")
def uses_half_of_the_gpus(model, gpus, batch, seq, hardware, judge):
    return takes_the_least_of_all(model, gpus // 2, batch, seq, hardware, judge)


@rarer("12.4")
def splits_tokens(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("seq")))


@rarer("12.4")
def splits_layers(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("layers")))


@rarer("12.4")
def drops_the_rest_of_the_batch(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("batch")))


@rarer("12.4")
def shards_parameters_in_stages(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=_but("zero")))


@rarer("12.4")
def takes_the_slowest(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: -each[1])


@rarer("12.4")
def raises_without_a_word(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    if not fitting:
        raise ValueError
    return _first(fitting)


@rarer("12.4")
def returns_what_needs_least(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    if not fitting:
        return min(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[0])
    return _first(fitting)


@rarer("12.4")
def runs_into_an_empty_list(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    fitting.sort(key=lambda each: each[1])
    return fitting[0][2]
