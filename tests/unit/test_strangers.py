"""Strangers at the ports of a run: none joins it, ends it, or changes its exit code."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import PATIENCE_S, PROGRAM, Run, kill_what_is_left, rarely
from ports import free_port

from launcher import handshake
from launcher.agent.join import versions
from launcher.preflight import must_match
from launcher.wire import messages
from launcher.wire.messages import NodeReport

pytestmark = pytest.mark.slow

TEXTS = [
    '{"hello":{"node_rank":1,"num_nodes":2,"nproc":2,"host":"h","run_id":"","versions":{},"files":{}}}',
    '{"start":{"run_id":"../../x","first_rank":0,"world_size":2,"hosts":["a","b"]}}',
    '{"verdict":{"code":0,"failure":null}}',
    '{"signal":{"signum":15}}',
    '{"end":{"stuck":0}}',
    '{"done":{"stopped":[],"first_rank":0,"codes":[0]}}',
    '{"refused":{"fault":"x","message":"y"}}',
    '{"beat":{"straggler":null}}',
    "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "SSH-2.0-OpenSSH_9.2\r\n",
]
VALUES: list[Any] = [None, True, -1, 1e308, 10**30, "", "\x1b[2J", "x" * 1000, [], {}, [[[[]]]]]


def random_bytes(rng: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        yield rng.randbytes(rng.choice((0, 1, 31, 32, 63, 64, 65, 96, 5000)))


def mutated_messages(rng: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        text = rng.choice(TEXTS)
        kind = rng.randrange(4)
        if kind == 0 and text.startswith("{"):
            [(name, fields)] = json.loads(text).items()
            fields[rng.choice([*fields, "more"])] = rng.choice(VALUES)
            text = json.dumps({name: fields})
        data = bytearray(text.encode())
        if kind == 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[rng.randrange(len(data)) :]
        yield bytes(data) + b"\n" * rng.randrange(3)


def attack(port: int, rng: random.Random, times: int) -> None:
    """Send so many byte sequences and as many mutated messages, each over its own connection."""
    for data in (*random_bytes(rng, times), *mutated_messages(rng, times)):
        send(port, data)


def send(port: int, data: bytes) -> None:
    """Send it over a connection of its own."""
    dropped = contextlib.suppress(OSError)
    with socket.create_connection(("127.0.0.1", port)) as stranger, dropped:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)


def connect(port: int) -> socket.socket:
    """Return a connection, once something listens there."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


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
        waiting = [connect(port) for _ in range(silent)]
        attack(port, rng, times)
        false = begin(1, handshake.new_secret())
        assert "has another RUN_SECRET than this node" in false.finish()
        assert false.process.returncode == 3
        second = begin(1, secret)
        for run in (first, second):
            run.wait_for("armed")
        attack(port, rng, times)
        waiting += [connect(port) for _ in range(silent)]
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
RARER = rarely(*(one for number, one in enumerate(STOLEN) if number % 10))


@pytest.mark.parametrize(
    "message", [*STOLEN[::10], *RARER], ids=lambda message: message[:12].decode("latin1")
)
def test_a_stolen_node_can_only_end_the_run(
    runs: list[Run], tmp_path: Path, message: bytes
) -> None:
    """A node that knows the secret, and says what none should: no traceback, and no code 0."""
    script = tmp_path / "program.py"
    script.write_text("import time\ntime.sleep(600)\n")
    port, secret = free_port(), handshake.new_secret()
    world = ["--nnodes", "2", "--nproc-per-node", "1", "--master-port", str(port)]
    runs.append(run := Run([*world, "--master-addr=127.0.0.1", str(script)], RUN_SECRET=secret))
    with connect(port) as stolen:
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


def hello(script: Path) -> bytes:
    """What a node says first, with the versions and hashes that node 0 expects."""
    files = {"the list of arguments": "", **must_match.hash_files([str(script)], Path())}
    report = NodeReport(1, 2, 1, "stolen", "", versions(), files)
    return f"{messages.write(report)}\n".encode()
