"""A process in which nothing of a submission has run: it launches ranks, and lends a process to each requirement that
has to share one with the answer.

    judge  ->  home  ->  a fork of it: what the check is made of, and then, as bytes, the answer

The worker forks it before it executes anything. In the loan an answer may reach for what judges it: by frames, by the
garbage collector, by the memory, by modules. So what judges has no names there, uses functions of Python's own that
nobody can replace, and a hook (sys.addaudithook) ends whoever looks for it in other ways. Only what has been to the
end of a requirement can say that it is met.
"""

import builtins

__builtins__ = dict(vars(builtins))  # nobody replaces these in what follows

import contextlib
import functools
import io
import linecache
import os
import pickle
import secrets
import signal
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from os import stat, write
from stat import S_IWUSR
from threading import get_ident
from types import CodeType, FunctionType, MethodType
from typing import Any, NoReturn

import course_utils
from course_exercises.authoring import compare, framework
from course_exercises.authoring.compare import Wrong
from course_exercises.authoring.guard import Deadline, undisturbed
from course_grader import integrity, isolation
from course_grader.plain import Reader, Writer
from course_grader.reports import report_of
from course_utils.comm import private
from course_utils.hardware import without_gpus
from course_utils.launch import launch
from course_utils.launch.keepers.janitor import janitor
from course_utils.launch.ranks import packing
from course_utils.launch.story import frames

_SECONDS_OF_A_RUN = 60.0  # on a busy machine ranks are slow; a hang is found by what ranks do
_LONGEST_MESSAGE = 1 << 28  # bytes
_TOKEN = 16  # bytes
MET, OTHER = b"m", b"o"  # what a reply begins with
HIDDEN = ("course_grader", "course_exercises")
_COPIED = ("course_exercises.authoring.compare", "course_exercises.authoring.framework")
_LIBRARIES = ("<frozen", *frames.LIBRARIES)
# They hand on what they find. What calls them answers for it.
_GO_BETWEENS = ("/inspect.py", "/traceback.py", "/logging/__init__.py", "/ctypes/__init__.py")
# They look at a frame for themselves, and neither hand it on nor look up a name in it that they are given.
_LOOKERS = (
    *(
        "/collections/__init__.py",
        "/enum.py",
        "/typing.py",
        "/typing_extensions.py",
        "/warnings.py",
    ),
    *(f"/torch/{name}/__init__.py" for name in ("cuda", "xpu", "mtia", "_refs")),
    *("/torch/library.py", "/torch/_library/utils.py"),
    *("/torch/_dynamo/convert_frame.py", "/torch/_dynamo/guards.py"),
)
_TELLERS = _GO_BETWEENS[1:3]
_SHELL = "/IPython/core/interactiveshell.py"  # it reads the names of the frame that it is told
_COURSE = tuple(os.path.join(path, "") for path in map(str, course_utils.PACKAGES))
_FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
_SEARCHES = frozenset(
    {"sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers"}
    | {"gc.get_referents", "sys.settrace", "sys.setprofile"}
)
_LOOKED_AT = _SEARCHES | {"import", "open", "compile", "code.__new__", "sys.addaudithook"}
_LOOKED_AT |= {"object.__setattr__", "object.__getattr__"}
_PARTS_OF_A_FUNCTION = frozenset({"__code__", "__defaults__", "__kwdefaults__"})
_MODES = (
    (private.function_modes.value, "__torch_function__"),
    (private.dispatch_modes.value, "__torch_dispatch__"),
)
_getframe = sys._getframe  # this one, whatever an answer puts in its place
_state: dict[str, Any] = {}  # of a loan: what integrity was before, and how an attempt is told


class Packed:
    """An answer that becomes one where it arrives: in a rank."""

    def __init__(self, parts: list[bytes]):
        self.parts = [bytearray(part) for part in parts]  # tensors may be written to

    def __reduce__(self) -> tuple:
        return packing.unpack, (self.parts,)


def main(judge: Connection) -> NoReturn:
    """The whole life of this process."""
    try:
        isolation.die_with_parent()
        isolation.hide_memory()
        janitor.keep = janitor.forget = lambda *_: None  # the keeper ends all
        compare.looked_at, framework.launch = _looked_at, _launch
        _state["before"] = integrity.snapshot()
        with contextlib.suppress(EOFError, OSError):
            while True:
                judge.send_bytes(_lend(judge, judge.recv_bytes()))
    finally:
        os._exit(0)


def _lend(judge, request):
    """What comes of a request, in a process of its own, and before that whether a requirement was met there. Each
    word of that process counts as a token says which no code of a submission is told: a failure is told with code
    that the answer can have replaced, and then does not know the other token."""
    tokens = {secrets.token_bytes(_TOKEN): kind for kind in (MET, OTHER)}
    ours, theirs = Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        judge.close()
        ours.close()
        _borrow(request, theirs.fileno(), *tokens)
    theirs.close()
    said = None
    with ours, contextlib.suppress(EOFError, OSError):
        said = ours.recv_bytes(_LONGEST_MESSAGE)
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    if said is None:
        return OTHER + _message({"left": status})
    return tokens.get(said[:_TOKEN], b"") + said[_TOKEN:]


