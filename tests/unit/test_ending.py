"""How a run over several nodes ended, as a table of what each node told."""

from __future__ import annotations

import io
import signal
from dataclasses import replace
from pathlib import Path
from signal import Signals

import pytest

from launcher.agent.control import Done
from launcher.failure import Failure
from launcher.failure_block import Outcome, find_end, find_kept, print_outcome
from launcher.fanout.ending import NodeResult, conclude
from launcher.fanout.protocol import Exit
from launcher.plan.plan import Plan
from launcher.text import print_row

ENGINE = "torch.distributed.launch"
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
)


def told(code: int, fault: str = "") -> Outcome:
    """What an agent told; without a fault the run was stopped, or went well."""
    rank = 0 if fault == "rank-error" else -1
    failure = Failure(fault, "cause", code, "host", 0, 0.0, rank) if fault else None
    return Outcome(code, failure)


def node(
    code: int | None, said: Outcome | Done | None = None, lost: str = "", reached: bool = True
) -> NodeResult:
    return NodeResult("host", None if code is None else Exit(code, 0), said, lost, reached)


FINE, STOPPED, SAVED = node(0, told(0)), node(143, told(143)), node(75, told(75))
FAILED, GONE = node(1, told(1, "rank-error")), node(137, told(137, "agent-killed"))
SILENT = replace(STOPPED, lost="no sign of life", is_silent=True)


@pytest.mark.parametrize(
    ("nodes", "code", "fault"),
    [
        ([FINE, FINE], 0, ""),
        ([node(0), node(0)], 0, ""),  # an engine's tells nothing
        ([SAVED, node(75, Done())], 75, "stopped"),
        ([FAILED, node(1, Done())], 1, "rank-error"),
        # Node rank 0 is gone: the other's own view counts, and not what it was told.
        ([node(137, told(0)), GONE], 137, "agent-killed"),
        ([node(3, told(3, "rank-error")), FINE], 3, "rank-error"),  # a user's script
        # An agent that refuses says why itself; the others only see it go.
        ([node(3), GONE], 3, ""),
        ([GONE, node(2)], 2, ""),
        ([node(7), node(7)], 7, "agent-killed"),
        ([STOPPED, node(137), STOPPED], 137, "agent-killed"),  # the others were stopped for it
        ([node(137), STOPPED], 137, "agent-killed"),
        ([STOPPED, node(127)], 127, "env-missing"),
        ([STOPPED, node(1, told(1, "env-missing"))], 1, "env-missing"),
        ([STOPPED, node(None)], 137, "launcher-killed"),
        ([STOPPED, node(0, told(0), lost="pdsh's connection")], 137, "launcher-killed"),
        ([node(None, lost="cut", reached=False), STOPPED], 137, "link-lost"),
        ([STOPPED, node(None), node(None, reached=False)], 137, "link-lost"),
        ([STOPPED, replace(SILENT, exit=None, report=None)], 137, "link-lost"),
        # Its supervisor gave the launcher up, and the other agent has only seen it go.
        ([GONE, SILENT], 137, "link-lost"),
        ([FAILED, SILENT], 1, "rank-error"),
    ],
)
def test_the_code_and_what_is_printed(nodes: list[NodeResult], code: int, fault: str) -> None:
    end = conclude(nodes, PLAN, started=0.0, stopped_by=None)
    assert end.code == code
    shown = end.failure.fault if end.failure else "stopped" * end.has_text
    assert shown == fault


@pytest.mark.parametrize(
    ("nodes", "stopped_by", "shown"),
    [
        ([STOPPED, node(137)], None, "launcher-killed"),
        ([STOPPED, GONE], None, "launcher-killed"),
        ([node(None, lost="ssh has ended"), node(None)], None, "launcher-killed"),
        ([SAVED, node(75, Done())], None, "stopped"),
        ([FINE, FINE], None, "stopped"),
        ([STOPPED, STOPPED], signal.SIGTERM, "stopped"),
    ],
)
def test_a_launcher_that_stood_still(
    nodes: list[NodeResult], stopped_by: Signals | None, shown: str
) -> None:
    end = conclude(nodes, PLAN, started=0.0, stopped_by=stopped_by, still_s=14.2)
    assert (end.failure.fault if end.failure else "stopped") == shown
    if end.failure:
        assert end.failure.who.startswith("launcher (") and "for 14 s" in end.failure.cause


@pytest.mark.parametrize(
    ("codes", "stopped_by", "code", "fault"),
    [
        ([0, 0], None, 0, ""),
        ([0, 1], None, 1, "rank-error"),
        ([2, 0], None, 2, "rank-error"),
        ([1, 1], signal.SIGTERM, 143, "stopped"),
    ],
)
def test_the_end_of_an_engine(
    codes: list[int], stopped_by: Signals | None, code: int, fault: str
) -> None:
    plan = replace(PLAN, engine=ENGINE)
    end = conclude([node(one) for one in codes], plan, started=0.0, stopped_by=stopped_by)
    shown = end.failure.fault if end.failure else "stopped" * end.has_text
    assert (end.code, shown) == (code, fault)


# --- how it is printed, kept, and found again in a log ------------------------------------------

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
    print_outcome(end, out, tmp_path / "gone")  # nothing that only tells ends a run


print_row("run", "r1    config/local3.yaml", plan := io.StringIO())
TOLD = plan.getvalue()


def printed(end: Outcome) -> str:
    out = io.StringIO()
    print_outcome(end, out, None)
    return out.getvalue()


@pytest.mark.parametrize(
    ("log", "is_end"),
    [
        (f"{TOLD}step 1\n{printed(END)}", True),
        (f"{TOLD}step 1\n{printed(END)}srun: error: n2: task 1: Exited with exit code 1\n", True),
        (f"{TOLD}step 1\r\n{printed(END)}".replace("\n", "\r\n"), True),
        (f"{TOLD}{printed(END)}".replace("FAILED  ", "\x1b[1;31mFAILED  \x1b[0m"), True),
        (f"{TOLD}{printed(END)}{TOLD}step 1\n", False),  # resumed, and not ended yet
        (f"{TOLD}{printed(END)}x.sh: run r1 is live; wait [run-is-live]\n", False),
        (f"{TOLD}step 1\nValueError: x\n", False),
        ("x" * (1 << 18) + f"\n{printed(END)}", True),
    ],
)
def test_the_block_that_ends_a_log_is_found(log: str, is_end: bool, tmp_path: Path) -> None:
    (tmp_path / "job.out").write_bytes(log.encode())
    assert find_end(tmp_path / "job.out") == (printed(END).rstrip("\n") if is_end else "")


def test_of_several_ends_the_last_counts(tmp_path: Path) -> None:
    stopped = printed(replace(END, code=75, failure=None))
    (tmp_path / "job.out").write_text(f"{TOLD}{printed(END)}{TOLD}{stopped}")
    assert find_end(tmp_path / "job.out") == stopped.rstrip("\n")
    assert stopped.startswith("stopped  after saving a checkpoint (code 75)")
