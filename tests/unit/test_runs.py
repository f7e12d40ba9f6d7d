"""The records of runs, --status and --stop; whole launches are in tests/scripts/detach.bats."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import AGENT, PATIENCE_S, ROOT, Run, begun, eventually, execute, rarely, written

from distributed.errors import REFUSED, Refused
from distributed.lock import is_locked, locked_by
from launcher import processes
from launcher.processes import ranks_of, start_ticks
from launcher.record import run_json, runs
from launcher.record.restart import Restart
from launcher.record.run_folder import RunFolder
from launcher.record.run_ids import free_run_id
from launcher.record.run_json import LauncherProcess, Record, note_end, note_start, refuse_live
from launcher.text import Environ
from launcher.wire import limits, messages

HERE = socket.gethostname()
SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A launcher that exits on SIGTERM."""
    with begun(SAVES) as started:
        yield started


def write(log_dir: Path, run_id: str, **fields: Any) -> None:
    run_json.update(log_dir / run_id, **fields)


def launcher_of(process: int, *, host: str = HERE, older_by: int = 0) -> LauncherProcess:
    return LauncherProcess(process, LauncherProcess.of(process).birth - older_by, host)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "goodput  73 %: 2 restarts, 10.0 s start, 17.0 s rank-killed"),
        ({"ended": None}, "goodput  36 %: 2 restarts, 10.0 s start, 117.0 s rank-killed"),
        ({"first_step": None}, "goodput  83 %: 2 restarts, 17.0 s rank-killed"),
        ({"restarts": ()}, "goodput  90 %: 0 restarts, 10.0 s start"),
    ],
)
def test_goodput(changes: dict[str, Any], line: str) -> None:
    earlier, first, second = (
        Restart(number, "rank-killed", "", "", 7, 5, failed, lost_s=lost_s)
        for number, failed, lost_s in ((1, 900.0, 9.0), (1, 1020.0, 12.0), (2, 1095.0, 0.0))
    )
    record = Record(started=1000, ended=1100, first_step=1010, restarts=(earlier, first, second))
    assert runs.describe_goodput(replace(record, **changes), 1200.0) == line


def ask(task: str, log_dir: Path, *run_ids: str) -> int:
    return runs.main(task, run_ids, log_dir, "launch.sh", is_dry_run=False)


@pytest.mark.parametrize("process", [-1, 0, 1])
def test_a_process_id_that_names_more_than_one_process_is_none(process: int) -> None:
    assert not LauncherProcess(process, start_ticks(1) or 0, HERE).is_alive


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"state": "starting"}, "starting"),
        ({"state": "running"}, "running"),
        ({"state": "running", "older_by": 1}, "killed"),
        ({"state": "starting", "older_by": 1}, "killed"),
        ({"state": "ended", "exit_code": 7, "ended": 1.0, "older_by": 1}, "ended, code 7"),
        ({"state": "ended", "exit_code": 0, "ended": 1.0, "host": "other"}, "ended, code 0"),
        ({"state": "running", "host": "other"}, "running on other, as of 2026-11-20 16:12:33"),
    ],
)
def test_states(fields: dict[str, Any], state: str, tmp_path: Path) -> None:
    place = {name: fields.pop(name) for name in ("host", "older_by") if name in fields}
    write(tmp_path, "one", **fields, launcher=launcher_of(os.getpid(), **place))
    written = time.mktime((2026, 11, 20, 16, 12, 33, 0, 0, -1))
    os.utime(tmp_path / "one/run.json", (written, written))
    assert runs.find(tmp_path, "one").state == state


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        "[" * 8192,
        "null",
        '{"state": "running", "launcher": {"process": "1"}}',
        '{"exit_code": "0"}',
    ],
)
def test_a_record_that_makes_no_sense_is_a_run_of_unknown_state(
    damaged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "one")
    (tmp_path / "one/run.json").write_text(damaged)
    assert ask("status", tmp_path) == 0
    assert capsys.readouterr().out.startswith("one  unknown  since ")
    assert ask("stop", tmp_path, "one") == 3
    assert "run one is not running: unknown" in capsys.readouterr().err


