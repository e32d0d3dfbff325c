"""hardware: who gets which device, and the doctor, on machines that are invented or real."""

import multiprocessing
import os
import subprocess
import sys
import unittest.mock
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from course_utils import hardware
from course_utils.hardware import (
    CAUSES,
    Machine,
    Setup,
    diagnosis,
    doctor,
    gpu_sharing,
    places,
    snapshot,
)
from course_utils.launch import launch
from course_utils.launch.ranks import job

FOUR = Machine(driver_gpus=4)
GOOD = {"model_device": "cuda:0", "batch_device": "cuda:0", "batch_size": 64}
WRAPPED = ("DataParallel",)

# One set-up a cause: what reproduces it, and what its evidence has to say.
MACHINES = [
    ("no-gpu", Machine(driver_gpus=0), "lists none"),
    ("no-gpu", Machine(driver_gpus=None), "no nvidia-smi"),
    (
        "no-gpu",
        Machine(driver_gpus=None, visible="", cuda_build=False),
        "CUDA_VISIBLE_DEVICES is ''",
    ),
    ("apple-gpu", Machine(driver_gpus=None, cuda_build=False, apple_gpu=True), "(MPS)"),
    ("cpu-build", Machine(driver_gpus=4, cuda_build=False), "4 GPUs"),
    ("visible-none", Machine(driver_gpus=4, visible=""), "''"),
    ("visible-none", Machine(driver_gpus=4, visible="-1"), "'-1'"),
    ("visible-partial", Machine(driver_gpus=4, visible="0"), "lists 4 GPUs"),
    ("visible-partial", Machine(driver_gpus=4, visible="3, 1"), "'3, 1'"),
    ("visible-wrong", Machine(driver_gpus=4, visible="4"), "shows 0 GPUs"),
    ("visible-wrong", Machine(driver_gpus=4, visible="0,7,1"), "'7' is no GPU of this machine"),
    ("visible-wrong", Machine(driver_gpus=4, visible="all"), "'all'"),
    ("visible-wrong", Machine(driver_gpus=4, visible="0,1,0"), "stands twice"),
    ("visible-late", Machine(driver_gpus=4, visible="0,1,2,3", started_gpus=1), "with 1"),
    ("visible-late", Machine(driver_gpus=4, visible="0", started_gpus=4), "with 4"),
    ("count-differs", Machine(driver_gpus=4, torch_gpus=0), "is 0"),
    ("count-differs", Machine(driver_gpus=4, started_gpus=2), "is 2"),
    ("visible-none", Machine(driver_gpus=None, visible=""), "no nvidia-smi to ask"),
    ("one-gpu", Machine(driver_gpus=1), "1 GPU"),
    ("first-gpu-loaded", Machine(driver_gpus=4, memory_used=(0.8, 0.2, 0.2, 0.3)), "80%"),
]
SETUPS = [
    ("not-wrapped", Setup(**GOOD), "4 GPUs"),
    ("wrapped-late", Setup(other_wrapper=True, **GOOD), "the model itself"),
    ("wrapped-twice", Setup(WRAPPED * 2, **GOOD), "DataParallel around DataParallel"),
    ("few-devices", Setup(WRAPPED, device_ids=(0, 1), **GOOD), "[0, 1]"),
    ("model-on-cpu", Setup(WRAPPED, **GOOD | {"model_device": "cpu"}), "refuses"),
    ("inputs-on-cpu", Setup(WRAPPED, **GOOD | {"batch_device": "cpu"}), "scatter copies"),
    ("batch-too-small", Setup(WRAPPED, **GOOD | {"batch_size": 1}), "keeps 1 busy"),
    ("batch-too-small", Setup(WRAPPED, **GOOD | {"batch_size": 5}), "keeps 3 busy"),
    ("optimizer-elsewhere", Setup(WRAPPED, optimizer_fits=False, **GOOD), "not every"),
]


@pytest.mark.parametrize(("cause", "machine", "evidence"), MACHINES)
def test_each_cause_in_the_machine_is_found_alone(cause, machine, evidence):
    [finding] = doctor(machine=machine)
    assert finding.cause == cause
    assert evidence in finding.evidence
    assert finding.repair


@pytest.mark.parametrize(("cause", "setup", "evidence"), SETUPS)
def test_each_cause_in_the_program_is_found_alone(cause, setup, evidence):
    [finding] = doctor(setup=setup, machine=FOUR)
    assert finding.cause == cause
    assert evidence in finding.evidence
    assert finding.repair


def test_every_cause_is_reproduced_here():
    assert {case[0] for case in MACHINES + SETUPS} == set(CAUSES)


