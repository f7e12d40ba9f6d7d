"""Damaged and forged checkpoints and lock files: one line, the one before, and no hang."""

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import flip_a_bit, save

from distributed import torch as helper
from distributed.checkpoint import CheckpointError, Saver, State, files, load
from distributed.errors import Refused
from distributed.lock import is_locked, is_locked_here, lock_run, locked_by, update_link
from launcher.cli.checkpoint import main


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """End a test that waits for a pipe."""
    signal.alarm(500)
    yield
    signal.alarm(0)


def make_state(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, State]:
    """Return a model and an optimizer of step `step`, and what `save` would save of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    ranks = [{"rng": {"torch": torch.get_rng_state(), "python": (3, (1,) * 625, None)}}]
    return (
        model,
        optimizer,
        State(model.state_dict(), optimizer.state_dict(), {"step": step}, ranks),
    )


@pytest.fixture(params=["full", pytest.param("sharded", marks=pytest.mark.slow)], scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two checkpoints."""
    run = tmp_path_factory.mktemp("whole")
    for step in (1, 2):
        save(run, step, make_state(step)[2], keep_last=2, format=request.param)
    return run


def told(run: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Load a run's last checkpoint as a script does; returns the step, or the line of the error."""
    caplog.clear()
    model, optimizer, _ = make_state(0)
    try:
        progress = helper.load(run, model, optimizer)
        text = str(progress["step"] if progress else None)
    except CheckpointError as error:
        text = str(error)
    for line in (text, *caplog.messages):
        assert "\n" not in line and "Traceback" not in line, line
    return text


def replace_with(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


def nested(file: Path) -> None:
    file.write_text("[" * 100_000)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "a flipped bit": flip_a_bit,
    "a list": lambda file: file.write_text("[1, [2]]"),
    "a number": lambda file: file.write_text("1e999"),
    "a huge number": lambda file: file.write_text("9" * 5000),
    "text": lambda file: file.write_text('"text"'),
    "null": lambda file: file.write_text("null"),
    "nested": nested,
    "binary": lambda file: file.write_bytes(bytes(range(256)) * 4),
    "a pipe": replace_with(os.mkfifo),
    "a folder": replace_with(Path.mkdir),
    "a dangling link": replace_with(lambda file: file.symlink_to("nowhere")),
    "a link to itself": replace_with(lambda file: file.symlink_to(file.name)),
    "a device": replace_with(lambda file: file.symlink_to("/dev/zero")),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_that_is_damaged(
    whole: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    for file in sorted((whole / "step-2").iterdir()):
        run = shutil.copytree(whole, tmp_path / file.name, symlinks=True)
        DAMAGE[how](run / "step-2" / file.name)
        assert told(run, caplog) == "1"
        assert any(f"{run}/step-2" in line for line in caplog.messages)
        shutil.rmtree(run / "step-1")
        assert "no intact checkpoint is left" in told(run, caplog)
        save_beside(run)


def save_beside(run: Path) -> None:
    """Save later checkpoints beside a damaged one; neither that nor the commands may fail."""
    for step in (5, 6):
        save(run, step, make_state(step)[2], keep_last=1)
    assert files.read_files(run / "step-6")
    assert main(["ls", str(run)]) == 0
    assert main(["verify", str(run)]) in (0, 1)


@pytest.mark.parametrize(
    "how", ["a pipe", "a file", "a dangling link", "a link to itself", "empty"]
)
def test_a_folder_that_is_none(
    whole: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    shutil.rmtree(run / "step-2")
    make: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "a file": Path.touch,
        "a dangling link": lambda path: path.symlink_to("nowhere"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "empty": Path.mkdir,
    }
    make[how](run / "step-2")
    assert told(run, caplog) == "1"
    save(run, 2, make_state(2)[2], keep_last=1)  # takes its place
    assert told(run, caplog) == "2"
    make[how](run / "step-9")
    save_beside(run)


def test_what_stands_in_the_way_of_setting_aside_ends_no_run(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    flip_a_bit(run / "step-2/model.pt")
    (run / "step-2.damaged").touch()
    saver = Saver(run, keep_last=1)
    assert told(run, caplog) == "1"
    assert "step-2 is now step-2.damaged" in caplog.text
    saver._lock.close()


def test_a_checkpoint_that_cannot_be_deleted_ends_no_save(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)

    def refuse(folder: Path) -> Path:
        if folder.exists():
            raise PermissionError(13, "Permission denied", str(folder))
        return folder.with_name("none")

    monkeypatch.setattr(files, "_retire", refuse)
    save(run, 3, make_state(3)[2], keep_last=1)
    assert "step-1 is not deleted: [Errno 13] Permission denied" in caplog.text
    assert told(run, caplog) == "3"


def test_a_step_that_is_saved_again_is_there_until_the_new_one_is(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    there = []
    monkeypatch.setattr(files, "_remove", lambda path: there.append((run / "step-2").exists()))
    save(run, 2, make_state(2)[2], keep_last=1)
    assert there and all(there)  # a kill during a deletion leaves it
    assert told(run, caplog) == "2"


# --- content that no save wrote, with hashes that agree with it -----------------------------------


def forge(folder: Path, **changes: Any) -> None:
    """Give a checkpoint a manifest that agrees with its files, except for changes to it."""
    data = [file for file in folder.iterdir() if file.name != "manifest.json"]
    entries = {file.name: files.entry_of(file) for file in data}
    manifest = {"version": 2, "saved": 0, "files": entries, **changes}
    manifest["sha256"] = files._hash_manifest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write(name: str, content: Any) -> Callable[[Path], object]:
    packed = json.dumps(content).encode() if name.endswith("json") else files.pack(content)
    return lambda folder: (folder / name).write_bytes(packed)


FORGED: dict[str, Callable[[Path], object]] = {
    **{
        f"{name} holds {kind}": write(name, content)
        for name in ("model.pt", "optimizer.pt", "ranks.pt")
        for kind, content in {"a set": {1}, "a number": 5, "text": "a"}.items()
    },
    **{
        f"the progress is {content!r}": write("progress.json", content)
        for content in (
            *([1], [["step", 1]], 5, "step", None, {}, {"score": "best", "step": 2}),
            *({"score": [], "step": 2}, {"validation_loss": {}, "step": 2}),
        )
    },
    "the progress is nested": lambda folder: nested(folder / "progress.json"),
    "the progress is huge": lambda folder: (folder / "progress.json").write_text("9" * 5000),
    "the model is a list": write("model.pt", [torch.ones(2)]),
    "other weights": write("model.pt", {"other": torch.ones(2)}),
    "weights that are none": write("model.pt", {"weight": 5, "bias": "text"}),
    "the optimizer is empty": write("optimizer.pt", {}),
    "other groups": write("optimizer.pt", {"state": {}, "param_groups": [{}, {}]}),
    "a state that is none": write("optimizer.pt", {"state": 5, "param_groups": 7}),
    "other objects": write("optimizer.pt", {"state": {}, "param_groups": [], "objects": 3}),
    "ranks of another kind": write("ranks.pt", [5]),
    "ranks that are not packed": write("ranks.pt", [b"bytes"]),
    "a random state that is none": write("ranks.pt", [{"rng": {"torch": 1, "python": 2}}]),
    "objects that are none": write("ranks.pt", [{"objects": 5}]),
    "no zip": lambda folder: (folder / "model.pt").write_bytes(b"PK\3\4" + bytes(100)),
    "an old pickle": lambda folder: (folder / "model.pt").write_bytes(b"\x80\x02}q\0."),
}


@pytest.mark.parametrize("how", FORGED)
def test_content_that_no_save_wrote(
    whole: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    FORGED[how](run / "step-2")
    forge(run / "step-2")
    found = told(run, caplog)
    expected = rf"the checkpoint is from a different model|{run}.*: its parts are unreadable"
    assert found == "1" or re.match(expected, found), found
    saver = Saver(run, keep_last=1)
    saver.save(5, make_state(5)[2])
    saver.wait()
    saver._lock.close()
    assert main(["ls", str(run)]) == 0


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"files": []},
            {"files": None},
            {"files": {}},
            {"files": {"model.pt": 5}},
            {"version": 3},
        ),
        *({"saved": "now"}, {"saved": 1e300}, {"saved": 10**400}),
    ],
)
def test_a_manifest_that_no_save_wrote(
    whole: Path, tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    forge(run / "step-2", **change)
    assert told(run, caplog) in ("1", "2" if "version" in change else "1")
    assert main(["ls", str(run)]) == 0


@pytest.mark.parametrize("index", ["a set", "another model's", "cut parts"])
def test_an_index_that_no_save_wrote(
    tmp_path: Path, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path / "run", step, make_state(step)[2], keep_last=2, format="sharded")
    folder = tmp_path / "run/step-2"
    if index == "a set":
        (folder / "index.pt").write_bytes(files.pack({1}))
    elif index == "another model's":
        state = State({"other": torch.ones(2)}, {}, {"step": 1})
        other = save(tmp_path / "other", 1, state, keep_last=1, format="sharded")
        shutil.copy(other / "index.pt", folder)
    else:
        os.truncate(folder / "__0_0.distcp", 100)
    forge(folder)
    found = told(tmp_path / "run", caplog)
    assert found == "1" or re.match(rf"{folder}: its parts are unreadable \(", found), found


# --- lock files -----------------------------------------------------------------------------------

LOCKS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "zeros": bytes(100),
    "a list": b"[1, 2]",
    "text": b'"text"',
    "a number": b"5",
    "null": b"null",
    "no keys": b"{}",
    "cut": b'{"process": 12, "ho',
    "other kinds": b'{"process": [], "host": {}, "attempt": "a"}',
    "no host": b'{"process": 5}',
    "a job only": b'{"job": "12"}',
    "infinite": b'{"process": 1e999, "host": "a"}',
    "nested": b"[" * 100_000,
    "long": b'{"host": "' + b"a" * 100_000 + b'"}',
}


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}])
@pytest.mark.parametrize("content", LOCKS)
def test_a_damaged_lock_is_replaced(
    tmp_path: Path, content: str, job: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    os.environ |= job
    run = tmp_path / "12"
    run.mkdir()
    (run / "lock").write_bytes(LOCKS[content])
    assert not is_locked(run) and not is_locked_here(run) and locked_by(run)[0] == 0
    lock = lock_run(run)
    assert locked_by(run) == (os.getpid(), os.uname().nodename) and is_locked_here(run)
    told = [f"warning: {run}/lock is damaged; it is replaced"] if LOCKS[content] else []
    assert caplog.messages == told
    lock.close()


@pytest.mark.parametrize("content", LOCKS)
def test_a_damaged_lock_of_a_live_process_still_counts(tmp_path: Path, content: str) -> None:
    live = lock_run(tmp_path)
    os.truncate(live.fd, 0)
    os.pwrite(live.fd, LOCKS[content], 0)
    cause = rf"^run {tmp_path.name} is live: it holds the lock; wait until it ends"
    with pytest.raises(Refused, match=cause):
        lock_run(tmp_path)
    with live.committing():  # it can still save
        pass
    live.close()
    lock_run(tmp_path).close()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_lock_file_is_replaced(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "lock")
    assert not is_locked(tmp_path) and locked_by(tmp_path)[0] == 0
    save(tmp_path, 1, make_state(1)[2], keep_last=1)
    assert (tmp_path / "lock").is_file() and load(tmp_path) is not None


def test_a_process_that_was_replaced_by_one_with_a_damaged_lock(tmp_path: Path) -> None:
    first = lock_run(tmp_path)
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").write_bytes(b"{")
    told = pytest.raises(Refused, match=rf"^run {tmp_path.name} was restarted on another node")
    with told, first.committing():
        pass
    first.close()


def test_a_link_to_its_own_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(".")
    with contextlib.suppress(OSError):
        update_link(tmp_path / "latest", "step-1")
    assert os.readlink(tmp_path / "latest") == "."
