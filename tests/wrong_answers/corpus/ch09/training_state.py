"""Rarer wrong answers to 9.3, `TrainingState`."""

import random

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch09.training_state import PARTS, _State


def _without(kind, names):
    """For each of the names, an answer that forgets it."""
    for forgotten in names:
        left = tuple(name for name in names if name != forgotten)
        rarer("9.3")(type(f"Forgets_{forgotten}", (_State,), {kind: left}))


_without("saved", PARTS)
_without("generators", _State.generators)


@rarer("9.3")
class SavesTheObjects(_State):
    def state_dict(self):
        return {**super().state_dict(), "optimizer": self.optimizer}


@rarer("9.3")
class LoadsIntoACopy(_State):
    def load_parts(self, state):
        fresh = {name: value.clone() for name, value in self.model.state_dict().items()}
        fresh.update(state["model"])
        super().load_parts({**state, "model": self.model.state_dict()})


@rarer("9.3")
class LeavesTheGPUAsItIs(_State):
    def set_torch(self, state):
        torch.set_rng_state(state[0])


@rarer("9.3")
class ForgetsPythonsPair(_State):
    def set_python(self, state):
        version, words, _ = state
        random.setstate((version, words, None))


@rarer("9.3")
class AlwaysUnwraps(_State):
    def unwrapped(self, model):
        return model.module


@rarer("9.3")
class StripsEveryPrefix(_State):
    def state_dict(self):
        state = super().state_dict()
        state["model"] = {k.removeprefix("module."): v for k, v in state["model"].items()}
        return state


@rarer("9.3")
class NumbersItsSaves(_State):
    def state_dict(self):
        number = torch.randint(1_000_000, ()).item()
        return super().state_dict() | {"number": number}