NAMED = """
import os, time
def named(name):
    open("/proc/self/comm", "w").write(name)
    if name == "rank10" and os.fork() == 0:
        time.sleep(60)  # a data worker
    print(flush=True)
    time.sleep(60)
for name in ("rank10", "rank2", "python3"):
    if os.fork() == 0:
        named(name)
time.sleep(60)
"""


def test_the_status_of_a_run_names_its_ranks_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    me = launcher_of(os.getpid())
    write(tmp_path, "one-odd-run", state="running", launcher=me, started=1.0)
    environ = {**os.environ, "RUN_ID": "one-odd-run"}
    with begun(NAMED, env=environ, start_new_session=True) as ours:
        assert ours.stdout and ours.stdout.readline() and ours.stdout.readline()
        ranks = ranks_of("one-odd-run")
        assert ask("status", tmp_path, "one-odd-run") == 0
        os.killpg(ours.pid, signal.SIGKILL)
    assert [*ranks] == ["rank2", "rank10"] and len({*ranks.values()}) == 2
    told = capsys.readouterr().out.splitlines()[1]
    assert told == f"here  rank2 pid {ranks['rank2']}  rank10 pid {ranks['rank10']}"


def test_what_ended_a_run_is_shown_before_its_metrics_and_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = (
        "FAILED   rank 1 (local rank 1, node1) 14 s after the start       [rank-error]\n"
        "cause    ValueError: boom\nothers   nothing is left running\n"
        "see      TROUBLESHOOTING.md#rank-error\n"
    )
    why = {"fault": "rank-error", "cause": "ValueError: boom"}
    write(tmp_path, "one", state="ended", started=1.0, ended=2.0, exit_code=1, **why)
    (tmp_path / "one/node_0.log").write_text("[0] RuntimeError: Connection closed by peer\n")
    (tmp_path / "one/failure.txt").write_text(block)
    line = f"one  ended, code 1  since {runs.date(2.0)}  [rank-error] ValueError: boom\n"
    assert ask("status", tmp_path) == 0
    assert capsys.readouterr().out == line
    assert ask("status", tmp_path, "one") == 0
    assert capsys.readouterr().out == line + block
    assert ask("stop", tmp_path, "one") == 3
    told = "run one is not running: ended, code 1, [rank-error] ValueError: boom; there is nothing"
    assert told in capsys.readouterr().err
    note_start(tmp_path / "one", {})
    assert not (tmp_path / "one/failure.txt").exists()
    record = run_json.read(tmp_path / "one")
    assert record and (record.fault, record.cause) == ("", "")


def test_a_run_that_was_recorded_without_its_cause_still_shows_what_ended_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "old", state="ended", started=1.0, ended=2.0, exit_code=1)
    (tmp_path / "old/failure.txt").write_text("FAILED   rank 1 [rank-error]\ncause    boom\n")
    assert ask("status", tmp_path, "old") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1:] == ["FAILED   rank 1 [rank-error]", "cause    boom"]


