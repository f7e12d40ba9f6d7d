"""How a run ended, which failure is shown, and the exit code, as tables; the failure block."""

import io
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import ROOT
from job_tools import job_plan

from launcher import failure
from launcher.agent.facts import Facts
from launcher.agent.rank.program import _write_error_file
from launcher.crash import read_crash
from launcher.failure import Failure, RaisedError, read_error
from launcher.failure_block import find_end, find_kept, print_outcome
from launcher.fanout.launch_end import LaunchEnd, NodePart
from launcher.outcome import (
    Basis,
    NodeEnd,
    Outcome,
    choose,
    describe_ends,
    end_attempt,
    stop_code,
)
from launcher.record import run_json
from launcher.text import print_row
from launcher.wire.messages import Verdict


def failed(rank: int, time: float = 1.0, *, code: int = 1, is_consequence: bool = False) -> Failure:
    return Failure(
        fault="rank-error",
        cause=f"cause of {rank}",
        code=code,
        host="node1",
        node_rank=0,
        time=time,
        rank=rank,
        local_rank=rank,
        is_consequence=is_consequence,
    )


def victim(rank: int, time: float = 1.0) -> Failure:
    return failed(rank, time, is_consequence=True)


# --- the order of precedence of accounts ----------------------------------------------------------

# An account of each kind, in order of precedence.
ACCOUNTS = {basis: Outcome(basis.value) for basis in Basis}


@pytest.mark.parametrize("basis", Basis)
def test_the_first_basis_counts(basis: Basis) -> None:
    others = [(other, outcome) for other, outcome in ACCOUNTS.items() if other > basis]
    same = Outcome(99)
    accounts = [*reversed(others), (basis, ACCOUNTS[basis]), (basis, same)]
    assert choose(accounts) == ACCOUNTS[basis]
    assert choose([(basis, same), *accounts]) == same


# --- the end of an attempt, judged by node rank 0's agent -----------------------------------------


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failed(3)], 3),
        ([failed(3, 2.0), failed(1, 1.0)], 1),
        ([victim(1, 1.0), failed(3, 2.0)], 3),  # a cause, however late its message came
        ([victim(1, 2.0), victim(2, 1.0)], 2),
        ([failed(1, 1.0), failed(2, 1.0)], 1),  # in the order in which they were seen
        ([], None),
    ],
)
def test_the_first_failure(failures: list[Failure], rank: int | None) -> None:
    first = end_attempt(failures, [NodeEnd()], []).failure
    assert (first and first.rank) == rank


@pytest.mark.parametrize(
    ("has_left", "code", "signals", "has_saved", "is_asked"),
    [
        (True, 75, [], True, True),
        (True, 75, [], False, False),  # an ordinary exit code
        (True, 1, [], True, False),
        (True, 1, [15], False, True),
        (False, 1, [15], False, False),  # its own error
        (False, 143, [2], False, True),  # a scheduler may send several signals
        (False, 137, [15], False, False),
        (False, 137, [], False, False),
    ],
)
def test_which_ends_were_asked_for(
    has_left: bool, code: int, signals: list[int], has_saved: bool, is_asked: bool
) -> None:
    end = replace(failed(1, code=code), has_left=has_left)
    facts = Facts(signals=signals)
    assert facts.is_requested_stop(end, has_saved=has_saved) == is_asked
    end = victim(1)  # it lost its peer, with or without a signal before
    assert facts.is_requested_stop(end, has_saved=has_saved) == bool(signals)


@pytest.mark.parametrize(
    ("code", "codes", "is_consequence", "is_asked"),
    [
        (1, {}, False, False),  # the script's own error, or sys.exit(1)
        (1, {}, True, False),
        (1, {0: 75}, True, True),  # rank 0 has saved and left
        (1, {0: 75}, False, False),
        (75, {}, False, True),
        (138, {}, False, True),
        (143, {}, False, False),
    ],
)
def test_after_a_notice_only_its_own_ends_were_asked_for(
    code: int, codes: dict[int, int], is_consequence: bool, is_asked: bool
) -> None:
    facts = Facts(signals=[10], noticed={(1, 0.0)}, codes={**codes, 1: code})
    end = replace(failed(1, code=code, is_consequence=is_consequence), has_left=code < 128)
    assert facts.is_requested_stop(end, has_saved=False) == is_asked
    assert facts.stops == []


