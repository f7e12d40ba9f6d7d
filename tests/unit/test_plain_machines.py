"""Ordinary machines, Pythons and shells: closed and full streams, no HOME, plain locales."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from agents import ROOT, execute, rarely

from launcher.record.run_json import LauncherProcess

LAUNCH = str(ROOT / "scripts/ssh/launch_singlenode.sh")
SHELLS = [
    "env -i PATH=/usr/bin:/bin PYTHON=$PYTHON TRAIN_SCRIPT=$TRAIN_SCRIPT"
    " PYTHONWARNINGS=error PYTHONINSPECT=1 PYTHONSAFEPATH=1 {}",
]
RARER = [
    "{} <&- >&- 2>&-",
    "{} >/dev/full 2>/dev/full",
    "{} <&-",
    "{} >&-",
    "{} 2>&-",
    "{} >/dev/full",
    "env -u HOME {}",
    "HOME=/nonexistent LC_ALL=C {}",
    "LC_ALL=xx_YY.UTF-8 {}",
    "TZ=Mars/Phobos {}",
    "TERM= COLUMNS=abc LINES=0 {}",
    "PYTHONOPTIMIZE=2 {}",
    "PYTHONDEVMODE=1 {}",
    "PYTHONPATH=:.: {}",
    "echo 'print(1)' >start.py; PYTHONSTARTUP=$PWD/start.py {}",
    "LD_PRELOAD=/nowhere/lib.so {}",
    "MALLOC_CHECK_=3 MALLOC_PERTURB_=7 MALLOC_ARENA_MAX=1 {}",
    "echo 'set -u; false' >env.sh; BASH_ENV=$PWD/env.sh {}",
    "CDPATH=/:/tmp {}",
    'cd() {{ builtin cd "$@" && ls; }}; export -f cd; {}',
    "mkdir J$'\\xfc' && cd J* && {} && mv ran ..",
    "POSIXLY_CORRECT=1 {}",
    "set -o noclobber -o noglob; export SHELLOPTS; {}",
    "shopt -s nullglob failglob dotglob; export BASHOPTS; {}",
    "export IFS=,:/; {}",
    "printf() {{ builtin printf x; }}; export -f printf; {}",
    "umask 777; {}",
    "ulimit -n 64; {}",
    "ulimit -s unlimited; {}",
    "ulimit -f 1; {}",
    "TMPDIR=/nowhere {}",
    "mkdir rel; TMPDIR=rel {}",
    "trap '' PIPE; {} | head -1",
    "trap '' CHLD; {}",
    "trap '' TERM INT HUP; {}",
    "nohup {}",
    "taskset -c 0 {}",
    "OMP_NUM_THREADS=0 {}",
    "OMP_NUM_THREADS=4,2 OMP_PROC_BIND=spread {}",
    "RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 MASTER_ADDR=10.9.9.9 {}",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_SHOW_CPP_STACKTRACES=1 {}",
    "http_proxy=http://127.0.0.1:1 all_proxy=socks5://x:1 {}",
    "BIG=$(head -c 120000 /dev/zero | tr '\\0' x) {}",
    "env 'A.B=1' $'NL=a\\nb' {}",
    "export TMOUT=1 BASH_COMPAT=3.2 GLOBIGNORE='*' FIGNORE=.sh; {}",
    "export FORCE_COLOR=1 CLICOLOR_FORCE=1 GREP_OPTIONS=--color=always LS_COLORS='*=1'; {}",
    "export PYTHONPYCACHEPREFIX=/proc/x PYTHONUNBUFFERED=no PYTHONMALLOC=debug; {}",
    "export KMP_AFFINITY=granularity=fine,compact OMP_PLACES=cores GOMP_CPU_AFFINITY=0-99; {}",
    "export SLURM_JOB_ID= SLURM_NTASKS= PBS_JOBID= RUN_ID= MASTER_PORT= LOG_DIR= GRACE=; {}",
    "export XDG_RUNTIME_DIR=/nowhere XDG_CACHE_HOME=/proc/x TORCH_HOME=/proc/x; {}",
    "sed -i 's/$/\\r/' own.py; {}",
    "printf '\\xef\\xbb\\xbfGRACE=9\\r\\n' >site.env; SITE=$PWD/site.env {}",
]


@pytest.mark.slow
@pytest.mark.parametrize("how", [*SHELLS, *rarely(*RARER)])
def test_a_run_works_whatever_the_shell_gives_it(tmp_path: Path, how: str) -> None:
    script = tmp_path / "own.py"
    script.write_text("import pathlib\nprint('ü' * 3)\npathlib.Path('ran').touch()\n")
    command = how.format(shlex.join([LAUNCH, "-", "1"]))
    done = execute(tmp_path, "bash", "-c", command, TRAIN_SCRIPT=str(script))
    assert (tmp_path / "ran").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    ["--status", "--status one", "--stop one --dry-run", "--dry-run own.py", "--version"],
)
def test_a_result_that_cannot_be_written_is_an_error(tmp_path: Path, words: str) -> None:
    (tmp_path / "own.py").touch()
    folder = tmp_path / "logs/one"
    folder.mkdir(parents=True)
    launcher = LauncherProcess.of(os.getpid())
    (folder / "run.json").write_text(json.dumps({"launcher": vars(launcher), "state": "running"}))
    command = f"{ROOT / 'scripts/launch.sh'} {words}"

    full = execute(tmp_path, "bash", "-c", f"{command} >/dev/full", code=1)
    (line,) = re.findall(r"^(?!run |hosts |ranks |preflight |logs ).*\n", full.stderr, re.M)
    assert line.startswith("launch.sh: cannot write the output")

    closed = execute(tmp_path, "bash", "-c", f"set -o pipefail; {command} | sleep 0")
    assert "launch.sh: " not in closed.stderr