def test_a_run_that_has_succeeded_has_no_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its restarts may have recorded one."""
    why = {"fault": "rank-error", "cause": "boom"}
    write(tmp_path, "one", state="ended", ended=2.0, exit_code=0, **why)
    assert ask("status", tmp_path) == 0
    assert capsys.readouterr().out == f"one  ended, code 0  since {runs.date(2.0)}\n"


def test_every_run_has_a_line_and_the_newest_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    me = launcher_of(os.getpid())
    words = ["--nproc-per-node", "2", "--log-dir", "logs", "-m", "pkg.train", "--name", "a b"]
    now = {"started": 3.0, "step": 120, "agent_arguments": words}
    write(tmp_path, "now", state="running", launcher=me, **now)
    write(tmp_path, "older", state="ended", launcher=me, started=1.0, ended=2.0, exit_code=75)
    (tmp_path / "latest").symlink_to("now")
    (tmp_path / "distributed_training").mkdir()
    (tmp_path / "now/metrics.jsonl").write_text(
        '{"step": 110, "loss": 3.0}\n{"step": 120, "loss": 2.51234, "time": 1.5}\n'
    )
    (tmp_path / "older/node_0.log").write_text("[0] first\n[0] two\x1b[31m\n\n")
    assert ask("status", tmp_path) == 0
    since = [runs.date(seconds) for seconds in (2.0, 3.0)]
    assert capsys.readouterr().out.splitlines() == [
        f"now    running         since {since[1]}  step 120  pkg.train --name 'a b'  loss 2.512",
        f"older  ended, code 75  since {since[0]}{' ' * 36}[0] two\\x1b[31m",
    ]


def test_of_many_runs_the_newest_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(22):
        write(tmp_path, f"run{number:02}", state="ended", ended=1.0 + number, exit_code=0)
    for words, last in {("--all",): 0, (): 2}.items():
        assert ask("status", tmp_path, *words) == 0
        told = capsys.readouterr()
        listed = [line.split()[0] for line in told.out.splitlines()]
        assert listed == [f"run{number:02}" for number in range(21, last - 1, -1)]
        assert ("newest 20 of 22 runs; --status --all lists all" in told.err) == (not words)


@pytest.mark.parametrize("half", ['{"ste', "[" * 8192])
@pytest.mark.parametrize(("state", "shown"), [("running", "[0] step 1"), ("starting", "")])
def test_half_a_line_of_metrics_gives_way_to_a_log(
    half: str, state: str, shown: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{half}')
    (tmp_path / "launcher_here.log").write_text("[0] step 1\n")
    assert runs.describe_progress(runs.Run(tmp_path, Record(state=state))) == shown


def test_what_others_put_into_a_log_folder_neither_hangs_nor_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkdir(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe/run.json")
    os.mkdir(tmp_path / "endless")
    (tmp_path / "endless/run.json").symlink_to("/dev/zero")
    write(tmp_path, "x\x1b[2J\ny", state="ended", exit_code=1, ended=1.0)
    (tmp_path / "x\x1b[2J\ny/failure.txt").symlink_to("/dev/zero")
    write(tmp_path, "log", state="ended", exit_code=0, ended=2.0)
    os.mkfifo(tmp_path / "log/node_0.log")
    assert runs.print_status(tmp_path, [], "p") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and r"x\x1b[2J\ny  ended, code 1" in shown
    assert len(shown.splitlines()) == 3  # nothing is known of the run behind the pipe


def test_a_link_in_a_log_folder_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    folder = RunFolder(tmp_path / "logs", "mine", 0, {})
    folder.path.mkdir(parents=True)
    folder.node_log.symlink_to(victim)
    with pytest.raises(Refused, match="dir-unwritable"):
        folder.create()
    assert not victim.exists()


@pytest.mark.parametrize("name", ["lock", "stacks"])
def test_a_link_to_a_file_that_a_run_shares_is_not_followed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "one", state="running", launcher=launcher_of(os.getpid()))
    victim = tmp_path / "victim"
    (tmp_path / "one" / name).symlink_to(victim)
    if name == "stacks":
        assert ask("stacks", tmp_path, "one") == REFUSED
        assert "Too many levels of symbolic links" in capsys.readouterr().err
        assert not victim.exists()
    else:
        victim.write_text("")
        assert not is_locked(tmp_path / "one") and locked_by(tmp_path / "one")[0] == 0
        run_json.LiveRecord(tmp_path / "one", attempt=0, launcher=None, versions={})
        assert is_locked(tmp_path / "one") or locked_by(tmp_path / "one")[0] == os.getpid()
        assert victim.read_text() == ""


def test_a_link_in_the_place_of_a_run_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "one").symlink_to("victim")
    with pytest.raises(Refused, match=r"one is a link; choose another RUN_ID .dir-unwritable"):
        refuse_live(tmp_path / "one", {})
    assert [*victim.iterdir()] == []


def test_a_loop_of_links_in_the_place_of_the_logs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refuse_live(tmp_path / "loop/one", {})
    with pytest.raises(Refused, match=r"Too many levels of symbolic links.*dir-unwritable"):
        note_start(tmp_path / "loop/one", {})


def test_a_link_in_the_place_of_a_record_is_replaced(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("{}")
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "run.json").symlink_to(victim)
    refuse_live(folder, {})
    note_start(folder, {})
    record = run_json.read(folder)
    assert record is not None and record.state == "starting"
    assert victim.read_text() == "{}"


@pytest.mark.slow
def test_a_pipe_in_the_place_of_a_stack_file_is_replaced(tmp_path: Path) -> None:
    failures = tmp_path / "r1/failures"
    failures.mkdir(parents=True)
    os.mkfifo(failures / "rank_0.stack")
    script = written(tmp_path / "own.py", "print('ran')")
    options = ["--rdzv-id", "r1", "--log-dir", str(tmp_path)]
    done = execute(tmp_path, *AGENT, *options, script, RUN_ID="r1")
    assert done.stdout == "ran\n" and (failures / "rank_0.stack").is_file()


def test_a_run_that_does_not_end_is_left_with_the_command_that_ends_it(
    process: subprocess.Popen[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "STOP_COMMAND_S", 0.2)
    process.send_signal(signal.SIGSTOP)
    write(tmp_path, "one", state="running", launcher=launcher_of(process.pid), grace=0)
    assert ask("stop", tmp_path, "one") == 3
    assert f"has not ended yet; kill -KILL {process.pid} ends it" in capsys.readouterr().err


@pytest.mark.parametrize("begin", [refuse_live, note_start])  # two launches may pass refuse_live
def test_a_live_run_is_not_started_again(
    process: subprocess.Popen[str], tmp_path: Path, begin: Callable[[Path, Environ], None]
) -> None:
    folder = tmp_path / "one"
    refuse_live(folder, {})
    write(tmp_path, "one", state="running", launcher=launcher_of(process.pid))
    with pytest.raises(Refused, match=f"run one is live: process {process.pid};.*run-is-live"):
        begin(folder, {})
    write(tmp_path, "one", state="ended", exit_code=0)
    refuse_live(folder, {})


def test_two_live_runs_with_one_rdzv_id_have_two_names(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert free_run_id(tmp_path, "100", {}, of_job=False, is_dry_run=True) == "100"
    write(tmp_path, "100", state="running", launcher=launcher_of(process.pid))
    assert free_run_id(tmp_path, "100", {}, of_job=False, is_dry_run=True) == "100.1"
    write(tmp_path, "100", state="ended", exit_code=0)
    assert free_run_id(tmp_path, "100", {}, of_job=False, is_dry_run=True) == "100"


HOLDS = """
import sys
from pathlib import Path
from distributed.lock import lock_run
lock = lock_run(Path(sys.argv[1]))
print(flush=True)
input()
"""


def test_a_run_that_is_live_on_another_machine_is_known_by_its_lock(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    write(tmp_path, "one", state="running", launcher=launcher_of(os.getpid(), host="other"))
    refuse_live(folder, {})
    with begun(HOLDS, folder), pytest.raises(Refused, match=r"process \d+ on other"):
        refuse_live(folder, {})
    refuse_live(folder, {})


@pytest.mark.parametrize(
    ("job", "start", "is_refused"),
    [("38", "1", True), ("38", "2", False), ("39", "0", True), ("39", "2", True)],
)
def test_in_a_job_a_run_is_another_jobs_as_long_as_that_one_lives(
    job: str, start: str, is_refused: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "38"
    write(tmp_path, "38", state="running", launcher=launcher_of(os.getpid(), host="other"))
    (folder / "failure.txt").touch()
    os.environ.update(SLURM_JOB_ID="38", SLURM_RESTART_COUNT="1")
    with begun(HOLDS, folder) as holder:
        os.environ.update(SLURM_JOB_ID=job, SLURM_RESTART_COUNT=start)
        said = ""
        try:
            note_start(folder, os.environ)
        except Refused as refused:
            said = str(refused)
        note_end(folder, REFUSED)  # by the same process, whose run was rejected later
    record = run_json.read(folder)
    assert record is not None and not record.is_over
    live = f"run 38 is live: job 38, process {holder.pid} on "
    assert said.startswith(live) == is_refused
    assert (folder / "failure.txt").exists() == is_refused
    refuse_live(folder, os.environ)


# --- the folder of a run and its run.json ---------------------------------------------------------


STEPS = """
import os, sys, time
from distributed.heartbeat import beat
beat(3, saved=2)
print("beats", flush=True)
while not os.path.exists("go on"):
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Run]) -> Callable[..., Run]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)

    def begin(*words: str, stdin: int | None = None, **environment: str) -> Run:
        arguments = ["--log-dir", "logs", "--rdzv-id", "r1", "steps.py", *words]
        runs.append(Run(arguments, stdin, **{"PYTHONPATH": str(ROOT), **environment}))
        return runs[-1]

    return begin


