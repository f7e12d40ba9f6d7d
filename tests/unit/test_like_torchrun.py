"""A script under the node agent sees what it would see under torchrun."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import (
    AGENT,
    GLOO_SAYS,
    PATIENCE_S,
    execute,
    rarely,
    run_agent,
    run_program,
    written,
)
from ports import free_port

from launcher.agent.torch_internals import RECORDER_SIZE

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}"]

LOOK = """
import __main__, json, multiprocessing, os, pickle, signal, sys, threading

class Mine:
    pass

assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine
seen = {
    "name": __name__,
    "file": __file__,
    "main": __main__.__dict__ is globals(),
    "spec": repr(__spec__ and __spec__.name),
    "package": __package__,
    "argv": sys.argv,
    "cwd": os.getcwd(),
    "stdin": sys.stdin.read(),
    "process": multiprocessing.current_process().name,
    "parent": multiprocessing.parent_process() is None,
    "method": multiprocessing.get_start_method(allow_none=True),
    "threads": threading.active_count(),
    "unbuffered": sys.stdout.write_through,
    "encoding": sys.stdout.encoding,
    "signals": {s: str(signal.getsignal(s)) for s in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGCHLD")
                for s in [getattr(signal, s)]},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "leader": os.getsid(0) == os.getpid(),
    "ours": sorted(m for m in sys.modules if m.partition(".")[0] in ("distributed", "mine")),
    "variables": sorted(k for k in os.environ if k.startswith(("MASTER", "RANK", "LOCAL", "WORLD",
                        "GROUP", "ROLE", "TORCH", "PYTORCH", "OMP"))
                        and k not in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHINDUCTOR_CACHE_DIR")),
    "omp": os.environ.get("OMP_NUM_THREADS"),
}
import torch
older = sys.modules.get("torch.distributed.nn.jit.instantiator")
added = getattr(older, "INSTANTIATED_TEMPLATE_DIR_PATH", "")  # to the path's end, by an older torch
vendored = "/setuptools/_vendor"  # by setuptools, which such a torch imports on Python 3.12
ours = "/launcher/importable"  # with the name by which a script imports the helper
seen["path"] = [one for one in sys.path if one != added and not one.endswith((vendored, ours))]
seen["torch_threads"] = torch.get_num_threads()
open(os.environ["OUT"] + os.environ["RANK"], "w").write(json.dumps(seen))
"""


def look(
    launcher: list[str], arguments: list[str], out: Path, folder: Path
) -> list[dict[str, object]]:
    own = {"OUT": str(out), RECORDER_SIZE: "0"}  # otherwise, our flight recorder adds a thread
    done = run_program([*launcher, "--nproc-per-node", "2", *arguments], folder, **own)
    assert done.returncode == 0, done.stderr
    return [json.loads(out.with_name(out.name + str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("script", marks=pytest.mark.another_torch("launch")),
        *rarely("module", "program", "folder", "zip"),
    ],
)
def test_everything_a_script_can_see(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "a folder"
    (folder / "pack").mkdir(parents=True)
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "look.py").write_text(LOOK)
    (folder / "pack" / "__main__.py").write_text(LOOK)
    shutil.make_archive(str(folder / "pack"), "zip", folder / "pack")
    awkward = ["--flag", "a b", "$HOME", "'\"", "ü", ""]
    arguments = {
        "script": ["pack/look.py", *awkward],
        "module": ["-m", "pack.look", *awkward],
        "folder": ["pack", *awkward],
        "zip": ["pack.zip", *awkward],
        "program": ["--no-python", sys.executable, "-u", "pack/look.py", *awkward],
    }[how]
    theirs = look(TORCHRUN, arguments, tmp_path / "theirs", folder)
    ours = look(AGENT, arguments, tmp_path / "ours", folder)
    for mine, torchs in zip(ours, theirs, strict=True):
        assert {key: (mine[key], torchs[key]) for key in mine if mine[key] != torchs[key]} == {}


def test_a_script_has_its_own_modules_numbers_and_end(tmp_path: Path) -> None:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "__init__.py").write_text("whose = 'mine'\n")
    script = tmp_path / "own.py"
    script.write_text(
        "import atexit, os, random, threading, numpy, torch\n"
        "import distributed\n"
        "rank = os.environ['RANK']\n"
        "print(distributed.whose, distributed.__file__)\n"
        "with open('drawn' + rank, 'w') as file:\n"
        "    print(torch.rand(1).item(), random.random(), numpy.random.rand(), file=file)\n"
        "atexit.register(print, 'atexit')\n"
        "kept_open = open('buffered' + rank, 'w')\n"
        "kept_open.write('flushed')\n"
        "threading.Timer(0.1, lambda: open('thread' + rank, 'w').write('done')).start()\n"
        "if os.fork() == 0: os._exit(0)\n"
        "os.wait()\n"
    )
    done = run_agent("--nproc-per-node", "2", script, folder=tmp_path)
    own = f"mine {tmp_path}/distributed/__init__.py"
    assert sorted(done.stdout.splitlines()) == ["atexit"] * 2 + [own] * 2, done.stderr
    drawn = [number for rank in "01" for number in (tmp_path / f"drawn{rank}").read_text().split()]
    assert len(set(drawn)) == 6
    for rank in "01":
        assert (tmp_path / f"buffered{rank}").read_text() == "flushed"
        assert (tmp_path / f"thread{rank}").read_text() == "done"


RELEASES_LATE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
sys.setswitchinterval(60)  # only the end of a group lets gloo's thread have the GIL
dist.all_reduce(torch.ones(1 << 24), async_op=True)  # only the thread has the tensor
dist.destroy_process_group()
print("left")
"""


@pytest.mark.another_torch("shapes")
def test_it_ends_although_gloo_needs_the_gil_for_a_last_tensor(tmp_path: Path) -> None:
    """The end of a group waits for gloo's thread. Before torch 2.8, torchrun's rank hangs here."""
    script = written(tmp_path / "late.py", RELEASES_LATE)
    done = run_agent("--nproc-per-node", "2", script, folder=tmp_path)
    left = GLOO_SAYS.sub("", done.stdout).split()
    assert (done.returncode, left) == (0, ["left"] * 2), done.stderr


IN_HOOK = "import os, sys; sys.excepthook = lambda *_: {}; 1 / int(os.environ['RANK'])"


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        (IN_HOOK.format("sys.exit(33)"), 33),
        *rarely(
            ("raise SystemExit('words')", 1),
            ("import os; os.abort()", 134),
            ("raise SystemExit(300)", 44),
            ("raise KeyboardInterrupt", 130),
            ("import no_such_module", 1),
            ("import sys; sys.excepthook = lambda *_: 1 / 0; [][0]", 1),
        ),
    ],
)
def test_exit_codes(tmp_path: Path, statement: str, code: int) -> None:
    script = written(tmp_path / "leave.py", statement + "\n")
    assert run_agent("--nproc-per-node", "2", script).returncode == code


