"""Checkpoints: complete or absent, whatever happens, and the same on every rank."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from forked_ranks import on_ranks
from job_tools import make_tool
from launched import hash_of, state_of
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from distributed import checkpoint
from distributed.checkpoint import CheckpointError, Saver, State, files, load, weights_hash
from distributed.errors import Refused
from distributed.lock import is_locked, lock_run
from distributed.torch import gather_bytes
from launcher.cli.checkpoint import main


def save(run: Path, step: int, state: State, *, keep_last: int, format: str = "full") -> Path:
    """Save one checkpoint, and return its folder once it is on the disk."""
    saver = Saver(str(run), keep_last=keep_last, format=format)
    try:
        saver.save(step, state)
        saver.wait()
    finally:
        saver._lock.close()
    return run / f"step-{step}"


def names(run: Path) -> list[str]:
    return sorted(set(os.listdir(run)) - {"lock"})


def make_state(step: int, **progress: float) -> State:
    """Return a model and an AdamW that has taken one step; all weights are `step`."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
    place = {"step": step, "epoch": 0, "samples": 8, **progress}
    own = {"rng": checkpoint.rng_state()}
    return State(model.state_dict(), optimizer.state_dict(), place, [own])


def test_numbers_of_numpy_are_loaded_as_pythons(tmp_path: Path) -> None:
    state = make_state(1)
    state.optimizer["param_groups"][0]["lr"] = numpy.float64(0.5)  # as from a schedule with numpy
    save(tmp_path, 1, replace(state, ranks=[{"last_lr": [numpy.float32(0.25)]}]), keep_last=1)
    loaded = state_of(tmp_path)
    assert repr(loaded.optimizer["param_groups"][0]["lr"]) == "0.5"
    assert loaded.ranks[0] == {"last_lr": [0.25]}


@pytest.mark.parametrize("is_own", [False, True])
def test_what_could_not_be_loaded_is_refused_by_the_first_save(
    tmp_path: Path, is_own: bool
) -> None:
    state, odd = make_state(1), {"when": datetime.timedelta(1)}
    ranks = files.Ranks([files.pack(odd)])  # as gather_ranks() returns them
    state = replace(state, ranks=ranks) if is_own else replace(state, optimizer=odd)
    name = "ranks" if is_own else "optimizer"
    with pytest.raises(CheckpointError, match=rf"^{name} holds datetime.timedelta, which is not"):
        save(tmp_path, 1, state, keep_last=1)


def newest_step(run: Path) -> int:
    state = state_of(run)
    assert state.model["weight"][0, 0] == state.progress["step"]
    return int(state.progress["step"])