Start = Callable[..., Run]


def read() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path("logs/r1/run.json").read_text())
    return record


@pytest.mark.slow
def test_run_json_says_how_far_the_run_is_and_how_it_ended(start: Start) -> None:
    run_json.update(Path("logs/r1"), detached=True, state="starting")
    run = start("7", GRACE="12")
    run.wait_for("beats")
    record = read()
    assert (record["state"], record["exit_code"], record["ended"]) == ("running", None, None)
    assert record["step"] in (-1, 3) and record["grace"] == 12  # the start may have taken long
    assert record["detached"] is True  # other fields stay
    assert record["launcher"] == {
        "process": run.process.pid,
        "birth": processes.start_ticks(run.process.pid),
        "host": socket.gethostname(),
    }
    eventually(lambda: (read()["step"], read()["saved_step"]) == (3, 2))
    Path("go on").touch()
    run.finish()
    record = read()
    assert (record["state"], record["exit_code"]) == ("ended", 7)
    assert (record["step"], record["saved_step"]) == (3, 2)
    assert record["started"] < record["ended"] <= time.time()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, *rarely(signal.SIGTERM)])
def test_the_supervisor_completes_the_record_of_an_agent_that_was_killed(
    start: Start, signum: int
) -> None:
    run = start("0")
    run.wait_for("beats")
    agent = run.agent_pid()
    if signum == signal.SIGTERM:  # before it can record the end, as with a stuck agent
        os.kill(agent, signal.SIGSTOP)
        run.process.send_signal(signum)
        os.kill(agent, signal.SIGKILL)
    else:
        os.kill(agent, signum)
    run.finish()
    record = read()
    assert (record["state"], record["exit_code"]) == ("ended", 137)
    assert record["ended"] > record["started"]


