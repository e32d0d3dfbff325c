"""Rarer wrong answers to 12.1, `memory_of`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch12.memory_of import _count, _layer, _memory, _states


@rarer("12.1")
def has_two_tables_on_one_stage(model, layout, seq, stage):
    tables = (stage == 0) + (stage == layout.pp - 1)
    states = _states(_count(model, layout, stage, tables=tables), layout)
    return _memory(model, layout, seq, stage, states)


@rarer("12.1")
def never_has_two_tables(model, layout, seq, stage):
    tables = int(stage in (0, layout.pp - 1))
    states = _states(_count(model, layout, stage, tables=tables), layout)
    return _memory(model, layout, seq, stage, states)


@rarer("12.1")
def shards_everything_with_zero_1(model, layout, seq, stage):
    shards = [layout.dp if layout.zero else 1] * 3
    return _memory(
        model, layout, seq, stage, _states(_count(model, layout, stage), layout, shards=shards)
    )


@rarer("12.1")
def keeps_more_than_there_are(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=layout.pp - stage)


@rarer("12.1")
def always_keeps_scores(model, layout, seq, stage):
    recompute = "none" if layout.recompute == "selective" else layout.recompute
    return _memory(model, layout, seq, stage, layer=_layer(model, layout, seq, recompute))


@rarer("12.1")
def cuts_the_input(model, layout, seq, stage):
    layer = _layer(model, layout, seq)
    layer /= layout.tp if layout.recompute == "full" else 1
    return _memory(model, layout, seq, stage, layer=layer)


@rarer("12.1")
def keeps_nothing(model, layout, seq, stage):
    layer = 0.0 if layout.recompute == "full" else _layer(model, layout, seq)
    return _memory(model, layout, seq, stage, layer=layer)