RAISED = RaisedError("ValueError: bad; give a good one [my-fault]", "", 1, 5.0, "my-fault")


LEFT = RaisedError("SystemExit: 1", "", 1, 5.0, has_left=True)


@pytest.mark.parametrize(
    ("raised", "code", "is_out_of_memory", "last_text", "expected"),
    [  # expected: fault, cause, time, whether it only follows, whether the rank left by itself
        (
            RAISED, 1, False, "",
            ("my-fault", "ValueError: bad; give a good one", 5.0, False, False),
        ),
        (
            replace(RAISED, notes="the batch has samples 3, 17"), 1, False, "",
            ("my-fault", "ValueError: bad; give a good one (the batch has samples 3, 17)", 5.0,
             False, False),
        ),
        (
            replace(LEFT, message="SystemExit: no data"), 1, False, "no data",
            ("rank-error", "SystemExit: no data", 5.0, False, True),
        ),
        (
            replace(LEFT, message="SystemExit: 2"), 2, False, "usage: ...",
            ("rank-error", "SystemExit: 2, after: usage: ...", 5.0, False, True),
        ),
        (
            RaisedError("resume: none [here]", "", 2, 5.0, "config-invalid"), 2, False,
            "train.py: resume: none [here] [config-invalid]",
            ("config-invalid", "resume: none [here]", 5.0, False, False),
        ),
        (
            replace(RAISED, message="RuntimeError: Connection closed by peer", fault=""),
            1, False, "",
            ("rank-error", "RuntimeError: Connection closed by peer", 5.0, True, False),
        ),
        (
            None, 137, True, "",
            ("out-of-memory", "SIGKILL from the kernel: this node's memory limit was reached", 9.0,
             False, False),
        ),
        (
            None, 7, True, "",
            ("rank-error", "exited with code 7 without an exception", 9.0, False, True),
        ),
        (
            failure.read_traceback("ValueError: bad", 9.0), 1, False, "ValueError: bad",
            ("rank-error", "ValueError: bad", 9.0, False, False),
        ),
        (
            failure.read_traceback("KeyboardInterrupt", 9.0), 1, False, "KeyboardInterrupt",
            ("rank-error", "KeyboardInterrupt", 9.0, True, True),
        ),
    ],
)  # fmt: skip
def test_why_a_rank_ended(
    raised: RaisedError | None,
    code: int,
    is_out_of_memory: bool,
    last_text: str,
    expected: tuple[str, str, float, bool, bool],
) -> None:
    ended = failed(1, 9.0)
    told = failure.describe_end(
        ended, raised, code=code, is_out_of_memory=is_out_of_memory, last_text=last_text
    )
    found = (told.fault, told.cause, told.time, told.is_consequence, told.has_left)
    assert (*found, told.code) == (*expected, code)


@pytest.mark.parametrize(
    ("nodes", "signals", "code"),
    [
        ([NodeEnd(codes=[0, 0])], [], 0),
        ([NodeEnd(codes=[0, 0])], [10], 0),  # finished before the announced time
        ([NodeEnd(codes=[0, 0])], [15], 143),  # both have handled it
        ([NodeEnd(codes=[0, 0], saved_step=9)], [15], 0),  # a rank that saves would exit with 75
        ([NodeEnd(codes=[75, 75], saved_step=9)], [15], 75),
        ([NodeEnd(codes=[75, 75])], [15], 143),  # no rank has reported a save
        ([NodeEnd(codes=[75], saved_step=9), NodeEnd(first_rank=1, codes=[75])], [15, 2], 75),
        ([NodeEnd(codes=[143, 75], saved_step=9)], [15], 143),  # one rank has not saved
        ([NodeEnd(codes=[75, 1], saved_step=9)], [15], 1),
        ([NodeEnd(stopped=[0], codes=[137])], [15], 143),  # ignored the signal, and was killed
        ([NodeEnd(codes=[0]), NodeEnd(stopped=[1], first_rank=1, codes=[137])], [2], 130),
        ([NodeEnd(stopped=[1], codes=[75, 137], saved_step=9)], [15], 75),
        ([NodeEnd(stopped=[0], codes=[137])], [], 137),
    ],
)
def test_the_exit_code_of_a_run_that_did_not_fail(
    nodes: list[NodeEnd], signals: list[int], code: int
) -> None:
    assert stop_code(nodes, signals) == code


