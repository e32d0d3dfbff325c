"""Answers to 9.5, `elastic_limits`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


@right("9.5")
def as_a_list(available, fits, useful, losses, joins, new_code):
    most = fits if new_code else min((available, useful))
    return [fits, most, 0 if new_code else losses]


@wrong("9.5", names="minimum-too-low")
def starts_with_one(available, fits, useful, losses, joins, new_code):
    return (1, 1, 0) if new_code else (1, min(available, useful), losses)


@wrong("9.5", names="minimum-too-high")
def never_shrinks(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (most, most, losses)


@wrong("9.5", names="minimum-too-high")
def allows_for_the_expected_losses(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (max(fits, most - losses), most, losses)


@wrong("9.5", names="minimum-too-high")
def stays_fixed_where_nothing_is_lost(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (most if losses == 0 else fits, most, losses)


@wrong("9.5", names="maximum-without-work")
def takes_all_that_it_gets(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, available, losses)


@wrong("9.5", names="maximum-not-there")
def takes_all_that_have_work(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, useful, losses)


@wrong("9.5", names="maximum-too-low")
def never_grows(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0 if new_code else losses)


@wrong("9.5", names="joins-counted")
def counts_every_change(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), losses + joins)


@wrong("9.5", names="no-restarts")
def leaves_the_default(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), 0)


@wrong("9.5", names="joins-subtracted")
def lets_joins_make_up_for_losses(available, fits, useful, losses, joins, new_code):
    most = min(available, useful)
    return (fits, fits, 0) if new_code else (fits, most, max(0, losses - joins))


@wrong("9.5", names="one-restart-more")
def counts_the_first_start(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), losses + 1)


@wrong("9.5", names="restarts-fixed")
def three_restarts(available, fits, useful, losses, joins, new_code):
    return (fits, fits, 0) if new_code else (fits, min(available, useful), 3)


@wrong("9.5", names="new-code-restarts")
def restarts_new_code(available, fits, useful, losses, joins, new_code):
    return fits, fits if new_code else min(available, useful), losses


@wrong("9.5", names="new-code-large")
def tries_new_code_on_all(available, fits, useful, losses, joins, new_code):
    return fits, min(available, useful), 0 if new_code else losses
