"""The first real cause in a log of any launcher, by name."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from agents import PATIENCE_S, ROOT, run_program, written

from launcher.cli import tools
from launcher.explain.kinds import Kind, Rule
from launcher.explain.main import find_cause, main
from launcher.explain.reading import HINT, Sighting, find_sighting, read, strip_prefix
from launcher.explain.rules import RULES
from launcher.failure import Failure, RaisedError, describe_end
from launcher.record import run_json
from launcher.record.run_json import KEPT, LauncherProcess, note_start

EXPLAIN = [sys.executable, str(ROOT / "scripts/lib/start.py"), "launcher.explain.main"]
LOGS = ROOT / "tests/logs"
JUDGED = yaml.safe_load((LOGS / "judged/index.yaml").read_text())
HEALTHY = yaml.safe_load((LOGS / "healthy/index.yaml").read_text())
MADE_FROM = yaml.safe_load((LOGS / "made_from.yaml").read_text())  # in the order of the rules
LEAST = 0.91  # the share that is recognised of the logs from which no rule was made


def explain(file: Path) -> Sighting | None:
    return find_cause(read(file))


def test_every_rule_was_made_from_texts() -> None:
    rules = [(rule.fault, rule.kind.name.lower()) for rule in RULES]
    assert [(one["fault"], one.get("kind", "cause")) for one in MADE_FROM] == rules


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        pytest.param(rule, one["texts"], id=f"{rule.fault}-{rule.kind.name}")
        for rule, one in zip(RULES, MADE_FROM, strict=False)
    ],
)
def test_a_rule_knows_the_texts_that_it_was_made_from(
    rule: Rule, texts: list[dict[str, str]]
) -> None:
    assert texts
    for one in texts:
        text, source = one["text"], one["source"]
        assert rule.pattern.search(strip_prefix(text)), text
        assert HINT.search(text.encode()), text
        assert source.startswith(("https://", "tests/")), source


def test_most_public_logs_and_their_ranks_are_named_rightly() -> None:
    wrong, ranks = list[str](), list[bool]()
    for one in JUDGED:
        cause = explain(LOGS / "judged" / one["file"])
        if cause is None or cause.fault not in [one["cause"], *one["also"]]:
            wrong.append(one["file"])
        if one["rank"] is not None:
            ranks.append(cause is not None and cause.rank.endswith(f"rank {one['rank']}"))
    assert len(JUDGED) == 60
    assert len(wrong) <= (1 - LEAST) * len(JUDGED), wrong
    assert sum(ranks) >= 0.6 * len(ranks) > 0


def test_no_rule_was_made_from_a_log_that_judges_them() -> None:
    made_from = {text["source"] for one in MADE_FROM for text in one["texts"]}
    assert not made_from & {one["source"] for one in JUDGED}


@pytest.mark.parametrize("one", HEALTHY, ids=lambda one: one["file"])
def test_a_run_that_ended_well_has_no_cause(one: dict[str, str]) -> None:
    assert explain(LOGS / "healthy" / one["file"]) is None


@pytest.mark.parametrize(
    ("line", "rank", "host", "text"),
    [
        ("[rank3]: ValueError: x", "rank 3", "", "ValueError: x"),
        ("[rank3]:[E602 11:17:52.1 x.cpp:1] x", None, "", "[E602 11:17:52.1 x.cpp:1] x"),
        ("[rank3,5-7] ValueError: x", "rank 3", "", "ValueError: x"),
        ("[default3]:ValueError: x", "rank 3", "", "ValueError: x"),
        ("[1,3]<stderr>:ValueError: x", "rank 3", "", "ValueError: x"),
        ("3: ValueError: x", "rank 3", "", "ValueError: x"),
        ("[3] ValueError: x", "rank 3", "", "ValueError: x"),
        ("[1764] [rank5]: ValueError: x", "rank 5", "", "ValueError: x"),
        ("[1764] E [rank5] ValueError: x", "rank 5", "", "E [rank5] ValueError: x"),
        ("1: E [rank5] ValueError: x", "rank 5", "", "E [rank5] ValueError: x"),
        ("[rank3]: E [rank5] ValueError: x", "rank 3", "", "E [rank5] ValueError: x"),
        ("(CommandActor pid=9) [3]:ValueError: x", "rank 3", "", "ValueError: x"),
        ("stderr: [rank3]: ValueError: x", "rank 3", "", "ValueError: x"),
        ("ERROR 12-31 01:06:23 [core.py:603] ValueError: x", "", "", "ValueError: x"),
        ("node7: ValueError: x", "", "node7", "ValueError: x"),
        ("node7: [rank3]: ValueError: x", "rank 3", "node7", "ValueError: x"),
        ("03: ValueError: x", "rank 3", "", "ValueError: x"),
        ("00: ValueError: x", "rank 0", "", "ValueError: x"),
        ("sqlite3.OperationalError: x", "", "", "sqlite3.OperationalError: x"),
        (
            "n1.lan: boto3.exceptions.UploadError: x",
            "",
            "n1.lan",
            "boto3.exceptions.UploadError: x",
        ),
        ("2026-11-20 16:12:33,123 ValueError: x", "", "", "ValueError: x"),
        ("ValueError: x", "", "", "ValueError: x"),
        ("    raise ValueError('x: y')", None, "", "    raise ValueError('x: y')"),
    ],
)
def test_what_launchers_put_before_a_line(
    line: str, rank: str | None, host: str, text: str
) -> None:
    assert strip_prefix(line) == text
    seen = find_sighting(line)
    assert (seen and (seen.rank, seen.host)) == (None if rank is None else (rank, host))


def test_the_cause_stands_among_consequences(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "[rank1]: RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:4711\n"
        "loss 1.0\rloss 0.9\r\n"
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "/home/me/train.py", line 41, in <module>\n'
        "[rank3]:     main()\n"
        '[rank3]:   File "/opt/env/lib/python3.12/site-packages/x.py", line 9, in f\n'
        "[rank3]: KeyError: 'pixels'\n"
        "srun: error: node2: task 3: Exited with exit code 1\n"
    )
    cause = explain(log)
    assert cause == Sighting(
        Kind.EXCEPTION,
        "rank-error",
        "KeyError: 'pixels'",
        rank="rank 3",
        host="node2",
        file=log,
        line=7,
        frames=["/home/me/train.py:41 in <module>"],
    )


@pytest.mark.parametrize(
    ("text", "rank", "host"),
    [
        (
            "ValueError: x\nRoot Cause (first observed failure):\n[0]:\n  time      : now\n"
            "  host      : node2\n  rank      : 5 (local_rank: 1)\n  exitcode  : 1 (pid: 9)\n",
            *("rank 5", "node2"),
        ),
        ("ValueError: x\nfailed (exitcode: 1) local_rank: 2 (pid: 9)\n", "local rank 2", ""),
        ("-- Process 1 terminated with the following error:\nValueError: x\n", "local rank 1", ""),
        ("ValueError: x\nParameters which did not receive grad for rank 3: a\n", "rank 3", ""),
        ("ValueError: x\nsrun: error: n2: task 5: Exited with exit code 1\n", "rank 5", "n2"),
        # An exception takes precedence over a warning.
        ("Error caught was: No module named 'triton'\nValueError: x\n", "", ""),
        ("train.sh: line 3: module: command not found\nValueError: x\n", "", ""),
        ("[W socket.cpp:601] IPv6 addresses of (n2, 1) (gai error: -2)\nValueError: x\n", "", ""),
    ],
)
def test_launchers_tell_the_rank(tmp_path: Path, text: str, rank: str, host: str) -> None:
    log = written(tmp_path / "train.log", text)
    cause = explain(log)
    assert cause is not None
    assert (cause.text, cause.rank, cause.host) == ("ValueError: x", rank, host)


TABLE = """Failures:
[1]:
  time      : 2026-11-20_16:13:03
  host      : node2
  rank      : 4 (local_rank: 0)
  exitcode  : {other} (pid: 101)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 101
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_16:12:{second}
  host      : node3
  rank      : 5 (local_rank: 1)
  exitcode  : {code} (pid: 102)
  error_file: <N/A>
