"""Beats, and scripts without them: whose silence counts, where each rank is, what differs."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import AGENT, LOOPS, PATIENCE_S, ROOT, Run, eventually, world, written
from ports import free_port

from distributed import heartbeat
from distributed.heartbeat import Beat, Heart, beat
from launcher.agent.diagnosis import collectives, stuck
from launcher.agent.diagnosis.collectives import find_mismatches
from launcher.agent.diagnosis.stuck import STOPPED, find_awaited, find_straggler
from launcher.agent.node_ranks import Heartbeats, NodeRanks
from launcher.agent.query import Query
from launcher.agent.rank.optimizer_steps import CountedHeart, StepCounter
from launcher.text import name_groups
from launcher.typed_json import MessageError, encode
from launcher.wire import messages
from launcher.wire.messages import NodeStacks
from launcher.wire.states import Calls, Collective, RankState


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "told", "limit"),
    [
        pytest.param(30, ", at step 30 ", 20, marks=pytest.mark.another_torch("hang")),
        (0, ", before its first step; the limit", 30),  # counted from the start of the ranks
    ],
)
def test_the_rank_that_hangs_is_named_with_its_step(
    runs: list[Run], last: int, told: str, limit: int
) -> None:
    """`make prove PART=hangs` tests other kinds of scripts."""
    run = Run(["--nproc-per-node=3", LOOPS, "plain", str(last), "1"], HANG_SECONDS=str(limit))
    runs.append(run)
    err = run.finish()
    run.assert_gone()
    block = err[err.index("FAILED") :]
    assert block.startswith("FAILED   rank 1 (local rank 1, ") and "[rank-stuck]" in block
    assert told in block
    assert "no progress reported" in block and f"; the limit, HANG_SECONDS, is {limit} s" in block
    assert "in read_batch" in block.splitlines()[2]
    assert run.process.returncode == 137


@pytest.mark.slow
def test_a_silence_is_told_once_and_ends_nothing() -> None:
    """The agent's limit is shortened to 2 s."""
    short = "from distributed import heartbeat as h, limits\n"
    short += "limits.FIRST_SILENCE_S = 2.0; h.LIMIT_OF_LONGEST = 0\n"
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{short}"
    start += "from launcher.agent.supervisor import main\nsys.exit(main())"
    command = [sys.executable, "-c", start, "--nproc-per-node=2", LOOPS, "plain", "5", "1"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert run.stderr is not None
    told = ""
    while "read_batch" not in told.partition(", after step 5: ")[2]:
        line = run.stderr.readline()
        assert line, told
        told += line
    time.sleep(5)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, rest = run.communicate(timeout=PATIENCE_S)
    text = told + rest
    assert text.count(", after step 5: ") == 1  # on a busy machine, others may precede it
    assert ", after step 5: rank 1 is behind; kill -QUIT " in text


WAITS_FOR_THE_END_OF_ANOTHER = """
import os, time
from pathlib import Path
from typing import Any

file = Path("process")
if os.environ["RANK"] == "1":
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
else:
    while not file.exists() or Path("/proc", file.read_text()).exists():
        time.sleep(0.05)
    print("waits", flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_among_the_stacks_a_rank_that_has_exited_says_so(tmp_path: Path) -> None:
    script = written(tmp_path / "x.py", WAITS_FOR_THE_END_OF_ANOTHER)
    command = [*AGENT, "--nproc-per-node=2", str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == "waits\n"
        run.send_signal(signal.SIGQUIT)
        told = ""
        while "rank 1: " not in told:
            line = run.stderr.readline()
            assert line, told
            told += line
        run.terminate()
    assert told.endswith("rank 1: exited with code 0\n")


def test_what_another_node_tells_is_shown_harmlessly() -> None:
    with pytest.raises(MessageError):
        messages.read('{"NodeStacks":{"ranks":[{"rank":"x","frames":["a.py:1 in f"]}]}}')
    told = messages.read('{"NodeStacks":{"ranks":[{"rank":7,"frames":["\\u001b[2Ja.py:1 in f"]}]}}')
    shown: list[str] = []
    ranks = NodeRanks([], Heartbeats(1), 0, "here")
    query = Query(ranks, ["here", "there"], shown.append, None)
    query._answers[0] = NodeStacks([])
    there: Any = {1: Peer()}
    query.receive(1, told, there)
    assert query.on_time(there) is None
    assert shown[0].splitlines()[1] == "  rank 7: \\x1b[2Ja.py:1 in f"


@pytest.mark.slow
def test_a_rank_that_hangs_after_the_first_node_has_finished_is_named(
    runs: list[Run], tmp_path: Path
) -> None:
    script = written(
        tmp_path / "x.py",
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from distributed.heartbeat import beat\n"
        "beat(7)\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(1000)\n",
    )
    port = free_port()
    for node in (0, 1):
        runs.append(Run([*world(port, node), str(script)], HANG_SECONDS="12"))
    err = runs[0].finish()
    assert "FAILED   rank 1 (" in err and "[rank-stuck]" in err and "at step 7 " in err
    runs[1].finish()


class Peer:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_an_answer_that_comes_too_late_does_not_prevent_the_next_request() -> None:
    peer, shown = Peer(), list[str]()
    there: Any = {1: peer}
    ranks = NodeRanks([], Heartbeats(1), 0, "here")
    query = Query(ranks, ["here", "there"], shown.append, None)
    for request in (1, 2):
        query.ask()
        query.on_time(there)
        assert len(peer.sent) == request
        query._end.set_within(0.0)  # the other node has not answered in time
        query.on_time(there)
        assert len(shown) == request and "there: no answer" in shown[-1]
        query.receive(1, NodeStacks([]), there)


# --- which rank is stuck --------------------------------------------------------------------------


def rank(
    number: int, step: int, silence_s: float = 0.0, *, marks: int = 0, is_stopped: bool = False
) -> RankState:
    return RankState(number, (step, marks), silence_s > 60, is_stopped, silence_s)


def straggler_of(*nodes: list[RankState] | None) -> RankState | None:
    return find_straggler([None if ranks is None else find_straggler(ranks) for ranks in nodes])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [  # the ranks of each node; the rank, and whether it is stuck
        ([[rank(0, 5), rank(1, 5)]], (0, False)),
        ([[rank(0, 5, 61), rank(1, 4, 61)]], (1, True)),
        ([[rank(0, 5, 61), rank(1, 4, 1)]], (1, False)),  # the rank they wait for is alive
        ([[rank(0, 4, 61, marks=2), rank(1, 4, 61, marks=1)]], (1, True)),
        ([[rank(0, 4, 61), rank(1, 4, 70)]], (1, True)),  # of the equals, the longest silent
        ([[rank(0, 4, 70), rank(1, 4, 61, is_stopped=True)]], (1, True)),  # it cannot continue
        ([[rank(0, 4, 61), rank(1, 4, 1)]], (0, False)),  # one of the equals still moves
        ([[rank(0, -1), rank(1, 9, 61)]], (0, False)),  # a rank that never beats is not watched
        ([[rank(0, 5, 61)], [rank(4, 3, 61)]], (4, True)),
        ([[rank(0, 3, 61)], [rank(4, 3, 61), rank(5, 3, 1)]], (0, False)),
        ([[rank(0, 5, 61)], None], None),  # the other node's ranks may be further behind
        ([], None),
    ],
)
def test_the_rank_that_holds_up_the_run(
    nodes: list[list[RankState] | None], expected: tuple[int, bool] | None
) -> None:
    found = straggler_of(*nodes)
    assert (found and (found.rank, found.is_stuck)) == expected


REDUCE = ["torch/distributed/distributed_c10d.py:9 in all_reduce", "x.py:4 in step"]
BACKWARD = ["torch/autograd/graph.py:841 in _engine_run_backward", "x.py:3 in step"]
READ, ITEM = ["x.py:7 in read"], ["x.py:9 in item"]


@pytest.mark.parametrize(
    ("nodes", "stacks", "odd"),
    [
        ([[rank(0, 5, 70), rank(1, 5, 61)]], [BACKWARD, READ], 1),
        ([[rank(0, 5, 70)], [rank(1, 5, 61), rank(2, 5, 61)]], [REDUCE, REDUCE, READ], 2),
        ([[rank(0, 5), rank(1, 5)]], [BACKWARD, REDUCE], None),  # both wait
        ([[rank(0, 5), rank(1, 5)]], [REDUCE, REDUCE], None),
        # It has skipped a collective, and waits in the next.
        ([[rank(number, 5) for number in range(4)]], [REDUCE, BACKWARD, REDUCE, REDUCE], 1),
        ([[rank(0, 5), rank(1, 5), rank(2, 5)]], [ITEM, ITEM, READ], 2),
        ([[rank(0, 5), rank(1, 5)]], [REDUCE, []], 1),  # it does not answer
        ([[rank(0, 5), rank(1, 5)]], [], None),
        ([[rank(0, 5), rank(1, 4)]], [ITEM, REDUCE], 1),  # progress comes first
        ([[rank(0, 5)], [rank(1, 4)]], [ITEM, READ], 1),
        ([[rank(0, 5, 70), rank(1, 5, is_stopped=True)]], [ITEM, [STOPPED]], 1),
    ],
)
def test_the_rank_that_the_others_wait_for(
    nodes: list[list[RankState]], stacks: list[list[str]], odd: int | None
) -> None:
    """Of the ranks furthest behind, it is the one that is not where the others wait."""
    straggler = straggler_of(*nodes)
    assert straggler is not None
    assert find_awaited(straggler, dict(enumerate(stacks))) == odd


def test_a_stack_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack is written in two parts, as on a busy machine."""
    file = written(tmp_path / "rank.stack", "Thread 0x1\n")

    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            with file.open("a") as stack:
                stack.write("Thread 0x2\n")

    monkeypatch.setattr(time, "sleep", sleep)
    stuck.wait_for_stacks({file: 0}, 5)
    assert file.read_text() == "Thread 0x1\nThread 0x2\n"
    assert len(looks) >= 8


# --- collectives that do not match ----------------------------------------------------------------


def call(
    number: int, is_done: bool = True, operation: str = "all_reduce", size: int = 8
) -> Collective:
    return Collective("default_pg", number, operation, f"[{size}] Float", is_done)


DONE = [call(1), call(2)]


IN_3 = [*DONE, call(3, False)]
IN_PAIR = [*DONE, Collective("group 3", 5, "broadcast", "[1] Long", False)]
CALL = "all_reduce of [8] Float"


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ([DONE, DONE], ""),
        ([IN_3, IN_3], ""),  # the collective began just now
        ([IN_3, DONE, IN_3], f"ranks 0, 2 in #3 {CALL}; rank 1 last called #2 {CALL}"),
        ([[call(1, False)], []], f"rank 0 in #1 {CALL}; rank 1 called none"),
        (
            [IN_3, [*DONE, call(3, False, "broadcast")]],
            f"the ranks differ: rank 0 #3 {CALL}; rank 1 #3 broadcast of [8] Float",
        ),
        (
            [[call(7, False)], [call(7, False, size=9)]],
            f"the ranks differ: rank 0 #7 {CALL}; rank 1 #7 all_reduce of [9] Float",
        ),
        ([[call(7, False, "all_gather")], [call(7, False, "all_gather", 9)]], ""),
        ([IN_PAIR, IN_PAIR, DONE], ""),  # only the ranks of a group are compared
    ],
)
def test_what_does_not_match(told: list[list[Collective]], line: str) -> None:
    found = find_mismatches({rank: Calls(calls) for rank, calls in enumerate(told)})
    assert found == ([f"default_pg: {line}"] if line else [])


