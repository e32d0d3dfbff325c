"""Rarer wrong answers to 9.3, `TrainingState`."""

import random

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch09.training_state import PARTS, _State


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
class ForgetsTheScheduler(_State):
    saved = "model", "optimizer", "sampler"


@rarer("9.3")
class ForgetsTheSampler(_State):
    saved = PARTS[:3]


@rarer("9.3")
class ForgetsPython(_State):
    generators = "numpy", "torch"


@rarer("9.3")
class ForgetsNumpy(_State):
    generators = "python", "torch"


@rarer("9.3")
class ForgetsTorch(_State):
    generators = "python", "numpy"


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
