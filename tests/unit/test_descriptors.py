"""Open files: numbers above 1,023, and the limits of the launcher, the agent and its ranks."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agents import AGENT, PATIENCE_S, ROOT

from launcher import own_time
from launcher.descriptors import raise_limit, wait_for_input
from launcher.wire import messages
from launcher.wire.messages import EndRanks
from launcher.wire.node_link import Link

HIGH = 1500  # above what select() accepts


@pytest.fixture
def _many_files() -> None:
    if raise_limit() <= HIGH:
        pytest.skip(f"the hard limit on open files is below {HIGH}")


def _raised(connection: socket.socket) -> socket.socket:
    """Return the same connection, with a high number."""
    with connection:
        os.dup2(connection.fileno(), HIGH)
    return socket.socket(fileno=HIGH)


@pytest.mark.usefixtures("_many_files")
def test_a_connection_with_a_high_number_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with theirs, _raised(ours) as connection:
        assert wait_for_input([connection.fileno()], 0) == []
        theirs.sendall(f"{messages.write(EndRanks())}\n".encode())
        assert wait_for_input([HIGH]) == [HIGH]
        assert Link(connection).wait(own_time.now() + 5) == EndRanks()


@pytest.mark.usefixtures("_many_files")
def test_an_end_counts_as_input() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert wait_for_input([ours.fileno()], 5) == [ours.fileno()]


@pytest.mark.slow
def test_the_agent_has_more_files_than_its_ranks(tmp_path: Path) -> None:
    """The agent of node rank 0 needs one for each node, and one for each rank of the run."""
    script = tmp_path / "limits.py"
    script.write_text("""
import json, os, resource
agent = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
print(json.dumps([agent, resource.getrlimit(resource.RLIMIT_NOFILE)]))
""")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = _run_limited(256, hard, *AGENT, "--nproc-per-node=1", script)
    agent, rank = json.loads(done.stdout)
    assert rank == [256, hard]
    assert agent[0] > 256


@pytest.mark.slow
def test_a_limit_that_is_too_low_is_refused_before_the_first_ssh(tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("print('never')")
    began = time.monotonic()
    launch = [ROOT / "scripts/launch.sh", "--hosts", "none[1-30]", "--nproc", "1", script]
    done = _run_limited(128, 128, *launch)
    assert done.returncode == 3 and time.monotonic() - began < PATIENCE_S
    [line] = done.stderr.splitlines()
    assert "31 nodes need 188 open files, and the limit is 128; raise the hard limit" in line
    assert line.endswith("[low-nofile]")


def _run_limited(soft: int, hard: int, *command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PYTHON": sys.executable},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
    )