@pytest.mark.parametrize(
    ("nodes", "ends"),
    [
        ([NodeEnd(codes=[75, 75, 75], saved_step=9)], "ranks 0-2 saved"),
        ([NodeEnd(codes=[75])], "rank 0 exited with code 75"),
        ([NodeEnd(codes=[0, 1])], "rank 0 exited with code 0, rank 1 exited with code 1"),
        (
            [NodeEnd(codes=[143, 0]), NodeEnd([3], 2, [143, 137])],
            "ranks 0, 2 ended by SIGTERM, rank 1 exited with code 0, rank 3 killed after GRACE",
        ),
    ],
)
def test_how_the_ranks_of_a_stopped_run_ended(nodes: list[NodeEnd], ends: str) -> None:
    assert describe_ends(nodes, []) == ends


def test_what_a_node_tells_at_its_end() -> None:
    node = Facts(codes={5: 75, 2: 1, 3: 0, 4: 143}, stopped={4}).describe_end(9)
    assert node == NodeEnd([4], 2, [1, 0, 143, 75], 9)
    assert node.own_exits == {2: 1, 3: 0, 5: 75}


def outcome(code: int, failure: Failure | None = None, **more: Any) -> Outcome:
    """Return the outcome that node rank 0 sends after a save of step 40."""
    return Outcome(code, failure and replace(failure, saved_step=40), **more)


TOLD = Outcome(9, failed(5), 1, 2)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(codes={0: 0, 1: 0}), outcome(0)),
        (
            Facts(codes={0: 75}, signals=[15]),
            outcome(75, ends="by SIGTERM: rank 0 saved", signum=15),
        ),
        (  # a notice that no rank handled stopped nothing
            Facts(codes={0: 143}, signals=[10, 15]),
            outcome(143, ends="by SIGTERM: rank 0 ended by SIGTERM", signum=15),
        ),
        (
            Facts(codes={0: 143}, signals=[10, 15], noticed={(0, 0.0)}),
            outcome(143, ends="by SIGTERM: rank 0 ended by SIGTERM", signum=10),
        ),
        (  # it went on after the notice, and was killed after the stop
            Facts(codes={0: 137}, signals=[10, 15], noticed={(0, 0.0)}, stopped={0}),
            outcome(143, ends="by SIGTERM: rank 0 killed after GRACE", signum=10),
        ),
        (
            Facts(codes={0: 143, 1: 1}, failures=[failed(1)], stopped={0}),
            outcome(1, failed(1), stopped=1),
        ),
        (  # of two nodes: each rank is counted once
            Facts(
                codes={0: 1, 1: 143},
                failures=[failed(2, code=7), victim(0), victim(3)],
                stopped={1},
                nodes={1: NodeEnd([2, 3], 2, [137, 137])},
            ),
            outcome(7, failed(2, code=7), lost_peer=2, stopped=1),
        ),
        (  # none failed, but one exited too early
            Facts(codes={0: 1, 1: 0}, failures=[victim(0)], host="n1"),
            outcome(
                1,
                replace(
                    failed(1),
                    cause="exited with code 0 before rank 0, which then failed: cause of 0",
                    host="n1",
                ),
                lost_peer=1,
            ),
        ),
        (  # the same, on another node
            Facts(
                codes={0: 1, 1: 1},
                failures=[victim(0), victim(1)],
                nodes={2: NodeEnd(first_rank=4, codes=[143, 0], host="n3", node_rank=2)},
            ),
            outcome(
                1,
                replace(
                    failed(5),
                    cause="exited with code 0 before rank 0, which then failed: cause of 0",
                    host="n3",
                    node_rank=2,
                    local_rank=1,
                ),
                lost_peer=2,
            ),
        ),
        (  # the stacks of all nodes
            Facts(
                codes={0: 137},
                failures=[
                    replace(failed(0), stacks={"a": [0, 3], "a remark": []}),
                    replace(victim(1), stacks={"b": [1], "a": [2], "a remark": []}),
                ],
            ),
            outcome(
                1,
                replace(failed(0), stacks={"a": [0, 2, 3], "b": [1], "a remark": []}),
                lost_peer=1,
            ),
        ),
        (Facts(codes={0: 143}, failures=[failed(0)], verdict=Verdict(TOLD)), TOLD),
    ],
)
def test_the_verdict(facts: Facts, expected: Outcome) -> None:
    told = facts.reach_verdict(40, 0).outcome
    assert told.has_saved != (facts.verdict is not None)
    told = replace(told, has_saved=False)
    assert told == expected


