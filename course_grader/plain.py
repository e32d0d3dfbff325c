"""Values as plain data: how results of an answer reach the process that judges them.

`dump` runs beside the answer, so nothing that it writes is believed. `Reader` runs where the
verdict is made: it makes numbers, texts, containers, tensors and the records of the course of what
it reads, each of exactly its own type, and calls nothing that came from an answer. A list or tensor
that lies about being equal arrives as the list or tensor that it is; anything else arrives as a
handle, which can only be asked through the connection.

A message is a line of JSON and the bytes of its tensors. Containers and the memory of tensors have
numbers, so that what was shared is shared again.
"""

import collections
import dataclasses
import enum
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch

import course_utils
from course_utils.comm import private

_LARGE = 1 << 24  # bytes: of a part of a larger memory only the part travels
_LARGEST = 1 << 28  # bytes of a tensor: a few of them may say that they are many
_LONGEST_TREE = 1 << 24  # bytes of JSON
_SCALARS = (type(None), bool, int, float, str)
_WORDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Writer:
    """Writes values; `keep` takes an object that is no plain data and returns its number."""

    def __init__(self, keep: Callable[[object], int]):
        self._keep = keep
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id is an object's only as long as that lives
        self._storages: dict[int, int] = {}
        self._blobs: list[bytes] = []

    def dump(self, *values: Any) -> bytes:
        """The message."""
        trees = [self._tree(value) for value in values]
        head = json.dumps([trees, [len(blob) for blob in self._blobs]]).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *self._blobs])

    def _tree(self, value):
        kind = type(value)
        if kind in _SCALARS:
            return value
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        tagged = isinstance(value, numpy.generic) or _is_constant(value)
        for base in (bool, int, float, str):
            if isinstance(value, base) and not tagged:
                return base(value) if base is not str else str.__str__(value)
        return self._leaf(value) or self._container(value)

    def _leaf(self, value):
        if _is_constant(value):
            return ["enum", *_name(type(value)), value.name]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", self._blob(bytes(value))]
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return ["number", value.dtype.str, self._blob(value.tobytes())]
        if type(value) is range:
            return ["range", value.start, value.stop, value.step]
        if type(value) in _WORDS:
            return ["word", str(value)]
        if isinstance(value, pathlib.PurePath):
            return ["path", str(value)]
        return None

    def _container(self, value):
        for base, tag in _TAGS.items():
            if isinstance(value, base):
                named = base is tuple and _of_the_course(type(value))
                number = self._number(value)
                own = [self._tree(v) for v in base.__iter__(value)] if base is not dict else None
                if base is dict:
                    own = [[self._tree(k), self._tree(v)] for k, v in dict.items(value)]
                return ["record", number, *_name(type(value)), own] if named else [tag, number, own]
        if dataclasses.is_dataclass(value) and _of_the_course(type(value)):
            number = self._number(value)
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            own = [[name, self._tree(v)] for name, v in fields.items()]
            return ["record", number, *_name(type(value)), own]
        return ["object", self._number(value), self._keep(value), type(value).__name__]

    def _number(self, value):
        self._alive.append(value)
        return self._numbers.setdefault(id(value), len(self._numbers))

    def _blob(self, data):
        self._blobs.append(data)
        return len(self._blobs) - 1

    def _tensor(self, value):
        number = self._number(value)
        is_parameter = isinstance(value, torch.nn.Parameter)
        with private.plain_tensors():
            if hasattr(value, "__tensor_flatten__") or value.layout is not torch.strided:
                return ["object", number, self._keep(value), type(value).__name__]
            flags = [value.requires_grad, is_parameter]
            plain = (
                torch.Tensor.detach(value).as_subclass(torch.Tensor).resolve_conj().resolve_neg()
            )
            layout = [list(plain.shape), list(plain.stride())]
            kind = str(plain.dtype).removeprefix("torch.")
            if plain.device.type == "meta":
                return ["meta", number, kind, *layout, *flags]
            plain = plain.cpu()
            if plain.untyped_storage().nbytes() > max(_LARGE, 2 * plain.nbytes):
                plain = plain.clone(memory_format=torch.contiguous_format)
            layout = [plain.storage_offset(), list(plain.shape), list(plain.stride())]
            return ["tensor", number, self._storage(plain), kind, *layout, *flags]

    def _storage(self, plain):
        storage = plain.untyped_storage()
        key = storage.data_ptr() if storage.nbytes() else -1 - len(self._storages)
        if key not in self._storages:
            self._alive.append(storage)
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[key] = self._blob(raw.numpy().tobytes())
        return self._storages[key]