def test_the_newest_of_each_group_are_told(tmp_path: Path) -> None:
    calls = collectives.newest(call(number) for number in range(1, 100))
    assert [one.number for one in calls.calls] == [*range(80, 100)]
    file = written(tmp_path / "rank_3.collectives", encode(calls))
    assert collectives.read({3: file, 4: tmp_path / "none"}, 0.05) == {3: calls}


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(30):
    dist.all_reduce(torch.ones(4))
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
parameter.grad = torch.ones(1)
optimizer.step()
print(f"ready {rank}", flush=True)
dist.broadcast(torch.ones(4), 0) if rank == 1 else dist.all_reduce(torch.ones(6))
dist.barrier()
"""


@pytest.mark.slow
def test_a_hang_is_ended_with_the_collectives_that_differ(runs: list[Run], tmp_path: Path) -> None:
    script = written(tmp_path / "differs.py", SCRIPT)
    options = ["--nproc-per-node=3", str(script)]
    runs.append(Run(options, TORCH_FR_BUFFER_SIZE="200", HANG_SECONDS="20"))
    err = runs[0].finish()
    runs[0].assert_gone()
    assert "[rank-stuck]" in err
    wanted = (
        "stacks   default_pg: the ranks differ: ranks 0, 2 #31 all_reduce of [6] Float; "
        "rank 1 #31 broadcast of [4] Float\n"
    )
    assert wanted in err


# --- beats: what a rank writes, and when its silence counts ---------------------------------------


NEVER = Beat()


AT_EXIT = """
import faulthandler, sys, threading, time
def work():
    while sys._current_frames()[main].f_code.co_name != "_shutdown":
        time.sleep(0.01)
    faulthandler.dump_traceback(all_threads=True)
