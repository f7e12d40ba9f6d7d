"""The node agent writes a snapshot to a disk that is full, slow or in use."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from agents import PATIENCE_S, eventually, is_alive
from launched import state_of
from recovery import Job, ranks_below
from test_checkpoint import make_state
from test_snapshot import names_of

from distributed.checkpoint import Saver, files
from distributed.checkpoint.memory import BEGIN, FILES
from distributed.checkpoint.snapshots import Buffer
from distributed.lock import _COMMIT, _set_lock
from launcher import processes
from launcher.agent.snapshots.memory import Snapshots
from launcher.agent.snapshots.save import save
from launcher.outcome import NodeEnd


def fill(node: Snapshots, folder: Path, *steps: int) -> list[int]:
    """Take snapshots as rank 0 would; returns the descriptors of its buffers."""
    buffers = [Buffer(one.fd) for one in node.outgoing._buffers]
    os.environ[FILES] = names_of(buffers)
    saver = Saver(folder, keep_last=3)
    for step in steps:
        saver.snapshot(step, make_state(step))
    saver.snapshots.finish()
    saver._lock.close()
    del os.environ[FILES]
    return [one.fd for one in buffers]


def of_step(step: int, descriptors: list[int]) -> list[int]:
    return [fd for fd in descriptors if Buffer(fd).header().step == step]


def test_on_a_full_disk_nothing_is_left_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    descriptors = of_step(5, fill(Snapshots(1), tmp_path, 5))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as a full disk to the writer
    try:
        assert save(descriptors) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "warning: step 5, in memory, was not saved: " in capfd.readouterr().err
    assert [*tmp_path.glob("step-*")] == []


def test_what_a_killed_save_left_makes_room(tmp_path: Path) -> None:
    descriptors = fill(Snapshots(1), tmp_path, 5)
    (tmp_path / "step-4.tmp-host-1").mkdir()
    assert save(of_step(5, descriptors)) == 0
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-5"]


def test_a_damaged_one_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    descriptors = fill(Snapshots(1), tmp_path, 5, 10)
    newest = max(map(Buffer, descriptors), key=lambda one: one.header().step)
    os.pwrite(newest.fd, b"damage", BEGIN)
    assert save(of_step(10, descriptors)) == 1 and save(of_step(5, descriptors)) == 0
    told = capfd.readouterr().err
    assert "warning: step 10, in memory, was not saved: it is damaged\n" in told
    found = state_of(tmp_path)
    assert found.progress["step"] == 5


@pytest.mark.parametrize(("is_there", "why"), [(False, "No such file"), (True, "mmap length")])
def test_a_part_that_is_missing_or_cut_short_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], is_there: bool, why: str
) -> None:
    (descriptor,) = of_step(5, fill(Snapshots(1), tmp_path, 5))
    part, other = Buffer(descriptor), tmp_path / "step-5.tmp-0f/1"
    header = part.header()._replace(holders=2)
    other.parent.mkdir()
    if is_there:
        part.set_header(header._replace(rank=1))
        other.write_bytes(os.pread(descriptor, header.size // 2, 0))
    part.set_header(header)
    assert save([descriptor], "step-5.tmp-0f") == 1
    told = capfd.readouterr().err
    assert "warning: step 5, in memory, was not saved: " in told and why in told
    assert [*tmp_path.glob("step-*")] == []


def test_of_parts_on_other_nodes_one_line_tells(capfd: pytest.CaptureFixture[str]) -> None:
    node = Snapshots(2)
    for step in (5, 10):
        for rank, buffer in enumerate(node._own[step // 5 % 2 :: 2]):
            Buffer(buffer.fd).write(step, 4, [torch.ones(3)], b"rest", rank)
    assert node.step() == 10
    third = NodeEnd(parts={"5": [2], "10": [2]}, copies={"5": [3]})
    for others, saved, step, lost in (([third], 0, 5, [3]), ([third], 5, -1, []), ([], 0, -1, [])):
        found = node.find_parts(others, saved)
        assert (found.step, found.lost) == (step, lost) if found else step == -1
    found = node.find_parts([third, NodeEnd(parts={"10": [3]})], 0)
    assert found and (found.step, found.lost) == (10, [])
    assert node.save(is_first_node=True, saved_step=5, limit_s=9) == -1
    told = "node agent: warning: what is in memory was not saved: parts of it are lost\n"
    assert capfd.readouterr().err == told


def hold_commits(folder: Path) -> int:
    """Keep others from committing to a folder, as a disk that hangs would."""
    fd = os.open(folder / "lock", os.O_RDWR)
    _set_lock(fd, fcntl.F_WRLCK, _COMMIT)
    return fd


@pytest.mark.slow
def test_an_agent_that_saves_ends_with_its_supervisor(tmp_path: Path) -> None:
    job = Job(tmp_path)
    taken = ("checkpoint.snapshot_every=5", "checkpoint.every=0")
    process = job.start("slow", 1, *taken, FAULT="SIGKILL 0 46", PACE="0.05")
    folder = job.folder / "checkpoints/slow"
    eventually(lambda: (folder / "lock").exists() and ranks_below(process.pid))
    rank = ranks_below(process.pid)
    (agent,) = (pid for pid in processes.descendants(process.pid) if pid not in rank)
    fd = hold_commits(folder)
    # Then it is a process that saves.
    eventually(lambda: processes.descendants(agent) not in ([], rank))
    os.kill(process.pid, signal.SIGKILL)
    left = [agent, *processes.descendants(agent)]
    eventually(lambda: not any(map(is_alive, left)))
    process.communicate(timeout=PATIENCE_S)
    os.close(fd)
    assert files.steps(folder) == []
