"""What a launch shows while it goes on, in a real kernel: the page has none of it in the end."""

import time

import pytest
from kernels import KernelWithoutPorts

from tests.support.pages import Page

SETUP = """
import sys, threading, time, torch, torch.distributed as dist
from course_utils.launch import launch
from course_utils.launch.ranks import live
live._LONG = 1  # second
def slow(rank):
    time.sleep(2)
def bars(rank):
    for i in range(8):
        print(f"\\r{i} of rank {rank}", end="")
        time.sleep(0.25)
    print()
def lines(rank):
    for i in range(4):
        print(i, "of rank", rank)
        time.sleep(0.5)
def missed(rank):
    if rank:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(4)
        raise ValueError("mine")
launch(int, 1)
"""
JUPYTERLAB = {"deletedCells": [], "cellId": "8a7d"}  # what comes with a request
VS_CODE = {"cellId": "vscode-notebook-cell:/a.ipynb"}
SHOWN = {  # what is shown at some time, by cell
    "launch(slow, 2);": "2 of 2 ready",
    "print('before')\nlaunch(slow, 2)": "before\n1 s · 2 of 2 ready",
    "launch(bars, 3);": "of rank 2",
    "launch(lines, 2)\nprint('after')": "[rank 0] 1 of rank 0\n[rank 1] 1 of rank 1",
    "launch(missed, 3, backend='gloo')": "3 of 3 ready · ranks 1 and 2 last called all_reduce",
    "threading.Timer(1.5, lambda: sys.stderr.write('x')).start()\nlaunch(slow, 2)": "2 of 2 ready",
    "from IPython.display import HTML\ndisplay(HTML('<b>'))\nlaunch(bars, 2)": "of rank 1",
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    manager = KernelWithoutPorts(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path_factory.mktemp("kernel")))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    run(client, SETUP, {})
    client.interrupt = manager.interrupt_kernel
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client, code, metadata, on_text=lambda text: None):
    """Runs a cell; returns its page, and all that this has shown on the way."""
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
    request = client.session.msg("execute_request", content, metadata=metadata)
    client.shell_channel.send(request)
    page, shown, end = Page(), [], time.monotonic() + 90
    while time.monotonic() < end:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
            continue
        if message["content"].get("execution_state") == "idle":
            return page, shown
        page.take(message["msg_type"], message["content"])
        shown.append(page.text())
        on_text(page.text())
    raise AssertionError(f"not finished: {shown}")


@pytest.mark.parametrize("code", SHOWN)
def test_a_page_shows_what_goes_on_and_stores_none_of_it(kernel, code):
    page, shown = run(kernel, code, JUPYTERLAB)
    assert any(SHOWN[code] in text for text in shown)
    plain, without = run(kernel, code, {})
    assert not any("ready" in text for text in without)
    for each in page.outputs + plain.outputs:
        each.pop("execution_count", None)
        each.pop("traceback", None)
    assert page.outputs == plain.outputs


@pytest.mark.parametrize("metadata", [{}, VS_CODE])
def test_where_it_might_be_stored_nothing_is_shown(kernel, metadata):
    _, shown = run(kernel, "launch(slow, 2)", metadata)
    assert not any("ready" in text for text in shown)


def test_nothing_is_left_of_a_launch_that_was_interrupted(kernel):
    page, shown = run(
        kernel,
        "launch(slow, 2)",
        JUPYTERLAB,
        lambda text: kernel.interrupt() if "ready" in text else None,
    )
    assert any("ready" in text for text in shown)
    assert [each["kind"] for each in page.outputs] == ["error"]
