"""Answers to 2.5, `diagnose`: wrong in a plausible way, or right in another."""

import dataclasses
import math

from course_utils import hardware
from course_utils.hardware import doctor
from tests.wrong_answers import right, wrong


def _right_order(machine, setup, *, unset_hides=False, late=True, wrong=True, batch=None):
    """The solution, with parts that can be left out."""
    if machine.visible is None and unset_hides:
        return "visible-partial"
    shown = len(machine.selected())
    if late and machine.started_gpus not in (None, shown):
        return "visible-late"
    if wrong and machine.visible is not None and shown < len(machine.visible.split(",")):
        return "visible-wrong"
    if machine.torch_gpus < machine.driver_gpus:
        return "visible-partial"
    if not setup.wrappers:
        return "wrapped-late"
    if setup.batch_device == "cpu":
        return "inputs-on-cpu"
    few = batch or (lambda rows, gpus: math.ceil(rows / math.ceil(rows / gpus)) < gpus)
    return "batch-too-small" if few(setup.batch_size, machine.torch_gpus) else "healthy"


@wrong("2.5", names="unset-hides")
def takes_unset_for_hidden(machine, setup):
    if machine.started_gpus not in (None, len(machine.selected())):
        return "visible-late"
    return _right_order(machine, setup, unset_hides=True)


@wrong("2.5", names="trusts-the-variable")
def reads_the_variable_only(machine, setup):
    return _right_order(machine, setup, late=False)


@wrong("2.5", names="reads-on")
def counts_the_entries(machine, setup):
    return _right_order(machine, setup, wrong=False)


@wrong("2.5", names="larger-is-enough")
def compares_batch_and_gpus(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows < gpus)


@wrong("2.5", names="batch-unseen")
def asks_for_more_than_one_sample(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows < 1)


@wrong("2.5", names="busy-after-all")
def wants_equal_chunks(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows % gpus != 0)


@wrong("2.5", names="asked-the-doctor")
def asks_the_doctor(machine, setup):
    found = hardware.doctor(machine=machine, setup=setup)
    return found[0].cause if found else "healthy"


@wrong("2.5", names="asked-the-doctor")
def asks_a_doctor_it_knows(machine, setup):
    found = doctor(machine=machine, setup=setup)
    return found[0].cause if found else "healthy"


@wrong("2.5", names="characters-counted")
def counts_every_second_character(machine, setup):
    entries = (len(machine.visible or "") + 1) // 2
    if (
        machine.started_gpus in (None, len(machine.selected()))
        and len(machine.selected()) < entries
    ):
        return "visible-wrong"
    return _right_order(machine, setup)


@wrong("2.5", names="not-a-name")
def returns_a_list(machine, setup):
    return [_right_order(machine, setup)]


@wrong("2.5", names="not-a-name")
def spells_it_otherwise(machine, setup):
    return _right_order(machine, setup).replace("-", "_")


@wrong("2.5", names="unset-is-none")
def splits_none(machine, setup):
    if len(machine.visible.split(",")) > len(machine.selected()):
        return "visible-wrong"
    return _right_order(machine, setup)


@wrong("2.5", names="unset-is-none")
def looks_for_a_comma_in_none(machine, setup):
    if "," not in machine.visible and machine.driver_gpus > 1:
        return "visible-partial"
    return _right_order(machine, setup)


@wrong("2.5", names="not-started-is-none")
def compares_with_none(machine, setup):
    late = machine.started_gpus < len(machine.selected())
    return "visible-late" if late else _right_order(machine, setup)


@wrong("2.5", names="wrapper-unseen")
def believes_any_wrapper(machine, setup):
    from dataclasses import replace

    return _right_order(machine, replace(setup, wrappers=("DataParallel",)))


@wrong("2.5", names="always-ill")
def suspects_every_variable(machine, setup):
    found = _right_order(machine, setup)
    return "visible-partial" if found == "healthy" and machine.visible is not None else found


@wrong("2.5", names="partial-unseen")
def never_asks_the_driver(machine, setup):
    seen = dataclasses.replace(machine, driver_gpus=machine.torch_gpus)
    if machine.selected() and "," not in (machine.visible or ","):
        return "healthy"
    return _right_order(seen, setup) if machine.visible is None else _right_order(machine, setup)


@wrong("2.5", names="inputs-unseen")
def does_not_look_at_the_inputs(machine, setup):
    return _right_order(machine, dataclasses.replace(setup, batch_device="cuda:0"))


@right("2.5")
def by_counting_chunks(machine, setup):
    return _right_order(machine, setup)


@wrong("2.5", names="reads-on")
def lets_the_number_of_gpus_pass(machine, setup):
    if machine.visible is not None and machine.started_gpus is None:
        numbers = [int(entry) for entry in machine.visible.split(",")]
        if max(numbers) == machine.driver_gpus:
            return "visible-partial"
    return _right_order(machine, setup)


@wrong("2.5", names="trusts-the-variable")
def sees_only_what_became_more(machine, setup):
    late = (machine.started_gpus or 0) < len(machine.selected())
    return _right_order(machine, setup, late=late)


@wrong("2.5", names="larger-is-enough")
def forgives_one_idle_gpu(machine, setup):
    few = lambda rows, gpus: math.ceil(rows / math.ceil(rows / gpus)) < min(rows, gpus - 1)
    small = lambda rows, gpus: rows < gpus or few(rows, gpus)
    return _right_order(machine, setup, batch=small)
