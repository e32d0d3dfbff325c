"""Answers to 9.3, `TrainingState`: wrong in a plausible way, or right in another."""

import random

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.wrong_answers import right, wrong

PARTS = "model", "optimizer", "scheduler", "sampler"


class _State:
    """A right answer in parts."""

    saved = PARTS
    generators = "python", "numpy", "torch"

    def __init__(self, model, optimizer, scheduler, sampler):
        self.optimizer, self.scheduler, self.sampler = optimizer, scheduler, sampler
        self.model = self.unwrapped(model)

    def unwrapped(self, model):
        return model.module if isinstance(model, DistributedDataParallel) else model

    def state_dict(self):
        state = {part: getattr(self, part).state_dict() for part in self.saved}
        return {**state, **{name: getattr(self, f"get_{name}")() for name in self.generators}}

    def load_state_dict(self, state):
        self.load_parts(state)
        self.load_generators(state)

    def load_parts(self, state):
        for part in self.saved:
            getattr(self, part).load_state_dict(state[part])

    def load_generators(self, state):
        for name in self.generators:
            getattr(self, f"set_{name}")(state[name])

    def get_python(self):
        return random.getstate()

    def set_python(self, state):
        random.setstate(state)

    def get_numpy(self):
        name, words, *rest = np.random.get_state()
        return [name, torch.from_numpy(words.astype(np.int64)), *rest]

    def set_numpy(self, state):
        name, words, *rest = state
        np.random.set_state((name, words.numpy().astype(np.uint32), *rest))

    def get_torch(self):
        states = [torch.get_rng_state()]
        return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])

    def set_torch(self, state):
        torch.set_rng_state(state[0])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state[1:])


@right("9.3")
class NumbersAsTensors(_State):
    pass


@right("9.3")
class StripsThePrefix(_State):
    """Names without `module.` in the state, and with it where the model has it."""

    def unwrapped(self, model):
        return model

    def prefix(self):
        return "module." if isinstance(self.model, DistributedDataParallel) else ""

    def state_dict(self):
        state = super().state_dict()
        state["model"] = {k.removeprefix(self.prefix()): v for k, v in state["model"].items()}
        return state

    def load_parts(self, state):
        prefix = self.prefix()
        model = {prefix + name: value for name, value in state["model"].items()}
        super().load_parts({**state, "model": model})


@wrong("9.3", names="not-plain")
class SavesNumpysArray(_State):
    def get_numpy(self):
        return np.random.get_state()

    def set_numpy(self, state):
        np.random.set_state(state)


@wrong("9.3", names="part-lost")
class SavesParametersOnly(_State):
    saved = PARTS[1:]

    def state_dict(self):
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        return {**super().state_dict(), "parameters": parameters}

    @torch.no_grad()
    def load_parts(self, state):
        super().load_parts(state)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state["parameters"][name])


@wrong("9.3", names="part-lost")
class LearningRatesOnly(_State):
    """The optimizer's groups without its momenta."""

    def state_dict(self):
        state = super().state_dict()
        state["optimizer"] = {**state["optimizer"], "state": {}}
        return state


@wrong("9.3", names="generator-lost")
class SavesTheSeed(_State):
    """The seed says where the generator began, not where it is."""

    def get_torch(self):
        return torch.initial_seed()

    def set_torch(self, state):
        torch.manual_seed(state)


@wrong("9.3", names="half-a-pair")
class WordsAndPosition(_State):
    def set_numpy(self, state):
        name, words, position, *_ = state
        np.random.set_state((name, words.numpy().astype(np.uint32), position))


@wrong("9.3", names="gpu-lost")
class ForgetsTheGPU(_State):
    def get_torch(self):
        return [torch.get_rng_state()]

    def set_torch(self, state):
        torch.set_rng_state(state[0])


@wrong("9.3", names="random-first")
class RandomNumbersFirst(_State):
    def load_state_dict(self, state):
        self.load_generators(state)
        self.load_parts(state)


@wrong("9.3", names="not-strict")
class LoadsWhatFits(_State):
    def load_parts(self, state):
        self.model.load_state_dict(state["model"], strict=False)
        for part in self.saved[1:]:
            getattr(self, part).load_state_dict(state[part])


@wrong("9.3", names="wrapper")
class KeepsTheWrapper(_State):
    def unwrapped(self, model):
        return model


@wrong("9.3", names="wrapper")
class UnwrapsWhatHasAModule(_State):
    def unwrapped(self, model):
        return getattr(model, "module", model)


@wrong("9.3", names="save-draws")
class SeedsAnewAtASave(_State):
    """The seed comes back, and with it the numbers after the save."""

    def state_dict(self):
        seed = random.getrandbits(31)
        self.load_generators({"seed": seed})
        return {part: getattr(self, part).state_dict() for part in self.saved} | {"seed": seed}

    def load_generators(self, state):
        random.seed(state["seed"])
        np.random.seed(state["seed"])
        torch.manual_seed(state["seed"])


@wrong("9.3", names="taken-early")
class TakesTheRandomStatesOnce(_State):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.taken = {name: getattr(self, f"get_{name}")() for name in self.generators}

    def state_dict(self):
        return super().state_dict() | self.taken
