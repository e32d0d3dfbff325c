"""The same cells over several hosts.

    from course_hosts.cluster import cluster

    with cluster(client):          # an ipyparallel Client of engines that are there already
        launch(train, 4)           # two ranks on each of two hosts

    with cluster(2):               # two engines on this machine, started and ended here
        launch(train, 4)

or, for a whole notebook that knows nothing of it, the same two by the environment's COURSE_CLUSTER, which is
the client's connection file or a number (`asked_for`).

The engines carry calls to one agent a host (`agent`); ranks are forked there, and what goes wrong
is explained as on one machine. Needs ipyparallel: pip install "course-utils[cluster]".
"""

import atexit
import contextlib
import functools
import itertools
import logging
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

try:
    import ipyparallel
    from ipyparallel.error import EngineError, RemoteError
    from ipyparallel.error import TimeoutError as NoAnswer
except ImportError as missing:
    raise ImportError(
        "course_hosts.cluster, and COURSE_CLUSTER, need ipyparallel, which is not installed here: "
        'pip install "ipyparallel>=9", and the same on each host.'
    ) from missing

from course_hosts import agent, hosts
from course_utils.launch.keepers.janitor import janitor
from course_utils.launch.ranks import elsewhere
from course_utils.launch.story import frames

_START = 120.0  # seconds for an engine to import the course
_ANSWER = 30.0  # seconds for a controller that is there, and for its first engine
_AGAIN = 10.0  # seconds after which a client that waits for engines is replaced
_SLICE = 0.5  # seconds
_MOST = 16  # engines that COURSE_CLUSTER starts here: each holds PyTorch
ENCRYPTED = "--IPController.enable_curve=True"
_NOBODY = "the controller answers, and no engine is there. Start `ipengine` on each host, and launch again."


class Engines:
    """ipyparallel's engines, as what carries calls to agents (`hosts.Engine`)."""

    lost = (EngineError, NoAnswer, OSError)

    def __init__(self, client: ipyparallel.Client):
        self._client = client

    def ask(self, host: int, method: str, *args: Any) -> Any:
        if host not in self._client.ids:
            raise EngineError(f"engine {host} has ended")
        return self._client.direct_view(host).apply_async(agent.serve, method, *args)

    def answer(self, question: Any, patience: float) -> Any:
        # In slices: time in which this very process was stopped is no silence of the host's.
        slices = itertools.repeat(_SLICE, math.ceil(patience / _SLICE))
        if not any(map(question.wait, slices)):
            raise NoAnswer(f"not within {patience:g} seconds")
        try:
            return question.get()
        except RemoteError as error:
            if error.ename == EngineError.__name__:  # the controller's word for an engine's end
                raise EngineError(error.evalue) from None
            raise


@contextmanager
def cluster(client: "ipyparallel.Client | int") -> Iterator[list[str]]:
    """In this block, launch spreads its ranks over the hosts of `client`'s engines: as many on each, as
    far as that can be, and those of a host in a row. Yields the hosts' names.

    One engine of each host is used; where all engines are on one host, each plays a host. A number
    starts so many engines on this machine, which end with the block, behind ipyparallel's CurveZMQ:
    who has not their key reaches nothing.

    Raises RuntimeError for a client without CurveZMQ, where no engine is there or one does not answer,
    and when a host has another version of Python, PyTorch or the course; HostLost, at the next launch,
    when one does not answer any more.
    """
    if isinstance(client, int):
        with (
            on_this_machine(client) as own,
            cluster(own) as names,
        ):
            yield names
        return
    found = _hosts(_encrypted(client))
    with hosts.choose(found):
        yield [host.name for host in found]


def _encrypted(client):
    if not client.curve_serverkey:
        raise RuntimeError(
            "the controller of these engines listens without CurveZMQ: whoever reaches its ports could "
            f"run programs on all hosts. Start it with `ipcontroller {ENCRYPTED}`."
        )
    return client


@contextmanager
def on_this_machine(engines: int) -> Iterator[ipyparallel.Client]:
    """So many engines here, behind a controller that listens here alone. They end with the block, and
    with this process, however it ends."""
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="course-cluster-"))
        janitor.keep_with(opened, "folder", folder)  # it has the keys
        started = ipyparallel.Cluster(
            n=engines,
            profile_dir=folder,
            controller_ip="127.0.0.1",
            controller_args=[ENCRYPTED],
            shutdown_atexit=False,  # it would say so
            log_level=logging.ERROR,
        )
        opened.callback(started.stop_cluster_sync)
        started.start_cluster_sync()
        launchers = [e for group in started.engines.values() for e in group.launchers.values()]
        for each in (started.controller, *launchers):
            janitor.keep_with(opened, "rank", each.pid)
        yield opened.enter_context(with_engines(started.connect_client_sync, engines, _START))