main = threading.main_thread().ident
threading.Thread(target=work).start()
"""


@pytest.fixture
def beats(tmp_path: Path) -> Iterator[Heartbeats]:
    """The agent's records of two ranks, of which this process is the second."""
    records = Heartbeats(2)
    by_hand = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    by_hand |= {"HEARTBEAT_FILE": records.name(1), "MASTER_ADDR": "x"}
    os.environ |= {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "rank_1.json"), **by_hand}
    heartbeat._heart.cache_clear()
    yield records
    heartbeat._heart.cache_clear()


def test_a_beat_writes_this_ranks_record_alone(beats: Heartbeats) -> None:
    assert beats.read(1) == NEVER and beats.read(1).silence_s == 0
    before = time.monotonic()
    beat(3)
    assert beats.read(0) == NEVER
    record = beats.read(1)
    assert (record.step, record.saved) == (3, -1)
    assert before <= record.time <= time.monotonic()
    beat(4, saved=2)
    beat(5)
    assert (beats.read(1).step, beats.read(1).saved) == (5, 2)
    assert beats.reached() == (2, 5)
    beats.clear()
    assert beats.read(1) == NEVER
    assert beats.reached() == (2, 5)


def test_progress_counts_the_beats_of_a_step(beats: Heartbeats) -> None:
    seen = []
    for step in (1, 1, 2, None, 2, 3):
        beat(step)
        seen.append(beats.read(1).progress)
    assert seen == [(1, 0), (1, 1), (2, 0), (2, 0), (2, 1), (3, 0)]


