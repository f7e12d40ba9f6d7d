"""Snapshots that outlive their ranks: restarts continue from them; one is saved at a run's end."""

import fcntl
import itertools
import math
import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from agents import ROOT, Run, eventually, is_alive, rarely, world, written
from launched import state_of
from ports import free_port
from recovery import SHARDED, Job, Outcome, await_snapshots
from test_checkpoint import make_state
from test_recovery import job as job
from test_snapshot import names_of
from torch import nn

from distributed.checkpoint import Saver, files
from distributed.checkpoint.files import read_progress, score, steps
from distributed.checkpoint.memory import BEGIN, FILES
from distributed.checkpoint.snapshots import Buffer
from distributed.environment import detect
from distributed.lock import _COMMIT, _set_lock
from launcher import processes
from launcher.agent.snapshots import memory
from launcher.agent.snapshots.memory import PIECE, Incoming, Outgoing, Snapshots
from launcher.agent.snapshots.save import save
from launcher.outcome import NodeEnd
from launcher.wire import limits
from launcher.wire.messages import SnapshotData
from training.config_file import SettingsError
from training.model import check_snapshot_memory
from training.settings import load

TAKEN = ("checkpoint.snapshot_every=5", "checkpoint.every=0")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="full"),
        pytest.param(SHARDED, id="sharded", marks=pytest.mark.long),
    ],
)
def shared(request: pytest.FixtureRequest) -> Sequence[str]:
    """The settings of one kind of checkpoint."""
    settings: Sequence[str] = request.param
    return settings


@pytest.fixture(scope="module")
def whole(job: Job, shared: Sequence[str]) -> Outcome:
    """The result of two ranks that run without interruptions or snapshots."""
    return job.finish(f"whole-{len(shared)}", 2, *shared)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(0, marks=pytest.mark.another_torch("snapshots")),
        pytest.param(1, marks=pytest.mark.long),
    ],
)
def test_a_restart_goes_on_from_memory(
    job: Job, whole: Outcome, rank: int, shared: Sequence[str]
) -> None:
    name = f"restart-{rank}-{len(shared)}"
    fault = f"SIGKILL {rank} 46"  # in step 23
    code, output = job.run(name, 2, *TAKEN, *shared, restarts=1, FAULT=fault)
    assert code == 0, output
    assert "; from step 20, in memory, 2 steps lost; now on port " in output
    assert "resumed    after step 20, from memory\n" in output
    assert job.outcome(name) == whole


@pytest.mark.long
@pytest.mark.parametrize("step", [20, 60])
def test_a_restart_from_memory_saves_what_was_due(
    job: Job, whole: Outcome, shared: Sequence[str], step: int
) -> None:
    """Kill the run when it is about to save that step for the first time."""
    name = f"due-{step}-{len(shared)}"
    settings = (*TAKEN, f"checkpoint.every={step}", "checkpoint.keep_last=9", *shared)
    assert job.kill_and_finish(name, 2, settings, ["Saver.save 0"]) == whole
    saved = steps(job.folder / "checkpoints" / name)
    assert [path.name for path in saved] == [f"step-{one}" for one in range(step, 61, step)]
    assert all(math.isfinite(score(read_progress(path))) for path in saved)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nan-gradient 1 50", *rarely("nan 1 46")])  # in steps 25 and 23
def test_what_is_not_finite_gets_into_no_snapshot(
    job: Job, shared: Sequence[str], fault: str
) -> None:
    name = f"{fault.split()[0]}-{len(shared)}"
    code, output = job.run(name, 2, *TAKEN, *shared, "train.log_every=50", FAULT=fault)
    assert code == 1 and "[loss-not-finite]" in output
    folder = job.folder / "checkpoints" / name
    assert f"step 20 was only in memory; it is now saved in {folder}\n" in output
    assert [path.name for path in steps(folder)] == ["step-20"]
    assert math.isfinite(
        score(read_progress(folder / "best"))
    )  # the score of the validation after step 20


@pytest.mark.long
def test_a_step_that_the_loss_scaler_skips_gets_into_a_snapshot(job: Job) -> None:
    """The gradient of step 25 is not finite, but the weights are finite."""
    (job.folder / "mixed.py").write_text(
        "import training.model\n"
        "from noisy import Noisily\n"
        "training.model.is_mixed = lambda settings: True  # as on a GPU\n"
    )
    words = ["task=mixed:Noisily", "distributed.mixed_precision.dtype=float16"]
    words += [*TAKEN, "train.max_steps=29"]
    with job.nodes("mixed", 2, *words, FAULT="nan-gradient 1 50", PACE="0.1") as runs:
        await_snapshots(runs[0], 25)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_at_the_start(job: Job) -> None:
    settings = load(ROOT / "config/local3.yaml", TAKEN)
    model = nn.Linear(10**5, 10**5, bias=False, device="meta")
    check_snapshot_memory(model, settings, detect({}))  # without an agent, there are none
    with_agent = detect({"HEARTBEAT_FILE": "the agent's"})
    with pytest.raises(
        SettingsError, match=r"^checkpoint.snapshot_every: .* 240.0 GB .* free; set"
    ):
        check_snapshot_memory(model, settings, with_agent)
    model.requires_grad_(False)
    with pytest.raises(SettingsError, match=r" 80.0 GB "):
        check_snapshot_memory(model, settings, with_agent)
    code, output = job.run("plan", 2, *TAKEN, "train.max_steps=1")
    assert code == 0 and "snapshots  every 5 steps, in 0 MB of memory\n" in output


