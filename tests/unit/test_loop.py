"""The fan-out's event loop: the lines and exits of its children, and the end of the loop itself."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agents import PATIENCE_S, ROOT, eventually, run_program
from job_tools import USUAL, make_tool

from launcher import processes
from launcher.fanout.connection import Connection
from launcher.fanout.loop import Loop
from launcher.fanout.nodes import Gap, Silence
from launcher.fanout.ssh import TRIES, SshFanout
from launcher.fanout.swap import exclude_ill, find_ill, replace_ill
from launcher.plan.plan import NodePlan, Plan
from launcher.record import run_json
from launcher.record.restart import Restart
from launcher.wire import limits
from launcher.wire.messages import Fault, Report


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code that needs its own main thread and signals."""
    head = "from launcher.fanout.loop import Child, Loop\n"
    return run_program([sys.executable, "-c", head + code], ROOT)


def test_a_child_that_ends_after_the_loop_is_not_heard() -> None:
    """Its SIGCHLD would be written to a closed socket: a traceback, or a byte in another file."""
    ended = run(
        "import signal, time\n"
        "loop = Loop({}, most_children=1)\n"
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


def test_what_is_sent_to_our_session_does_not_reach_a_child() -> None:
    """PBS signals every process of a job's session, and ranks save through these connections."""
    ended = run(
        "loop = Loop({}, most_children=1)\n"
        "words, command = [], ['sh', '-c', 'ps -o sid= -p $$']\n"
        "child = Child(loop, command, lambda data, _: words.append(data))\n"
        "while child.code is None:\n"
        "    loop.wait(1.0)\n"
        "print(int(b''.join(words)) == child._process.pid)\n"
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_the_limit_of_open_files_allows_a_second_connection_to_each_node() -> None:
    ended = run(
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "Loop({}, most_children=100)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * 4 * 100)\n"
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")


STOPS = """
import os, signal
loop = Loop({}, most_children=1)
child = Child(loop, ["sleep", "600"], lambda *_: None)
os.kill(child._process.pid, signal.SIGSTOP)
print(child._process.pid, flush=True)
"""


def test_a_child_that_is_stopped_ends_at_once() -> None:
    ended = run(f"{STOPS}child.terminate()\nwhile child.code is None:\n    loop.wait(1.0)\n")
    assert ended.returncode == 0, ended.stderr


def test_a_child_that_is_stopped_does_not_outlive_a_launcher_that_is_killed() -> None:
    ended = run(f"{STOPS}os.kill(os.getpid(), signal.SIGKILL)\n")
    eventually(lambda: processes.start_ticks(int(ended.stdout)) is None, "the child")


# --- connections that end -------------------------------------------------------------------------

# Says hello as n0. As another node, writes $SAYS to stderr or, like ssh, to the file after -E.
DROPS = """
[[ $* != *" -G "* ]] || exit 1
if [[ $* == *" n0 "* ]]; then
  printf '\\002token.0 {"Hello":{"address":"10.0.0.1"}}\\n'
  exec cat
fi
log=/dev/stderr
[[ -z $IN_LOG ]] || while (($#)); do [[ $1 != -E ]] || log=$2; shift; done
[[ -z $SAYS ]] || printf '%b' "$SAYS" >>"$log"
exit 255
"""
BY_BASTION = (
    "kex_exchange_identification: Connection closed by remote host\\r\\n"
    "Connection closed by UNKNOWN port 65535\\r\\n"
)


@pytest.mark.parametrize("in_log", ["", "1"], ids=["stderr", "log"])
@pytest.mark.parametrize(
    ("says", "is_dropped"),
    [
        ("", True),  # ssh -q
        (BY_BASTION, True),
        ("kex_exchange_identification: read: Connection reset by peer\\r\\n", True),
        ("ssh: connect to host n1 port 22: Connection refused\\r\\n", True),
        ("Connection timed out during banner exchange\\r\\n", True),
        ("Connection to 10.0.0.1 port 22 timed out\\r\\n", True),
        ("client_loop: send disconnect: Broken pipe\\r\\n", True),
        (f'Load key "/h/.ssh/k": Permission denied\\r\\n{BY_BASTION}', True),
        ("me@n1: Permission denied (publickey).\\r\\n", False),
        (f"me@bastion: Permission denied (publickey).\\r\\n{BY_BASTION}", False),
        ("Access denied by pam_slurm_adopt: no active jobs\\nConnection closed by n1\\n", False),
        ("Received disconnect from n1 port 22:2: Too many authentication failures\\r\\n", False),
        ("@ WARNING: ... @\\r\\nHost key verification failed.\\r\\n", False),
        (f"ssh: Could not resolve hostname bastion: again\\r\\n{BY_BASTION}", False),
        (
            f"channel 0: open failed: connect failed: Name or service not known\\n{BY_BASTION}",
            False,
        ),
        ("command-line: line 0: Bad configuration option: nosuchoption\\r\\n", False),
    ],
)
def test_only_a_dropped_connection_is_worth_another_try(
    tools: Path, monkeypatch: pytest.MonkeyPatch, says: str, is_dropped: bool, in_log: str
) -> None:
    make_tool(tools / "ssh", DROPS)
    monkeypatch.setenv("SAYS", says)
    monkeypatch.setenv("IN_LOG", in_log)
    loop = Loop(os.environ, 1)
    node = Connection(loop, "n1", connect_s=1, token="token.0", show=lambda *_: None)
    while node.code is None:
        loop.wait(1.0)
    node.start_probe()
    eventually(lambda: not node.may_come, "the cause")
    loop.close()
    assert node.is_dropped == is_dropped
    assert node.last_words == says.rpartition("\\n")[0].rpartition("\\n")[2].removesuffix("\\r")


def test_connections_that_are_replaced_leave_no_file_open(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(tools / "ssh", DROPS)
    monkeypatch.setenv("SAYS", BY_BASTION)
    monkeypatch.setenv("IN_LOG", "1")
    monkeypatch.setattr(limits, "CONNECT_AGAIN_S", 0.01)
    two = [NodePlan("n0"), NodePlan("n1")]
    launch = SshFanout(replace(PLAN, nodes=two, num_nodes=2, environ=os.environ))
    launch.token = "token"
    launch.loop = Loop(os.environ, 8)
    made: list[Connection] = []

    def connect_node(place: int) -> Connection:
        made.append(SshFanout.connect_node(launch, place))
        return made[-1]

    def count_files() -> int:
        files = map(os.path.realpath, Path("/proc/self/fd").iterdir())
        return sum("/pipe:" in file or "/memfd:ssh" in file for file in files)

    monkeypatch.setattr(launch, "connect_node", connect_node)
    before = count_files()
    launch.connect_all(time.monotonic() + PATIENCE_S)
    assert len(made) == 1 + TRIES
    assert count_files() == before + 4  # of n0: three pipes, and the file for ssh's messages
    launch.disconnect()
    assert count_files() == before
    while made[0].code is None:
        launch.loop.wait(1.0)
    launch.loop.close()


# --- nodes that were silent -----------------------------------------------------------------------


Connect = Callable[[str], Connection]


@pytest.fixture
def connect(tools: Path) -> Iterator[Connect]:
    make_tool(tools / "ssh", "exec cat")  # it exits when its stdin closes
    loop = Loop(os.environ, 2)

    def begin(node: str) -> Connection:
        return Connection(loop, node, connect_s=1, token="token.0", show=lambda *_: None)

    yield begin
    for child in loop.children:
        child.close_input()
    while any(child.code is None for child in loop.children):
        loop.wait(1)
    loop.close()


@pytest.mark.parametrize(
    ("silent_s", "is_blamed"), [(limits.SILENCE_S * 0.8, True), (limits.GAP_S - 1, False)]
)
def test_a_node_that_is_silent_at_the_first_end_is_blamed(
    connect: Connect, silent_s: float, is_blamed: bool
) -> None:
    cut, other = connect("node1"), connect("node2")
    silence = Silence([cut, other], limits.SILENCE_S)
    cut.heard = time.monotonic() - silent_s  # TCP has yet to send its packets again
    silence.blame_recent()
    assert bool(cut.lost) == cut.is_silent == is_blamed
    cut.heard -= limits.SILENCE_S
    assert silence.find_lost() == [cut]  # nothing waits for it any longer
    assert not other.lost


def test_only_the_far_sides_own_messages_are_signs_of_life(connect: Connect) -> None:
    node = connect("node1")
    node.is_started, node.heard = True, 0.0
    node.read_output(b"step 1\n", False)  # a rank's output
    node.read_output(b"a warning\n", True)
    assert node.heard == 0.0
    node.read_output(b"step 2\n\x02token.0 \n", False)
    assert node.heard > 0.0 and node.gap.seconds > 0.0


@pytest.mark.parametrize(
    ("ago_s", "is_blamed"), [(limits.RECALL_S - 1, True), (limits.RECALL_S + 1, False)]
)
def test_a_node_that_was_silent_just_before_is_blamed(
    connect: Connect, ago_s: float, is_blamed: bool
) -> None:
    cut = connect("node1")
    cut.gap = Gap(time.monotonic() - ago_s, 9.0)
    Silence([cut], limits.SILENCE_S).blame_recent()
    assert cut.lost == ("no heartbeat for 9 s (network down?)" if is_blamed else "")


# --- nodes that are swapped for spares before the start -------------------------------------------


NODES = [NodePlan(f"me@n{number}", 2) for number in range(5)]
PLAN = Plan(
    program="p",
    fanout="ssh",
    command="again",
    root=Path("/p"),
    python="python",
    directory=Path("/d"),
    log_dir=Path("logs"),
    run_id="r",
    words=["own.py"],
    **USUAL,
)
FIVE = replace(PLAN, nodes=NODES, num_nodes=3, num_spares=2, min_nodes=3, master_addr="n0")
NAMED = replace(FIVE, master_addr="10.0.0.1", environ={"MASTER_ADDR": "10.0.0.1"})
IN_SLURM = replace(FIVE, nodes=(), hosts="n[0-4]")
ILL = Fault("gpu-unhealthy", "an Xid error", "reset it")
SLOW = Fault("gpu-slow", "throttled", "cool it", warns=True)


def report(number: int, *faults: Fault) -> Report:
    return Report(number, 5, 2, f"n{number}", "r", {}, {}, faults=faults)


def test_a_node_is_ill_that_does_not_answer_has_a_fault_or_was_lost_twice(tmp_path: Path) -> None:
    plan = replace(FIVE, log_dir=tmp_path)
    reports = [report(0, SLOW), report(1, ILL), None, report(3), report(4)]
    assert find_ill(plan, reports) == {1, 2}
    assert find_ill(replace(plan, is_strict=True), reports) == {0, 1, 2}
    lost = [("n3.cluster", "n4"), ("n3.cluster",)]
    restarts = [
        Restart(number, "link-lost", "x", "y", -1, -1, 0.0, lost=hosts)
        for number, hosts in enumerate(lost, 1)
    ]
    run_json.update(tmp_path / plan.run_id, restarts=restarts)
    assert find_ill(plan, reports) == {1, 2, 3}


@pytest.mark.parametrize(
    ("ill", "over_ssh", "in_slurm", "told"),
    [
        ({1}, "n0 n3 n2 n4", "n0,n2,n3,n4", "n3 replaces n1"),
        ({0, 2}, "n3 n1 n4", "n1,n3,n4", "n3 replaces n0; n4 replaces n2"),
        ({1, 3}, "n0 n4 n2", "n0,n2,n4", "n3 cannot be a spare; n4 replaces n1"),
        ({4}, "n0 n1 n2 n3", "n0,n1,n2,n3", "n4 cannot be a spare"),
        ({0, 1, 2}, "", "", ""),
    ],
)
def test_spares_take_the_places_of_ill_nodes(
    ill: set[int], over_ssh: str, in_slurm: str, told: str
) -> None:
    swapped, left_out = replace_ill(FIVE, ill), exclude_ill(IN_SLURM, ill)
    assert (swapped is None) == (left_out is None) == (told == "")
    if swapped is not None and left_out is not None:
        (plan, lines), (job, its_lines) = swapped, left_out
        assert " ".join(node.name for node in plan.nodes).replace("me@", "") == over_ssh
        assert (job.hosts, job.left_out) == (in_slurm, [f"n{one}" for one in sorted(ill)])
        assert (plan.master_addr, job.master_addr) == (over_ssh[:2], in_slurm[:2])
        for each, number in ((plan, len(plan.nodes)), (job, len(in_slurm.split(",")))):
            assert (each.num_nodes, each.num_agents) == (3, number)
        assert "; ".join(lines).replace("me@", "") == "; ".join(its_lines) == told


def test_a_master_that_was_named_is_not_swapped() -> None:
    in_slurm = replace(NAMED, nodes=(), hosts="n[0-4]")
    for swapped in (replace_ill(NAMED, {1}), exclude_ill(in_slurm, {1})):
        assert swapped is not None and swapped[0].master_addr == "10.0.0.1"
    assert replace_ill(NAMED, {0}) is exclude_ill(in_slurm, {0}) is None
