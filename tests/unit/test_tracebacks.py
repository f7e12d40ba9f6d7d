"""A traceback that only follows from another rank's failure stays off the terminal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from agents import ROOT, execute, rarely
from test_output import Screen

from launcher.agent.facts import Facts
from launcher.agent.node_ranks import Heartbeats, NodeRanks, Rank
from launcher.agent.output.stream import NodeLog
from launcher.agent.output.tracebacks import HeldTraceback
from launcher.failure import Failure
from launcher.wire import limits

TRACEBACK = b"Traceback (most recent call last):\n  File x, line 1\nValueError: y\n"


@pytest.mark.parametrize(
    ("before", "start"),
    [
        (b"loss 0.5\n", b""),
        (b"loss 0.5\n", b"[rank0]: "),
        (b"\r 50%|     | 5/10 [00:01<00:01, 5.0it/s]", b""),  # a bar that did not end its line
        (b"[rank0]: x\n", b"[rank0]:   + Exception Group "),
        (b"", "╭──────── ".encode()),
        (b"ERROR:", b" "),
    ],
)
def test_all_from_its_first_line_on_is_held(before: bytes, start: bytes) -> None:
    held = HeldTraceback()
    assert held.take(before + start + TRACEBACK) == before
    assert held.take(b"more\n") == b""
    assert held.release() == start + TRACEBACK + b"more\n"
    assert held.take(b"later\n") == b"later\n"


def test_what_is_held_is_bounded() -> None:
    held, shown = HeldTraceback(), 0
    for _ in range(100):
        shown += len(held.take(TRACEBACK * 1000))
        assert len(held.text) < 1 << 19
    assert shown > 90 * 1000 * len(TRACEBACK) - (1 << 19)


class OneRank(Screen):
    """One rank that writes to a pipe, and its log."""

    def show(self, data: bytes) -> bytes:
        """The rank writes; returns what the terminal shows of it."""
        self.write(data)
        return self.shown()

    def end(self, *, is_consequence: bool) -> bytes:
        os.close(self.rank)
        self.stream.end(is_consequence=is_consequence)
        return self.shown()


@pytest.mark.parametrize("follows", [True, False])
def test_the_terminal_lacks_what_only_follows_and_the_log_has_it(
    tmp_path: Path, follows: bool
) -> None:
    rank = OneRank(tmp_path)
    assert rank.show(b"loss\n" + TRACEBACK) == b"loss\n"
    assert rank.show(b"bye") == b""
    assert rank.end(is_consequence=follows) == (b"" if follows else TRACEBACK + b"bye")
    said = ["loss", *TRACEBACK.decode().splitlines(), "bye"]
    assert rank.logged() == [f"[0] {line}" for line in said]


def test_without_a_log_the_terminal_shows_all(tmp_path: Path) -> None:
    rank = OneRank(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), rank.log._file.fileno())
    rank.show(TRACEBACK)
    assert rank.end(is_consequence=True) == TRACEBACK
    assert not NodeLog(None).is_kept


def test_a_traceback_that_was_shown_does_not_keep_a_later_one_from_being_held(
    tmp_path: Path,
) -> None:
    rank = OneRank(tmp_path)
    rank.show(TRACEBACK)
    later = time.monotonic() + limits.TRACEBACK_S
    assert rank.stream.tick(later, 2 * limits.TRACEBACK_S) and rank.shown() == b""
    assert not rank.stream.tick(later, limits.TRACEBACK_S)
    assert rank.shown() == TRACEBACK
    assert rank.show(b"on\n" + TRACEBACK) == b"on\n"
    assert rank.end(is_consequence=True) == b""


def test_how_long_a_traceback_is_held_while_nothing_has_failed(tmp_path: Path) -> None:
    one, stdout = OneRank(tmp_path), OneRank(tmp_path).stream
    error_file = tmp_path / "rank_0.json"
    forked = Rank(0, 0, os.getpid(), (stdout, one.stream), error_file)
    ranks = NodeRanks([forked], Heartbeats(1), 0, "host")
    one.show(TRACEBACK)
    now = time.monotonic()
    assert ranks.tick(now, is_ending=False)
    ranks.tick(now + 100, is_ending=True)
    error_file.touch()  # it is about to end
    ranks.tick(now + limits.RAISED_S - 0.1, is_ending=False)
    assert one.shown() == b""
    ranks.tick(now + limits.RAISED_S, is_ending=False)
    assert one.shown() == TRACEBACK
    error_file.unlink()
    one.show(TRACEBACK)
    ranks.tick(time.monotonic() + limits.TRACEBACK_S, is_ending=False)
    assert one.shown() == TRACEBACK


def failed(rank: int, *, follows: bool) -> Failure:
    return Failure("x", "y", 1, "host", 0, 1.0, rank=rank, is_consequence=follows)


def test_what_only_follows() -> None:
    first = failed(1, follows=False)
    facts = Facts(codes={0: 1, 1: 1, 2: 1, 3: 143, 4: 0}, stopped={3})
    facts.failures += [first, failed(0, follows=True), failed(2, follows=False)]
    assert [rank for rank in range(5) if facts.is_consequence(first, rank)] == [0, 3]
    assert not any(facts.is_consequence(None, rank) for rank in range(5))


PROGRAM = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == int(sys.argv[1]):
    raise ValueError("batch 7 holds no samples")
dist.barrier()
"""


def launch(folder: Path, who: str, **environment: str) -> tuple[str, str]:
    """Run two ranks, of which one fails; returns stderr and the node's log."""
    (folder / "program.py").write_text(PROGRAM)
    command = [ROOT / "scripts/launch.sh", "--nproc-per-node=2", "program.py", who]
    done = execute(folder, *command, code=1, **environment)
    (log,) = folder.glob("logs/2*/node_0.log")
    return done.stderr, log.read_text()


@pytest.mark.slow
@pytest.mark.another_torch("failure block")
@pytest.mark.parametrize("fresh", ["1", *rarely("0")])  # 1: without an error file
def test_the_traceback_of_rank_0_that_lost_rank_1_is_in_the_log_alone(
    tmp_path: Path, fresh: str
) -> None:
    err, log = launch(tmp_path, "1", FRESH=fresh)
    assert "Traceback" not in err and "Connection closed by peer" not in err
    assert "FAILED   rank 1 " in err and "ValueError: batch 7 holds no samples\n" in err
    assert "others   1 rank " in err  # it lost its peer, or was stopped
    assert "[0] [rank0]: Traceback" in log and "[1] [rank1]: Traceback" in log


@pytest.mark.slow
def test_the_traceback_of_rank_0_that_failed_first_stands_above_the_block(tmp_path: Path) -> None:
    err, _ = launch(tmp_path, "0")
    above = err.partition("FAILED   rank 0 ")[0]
    assert above.endswith("[rank0]: ValueError: batch 7 holds no samples\n")