def test_what_is_left_is_this_nodes() -> None:
    facts = Facts(codes={0: 0}, verdict=Verdict(Outcome(0, left=3)))
    assert facts.reach_verdict(-1, 1).outcome.left == 1


# --- the end of a run on several nodes, judged by its launcher ------------------------------------


def launch_end(
    parts: list[NodePart],
    *,
    can_resume: bool = True,
    stopped_by: int = 0,
    engine: str = "",
    still_s: float = 0.0,
) -> LaunchEnd:
    checkpoints = Path("checkpoints") if can_resume else None
    plan = job_plan(Path(), run_id="r", command="again", checkpoint_dir=checkpoints, engine=engine)
    return LaunchEnd(plan, parts, 0.0, stopped_by, still_s)


def told(code: int, fault: str = "") -> Outcome:
    """Return an agent's outcome; without a fault, the run was stopped or succeeded."""
    rank = 0 if fault == "rank-error" else -1
    return Outcome(code, Failure(fault, "cause", code, "host", 0, 0.0, rank) if fault else None)


def node(
    code: int | None, said: Outcome | None = None, lost: str = "", reached: bool = True
) -> NodePart:
    return NodePart("host", code, said, lost, reached)


def of_engine(*codes: int, stopped_by: int = 0) -> LaunchEnd:
    nodes = [node(one) for one in codes]
    return launch_end(nodes, engine="torch.distributed.launch", stopped_by=stopped_by)


FINE, STOPPED, SAVED = node(0, told(0)), node(143, told(143)), node(75, told(75))
FAILED, GONE = node(1, told(1, "rank-error")), node(137, told(137, "agent-killed"))
LOST_PEER = Outcome(1, victim(3))
SILENT = replace(STOPPED, lost="no sign of life", is_silent=True)


