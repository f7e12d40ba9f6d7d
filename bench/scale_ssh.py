"""A real launcher over ssh, among nodes that exist only as the far ends of its connections.

scripts/launch.sh finds a small `ssh` first in PATH. Each one leaves its pipes to this process,
which answers for all nodes with the product's messages, as bash and launcher/fanout/far_side.py do.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from harness import ROOT
from scale_cost import BEATS_S, REPEATS, USUAL_LIMIT, Cost, Meter, beat, median, wait_until
from scale_nodes import NPROC

from launcher.descriptors import raise_limit
from launcher.outcome import NodeEnd, Outcome, end_attempt
from launcher.preflight.check_node import check_node
from launcher.wire import limits, messages
from launcher.wire.launcher_link import BEGIN
from launcher.wire.messages import Exit, Hello, Report, Request, Start, StopRequest

# It starts no bash on a node: this process takes its pipes from /proc (stdout as 3), and ends it.
SSH = """#!/bin/sh
[ "$1" != -V ] || { echo OpenSSH_9.2p1 >&2; exit; }
exec 3>&1
echo $$ >'%s'
exec sleep 86400
"""
MET = ("port", "clock", "other port", "pairs")  # what a node checks at the master's port
STOPPED = 75  # the ranks have saved


@dataclass
class FarSide:
    """One node: the far end of an ssh connection."""

    pid: int  # of ssh
    stdin: int
    stdout: int
    unread: bytes = b""
    mark: str = ""  # begins its messages
    is_started: bool = False

    @property
    def number(self) -> int:
        return int(self.mark.rpartition(".")[2])

    def tell(self, message: object | None = None) -> None:
        """Send the launcher a message, or a sign of life."""
        text = messages.write(message) if message is not None else ""
        with contextlib.suppress(OSError):  # the launcher has ended
            os.write(self.stdout, f"{BEGIN}{self.mark} {text}\n".encode())

    def end(self) -> None:
        """End the connection, as ssh does once the program on the node has ended."""
        for fd in (self.stdin, self.stdout):
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):  # it died with the launcher
            os.kill(self.pid, signal.SIGTERM)


@dataclass
class FarSides:
    """All nodes. One thread answers for them."""

    number: int
    doorbell: Path  # a named pipe, which gets the process id of each ssh
    received: Counter[str] = field(default_factory=Counter)  # messages, by kind
    _sides: dict[int, FarSide] = field(default_factory=dict)  # by the descriptor of stdin
    _report: Report | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        os.mkfifo(self.doorbell)
        self._bell = os.open(self.doorbell, os.O_RDWR | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    @property
    def started(self) -> int:
        return sum(side.is_started for side in [*self._sides.values()])

    def close(self) -> None:
        """Stop answering. The launcher must have ended."""
        self._over.set()
        self._thread.join()
        for side in self._sides.values():
            os.close(side.stdin)
            os.close(side.stdout)
        os.close(self._bell)

    def _listen(self) -> None:
        beat_at = time.monotonic()
        while not self._over.is_set():
            if time.monotonic() >= beat_at:
                beat_at += limits.BEAT_S
                self._beat()
            for fd, _ in self._poll.poll(100):
                if fd == self._bell:
                    for pid in os.read(fd, 1 << 16).split():
                        self._open(int(pid))
                else:
                    self._read(self._sides[fd])

    def _open(self, pid: int) -> None:
        """Take over the pipes of an ssh."""
        ends = f"/proc/{pid}/fd/"
        stdin = os.open(f"{ends}0", os.O_RDONLY | os.O_NONBLOCK)
        self._sides[stdin] = FarSide(pid, stdin, os.open(f"{ends}3", os.O_WRONLY))
        self._poll.register(stdin, select.POLLIN)

    def _read(self, side: FarSide) -> None:
        data = os.read(side.stdin, 1 << 16)
        *lines, side.unread = (side.unread + data).split(b"\n")
        for line in lines:
            if not side.mark:
                self._say_hello(side, line)
            elif line.startswith(b"{"):  # others are bash's
                self._answer(side, messages.read(line))
            elif not line:
                self.received["a sign of life"] += 1
        if not data:
            self._end(side)

    def _say_hello(self, side: FarSide, line: bytes) -> None:
        """Answer for bash, which gets a few commands before the first message."""
        if found := re.search(rb"^cd .* LAUNCH_TOKEN=(\w+\.\d+) ", line):
            side.mark = found[1].decode()
            side.tell(Hello(f"10.0.{side.number // 250}.{side.number % 250 + 1}"))

    def _answer(self, side: FarSide, message: object) -> None:
        self.received[type(message).__name__] += 1
        match message:
            case Request():
                side.tell(self._check(message))
            case Start():
                side.is_started = True
            case StopRequest():
                side.tell(self._stopped)
                side.tell(Exit(STOPPED, 0))
                self._end(side)

    def _end(self, side: FarSide) -> None:
        self._poll.unregister(side.stdin)
        del self._sides[side.stdin]
        side.end()

    def _check(self, request: Request) -> Report:
        """Return a node's report: that of this machine, without faults, after a meeting."""
        if self._report is None:
            self._report = check_node(replace(request, node_rank=1, meeting_size=0), {})
        host = f"node{request.node_rank + 1}"
        met = MET if request.node_rank else ()
        return replace(self._report, node_rank=request.node_rank, host=host, faults=(), done=met)

    @cached_property
    def _stopped(self) -> Outcome:
        """What each agent reports if the ranks have saved."""
        codes = [STOPPED] * NPROC
        nodes = [NodeEnd((), node * NPROC, codes, 40) for node in range(self.number)]
        return end_attempt([], nodes, [signal.SIGTERM])

    def _beat(self) -> None:
        for side in self._sides.values():
            if side.is_started:
                side.tell()