def test_the_limit_comes_from_the_longest_silence(beats: Heartbeats, clock: list[float]) -> None:
    limits = []
    for step, seconds in ((7, 1), (8, 1), (9, 2), (10, 9), (11, 1)):
        clock[0] += seconds
        beat(step)
        limits.append(beats.read(1).limit_s)
    assert limits == [600, 600, 60, 90, 90]


def test_the_limit_is_the_scripts_own_else_the_variable(beats: Heartbeats) -> None:
    os.environ["HANG_SECONDS"] = "20"
    limits = []
    for given in (None, 5, None):
        beat(1, hang_seconds=given)
        limits.append((beats.read(1).limit_by, beats.read(1).limit_s))
    assert limits == [(1, 20), (2, 5), (2, 5)]


def test_steps_are_counted_until_the_script_tells_its_own(
    beats: Heartbeats, tmp_path: Path
) -> None:
    """A rank that only saves reports no steps; unless they are counted, it seems to be behind."""
    place = heartbeat.find_record(beats.name(1))
    assert place is not None
    count = StepCounter(CountedHeart(*place, tmp_path / "x.stack"))
    first, other = (torch.optim.SGD([torch.ones(1)], lr=1) for _ in range(2))
    assert beats.read(1).progress == (-1, 0) and not beats.are_counted()
    seen = []
    for told in (first, {"saved": 1}, other, other, first, {"step": 7}, first, {"step": 8}, first):
        beat(**told) if isinstance(told, dict) else count(told, (), {})
        record = beats.read(1)
        seen.append((*record.progress, record.saved, beats.are_counted()))
    counted = [(1, 0, -1, True), (1, 0, 1, True), (1, 1, 1, True), (2, 0, 1, True), (2, 1, 1, True)]
    assert seen == [*counted, *[(7, 0, 1, False)] * 2, *[(8, 0, 1, False)] * 2]