@pytest.mark.slow
def test_a_launcher_elsewhere_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("steps.py").write_text(STEPS)
    run_json.update(Path("logs/r1"), launcher=LauncherProcess(1, 2, "elsewhere"))
    Path("go on").touch()
    words = ["", "", "--log-dir", "logs", "--rdzv-id", "r1", "steps.py", "0"]
    request = messages.write(messages.Start(words, {}, Path.cwd()))
    far_side = [sys.executable, str(ROOT / "scripts/lib/start.py"), "launcher.fanout.far_side"]
    variables = {"LAUNCH_TOKEN": "t", "SLURM_NODEID": "0", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*far_side, "--step"], stdin=subprocess.PIPE, env={**os.environ, **variables}, text=True
    ) as step:
        assert step.stdin is not None
        step.stdin.write(f"{request}\n")
        step.stdin.flush()
        assert step.wait(PATIENCE_S) == 0
    assert read()["launcher"] == {"process": 1, "birth": 2, "host": "elsewhere"}


@pytest.mark.slow
def test_a_run_that_is_refused_has_ended(start: Start) -> None:
    """The launcher recorded the run before it became the supervisor."""
    code = "import os, sys\nfrom pathlib import Path\nfrom launcher.record import run_json\n"
    code += "run_json.note_start(Path('logs/r1'), {})\n"
    code += "os.execv(sys.argv[1], sys.argv[1:])"
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = ["--nnodes", "2", "--master-port", str(server.getsockname()[1])]
        options = [*where, "--log-dir", "logs"]
        command = [sys.executable, "-c", code, *AGENT, *options, "--rdzv-id", "r1", "steps.py"]
        launched = {"LAUNCH_START": "local", "LAUNCH_TOKEN": random.randbytes(8).hex()}
        variables = {"PYTHONPATH": str(ROOT), **launched, "RUN_ID": "r1"}
        done = execute(Path.cwd(), *command, code=3, **variables)
    assert "[port-in-use]" in done.stderr
    assert (read()["state"], read()["exit_code"]) == ("ended", 3)


