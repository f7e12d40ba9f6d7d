"""Parts of sharded snapshots on other nodes: a run that loses a node loses none of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from agents import rarely
from recovery import SHARDED, Job, Outcome, await_snapshots
from test_sharded import make_state, on_ranks

from distributed import limits
from distributed.checkpoint import Saver, exchange, load, weights_hash
from distributed.checkpoint.memory import BEGIN, FILES, Memory
from distributed.checkpoint.snapshots import _open_buffers
from launcher.agent.snapshots.memory import Snapshots as NodeSnapshots

# With a rank of each of two nodes.
TAKEN = (*SHARDED, "checkpoint.snapshot_every=5", "checkpoint.every=0")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def whole(job: Job) -> Outcome:
    """What two ranks come to that nobody stops, and that take no snapshots."""
    return job.finish("whole", 2, *SHARDED)


def _lose_parts(rank: int, folder: Path, files: list[str], own: list[int], of: list[int]) -> None:
    """Take three snapshots on two nodes of two ranks each, lose parts of the last one, and load.

    Lost are those of some ranks on their own nodes, and the copies of some.
    """
    os.environ |= {FILES: files[rank], "LOCAL_WORLD_SIZE": "2"}
    saver = Saver(folder / "run", keep_last=9, enabled=rank == 0, format="sharded")
    for step in range(1, 4):
        saver.snapshot(step, make_state(step, "fsdp", "all"))
    saver.snapshots.finish()
    for buffer in _open_buffers():
        header = buffer.header()
        if header.step == 3 and header.rank in (own if header.rank == rank else of):
            buffer.set_header(None)
    found = load(folder / "run")
    wanted = make_state(2 if {*own} & {*of} else 3, "ddp")
    assert found is not None and found.is_snapshot
    assert weights_hash(found.model) == weights_hash(wanted.model)
    assert [*found.ranks] == [{"own": wanted.progress["step"]}] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "copies"),
    [
        ([0, 1], []),
        ([3], [0, 1, 2]),
        ([1], [1]),
        *rarely(([], []), ([2, 3], []), ([], [0, 1, 2, 3])),
    ],
)
def test_a_part_is_on_two_nodes(tmp_path: Path, own: list[int], copies: list[int]) -> None:
    node = NodeSnapshots(4)
    files = [node.variables(rank)[FILES] for rank in range(4)]
    on_ranks(4, _lose_parts, tmp_path, files, own, copies)


def _deliver_slowly(rank: int, folder: Path) -> None:
    """Rank 1 sends rank 3 its part; nobody leaves before it is there."""

    def slowly(*_: object) -> Iterator[None]:
        time.sleep(0.5)  # a slow transfer: who does not wait for it has left by then
        (folder / f"moved-{rank}").touch()
        return iter(())

    exchange._transfer = slowly  # type: ignore[assignment]
    exchange.deliver([(3, 1)], None, Memory(-1))
    assert {one.name for one in folder.glob("moved-*")} == {"moved-1", "moved-3"}


@pytest.mark.slow
def test_ranks_without_a_part_to_move_wait_for_the_others(tmp_path: Path) -> None:
    on_ranks(4, _deliver_slowly, tmp_path)


def _lose_neighbour(rank: int, folder: Path, files: list[str]) -> None:
    """Take three snapshots; rank 1 cannot exchange the second one."""
    os.environ |= {FILES: files[rank], "LOCAL_WORLD_SIZE": "1"}
    exchange._PATIENCE = timedelta(seconds=8)
    saver = Saver(folder / "run", keep_last=9, enabled=rank == 0, format="sharded")
    for step in range(1, 4):
        saver.snapshot(step, make_state(step, "fsdp", "all"))
        saver.snapshots.finish()
        if rank == 1 and step == 1:
            saver.snapshots._copies = []  # it has nowhere to keep another's
    found = load(folder / "run")
    assert found is not None and found.progress["step"] == 3
    steps = [one.header().step for one in _open_buffers()]
    assert sorted(steps[:2]) == [2, 3] and sorted(steps[2:]) == [-1, 1]


@pytest.mark.slow
def test_without_a_neighbour_the_run_goes_on(tmp_path: Path) -> None:
    node = NodeSnapshots(3)
    on_ranks(3, _lose_neighbour, tmp_path, [node.variables(rank)[FILES] for rank in range(3)])


def _end_early(rank: int, folder: Path, files: list[str]) -> None:
    os.environ |= {FILES: files[rank], "LOCAL_WORLD_SIZE": "1"}
    exchange._PIECE, limits.SNAPSHOT_PIECE_S = BEGIN, 1.0
    saver = Saver(folder / "run", keep_last=9, enabled=rank == 0, format="sharded")
    saver.snapshot(1, make_state(1, "fsdp", "all"))


@pytest.mark.slow
def test_the_end_of_a_program_waits_for_no_exchange(tmp_path: Path) -> None:
    node = NodeSnapshots(2)
    files = [node.variables(rank)[FILES] for rank in range(2)]
    on_ranks(2, _end_early, tmp_path, files)
    assert node.step() == 1
    size = max(buffer.header().size for buffer in node._own)
    assert size > 60 * BEGIN  # it would take a minute and more
    assert node.parts()[1] == {}


@pytest.mark.slow
def test_a_lost_nodes_part_comes_from_the_next_node(job: Job, whole: Outcome) -> None:
    with job.nodes("part", 2, *TAKEN, FAULT="sleep 1 46") as runs:
        await_snapshots(runs[0], 20, parts=2)
        os.kill(runs[1].agent_pid(), signal.SIGKILL)
        told = runs[0].finish()
    folder = job.folder / "checkpoints/part"
    assert f"step 20 was only in memory; it is now saved in {folder}\n" in told, told
    assert job.finish("part", 2, *SHARDED) == whole