@pytest.mark.parametrize(
    "machine",
    [
        FOUR,  # not set: all GPUs are visible, whatever one reads
        Machine(driver_gpus=4, visible="0,1,2,3"),
        Machine(driver_gpus=4, visible="0,1,2,3", started_gpus=4),
        Machine(driver_gpus=2, visible="GPU-5d2a,GPU-77b0"),
        Machine(driver_gpus=4, memory_used=(0.3, 0.3, 0.2, 0.3)),
        Machine(driver_gpus=None, torch_gpus=2, visible="0,1"),
    ],
)
def test_nothing_is_found_on_a_healthy_machine(machine):
    assert doctor(machine=machine) == []
    assert doctor(setup=Setup(WRAPPED, optimizer_fits=True, **GOOD), machine=machine) == []
    assert str(doctor(machine=machine)) == "Nothing found that keeps a GPU idle."


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,9,1", 1), ("1gpu,2", 2)],
)
def test_cuda_visible_devices_is_read_as_cuda_does(visible, count):
    assert Machine(driver_gpus=4, visible=visible).torch_gpus == count


def test_busy_gpus_are_the_chunks_that_scatter_makes():
    for samples in range(1, 30):
        for gpus in range(1, 9):
            assert diagnosis._busy(samples, gpus) == len(torch.zeros(samples).chunk(gpus))


def test_several_causes_come_in_order_and_print_numbered():
    machine = Machine(driver_gpus=4, visible="0,1")
    diagnosis = doctor(setup=Setup(**GOOD | {"batch_device": "cpu"}), machine=machine)
    assert diagnosis.causes == ["visible-partial", "not-wrapped", "inputs-on-cpu"]
    lines = str(diagnosis).splitlines()
    assert lines[0] == "1. visible-partial: CUDA_VISIBLE_DEVICES shows only some of the GPUs."
    assert lines[1].startswith("   evidence: ")
    assert max(map(len, lines)) <= 96


def test_a_setup_is_read_from_live_objects():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.zeros(5, 3), torch.zeros(5)
    setup = Setup.of(model, inputs, optimizer)
    assert setup == Setup((), None, False, "cpu", 5, "cpu", True)
    wrapper = nn.DataParallel(model)
    assert Setup.of(model).other_wrapper
    assert Setup.of(wrapper, (inputs, labels), optimizer).wrappers == WRAPPED
    assert Setup.of(wrapper, (inputs, labels), optimizer).optimizer_fits
    assert Setup.of(nn.DataParallel(wrapper)).wrappers == WRAPPED * 2
    assert not Setup.of(nn.Linear(3, 2), None, optimizer).optimizer_fits
    del wrapper
    assert not Setup.of(model).other_wrapper


def test_inputs_left_on_the_cpu_are_seen_beside_labels_on_a_gpu():
    batch = (torch.zeros(8, 3), torch.zeros(8, device="meta"))
    assert Setup.of(nn.Linear(3, 2), batch).batch_device == "cpu"


def test_a_bare_model_on_the_cpu_of_a_machine_with_gpus():
    diagnosis = doctor(nn.Linear(3, 2), torch.zeros(8, 3), machine=FOUR)
    assert diagnosis.causes == ["not-wrapped", "model-on-cpu", "inputs-on-cpu"]


def test_the_doctor_sees_this_machine():
    here = hardware.machine()
    assert here.torch_gpus == torch.cuda.device_count()
    assert here.cores >= 1
    if here.torch_gpus == 0 and here.driver_gpus in (0, None):
        assert doctor().causes == ["apple-gpu" if here.apple_gpu else "no-gpu"]


def test_looking_does_not_start_cuda():
    code = (
        "import torch\n"
        "from course_utils import hardware\n"
        "hardware.report(); hardware.machine(); hardware.doctor(); hardware.device()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert hardware.machine().started_gpus is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def with_gpus(monkeypatch, gpus: int, shared: bool) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(gpu_sharing, "works", lambda: shared)


# (GPUs, whether ranks can share one, ranks): the GPU of each rank, or None for the CPU
PLACES = {
    (0, False, 2): None,
    (1, True, 1): [0],
    (1, True, 4): [0, 0, 0, 0],
    (1, False, 1): None,  # two ranks would be on the CPU, and so this one is too
    (1, False, 2): None,
    (2, False, 2): [0, 1],
    (2, False, 3): None,
    (2, True, 3): [0, 1, 0],
    (4, False, 2): [0, 1],
}


@pytest.mark.parametrize("case", PLACES)
def test_ranks_get_gpus_or_all_the_cpu(monkeypatch, case):
    gpus, shared, nprocs = case
    with_gpus(monkeypatch, gpus, shared)
    placement, places = hardware.placement(nprocs), PLACES[case]
    if places is None:
        assert placement == hardware.Placement("gloo", [torch.device("cpu")] * nprocs)
    else:
        devices = [torch.device("cuda", i) for i in places]
        assert placement == hardware.Placement("nccl", devices)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ((0, False, 2), "emulated: ranks on the CPU"),
        ((1, True, 4), "emulated: 4 ranks share 1 GPU"),
        ((2, True, 3), "emulated: 3 ranks share 2 GPUs"),
        ((2, True, 2), "measured"),
    ],
)
def test_figures_say_where_their_times_come_from(monkeypatch, case, words):
    with_gpus(monkeypatch, *case[:2])
    assert hardware.placement(case[2]).timing == words


def test_ranks_that_share_a_gpu_tell_nccl_and_share_its_memory():
    sharing = hardware.Placement("nccl", [torch.device("cuda", 0)] * 4)
    call = job.Launch(4, 60.0, 600.0, rules=None, backend=None)
    told = job.on_this_host(ExitStack(), call, sharing, "folder")
    assert told["sharing"] == 4
    assert told["environment"].items() >= gpu_sharing.ENVIRONMENT.items()