@contextmanager
def with_engines(
    connect: Callable[[], ipyparallel.Client], engines: int, patience: float
) -> Iterator[ipyparallel.Client]:
    """A client, in this block, that knows of so many engines. Raises TimeoutError where they are not
    there within `patience` seconds.

    An engine that registers after a client has connected and before it hears the controller's
    announcements stays unknown to it, which happens on a busy machine: another client is told of it.
    """
    end = time.monotonic() + patience
    while True:
        with contextlib.closing(connect()) as client:
            left = end - time.monotonic()
            try:
                client.wait_for_engines(engines, timeout=min(_AGAIN, left), interactive=False)
            except TimeoutError:
                if left <= _AGAIN:
                    raise
                continue
            yield client
            return


def start_of(value: str) -> elsewhere.Start:
    """What starts the ranks of a launch where COURSE_CLUSTER=value: the hosts that it asks for."""
    return functools.partial(hosts.start, asked_for(value))


_asked_for: list[hosts.FarHost] = []
_asking = threading.Lock()


def asked_for(value: str) -> list[hosts.FarHost]:
    """The hosts that the environment's COURSE_CLUSTER asks for: a number of engines, which are started
    on this machine, or the file with which a client connects. Found once, at the first launch; they end
    with this process.

    Raises ValueError for what is neither, RuntimeError where no engine answers, and what `cluster` does.
    """
    with _asking:
        if not _asked_for:
            with contextlib.ExitStack() as opened:
                _asked_for.extend(_hosts(opened.enter_context(client_for(value))))
                atexit.register(opened.pop_all().close)  # before the janitor's own end
        return _asked_for


@contextmanager
def client_for(value: str) -> Iterator[ipyparallel.Client]:
    """The client that COURSE_CLUSTER=value asks for, in this block. Raises as `asked_for` does."""
    with _client(value) as client:
        yield _encrypted(client)


def _client(value):
    if value.isdecimal() and 0 < int(value) <= _MOST:
        return on_this_machine(int(value))
    if os.path.isfile(value):
        return _connected(value)
    raise ValueError(
        f"COURSE_CLUSTER={value}: it is how many engines to start on this machine, from 1 to {_MOST}, "
        "or the connection file of a cluster that runs, as .../security/ipcontroller-client.json; "
        "there is no such file. Unset it to launch on this machine."
    )


@contextmanager
def _connected(file):
    def connect():
        try:
            return ipyparallel.Client(file, timeout=_ANSWER)
        except NoAnswer:
            raise RuntimeError(
                f"COURSE_CLUSTER={file}: the controller that this file names does not answer within "
                f"{_ANSWER:g} seconds. Start `ipcontroller` and its engines, and launch again."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ValueError(
                f"COURSE_CLUSTER={file}: this is no connection file of a client ({error}). "
                "ipcontroller writes one, .../security/ipcontroller-client.json."
            ) from None

    with contextlib.ExitStack() as opened:
        try:
            client = opened.enter_context(with_engines(connect, 1, _ANSWER))
        except TimeoutError:
            raise RuntimeError(f"COURSE_CLUSTER={file}: {_NOBODY}") from None
        yield client


def _hosts(client):
    found = look(client)
    for about in found.values():
        _refuse_other_versions(about)
        frames.know_libraries(about["libraries"])
    return list(found)


def look(client: ipyparallel.Client) -> dict[hosts.FarHost, dict]:
    """The hosts of a client's engines, in the order of their engines, with what their agents tell.

    Raises RuntimeError where no engine is there, and where one does not answer.
    """
    engines = Engines(client)
    about = dict(_descriptions(engines, client.ids))
    if not about:
        raise RuntimeError(_NOBODY)
    places = {engine: (each["name"], each["network"]) for engine, each in about.items()}
    alone = len(set(places.values())) == 1
    chosen = list(about) if alone else [_first(places, place) for place in set(places.values())]
    toward = _address(client)
    names = Counter(about[engine]["name"] for engine in chosen)
    return {
        hosts.FarHost(engines, n, _name(n, about[n]["name"], names), toward): about[n]
        for n in sorted(chosen)
    }


def _descriptions(engines, numbers):
    """Of each engine, what its agent tells. One that has ended stays in the controller's list for some
    seconds: it is left out, as it would be a moment later."""
    questions = {}
    for engine in numbers:
        with contextlib.suppress(EngineError):
            questions[engine] = engines.ask(engine, "about")
    for engine, question in questions.items():
        with contextlib.suppress(EngineError):
            try:
                yield engine, engines.answer(question, _START)
            except NoAnswer:
                raise RuntimeError(
                    f"engine {engine} is in the controller's list, and does not answer within "
                    f"{_START:g} seconds. Look after its host, or end it, and launch again."
                ) from None


def _first(places, place):
    return min(engine for engine, there in places.items() if there == place)


def _name(engine, name, names):
    return name if names[name] == 1 else f"{name} (engine {engine})"


def _address(client):
    """Where the engines' controller is, as all engines know it."""
    return urlsplit(client._config["registration"]).hostname


def _refuse_other_versions(about):
    here = agent.versions()
    for what, version in about["versions"].items():
        if version != here[what]:
            raise RuntimeError(
                f"host {about['name']} has {what} {version}, and this kernel has {here[what]}: ranks of "
                "one launch need the same. Install the same there, and start its engine again."
            )
