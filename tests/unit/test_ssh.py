"""Launches over ssh and pdsh, with a bash on this machine instead of ssh.

The launcher, its remote side and pdsh are real; the agent is a script of a few lines.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from agents import PATIENCE_S, ROOT, begun, eventually, execute, is_alive, rarely, with_limits
from job_tools import make_tool

from launcher import processes
from launcher.fanout.ssh import TRIES
from launcher.wire import limits
from launcher.wire.messages import Report

pytestmark = pytest.mark.slow
needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")

SCRIPTS = ROOT / "scripts/ssh"
SSH = """# As the launcher and pdsh call it: options, the host, the command.
[[ $* != -V ]] || exit
host=${*: -2:1} command=${*: -1}
echo "$host" >>"$FAKE_NODES/asked"
export SSH_CONNECTION="10.0.0.1 1 127.0.0.1 22"
cd /
if [[ -e $FAKE_NODES/$host && $command == *"bash -s" ]]; then exec bash "$FAKE_NODES/$host"; fi
bash -c "$command"  # in a process of its own: the launcher continues an ssh that is stopped
exit
"""
PYTHON = f"""case "$*" in
  *" launcher.fanout.far_side "*) [[ $* == *" --pdsh "* ]] || exec {sys.executable} "$0.py" "$@" ;;
  *"/agent.py "*) exec {sys.executable} "$FAKE_NODES/agent.py" "$@" ;;
esac
exec {sys.executable} "$@"
"""
FAR_SIDE = f"""import os, subprocess, sys
sys.path[:0] = [{str(ROOT)!r}]
from launcher.fanout import far_side
from launcher.processes import shell_code
def fork(words, environ, control, *_):
    command = [sys.executable, os.environ["FAKE_NODES"] + "/agent.py", *words]
    return subprocess.Popen(command, stdin=control.fd)
far_side.fork_agent, far_side.guard = fork, lambda agent: shell_code(agent.wait())
sys.exit(far_side.main(sys.argv[3:], os.environ))
"""
TELL = """
import json, os, signal, sys, time
def tell(**message):
    print('\\x02' + os.environ['LAUNCH_TOKEN'], json.dumps(message), flush=True)
rank = sys.argv[sys.argv.index('--node-rank') + 1]
def end(code, fault="rank-error", cause="ValueError: no samples"):
    failure = dict(fault=fault, cause=cause, code=code, host="n", node_rank=0, time=2.0, rank=1)
    tell(Outcome=dict(code=code, failure=failure, started=1.0, run_id="r", command="again"))
    sys.exit(code)
