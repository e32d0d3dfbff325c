import gzip
import multiprocessing
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
from torchvision import datasets, transforms

from course_utils.lesson import mnist

NAMES = [name for name, _ in datasets.MNIST.resources]


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A data folder as a fresh clone has it: the compressed files only."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in NAMES:
        shutil.copy(mnist.ROOT / "MNIST" / "raw" / name, raw)
    monkeypatch.setattr(mnist, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return raw


@pytest.mark.parametrize(("train", "length"), [(True, 60_000), (False, 10_000)])
def test_dataset_is_torchvisions_own(fresh, train, length):
    data = mnist.dataset(train)
    assert type(data) is datasets.MNIST
    assert len(data) == length
    assert sorted(path.name for path in fresh.iterdir()) == sorted(
        NAMES + [name.removesuffix(".gz") for name in NAMES]
    )


def test_tensors_are_what_to_tensor_gives():
    images, labels = mnist.tensors(train=False, limit=20)
    reference = mnist.dataset(train=False)
    reference.transform = transforms.ToTensor()
    assert images.shape == (20, 1, 28, 28) and images.dtype == torch.float32
    assert labels.shape == (20,) and labels.dtype == torch.int64
    for i in range(20):
        image, label = reference[i]
        assert torch.equal(images[i], image) and labels[i] == label


def test_tensors_without_a_limit_are_all_and_limits_are_checked():
    images, labels = mnist.tensors(train=False)
    assert len(images) == len(labels) == 10_000
    assert images.min() == 0 and images.max() == 1
    with pytest.raises(ValueError, match="limit is 0"):
        mnist.tensors(train=False, limit=0)


def test_a_half_unpacked_file_is_repaired(fresh):
    half = fresh / "train-images-idx3-ubyte"
    half.write_bytes(gzip.decompress((fresh / "train-images-idx3-ubyte.gz").read_bytes())[:1000])
    assert len(mnist.dataset(train=True)) == 60_000


def test_a_folder_that_is_read_only_is_left_alone(fresh, monkeypatch):
    """A course that the instructor has installed once for everybody."""
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != fresh and may(path, mode))
    before = sorted(fresh.iterdir())
    for _ in range(2):
        assert mnist.dataset(train=False).root == fresh.parents[1] / "cache" / "parallelism-course"
    assert sorted(fresh.iterdir()) == before


def test_a_file_appears_when_it_is_complete(fresh, monkeypatch):
    replace, sizes = Path.replace, []

    def looked_at(partial, path):
        assert not path.exists()
        sizes.append(partial.stat().st_size)
        return replace(partial, path)

    monkeypatch.setattr(Path, "replace", looked_at)
    mnist.dataset(train=True)
    assert sizes == [47_040_016, 60_008, 7_840_016, 10_008]


def test_damaged_and_missing_files_are_named(fresh):
    (fresh / NAMES[1]).write_bytes(b"not a gzip file")
    with pytest.raises(RuntimeError, match=rf"{NAMES[1]} is damaged.*git checkout"):
        mnist.dataset(train=True)
    (fresh / NAMES[1]).unlink()
    with pytest.raises(RuntimeError, match=rf"{NAMES[1]} is missing.*git checkout"):
        mnist.dataset(train=True)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(fresh, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mnist.gzip, "decompress", full)
    with pytest.raises(RuntimeError, match="No space left on device.*60 MB"):
        mnist.dataset(train=True)
    assert sorted(path.name for path in fresh.iterdir()) == sorted(NAMES)


def _count(root, start, results):
    mnist.ROOT = Path(root)
    start.wait()
    results.put(len(mnist.dataset(train=True)))


def test_several_processes_at_once(fresh):
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(4), context.Queue()
    arguments = (str(mnist.ROOT), start, results)
    processes = [context.Process(target=_count, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [60_000] * 4
    for process in processes:
        process.join()
    assert not list(fresh.glob("partial-*"))


def test_torchvision_itself_finds_the_files_without_a_network(fresh, monkeypatch):
    def no_network(*_):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    data = datasets.MNIST(fresh.parents[1], download=True)  # unpacks, after it checked the sums
    assert len(data) == 60_000
