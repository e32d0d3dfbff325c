"""Exercise 2.5, `diagnose`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.authoring.forbidden import called
from course_utils import hardware
from course_utils.hardware import Machine, Setup

diagnosis = Exercise(
    "2.5",
    "diagnose",
    points=3,
    minutes=15,
    kind="core",
    parameters=("machine", "setup"),
    hints=[
        (
            "Start with the machine: compare the GPUs of the driver, those that the variable shows "
            "(`machine.selected()`), and those that CUDA gave to the process."
        ),
        (
            "`visible` None means not set: nothing is hidden. Fewer entries accepted than listed means "
            "that one of them is wrong. Only then ask about the loop: who is called, where is the "
            "batch, how many chunks does `torch.chunk` make of it."
        ),
        (
            "Ask in this order: did CUDA start with another number than the variable shows now; are "
            "fewer entries accepted than listed; fewer shown than the driver has; is there another "
            "wrapper; is the batch on the CPU; are there fewer chunks than GPUs. Otherwise healthy."
        ),
    ],
    misconceptions={
        "not-a-name": "Return one of the names from the description, as a string.",
        "none": "Two fields may be None: `visible` where the variable is not set, and `started_gpus` as long as CUDA "
        "has not started. Ask for that before you split it or compare it.",
        "unset-hides": "A variable that is not set hides nothing: all GPUs are visible.",
        "characters-counted": "From the eleventh GPU on, a number has two characters: split the variable "
        "at its commas and count the entries.",
        "reads-on": "The variable names a GPU that does not exist: of n GPUs the last is number n - 1. CUDA reads no "
        "further than that entry, so count the entries that it accepts.",
        "trusts-the-variable": "CUDA read the variable when it started in this process, and what it says now, or "
        "that it is not set now, comes too late. Compare with `started_gpus` in any case.",
        "partial-unseen": "The variable is right in itself, but the driver has more GPUs.",
        "wrapper-unseen": "A wrapper exists somewhere, but `setup.wrappers` is what the loop calls.",
        "inputs-unseen": "Look where the batch is.",
        "chunks": "`torch.chunk` makes chunks of ceil(batch / GPUs) rows. Fewer chunks than GPUs leave some idle, also "
        "of a batch that is larger than the number of GPUs; as many keep all of them busy, also where the last one "
        "is smaller. Count the chunks.",
        "always-ill": "Nothing is wrong here, and you found something.",
        "asked-the-doctor": "You asked `hardware.doctor`. Here you are the doctor: decide from the "
        "fields of machine and setup.",
    },
    failures={
        "not supported between instances of": "none",
        "'NoneType'": "none",
    },
)

NAMES = {
    "visible-partial",
    "visible-wrong",
    "visible-late",
    "wrapped-late",
    "inputs-on-cpu",
    "batch-too-small",
    "healthy",
}


def _good(draw, gpus: int, **change) -> Setup:
    """A training loop with which all GPUs work, and what is changed in it."""
    fields = {
        "wrappers": ("DataParallel",),
        "model_device": "cuda:0",
        "batch_size": gpus * draw.integer(4, 60),
        "batch_device": "cuda:0",
    }
    return Setup(**(fields | change))


def _list(numbers) -> str:
    return ",".join(map(str, numbers))


def _shuffled(draw, gpus: int) -> str:
    """A variable that names all GPUs."""
    return _list(draw.sample(range(gpus), gpus))


def _check_case(answer, machine, setup, cause, **likely):
    """The answer must name `cause`; `likely` maps a misconception to the names that it gives."""
    with called(hardware.doctor) as forbidden:
        got = answer(machine, setup)
    if forbidden:
        expected = "a decision from the fields"
        raise Wrong("asked-the-doctor", expected=expected, got="hardware.doctor")
    if got is None:
        raise Wrong(None, expected=repr(cause), got="None")
    expect_type(got, str, likely="not-a-name")
    if got not in NAMES:
        raise Wrong("not-a-name", expected="a name from the description", got=repr(got))
    names = {slug.replace("_", "-"): value for slug, value in likely.items()}
    expect(got, cause, what=_describe(machine, setup), likely=names)


def _describe(m: Machine, s: Setup) -> str:
    parts = [f"{m.driver_gpus} GPUs, visible={m.visible!r}, started_gpus={m.started_gpus}"]
    if m.torch_gpus == m.driver_gpus:
        parts.append(f"wrappers={s.wrappers}, batch of {s.batch_size} on {s.batch_device}")
    return "; ".join(parts)


@diagnosis.requires("a variable that leaves GPUs out", at_home=True)
def a_variable_that_leaves_gpus_out(answer, draw):
    gpus = draw.integer(3, 8)
    for count in (1, gpus - 1):
        visible = _list(sorted(draw.sample(range(gpus), count)))
        for started in (None, count):
            machine = Machine(driver_gpus=gpus, visible=visible, started_gpus=started)
            _check_case(answer, machine, _good(draw, count), "visible-partial", partial_unseen=True)


@diagnosis.requires("a variable that names a GPU that does not exist")
def a_variable_that_names_a_gpu_that_does(answer, draw):
    for gpus in (2, draw.integer(3, 8)):
        for absent in (gpus, gpus + draw.integer(1, 3)):  # the numbers end at gpus - 1
            machine = Machine(driver_gpus=gpus, visible=_list([*range(gpus - 1), absent, gpus - 1]))
            _check_case(answer, machine, _good(draw, gpus - 1), "visible-wrong", reads_on=True)


@diagnosis.requires("a variable that was changed after CUDA had started")
def a_variable_that_was_changed_after_cuda_had(answer, draw):
    gpus = draw.integer(3, 8)
    everything = _list(range(gpus))
    for visible in (everything, None, "0"):  # more than at the start, and fewer
        started = draw.integer(1 if visible != "0" else 2, gpus - 1)
        machine = Machine(driver_gpus=gpus, visible=visible, started_gpus=started)
        setup = _good(draw, started)
        _check_case(answer, machine, setup, "visible-late", trusts_the_variable=True)


@diagnosis.requires("a loop that calls the bare model")
def a_loop_that_calls_the_bare_model(answer, draw):
    gpus = draw.integer(2, 8)
    setup = _good(draw, gpus, wrappers=(), other_wrapper=True)
    _check_case(
        answer,
        Machine(driver_gpus=gpus),
        setup,
        "wrapped-late",
        unset_hides=lambda got: got.startswith("visible"),
        wrapper_unseen=True,
    )


@diagnosis.requires("a batch on the CPU")
def a_batch_on_the_cpu(answer, draw):
    gpus = draw.integer(2, 8)
    setup = _good(draw, gpus, batch_device="cpu")
    machine = Machine(driver_gpus=gpus, started_gpus=draw.choice([None, gpus]))
    _check_case(
        answer,
        machine,
        setup,
        "inputs-on-cpu",
        unset_hides=lambda got: got.startswith("visible"),
        inputs_unseen=True,
    )


@diagnosis.requires("a batch with fewer chunks than GPUs")
def a_batch_with_fewer_chunks_than_gpus(answer, draw):
    gpus = draw.integer(3, 8)
    small = _good(draw, gpus, batch_size=draw.integer(1, gpus - 1))
    _check_case(
        answer,
        Machine(driver_gpus=gpus),
        small,
        "batch-too-small",
        unset_hides=lambda got: got.startswith("visible"),
        chunks=True,
    )
    for batch_size in (gpus + 1, 2 * (gpus - 1)):  # the latter leaves one GPU without a chunk
        uneven = _good(draw, gpus, batch_size=batch_size)
        _check_case(answer, Machine(driver_gpus=gpus), uneven, "batch-too-small", chunks="healthy")


@diagnosis.requires("healthy set-ups, with and without the variable")
def healthy_set_ups(answer, draw):
    few, many = draw.integer(2, 8), draw.integer(12, 16)
    for gpus, machine in (
        (few, Machine(driver_gpus=few)),
        (few, Machine(driver_gpus=few, visible=_shuffled(draw, few), started_gpus=few)),
        (many, Machine(driver_gpus=many, visible=_shuffled(draw, many), started_gpus=many)),
    ):
        for batch_size in (gpus, gpus * draw.integer(2, 9), gpus * gpus + gpus - 1):
            setup = _good(draw, gpus, batch_size=batch_size)
            _check_case(
                answer,
                machine,
                setup,
                "healthy",
                unset_hides=lambda got, m=machine: m.visible is None and got.startswith("visible"),
                characters_counted=lambda got, n=gpus: n > 10 and got.startswith("visible"),
                chunks="batch-too-small",
                always_ill=True,
            )