"""
LIE = """
mapfile -t -n 3 opening
[[ ${opening[1]} =~ ([0-9a-f]{32}[.][0-9]+) ]]
token=${BASH_REMATCH[1]}
say() { printf '\\002%s %s\\n' "$token" "$1"; }
say '{"Hello":{"address":"127.0.0.1"}}'
"""
REPORT = asdict(Report(0, 1, 1, "n0", "r", {}, {}, port=20000))
BEAT_S = 2.0


class Nodes:
    """A folder that defines how each node behaves, and the launcher's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = folder / "nodes"
        tools = folder / "tools"
        for each in (self.nodes, tools):
            each.mkdir()
        make_tool(tools / "ssh", SSH)
        make_tool(tools / "python", PYTHON)
        (tools / "python.py").write_text(FAR_SIDE)
        (folder / "own.py").touch()
        self.environ: dict[str, Any] = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(tools),
            "FAKE_NODES": str(self.nodes),
            "PYTHON": str(tools / "python"),
            "TRAIN_SCRIPT": "own.py",
            "SKIP_PREFLIGHT": "1",
            "GRACE": "5",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def agent(self, script: str) -> None:
        """Set what each node's agent does, after TELL."""
        (self.nodes / "agent.py").write_text(f"{TELL}\n{script}")

    def start(
        self, *words: str, script: str = "launch_torchrun_auto.sh", **environ: str
    ) -> subprocess.Popen[bytes]:
        """Start a launch; stdout and stderr are pipes."""
        self.started.append(
            subprocess.Popen(
                [SCRIPTS / script, *words],
                cwd=self.folder,
                env={**self.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return self.started[-1]

    def launch(self, *words: str, **options: str) -> tuple[int, str, str]:
        """Run a launch to its end; returns the exit code, stdout and stderr."""
        launcher = self.start(*words, **options)
        out, err = launcher.communicate(timeout=PATIENCE_S)
        assert b"Traceback" not in err, err
        return launcher.returncode, out.decode(), err.decode()

    def wait_for(self, name: str) -> str:
        """Return the content of a file as soon as an agent has written it."""
        file = self.nodes / name
        eventually(lambda: file.exists() and file.read_text() != "", name)
        return file.read_text()

    def process(self, name: str) -> int:
        return int(self.wait_for(name))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for launcher in made.started:
        processes.send([*processes.descendants(launcher.pid), launcher.pid], signal.SIGKILL)
        launcher.communicate()


@pytest.mark.parametrize("code", [1, 2, 3, 75])
def test_the_block_is_shown_last_for_every_exit_code(nodes: Nodes, code: int) -> None:
    nodes.agent(f"print('busy'); sys.stderr.write('warned\\n')\nend({code})")
    got, out, err = nodes.launch("-", "1", "n0")
    assert (got, out) == (code, "[0] busy\n"), err
    *before, last = err.split("ended      ")
    assert last.startswith(f"code {code}; nothing is left running on 1 node\nFAILED   rank 1 ")
    assert "\ncause    ValueError: no samples\n" in last
    assert last.endswith("see      TROUBLESHOOTING.md#rank-error\n")
    (kept,) = nodes.folder.glob("logs/*/failure.txt")
    assert last.endswith(kept.read_text())
    assert "[0] warned\n" in "".join(before)


PDSH = "launch_pdsh_multinode.sh"


@needs_pdsh
def test_an_agent_starts_when_pdsh_comes(nodes: Nodes) -> None:
    nodes.agent("print('busy', rank)\nsys.exit(7 if rank == '1' else 0)")
    code, out, err = nodes.launch("-", "1", "n0", "n1", script=PDSH)
    assert code == 7 and sorted(out.splitlines()) == ["[0] busy 0", "[1] busy 1"]
    assert "FAILED   node agent 1 (n1) " in err and "code     7" in err  # not pdsh's own last line


@needs_pdsh
def test_the_end_of_pdshs_connection_ends_the_agent(nodes: Nodes) -> None:
    nodes.agent("open(os.environ['FAKE_NODES'] + '/started', 'w').write('x')\ntime.sleep(600)")
    launcher = nodes.start("-", "1", "n0", script=PDSH)
    nodes.wait_for("started")
    marks = [b"launcher.fanout.far_side", b"--pdsh"]
    below = processes.descendants(launcher.pid)
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in below}
    (pid,) = (pid for pid in below if {*marks} <= {*words[pid]})
    os.kill(pid, signal.SIGKILL)
    _, err = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 137
    assert b": n0: the pdsh connection has ended\n" in err
    assert b"FAILED   node agent 0 (n0) " in err and b"[launcher-killed]\n" in err


# --- a node's output is data --------------------------------------------------------------------

COMMAND = "RANKS[$(touch pwned)]"


@pytest.mark.parametrize(
    "answer",
    [
        f'nproc={COMMAND}\nsay checked 0\necho "nproc={COMMAND}"',
        json.dumps({"Report": {**REPORT, "nproc": COMMAND}}),
        json.dumps({"Report": {**REPORT, "faults": 7}}),
        json.dumps({"Report": {"port": 1}}),
        json.dumps({"Report": None, "Exit": None}),
        "[" * 100_000,
        "null",
        '{"Report":\xff',
        json.dumps({"Hello": {"address": COMMAND}}),
    ],
    ids=lambda answer: answer[:40],  # a report contains the time
)
def test_a_report_that_does_not_fit_is_refused(nodes: Nodes, answer: str) -> None:
    (nodes.nodes / "n0").write_text(f"{LIE}\nsay {shlex.quote(answer)}\nexit 0")
    code, _, err = nodes.launch("-", "1", "n0", SKIP_PREFLIGHT="")
    assert code == 3 and "n0: " in err and "[env-missing]" in err
    assert not list(nodes.folder.rglob("pwned"))


@pytest.mark.parametrize(
    "answer",
    [
        {"Exit": {"code": "x[$(touch pwned)]", "left": 0}},
        {"Exit": {"code": 256, "left": 0}},
        {"Exit": {"code": 0, "left": -1}},
        {"Exit": {"code": True, "left": 0}},
        {"Exit": {"code": 0}},
        {"end": {"code": 0}},
    ],
    ids=str,
)
def test_an_end_that_does_not_fit_is_a_lost_node(nodes: Nodes, answer: object) -> None:
    lie = f"{LIE}\nsay {shlex.quote(json.dumps({'Report': REPORT}))}\nread -r; read -r"
    (nodes.nodes / "n0").write_text(f"{lie}\nsay {shlex.quote(json.dumps(answer))}\nexit 0")
    code, _, err = nodes.launch("-", "1", "n0")
    assert code == 137 and "FAILED   node agent 0 (n0)" in err
    assert not list(nodes.folder.rglob("pwned"))


# --- a terminal that accepts no output ----------------------------------------------------------


def test_a_reader_that_stalls_delays_neither_the_run_nor_its_stop(nodes: Nodes) -> None:
    nodes.agent(
        "for number in range(40000): print('x' * 100)\n"  # the pipe takes 64 KiB
        "print('done', flush=True)\n"
        "open(os.environ['FAKE_NODES'] + '/printed', 'w').write('yes')\n"
        "while (line := sys.stdin.readline()) == '\\n': pass\n"
        "open(os.environ['FAKE_NODES'] + '/told', 'w').write(line)\n"
        "end(75)"
    )
    launcher = nodes.start("-", "1", "n0")
    nodes.wait_for("printed")
    launcher.terminate()
    assert nodes.wait_for("told") == '{"StopRequest":{"signum":15,"node":-1}}\n'
    assert launcher.wait(PATIENCE_S) == 75  # although nothing reads its output
    assert launcher.stdout is not None and launcher.stderr is not None
    assert b"not shown" not in launcher.stderr.read()


def test_after_a_stop_a_node_has_all_of_grace(nodes: Nodes) -> None:
    nodes.agent(
        "open(os.environ['FAKE_NODES'] + '/started', 'w').write('yes')\n"
        "while 'StopRequest' not in sys.stdin.readline(): pass\n"
        f"until = time.monotonic() + {limits.CONTROL_END_S + BEAT_S}\n"
        "while time.monotonic() < until and sys.stdin.readline(): pass\n"  # a beat, or the end
        "end(75 if time.monotonic() >= until else 143)"
    )
    launcher = nodes.start("-", "1", "n0", GRACE="60")
    nodes.wait_for("started")
    launcher.terminate()
    assert launcher.wait(PATIENCE_S) == 75


@pytest.mark.long
def test_a_slow_nvidia_smi_has_more_time_than_a_login(nodes: Nodes) -> None:
    nodes.agent("sys.exit(0)")
    script = "sleep 7; [[ $1 != --query-gpu=* ]] || echo 0, GPU-aa, 0, 580.65.06, [N/A]"
    make_tool(nodes.folder / "tools/nvidia-smi", script)
    given = {"SKIP_PREFLIGHT": "0", "PREFLIGHT_SECONDS": "5", "BACKEND": "gloo"}
    code, _, err = nodes.launch("-", "1", "n0", **given)
    assert code == 0, err


# --- arguments and variables --------------------------------------------------------------------

DUMP = (
    "json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['FAKE_NODES'] + '/' + rank, 'w'))"
)


def test_arguments_of_230_kb_arrive(nodes: Nodes) -> None:
    nodes.agent(DUMP)
    words = [f"{number:0100}" for number in range(2300)]
    code, _, err = nodes.launch("-", "1", "n0", "--", *words)
    assert code == 0, err
    arguments, environ = json.loads((nodes.nodes / "0").read_text())
    assert arguments[-2300:] == words and environ["RUN_ID"]


NEEDED = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "FI_PROVIDER": "efa",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "HF_HOME": "/hf",
    "KMP_AFFINITY": "none",
    "MEGATRON_LM_TP_DEGREE": "2",
    "MKL_NUM_THREADS": "2",
    "MLFLOW_TRACKING_URI": "http://head:5000",
    "NVTE_FLASH_ATTN": "0",
    "PL_GLOBAL_SEED": "7",
    "PYTHONHASHSEED": "7",
    "PYTHONPATH": "src:",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_CACHE_DIR": "/inductor",
    "TRANSFORMERS_OFFLINE": "1",
    "TRITON_CACHE_DIR": "/triton",
    "UCX_TLS": "tcp",
    "VLLM_API_KEY": "hush",
    "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
    "WANDB_MODE": "offline",
}


def test_what_training_reads_is_sent_or_named(nodes: Nodes) -> None:
    nodes.agent(DUMP)
    for node in ("n0", "n1"):  # a login has none of them
        without = " ".join(f"-u {name}" for name in (*NEEDED, "MY_DATA", "OTHER", "VLLM_HOST_IP"))
        (nodes.nodes / node).write_text(f"exec env {without} bash -s")
    (nodes.folder / "own.py").write_text("print(os.environ['MY_DATA'], os.getenv('HOME'))\n")
    others = {"MY_DATA": "/data", "OTHER": "1", "LD_LIBRARY_PATH": "/opt/lib"}
    others["VLLM_HOST_IP"] = "10.0.0.1"  # of this machine
    code, _, err = nodes.launch("-", "1", "n0", "n1", **NEEDED, **others)
    names = "LD_LIBRARY_PATH MY_DATA VLLM_HOST_IP"
    assert code == 0 and f"variables  not sent: {names}   (FORWARD_ENV='{names}' sends them)" in err
    for rank in ("0", "1"):
        environ = json.loads((nodes.nodes / rank).read_text())[1]
        assert {name: environ.get(name) for name in NEEDED} == NEEDED
        assert not {"MY_DATA", "VLLM_HOST_IP"} & environ.keys()


PBSDSH = """for node in 0 1; do
  PBS_NODENUM=$node CUDA_VISIBLE_DEVICES=GPU-$node NCPUS=8 OMP_NUM_THREADS=8 "${@:2}"
done
"""


def test_in_a_pbs_job_each_node_gets_its_own_gpus_and_no_threads(nodes: Nodes) -> None:
    nodes.agent(DUMP)
    make_tool(nodes.folder / "tools/pbsdsh", PBSDSH)
    (nodes.folder / "file").write_text("n0\nn0\nn1\n")
    for node in ("n0", "n1"):  # a login lacks the job's variables
        (nodes.nodes / node).write_text(
            "exec env -u PBS_JOBID -u NCPUS -u OMP_NUM_THREADS -u CUDA_VISIBLE_DEVICES bash -s"
        )
    job = {"PBS_JOBID": "7.host", "PBS_NODEFILE": str(nodes.folder / "file"), "PBS_NODENUM": "0"}
    job |= {"PBS_O_WORKDIR": str(nodes.folder), "NCPUS": "8", "OMP_NUM_THREADS": "8"}
    words = {"script": "../pbs/pbs_train.sh", "CUDA_VISIBLE_DEVICES": "GPU-0", "NCCL_DEBUG": "WARN"}
    code, _, err = nodes.launch("-", **job, **words)
    assert code == 0 and "variables  sent to the nodes: NCCL_DEBUG" in err, err
    for rank, threads in (("0", None), ("1", "8")):  # n0 has two ranks, n1 one for all CPUs
        environ = json.loads((nodes.nodes / rank).read_text())[1]
        assert environ["CUDA_VISIBLE_DEVICES"] == f"GPU-{rank}"
        assert environ.get("OMP_NUM_THREADS") == threads


# --- ends ---------------------------------------------------------------------------------------

DROP = """
[[ -e $0.tried ]] || { touch "$0.tried"; echo 'Connection closed by UNKNOWN' >&2; exit 255; }
exec bash -s
"""


def test_a_connection_that_a_bastion_drops_is_tried_again(nodes: Nodes) -> None:
    nodes.agent("sys.exit(int(rank))")
    (nodes.nodes / "n1").write_text(DROP)
    code, _, err = nodes.launch("-", "1", "n0", "n1")
    assert code == 1 and "[ssh-refused]" not in err
    assert (nodes.nodes / "asked").read_text().split().count("n1") == 2


# The far side is stopped once it has said hello; a second login finds an ordinary node.
STOPPED = f"""
[[ ! -e $0.tried ]] || exec bash -s
touch "$0.tried"
{LIE}
export LAUNCH_TOKEN=$token
bash -c 'echo $$ >"$FAKE_NODES/stopped"; kill -STOP $$'
exit
"""


def test_a_far_side_that_is_stopped_during_the_preflight_is_ended(nodes: Nodes) -> None:
    (nodes.nodes / "n1").write_text(STOPPED)
    given = {"SKIP_PREFLIGHT": "0", "PREFLIGHT_SECONDS": "5", "BACKEND": "gloo"}
    given |= with_limits(nodes.folder / "limits", SSH_CONNECT_S=120)  # for the second login
    code, _, err = nodes.launch("-", "1", "n0", "n1", **given)
    assert code == 3 and "n1: its checks exceed the preflight's time limit; " in err
    assert not is_alive(nodes.process("stopped"))


def test_a_node_that_takes_no_login_is_tried_a_few_times(nodes: Nodes) -> None:
    (nodes.nodes / "n1").write_text("exit 255")
    code, _, err = nodes.launch("-", "1", "n0", "n1")
    assert code == 3 and "n1: ssh to n1 ended without a message;" in err
    assert (nodes.nodes / "asked").read_text().split().count("n1") == TRIES


def test_a_signal_before_the_start_ends_the_launch(nodes: Nodes) -> None:
    (nodes.nodes / "n0").write_text('echo $$ >"$FAKE_NODES/there"; sleep 60')
    launcher = nodes.start("-", "1", "n0")
    there = nodes.process("there")
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130 and out == b""
    assert err == b"stopped  by SIGINT; nothing was started\n"
    eventually(lambda: not is_alive(there), "the login")


# Signals this process when it opens the config, before the launcher's event loop exists.
SIGNALS_ITSELF = """import os, sys
def signal_once(event, given):
    if event == "open" and given[0] == os.environ["SIGNALS_AT"]:
        os.kill(os.getpid(), int(os.environ["SIGNALS_WITH"]))
sys.addaudithook(signal_once)
"""


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_before_the_first_ssh_ends_the_launch_with_a_line(
    nodes: Nodes, tmp_path: Path, signum: signal.Signals
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("")
    (tmp_path / "sitecustomize.py").write_text(SIGNALS_ITSELF)
    given = {"PYTHONPATH": str(tmp_path), "SIGNALS_AT": str(config), "SIGNALS_WITH": f"{signum:d}"}
    code, _, err = nodes.launch(str(config), "1", "n0", **given)
    assert code == 128 + signum
    assert err == f"stopped  by {signum.name}; nothing was started\n"


def test_a_far_side_outlives_signals_that_stop_no_run(nodes: Nodes) -> None:
    nodes.agent(
        "open(os.environ['FAKE_NODES'] + '/far', 'w').write(str(os.getppid()))\n"
        "while not os.path.exists(os.environ['FAKE_NODES'] + '/go'): time.sleep(0.02)"
    )
    launcher = nodes.start("-", "1", "n0")
    far_side = nodes.process("far")
    for signum in processes.OTHERS:
        os.kill(far_side, signum)
    (nodes.nodes / "go").touch()
    _, err = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, err


def test_a_process_that_stays_is_killed_and_counted(nodes: Nodes) -> None:
    nodes.agent(
        "file = os.environ['FAKE_NODES'] + '/stays'\n"
        "if not os.fork():\n"
        "    os.setsid(); open(file, 'w').write(str(os.getpid()))\n"
        "    os.closerange(0, 3); time.sleep(600)\n"
        "while not os.path.exists(file) or not os.path.getsize(file): time.sleep(0.02)"
    )
    code, _, err = nodes.launch("-", "1", "n0")
    assert code == 0 and "1 process of the run had to be killed\n" in err
    assert not is_alive(nodes.process("stays"))


# Like a supervisor, it exits when its launcher exits or shows no sign of life.
HELD = """
import select
open(os.environ['FAKE_NODES'] + '/agent.' + rank, 'w').write(str(os.getppid()))
while select.select([0], [], [], 10)[0] and os.read(0, 100): pass
sys.exit(143)
"""


@pytest.mark.long
def test_a_launcher_that_stood_still_says_so(nodes: Nodes) -> None:
    nodes.agent(HELD)
    launcher = nodes.start("-", "1", "n0", "n1")
    parts = [nodes.process(f"agent.{rank}") for rank in range(2)]
    os.kill(launcher.pid, signal.SIGSTOP)
    time.sleep(5)  # too short to end the run
    os.kill(launcher.pid, signal.SIGCONT)
    time.sleep(BEAT_S)
    assert all(map(is_alive, parts))
    os.kill(launcher.pid, signal.SIGSTOP)
    eventually(lambda: not any(map(is_alive, parts)), "the nodes go on")
    os.kill(launcher.pid, signal.SIGCONT)
    _, err = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 137 and b"FAILED   launcher (" in err
    assert re.search(rb"cause    the launcher was suspended for \d+ s .*\n", err)
    assert b"[launcher-killed]\n" in err


# Saves and exits, like an agent that gets no messages from another: 3 s after the launcher has lost
# that node, or after 5 minutes if it never does; on n1, a minute later.
SAVES = """
import select
def wait(until, file=''):
    while time.monotonic() < until and not os.path.exists(file):
        if select.select([0], [], [], 0.1)[0] and not os.read(0, 100): sys.exit(143)
folder = os.environ['FAKE_NODES']
open(folder + '/agent.' + rank, 'w').write(str(os.getppid()))
wait(time.monotonic() + 300, folder + '/lost')
wait(time.monotonic() + 3 + (rank == '1') * 60)
open(folder + '/saved', 'w')
sys.exit(137)
"""


@pytest.mark.parametrize(
    ("agent", "silent", "who", "cause"),
    [
        (SAVES, [1], b"node agent 1 (n1) ", b"no heartbeat for 10 s (network down?)"),
        *rarely((HELD, [0, 1], b"launcher (", b"no heartbeat from any node for 10 s (network")),
    ],
    ids=["one", "both"],
)
def test_a_silent_node_is_a_lost_link_and_the_others_may_save(
    nodes: Nodes, agent: str, silent: list[int], who: bytes, cause: bytes
) -> None:
    nodes.agent(agent)
    launcher = nodes.start("-", "1", "n0", "n1", SILENCE_SECONDS="10", GRACE="60")
    parts = [nodes.process(f"agent.{rank}") for rank in range(2)]
    for rank in silent:
        os.kill(parts[rank], signal.SIGSTOP)
    began = time.monotonic()
    assert launcher.stderr is not None
    err = b""
    while b"[link-lost]\n" not in err:
        line = launcher.stderr.readline()
        assert line, err
        err += line
    assert time.monotonic() - began > 8
    (nodes.nodes / "lost").touch()
    err += launcher.stderr.read()
    assert launcher.wait(PATIENCE_S) == 137
    assert re.search(rb": n1: warning: no heartbeat for \d s; after 10 s, this node is lost", err)
    assert b": n1: no heartbeat for 10 s (network down?) [link-lost]\n" in err  # at once
    assert b"FAILED   " + who in err and b"cause    " + cause in err
    assert not any(map(is_alive, parts))
    assert (nodes.nodes / "saved").exists() == (agent == SAVES)


@pytest.mark.long
def test_what_is_left_on_a_node_that_was_silent_at_the_end_is_ended(nodes: Nodes) -> None:
    """Another node's agent gives up on the silent node before the launcher does."""
    nodes.agent(f"if rank == '0': time.sleep(7); sys.exit(137)\n{HELD}")
    launcher = nodes.start("-", "1", "n0", "n1", SILENCE_SECONDS="10")
    part = nodes.process("agent.1")
    os.kill(part, signal.SIGSTOP)
    _, err = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 137 and b"[link-lost]\n" in err
    assert re.search(rb": n1: no heartbeat for \d+ s \(.*\) \[link-lost\]\n", err)  # at once
    assert not is_alive(part)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_handed_the_start(tmp_path: Path) -> None:
    name = f"{os.getpid()}.test"
    script = (
        "import os, sys\n"
        "from launcher.fanout.far_side import await_pdsh\n"
        "os.write(await_pdsh(sys.argv[1], 't.0'), b'welcome')\n"
    )
    with begun(script, name):
        stranger = os.fork()
        if stranger == 0:
            os.setuid(65534)
            os._exit(len(connect(name)))
        assert os.waitpid(stranger, 0)[1] == 0
        assert connect(name) == b"welcome"


def connect(name: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(f"\0{name}")
        return other.recv(100)


def test_the_limit_of_open_files_is_raised_as_far_as_needed(nodes: Nodes) -> None:
    nodes.agent("sys.exit(0)")
    command = shlex.join([str(SCRIPTS / "launch_torchrun_auto.sh"), "-", "1", "n[0-7]"])
    limited = f"ulimit -Sn 30; exec {command}"
    execute(nodes.folder, "bash", "-c", limited, **nodes.environ)
