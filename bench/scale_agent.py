"""The real agent of node rank 0, among nodes that exist only as its connections.

The others speak the product's own messages (scale_nodes.py), each for 8 ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import AGENT
from scale_cost import BEATS_S, REPEATS, USUAL_LIMIT, Cost, Meter, beat, median, wait_until
from scale_nodes import NPROC, Nodes, is_assigned

from distributed.environment import Environment
from distributed.rendezvous import rendezvous
from launcher.descriptors import raise_limit

PROGRAM = """
import time
from torch_launch_kit.distributed.heartbeat import beat

beat(9)  # it is further than the simulated ranks, so none waits for it
time.sleep(600)
"""


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
            [*USUAL_LIMIT, *AGENT, *sizes, *where, str(script)],
            env={**os.environ, "RUN_SECRET": secret, "PYTHONPATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.nodes = Nodes(self.port, secret, number, script)
        wait_until(self._is_listening)
        self.pid = _children(self.process.pid)[0]
        self._meter = Meter(self.pid)

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def measure(self, act: Callable[[Agent], object]) -> Cost:
        """Return what the agent spends until `act` returns."""
        return self._meter.measure(lambda: act(self), self.nodes.received.total)

    def count_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def finish(self) -> tuple[int, str]:
        """Return the exit code and what was printed to stderr."""
        _, err = self.process.communicate(timeout=500)
        return self.process.returncode, err


def _children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@contextmanager
def listening(number: int) -> Iterator[Agent]:
    """Start the agent of a run of this many nodes, which waits for the others."""
    raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(number, Path(folder))
        try:
            yield agent
        finally:
            agent.nodes.close()
            if agent.process.poll() is None:
                os.killpg(agent.process.pid, signal.SIGKILL)
                agent.process.communicate()


@contextmanager
def started(number: int) -> Iterator[Agent]:
    """Start a run of this many nodes."""
    with listening(number) as agent:
        check_in(agent)
        yield agent


def check_in(agent: Agent) -> None:
    agent.nodes.join()
    wait_until(lambda: is_assigned(agent.nodes))


def connect_ranks(agent: Agent) -> list[socket.socket]:
    """Connect to torch's store as the ranks of the other nodes do. Returns the connections."""
    number = NPROC * (agent.nodes.number - 1)
    before = agent.count_files()
    ranks = [socket.create_connection(("127.0.0.1", agent.port)) for _ in range(number)]
    wait_until(lambda: agent.count_files() >= before + number)
    return ranks


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


def use_store(agent: Agent) -> None:
    """Let one rank of each node join at torch's store, which the agent serves."""
    number = agent.nodes.number

    def join(node: int) -> object:
        where = node, number, "127.0.0.1", agent.port
        env = Environment("torchrun", node, 0, number, 1, *where, agent_store=True)
        return rendezvous(env, torch.device("cpu"), owns_gpu=False, timeout_s=120)

    with ThreadPoolExecutor(number) as pool:
        list(pool.map(join, range(number)))


EVENTS: dict[str, Callable[[Agent], None]] = {
    f"heartbeats, {BEATS_S:g} s": beat,
    "one rank fails": fail_one,
    "all ranks fail": fail_all,
    "a stop": stop,
    "a node is lost": lose_one,
    "a hang, with all stacks": hang,
}


def measure(number: int) -> Iterator[tuple[str, Cost]]:
    """Yield what each event costs the agent: the median of some runs, each with one event."""
    for event, act in EVENTS.items():
        costs = [_measure_once(number, act) for _ in range(1 if act is beat else REPEATS)]
        yield event, median(costs)


def _measure_once(number: int, act: Callable[[Agent], None]) -> Cost:
    with started(number) as agent:
        return agent.measure(act)


def measure_store(number: int) -> Cost:
    """Return what torch's store costs the agent, with one rank of each node."""
    with started(number) as agent:
        return Cost(agent.measure(use_store).cpu_s)


def measure_check_in(number: int) -> tuple[Cost, Cost]:
    """Return what the check-in costs the agent, and what it costs all nodes together."""
    with listening(number) as agent:
        before = time.process_time()  # of the other nodes
        cost = agent.measure(check_in)
        return cost, Cost(cost.cpu_s + time.process_time() - before)