_TAGS = {
    list: "list",
    tuple: "tuple",
    dict: "dict",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}


def _is_constant(value):
    return isinstance(value, enum.Enum) and _of_the_course(type(value))


def _of_the_course(kind: type) -> bool:
    return course_utils.is_of_the_course(kind.__module__)


def _name(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


class Reader:
    """Reads one message; `trees` are its values, unread. Raises ValueError where it is none.

    handle: makes the handle of an object from its number and its class's name.
    """

    def __init__(self, message: bytes, handle: Callable[[int, str], Any]):
        self._handle = handle
        self._made: dict[int, Any] = {}
        try:
            length = int.from_bytes(message[:8], "little")
            if length > _LONGEST_TREE:
                raise ValueError("no message: too long")
            self.trees, sizes = json.loads(message[8 : 8 + length])
            starts = [8 + length]
            for size in sizes:
                starts.append(starts[-1] + size)
            if min([0, *sizes]) < 0 or starts[-1] != len(message):
                raise ValueError("the sizes do not fit")
            self._blobs = [message[a:b] for a, b in itertools.pairwise(starts)]
        except (RecursionError, TypeError) as error:
            raise ValueError(f"no message: {error}") from None
        self._storages: dict[int, torch.UntypedStorage] = {}

    def value(self, tree: Any) -> Any:
        """The value of a part of the message."""
        try:
            return self._value(tree)
        except Exception as error:  # noqa: BLE001 - OverflowError of an infinite number, SyntaxError of a dtype
            raise ValueError(f"no message: {type(error).__name__}") from None

    def replace(self, mine: Any, theirs: Any) -> Any:
        """Makes `mine`, an argument of a call, what `theirs` says that the call has made of it;
        what the message says again of `theirs` is then `mine`. Returns what takes its place."""
        if theirs.__class__ is not list or not theirs or theirs[0] == "again":
            return self.value(theirs)
        tag, number = theirs[0], theirs[1]
        if tag == "tensor" and type(mine) in (torch.Tensor, torch.nn.Parameter):
            return self._replace_tensor(mine, theirs)
        if tag == "list" and type(mine) is list:
            self._made[number] = mine
            mine[:] = [
                self.replace(mine[i] if i < len(mine) else None, own)
                for i, own in enumerate(theirs[2])
            ]
            return mine
        if tag == "dict" and type(mine) is dict:
            self._made[number] = mine
            entries = [(self.value(k), own) for k, own in theirs[2]]
            entries = {k: self.replace(mine.get(k), own) for k, own in entries}
            mine.clear()
            mine.update(entries)
            return mine
        if tag == "tuple" and type(mine) is tuple and len(mine) == len(theirs[2]):
            for own, their in zip(mine, theirs[2], strict=True):
                self.replace(own, their)
            self._made[number] = mine
            return mine
        if tag == "record" and dataclasses.is_dataclass(mine):
            self._made[number] = mine
            for name, own in theirs[4]:
                changed = self.replace(getattr(mine, name), own)
                if not mine.__dataclass_params__.frozen:  # no honest answer has changed that
                    object.__setattr__(mine, name, changed)
            return mine
        if tag == "object":
            self._made[number] = mine  # what went there as it is
            return mine
        return self.value(theirs)

    def _replace_tensor(self, mine, theirs):
        new = self.value(theirs)
        alike = (new.shape, new.dtype, new.stride()) == (mine.shape, mine.dtype, mine.stride())
        whole = new.untyped_storage().nbytes() == mine.untyped_storage().nbytes()
        if not alike or mine.device.type != "cpu":
            return new
        with torch.no_grad():
            if not torch.equal(new, mine):  # PyTorch refuses to write into one that is expanded
                mine.data.copy_(new)
        self._made[theirs[1]] = mine
        if whole:
            self._storages[theirs[2]] = mine.untyped_storage()
        return mine

    def _value(self, tree):
        if tree.__class__ is not list:
            if type(tree) in _SCALARS:
                return tree
            raise ValueError("no message: a kind of value that nobody writes")
        tag, *rest = tree
        return getattr(self, f"_read_{tag}")(*rest)

    def _read_again(self, number):
        return self._made[number]

    def _read_list(self, number, entries):
        made = self._made[number] = []
        made.extend(self._value(entry) for entry in entries)
        return made

    def _read_deque(self, number, entries):
        return self._keep(number, collections.deque(self._value(entry) for entry in entries))

    def _read_tuple(self, number, entries):
        return self._keep(number, tuple(self._value(entry) for entry in entries))

    def _read_set(self, number, entries):
        return self._keep(number, {self._value(entry) for entry in entries})

    def _read_frozenset(self, number, entries):
        return self._keep(number, frozenset(self._value(entry) for entry in entries))

    def _read_dict(self, number, entries):
        made = self._made[number] = {}
        made.update((self._value(key), self._value(value)) for key, value in entries)
        return made

    def _read_record(self, number, module, name, entries):
        kind = _class(module, name)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            values = [self._value(entry) for entry in entries]
            return self._keep(number, tuple.__new__(kind, values))
        if not dataclasses.is_dataclass(kind):
            raise ValueError(f"no message: {name} is no record")
        made = self._made[number] = object.__new__(kind)
        if [key for key, _ in entries] != [field.name for field in dataclasses.fields(kind)]:
            raise ValueError(f"no message: {name} has other fields")
        for key, value in entries:
            object.__setattr__(made, key, self._value(value))
        return made

    def _read_enum(self, module, name, member):
        kind = _class(module, name)
        if issubclass(kind, enum.Enum):
            return kind[member]
        raise ValueError(f"no message: {name} has no members")

    def _read_complex(self, real, imag):
        return complex(real, imag)

    def _read_bytes(self, blob):
        return self._blobs[blob]

    def _read_number(self, kind, blob):
        kind = numpy.dtype(kind)
        if kind.kind not in "biufc":
            raise ValueError("no message: no number")
        return numpy.frombuffer(self._blobs[blob], kind, 1)[0]

    def _read_range(self, start, stop, step):
        return range(start, stop, step)

    def _read_word(self, text):
        module, _, name = str(text).rpartition(".")
        word = getattr(torch, name, None) if module == "torch" else torch.device(name)
        if type(word) not in _WORDS:
            raise ValueError("no message: no word of PyTorch's")
        return word

    def _read_path(self, text):
        return pathlib.Path(str(text))

    def _read_object(self, number, handle, name):
        return self._keep(number, self._handle(int(handle), str(name)))

    def _read_meta(self, number, kind, shape, stride, learns, is_parameter):
        made = torch.empty_strided(shape, stride, dtype=_dtype(kind), device="meta")
        return self._keep(number, _flagged(made, learns, is_parameter))

    def _read_tensor(self, number, blob, kind, offset, shape, stride, learns, is_parameter):
        if blob not in self._storages:
            data = torch.frombuffer(bytearray(self._blobs[blob] or b"\0"), dtype=torch.uint8)
            self._storages[blob] = data[: len(self._blobs[blob])].untyped_storage()
        storage, dtype = self._storages[blob], _dtype(kind)
        reach = 1 + offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if min([0, offset, *shape, *stride]) < 0:
            raise ValueError("no message: a tensor of negative sizes")
        if math.prod(shape) * dtype.itemsize > _LARGEST:
            raise ValueError("no message: a tensor that is too large")
        if math.prod(shape) and reach * dtype.itemsize > storage.nbytes():
            raise ValueError("no message: a tensor beyond its memory")
        made = torch.empty(0, dtype=dtype)
        if math.prod(shape):
            made.set_(storage, offset, shape, stride)
        else:
            made = torch.empty_strided(shape, stride, dtype=dtype)
        return self._keep(number, _flagged(made, learns, is_parameter))

    def _keep(self, number, made):
        self._made[number] = made
        return made


def _flagged(made, learns, is_parameter):
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad=bool(learns))
    return made.requires_grad_() if learns else made


def _dtype(name):
    dtype = getattr(torch, name, None)
    if type(dtype) is not torch.dtype:
        raise ValueError("no message: no dtype")
    return dtype


def _class(module, name):
    if not course_utils.is_of_the_course(module):
        raise ValueError("no message: a class of somebody else")
    found = getattr(sys.modules[module], name, None)
    if isinstance(found, type):
        return found
    raise ValueError("no message: no class")
