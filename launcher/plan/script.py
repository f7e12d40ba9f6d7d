"""Runs a training script for its help, and refuses what is no Python program."""

from __future__ import annotations

import warnings

from launcher import importable
from launcher.plan.plan import Plan
from launcher.text import PlanError, warn

_OTHER = (".yaml", ".yml", ".json", ".toml", ".sh")
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def check_script(plan: Plan) -> None:
    """Raise PlanError if the script is not a Python program; other nodes compare theirs with it."""
    name = plan.words[0]
    script = plan.directory / name
    if plan.container or not script.is_file():  # a module, or another program
        return
    if script.suffix in _OTHER:
        cure = "put the script before it, or --no-python if it is a program"
        raise PlanError(f"{name!r} is not a Python program; {cure}")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), name, "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.lineno:  # otherwise it is compiled, or an archive
            cause = f"{name}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
            raise PlanError(f"{cause}; correct it [rank-error]") from None
    except (ValueError, OSError):
        pass


def show_help(plan: Plan) -> int | None:
    """Run the script once if it is asked for its help. Returns its exit code; None if it is not."""
    is_program = plan.words[0] == "--no-python"
    if is_program or plan.words[-1] not in ("-h", "--help") or plan.is_dry_run:
        return None
    warn(f"{plan.program}: shows the help of {' '.join(plan.words[:-1])}; no rank is started")
    environ = {**plan.environ, **_ALONE, "PYTHONPATH": importable.search_path(plan.environ)}
    return plan.run_inside([plan.python, *plan.words], env=environ).returncode