@pytest.mark.parametrize(
    ("nodes", "code", "fault"),
    [
        ([FINE, FINE], 0, ""),
        ([node(0), node(0)], 0, ""),  # another engine's agent sends no outcome
        ([SAVED, node(75)], 75, "stopped"),
        ([node(143, told(143, "agent-killed")), node(1, told(1, "env-missing"))], 1, "env-missing"),
        ([node(143, told(143, "agent-killed")), STOPPED], 143, "agent-killed"),
        ([FAILED, node(1)], 1, "rank-error"),
        # Node rank 0 is gone: the other agent's own view counts, not node rank 0's message.
        ([node(137, told(0)), GONE], 137, "agent-killed"),
        ([node(3, told(3, "rank-error")), FINE], 3, "rank-error"),  # a user's script
        # An agent that rejects the run prints why; the others only see it exit.
        ([node(3), GONE], 3, ""),
        ([GONE, node(2)], 2, ""),
        ([node(7), node(7)], 7, "agent-killed"),
        ([STOPPED, node(137), STOPPED], 137, "agent-killed"),  # hence the others were stopped
        ([node(137), STOPPED], 137, "agent-killed"),
        ([STOPPED, node(127)], 127, "env-missing"),
        ([STOPPED, node(1, told(1, "env-missing"))], 1, "env-missing"),
        ([STOPPED, node(None)], 137, "launcher-killed"),
        ([STOPPED, node(0, told(0), lost="pdsh's connection")], 137, "launcher-killed"),
        ([node(None, lost="cut", reached=False), STOPPED], 137, "link-lost"),
        ([STOPPED, node(None), node(None, reached=False)], 137, "link-lost"),
        ([STOPPED, replace(SILENT, code=None, told=None)], 137, "link-lost"),
        # An agent's supervisor gave up on the launcher; the other agent only saw that agent exit.
        ([GONE, SILENT], 137, "link-lost"),
        ([FAILED, SILENT], 1, "rank-error"),
        ([FAILED, replace(SILENT, code=None)], 137, "link-lost"),
        ([STOPPED, replace(STOPPED, lost="ssh has ended")], 137, "launcher-killed"),
        ([SAVED, replace(SAVED, lost="no sign of life", is_silent=True)], 75, "stopped"),
        ([node(1, LOST_PEER), FAILED], 1, "rank-error"),  # the cause, whichever node reports it
        # Another program's engine reports only its exit code.
        (of_engine(0, 0), 0, ""),
        (of_engine(0, 1), 1, "rank-error"),
        (of_engine(2, 0), 2, "rank-error"),
        (of_engine(1, 1, stopped_by=signal.SIGTERM), 143, "stopped"),
    ],
)
def test_the_code_and_what_is_printed(
    nodes: list[NodePart] | LaunchEnd, code: int, fault: str
) -> None:
    end = (launch_end(nodes) if isinstance(nodes, list) else nodes).outcome()
    assert end.code == code
    shown = end.failure.fault if end.failure else "stopped" * end.has_text
    assert shown == fault
    assert end.failure is None or not end.failure.is_consequence


@pytest.mark.parametrize(
    ("nodes", "stopped_by", "shown"),
    [
        ([STOPPED, node(137)], 0, "launcher-killed"),
        ([FAILED, SILENT], 0, "rank-error"),
        ([STOPPED, GONE], 0, "launcher-killed"),
        ([node(None, lost="ssh has ended"), node(None)], 0, "launcher-killed"),
        ([SAVED, node(75)], 0, "stopped"),
        ([FINE, FINE], 0, "stopped"),
        ([STOPPED, STOPPED], signal.SIGTERM, "stopped"),
    ],
)
def test_a_launcher_that_stood_still(nodes: list[NodePart], stopped_by: int, shown: str) -> None:
    end = launch_end(nodes, stopped_by=stopped_by, still_s=14.2).outcome()
    assert (end.failure.fault if end.failure else "stopped") == shown
    if end.failure:
        is_own = end.failure.who.startswith("launcher (") and "for 14 s" in end.failure.cause
        assert is_own == (shown == "launcher-killed")