class Launcher:
    """The real launcher, and the simulated nodes around it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.far = FarSides(number, folder / "doorbell")
        (folder / "bin").mkdir()
        ssh = folder / "bin/ssh"
        ssh.write_text(SSH % self.far.doorbell)
        ssh.chmod(0o755)
        path = f"{ssh.parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [*USUAL_LIMIT, *launch_command(number)],
            cwd=folder,
            env={**os.environ, "PATH": path, "PYTHON": sys.executable, "PREFLIGHT_SECONDS": "300"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._meter = Meter(self.process.pid)

    def measure(self, act: Callable[[Launcher], object]) -> Cost:
        """Return what the launcher spends until `act` returns."""
        return self._meter.measure(lambda: act(self), self.far.received.total)

    def count_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.far.close()


def launch_command(number: int, *options: str) -> list[str]:
    """Return the command line of a run on this many nodes; no node runs the script."""
    command = [str(ROOT / "scripts/launch.sh"), f"--hosts=node[1-{number}]", *options]
    return [*command, f"--nproc-per-node={NPROC}", str(ROOT / "bench/bare_loop.py")]


@contextmanager
def launched(number: int) -> Iterator[Launcher]:
    """Start a launcher for a run on this many nodes; it has not started them yet."""
    raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(number, Path(folder))
        try:
            yield launcher
        finally:
            launcher.close()


def start(launcher: Launcher) -> None:
    wait_until(lambda: launcher.far.started == launcher.far.number)


def stop(launcher: Launcher) -> str:
    """Stop the run. Returns what the launcher has printed."""
    launcher.process.send_signal(signal.SIGTERM)
    return launcher.process.communicate(timeout=500)[0]


EVENTS: dict[str, Callable[[Launcher], object]] = {
    "start, until all nodes have started": start,
    f"heartbeats, {BEATS_S:g} s": beat,
    "a stop, until it exits": stop,
}


def measure(number: int) -> Iterator[tuple[str, Cost]]:
    """Yield what each event costs the launcher: the median of some runs, each with all events."""
    runs = [_measure_once(number) for _ in range(REPEATS)]
    for event in EVENTS:
        yield event, median([costs[event] for costs in runs])


def _measure_once(number: int) -> dict[str, Cost]:
    with launched(number) as launcher:
        return {event: launcher.measure(act) for event, act in EVENTS.items()}
