"""Strangers at the ports of a run: none joins it, ends it, or changes its exit code."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from agents import PROGRAM, Run, kill_what_is_left
from ports import free_port
from strangers import attack, keep_silent

from launcher import handshake

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
        assert "has another RUN_SECRET than this node" in false.finish(within_s=40)
        assert false.process.returncode == 3
        second = begin(1, secret)
        for run in (first, second):
            run.wait_for("armed")
        attack(port, rng, times)
        waiting += keep_silent(port, silent)
        first.process.terminate()
        said.append(second.finish())
        assert first.process.wait(timeout=60) == second.process.returncode == 75
        reader.join()
        assert first.process.stdout is not None
        assert "saved 0" in first.process.stdout.read() and "saved 1" in second.output
        assert "".join(said).count("[stranger]") == 1
        assert "Traceback" not in "".join(said)
        for connection in waiting:
            connection.close()
    finally:
        kill_what_is_left(runs)