def in_a_child(action: Callable[[], object]) -> int:
    """Run the action in a fork; return its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


in_each_format = pytest.mark.parametrize("format", ["full", "sharded"])


@in_each_format
def test_what_is_saved_comes_back(tmp_path: Path, format: str) -> None:
    state = make_state(5)
    assert load(tmp_path) is load(tmp_path / "run") is None
    folder = save(tmp_path / "run", 5, state, keep_last=3, format=format)
    for path in (folder, str(tmp_path / "run"), tmp_path / "run/latest"):
        loaded = state_of(Path(path))
        assert weights_hash(loaded.model) == weights_hash(state.model)
        assert loaded.progress == state.progress
        moments, saved_moments = loaded.optimizer["state"][0], state.optimizer["state"][0]
        assert torch.equal(moments["exp_avg"], saved_moments["exp_avg"])
        assert loaded.optimizer["param_groups"] == state.optimizer["param_groups"]


def test_the_weights_open_with_plain_torch(tmp_path: Path) -> None:
    state = State({"w": torch.ones(2)}, {}, {"step": 3})  # without the ranks' own state
    folder = save(tmp_path, 3, state, keep_last=1)
    assert set(torch.load(folder / "model.pt", weights_only=True)) == {"w"}
    found = state_of(tmp_path)
    assert (found.progress, [*found.ranks]) == ({"step": 3}, [])


@pytest.mark.parametrize(
    "wrong", [{"model": torch.nn.Linear(2, 2)}, {"optimizer": object()}, {"ranks": 3}]
)
def test_what_no_load_could_take_is_refused_before_it_is_saved(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"State's (model|optimizer) is not a dict|int"):
        State(**{"model": {}, "optimizer": {}, "progress": {}} | wrong)


def test_the_newest_stay_and_what_is_not_whole_never_counts(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step, make_state(step), keep_last=2)
    assert names(tmp_path) == ["latest", "step-10", "step-11"]
    assert os.readlink(tmp_path / "latest") == "step-11"
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-13.tmp-99").mkdir()
    assert newest_step(tmp_path) == 11
    save(tmp_path, 14, make_state(14), keep_last=2)
    assert names(tmp_path) == ["latest", "step-11", "step-12", "step-14"]


def test_each_format_is_replaced_by_the_other(tmp_path: Path) -> None:
    for step, format in ((1, "full"), (2, "sharded"), (3, "full")):
        save(tmp_path, step, make_state(step), keep_last=1, format=format)
        assert names(tmp_path) == ["latest", f"step-{step}"]
        assert newest_step(tmp_path) == step


@pytest.mark.parametrize(
    ("keep_last", "format", "told"),
    [(1, "shard", "'shard' is unknown; use full or sharded"), (0, "full", "keep_last is 0")],
)
def test_what_no_saver_can_do_is_refused(
    tmp_path: Path, keep_last: int, format: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Saver(tmp_path, keep_last=keep_last, format=format)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip_a_bit(folder / "model.pt"),
        lambda folder: flip_a_bit(folder / "optimizer.pt"),
        lambda folder: flip_a_bit(folder / "manifest.json"),
        lambda folder: os.truncate(folder / "model.pt", 100),
        lambda folder: (folder / "ranks.pt").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
    ids=["model", "optimizer", "manifest", "cut", "file missing", "manifest missing"],
)
def test_a_damaged_one_is_named_and_the_one_before_taken(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, step, make_state(step), keep_last=2)
    damage(tmp_path / "step-2")
    assert newest_step(tmp_path) == 1
    assert f"{tmp_path}/step-2" in caplog.text
    damage(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=r"step-2.*no intact checkpoint is left"):
        load(tmp_path)


@pytest.mark.parametrize(("file", "every"), [("manifest.json", 37), ("progress.json", 5)])
def test_a_flip_in_an_old_one_is_named_and_ends_no_save(
    tmp_path: Path, file: str, every: int
) -> None:
    assert flip_old_ones(tmp_path, file, every) > 5


def flip_old_ones(folder: Path, file: str, every: int) -> int:
    """Flip a bit of every `every`-th byte of an old checkpoint's file; returns how many."""
    saver = Saver(folder, keep_last=2)
    state = make_state(1)
    saver.save(1, state)
    saver.wait()
    whole = (folder / "step-1" / file).read_bytes()
    for number, byte in enumerate(range(0, len(whole), every)):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << number % 8
        (folder / "step-1" / file).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="step-1"):
            files.read_files(folder / "step-1")
        for step in (2, 3):
            saver.save(step, state)
            saver.wait()
        assert {"step-1", "step-2", "step-3"} <= set(os.listdir(folder))
    saver._lock.close()
    return number + 1


