"""Measure how the cost of node rank 0 grows with the number of nodes: `make bench-scale`, or
python bench/scale.py [NODES ...].

One agent is real: that of node rank 0, with its supervisor and one rank. The other nodes are
connections that speak the product's own messages (scale_nodes.py), each for 8 ranks. Processor
time is the real agent's alone; elapsed times are not given, because all nodes share this machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import AGENT, render, write_section
from scale_nodes import Nodes, is_assigned, wait_until

from launcher.descriptors import raise_limit

SIZES = (4, 16, 64, 256, 1024)
PROGRAM = """
import time
from torch_launch_kit.distributed.heartbeat import beat

beat(9)  # it is further than the simulated ranks, so none waits for it
time.sleep(600)
"""
TICKS = os.sysconf("SC_CLK_TCK")
BEATS_S = 10.0
MOST = 1.2  # the exponent between the last two sizes


@dataclass(frozen=True)
class Cost:
    """What one event cost the agent of node rank 0."""

    cpu_s: float
    messages: int  # sent to the other nodes


class Agent:
    """The real agent of node rank 0, and the simulated nodes around it."""

    def __init__(self, number: int, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        script = folder / "waits.py"
        script.write_text(PROGRAM)
        secret = "a secret of this machine alone"
        sizes = [f"--nnodes={number}", "--node-rank=0", "--nproc-per-node=1"]
        where = ["--master-addr=127.0.0.1", f"--master-port={self.port}"]
        self.process = subprocess.Popen(
            [*AGENT, *sizes, *where, str(script)],
            env={**os.environ, "RUN_SECRET": secret, "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.nodes = Nodes(self.port, secret, number, script)
        wait_until(self._is_listening)
        self.pid = _children(self.process.pid)[0]
        self._cpu_s = 0.0

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def measure(self, act: Callable[[], object]) -> Cost:
        """Return what the agent spends until `act` returns."""
        sent, before = self.nodes.received.total(), self.cpu_s
        over = threading.Event()
        reader = threading.Thread(target=self._read_until, args=(over,))
        reader.start()
        try:
            act()
        finally:
            over.set()
            reader.join()
        return Cost(self.cpu_s - before, self.nodes.received.total() - sent)

    def _read_until(self, over: threading.Event) -> None:
        """Read the processor time again and again: the agent may end at any moment."""
        while not over.wait(0.01):
            _ = self.cpu_s

    @property
    def cpu_s(self) -> float:
        """The processor time of the agent, or what it last was if it has ended."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            self._cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
        return self._cpu_s

    def finish(self) -> tuple[int, str]:
        """Return the exit code and what was printed to stderr."""
        _, err = self.process.communicate(timeout=180)
        return self.process.returncode, err


def _children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@contextmanager
def started(number: int) -> Iterator[Agent]:
    """Start a run of this many nodes."""
    raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(number, Path(folder))
        try:
            agent.nodes.join()
            wait_until(lambda: is_assigned(agent.nodes))
            yield agent
        finally:
            agent.nodes.close()
            if agent.process.poll() is None:
                os.killpg(agent.process.pid, signal.SIGKILL)
                agent.process.communicate()


def all_judged(agent: Agent) -> None:
    """Wait until every node has the verdict, or the agent has ended."""
    everyone = agent.nodes.number - 1
    wait_until(lambda: len(agent.nodes.judged) == everyone)


def fail_one(agent: Agent) -> None:
    agent.nodes.fail(2, agent.nodes.ranks_of(2)[0])
    all_judged(agent)


def fail_all(agent: Agent) -> None:
    for node in range(1, agent.nodes.number):
        for rank in agent.nodes.ranks_of(node):
            agent.nodes.fail(node, rank)
    all_judged(agent)


def stop(agent: Agent) -> None:
    agent.process.send_signal(signal.SIGTERM)
    all_judged(agent)


def lose_one(agent: Agent) -> None:
    agent.nodes.close(2)
    wait_until(lambda: len(agent.nodes.judged) == agent.nodes.number - 2)


def hang(agent: Agent) -> None:
    agent.nodes.be_stuck(2)
    all_judged(agent)


def beat(_agent: Agent) -> None:
    time.sleep(BEATS_S)


EVENTS: dict[str, Callable[[Agent], None]] = {
    f"heartbeats, {BEATS_S:g} s": beat,
    "one rank fails": fail_one,
    "all ranks fail": fail_all,
    "a stop": stop,
    "a node is lost": lose_one,
    "a hang, with all stacks": hang,
}


def check_in(number: int) -> Cost:
    raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(number, Path(folder))

        def join() -> None:
            agent.nodes.join()
            wait_until(lambda: is_assigned(agent.nodes))

        try:
            return agent.measure(join)
        finally:
            agent.nodes.close()
            os.killpg(agent.process.pid, signal.SIGKILL)
            agent.process.communicate()


def measure(event: str, number: int) -> Cost:
    if event == "check-in":
        return check_in(number)
    with started(number) as agent:
        return agent.measure(lambda: EVENTS[event](agent))


def exponent(small: float, large: float, ratio: float) -> float:
    """Return e, if the cost grows with the number of nodes to the power of e."""
    return math.log(max(large, 0.01) / max(small, 0.01)) / math.log(ratio)


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [*SIZES]
    rows = []
    for event in ("check-in", *EVENTS):
        costs = [measure(event, number) for number in sizes]
        print(event, costs, flush=True)
        last = exponent(costs[-2].cpu_s, costs[-1].cpu_s, sizes[-1] / sizes[-2])
        cells = [f"{one.cpu_s:.2f}" for one in costs]
        rows.append([event, *cells, f"{last:.1f}", f"{costs[-1].messages:,}"])
    head = ["event", *(f"{number} nodes, CPU s" for number in sizes), "exponent", "messages"]
    write_section("scale", f", {sizes[-1]} nodes at most", render(head, rows))


if __name__ == "__main__":
    main()
