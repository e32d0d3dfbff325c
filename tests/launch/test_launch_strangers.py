"""Somebody who reaches every port of a cluster, and has not its key: nothing runs, and nothing dies.

With hosts that have a network of their own: tests/two_hosts.
"""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

zmq = pytest.importorskip("zmq")
ipyparallel = pytest.importorskip("ipyparallel", reason="ipyparallel is not installed")

from ipyparallel.serialize import pack_apply_message

from course_hosts import cluster as cluster_module
from course_hosts.cluster import cluster
from course_utils.launch import launch


@pytest.fixture(scope="module")
def client():
    with cluster_module.on_this_machine(2) as own:
        yield own


def listening() -> dict[int, set[str]]:
    """The TCP ports of all processes below this one, and the addresses on which each listens."""
    ports = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    ports.setdefault(each.laddr.port, set()).add(each.laddr.ip)
    return ports


def cluster_processes() -> set[int]:
    below = psutil.Process().children(recursive=True)
    return {p.pid for p in below if any("ipyparallel" in word for word in p.cmdline())}


@contextlib.contextmanager
def sent(client, port: int, mark: Path, **keys):
    """A request to each engine to make the folder `mark`, signed as the client signs, over a
    connection with these keys. Sent from this thread: the client's own would wait with it."""
    session, packed = client.session.clone(), pack_apply_message(os.mkdir, [str(mark)], {})
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger, stranger.sndtimeo = 0, 1000
        for name, key in keys.items():
            setattr(stranger, name, key)
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for engine in client._engines.values():
            request = session.msg("apply_request")
            with contextlib.suppress(zmq.Again):  # there is nobody who takes it
                session.send(stranger, request, buffers=packed, ident=engine.encode())
        yield


def port_of(client, name: str) -> int:
    return int(client._config[name].rsplit(":", 1)[1])


def comes_to_pass(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def works(rank: int) -> float:
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    return total.item()


def test_a_request_without_the_key_runs_nowhere(client, tmp_path):
    own, (public, secret) = client.curve_serverkey, zmq.curve_keypair()
    before, mark = cluster_processes(), tmp_path / "made-by-a-stranger"
    wrong, _ = zmq.curve_keypair()
    with contextlib.ExitStack() as open_connections:
        for port in listening():
            for keys in (
                {},
                {"curve_serverkey": wrong, "curve_publickey": public, "curve_secretkey": secret},
            ):
                open_connections.enter_context(sent(client, port, mark, **keys))
        assert not comes_to_pass(mark.exists, 3)
        with cluster(client):
            assert launch(works, 2) == [2.0, 2.0]
        assert not mark.exists()
    assert cluster_processes() == before
    # The same request with the key runs: it is not for its form that nobody took it.
    keys = {"curve_serverkey": own, "curve_publickey": public, "curve_secretkey": secret}
    with sent(client, port_of(client, "mux"), mark, **keys):
        assert comes_to_pass(mark.exists, 60)


def wait_for(rank: int, folder: str) -> float:
    Path(folder, f"rank-{rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    return works(rank)


@pytest.fixture
def launched(client, tmp_path):
    """A launch over both engines that goes on until a file is there; yields what it returns."""
    returned = []
    with cluster(client):

        def call():
            returned.append(launch(wait_for, 4, str(tmp_path)))

        running = threading.Thread(target=call)
        running.start()
        try:
            assert comes_to_pass(lambda: len(list(tmp_path.glob("rank-*"))) == 4, 60)
            yield returned
        finally:
            (tmp_path / "go").touch()
            running.join()


def test_noise_at_every_port_changes_nothing(client, launched, tmp_path):
    before = cluster_processes()
    ports = listening()
    assert len(ports) > 10
    for port in ports:
        for noise in (b"", b"\x00" * 64, os.urandom(4096)):
            with (
                contextlib.suppress(OSError),  # it has closed the connection
                socket.create_connection(("127.0.0.1", port), 5) as stranger,
            ):
                stranger.sendall(noise)
    (tmp_path / "go").touch()
    assert comes_to_pass(lambda: launched == [[4.0] * 4], 60)
    assert cluster_processes() == before
    assert launch(works, 2) == [2.0, 2.0]


def test_nothing_listens_beyond_the_address_that_was_given(launched):
    elsewhere = {port: at for port, at in listening().items() if at != {"127.0.0.1"}}
    assert not elsewhere