def test_an_interrupt_that_a_script_raises_is_shown_with_its_place(tmp_path: Path) -> None:
    script = written(tmp_path / "leave.py", "def leave():\n    raise KeyboardInterrupt\nleave()\n")
    done = run_agent("--nproc-per-node", "2", script)
    assert done.returncode == 130
    assert "cause    KeyboardInterrupt\n" in done.stderr and "leave.py:2 in leave" in done.stderr


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group (version 1 or 2) with 1 GiB of memory."""
    root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if (root / "memory").is_dir():
        root, limit = root / "memory", "memory.limit_in_bytes"
    group = root / f"launch-kit-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"this machine allows no control group for memory: {error}")
    yield group
    group.rmdir()


def test_a_kill_for_lack_of_memory_is_named(tmp_path: Path, memory_group: Path) -> None:
    script = tmp_path / "grow.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    b'1' * (4 << 30)\n")
    join = ["sh", "-c", f'echo $$ >{memory_group}/cgroup.procs; exec "$@"', "-"]
    done = execute(tmp_path, *join, *AGENT, "--nproc-per-node", "2", script, code=137)
    assert "FAILED   rank 1 " in done.stderr and "[out-of-memory]" in done.stderr
    assert "this node's memory limit was reached" in done.stderr


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--redirects", "3", "--tee", "1"], "[rank0] 0 out\n[rank1] 1 out\n"),
        *rarely(
            (["--redirects", "3"], ""),
            (["--redirects", "0:1,1:2"], "0 err\n"),  # with logs, only rank 0 is shown
            (["--tee", "1:3"], "[rank0] 0 err\n[rank0] 0 out\n[rank1] 1 err\n[rank1] 1 out\n"),
        ),
    ],
)
def test_streams_go_to_files_as_under_torchrun(
    tmp_path: Path, options: list[str], shown: str
) -> None:
    script = tmp_path / "x.py"
    script.write_text(
        "import os\nfor fd, name in ((1, 'out'), (2, 'err')):\n"
        "    os.write(fd, f\"{os.environ['RANK']} {name}\\n\".encode())\n"
    )
    files = {}
    for name, launcher in (("torchrun", TORCHRUN), ("ours", AGENT)):
        where = ["--nproc-per-node=2", f"--log-dir={tmp_path / name}", *options]
        done = execute(tmp_path, *launcher, *where, script)
        files[name] = {
            "/".join(file.parts[-3:]): file.read_text()
            for file in (tmp_path / name).glob("*/attempt_0/*/std*")
            if not file.parents[2].is_symlink()
        }
    assert files["ours"] == {path: text for path, text in files["torchrun"].items() if text}
    lines = (done.stdout + done.stderr).splitlines(keepends=True)
    assert "".join(sorted(lines)) == shown


def test_a_stream_that_its_file_cannot_hold_is_told_and_the_run_continues(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("import os\nos.write(1, b'12345678\\n' * 2000)\n")
    limit = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-"]  # KiB; then a write is short or fails
    limit += ["env", "PYTHONDONTWRITEBYTECODE=1"]  # Python would cut its cached code, too
    options = [f"--log-dir={tmp_path}", "--redirects=3", "--rdzv-id=mine"]
    done = execute(tmp_path, *limit, *AGENT, *options, script)
    folder = tmp_path / "mine"
    files = folder / "attempt_0/0/stdout.log", folder / "node_0.log"
    host = socket.gethostname().partition(".")[0]
    assert done.stderr.splitlines() == [
        f"node agent: warning: {host}: {file} is incomplete from here (File too large); "
        "the run continues [log-lost]"
        for file in files
    ]
    assert [file.stat().st_size for file in files] == [8192, 8192]


def test_signals_to_handle_reach_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text(
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})\n"
        "os.write(1, b'ready\\n')\n"
        "signal.sigwait({signal.SIGUSR2})\n"
        "os.write(1, b'saved\\n')\n"
    )
    options = ["--signals-to-handle=SIGUSR2", "--nproc-per-node", "2"]
    run = subprocess.Popen([*AGENT, *options, str(script)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    run.send_signal(signal.SIGUSR2)
    rest, _ = run.communicate(timeout=PATIENCE_S)
    assert rest == "saved\n" * 2
    assert run.returncode == 128 + signal.SIGUSR2
    wrong = execute(tmp_path, *AGENT, "--signals-to-handle", "SIGNONE", script, code=2)
    assert len(wrong.stderr.splitlines()) == 1 and "cannot handle SIGNONE" in wrong.stderr


@pytest.mark.long
def test_elastic_launches_are_handed_to_torch(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("import os; os.write(1, os.environ['WORLD_SIZE'].encode() + b'\\n')")
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    rendezvous += ["--rdzv-conf=last_call_timeout=1"]
    done = run_agent("--nnodes=1:2", *rendezvous, "--nproc-per-node=2", script)
    assert done.stdout == "2\n2\n", done.stderr
    assert "--nnodes MIN:MAX: torch's elastic agent starts the ranks" in done.stderr


@pytest.mark.parametrize(
    ("options", "variables", "cause"),
    [
        ([], {"PET_NO_PYTHON": "1", "PET_MODULE": "1"}, "--no-python and --module"),
        (["--logs_specs=NONE"], {}, "torchrun.logs_specs[NONE]"),
        (["--monitor-interval=abc"], {}, "--monitor-interval/--monitor_interval: invalid float"),
        *rarely(
            (["--max-restarts=-1"], {}, "--max-restarts -1: give 0 or more"),
            (["--local-ranks-filter=a"], {}, "--local-ranks-filter a: give local ranks"),
            (["--nnodes=2:1"], {}, "--nnodes 2:1: not a number of nodes"),
            (["--nnodes=1:2"], {}, "--nnodes 1:2: a range needs --rdzv-backend c10d"),
            (["--no-python", "--module"], {}, "--no-python and --module"),
            (["--event-log-handler=none"], {}, "--event-log-handler none: unknown"),
            (["--nnodes=1:2", "--rdzv-backend=x"], {}, "--rdzv-backend x: unknown"),
        ),
    ],
)
def test_what_torchrun_refuses_is_refused_in_one_line(
    tmp_path: Path, options: list[str], variables: dict[str, str], cause: str
) -> None:
    script = written(tmp_path / "x.py", "")
    done = execute(tmp_path, *AGENT, *options, script, code=2, **variables)
    assert cause in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_torch_whose_compiler_cannot_be_imported_runs_scripts_that_need_none(
    tmp_path: Path,
) -> None:
    """For example, a package that torch._dynamo imports is missing or too old."""
    blocked = "class No:\n    def find_spec(self, name, *_):\n        if name == 'torch._dynamo':\n"
    blocked += (
        "            raise ImportError('too old')\nimport sys\nsys.meta_path.insert(0, No())\n"
    )
    written(tmp_path / "sitecustomize.py", blocked)
    script = written(tmp_path / "x.py", "print('ran')\n")
    assert execute(tmp_path, *AGENT, script, PYTHONPATH=str(tmp_path)).stdout == "ran\n"
