"""Rarer wrong answers to 2.5, `diagnose`."""

import math

from course_utils.hardware import doctor
from tests.wrong_answers import rarer
from tests.wrong_answers.ch02.diagnose import _right_order


@rarer("2.5")
def compares_batch_and_gpus(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows < gpus)


@rarer("2.5")
def asks_for_more_than_one_sample(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows < 1)


@rarer("2.5")
def asks_a_doctor_it_knows(machine, setup):
    found = doctor(machine=machine, setup=setup)
    return found[0].cause if found else "healthy"


@rarer("2.5")
def spells_it_otherwise(machine, setup):
    return _right_order(machine, setup).replace("-", "_")


@rarer("2.5")
def looks_for_a_comma_in_none(machine, setup):
    if "," not in machine.visible and machine.driver_gpus > 1:
        return "visible-partial"
    return _right_order(machine, setup)


@rarer("2.5")
def compares_with_none(machine, setup):
    late = machine.started_gpus < len(machine.selected())
    return "visible-late" if late else _right_order(machine, setup)


@rarer("2.5")
def lets_the_number_of_gpus_pass(machine, setup):
    if machine.visible is not None and machine.started_gpus is None:
        numbers = [int(entry) for entry in machine.visible.split(",")]
        if max(numbers) == machine.driver_gpus:
            return "visible-partial"
    return _right_order(machine, setup)


@rarer("2.5")
def sees_only_what_became_more(machine, setup):
    late = (machine.started_gpus or 0) < len(machine.selected())
    return _right_order(machine, setup, late=late)


@rarer("2.5")
def forgives_one_idle_gpu(machine, setup):
    few = lambda rows, gpus: math.ceil(rows / math.ceil(rows / gpus)) < min(rows, gpus - 1)
    small = lambda rows, gpus: rows < gpus or few(rows, gpus)
    return _right_order(machine, setup, batch=small)
