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
            dist.barrier()


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


def _wrong_loop(names, **slips):
    def add(name):
        def train(training, images, labels, folder, steps, batch, every):
            made = {
                key: make() if key in ("order", "resume") else make for key, make in slips.items()
            }
            _loop(training, images, labels, folder, steps, batch, every, **made)

        train.__name__ = name
        return wrong("13.2", names=names)(train)

    return add


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


never_loads = _wrong_loop("from-zero", read=lambda path: None)("never_loads")
begins_the_order_again = _wrong_loop("position-lost", resume=lambda: lambda done: 0)(
    "begins_the_order_again"
)
loads_no_state = _wrong_loop("state-not-loaded", load=lambda training, state: None)(
    "loads_no_state"
)
saves_the_model_alone = _wrong_loop(
    "momentum-lost",
    state_of=lambda training: {"model": training.state_dict()["model"]},
    load=_loads_the_model,
)("saves_the_model_alone")
does_a_step_twice = _wrong_loop("one-step-off", resume=lambda: lambda done: done - 1)(
    "does_a_step_twice"
)
in_their_own_order = _wrong_loop("not-shuffled", order=_in_their_own_order)("in_their_own_order")
always_the_same_order = _wrong_loop("same-order", order=_always_the_same)("always_the_same_order")
draws_as_it_goes = _wrong_loop("another-order", order=_drawn_as_it_goes)("draws_as_it_goes")
fills_the_last_batch = _wrong_loop("used-twice", order=_filled_up)("fills_the_last_batch")
drops_the_rest = _wrong_loop("left-over-lost", step_count=math.floor)("drops_the_rest")
each_rank_its_rows = _wrong_loop(
    "share-on-each-rank", rows_of=lambda rows: rows[dist.get_rank() :: dist.get_world_size()]
)("each_rank_its_rows")
saves_on_rank_0_only = _wrong_loop("one-rank-saves", saves=lambda: dist.get_rank() == 0)(
    "saves_on_rank_0_only"
)
writes_in_place = _wrong_loop(
    "in-place",
    write=lambda path, content: path.write_bytes(content),
    read=lambda path: path.read_bytes(),
    sealed=lambda content: content,
)("writes_in_place")
has_no_checksum = _wrong_loop(
    "no-fallback", read=lambda path: path.read_bytes(), sealed=lambda content: content
)("has_no_checksum")
keeps_one = _wrong_loop("no-fallback", keep=1)("keeps_one")
forgets_the_last = _wrong_loop("last-not-saved", save_last=False)("forgets_the_last")


labels_in_their_own_order = _wrong_loop(
    "wrong-labels", labels_of=lambda labels, rows: labels[: len(rows)]
)("labels_in_their_own_order")
sorts_names_as_text = _wrong_loop(
    "older-checkpoint", newest_first=lambda paths: sorted(paths, reverse=True)
)("sorts_names_as_text")
takes_the_oldest = _wrong_loop(
    "older-checkpoint", newest_first=lambda paths: sorted(paths, key=lambda path: int(path.stem))
)("takes_the_oldest")
so_many_in_each_life = _wrong_loop("other-steps", until=lambda done, steps: done + steps)(
    "so_many_in_each_life"
)
one_more_in_any_case = _wrong_loop("trains-on", until=lambda done, steps: max(steps, done + 1))(
    "one_more_in_any_case"
)
never_saves = _wrong_loop("from-zero", write=lambda path, content: None)("never_saves")


@wrong("13.2", names="position-lost")
def begins_the_epoch_again(training, images, labels, folder, steps, batch, every):
    count = math.ceil(len(images) / batch)
    more = {"resume": lambda done: done - done % count}
    _loop(training, images, labels, folder, steps, batch, every, **more)


@wrong("13.2", names="one-step-off")
def saves_the_number_before_the_step(training, images, labels, folder, steps, batch, every):
    """As `for step in range(steps)` with step in the file."""
    more = {"resume": lambda done: done - 1, "until": lambda done, steps: steps + (done > 0)}
    _loop(training, images, labels, folder, steps, batch, every, **more)


@wrong("13.2", names="other-steps")
def whole_epochs_only(training, images, labels, folder, steps, batch, every):
    count = math.ceil(len(images) / batch)
    _loop(training, images, labels, folder, math.ceil(steps / count) * count, batch, every)


@wrong("13.2", names="other-steps")
def trains_never(training, images, labels, folder, steps, batch, every):
    pass


@wrong("13.2", names="global-batch-size")
def a_batch_for_each_rank(training, images, labels, folder, steps, batch, every):
    _loop(training, images, labels, folder, steps, batch * dist.get_world_size(), every)


def _if_it_can_be_read(path):
    content = path.read_bytes()
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # noqa: BLE001 - whatever a damaged file leads to
        return None
    return content


trusts_torch_load = _wrong_loop(
    "byte-unnoticed", read=_if_it_can_be_read, sealed=lambda content: content
)("trusts_torch_load")


@wrong("13.2", names="folder-missing")
def needs_its_folder(training, images, labels, folder, steps, batch, every):
    os.listdir(folder)
