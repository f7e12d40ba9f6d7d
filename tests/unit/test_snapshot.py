"""Snapshots: what a rank copies into memory, and what is read back."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agents import rarely
from forked_ranks import on_ranks
from launched import state_of
from recovery import SHARDED, Job, await_snapshots
from test_checkpoint import make_state
from test_sharded import make_state as make_shared_state
from torch import nn

from distributed import limits
from distributed import torch as helper
from distributed.checkpoint import (
    CheckpointError,
    Saver,
    State,
    exchange,
    load,
    one_call,
    snapshots,
    weights_hash,
)
from distributed.checkpoint.memory import BEGIN, FILES, Header, Memory
from distributed.checkpoint.snapshots import Buffer, _open_buffers
from distributed.heartbeat import name_record
from launcher.agent.snapshots.memory import Snapshots as NodeSnapshots


def names_of(buffers: Sequence[Buffer]) -> str:
    return ",".join(name_record(one.fd, 0) for one in buffers)


@pytest.fixture
def buffers() -> list[Buffer]:
    """The buffers of the only rank."""
    found = [Buffer(os.memfd_create("snapshot")) for _ in range(2)]
    os.environ[FILES] = names_of(found)
    return found


def hashes(state: State) -> list[str]:
    moments = state.optimizer["state"].values()
    return [weights_hash(tensors) for tensors in (state.model, *moments)]


def take(folder: Path, *steps: int, by: Saver | None = None) -> list[State]:
    saver, states = by or Saver(folder, keep_last=3), []
    for step in steps:
        states.append(make_state(step, loss=0.1 * step))
        saver.snapshot(step, states[-1])
    saver.snapshots.finish()
    return states


def test_a_loop_takes_and_loads_a_snapshot_which_is_no_save(
    tmp_path: Path,
    buffers: list[Buffer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(one_call, "restart_save_clock", lambda: noted.append(1))
    model, again = nn.Linear(2, 3), nn.Linear(2, 3)
    loop = model, torch.optim.AdamW(model.parameters())
    saver = Saver(tmp_path, keep_last=1)
    helper.save(saver, 3, *loop, in_memory=True, epoch=2)
    saver.snapshots.finish()
    assert not noted and saver.last_step is None

    state = load(tmp_path, whole=False)
    assert state and state.is_snapshot
    assert helper.load(state, again, None) == {"step": 3, "epoch": 2}
    assert torch.equal(again.weight, model.weight) and not caplog.messages
    with pytest.raises(CheckpointError, match=r"^the checkpoint is from a different model, "):
        helper.load(state, nn.Linear(2, 4), None)

    helper.save(saver, 4, *loop)
    one_call.complete(0)
    assert noted and (tmp_path / "step-4").is_dir()


def test_a_snapshot_is_what_was_taken(tmp_path: Path, buffers: list[Buffer]) -> None:
    *_, last = take(tmp_path, 1, 2, 3)
    assert sorted(one.header().step for one in buffers) == [2, 3]
    found = state_of(tmp_path)
    assert found.is_snapshot
    assert hashes(found) == hashes(last)
    assert found.optimizer["param_groups"] == last.optimizer["param_groups"]
    assert found.progress == last.progress and str([*found.ranks]) == str([*last.ranks])


def test_without_an_agent_there_is_none(tmp_path: Path) -> None:
    take(tmp_path, 1)
    assert load(tmp_path) is None


def test_the_newest_of_memory_and_disk_counts(tmp_path: Path, buffers: list[Buffer]) -> None:
    saver = Saver(tmp_path, keep_last=3)
    take(tmp_path, 4, by=saver)
    for step, is_snapshot in ((3, True), (4, False), (5, False)):
        saver.save(step, make_state(step))
        saver.wait()
        found = state_of(tmp_path)
        assert found.is_snapshot == is_snapshot
        assert found.progress["step"] == max(4, step)


@pytest.mark.parametrize("intact", [None, 3, 5])
def test_it_counts_where_what_is_newer_on_the_disk_is_damaged(
    tmp_path: Path, buffers: list[Buffer], intact: int | None
) -> None:
    saver = Saver(tmp_path, keep_last=3)
    take(tmp_path, 4, by=saver)
    for step in filter(None, (intact, 6)):
        saver.save(step, make_state(step))
        saver.wait()
    (tmp_path / "step-6/model.pt").write_bytes(b"damage")
    found = state_of(tmp_path)
    assert found.progress["step"] == max(4, intact or 0)
    assert found.is_snapshot == (intact != 5)


def test_another_runs_snapshot_does_not_count(tmp_path: Path, buffers: list[Buffer]) -> None:
    take(tmp_path / "one", 4)
    assert load(tmp_path / "other") is None


@pytest.mark.parametrize("place", ["header", "tensors", "rest"])
def test_of_a_damaged_one_the_one_before_counts(
    tmp_path: Path, buffers: list[Buffer], place: str
) -> None:
    take(tmp_path, 1, 2)
    newest = max(buffers, key=lambda one: one.header().step)
    header = newest.header()
    offset = {"header": 0, "tensors": BEGIN + 8, "rest": header.rest + 40}[place]
    (byte,) = os.pread(newest.fd, 1, offset)
    os.pwrite(newest.fd, bytes([byte ^ 1]), offset)
    assert state_of(tmp_path).progress["step"] == 1


def test_a_copy_that_was_cut_short_leaves_the_one_before(
    tmp_path: Path, buffers: list[Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path, keep_last=3)
    take(tmp_path, 1, 2, by=saver)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshots, "copy_all", die)
    with pytest.raises(KeyboardInterrupt):
        take(tmp_path, 3, by=saver)
    assert sorted(one.header().step for one in buffers) == [-1, 2]
    assert state_of(tmp_path).progress["step"] == 2


def test_a_step_that_the_run_went_back_behind_gives_way(
    tmp_path: Path, buffers: list[Buffer]
) -> None:
    saver = Saver(tmp_path, keep_last=3)
    take(tmp_path, 20, 25, by=saver)
    take(tmp_path, 25, by=saver)  # taken again, after a restart from 20
    assert sorted(one.header().step for one in buffers) == [20, 25]
    take(tmp_path, 30, by=saver)
    assert sorted(one.header().step for one in buffers) == [25, 30]


def test_what_is_read_is_no_view_of_the_buffer(tmp_path: Path, buffers: list[Buffer]) -> None:
    take(tmp_path, 1)
    before, again = state_of(tmp_path), state_of(tmp_path)
    for tensor in before.model.values():
        tensor.zero_()
    assert hashes(state_of(tmp_path)) == hashes(again)


def test_states_of_another_size_fit(tmp_path: Path, buffers: list[Buffer]) -> None:
    saver = Saver(tmp_path, keep_last=3)
    for step, width in enumerate((4, 400, 4, 40), 1):
        model = nn.Linear(width, 3, dtype=torch.float64 if width == 40 else torch.bfloat16)
        saver.snapshot(step, State(model.state_dict(), {"lr": 0.1}, {"step": step}, [{}]))
        saver.snapshots.finish()
        found = state_of(tmp_path)
        assert found.progress["step"] == step
        assert weights_hash(found.model) == weights_hash(model.state_dict())


# --- parts on other nodes -------------------------------------------------------------------------


# With one rank on each of two nodes.
TAKEN = (*SHARDED, "checkpoint.snapshot_every=5", "checkpoint.every=0")


def saver_of(rank: int, folder: Path, files: list[str], on_a_node: int) -> Saver:
    """Return a rank's saver, with this many ranks on each node."""
    os.environ |= {FILES: files[rank], "LOCAL_WORLD_SIZE": str(on_a_node)}
    return Saver(folder / "run", keep_last=9, enabled=rank == 0, format="sharded")