def test_a_kernel_with_a_gpu_uses_the_first(monkeypatch):
    with_gpus(monkeypatch, 2, False)
    assert hardware.device() == torch.device("cuda", 0)


@pytest.mark.parametrize(("shared", "device"), [(True, "cuda:0"), (False, "cpu")])
def test_a_kernel_computes_where_its_ranks_do(monkeypatch, shared, device):
    with_gpus(monkeypatch, 1, shared)
    assert hardware.device() == torch.device(device)


def trying(rank: int, folder: str, numbers: tuple) -> bool:
    """What the two ranks of the trial do, with gloo in NCCL's place, and with wrong numbers."""
    with unittest.mock.patch("torch.full", lambda size, *_, device: torch.tensor([numbers[rank]])):
        return gpu_sharing._try(rank, folder, "gloo", "cpu")


@pytest.mark.parametrize(("numbers", "agree"), [((1.0, 2.0), True), ((1.0, 1.0), False)])
def test_two_ranks_try_whether_they_can_share(tmp_path, numbers, agree):
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as two:
        tried = [two.submit(trying, rank, str(tmp_path), numbers) for rank in (0, 1)]
        assert [rank.result(timeout=100) for rank in tried] == [agree, agree]


@pytest.mark.parametrize("agree", [True, False])
def test_what_was_tried_is_remembered_if_it_worked(monkeypatch, tmp_path, agree):
    tries = []
    monkeypatch.setattr(gpu_sharing, "_remembered", lambda: tmp_path / "cache" / "shared")
    monkeypatch.setattr(gpu_sharing, "_two_ranks_agree", lambda: tries.append(1) or agree)
    for _ in range(2):
        gpu_sharing.works.cache_clear()  # as in a new kernel
        assert gpu_sharing.works() == agree
    gpu_sharing.works.cache_clear()
    assert len(tries) == (1 if agree else 2)


def test_without_a_gpu_two_ranks_cannot_share_one():
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU: whether ranks can share it is not known beforehand")
    assert not gpu_sharing._two_ranks_agree()


def test_a_rank_gets_the_device_of_its_placement():
    ranks = 2
    found = launch(lambda rank: str(hardware.device()), ranks)
    assert found == [str(device) for device in hardware.placement(ranks).devices]


@pytest.mark.parametrize(
    ("gpus", "shared", "sentence"),
    [
        (0, False, "no GPU"),
        (1, True, "4 ranks share 1 GPU: the calls are NCCL's, the times are not those of 4 GPUs."),
        (1, False, "everything runs on the CPU with gloo"),
        (4, True, "Up to 4 ranks get one GPU each and NCCL; 8 ranks share 4 GPUs"),
        (4, False, "more ranks run on the CPU with gloo"),
    ],
)
def test_the_report_says_what_ranks_get(monkeypatch, capsys, gpus, shared, sentence):
    names = ("Model X",) * gpus
    with_gpus(monkeypatch, gpus, shared)
    monkeypatch.setattr(places, "machine", lambda: Machine(driver_gpus=gpus, names=names, cores=2))
    hardware.report()
    printed = capsys.readouterr().out
    assert sentence in printed
    assert "2 CPU cores" in printed
    assert printed.count("Model X") == min(gpus, 1)


def test_nvidia_smi_is_read(monkeypatch):
    answer = "NVIDIA A, 1000, 4000\nNVIDIA A, [N/A], [N/A]\n"
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kw: subprocess.CompletedProcess(args, 0, answer, "")
    )
    assert snapshot._driver_gpus() == [("NVIDIA A", 0.25), ("NVIDIA A", 0.0)]


def test_a_failing_nvidia_smi_is_no_answer(monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kw: subprocess.CompletedProcess(args, 9, "", "no driver")
    )
    assert snapshot._driver_gpus() is None


def convolutions():
    cudnn = torch.backends.cudnn
    return cudnn.allow_tf32, cudnn.deterministic


def test_notebook_and_ranks_compute_alike(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    assert launch(lambda rank: convolutions(), 2) == [(False, True)] * 2
    assert convolutions() == (True, False)
    hardware.report()
    assert convolutions() == (False, True)


def test_what_is_checked_is_on_the_cpu_on_every_machine(monkeypatch):
    with_gpus(monkeypatch, 4, True)
    with hardware.without_gpus():
        with hardware.without_gpus():
            assert hardware.device() == torch.device("cpu")
        assert hardware.placement(2) == hardware.on_cpu(2)
    assert hardware.placement(2).backend == "nccl"


def test_a_thread_that_multiplies_first_on_a_gpu_does_not_warn():
    def warned(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context! ...")
            warnings.warn("something else")
        return [str(warning.message) for warning in caught]

    assert launch(warned, 1) == [["something else"]]


def test_ranks_are_told_what_not_to_print():
    assert launch(lambda rank: [os.environ[name] for name in hardware.QUIET], 1) == [["false", "6"]]