def _borrow(request, file, met, other):
    """The whole life of the process that is lent."""
    try:
        kind, seconds, packed, around, inner = pickle.loads(request)
        request = _Unpickler(io.BytesIO(inner), packed).load()
        _state["attempted"] = lambda what: _end(file, other, {"changed": what})
        about: dict[str, Any] = {}
        value, token = None, other
        with undisturbed() as printed, without_gpus():
            try:
                with framework.limited(max(seconds, 0.1)) as deadline:
                    value = _done(kind, *request, around)
                    token = met if value is True else other
            except BaseException as error:  # noqa: BLE001 - an answer may raise anything
                about["raised"], token = report_of(error, seconds), other
            about |= {"spent": float(seconds - deadline.left), "said": printed.lines()}
            _look(_state)
            _end(file, token, about, None, value)
    finally:
        os._exit(1)


def _end(file, token, about, *values):
    said = token + _message(about, *values)
    said = len(said).to_bytes(4, "big") + said
    while said:
        said = said[write(file, said) :]
    os._exit(0)


def _message(about, *values):
    return Writer(lambda value: -1).dump(about, *values)  # nobody can ask for it


def _done(kind, *request):
    if kind == "run":
        fn, nprocs, timeout, arguments, around = request
        _settle_in(*around)
        _watch()
        return list(_launch(fn, nprocs, *arguments, timeout=max(timeout, _SECONDS_OF_A_RUN)))
    requirement, draw, answer, around = request
    apart, _state["modes"] = _apart(requirement, {}), _modes_of(requirement)
    _hide()
    _watch()
    _settle_in(*around)
    try:
        apart(packing.unpack(answer.parts), draw)
    except Wrong as error:
        return error.misconception, error.expected, error.got
    return True


def _apart(function, made):
    """A copy of a function and of those that it finds by their names, which has these names for itself: the layers that
    an answer is handed, for one, have functions, and these know the names that they came with."""
    names = function.__globals__
    if id(names) not in made:
        own = made[id(names)] = names | {"__builtins__": __builtins__}
        for key, value in names.items():
            judges = type(value) is FunctionType and value.__module__ in _COPIED
            if judges or (type(value) is FunctionType and value.__globals__ is names):
                own[key] = _apart(value, made)
    copied = FunctionType(
        *(function.__code__, made[id(names)], function.__name__),
        *(function.__defaults__, function.__closure__),
    )
    copied.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    return copied


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, packed: dict[int, list[bytes]]):
        super().__init__(file)
        self._packed = packed

    def persistent_load(self, pid: int) -> Packed:
        return Packed(self._packed[pid])


def _settle_in(environment, folder, path, cells):
    """What the notebook's cells have left around the answer."""
    linecache.cache.update(cells)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path


def _hide():
    """Takes their names from the modules that judge."""
    hidden = {name: sys.modules[name] for name in [*sys.modules] if name.split(".")[0] in HIDDEN}
    for name in hidden:
        del sys.modules[name]
    _state["hidden"] = hidden


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """What travels to ranks is packed by its modules' names."""
    hidden = _state.pop("hidden", {})
    sys.modules.update(hidden)
    try:
        yield
    finally:
        if hidden:
            _hide()


def _launch(*args: Any, **kwargs: Any) -> list:
    deadline = framework.deadline()
    with _shown(), deadline.paused() if deadline else contextlib.nullcontext():
        return launch(*args, **kwargs)


def _look(state):
    if changed := integrity.changed(state["before"]) or _mode_left_on(state.get("modes", ())):
        state["attempted"](changed)


def _mode_left_on(known):
    """What sees each operation of the comparisons, and may make another result of it."""
    for modes, name in _MODES:
        for kind in map(type, modes()):
            own = (vars(base) for base in type.mro(kind))
            does = next((each[name] for each in own if name in each), None)
            if type(does) is not FunctionType:
                return name
            codes = _codes_in(does)
            if not all(code in known or _of_a_library(code.co_filename) for code in codes):
                return name
    return ""


def _modes_of(requirement):
    """The code of the modes that a check itself turns on: it has come by value, without the name of its file."""
    kinds = [value for value in requirement.__globals__.values() if isinstance(value, type)]
    made = [vars(kind).get(name) for kind in kinds for _, name in _MODES]
    return [code for does in made if type(does) is FunctionType for code in _codes_in(does)]


def _codes_in(function):
    """Its code and that of what it wraps, as PyTorch does with a mode's method."""
    parts = [function, *(cell.cell_contents for cell in function.__closure__ or ())]
    return [part.__code__ for part in parts if type(part) is FunctionType]


def _looked_at(got: Any) -> Any:
    """What an answer gave, before it is compared: as data, in which nothing of the answer runs."""
    if "before" in _state:  # else it is a rank, which compares for itself
        _look(_state)
    kept: list[object] = []

    def keep(value):
        kept.append(value)
        return len(kept) - 1

    reader = Reader(Writer(keep).dump(got), lambda number, _: kept[number])
    return reader.value(reader.trees[0])


