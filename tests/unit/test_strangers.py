"""Strangers at the ports of a run: none joins it, ends it, or changes its exit code."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from pathlib import Path

import pytest
from agents import PATIENCE_S, PROGRAM, Run, kill_what_is_left, rarely
from ports import free_port
from strangers import attack, keep_silent

from launcher import handshake
from launcher.agent.join import versions
from launcher.preflight import must_match
from launcher.wire import messages
from launcher.wire.messages import NodeReport

pytestmark = pytest.mark.slow


def test_strangers_at_every_port_of_a_run_change_nothing(tmp_path: Path) -> None:
    attack_a_run(tmp_path, times=60, silent=300)


def attack_a_run(folder: Path, *, times: int, silent: int) -> None:
    """Attack a run of two nodes while it waits for the second, and while it runs."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    port, rng = free_port(), random.Random(1)
    secret = handshake.new_secret()
    runs: list[Run] = []
    said: list[str] = []  # on stderr

    def begin(node: int, secret: str) -> Run:
        world = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        runs.append(Run([*world, *where, str(script), "save", "0"], RUN_SECRET=secret))
        return runs[-1]

    try:
        first = begin(0, secret)
        reader = threading.Thread(target=lambda: said.extend(first.process.stderr or ()))
        reader.start()  # torch's store shows a stack for each that it does not understand
        waiting = keep_silent(port, silent)
        attack(port, rng, times)
        false = begin(1, handshake.new_secret())
        assert "has another RUN_SECRET than this node" in false.finish()
        assert false.process.returncode == 3
        second = begin(1, secret)
        for run in (first, second):
            run.wait_for("armed")
        attack(port, rng, times)
        waiting += keep_silent(port, silent)
        first.process.terminate()
        said.append(second.finish())
        assert first.process.wait(timeout=PATIENCE_S) == second.process.returncode == 75
        reader.join()
        assert first.process.stdout is not None
        assert "saved 0" in first.process.stdout.read() and "saved 1" in second.output
        assert "".join(said).count("[stranger]") == 1
        assert "Traceback" not in "".join(said)
        for connection in waiting:
            connection.close()
    finally:
        kill_what_is_left(runs)


STOLEN = [
    b'{"Failure":{"fault":"x","cause":"\\u001b[2J","code":0,"host":"h","node_rank":7,"time":0}}',
    b'{"Failure":{"fault":"x","cause":"\\u001b[2J","code":9,"host":"h","node_rank":7,"time":0}}',
    b'{"NodeEnd":{"stopped":[-1],"first_rank":1000000,"codes":[75,300]}}',
    b'{"NodeBeat":{"straggler":{"rank":99,"progress":[1,2],"is_stuck":true,"is_stopped":false}}}',
    b'{"Verdict":{"code":0}}\n{"EndRanks":{"stuck":1}}',
    b'{"StopRequest":{"signum":9}}\n{"StopRequest":{"signum":64}}',
    b'{"Assignment":{"run_id":"../../x","first_rank":0,"world_size":2,"hosts":[]}}',
    b'{"Failure":{"fault":1,"cause":null}}',
    b'{"Failure":{"fault":"x","cause":"c","code":9,"host":"h","node_rank":0,"time":1e400}}',
    b'{"NodeBeat":{"straggler":{"rank":1e999,"progress":[]}}}',
    b'{"NodeReport":{}}\nnull\n[]',
    b"\x00" * 100,
    b"[" * 100_000,
    b"\xff" * 2_000_000,
]
RARER = [one for number, one in enumerate(STOLEN) if number % 10]


@pytest.mark.parametrize(
    "message",
    [*STOLEN[::10], *rarely(*RARER)],
    ids=lambda message: message[:12].decode("latin1"),
)
def test_a_stolen_node_can_only_end_the_run(tmp_path: Path, message: bytes) -> None:
    """A node that knows the secret, and says what none should: no traceback, and no code 0."""
    script = tmp_path / "program.py"
    script.write_text("import time\ntime.sleep(600)\n")
    port, secret = free_port(), handshake.new_secret()
    world = ["--nnodes", "2", "--nproc-per-node", "1", "--master-port", str(port)]
    run = Run([*world, "--master-addr", "127.0.0.1", str(script)], RUN_SECRET=secret)
    try:
        with keep_silent(port, 1)[0] as stolen:
            handshake.introduce(stolen, secret.encode())
            stolen.sendall(hello(script) + b'{"PairResult":{"faults":[]}}\n')
            said = b""
            while b'"Assignment"' not in said:
                said += (more := stolen.recv(65536))
                assert more, said
            stolen.sendall(message + b"\n")
            with contextlib.suppress(OSError):  # the end of the connection ends the run
                stolen.shutdown(socket.SHUT_WR)
                while stolen.recv(65536):
                    pass
        err = run.finish()
        run.assert_gone()
        assert "FAILED   " in err and "Traceback" not in err and "\x1b" not in err
        assert run.process.returncode not in (0, 1)
    finally:
        kill_what_is_left([run])


def hello(script: Path) -> bytes:
    """What a node says first, with the versions and hashes that node 0 expects."""
    files = {"the list of arguments": "", **must_match.hash_files([str(script)], Path())}
    report = NodeReport(1, 2, 1, "stolen", "", versions(), files)
    return f"{messages.write(report)}\n".encode()
