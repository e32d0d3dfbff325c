"""Answers to 9.5, `elastic_limits`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


def _for_old_code(of_old_code):
    """An answer that is right for new code."""

    def answer(available, fits, useful, losses, joins, new_code):
        most = min(available, useful)
        return (fits, fits, 0) if new_code else of_old_code(available, fits, most, losses, joins)

    answer.__name__ = of_old_code.__name__
    return answer


@right("9.5")
def as_a_list(available, fits, useful, losses, joins, new_code):
    most = fits if new_code else min((available, useful))
    return [fits, most, 0 if new_code else losses]


@wrong("9.5", names="minimum")
@_for_old_code
def starts_with_one(available, fits, most, losses, joins):
    return 1, most, losses


@wrong("9.5", names="maximum")
@_for_old_code
def takes_all_that_it_gets(available, fits, most, losses, joins):
    return fits, available, losses


@wrong("9.5", names="joins")
@_for_old_code
def counts_every_change(available, fits, most, losses, joins):
    return fits, most, losses + joins


@wrong("9.5", names="joins")
@_for_old_code
def lets_joins_make_up_for_losses(available, fits, most, losses, joins):
    return fits, most, max(0, losses - joins)


@wrong("9.5", names="restarts")
@_for_old_code
def three_restarts(available, fits, most, losses, joins):
    return fits, most, 3


@wrong("9.5", names="new-code")
def restarts_new_code(available, fits, useful, losses, joins, new_code):
    return fits, fits if new_code else min(available, useful), losses