def test_writers_of_run_json_lose_nothing_of_each_other(tmp_path: Path) -> None:
    code = "import sys\nfrom pathlib import Path\nfrom launcher.record import run_json\n"
    code += "from launcher.wire import limits\nlimits.RECORD_LOCK_S = 600\n"
    code += "for number in range(50):\n"
    code += "    run_json.update(Path('r1'), **{sys.argv[1]: number})\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", code, name], cwd=tmp_path, env=environment)
        for name in ("step", "saved_step", "world_size")
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert run_json.read(tmp_path / "r1") == Record(step=49, saved_step=49, world_size=49)


def test_a_damaged_record_is_written_anew(tmp_path: Path) -> None:
    for damaged in ("", "[]", "{", "\xff"):
        (tmp_path / "run.json").write_text(damaged, encoding="latin-1")
        run_json.update(tmp_path, step=1)
        assert run_json.read(tmp_path) == Record(step=1)


def test_a_writer_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RECORD_LOCK_S", 0.1)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
    code += "print('held', flush=True); sys.stdin.read()"
    with begun(code, tmp_path / ".run.json.lock"):
        run_json.update(tmp_path, step=1)
    assert run_json.read(tmp_path) == Record(step=1)


@pytest.mark.parametrize("of_job", [True, False])
def test_launches_at_the_same_time_have_names_of_their_own(tmp_path: Path, of_job: bool) -> None:
    def choose(environ: Environ, *, is_dry: bool = False) -> str:
        return free_run_id(tmp_path, "7", environ, of_job=of_job, is_dry_run=is_dry)

    names = [choose({}, is_dry=is_dry) for is_dry in (True, False, False, True, False)]
    assert names == ["7", "7", "7.1", "7", "7.2"]  # a dry run reserves none
    again = {"SLURM_RESTART_COUNT": "1"}  # the first may still be running, cut off
    assert [choose(again), choose(again)] == ["7", "7.1"]


def test_a_launch_reserves_only_the_name_that_it_gets(tmp_path: Path) -> None:
    def choose() -> str:
        return free_run_id(tmp_path, "100", {}, of_job=False, is_dry_run=False)

    note_start(tmp_path / "100", {})
    assert choose() == "100.1"
    note_end(tmp_path / "100", 0)
    assert choose() == "100"


def test_a_name_that_is_taken_while_this_launch_reserves_it_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the reservation, another launch began, and became its agent."""

    def claim(name: str) -> bool:
        monkeypatch.setattr(processes, "claim", lambda name: True)
        note_start(tmp_path / "100", {})
        return True

    monkeypatch.setattr(processes, "claim", claim)
    assert free_run_id(tmp_path, "100", {}, of_job=False, is_dry_run=False) == "100.1"


def test_a_copy_of_the_terminal_outlives_every_signal_that_stops_the_run(tmp_path: Path) -> None:
    """A scheduler signals all processes of a job; messages about the save are still kept."""
    file = tmp_path / "copy"
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from distributed.stop_signals import STOP_SIGNALS\n"
        "from launcher.fanout import transcript\n"
        "file = Path(sys.argv[1])\n"
        "transcript.copy_output_to(file)\n"
        "print('first', flush=True)\n"
        "while not file.exists() or not file.read_bytes():\n"
        "    time.sleep(0.01)\n"
        "for signum in STOP_SIGNALS:\n"
        "    signal.signal(signum, signal.SIG_IGN)\n"
        "    os.killpg(0, signum)\n"
        "print('last', flush=True)\n"
    )
    command = ["setsid", "--wait", sys.executable, "-c", code, file]
    execute(ROOT, *command)  # until the copy has also exited
    assert file.read_text() == "first\nlast\n"
