"""The fan-out's event loop: children's lines, their ends, and the end of the loop itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import ROOT, run_program

from launcher.fanout.connection import Connection
from launcher.fanout.loop import Loop
from launcher.fanout.nodes import Silence
from launcher.wire import limits


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code that needs a main thread and signals of its own."""
    head = "from launcher.fanout.loop import Child, Loop\n"
    return run_program([sys.executable, "-c", head + code], ROOT)


def test_a_child_that_ends_after_the_loop_is_not_heard() -> None:
    """Its SIGCHLD would go to a socket that is closed: a traceback, or a byte in another file."""
    ended = run(
        "import signal, time\n"
        "loop = Loop(most_children=1)\n"
        "slow = 'trap \"\" TERM; echo armed; read line; exit'\n"
        "child = Child(loop, ['sh', '-c', slow], lambda *_: armed.append(1))\n"
        "armed = []\n"
        "while not armed:\n"
        "    loop.wait(1.0)\n"
        "loop.close()\n"
        "del loop, child._loop\n"
        "import gc; gc.collect()\n"
        "signal.raise_signal(signal.SIGCHLD)\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# What a Python does that was built for a system whose posix_spawn knows no sessions.
NO_SETSID = """
spawn = os.posix_spawnp
def old(*words, **options):
    if "setsid" in options:
        raise NotImplementedError
    return spawn(*words, **options)
os.posix_spawnp = old
"""


@pytest.mark.parametrize("before", ["", NO_SETSID], ids=["posix_spawn", "setsid"])
def test_what_is_sent_to_our_session_does_not_reach_a_child(before: str) -> None:
    """PBS signals every process of a job's session, and ranks save through these connections."""
    ended = run(
        f"import os\n{before}\n"
        "loop = Loop(most_children=1)\n"
        "words, command = [], ['sh', '-c', 'ps -o sid= -p $$']\n"
        "child = Child(loop, command, lambda data, _: words.append(data))\n"
        "while child.code is None:\n"
        "    loop.wait(1.0)\n"
        "print(int(b''.join(words)) == child._pid)\n"
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")


# --- nodes that were silent -----------------------------------------------------------------------


Connect = Callable[[str], Connection]


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec cat\n")  # it ends with its stdin
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    loop = Loop(2)

    def begin(node: str) -> Connection:
        return Connection(loop, node, connect_s=1, token="token", show=lambda text, is_error: None)

    yield begin
    for child in loop.children:
        child.close_input()
    while any(child.code is None for child in loop.children):
        loop.wait(1)
    loop.close()


@pytest.mark.parametrize(
    ("silent_s", "is_blamed"), [(limits.SILENCE_S * 0.8, True), (limits.SILENCE_S / 2 - 1, False)]
)
def test_a_node_that_is_silent_at_the_first_end_is_blamed(
    connect: Connect, silent_s: float, is_blamed: bool
) -> None:
    cut, other = connect("node1"), connect("node2")
    cut.heard -= silent_s  # its packets still wait for TCP to send them again
    Silence([cut, other]).recall()
    assert bool(cut.lost) == cut.is_silent == is_blamed
    assert not other.lost


@pytest.mark.parametrize(
    ("ago_s", "is_blamed"), [(limits.RECALL_S - 1, True), (limits.RECALL_S + 1, False)]
)
def test_a_node_that_was_silent_just_before_is_blamed(
    connect: Connect, ago_s: float, is_blamed: bool
) -> None:
    cut = connect("node1")
    cut.gap = time.monotonic() - ago_s, 9.0
    Silence([cut]).recall()
    assert cut.lost == ("no heartbeat for 9 s (network down?)" if is_blamed else "")
