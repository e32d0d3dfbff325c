"""Rarer wrong answers to 9.5, `elastic_limits`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch09.elastic_limits import _for_old_code


@rarer("9.5")
@_for_old_code
def stays_fixed_where_nothing_is_lost(available, fits, most, losses, joins):
    return most if losses == 0 else fits, most, losses


@rarer("9.5")
def takes_all_that_have_work(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, useful, losses)


@rarer("9.5")
def tries_new_code_on_all(available, fits, useful, losses, joins, new_code):
    return fits, min(available, useful), 0 if new_code else losses
