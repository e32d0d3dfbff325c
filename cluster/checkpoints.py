"""Checkpoints that are whole or none: written aside, verified by digests, owned by one group.

The folder has to be one that all hosts see. It is trusted: loading unpickles. Only a digest that
differs, or a file that no host sees, is damage.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from group import Stop, everywhere, on_rank_0

KEEP = 3  # checkpoints; more than one, since the newest may turn out to be damaged


@dataclass
class Pending:
    """A checkpoint that is being written."""

    step: int
    partial: Path
    notes: dict
    written: Future | None  # None: it has been


class Checkpoints:
    """The checkpoints of a run, in one folder that all ranks see; every rank calls every method.

    step-00000012-<incarnation>/     after 12 steps: the shards, and manifest.json
    partial-...                      one that is being written, or whose writer was killed
    damaged-...                      one that did not fit its manifest, set aside
    owner                            the incarnation that may write here

    A file that cannot be read is not damaged: that raises OSError on all ranks, and names the host.
    """

    def __init__(self, folder: Path, incarnation: str, in_background: bool = False) -> None:
        self.folder, self.incarnation = folder, incarnation
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # its own connections: the writing threads speak while the training does
        self._background = dist.new_group(backend="gloo") if in_background else None
        self._pending: Pending | None = None
        on_rank_0(self._take_over)

    def _take_over(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove(self.folder.glob("partial-*"))  # of killed writers: they may have filled the disk
        write_whole(self.folder / "owner", self.incarnation.encode())

    # --- writing ---

    def save(self, step: int, state: dict, notes: dict) -> None:
        """Writes `state` (tensors) and `notes` (for JSON) as the checkpoint after `step` steps.

        In the background it copies `state` and returns. The checkpoint exists after `finish`.
        """
        self.finish()  # one at a time
        partial = self.folder / f"partial-{step:08d}-{self.incarnation}"
        writer = dcp.FileSystemWriter(partial, sync_files=True)
        written = None
        if self._background is None:
            dcp.save(state, storage_writer=writer)
        else:
            written = dcp.async_save(state, storage_writer=writer, process_group=self._background)
        self._pending = Pending(step, partial, notes, written)

    def is_written(self) -> bool:
        """Whether this rank's part of a checkpoint waits for `finish`."""
        pending = self._pending
        return pending is not None and (pending.written is None or pending.written.done())

    def finish(self) -> int | None:
        """Waits for the files, and makes the checkpoint exist; returns its step, if there is one."""
        if (pending := self._pending) is None:
            return None
        self._pending = None
        if pending.written is not None:
            pending.written.result()
        parts = everywhere(lambda: self._digests(pending.partial))
        files = {name: value for part in parts for name, value in part.items()}
        on_rank_0(lambda: self._publish(pending, files))
        return pending.step

    def _digests(self, partial: Path) -> dict[str, str]:
        """Of the files that this rank has written."""
        mine = [path for path in partial.glob(f"__{self.rank}_*")]
        mine += [partial / ".metadata"] if self.rank == 0 else []
        return {path.name: digest(path) for path in mine}

    def _publish(self, pending: Pending, files: dict[str, str]) -> None:
        self._leave_if_not_owner()
        step, partial = pending.step, pending.partial
        manifest = {"step": step, "incarnation": self.incarnation, "files": files, **pending.notes}
        write_whole(partial / "manifest.json", json.dumps(manifest).encode())
        # from here on it exists
        partial.rename(self.folder / partial.name.replace("partial", "step"))
        flush_folder(self.folder)
        self._tidy()

    def _leave_if_not_owner(self) -> None:
        """The newest start of the group owns the folder: ranks that were cut off, and went on alone, end."""
        owner = (self.folder / "owner").read_text()
        if owner != self.incarnation:
            sys.exit(f"incarnation {self.incarnation} leaves: {owner} has taken over")

    def _tidy(self) -> None:
        """Removes old checkpoints, and what killed writers left."""
        old = sorted(self.folder.glob("step-*"))[:-KEEP]
        torn = [p for p in self.folder.glob("partial-*") if self.incarnation not in p.name]
        remove([*old, *torn])

    # --- reading ---

    def newest_good(self, start_anew: bool = False) -> tuple[Path, dict] | None:
        """Returns folder and manifest of the newest checkpoint that fits its manifest.

        None if nothing was ever saved. If all that was saved is damaged, the run stops, or with
        `start_anew` returns None too.
        """
        names = on_rank_0(lambda: sorted(os.listdir(self.folder)))
        for name in reversed([name for name in names if name.startswith("step-")]):
            manifest, why = self._verified(self.folder / name)
            if manifest is not None:
                return self.folder / name, manifest
            on_rank_0(lambda name=name, why=why: self._set_aside(name, why))
            names.append(f"damaged-{name}")
        if any(name.startswith("damaged-") for name in names) and not start_anew:
            raise Stop(
                f"all checkpoints in {self.folder} are damaged (damaged-...). To begin again at "
                "step 0, add --start-anew."
            )
        return None

    def _set_aside(self, name: str, why: str) -> None:
        print(f"{self.folder / name} is damaged: {why}; an older one is looked for", flush=True)
        (self.folder / name).rename(self.folder / f"damaged-{name}")

    def _verified(self, folder: Path) -> tuple[dict | None, str]:
        """Its manifest, or None and why not. Each rank reads a share of the files."""
        manifest, why = on_rank_0(lambda: read_manifest(folder))
        if manifest is None:
            return None, why
        share = sorted(manifest["files"].items())[self.rank :: self.world]
        verdicts = everywhere(lambda: [judge(folder / name, sha) for name, sha in share])
        bad = [verdict for part in verdicts for verdict in part if verdict]
        lost = [name for name in manifest["files"] if f"{name} is missing" in bad]
        seen = everywhere(lambda: [name for name in lost if (folder / name).exists()])
        if any(seen):  # then it is the file system that is behind, not the file that is lost
            raise OSError(f"{folder}: {max(seen)[0]} is seen by some hosts, and not by others")
        return (None, bad[0]) if bad else (manifest, "")


def read_manifest(folder: Path) -> tuple[dict | None, str]:
    """The manifest, or None and what is wrong with it; raises OSError where it cannot be read."""
    try:
        return json.loads((folder / "manifest.json").read_bytes()), ""
    except FileNotFoundError:
        return None, "manifest.json is missing"
    except ValueError:
        return None, "manifest.json is torn"


def judge(path: Path, expected: str) -> str:
    """What is wrong with a file, "" if nothing; raises OSError where it cannot be read."""
    try:
        return "" if digest(path) == expected else f"{path.name} has another SHA-256"
    except FileNotFoundError:
        return f"{path.name} is missing"


def remove(folders: Iterable[Path]) -> None:
    """Removes folders of files, each manifest first: without it a checkpoint is none, and nobody finds
    half of one."""
    for folder in folders:
        for path in sorted(folder.iterdir(), key=lambda path: path.name != "manifest.json"):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all, also after the power has failed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk; a rename alone may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