@pytest.mark.parametrize("beats_itself", [False, True])
@pytest.mark.parametrize("hang_seconds", ["", "20"])
def test_the_silence_before_the_first_step_counts_from_the_start(
    beats: Heartbeats, tmp_path: Path, clock: list[float], hang_seconds: str, beats_itself: bool
) -> None:
    """A slow start may be healthy: without the user's own limit, it is only reported."""
    os.environ["HANG_SECONDS"] = hang_seconds
    place = heartbeat.find_record(beats.name(1))
    assert place is not None
    CountedHeart(*place, tmp_path / "x.stack")
    if beats_itself:
        beat()
    record = beats.read(1)
    assert (record.step, record.time) == (-1, clock[0])
    assert (record.limit_s, record.ends_run) == (float(hang_seconds or 600), bool(hang_seconds))
    assert not beats.are_counted()
    assert beats.read(0).silence_s == 0  # a program whose steps are not counted is not watched


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.usefixtures("beats")
def test_a_beat_costs_under_10_microseconds() -> None:
    fastest = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for step in range(1000):
            beat(step)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 10e-3


def test_without_an_agent_a_beat_does_nothing() -> None:
    os.environ.pop("HEARTBEAT_FILE", None)
    heartbeat._heart.cache_clear()
    beat(1)
    heartbeat._heart.cache_clear()


def test_a_stack_of_python_alone_is_shown_with_what_another_thread_does(tmp_path: Path) -> None:
    """At exit, Python waits for the threads of the script."""
    script, stack = tmp_path / "script.py", tmp_path / "rank_0.stack"
    script.write_text(AT_EXIT)
    with stack.open("w") as file:
        subprocess.run([sys.executable, script], stderr=file)
    wait, *more = stuck.read_stack(stack)
    assert re.fullmatch(r"threading\.py:\d+ in \w+", wait)
    assert more[-1] == f"another thread: {script}:6 in work"


def test_a_stack_shows_the_names_of_files_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "Grüße 模型 😀"
    folder.mkdir()
    script, stack = folder / "wörk.py", folder / "rank_0.stack"
    script.write_text("import faulthandler\nfaulthandler.dump_traceback()\n")
    with stack.open("w") as file:
        subprocess.run([sys.executable, script], stderr=file)
    assert "\\xfc" in stack.read_text()  # faulthandler escapes them
    assert stuck.read_stack(stack) == [f"{script}:2 in <module>"]


@pytest.mark.parametrize("name", [r"a\xfg", r"a\x1b", r"a\udcfc", r"a\U0011ffff", r"a\n"])
def test_a_stack_keeps_what_is_no_printable_character(tmp_path: Path, name: str) -> None:
    stack = tmp_path / "rank_0.stack"
    frame = f'  File "/{name}", line 2 in f\n'
    stack.write_text(f"Current thread 0x01 (most recent call first):\n{frame}")
    assert stuck.read_stack(stack) == [f"/{name}:2 in f"]


def test_ranks_with_the_same_stack_share_a_line() -> None:
    by_rank = {0: ["a.py:1 in f", "a.py:9 in g"], 1: [], 2: ["a.py:1 in f", "a.py:9 in g"]}
    assert name_groups(stuck.group_stacks(by_rank)) == [
        "ranks 0, 2: a.py:1 in f < a.py:9 in g",
        "rank 1: no Python stack",
    ]


def test_a_subprocess_of_a_rank_cannot_write_to_the_record(
    beats: Heartbeats, tmp_path: Path
) -> None:
    """The subprocess has the variable, but another file at that descriptor."""
    beat(3)
    fd = int(beats.name(1).partition(":")[0])
    data = tmp_path / "data"
    data.write_bytes(b"x" * 1000)
    code = "from distributed.heartbeat import beat; beat(99)"
    with data.open("r+b") as file:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", code],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, file.fileno(), fd)],
        )
    assert os.waitpid(pid, 0)[1] == 0
    assert data.read_bytes() == b"x" * 1000
    assert beats.read(1).step == 3


def test_a_record_that_is_being_written_is_never_read_as_silence(tmp_path: Path) -> None:
    beats = Heartbeats(1)
    fd = int(beats.name(1).partition(":")[0])
    writer = os.fork()
    if writer == 0:
        heart = Heart(fd, 0, tmp_path / "stack")
        for step in itertools.count():
            heart.beat(step, None, 60.0)
    try:
        eventually(lambda: beats.read(0) != Beat(), "the first beat")
        read = [beats.read(0) for _ in range(100_000)]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    begun = [beat for beat in read if beat != Beat()]
    assert begun and all(beat.limit_s == 60.0 and beat.time > 0 for beat in begun)
