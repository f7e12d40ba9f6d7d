"""A command on many hosts, side by side: `make bench-fanout` (as root), or
PYTHONPATH=. python bench/fanout.py [RUNS].

Starts `echo started` on 8, 32 and 64 hosts of a cluster in a box, whose users' start-up files are
empty: by the launchers' connections, pdsh and clush without their limits, and plain `ssh &`.
Seconds until the last host has answered, and what it costs the client: the processor time of the
launcher and of all below it, to its end. All take turns, RUNS times (default 5). Each is compared
with the pdsh of its own turn, for the machine may be slower in another; medians of that.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness import CLUSTER, ROOT, cluster, in_turns, render, spread, times_or, write_section

from launcher.processes import adopt_orphans

HOSTS = (8, 32, 64)
MORE = 100  # commands over connections that are there
CLUSH = Path(tempfile.gettempdir(), f"bench-clush-{os.getuid()}/bin/clush")
CHEAP = "-o KexAlgorithms=curve25519-sha256"
# What the launchers do with each node: connect, tell it something, wait for its answer.
OURS = """
import os, sys
from collections import Counter
from launcher.fanout.loop import Child, Loop, ssh_command

loop, answers = Loop(most_children=len(sys.argv)), Counter()
connections = [
    Child(loop, ssh_command(node, 10, os.devnull), lambda data, _: answers.update(data.split()))
    for node in sys.argv[2:]
]
for number in range(int(sys.argv[1])):
    for each in connections:
        each.send(b"echo %d\\n" % number)
    while answers[b"%d" % number] < len(connections):
        loop.wait(60)
print("started\\n" * answers[b"%d" % number], end="", flush=True)
for each in connections:
    each.close_input()
while any(each.code is None for each in connections):
    loop.wait(60)
"""
PLAIN = 'for node; do ssh $SSH_OPTS "$node" echo started </dev/null & done; wait'
# As ours and pdsh start it, in a session of its own each: what no launcher can go below.
SESSIONS = PLAIN.replace("ssh $", "setsid ssh $")
TARGETS = """at most 0.9 x pdsh's time and 1.0 x its CPU time; for one more command, 0.15 x.
With ssh's default key exchange, the first target cannot be reached: the key exchange takes nearly
all of the time, for every launcher, and plain `ssh &` is the lower bound"""


class Sample(NamedTuple):
    """One fan-out."""

    seconds: float  # until the last host had answered
    client_ms: float  # of processor time, per host


Measure = Callable[[], Sample]


def main() -> None:
    runs = times_or(5)
    if "BENCH_IN_BOX" not in os.environ:
        start_in_box()
        return
    adopt_orphans()
    tables = []
    for title, counts, options in (
        ("With ssh as it is", HOSTS, ""),
        (f"With a cheaper key exchange for all (`{CHEAP}`)", HOSTS[-1:], CHEAP),
    ):
        rows = []
        for count in counts:
            rows += summarise(count, in_turns(launchers(count, options), runs, warm_up=1))
        head = ["hosts", "by", "median s", "min-max s", "x pdsh", "client ms per host", "x pdsh"]
        tables.append(f"{title}:\n\n{render(head, rows)}")
    about = f", {ssh_version()}, medians of {runs}"
    write_section("fanout", about, *tables, f"Targets for ours on 64 hosts: {TARGETS}.")


def start_in_box() -> None:
    """Run this again on a cluster in a box, whose hosts have an empty home."""
    install_clush()  # there is no way from the box to other networks
    os.environ["BENCH_IN_BOX"] = "1"
    with cluster(HOSTS[-1]) as is_up:
        if not is_up:
            sys.exit(1)
        subprocess.run([CLUSTER, "run", "login", sys.executable, *sys.argv], check=True)


def names(count: int) -> list[str]:
    return [f"node{number}" for number in range(1, count + 1)]


def launchers(count: int, options: str) -> dict[str, Measure]:
    """Name -> one measurement."""
    nodes = names(count)
    ssh = f"{os.environ['SSH_OPTS']} {options}"
    environment = {**os.environ, "SSH_OPTS": ssh, "PDSH_SSH_ARGS_APPEND": ssh}
    limit = ["-f", str(count), "-w", ",".join(nodes)]

    def measure(*command: str) -> Measure:
        return lambda: start(command, count, environment)

    ours = [sys.executable, "-c", OURS]
    measures = {
        "ours": measure(*ours, "1", *nodes),
        f"ours, {MORE} more": measure(*ours, str(1 + MORE), *nodes),
        "pdsh": measure("pdsh", "-R", "ssh", *limit, "echo started"),
        "plain `ssh &`": measure("bash", "-c", PLAIN, "bash", *nodes),
        "plain `setsid ssh &`": measure("bash", "-c", SESSIONS, "bash", *nodes),
    }
    if CLUSH.exists():
        measures["clush"] = measure(str(CLUSH), "-o", ssh, *limit, "echo started")
    return measures


def start(command: tuple[str, ...], count: int, environment: dict[str, str]) -> Sample:
    """Run a fan-out to its end."""
    before, began, answers = client_ms(), time.monotonic(), []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        answers = [time.monotonic() for line in launcher.stdout if b"started" in line]
    reap_orphans()
    if len(answers) != count:
        raise RuntimeError(f"{command[0]}: {len(answers)} of {count} hosts have answered")
    return Sample(answers[-1] - began, (client_ms() - before) / count)


def client_ms() -> float:
    """Processor time of all that were below us and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (used.ru_utime + used.ru_stime)


def reap_orphans() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


def summarise(count: int, samples: dict[str, list[Sample]]) -> list[list[str]]:
    more = samples.pop(f"ours, {MORE} more")
    samples["ours, one more command"] = [
        Sample(*((all_ - first) / MORE for all_, first in zip(*pair, strict=True)))
        for pair in zip(more, samples["ours"], strict=True)
    ]
    rows = []
    for name, ours in samples.items():
        seconds, client = zip(*ours, strict=True)
        pairs = list(zip(ours, samples["pdsh"], strict=True))
        rows.append(
            [
                str(count),
                name,
                *spread(seconds),
                f"{statistics.median(one.seconds / pdsh.seconds for one, pdsh in pairs):.2f}",
                f"{statistics.median(client):.1f}",
                f"{statistics.median(one.client_ms / pdsh.client_ms for one, pdsh in pairs):.3f}",
            ]
        )
    return rows


def ssh_version() -> str:
    told = subprocess.run(["ssh", "-V"], stderr=subprocess.PIPE, text=True).stderr
    return told.split(",")[0].split()[0]


def install_clush() -> None:
    """ClusterShell in a throw-away environment of its own."""
    if CLUSH.exists():
        return
    folder = CLUSH.parents[1]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    told = subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", "ClusterShell"])
    if told.returncode != 0:
        print("clush is left out", file=sys.stderr)


if __name__ == "__main__":
    main()