def on_nodes(ranks: int, function: Callable[..., None], folder: Path, *more: Any) -> NodeSnapshots:
    """Run function(rank, folder, files, *more) on ranks that have buffers; returns the buffers."""
    node = NodeSnapshots(ranks)
    files = [node.variables(rank)[FILES] for rank in range(ranks)]
    on_ranks(ranks, function, folder, files, *more)
    return node


def test_a_copy_waits_for_every_gpu_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    ours = [SimpleNamespace(copy_=lambda one, **_: calls.append("copy")) for _ in range(3)]
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]
    theirs = [SimpleNamespace(device=one, is_cuda=one.type == "cuda") for one in gpus]
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device=None: SimpleNamespace(synchronize=lambda: calls.append(device)),
    )
    snapshots.copy_all(ours, theirs)  # type: ignore[arg-type]
    assert calls[:3] == ["copy"] * 3 and {*calls[3:]} == {*gpus[:2]} and len(calls) == 5


Lost = tuple[list[int], list[int], list[int]]  # ranks without the third, their own part, a copy


def _lose_parts(
    rank: int, folder: Path, files: list[str], on_a_node: int, shard: int | str, lost: Lost
) -> None:
    """Take three snapshots, lose parts of the last one, and load the newest that is complete.

    `lost` lists the ranks that skip the third, that lose their own part, and that lose a copy.
    """
    saver = saver_of(rank, folder, files, on_a_node)
    missed, own, copies = lost
    for step in range(1, 4):
        state = make_shared_state(step, "fsdp", shard)
        if step < 3 or rank not in missed:
            saver.snapshot(step, state)
    saver.snapshots.finish()
    for buffer in _open_buffers():
        header = buffer.header()
        if header.step == 3 and header.rank in (own if header.rank == rank else copies):
            buffer.set_header(Header())
    found = state_of(folder / "run")
    wanted = make_shared_state(2 if missed or {*own} & {*copies} else 3, "ddp")
    assert found.is_snapshot
    if on_a_node == len(files):  # steps that other ranks lack are dropped
        assert max(one.header().step for one in _open_buffers()) == wanted.progress["step"]
    assert weights_hash(found.model) == weights_hash(wanted.model)
    assert [*found.ranks] == [{"own": wanted.progress["step"]}] * len(files)
    for index, moments in wanted.optimizer["state"].items():
        assert weights_hash(found.optimizer["state"][index]) == weights_hash(moments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "on_a_node", "shard", "lost"),
    [
        (2, 2, "all", ([], [], [])),
        (2, 2, "all", ([1], [], [])),
        (4, 4, "all", ([], [], [])),
        (4, 4, 2, ([], [], [])),
        (4, 2, "all", ([], [0, 1], [])),
        (4, 2, "all", ([], [3], [0, 1, 2])),
        (4, 2, "all", ([], [1], [1])),
        *rarely(
            (4, 2, "all", ([], [], [])),
            (4, 2, "all", ([], [2, 3], [])),
            (4, 2, "all", ([], [], [0, 1, 2, 3])),
        ),
    ],
)
def test_each_rank_holds_a_part_which_is_on_two_nodes(
    tmp_path: Path, ranks: int, on_a_node: int, shard: int | str, lost: Lost
) -> None:
    on_nodes(ranks, _lose_parts, tmp_path, on_a_node, shard, lost)


