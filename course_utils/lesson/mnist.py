"""The MNIST data set, offline, as torchvision's own `datasets.MNIST` reads it.

The four original files (LeCun, Cortes, Burges; CC BY-SA 3.0) are part of the project, compressed.
`datasets.MNIST("data", download=True)` works on them without a network too, because torchvision
finds the checksums that it expects; but two processes that call it at once can read a file that
the other has only half unpacked. Here each file appears under its name when it is complete: beside
the compressed one, or, where that folder is read-only, in the user's cache folder.
"""

import gzip
import os
import tempfile
from pathlib import Path

import platformdirs
import torch
from torchvision import datasets
from torchvision.datasets.utils import check_md5

# The project is installed in place (pip install -e .), so its data lies beside the package.
ROOT = Path(__file__).resolve().parents[2] / "data"


def dataset(train: bool) -> datasets.MNIST:
    """Returns torchvision's training set (60,000 images) or test set (10,000 images).

    Safe when several processes call it at once. Raises RuntimeError with one sentence when a file
    is missing or damaged, or when there is no room to unpack it.
    """
    return datasets.MNIST(_unpacked(), train=train)


def tensors(train: bool, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images, float32 (N, 1, 28, 28) from 0 to 1, and labels, int64 (N,).

    `limit` keeps only the first `limit` images, in the order of the original file.
    """
    if limit is not None and limit < 1:
        raise ValueError(
            f"limit is {limit}; give a number of images of at least 1, or None for all."
        )
    data = dataset(train)
    images = data.data[:limit].unsqueeze(1).float() / 255  # bytes 0..255, as ToTensor scales them
    return images, data.targets[:limit].clone()


def _unpacked() -> Path:
    """Returns the folder with MNIST/raw and the four files in it; writes those that are not there."""
    own = platformdirs.user_cache_path("parallelism-course")
    packed = [ROOT / "MNIST" / "raw" / name for name, _ in datasets.MNIST.resources]
    for file in packed:
        if not file.is_file():
            raise RuntimeError(f"{file} is missing; restore it with: git checkout -- data")
    for folder in (ROOT, own):
        if all(_complete(file, _in(folder, file)) for file in packed):
            return folder
    folder = ROOT if os.access(ROOT / "MNIST" / "raw", os.W_OK) else own
    for file, (_, md5) in zip(packed, datasets.MNIST.resources):
        _unpack(file, md5, _in(folder, file))
    return folder


def _in(folder: Path, packed: Path) -> Path:
    return folder / "MNIST" / "raw" / packed.stem


def _unpack(packed: Path, md5: str, unpacked: Path) -> None:
    if _complete(packed, unpacked):
        return
    if not check_md5(packed, md5):
        raise RuntimeError(f"{packed} is damaged; restore it with: git checkout -- data")
    try:
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(gzip.decompress(packed.read_bytes()), unpacked)
    except OSError as error:
        if not _complete(packed, unpacked):  # otherwise another process has just done it
            raise RuntimeError(
                f"Cannot unpack {packed.name} in {unpacked.parent} ({error.strerror}); "
                "make the folder writable and leave 60 MB free on its disk."
            ) from error


def _complete(packed: Path, unpacked: Path) -> bool:
    # The last four bytes of a gzip file hold the length of its content (RFC 1952, section 2.3.1).
    with packed.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        length = int.from_bytes(file.read(), "little")
    return unpacked.is_file() and unpacked.stat().st_size == length


def _write_whole(content: bytes, path: Path) -> None:
    # The rename is atomic: another process sees the whole file or none.
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix="partial-", suffix="-ubyte", delete=False
    ) as file:
        partial = Path(file.name)
        try:
            file.write(content)
            file.flush()
            partial.chmod(0o644)  # temporary files are private to their user; data need not be
            partial.replace(path)
        except BaseException:
            partial.unlink()
            raise