"""
LATER_KILL = "Unable to shutdown process 7 via Signals.SIGTERM, forcefully exiting via {}\n"


@pytest.mark.parametrize(
    ("text", "fault", "rank"),
    [
        (TABLE.format(other=-9, second=33, code=7), "rank-error", "rank 5"),
        (LATER_KILL.format("Signals.SIGKILL") + TABLE.split("---")[0], "rank-killed", ""),
        (TABLE.format(other=1, second=33, code=-9), "rank-killed", "rank 5"),
        (TABLE.format(other=-9, second=33, code=-11), "rank-crashed", "rank 5"),
        (  # of two nodes, each with its own torchrun: the earlier one counts
            TABLE.format(other=-9, second=44, code=-9).replace(": 5 ", ": 0 ")
            + TABLE.format(other=-9, second=33, code=7),
            *("rank-error", "rank 5"),
        ),
        (
            TABLE.format(other=-9, second=33, code=7).replace("\n", "\n1: "),
            *("rank-error", "rank 5"),
        ),
    ],
)
def test_the_first_failure_in_torchs_table_beats_later_kills(
    text: str, fault: str, rank: str, tmp_path: Path
) -> None:
    cause = explain(written(tmp_path / "train.log", text))
    assert cause is not None
    assert (cause.fault, cause.rank) == (fault, rank or cause.rank)


SOURCE = """Traceback (most recent call last):
  File "/home/me/train.py", line 41, in <module>
    raise RuntimeError("CUDA out of memory, or " + why)
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
RuntimeError: no batch
"""
GROUP = """  | Traceback (most recent call last):
  |   File "/home/me/train.py", line 41, in <module>
  |     raise RuntimeError("CUDA out of memory, or " + why)
  | ValueError: no batch