def _deliver_slowly(rank: int, folder: Path) -> None:
    """Rank 1 sends rank 3 its part; no rank returns before it arrives."""

    def slowly(*_: object, **__: object) -> Iterator[None]:
        time.sleep(0.5)  # a slow transfer: a rank that did not wait would have returned by then
        (folder / f"moved-{rank}").touch()
        return iter(())

    exchange._transfer = slowly
    exchange.deliver_copies([(3, 1)], None, Memory(-1))
    assert {one.name for one in folder.glob("moved-*")} == {"moved-1", "moved-3"}


@pytest.mark.slow
def test_ranks_without_a_part_to_move_wait_for_the_others(tmp_path: Path) -> None:
    on_ranks(4, _deliver_slowly, tmp_path)


def _lose_neighbour(rank: int, folder: Path, files: list[str]) -> None:
    """Take three snapshots; rank 1 cannot exchange the second one."""
    exchange._PATIENCE = timedelta(seconds=8)
    saver = saver_of(rank, folder, files, 1)
    for step in range(1, 4):
        saver.snapshot(step, make_shared_state(step, "fsdp", "all"))
        saver.snapshots.finish()
        if rank == 1 and step == 1:
            saver.snapshots._copies = []  # it has no buffer for another rank's part
    assert state_of(folder / "run").progress["step"] == 3
    steps = [one.header().step for one in _open_buffers()]
    assert sorted(steps[:2]) == [2, 3] and sorted(steps[2:]) == [-1, 1]


@pytest.mark.slow
def test_without_a_neighbour_the_run_goes_on(tmp_path: Path) -> None:
    on_nodes(3, _lose_neighbour, tmp_path)


def _end_early(rank: int, folder: Path, files: list[str]) -> None:
    exchange._PIECE, limits.SNAPSHOT_PIECE_S = BEGIN, 1.0
    saver_of(rank, folder, files, 1).snapshot(1, make_shared_state(1, "fsdp", "all"))


@pytest.mark.slow
def test_the_end_of_a_program_waits_for_no_exchange(tmp_path: Path) -> None:
    node = on_nodes(2, _end_early, tmp_path)
    assert node.step() == 1
    size = max(buffer.header().size for buffer in node._own)
    assert size > 60 * BEGIN  # the exchange would take over a minute
    assert node.parts()[1] == {}


@pytest.mark.slow
def test_a_lost_nodes_part_comes_from_the_next_node(tmp_path: Path) -> None:
    job = Job(tmp_path)
    whole = job.finish("whole", 2, *SHARDED)
    with job.nodes("part", 2, *TAKEN, FAULT="sleep 1 46") as runs:
        await_snapshots(runs[0], 20, parts=2)
        os.kill(runs[1].agent_pid(), signal.SIGKILL)
        told = runs[0].finish()
    folder = job.folder / "checkpoints/part"
    assert f"step 20 was only in memory; it is now saved in {folder}\n" in told, told
    assert job.finish("part", 2, *SHARDED) == whole