def test_the_time_of_an_error_is_the_ranks_own(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    _write_error_file(ValueError("bad"), 1, file)
    os.utime(file, (1.0, 1.0))  # a file server whose clock is wrong
    raised = read_error(file)
    assert raised is not None and raised.time > 1e9
    file.write_text(re.sub(r'"time": [\d.]+, ', "", file.read_text()))  # as torch's own file
    os.utime(file, (5.0, 5.0))
    assert read_error(file) == replace(raised, time=5.0)


# --- how an end is printed, kept, and found again in a log ----------------------------------------


ERROR = Failure("rank-error", "ValueError: ü\nmore", 1, "node2", 1, 1000.5, rank=5, local_rank=1)
END = Outcome(code=1, failure=ERROR, lost_peer=6, stopped=1, started=986.0, run_id="r1")


@pytest.mark.parametrize(
    ("end", "first"),
    [
        (END, "FAILED   rank 5 (local rank 1, node2) 14 s after the start"),
        (replace(END, code=143, failure=None), "stopped  by SIGTERM (code 143); nothing"),
        (
            replace(END, code=75, failure=None, signum=1),
            "stopped  by SIGHUP after saving a checkpoint (code 75); nothing",
        ),
        (replace(END, code=0, failure=None), ""),
    ],
)
def test_the_launcher_prints_what_the_agent_would_and_keeps_it(
    end: Outcome, first: str, tmp_path: Path
) -> None:
    out = io.StringIO()
    print_outcome(end, out, tmp_path)
    assert out.getvalue().startswith(first) and bool(out.getvalue()) == bool(first)
    assert find_kept(tmp_path) == out.getvalue().rstrip("\n")
    assert [file.name for file in tmp_path.iterdir()] == ["failure.txt"] * bool(first)
    print_outcome(end, out, tmp_path / "gone")  # a failure to print does not end a run


def test_the_record_of_a_run_gets_the_cause_that_its_block_shows(tmp_path: Path) -> None:
    run_json.update(tmp_path, state="ended", exit_code=1)
    print_outcome(END, io.StringIO(), tmp_path)
    record = run_json.read(tmp_path)
    assert record and (record.fault, record.cause) == ("rank-error", ERROR.cause)


def test_a_cause_is_not_written_through_a_link(tmp_path: Path) -> None:
    run_json.update(tmp_path / "other", state="ended", exit_code=0)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/run.json").symlink_to(tmp_path / "other/run.json")
    print_outcome(END, io.StringIO(), tmp_path / "one")
    record = run_json.read(tmp_path / "other")
    assert record and record.fault == ""
    assert (tmp_path / "one/run.json").is_symlink() and find_kept(tmp_path / "one")


print_row("run", "r1    config/local3.yaml", row := io.StringIO())
PLANNED = row.getvalue()


def test_no_node_chooses_the_command_that_resumes_the_run() -> None:
    for given, shown in (("touch PWNED", "again"), ("", "")):
        lie = replace(told(1, "rank-error"), command=given, run_id="$(touch PWNED)")
        end = launch_end([node(1, lie), FINE], can_resume=False).outcome()
        assert (end.run_id, end.command) == ("r", shown)


def printed(end: Outcome) -> str:
    out = io.StringIO()
    print_outcome(end, out, None)
    return out.getvalue()


@pytest.mark.parametrize(
    ("log", "is_end"),
    [
        (f"{PLANNED}step 1\n{printed(END)}", True),
        (
            f"{PLANNED}step 1\n{printed(END)}srun: error: n2: task 1: Exited with exit code 1\n",
            True,
        ),
        (f"{PLANNED}step 1\r\n{printed(END)}".replace("\n", "\r\n"), True),
        (f"{PLANNED}{printed(END)}".replace("FAILED  ", "\x1b[1;31mFAILED  \x1b[0m"), True),
        (f"{PLANNED}{printed(END)}{PLANNED}step 1\n", False),  # resumed, and still running
        (f"{PLANNED}{printed(END)}x.sh: run r1 is live; wait [run-is-live]\n", False),
        (f"{PLANNED}step 1\nValueError: x\n", False),
        ("x" * (1 << 18) + f"\n{printed(END)}", True),
    ],
)
def test_the_block_that_ends_a_log_is_found(log: str, is_end: bool, tmp_path: Path) -> None:
    (tmp_path / "job.out").write_bytes(log.encode())
    assert find_end(tmp_path / "job.out") == (printed(END).rstrip("\n") if is_end else "")


def test_the_block_of_a_hang_on_many_nodes_is_short_and_found_again(tmp_path: Path) -> None:
    """Each node reports its own ranks; 37 of 1,024 nodes have a rank elsewhere."""
    failures = []
    for node in range(1024):
        odd = [8 * node] if node < 37 else []
        others = [*range(8 * node + len(odd), 8 * node + 8)]
        stacks = {"train.py:9 in step": others, **{f"train.py:{one} in load": odd for one in odd}}
        failures.append(replace(failed(node), stacks=stacks))
    block = printed(end_attempt(failures, [NodeEnd()], []))
    rows = [row for row in block.splitlines() if row.startswith("stacks")]
    assert len(rows) == 20
    assert rows[0].endswith(": train.py:9 in step") and rows[10] == "stacks   ... 19 more"
    assert rows[-1] == "stacks   rank 288: train.py:288 in load"
    (tmp_path / "job.out").write_text(f"{PLANNED}step 1\n{block}")
    assert find_end(tmp_path / "job.out") == block.rstrip("\n")


def test_the_resume_row_holds_nothing_but_the_command() -> None:
    saved = replace(END, failure=replace(ERROR, saved_step=100), command="a.sh c.yaml 2")
    rows = printed(saved).splitlines()
    assert rows[-3:-1] == ["resume   RUN_ID=r1 a.sh c.yaml 2", "         (from step 100)"]
    assert "from step" not in printed(replace(saved, command=""))


def test_of_several_ends_the_last_counts(tmp_path: Path) -> None:
    stopped = printed(replace(END, code=75, failure=None))
    (tmp_path / "job.out").write_text(f"{PLANNED}{printed(END)}{PLANNED}{stopped}")
    assert find_end(tmp_path / "job.out") == stopped.rstrip("\n")
    assert stopped.startswith("stopped  after saving a checkpoint (code 75)")


MISMATCH = [
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 8. Received "
    "data size doesn't match expected size. Is there a distributed collective mismatch in your "
    "code?",
    "Fatal Python error: Aborted",
    "",
    "Thread 0x00007f8f2ebf2b80 (most recent call first):",
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce',
    '  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper',
    f'  File "{ROOT}/distributed/collectives.py", line 64 in _gather',
    f'  File "{ROOT}/distributed/checkpoint/one_call.py", line 54 in save',
    '  File "/me/mm.py", line 8 in main',
]


def test_a_crash_by_collectives_that_differ_names_the_call() -> None:
    raised = read_crash(MISMATCH, 134, 9.0)
    told = failure.describe_end(
        failed(1, 9.0), raised, code=134, is_out_of_memory=False, last_text=""
    )
    assert told.fault == "collective-mismatch" and told.code == 134
    assert "every rank must call save()" in told.cause
    assert "12 vs 8" in told.frames[0] and told.frames[1:] == ["/me/mm.py:8 in main"]
    assert read_crash(MISMATCH, 1, 9.0) is None


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"])
def test_a_crash_is_no_consequence_of_the_error_that_it_causes(name: str) -> None:
    code = 128 + signal.Signals[name]
    lines = ["Fatal Python error: Segmentation fault", "", *MISMATCH[-6:]]
    told = failure.describe_end(
        failed(1, 9.0),
        read_crash(lines, code, 9.0),
        code=code,
        is_out_of_memory=False,
        last_text="",
    )
    assert (told.fault, told.code, told.is_consequence) == ("rank-crashed", code, False)


@pytest.mark.parametrize(
    ("said", "fault", "cause"),
    [
        ("  what():  Resource temporarily unavailable", "low-nproc", "Resource temporarily"),
        ("terminate called without an active exception", "rank-crashed", "terminate called"),
    ],
)
def test_a_crash_without_threads_says_what_native_code_said(
    said: str, fault: str, cause: str
) -> None:
    raised = read_crash([said, *MISMATCH[2:]], 134, 9.0)
    assert raised is not None and raised.fault == fault
    assert raised.message.startswith(f"SIGABRT: {cause}")


KEYS = """RuntimeError: Error(s) in loading state_dict for Sequential:
\tUnexpected key(s) in state_dict: "2.weight".
\tsize mismatch for 0.weight: copying a param with shape [2, 2].
\tsize mismatch for 0.bias: copying a param with shape [2].
\tsize mismatch for 1.bias: copying a param with shape [2]."""


@pytest.mark.parametrize(
    ("message", "details", "shown"),
    [
        (KEYS, [], [line.strip() for line in KEYS.splitlines()[1:4]]),
        ("ExceptionGroup: many (2 sub-exceptions)", ["KeyError: 'x'"], ["KeyError: 'x'"]),
        (
            "RuntimeError: CUDA error: x\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1",
            [],
            [],
        ),
    ],
)
def test_an_error_of_several_lines_shows_those_that_say_something(
    message: str, details: list[str], shown: list[str]
) -> None:
    raised = RaisedError(message, "", 1, 5.0, details=details)
    told = failure.describe_end(
        failed(1, 9.0), raised, code=1, is_out_of_memory=False, last_text=""
    )
    assert told.frames == shown
