"""Exercise 1.3, `decide`: what it asks for, and how it is checked."""

import math
from dataclasses import dataclass

from course_exercises.authoring import Exercise, Wrong, expect

decisions = Exercise(
    "1.3",
    "decide",
    points=3,
    minutes=20,
    kind="core",
    parameters=("job",),
    hints=[
        "Begin with room: how many bytes does one copy at work need, and how many GPUs is that?",
        (
            "Three questions, in this order. Does a copy fit on one GPU? If not, on how many, and how "
            "many such groups are there? If it fits, what would a step cost when all GPUs share it?"
        ),
        (
            "A copy needs its state and one sample's activations; divide by the memory of a GPU and "
            "round up. Compare with the number of GPUs, and with half of it. Only for a copy that "
            "fits on one GPU, compare the shared compute and the exchange with the whole compute."
        ),
    ],
    misconceptions={
        "another-word": 'Return one of "one", "data", "model", "both" and "none".',
        "activations": "The activations decide here. A copy needs room for its state and for those of one sample, "
        "neither of none nor of a whole batch, and cutting spreads them as it spreads the state.",
        "gpus-a-copy": "The number of GPUs that a copy needs decides here. Divide its bytes by those of a GPU and "
        "round up: what is left over needs a GPU too, and a copy that fills its GPUs to the last byte fits.",
        "copies": "How many copies fit decides here. Divide the GPUs by those that one copy needs, and round down: "
        "for a copy that has to be cut, none, one, or two and more are three different answers.",
        "cut-what-fits": "You cut a model that fits on one GPU. A cut makes room, and here there is "
        "room: a line would only make buildings wait for each other.",
        "copy-what-does-not-fit": "You put a whole copy on a GPU that it does not fit on.",
        "exchange": "The copy fits on one GPU, so time decides. Compare the whole compute with the compute divided by "
        "the number of GPUs plus the exchange; where sharing only breaks even, as on one GPU, nothing is faster.",
    },
)


@dataclass(frozen=True)
class Job:
    """As the notebook defines it."""

    gpus: int
    gpu_bytes: float
    state_bytes: float
    sample_bytes: float
    compute_seconds: float
    exchange_seconds: float

    def __str__(self) -> str:
        copy = (self.state_bytes + self.sample_bytes) / 1e9
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"a copy of {copy:.0f} GB on {gpus} of {self.gpu_bytes / 1e9:.0f} GB"


WORDS = ("one", "data", "model", "both", "none")


def _decide(answer, job, what=""):
    got, right = answer(job), _right(job)
    if got is not None and (not isinstance(got, str) or got not in WORDS):
        raise Wrong("another-word", expected="one of " + ", ".join(WORDS), got=repr(got))
    expect(got, right, what=what or str(job), likely=_mistakes(job))


