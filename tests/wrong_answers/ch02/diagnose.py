"""Answers to 2.5, `diagnose`: wrong in a plausible way, or right in another."""

import dataclasses
import math

from course_utils import hardware
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


@wrong("2.5", names="chunks")
def wants_equal_chunks(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows % gpus != 0)


@wrong("2.5", names="asked-the-doctor")
def asks_the_doctor(machine, setup):
    found = hardware.doctor(machine=machine, setup=setup)
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


@wrong("2.5", names="none")
def splits_none(machine, setup):
    if len(machine.visible.split(",")) > len(machine.selected()):
        return "visible-wrong"
    return _right_order(machine, setup)


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
