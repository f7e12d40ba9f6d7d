"""Measure how the cost of a run grows with the number of nodes: `make bench-scale`, or
python bench/scale.py [NODES ...].

One program is real at a time: the agent of node rank 0, with its supervisor and one rank
(scale_agent.py), or the launcher over ssh (scale_ssh.py). The nodes at the other end speak the
product's own messages. Processor time is the real program's alone, except where a table says
otherwise; elapsed times are not given, because all nodes share this machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import scale_agent
import scale_alone
import scale_picture
import scale_ssh
from harness import render, write_section
from scale_cost import Cost, exponent

SIZES = (4, 16, 64, 256, 1024)
C10D = Path(__file__).with_name("scale_c10d.py")
MOST_C10D = 64  # nodes; 128 took 16 s of processor time once, and more than 300 s another time
# What is measured, by the program whose processor time it is.
AGENT, LAUNCHER, RANK = "agent of node rank 0", "launcher", "each rank, in the self-test"
TOGETHER = "all nodes together"
STORE = "torch's store, for one rank of each node"
OURS, TORCHRUNS = "check-in", "torchrun's rendezvous (c10d)"
Key = tuple[str, str]  # a program, and an event


def measure(number: int) -> Iterator[tuple[Key, Cost]]:
    """Yield what each event costs with this many nodes."""
    agents, all_nodes = scale_agent.measure_check_in(number)
    yield (AGENT, "check-in"), agents
    for event, cost in scale_agent.measure(number):
        yield (AGENT, event), cost
    yield (AGENT, STORE), scale_agent.measure_store(number)

    yield (LAUNCHER, "--dry-run"), scale_alone.dry_run(number)
    for event, cost in scale_ssh.measure(number):
        yield (LAUNCHER, event), cost
    for event, cost in scale_alone.measure_selftest(number):
        yield (RANK, event), cost

    yield (TOGETHER, OURS), all_nodes
    if number <= MOST_C10D:
        yield (TOGETHER, TORCHRUNS), measure_c10d(number)


def measure_c10d(number: int) -> Cost:
    """Return what torchrun's own rendezvous costs all nodes together."""
    command = [sys.executable, str(C10D), str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cost(float(done.stdout))


def row(event: str, sizes: Sequence[int], costs: dict[int, Cost]) -> list[str]:
    """Return the cells of one event; a size that was not run has a dash."""
    cells = [f"{costs[size].cpu_s:.2f}" if size in costs else "-" for size in sizes]
    last = exponent([(size, costs[size].cpu_s) for size in sizes if size in costs][-2:])
    messages = costs[sizes[-1]].messages if sizes[-1] in costs else 0
    return [event, *cells, last, f"{messages:,}" if messages else "-"]


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [*SIZES]
    found: dict[Key, dict[int, Cost]] = defaultdict(dict)
    for number in sizes:
        for key, cost in measure(number):
            found[key][number] = cost
            print(number, *key, cost, file=sys.stderr, flush=True)

    tables = []
    for program in dict.fromkeys(program for program, _ in found):
        head = [*(f"{number} nodes, CPU s" for number in sizes), "exponent", "messages"]
        rows = [row(event, sizes, found[of, event]) for of, event in found if of == program]
        tables.append(render([program, *head], rows))

    write_section("scale", f", {sizes[-1]} nodes at most", *tables)
    scale_picture.draw()


if __name__ == "__main__":
    main()