def _right(job, size=None, gpus_a_copy=None):
    """What is right; of a copy that needs another `size`, or another number of GPUs, if given."""
    size = size or job.state_bytes + job.sample_bytes
    gpus_a_copy = gpus_a_copy or math.ceil(size / job.gpu_bytes)
    if gpus_a_copy <= 1:
        saved = job.compute_seconds * (1 - 1 / job.gpus)
        return ("one", "data")[saved > job.exchange_seconds]
    return ("none", "model", "both")[min(int(job.gpus // gpus_a_copy), 2)]


def _mistakes(job):
    """What decides between the right word and another one, as signs of the other."""
    state, sample, room = job.state_bytes, job.sample_bytes, job.gpu_bytes
    fits, full = state + sample <= room, (state + sample) % room == 0
    count = (state + sample) // room + full  # of GPUs a copy, by who rounds wrongly
    words = {_right(job, size=size) for size in (state, state + job.gpus * sample)}
    if sample < room < state + sample:  # the state is cut, and each GPU has all activations
        words.add(_right(job, gpus_a_copy=math.ceil(state / (room - sample))))
    whole, cut = ("one", "data"), ("model", "both")
    by_count = _right(job, gpus_a_copy=count)
    return {
        "gpus-a-copy": lambda got: got == by_count and (full or got not in words),
        "activations": lambda got: got in words,
        "exchange": lambda got: fits and got in whole,
        "cut-what-fits": lambda got: fits and got in cut,
        "copy-what-does-not-fit": lambda got: got in whole,
        "copies": lambda got: got in WORDS,
    }


def _job(gpus, gpu_gb, state_gb, sample_gb, compute, exchange):
    giga = 10**9
    return Job(gpus, gpu_gb * giga, state_gb * giga, sample_gb * giga, compute, exchange)


@decisions.requires("a small model on several GPUs, where sharing pays")
def a_small_model_on_several_gpus(answer, draw):
    _decide(answer, _job(draw.integer(2, 8), 80, draw.integer(4, 20), 1, 1.0, 0.1))
    gpus = draw.integer(3, 8)
    _decide(answer, _job(gpus, 80, draw.integer(4, 20), 1, 1.0, 0.9 - 1 / gpus))


@decisions.requires("a small model whose exchange costs more than sharing saves")
def a_small_model_whose_exchange_costs_more_than(answer, draw):
    gpus = draw.integer(2, 4)
    _decide(answer, _job(gpus, 80, draw.integer(4, 20), 1, 1.0, 1.0))
    _decide(answer, _job(gpus, 80, draw.integer(4, 20), 1, 1.0, 1.02 - 1 / gpus))
    _decide(answer, _job(1, 80, draw.integer(4, 20), 1, 1.0, 0.0))


@decisions.requires("a copy that has to be cut, with room for one copy and for several")
def a_copy_that_has_to_be_cut(answer, draw):
    needed = draw.integer(4, 6)  # GPUs that a copy fills, the last of them by half
    state = 40 * needed - 21
    for gpus in (needed + 1, 2 * needed - 1, 2 * needed, 2 * needed + 1, 5 * needed):
        for exchange in (0.1, 2.0):  # how slow the exchange is matters for a copy that fits
            _decide(answer, _job(gpus, 40, state, 1, 1.0, exchange))


@decisions.requires("a copy that does not fit on all GPUs together")
def a_copy_that_does_not_fit_on_all(answer, draw):
    gpus = draw.integer(2, 6)
    _decide(answer, _job(gpus, 40, 80 * gpus + 10, 1, 1.0, 0.1))


@decisions.requires("a copy for which the activations of one sample fit, and those of two do not")
def a_copy_for_which_the_activations(answer, draw):
    _decide(answer, _job(draw.integer(2, 6), 80, draw.integer(10, 30), 45, 1.0, 0.1))


@decisions.requires("a copy whose activations are what does not fit")
def a_copy_whose_activations_are_what_does_not(answer, draw):
    _decide(answer, _job(3, 24, 23, draw.integer(4, 16), 1.0, 0.1))
    _decide(answer, _job(3, 24, 23, draw.integer(17, 22), 1.0, 0.1))


@decisions.requires("a copy that fills its GPUs to the last byte")
def a_copy_that_fills_its_gpus(answer, draw):
    gpus = draw.integer(2, 4)
    _decide(answer, _job(2 * gpus - 1, 16, 16 * gpus - 3, 3, 1.0, 0.1))
    _decide(answer, _job(3, 16, 13, 3, 1.0, 0.1))


@decisions.requires("the six jobs of the notebook")
def the_six_jobs_of_the_notebook(answer, draw):
    for name, job in _six_jobs():
        _decide(answer, job, what=name)


def _six_jobs():
    """The jobs as the notebook makes them; its text names the sources of the numbers."""
    fast, slow = 300e9, 0.125e9
    sizes = {
        "BERT-large on 8 GPUs": (340e6, 24, 1024, 16, 512, 32, 8, 80, fast),
        "BERT-large on an office network": (340e6, 24, 1024, 16, 512, 4, 2, 80, slow),
        "GPT-2 on 2 GPUs of 24 GB": (1.5e9, 48, 1600, 25, 1024, 8, 2, 24, fast),
        "Llama 3 8B": (8.03e9, 32, 4096, 32, 2048, 32, 8, 80, fast),
        "Megatron 22B": (22e9, 48, 6144, 64, 2048, 4, 8, 80, fast),
        "GPT-3 175B": (175e9, 96, 12288, 96, 2048, 64, 32, 80, fast),
    }
    for name, (count, layers, hidden, heads, sequence, batch, gpus, memory, link) in sizes.items():
        yield (
            name,
            Job(
                gpus,
                memory * 1e9,
                16 * count,
                layers * sequence * hidden * (34 + 5 * heads * sequence / hidden),
                6 * count * sequence * batch / 140e12,
                2 * (gpus - 1) / gpus * 2 * count / link,
            ),
        )