"""


@pytest.mark.parametrize("label", ["", "[rank1]: ", "[1] [rank1]: ", "2026-11-20 16:12:33,123 "])
def test_the_code_that_a_traceback_shows_is_not_its_error(label: str, tmp_path: Path) -> None:
    log = written(tmp_path / "train.log", "".join(label + row for row in SOURCE.splitlines(True)))
    cause = explain(log)
    assert cause is not None
    assert (cause.text, cause.fault) == ("RuntimeError: no batch", "rank-error")
    assert cause.frames == ["/home/me/train.py:41 in <module>"]


@pytest.mark.parametrize("prefix", ["[rank{}]: ", "[1,{}]<stderr>:", "{}: ", "node{}: "])
def test_tracebacks_of_several_ranks_that_mix_are_told_apart(prefix: str, tmp_path: Path) -> None:
    tracebacks = [
        ["Traceback (most recent call last):", f'  File "/w/{name}.py", line 3, in f', "    f()"]
        for name in "ab"
    ]
    tracebacks[0].append("ValueError: batch 120 holds no samples")
    tracebacks[1].append("KeyError: 'labels'")
    lines = [
        prefix.format(rank) + row
        for rows in zip(*tracebacks, strict=True)
        for rank, row in enumerate(rows)
    ]
    first, second = read(written(tmp_path / "log", "\n".join(lines)))
    assert (first.frames, second.frames) == (["/w/a.py:3 in f"], ["/w/b.py:3 in f"])


def test_the_code_in_a_group_of_errors_is_not_its_error(tmp_path: Path) -> None:
    cause = explain(written(tmp_path / "train.log", GROUP))
    assert cause is not None and cause.fault == "rank-error"


LOCK = """Traceback (most recent call last):
  File "/usr/lib/python3.12/{module}.py", line 57, in __init__
    sl = self._semlock = _multiprocessing.SemLock(
                         ^^^^^^^^^^^^^^^^^^^^^^^^^
OSError: [Errno 28] No space left on device
"""


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("multiprocessing/synchronize", "small-shm"),
        ("multiprocessing/shared_memory", "small-shm"),
        ("shutil", "disk-full"),
    ],
)
def test_a_full_dev_shm_is_no_full_disk(module: str, fault: str, tmp_path: Path) -> None:
    text = LOCK.format(module=module)
    cause = explain(written(tmp_path / "train.log", text))
    assert cause is not None and cause.fault == fault
    unknown = Failure("rank-error", "", 1, "node1", 0, 0.0)
    raised = RaisedError("OSError: [Errno 28] No space left on device", text, 1, 0.0)
    end = describe_end(unknown, raised, code=1, is_out_of_memory=False, last_text="")
    assert end.fault == fault


def test_a_retry_of_nccl_that_succeeds_is_no_cause(tmp_path: Path) -> None:
    failed = "NCCL {} Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1"
    retry = failed.format("INFO") + ", retrying 1/35 after 100 msec of sleep\n"
    cause = explain(written(tmp_path / "a.log", f"{retry}ValueError: x\n"))
    assert cause is not None and cause.text == "ValueError: x"
    cause = explain(written(tmp_path / "b.log", f"{retry}{failed.format('WARN')}\nValueError: x\n"))
    assert cause is not None and cause.fault == "nccl-error"


@pytest.mark.parametrize(
    "text",
    [
        "'(Max(\"host='huggingface.co': [Errno -3] Temporary failure in name resolution\"))'"
        " thrown while requesting HEAD https://huggingface.co/gpt2/resolve/main/config.json",
        "Retrying (Retry(total=2)) after 'NewConnectionError("
        "<HTTPSConnection>: [Errno -2] Name or service not known)'",
        "wandb: Network error (ConnectionError), entering retry loop. Name or service not known",
        "mkdir -p failed for path /home/a/.config: [Errno 13] Permission denied: '/home/a/.config'",
        "/x/cuda/__init__.py:129: UserWarning: The NVIDIA driver on your system is too old",
    ],
)
def test_a_warning_that_quotes_an_error_is_no_cause_if_an_exception_follows(
    text: str, tmp_path: Path
) -> None:
    cause = explain(written(tmp_path / "a.log", f"{text}\n{SOURCE}"))
    assert cause is not None and cause.text == "RuntimeError: no batch"
    cause = explain(written(tmp_path / "b.log", f"{text}\n"))
    assert cause is not None and cause.text == text


def test_a_log_without_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "well.log").write_text("step 1\ndone\n")
    assert main([str(tmp_path / "well.log")], {}) == 1
    assert capsys.readouterr().out == "no failure found in 1 file\n"


def test_an_error_of_several_ranks_is_shown_once_with_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. GPU {} has 7 GiB"
    lost = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:4711"
    for node in range(2):
        ranks = range(4 * node, 4 * node + 3)
        lines = [f"[{rank}] [rank{rank}]: {oom.format(rank % 4)}\n" for rank in ranks]
        (tmp_path / f"node_{node}.log").write_text("".join([*lines, f"[7] [rank7]: {lost}\n"]))
    (tmp_path / "terminal.txt").write_text(
        f"[rank0-2] {oom.format(0)}\n[rank4-6] {oom.format(0)}\n"
    )
    others = []
    for name in (str(tmp_path), str(tmp_path / "terminal.txt")):
        assert main([name], {}) == 0
        told = capsys.readouterr().out
        assert told.startswith("FAILED   rank 0       [out-of-memory]\n")
        others += [row for row in told.splitlines() if row.startswith("others")]
    same = "others   ranks 1-2, 4-6 with the same error"
    assert others == [f"{same}; 2 other lines mention a failure, probably as a consequence", same]


def test_an_error_that_is_not_utf_8_is_shown_once_with_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"[rank%d]: ValueError: no file caf\xe9\n" % rank for rank in (3, 5)))
    assert main([str(log)], {}) == 0
    assert "others   rank 5 with the same error" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "is_well"), [(0, True), (1, False)])
def test_a_failed_start_of_a_run_that_ended_well_is_none_of_its_failures(
    code: int, is_well: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node_0.log").write_text("ModuleNotFoundError: No module named 'mine'\n")
    (tmp_path / "run.json").write_text(json.dumps({"state": "ended", "exit_code": code}))
    assert main([str(tmp_path)], {}) == int(is_well)
    assert ("ended with code 0" in capsys.readouterr().out) == is_well


def test_control_characters_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.log").write_bytes(b"ValueError: \x1b[2J\xff\n")
    assert main([str(tmp_path / "x.log")], {}) == 0
    assert "\x1b" not in capsys.readouterr().out


REFUSALS = [
    "launch.sh: node2: the master's name 'node1' is unknown; correct it [name-unresolved]",
    "slurm_train.sh: node1 did not start its node agent; try srun hostname [node-missing]",
    "node agent: node1 did not answer (No route to host); correct the address [host-unreachable]",
    "train.py: node2: 1 of 2 ranks did not join [node-missing]",
]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        ([*REFUSALS[:3], "srun: error: node2: task 1: Exited with exit code 3"], REFUSALS[:3]),
        ([f"1: {REFUSALS[1]}"], [REFUSALS[1]]),  # from srun --label
        ([REFUSALS[2]], [REFUSALS[2]]),
        ([REFUSALS[3]], [REFUSALS[3]]),
        ([REFUSALS[0], "ValueError: of a later start"], []),
        (["launch.sh: warning: node1: 2 CPUs for 8 ranks; ask for 8 [few-cpus]"], []),
        (["step 1 [node-missing]"], []),
    ],
)
def test_what_refused_the_start_is_shown_with_its_section(
    log: list[str], shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.out").write_text("\n".join([*log, ""]))
    code = main([str(tmp_path / "job.out")], {})
    rows = capsys.readouterr().out.splitlines()
    assert [row for row in rows if row in REFUSALS] == shown
    sections = [row.removeprefix("## ") for row in rows if row.startswith("## ")]
    assert sections == [line.split("[")[-1].removesuffix("]") for line in shown]
    assert code == 0 or not shown


BLOCK = """FAILED   rank 1 (local rank 1, n1) 14 s after the start       [rank-error]
cause    ValueError: boom
code     1
see      TROUBLESHOOTING.md#rank-error
"""


@pytest.mark.parametrize("label", ["", "1: ", "node1: ", "[0] "], ids=repr)
def test_a_whole_block_is_shown_wherever_it_stands_in_the_output_of_a_job(
    label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """srun --label, pdsh and a launcher over ssh put a label before each line."""
    log = tmp_path / "slurm-1.out"
    block = "".join(f"{label}{row}\n" for row in BLOCK.splitlines())
    log.write_text(f"[0] Error: a consequence\n{block}" + "the batch script goes on\n" * 9999)
    assert main([str(log)], {}) == 0
    assert capsys.readouterr().out == BLOCK


@pytest.mark.parametrize(
    ("line", "fault", "kind"),
    [
        ("[1] distributed.environment.LauncherError: 2 ranks, not 3; x [wrong-world]", "", 1),
        ("FAIL  2 ranks on 2 nodes, gloo: n1 has a slow link [slow-link]", "", 1),
        ("[1] TimeoutError: 1 of 2 ranks did not join; check them [node-missing]", "", 4),
        ("[0] node agent: warning: n2's clock and n1's differ by +9 s [clock-skew]", None, 0),
        ("[0] a list [of-words]", None, 0),
        ("[0] ValueError: of a list [of-words]", "rank-error", 2),
    ],
)
def test_a_line_of_ours_names_its_fault_at_the_end(line: str, fault: str | None, kind: int) -> None:
    seen = find_sighting(line)
    if fault is None:
        assert seen is None
    else:
        named = fault or line.rpartition("[")[2].removesuffix("]")
        assert seen is not None and (seen.fault, seen.kind) == (named, kind)


def test_a_word_that_is_nothing_here_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word, near in {"rank-stuk": "did you mean rank-stuck? ", "--dry": ""}.items():
        assert main([word], {}, "explain.sh") == 2
        cure = f"{near}give a RUN, a FILE or a FAULT"
        said = f"explain.sh: {word}: No such file or directory; {cure}\n"
        assert capsys.readouterr().err == said


def test_of_a_log_with_several_starts_the_last_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "slurm-17.out"
    first = "stopped  by SIGTERM after saving a checkpoint (code 75); nothing is left running"
    refusal = "node agent: run 17 is live: job 18, process 2158 on node1; wait [run-is-live]"
    log.write_text(f"run        17\nValueError: x\n{first}\nrun        17\n{refusal}\n")
    assert main([str(log)], {}) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{refusal}\n## run-is-live") and first not in said


def test_a_refusal_of_one_node_is_shown_before_the_stop_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "slurm-17.out"
    stopped = "stopped  by SIGINT (code 130); nothing is left running"
    refusal = "node agent: node2: port 1 is taken; end that process [port-in-use]"
    log.write_text(f"run        17\n{refusal}\nrun        18\n[1] {REFUSALS[0]}\n{stopped}\n")
    assert main([str(log)], {}) == 0
    said = capsys.readouterr().out.splitlines()
    assert [said[0], said[-1]] == [REFUSALS[0], stopped]
    assert "## name-unresolved" in said and refusal not in said


def test_a_pipe_among_the_logs_of_a_run_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "node_0.log").write_text("ValueError: bad\n")
    for name in ("node_1.log", "failure.txt"):
        os.mkfifo(tmp_path / name)
    command = [*EXPLAIN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "ValueError: bad" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "FIFO"])
def test_a_log_is_read_from_a_pipe(name: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    log = "[rank3]: ValueError: boom\n" + "step\n" * 99999
    command = f"exec 3<&0; cat <&3 > {fifo} & exec {shlex.join(EXPLAIN)} {fifo}"
    words = ["bash", "-c", command] if name == "FIFO" else [*EXPLAIN, name]
    done = subprocess.run(
        words, input=log, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.startswith("FAILED   rank 3       [rank-error]\n"), done.stderr
    assert "log      -:1\n" in done.stdout and done.returncode == 0


def test_a_run_that_starts_and_has_no_log_yet_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    note_start(Path("logs/26"), {})
    assert main(["26"], {}, "explain.sh") == 1
    assert capsys.readouterr().out.startswith("26 ")


def test_a_launcher_that_is_gone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = LauncherProcess(4194305, 1, socket.gethostname())  # above the largest process id
    run_json.update(Path("logs/26"), state="running", launcher=gone, command="launch.sh x.py")
    (tmp_path / "logs/26/node_0.log").write_text("[0] step 1\n")
    assert main(["26"], {}, "explain.sh") == 1
    told = f"the launcher (pid 4194305 on {gone.host}) is gone [launcher-killed]\n"
    assert capsys.readouterr().out.endswith(f"{told}resume   RUN_ID=26 launch.sh x.py\n")


def test_a_pipe_in_the_place_of_the_newest_link_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    note_start(Path("logs/26"), {})
    os.mkfifo("logs/latest")
    assert main([], {}, "explain.sh") == 1
    assert capsys.readouterr().out.startswith("26 ")


def test_without_a_name_the_newest_run_is_explained_even_if_it_never_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "logs/latest"
    note_start(Path("logs/older"), {})
    link.symlink_to("older")
    (tmp_path / "logs/older" / KEPT).write_text("FAILED   rank 1\n")
    run_json.update(Path("logs/older"), started=1.0)
    note_start(Path("logs/newer"), {})
    assert main([], {}, "explain.sh") == 1
    assert capsys.readouterr().out.startswith("newer ")
    (tmp_path / "logs/by-hand").mkdir()  # this node has logs, but not the run's record
    link.unlink()
    link.symlink_to("by-hand")
    (tmp_path / "logs/by-hand/node_1.log").write_text("[1] ValueError: boom\n")
    assert main([], {}, "explain.sh") == 0
    assert "ValueError: boom" in capsys.readouterr().out


def test_without_a_name_and_without_a_run_the_log_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([], {"LOG_DIR": "gone"}, "explain.sh") == 2
    said = (
        "explain.sh: gone/latest: No such file or directory; there is no run yet; give a FILE, or "
    )
    assert capsys.readouterr().err == f"{said}correct LOG_DIR\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command; choose from ls DIR, verify DIR, export DIR FILE, hash DIR"),
        (["verfy", "x"], "unknown command 'verfy'; did you mean verify? choose from ls DIR, "),
        (["export", "x"], "export needs DIR FILE, but got x"),
        (["ls"], "ls needs DIR, but got nothing"),
    ],
)
def test_wrong_words_for_checkpoint_sh_are_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools.main(["scripts/checkpoint.sh", *words], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint.sh: {said}")
    assert line.endswith("; see checkpoint.sh --help")


@pytest.mark.slow
def test_a_log_of_one_endless_line_is_read_in_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        for _ in range(250):
            file.write("x" * (1 << 20))
        file.write("\rstep 1\nValueError: boom\n")
    limit = 200 << 20  # bytes; the log has more
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
    code += "from launcher.explain.main import main\n"
    code += f"main([{str(log)!r}], {{}})"
    done = run_program([sys.executable, "-c", code], ROOT)
    assert "cause    ValueError: boom\n" in done.stdout, done.stderr
    assert f"log      {log}:2\n" in done.stdout


@pytest.mark.slow
def test_a_log_of_failures_only_is_read_in_linear_time(tmp_path: Path) -> None:
    took = []
    for number in (1_000, 10_000):
        lines = ("RuntimeError: " + chr(97 + n % 26) * (n // 26 + 1) for n in range(number))
        log = written(tmp_path / "log", "\n".join(line[:1000] for line in lines))
        began = time.process_time()
        assert explain(log) is not None
        took.append(time.process_time() - began)
    assert took[1] < 30 * took[0]