def _watch():
    """From now on, code of an answer that reaches for what judges it ends the process. No code of an answer is
    called meanwhile: a text may be of a class of its own."""
    lowest = sys.modules["_signal"]  # signal.signal asks it, each time
    lowest.signal = _without_frames(lowest.signal, Deadline.ring)
    attempted, functions = _state["attempted"], integrity.functions_of(_state["before"])
    busy, of_processes = 0, _device_of("/proc")

    def hook(event, args):
        nonlocal busy
        me = get_ident()
        if busy != me and (event in _LOOKED_AT or event[:7] == "ctypes."):
            busy = me
            try:
                what = _reached(event, args, _getframe(1), functions, of_processes)
            finally:
                busy = 0
            if what:
                attempted(what)

    sys.addaudithook(hook)


def _without_frames(put, ring):
    """signal.signal, whose handlers get no frame, by which they would find those of the check; its own alarm does."""

    def signal_(number, handler):
        own = type(handler) is MethodType and handler.__func__ is ring
        if callable(handler) and not own:
            return put(number, lambda number, _, handler=handler: handler(number, None))
        return put(number, handler)

    return functools._lru_cache_wrapper(signal_, 0, False, None)  # nobody gets what it wraps


def _reached(event, args, frame, functions, of_processes):
    """What the code of a frame reaches for, or ""."""
    if event == "import":
        hidden = str.partition(args[0], ".")[0] in HIDDEN and "hidden" in _state
        return "the modules of the check" if hidden else ""
    if event == "open":
        return event if _opens_a_process(args[0], frame, of_processes) else ""
    if event == "compile":
        pretends = isinstance(args[1], str) and _of_a_library(args[1])
        return event if pretends and not _is_a_librarys(frame) else ""
    if event == "code.__new__":
        if type(args[1]) is not str or type(args[2]) is not str:
            return event
        known = not _of_a_library(args[1]) or (args[2], args[0]) in _codes_of(args[1])
        return "" if known else event  # a wrapper of contextlib's travels by value
    if event == "object.__setattr__":
        own = args[1] in _PARTS_OF_A_FUNCTION and id(args[0]) in functions
        return f"{args[0].__name__}.{args[1]}" if own else ""
    if event == "sys.addaudithook":
        return event
    name = str(args[1]) if event == "object.__getattr__" else event.rpartition(".")[2]
    if event == "object.__getattr__" and name not in _FRAMES:
        return ""
    if event not in _SEARCHES and name not in _FRAMES:
        return "" if _is_a_librarys(frame) else name
    found = args[0].f_code.co_filename if event == "sys._getframe" else ""
    return "" if _looks_for_itself(frame, name, found) else name


def _is_a_librarys(frame):
    """Whether it is code of a library that does this, and for itself."""
    file, caller = frame.f_code.co_filename, frame.f_back
    between = str.endswith(file, _GO_BETWEENS)
    return _of_a_library(file) and (
        not between or caller is None or _of_a_library(caller.f_code.co_filename)
    )


def _looks_for_itself(frame, name, found):
    """Whether no code of an answer gets what is looked for; `found` is the file of the frame, if known. A library may
    be called with a function that does it, so it has to have the name."""
    inner = frame
    while str.endswith(frame.f_code.co_filename, _GO_BETWEENS):
        name, last, frame = frame.f_code.co_name, frame, frame.f_back
        if frame is None:
            return True
    file = frame.f_code.co_filename
    if not _of_a_library(file):
        # an answer calls a go-between, which may tell in words what it has found
        in_words = inner is not frame and str.endswith(last.f_code.co_filename, _TELLERS)
        return in_words and last is not inner and name != "extract"  # that one has the locals, too
    if name not in frame.f_code.co_names:
        return False
    if str.endswith(file, _LOOKERS) or (str.endswith(file, _SHELL) and not _of_a_library(found)):
        return True
    while frame is not None and _of_a_library(frame.f_code.co_filename):
        if str.startswith(frame.f_code.co_filename, _COURSE):
            return True
        frame = frame.f_back
    return frame is None


def _of_a_library(file):
    return str.startswith(file, _LIBRARIES)


def _opens_a_process(place, frame, of_processes):
    """Whether it is a process's memory, or another file of /proc and no library that opens it."""
    if type(place) not in (str, bytes):
        return not isinstance(place, int | None)
    try:
        found = stat(place)
    except (OSError, ValueError):
        return False
    inside = found.st_dev == of_processes
    return inside and bool(found.st_mode & S_IWUSR or not _is_a_librarys(frame))


def _device_of(place):
    return stat(place).st_dev if os.path.isdir(place) else None


@functools.cache
def _codes_of(file):
    """The names and the code of all functions of a library's file."""
    with io.FileIO(file) as text:
        found = [compile(text.read(), file, "exec")]
    for code in found:
        found += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset((code.co_name, code.co_code) for code in found)
