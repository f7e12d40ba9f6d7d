"""The fan-out's event loop: children's lines, their ends, and the end of the loop itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agents import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code that needs a main thread and signals of its own."""
    head = "from launcher.fanout.loop import Child, Loop\n"
    return subprocess.run(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_output_and_the_code_of_a_child_arrive() -> None:
    ended = run(
        "loop = Loop(most_children=1)\n"
        "child = Child(loop, ['sh', '-c', 'cat; echo last >&2; exit 7'], print)\n"
        "child.send(b'first')\n"
        "child.close_input()\n"
        "while child.code is None:\n"
        "    loop.wait(1.0)\n"
        "print(child.code)\n"
    )
    ends = ["b'' False", "b'' True"]
    lines = ["7", *ends, "b'first' False", r"b'last\n' True"]
    assert sorted(ended.stdout.splitlines()) == sorted(lines)


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
