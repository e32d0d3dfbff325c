"""The same cells over several hosts.

    from course_utils.cluster import cluster

    with cluster(client):          # an ipyparallel Client of engines that are there already
        launch(train, 4)           # two ranks on each of two hosts

    with cluster(2):               # two engines on this machine, started and ended here
        launch(train, 4)

The engines carry calls to one agent a host (`launch.agent`); ranks are forked there, and what goes wrong
is explained as on one machine. Needs ipyparallel: pip install "course-utils[cluster]".
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

try:
    import ipyparallel
    from ipyparallel.error import EngineError, RemoteError
    from ipyparallel.error import TimeoutError as NoAnswer
except ImportError as missing:
    raise ImportError(
        "course_utils.cluster needs ipyparallel, which is not installed here: "
        'pip install "ipyparallel>=9", and the same on each host.'
    ) from missing

from course_utils.launch import agent, frames, hosts
from course_utils.launch.janitor import janitor

_START = 120.0  # seconds for an engine to import the course
_SLICE = 0.5  # seconds
_ENCRYPTED = "--IPController.enable_curve=True"


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

    Raises RuntimeError for a client without CurveZMQ, and when a host has another version of Python,
    PyTorch or the course; HostLost, at the next launch, when one does not answer any more.
    """
    if isinstance(client, int):
        with (
            on_this_machine(client) as own,
            cluster(own) as names,
        ):
            yield names
        return
    if not client.curve_serverkey:
        raise RuntimeError(
            "the controller of these engines listens without CurveZMQ: whoever reaches its ports could "
            f"run programs on all hosts. Start it with `ipcontroller {_ENCRYPTED}`."
        )
    found = _hosts(client)
    with hosts.choose(found):
        yield [host.name for host in found]


@contextmanager
def on_this_machine(engines: int) -> Iterator[ipyparallel.Client]:
    """So many engines here, behind a controller that listens here alone. They end with the block, and
    with this process, however it ends."""
    started = ipyparallel.Cluster(
        n=engines, controller_ip="127.0.0.1", controller_args=[_ENCRYPTED], log_level=logging.ERROR
    )
    with started as client:
        launchers = [e for group in started.engines.values() for e in group.launchers.values()]
        processes = [each.pid for each in (started.controller, *launchers)]
        for process in processes:
            janitor.keep("rank", process)
        try:
            yield client
        finally:
            for process in processes:
                janitor.forget("rank", process)


def _hosts(client):
    engines = Engines(client)
    questions = {engine: engines.ask(engine, "about") for engine in client.ids}
    about = {engine: engines.answer(q, _START) for engine, q in questions.items()}
    for told in about.values():
        _refuse_other_versions(told)
        frames.know_libraries(told["libraries"])
    places = {engine: (told["name"], told["network"]) for engine, told in about.items()}
    alone = len(set(places.values())) == 1
    chosen = list(about) if alone else [_first(places, place) for place in set(places.values())]
    toward = _address(client)
    names = Counter(about[engine]["name"] for engine in chosen)
    return [
        hosts.FarHost(engines, engine, _name(engine, about[engine]["name"], names), toward)
        for engine in sorted(chosen)
    ]


def _first(places, place):
    return min(engine for engine, there in places.items() if there == place)


def _name(engine, name, names):
    return name if names[name] == 1 else f"{name} (engine {engine})"


def _address(client):
    """Where the engines' controller is, as all engines know it."""
    return urlsplit(client._config["registration"]).hostname


def _refuse_other_versions(told):
    here = agent.versions()
    for what, version in told["versions"].items():
        if version != here[what]:
            raise RuntimeError(
                f"host {told['name']} has {what} {version}, and this kernel has {here[what]}: ranks of "
                "one launch need the same. Install the same there, and start its engine again."
            )
