"""The resume line repeats what shaped the run: what was typed, and the variables set for it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.plan import pbs, resume
from launcher.plan.plan import ROOT
from launcher.plan.typed import Typed

NOT_BY_NAME = {"RUN_ID", "RUN_SECRET", "SHOW_RANKS", "NO_COLOR", "PYTHON"}


def line(environ: dict[str, str], fanout: str = "local", **typed: Any) -> str:
    """Return the resume line of `x.sh` in this environment."""
    words: dict[str, Any] = {"typed": ("x.sh",), "python": "/env/bin/python", **typed}
    return resume.command_line(Typed(fanout, **words), environ, fanout)


def test_what_was_typed_and_what_shaped_the_run() -> None:
    typed = ("scripts/x.sh", "c.yaml", "a b", "--dry-run", "resume=never", "--", "'")
    told = line({"TRAIN_SCRIPT": "my own.py", "RUN_ID": "mine", "GRACE": "5"}, typed=typed)
    assert told == """TRAIN_SCRIPT='my own.py' GRACE=5 scripts/x.sh c.yaml 'a b' -- ''"'"''"""


def test_each_variable_of_the_help_is_repeated() -> None:
    text = (ROOT / "scripts/lib/help.txt").read_text().partition("Environment variables")[2]
    rows = re.findall(r"^  ([A-Z_]+(?:, [A-Z_]+)*)", text, re.MULTILINE)
    names = {name for row in rows for name in row.split(", ")}
    assert len(names) > 30
    repeated = {*resume.REPEATED, *resume.REPEATED_WITH_SSH}
    assert names - repeated == NOT_BY_NAME


@pytest.mark.parametrize(
    ("environ", "typed", "told"),
    [
        ({"WANDB_MODE": "offline"}, {}, "WANDB_MODE=offline x.sh"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, {}, "CUDA_VISIBLE_DEVICES=2,3 x.sh"),
        ({"OMP_NUM_THREADS": "4", "GRACE": "5"}, {}, "GRACE=5 OMP_NUM_THREADS=4 x.sh"),
        ({"PYTHONPATH": "src"}, {}, "PYTHONPATH=src x.sh"),
        ({"NCCL_DEBUG": "a b"}, {}, "NCCL_DEBUG='a b' x.sh"),
        ({"PYTHON": "/env/bin/python"}, {}, "PYTHON=/env/bin/python x.sh"),
        ({"PYTHON": "/env/bin/python"}, {"activated": ("PYTHON",)}, "PYTHON=/env/bin/python x.sh"),
        (
            {"PYTHON": "/env/bin/python", "CONTAINER": "i"},
            {},
            "CONTAINER=i PYTHON=/env/bin/python x.sh",
        ),
        # What comes again by itself: a site's, a scheduler's, the project's environment.
        ({"NCCL_DEBUG": "INFO"}, {"activated": ("NCCL_DEBUG",)}, "x.sh"),
        ({"CUDA_VISIBLE_DEVICES": "0", "PBS_JOBID": "7"}, {}, "x.sh"),
        ({"PYTHON": "p"}, {"python": f"{ROOT}/.venv/bin/python"}, "x.sh"),
        ({"LOG_LEVEL": "DEBUG"}, {}, "LOG_LEVEL=DEBUG x.sh"),
        ({"HOME": "/root", "PATH": "/bin"}, {}, "x.sh"),
        # Secrets.
        ({"WANDB_API_KEY": "hush", "WANDB_IDENTITY_TOKEN_FILE": "hush"}, {}, "x.sh"),
        ({"RUN_SECRET": "hush"}, {}, "x.sh"),
    ],
)
def test_other_programs_variables(
    environ: dict[str, str], typed: dict[str, Any], told: str
) -> None:
    assert line(environ, **typed) == told


def test_what_the_shell_was_begun_with_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image that sets NCCL_VERSION; this process stands for the shell."""
    before = dict(
        word.split("=", 1)
        for word in Path("/proc/self/environ").read_text().split("\0")
        if "=" in word
    )
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setattr(resume, "FORWARDED", ("PATH", "OMP_"))
    assert line({"PATH": before["PATH"], "OMP_NUM_THREADS": "3"}) == "OMP_NUM_THREADS=3 x.sh"
    assert line({"PATH": "/other"}) == "PATH=/other x.sh"


def test_what_forward_env_names_is_repeated_with_its_value_in_a_pbs_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"FORWARD_ENV": "X,MY_TOKEN GRACE", "X": "a b", "MY_TOKEN": "hush", "GRACE": "5"}
    assert line(environ, "ssh") == "GRACE=5 FORWARD_ENV='X,MY_TOKEN GRACE' x.sh"
    monkeypatch.setattr(pbs, "job_command", lambda *given: ["qsub", *given[2]])
    in_job = line(environ, "ssh", nodefile=True, batch_script="x.sh", here=ROOT)
    assert in_job.startswith("GRACE=5 FORWARD_ENV='X,MY_TOKEN GRACE' X='a b' qsub ")
    assert "hush" not in in_job


def test_no_command_without_the_size_of_the_job() -> None:
    environ = {"PBS_JOBID": "7.head", "PATH": "/nonexistent"}
    script = "scripts/pbs/pbs_train.sh"
    assert line(environ, "ssh", nodefile=True, batch_script=script, here=ROOT) == ""