def fill(buffer: Buffer, step: int, size: int) -> None:
    buffer.write(step, 1, [torch.full((size,), step % 251, dtype=torch.uint8)], b"rest", 0)
    buffer.seal()


@pytest.fixture
def buffers() -> list[Buffer]:
    return [Buffer(os.memfd_create("snapshot")) for _ in range(2)]


@pytest.fixture
def outgoing(buffers: list[Buffer]) -> Outgoing:
    outgoing = Outgoing(buffers)
    outgoing.begin()
    return outgoing


def pieces(outgoing: Outgoing, parts: Iterator[SnapshotData | None]) -> Iterator[SnapshotData]:
    """Yield the pieces that are available now."""
    outgoing.rest_s = 0.0
    while outgoing.rest_s != limits.SNAPSHOT_LOOK_S:
        if piece := next(parts):
            yield piece


@pytest.mark.parametrize("size", [1, PIECE - BEGIN, PIECE, 3 * PIECE + 1, 10**7])
def test_a_copy_is_the_newest_byte_for_byte(
    buffers: list[Buffer], outgoing: Outgoing, size: int
) -> None:
    incoming, parts = Incoming(), outgoing.pieces()
    assert [*pieces(outgoing, parts)] == []
    for step in (5, 10, 15):
        fill(source := buffers[step // 5 % 2], step, size)
        for piece in pieces(outgoing, parts):
            incoming.store_piece(piece)
        newest = max(incoming.buffers, key=lambda one: one.header().step)
        assert os.pread(newest.fd, 2 * 10**7, 0) == os.pread(source.fd, 2 * 10**7, 0)
        assert [*pieces(outgoing, parts)] == []


def test_a_copy_on_its_way_leaves_the_one_before(buffers: list[Buffer], outgoing: Outgoing) -> None:
    incoming, parts = Incoming(), outgoing.pieces()
    for step in (5, 10):
        fill(buffers[step // 5 % 2], step, 3 * PIECE)
        for piece in [*pieces(outgoing, parts)][: None if step == 5 else -1]:
            incoming.store_piece(piece)
    assert sorted(one.header().step for one in incoming.buffers) == [-1, 5]


def test_the_node_that_replaces_the_keeper_gets_a_whole_copy(
    buffers: list[Buffer], outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "is_busy", lambda connection: False)
    fill(buffers[0], 5, 3 * PIECE)
    keepers = [Incoming() for _ in range(3)]
    held = []
    opened = len(os.listdir("/proc/self/fd"))
    for keeper, most in zip(keepers, (2, 9, 9), strict=True):  # the first is lost while it receives
        link = Mock()
        outgoing.begin()
        for _ in range(20):
            outgoing.next_at = 0.0
            outgoing.on_time({1: link})
        for sent in link.send.call_args_list[:most]:
            keeper.store_piece(*sent.args)
        held.append(max(one.header().step for one in keeper.buffers))
    assert held == [-1, 5, 5]
    assert len(os.listdir("/proc/self/fd")) <= opened


def test_what_its_rank_overwrites_is_sent_as_it_was(
    buffers: list[Buffer], outgoing: Outgoing
) -> None:
    incoming, parts = Incoming(), pieces(outgoing, outgoing.pieces())
    fill(buffers[0], 5, 3 * PIECE)
    incoming.store_piece(next(parts))
    fill(buffers[0], 10, 3 * PIECE)
    for piece in itertools.takewhile(lambda sent: sent.piece.step == 5, parts):
        incoming.store_piece(piece)
    (newest,) = (one for one in incoming.buffers if one.header().step == 5)
    assert os.pread(newest.fd, 3 * PIECE, BEGIN) == bytes([5]) * 3 * PIECE


def test_what_its_rank_overwrites_while_it_is_copied_is_not_sent(
    buffers: list[Buffer], outgoing: Outgoing
) -> None:
    parts = outgoing.pieces()
    fill(buffers[0], 5, 10**7)
    assert next(parts) is None  # the first half is copied
    fill(buffers[0], 10, 10**7)
    assert {sent.piece.step for sent in pieces(outgoing, parts)} == {10}


@pytest.mark.long
def test_another_node_stays_while_the_first_one_saves(job: Job) -> None:
    folder = job.folder / "checkpoints/stays"
    with job.nodes("stays", 2, *TAKEN, FAULT="sleep 1 46") as runs:
        await_snapshots(runs[1], 20)
        lock = hold_commits(folder)
        (other,) = runs[1].rank_pids()
        os.kill(runs[0].rank_pids()[0], signal.SIGKILL)
        eventually(lambda: not is_alive(other))
        with pytest.raises(subprocess.TimeoutExpired):  # it keeps running
            runs[1].process.wait(1.0)
        assert runs[0].process.poll() is None
        os.close(lock)
        assert "step 20 was only in memory; it is now saved" in runs[0].finish()
        runs[1].finish()
    assert [path.name for path in steps(folder)] == ["step-20"]


WAITING = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).with_name("ready" + os.environ["RANK"]).touch()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_another_node_stays_until_the_first_one_has_recorded_the_end(
    tmp_path: Path, runs: list[Run]
) -> None:
    script, go, port = written(tmp_path / "x.py", WAITING), tmp_path / "go", free_port()
    for node in range(2):
        logs = ["--log-dir", str(tmp_path / "logs"), "--rdzv-id", "r"]
        runs.append(Run([*world(port, node), *logs, str(script), str(go)]))
    for node in range(2):
        eventually((tmp_path / f"ready{node}").exists)
    lock = hold_commits(tmp_path / "logs/r")  # as a slow file system would
    (rank,) = runs[1].rank_pids()
    go.touch()
    eventually(lambda: not is_alive(rank))
    with pytest.raises(subprocess.TimeoutExpired):  # it keeps running
        runs[1].process.wait(2.0)
    os.close(lock)
    assert [run.process.wait() for run in runs] == [0, 0]


# --- a disk that is full, slow or in use ----------------------------------------------------------


def take(node: Snapshots, folder: Path, *steps: int) -> list[int]:
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
    descriptors = of_step(5, take(Snapshots(1), tmp_path, 5))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # like a full disk for the writer
    try:
        assert save(descriptors, 0) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "warning: the snapshot of step 5 in memory was not saved: " in capfd.readouterr().err
    assert [*tmp_path.glob("step-*")] == []


def test_what_a_killed_save_left_makes_room(tmp_path: Path) -> None:
    descriptors = take(Snapshots(1), tmp_path, 5)
    (tmp_path / "step-4.tmp-host-1").mkdir()
    assert save(of_step(5, descriptors), 0) == 0
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-5"]


def test_a_damaged_one_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    descriptors = take(Snapshots(1), tmp_path, 5, 10)
    newest = max(map(Buffer, descriptors), key=lambda one: one.header().step)
    os.pwrite(newest.fd, b"damage", BEGIN)
    assert save(of_step(10, descriptors), 0) == 1 and save(of_step(5, descriptors), 0) == 0
    told = capfd.readouterr().err
    assert "warning: the snapshot of step 10 in memory was not saved: it is damaged\n" in told
    assert state_of(tmp_path).progress["step"] == 5


@pytest.mark.parametrize(("is_there", "why"), [(False, "No such file"), (True, "mmap length")])
def test_a_part_that_is_missing_or_cut_short_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], is_there: bool, why: str
) -> None:
    (descriptor,) = of_step(5, take(Snapshots(1), tmp_path, 5))
    part, other = Buffer(descriptor), tmp_path / "step-5.tmp-0f/1"
    header = part.header()._replace(holders=2)
    other.parent.mkdir()
    if is_there:
        part.set_header(header._replace(rank=1))
        other.write_bytes(os.pread(descriptor, header.size // 2, 0))
    part.set_header(header)
    assert save([descriptor], 0, "step-5.tmp-0f") == 1
    told = capfd.readouterr().err
    assert "warning: the snapshot of step 5 in memory was not saved: " in told and why in told
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
    assert node.save(5, 0, is_first_node=True, limit_s=9) == -1
    told = "node agent: warning: the snapshot in memory was not saved: parts of it are lost\n"
    assert capfd.readouterr().err == told


def hold_commits(folder: Path) -> int:
    """Keep other processes from committing to a folder, as if the disk hung."""
    fd = os.open(folder / "lock", os.O_RDWR)
    _set_lock(fd, fcntl.F_WRLCK, _COMMIT)
    return fd


@pytest.mark.slow
def test_an_agent_that_saves_ends_with_its_supervisor(tmp_path: Path) -> None:
    job = Job(tmp_path)
    folder = job.folder / "checkpoints/slow"
    with job.nodes("slow", 1, *TAKEN, FAULT="sleep 0 46") as (run,):
        await_snapshots(run, 20)
        agent, (rank,) = run.agent_pid(), run.rank_pids()
        lock = hold_commits(folder)
        os.kill(rank, signal.SIGKILL)
        # Wait until there is a process that saves.
        eventually(lambda: {*processes.descendants(agent)} - {rank})
        run.process.kill()
        left = [agent, *processes.descendants(agent)]
        eventually(lambda: not any(map(is_alive, left)))
        run.finish()
        os.close(lock)
    assert files.steps(folder) == []