def test_what_is_no_manifest_of_a_checkpoint_is_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, make_state(1), keep_last=1)
    (folder / "model.pt").rename(tmp_path / "model.pt")
    (folder / "model.pt").symlink_to(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load(tmp_path)
    (folder / "manifest.json").write_text('{"version": 1, "saved": 0.0, "files": {}}')
    with pytest.raises(CheckpointError, match="differs from what was written"):
        load(tmp_path)


@pytest.mark.slow
@in_each_format
def test_killed_at_any_moment_a_whole_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """Kill the saving process at each of its important system calls, one after the other."""
    calls_left = 0

    def deadly(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **options: object) -> object:
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    for owner, name in (
        (os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "replace"), (os, "symlink"),
        (os, "unlink"), (os, "rmdir"), (torch, "save"), (files, "hash_file"),
        (FileSystemWriter, "write_data"), (FileSystemWriter, "finish"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, deadly(getattr(owner, name)))
    calls_left = 1000
    save(tmp_path, 1, make_state(1), keep_last=1, format=format)
    step, kills = 1, 0
    while True:
        calls_left, state = kills, make_state(step + 1)
        action = partial(save, tmp_path, step + 1, state, keep_last=1, format=format)
        status = in_a_child(action)
        calls_left = 1000
        newest = newest_step(tmp_path)
        assert newest in (step, step + 1)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills, step = kills + 1, newest
    assert kills > 10
    assert os.readlink(tmp_path / "latest") == f"step-{newest}"


@in_each_format
def test_all_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    synced: set[str] = set()
    sync, commit = os.fsync, files.commit

    def note(fd: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def check(temporary: Path, final: Path) -> None:
        assert synced >= {*os.listdir(temporary), temporary.name}
        commit(temporary, final)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr("distributed.checkpoint.saver.commit", check)
    save(tmp_path, 1, make_state(1), keep_last=1, format=format)
    assert tmp_path.name in synced


def test_what_a_run_finds_damaged_is_set_aside(tmp_path: Path) -> None:
    """Otherwise, a damaged checkpoint would count towards keep_last, and a good one be deleted."""
    for step in (1, 2, 3):
        save(tmp_path, step, make_state(step), keep_last=3)
    for step in (2, 3):
        flip_a_bit(tmp_path / f"step-{step}/model.pt")
    saver = Saver(tmp_path, keep_last=2)
    assert newest_step(tmp_path) == 1
    assert os.readlink(tmp_path / "latest") == "step-1"
    saver.save(4, make_state(4))
    saver.wait()
    saver._lock.close()
    aside = ["step-2.damaged", "step-3.damaged"]
    assert names(tmp_path) == ["latest", "step-1", *aside, "step-4"]
    flip_a_bit(save(tmp_path, 5, make_state(5), keep_last=2) / "model.pt")
    assert newest_step(tmp_path) == 4  # read by a process without the lock: nothing is renamed
    assert names(tmp_path) == ["latest", *aside, "step-4", "step-5"]


def test_what_a_run_went_back_behind_is_set_aside(tmp_path: Path) -> None:
    """Otherwise, the damaged checkpoint, being the newest, would be kept instead of a good one."""
    for step in (1, 2, 3):
        save(tmp_path, step, make_state(step), keep_last=2)
    flip_a_bit(tmp_path / "step-3/model.pt")
    assert newest_step(tmp_path) == 2
    flip_a_bit(tmp_path / "step-2/model.pt")  # the damaged checkpoint is replaced
    save(tmp_path, 2, make_state(2), keep_last=1)
    latest, own, aside = names(tmp_path)
    assert (latest, own) == ("latest", "step-2") and aside == "step-3.later"
    assert newest_step(tmp_path) == 2


def test_a_script_that_loads_nothing_keeps_the_later_ones_of_earlier_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for weight in (8.0, 9.0):  # two earlier runs; the second one's is not the best
        save(tmp_path, 9, make_state(9, validation_loss=weight, weight=weight), keep_last=1)
        save(tmp_path, 1, make_state(1, validation_loss=10.0), keep_last=1)
    assert (
        files.read_progress(tmp_path / "step-9.later")["weight"] == 9.0
    )  # the newest of that step
    assert f"{tmp_path}/step-9 is now step-9.later" in caplog.text
    assert newest_step(tmp_path) == 1
    assert os.readlink(tmp_path / "best") == "step-1"


def test_a_best_that_is_set_aside_is_not_the_best_any_more(tmp_path: Path) -> None:
    save(tmp_path, 9, make_state(9, validation_loss=1.0), keep_last=1)
    assert os.readlink(tmp_path / "best") == "step-9"
    save(tmp_path, 1, make_state(1), keep_last=1)
    assert names(tmp_path) == ["latest", "step-1", "step-9.later"]


@in_each_format
def test_what_changes_after_the_call_is_not_saved(tmp_path: Path, format: str) -> None:
    state = make_state(1)
    saver = Saver(tmp_path, keep_last=1, format=format)
    for step in (1, 2):
        nn.init.constant_(state.model["weight"], step)
        saver.save(step, replace(state, progress={"step": step}))
        state.model["weight"].zero_()
    saver.wait()
    assert newest_step(tmp_path) == 2


@in_each_format
def test_a_job_that_was_started_again_takes_over(tmp_path: Path, format: str) -> None:
    os.environ["SLURM_JOB_ID"] = "12"
    cut_off = Saver(tmp_path, keep_last=1, format=format)
    cut_off.save(4, make_state(4))
    cut_off.wait()
    os.environ["SLURM_RESTART_COUNT"] = "1"
    save(tmp_path, 5, make_state(5), keep_last=1)
    cut_off.save(10, make_state(10))
    with pytest.raises(CheckpointError, match=r"step 10 was not saved: .*restarted on ") as raised:
        cut_off.wait()
    assert vars(raised.value) == {"fault": "node-lost"}
    assert names(tmp_path) == ["latest", "step-5"]
    cut_off._lock.close()


FIRST = {"LAUNCH_TOKEN": "launch.0", "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


@pytest.mark.parametrize(
    ("later", "takes_over"),
    [
        ({}, False),
        ({"SLURM_RESTART_COUNT": "0"}, False),
        ({"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": "5"}, False),
        ({"SLURM_RESTART_COUNT": "2"}, True),
        ({"LAUNCH_TOKEN": "launch.4", ATTEMPT: "1"}, True),
        ({"LAUNCH_TOKEN": "launch.4"}, False),
        ({"LAUNCH_TOKEN": "other.4", ATTEMPT: "1"}, False),
        ({"LAUNCH_TOKEN": "", ATTEMPT: "1"}, False),
    ],
)
def test_who_takes_over_from_a_process_that_still_lives(
    tmp_path: Path, later: dict[str, str], takes_over: bool
) -> None:
    os.environ |= FIRST
    first = lock_run(tmp_path)
    os.environ |= later

    def commit() -> None:
        with first.committing():
            pass

    def lock() -> None:
        lock_run(tmp_path).close()

    succeeds, fails = (lock, commit) if takes_over else (commit, lock)
    succeeds()
    with pytest.raises(Refused, match="node-lost" if takes_over else "run-is-live"):
        fails()
    first.close()


def test_an_agent_takes_over_with_the_attempt_that_it_knows(tmp_path: Path) -> None:
    os.environ |= {"LAUNCH_TOKEN": "launch.0", ATTEMPT: "0"}
    first = lock_run(tmp_path, attempt=1)
    with pytest.raises(Refused, match="run-is-live"):
        lock_run(tmp_path)
    lock_run(tmp_path, attempt=2).close()
    with pytest.raises(Refused, match="node-lost"), first.committing():
        pass
    first.close()


SUBMITTED = "2026-11-20T16:12:33"


@pytest.mark.parametrize(
    ("later", "is_refused"),
    [
        (("box", 1, SUBMITTED), False),  # the same start, for a second srun in one job
        (("box", 1, ""), False),  # in a container without SLURM's commands
        (("box", 2, "2026-11-20T17:00:00"), False),  # requeued
        (("box", 1, "2026-12-24T00:00:00"), True),
        (("box", 0, "2026-12-24T00:00:00"), True),
        (("other", 2, SUBMITTED), True),
    ],
)
def test_another_job_of_the_same_id_is_refused(
    tools: Path, later: tuple[str, int, str], is_refused: bool
) -> None:
    def lock_as_job(cluster: str, start: int, submitted: str, *runs: str) -> None:
        """Lock runs as a job does; the squeue on PATH prints a submit time, or does not answer."""
        make_tool(tools / "squeue", f"[ $3 = 12 ] && [ $5 = %V ] && echo {submitted}")
        job = {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": cluster}
        os.environ |= {**job, "SLURM_RESTART_COUNT": str(start)}
        for run in runs:
            (tools / run).mkdir(exist_ok=True)
            lock_run(tools / run).close()

    lock_as_job("box", 1, SUBMITTED, "12", "mine")
    whose = rf"run 12 .* with the same id \(cluster box, submitted {SUBMITTED}\); .*foreign-run"
    with pytest.raises(Refused, match=whose) if is_refused else contextlib.nullcontext():
        lock_as_job(*later, "12")
    lock_as_job(*later, "mine")  # a RUN_ID chosen by the user


@pytest.mark.parametrize(
    ("files", "saved"), [((), "{}/12"), (("run.json",), "checkpoints/12 (or in checkpoint.dir)")]
)
def test_a_foreign_run_is_continued_from_its_checkpoints(
    tools: Path, files: Sequence[str], saved: str
) -> None:
    """The folder of a run's log, which has a run.json, has no checkpoints."""
    make_tool(tools / "squeue", f"echo {SUBMITTED}")
    os.environ["SLURM_JOB_ID"] = "12"
    (tools / "12").mkdir()
    for cluster, refusal in (("box", contextlib.nullcontext()), ("other", pytest.raises(Refused))):
        os.environ["SLURM_CLUSTER_NAME"] = cluster
        with refusal as raised:
            lock_run(tools / "12").close()
        for file in files:
            (tools / "12" / file).touch()
    assert raised and f"add resume={saved.format(tools)}" in str(raised.value)


@pytest.mark.parametrize("name", ["None", "None.1"])
def test_a_folder_may_be_called_none(tmp_path: Path, name: str) -> None:
    for _ in range(2):
        (tmp_path / name).mkdir(exist_ok=True)
        lock_run(tmp_path / name).close()


def test_a_lock_that_holds_anything_is_refused_in_words(tmp_path: Path, tools: Path) -> None:
    make_tool(tools / "squeue", f"echo {SUBMITTED}")
    os.environ |= {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "box"}
    (tmp_path / "12").mkdir()
    lock_run(tmp_path / "12").close()
    file = next(path for path in (tmp_path / "12").iterdir() if "lock" in path.name)
    file.write_text(json.dumps({**json.loads(file.read_text()), "cluster": ["box"]}))
    with pytest.raises(Refused, match="foreign-run"):
        lock_run(tmp_path / "12")


def test_what_takes_over_waits_for_a_commit(tmp_path: Path) -> None:
    os.environ["SLURM_JOB_ID"] = "12"
    claim = lock_run(tmp_path)
    ready, done = os.pipe()
    with claim.committing():
        pid = os.fork()
        if pid == 0:
            os.environ["SLURM_RESTART_COUNT"] = "1"
            os.write(done, b"started ")
            lock_run(tmp_path)
            os._exit(len(os.listdir(tmp_path / "committed")))  # 0 if it did not wait
        assert os.read(ready, 8) == b"started "
        (tmp_path / "committed").mkdir()
        (tmp_path / "committed/first").touch()
        (tmp_path / "committed/second").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    with pytest.raises(Refused, match="node-lost"), claim.committing():
        pass
    os.close(claim.fd)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "fcntl", fail)
    if code == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(code)):
            lock_run(tmp_path)
        return
    first = lock_run(tmp_path)
    with first.committing():
        assert not is_locked(tmp_path)
    lock_run(tmp_path).close()
    cure = "never start two runs with the same id"
    told = f"warning: {tmp_path}: this file system has no locks; {cure}"
    assert caplog.messages == [told, told]
    first.close()


@pytest.mark.parametrize(("module", "name"), [(os, "write"), (fcntl, "fcntl")])
def test_a_lock_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, name, fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left"):
        lock_run(tmp_path)
    assert os.listdir("/proc/self/fd") == before
    assert names(tmp_path) == []


def test_a_copy_of_the_folder_lets_nobody_in(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "run", keep_last=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # opens and closes the lock file
    with pytest.raises(Refused, match="run-is-live"):
        lock_run(tmp_path / "run")
    saver._lock.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = lock_run(tmp_path)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        theirs.send(b"forked")
        theirs.recv(1)
        os._exit(0)
    assert ours.recv(6) == b"forked"
    lock.close()
    lock_run(tmp_path).close()
    ours.send(b"x")
    assert os.waitpid(child, 0)[1] == 0
    ours.close()
    theirs.close()


def test_an_error_in_the_background_ends_the_run(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "run", keep_last=1)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("in the way")
    saver.save(1, make_state(1))
    with pytest.raises(CheckpointError, match=r"^step 1 was not saved: .*run/lock"):
        saver.wait()
    with pytest.raises(CheckpointError):
        saver.check()


def hash_with(**tensors: Tensor) -> str:
    return weights_hash(tensors)


def test_the_hash_sees_names_types_shapes_and_bytes() -> None:
    base = torch.arange(6.0)
    different = {
        hash_with(a=base),
        hash_with(b=base),
        hash_with(a=base.view(2, 3)),
        hash_with(a=base.to(torch.bfloat16)),
        hash_with(a=base.view(torch.int32)),
        hash_with(a=base + 1),
        hash_with(a=base, b=torch.empty(0)),
    }
    assert len(different) == 7
    assert hash_with(a=base.view(2, 3).T) == hash_with(a=base.view(2, 3).T.contiguous())
    assert hash_with(a=base, b=base) == weights_hash({"b": base, "a": base})


def test_an_old_one_that_somebody_reads_over_nfs_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a file in the folder while a process has it open."""
    remove = os.rmdir

    def rmdir(path: Any, **options: Any) -> None:
        if str(path).endswith(".tmp-old"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    for step in (1, 2):
        save(tmp_path, step, make_state(step), keep_last=1)
    assert [path.name for path in files.steps(tmp_path)] == ["step-2"]
    monkeypatch.undo()
    save(tmp_path, 3, make_state(3), keep_last=1)
    assert not [*tmp_path.glob("*.tmp-*")]


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: object) -> tuple[int, str, str]:
        return main([*map(str, arguments)]), *capsys.readouterr()

    run = tmp_path / "run"
    state = make_state(1, validation_loss=2.5)
    folder = save(run, 1, state, keep_last=3)
    save(run, 2, make_state(2), keep_last=3)
    for path in (folder, run / "best"):
        assert told("hash", path) == (0, f"{weights_hash(state.model)}\n", "")
    first, second = told("ls", run)[1].splitlines()
    assert re.fullmatch(r"step-1 +0\.1 MB +\S+ \S+ +validation loss 2\.5000 +best", first)
    assert re.fullmatch(r"step-2 +0\.1 MB +\S+ \S+ +latest", second)
    assert told("export", run, tmp_path / "weights.pt") == (0, "", "")
    exported = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert exported["bias"].tolist() == [2.0] * 64
    flip_a_bit(run / "step-2/optimizer.pt")
    code, verified, _ = told("verify", run)
    assert code == 1
    intact, damaged = verified.splitlines()
    assert intact.split() == ["step-1", "intact"]
    cause = f"{run}/step-2/optimizer.pt differs from what was written (SHA-256)"
    assert damaged.endswith(f"damaged: {cause}")
    assert told("hash", tmp_path / "no") == (
        2, "", f"checkpoint: {tmp_path}/no holds no checkpoint; correct the path\n",
    )  # fmt: skip
    for wrong in ((), ("ls",), ("look", run), ("export", run)):
        assert told(*wrong)[0] == 2


def _load_on_a_rank(rank: int, folder: Path, weights: str) -> None:
    gathered = checkpoint.gather_ranks({"rank": rank})
    assert [*gathered] == ([{"rank": 0}, {"rank": 1}] if rank == 0 else [])
    # Rank 1 looks for a folder that does not exist, as on a node without the shared disk.
    here = folder if rank == 0 else Path("/nonexistent")
    assert hash_of(here / "run") == weights
    with pytest.raises(CheckpointError, match=rf"no intact .* in {folder}/damaged"):
        load(here / "damaged")


def test_rank_0_reads_for_all(tmp_path: Path) -> None:
    state = make_state(1)
    save(tmp_path / "run", 1, state, keep_last=1)
    flip_a_bit(save(tmp_path / "damaged", 1, state, keep_last=1) / "model.pt")
    on_ranks(2, _load_on_a_rank, tmp_path, weights_hash(state.model))


class Intruder:
    """Creates a file when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (Path(self.file),)


def _send_a_pickle(rank: int, folder: Path) -> None:
    opened = str(folder / "opened")
    for send in (pickle.dumps, files.pack):
        if rank == 1:
            gather_bytes(send(Intruder(opened)))
        else:
            with pytest.raises(pickle.UnpicklingError):
                list(checkpoint.gather_ranks({"rank": rank}))
    if rank == 0:
        gather_bytes(pickle.dumps(Intruder(opened)), call="broadcast")
    else:
        with pytest.raises(ValueError):  # not JSON
            load(Path("/nonexistent"))


def test_what_a_false_rank_sends_is_not_unpickled(tmp_path: Path) -> None:
    on_ranks(2, _send_a_pickle, tmp_path)
    assert not (tmp_path / "opened").exists()
