"""Answers to 13.2, `train`: wrong in a plausible way, or right in another."""

import hashlib
import io
import math
import os
import pickle
import random
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong


def _order(epoch, rows):
    return torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))


def _write(path, content):
    unfinished = path.with_name("unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _read(path):
    digest, content = path.read_bytes()[:32], path.read_bytes()[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def _sealed(content):
    return hashlib.sha256(content).digest() + content


def _loop(
    training,
    images,
    labels,
    folder,
    steps,
    batch,
    every,
    order=_order,
    write=_write,
    read=_read,
    sealed=_sealed,
    keep=3,
    load=lambda training, state: training.load_state_dict(state),
    state_of=lambda training: training.state_dict(),
    resume=lambda done: done,
    rows_of=lambda rows: rows,
    labels_of=lambda labels, rows: labels[rows],
    newest_first=lambda paths: sorted(paths, key=lambda path: -int(path.stem)),
    until=lambda done, steps: steps,
    step_count=math.ceil,
    save_last=True,
    saves=lambda: True,
    writer=0,
    after_save=dist.barrier,
):
    """The loop, each part of which may be another."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    done, place = 0, None
    for path in newest_first(folder.glob("*.pt")):
        content = read(path)
        if content is not None:
            saved = torch.load(io.BytesIO(content), weights_only=True)
            load(training, saved["training"])
            done = saved["done"]
            place = resume(done)
            break
    place = done if place is None else place
    steps = until(done, steps)
    dist.barrier()
    while done < steps:
        count = step_count(len(images) / batch)
        rows = order(place // count, len(images))[place % count * batch :][:batch]
        rows = rows_of(rows)
        training.step(images[rows], labels_of(labels, rows))
        done, place = done + 1, place + 1
        if done % every == 0 or (done == steps and save_last):
            if saves():
                buffer = io.BytesIO()
                torch.save({"done": done, "training": state_of(training)}, buffer)
                if dist.get_rank() == writer:
                    write(folder / f"{done}.pt", sealed(buffer.getvalue()))
                    for old in sorted(folder.glob("*.pt"), key=lambda p: int(p.stem))[:-keep]:
                        old.unlink()
            after_save()


@right("13.2")
def with_everything_kept(training, images, labels, folder, steps, batch, every):
    _loop(training, images, labels, folder, steps, batch, every, keep=1000)


@right("13.2")
def with_a_list_and_pickle(training, images, labels, folder, steps, batch, every):
    """The whole order is made at the start; the name of a file has its checksum."""
    place = os.path.join(str(folder), "states")
    os.makedirs(place, exist_ok=True)
    plan, epoch = [], 0
    while len(plan) < steps:
        order = list(range(len(images)))
        random.Random(f"epoch {epoch}").shuffle(order)
        plan += [order[i : i + batch] for i in range(0, len(order), batch)]
        epoch += 1
    first = 0
    for name in sorted(os.listdir(place), reverse=True):
        with open(os.path.join(place, name), "rb") as file:
            content = file.read()
        if name.endswith(f"-{zlib.crc32(content):08x}"):
            first = int(name.split("-")[0])
            training.load_state_dict(pickle.loads(content))
            break
    dist.barrier()
    for number in range(first, steps):
        training.step(images[plan[number]], labels[plan[number]])
        if (number + 1) % every == 0 or number + 1 == steps:
            content = pickle.dumps(training.state_dict())
            if dist.get_rank() == 0:
                name = f"{number + 1:06}-{zlib.crc32(content):08x}"
                with open(os.path.join(str(folder), "writing"), "wb") as file:
                    file.write(content)
                os.rename(os.path.join(str(folder), "writing"), os.path.join(place, name))
            dist.barrier()


@right("13.2")
def the_last_rank_writes_and_compresses(training, images, labels, folder, steps, batch, every):
    def compressed(content):
        return _sealed(zlib.compress(content, 9))

    def unpacked(path):
        content = _read(path)
        return content and zlib.decompress(content)

    last = dist.get_world_size() - 1
    more = {"read": unpacked, "sealed": compressed, "writer": last}
    _loop(training, images, labels, folder, steps, batch, every, **more)


def _train(name, **slips):
    def train(training, images, labels, folder, steps, batch, every):
        made = {key: make() if key in ("order", "resume") else make for key, make in slips.items()}
        _loop(training, images, labels, folder, steps, batch, every, **made)

    train.__name__ = name
    return train


def _loads_the_model(training, state):
    nothing = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
    training.load_state_dict({"model": state["model"], "momentum": nothing})


def _in_their_own_order():
    return lambda epoch, rows: torch.arange(rows)


def _always_the_same():
    return lambda epoch, rows: _order(0, rows)


def _drawn_as_it_goes():
    """A new epoch draws from a generator that a new life begins anew."""
    drawn, generator = {}, torch.Generator().manual_seed(7)

    def order(epoch, rows):
        if epoch not in drawn:
            drawn[epoch] = torch.randperm(rows, generator=generator)
        return drawn[epoch]

    return order


def _filled_up():
    """The last batch is filled with rows from the beginning, as DistributedSampler does."""

    def order(epoch, rows):
        return torch.cat([_order(epoch, rows)] * 2)

    return order


never_loads = wrong("13.2", names="not-the-newest")(_train("never_loads", read=lambda path: None))
saves_the_model_alone = wrong("13.2", names="state-not-loaded")(
    _train(
        "saves_the_model_alone",
        state_of=lambda training: {"model": training.state_dict()["model"]},
        load=_loads_the_model,
    )
)
always_the_same_order = wrong("13.2", names="same-order")(
    _train("always_the_same_order", order=_always_the_same)
)
draws_as_it_goes = wrong("13.2", names="another-order")(
    _train("draws_as_it_goes", order=_drawn_as_it_goes)
)
fills_the_last_batch = wrong("13.2", names="not-each-once")(
    _train("fills_the_last_batch", order=_filled_up)
)
drops_the_rest = wrong("13.2", names="not-each-once")(
    _train("drops_the_rest", step_count=math.floor)
)
each_rank_its_rows = wrong("13.2", names="other-batch")(
    _train(
        "each_rank_its_rows", rows_of=lambda rows: rows[dist.get_rank() :: dist.get_world_size()]
    )
)
saves_on_rank_0_only = wrong("13.2", names="not-every-rank")(
    _train("saves_on_rank_0_only", saves=lambda: dist.get_rank() == 0)
)
lets_the_writer_wait_alone = wrong("13.2", names="not-every-rank")(
    _train("lets_the_writer_wait_alone", after_save=lambda: dist.get_rank() == 0 and dist.barrier())
)
goes_on_without_the_writer = wrong("13.2", names="not-complete")(
    _train("goes_on_without_the_writer", after_save=lambda: None)
)
writes_in_place = wrong("13.2", names="written-in-place")(
    _train(
        "writes_in_place",
        write=lambda path, content: path.write_bytes(content),
        read=lambda path: path.read_bytes(),
        sealed=lambda content: content,
    )
)
has_no_checksum = wrong("13.2", names="damaged-file")(
    _train("has_no_checksum", read=lambda path: path.read_bytes(), sealed=lambda content: content)
)
keeps_one = wrong("13.2", names="damaged-file")(_train("keeps_one", keep=1))
forgets_the_last = wrong("13.2", names="last-not-saved")(
    _train("forgets_the_last", save_last=False)
)


sorts_names_as_text = wrong("13.2", names="not-the-newest")(
    _train("sorts_names_as_text", newest_first=lambda paths: sorted(paths, reverse=True))
)
so_many_in_each_life = wrong("13.2", names="other-steps")(
    _train("so_many_in_each_life", until=lambda done, steps: done + steps)
)


@wrong("13.2", names="position-lost")
def saves_the_number_before_the_step(training, images, labels, folder, steps, batch, every):
    """As `for step in range(steps)` with step in the file."""
    more = {"resume": lambda done: done - 1, "until": lambda done, steps: steps + (done > 0)}
    _loop(training, images, labels, folder, steps, batch, every, **more)


@wrong("13.2", names="folder-missing")
def needs_its_folder(training, images, labels, folder, steps, batch, every):
    os.listdir(folder)
