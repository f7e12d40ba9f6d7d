"""The training script: which one, with which config; whether it can run; its help."""

import os
import re
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from launcher import importable
from launcher.plan.plan import ROOT, Plan
from launcher.plan.typed import Typed, Words, is_same
from launcher.text import PlanError, did_you_mean, warn

MARK = b"# launch-kit: answers --check"  # the line by which we recognize our train.py
OURS = ROOT / "train.py"
_OTHER = (".yaml", ".yml", ".json", ".toml", ".sh")
_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def choose_program(typed: Typed) -> tuple[list[str], bool, str]:
    """Return the training script with its arguments, whether it is our train.py, and the config.

    The words end the agent's command line. They begin with `-m` for a module, and with
    `--no-python` for any other program. The config is `-` if there is none, and "" for the
    self-test. Raises PlanError if there is no such config, or if one is missing.
    """
    if typed.module:
        return ["-m", typed.module, *typed.rest], False, ""

    ours = str(OURS)
    if typed.like_torchrun:
        if typed.as_module:
            return ["-m", *typed.rest], False, "-"
        if typed.as_command:
            return ["--no-python", *typed.rest], False, "-"
        script = re.sub("^-", "./-", typed.rest[0])  # the agent must not take it for an option
        is_ours = is_our_train_py(script)
        return [ours if is_ours else script, *typed.rest[1:]], is_ours, "-"

    environ = typed.environ
    script = environ.get("TRAIN_SCRIPT") or ours
    is_ours = is_our_train_py(script)
    config = _choose_config(typed, is_ours=is_ours)
    if is_ours:
        backend = ["--distributed-backend", environ["BACKEND"]] if environ.get("BACKEND") else []
        return [ours, "--config", config, *backend, *typed.setting, *typed.rest], True, config

    is_module = re.match(r"-m\s", script)
    program = ["-m", script[2:].strip()] if is_module else [re.sub("^-", "./-", script)]
    words = [] if config == "-" else [environ.get("CONFIG_FLAG") or "--config", config]
    return [*program, *words, *typed.setting, *typed.rest], False, config


def _choose_config(typed: Typed, *, is_ours: bool) -> str:
    """Return the config's file, or what CONFIG_FLAG passes; `-`: none, only for a user's script.

    Raises PlanError if a config is missing, or if there is no such file. With CONFIG_FLAG, a user's
    script may get a value that is not a file.
    """
    config = typed.config
    if config is None and typed.default_config:
        config = str(ROOT / "config/local3.yaml") if is_ours else "-"
    if config is None:
        raise PlanError(f"no config; usage: {typed.usage}")

    must_exist = config != "-" and (is_ours or not typed.environ.get("CONFIG_FLAG"))
    if must_exist and not os.path.isfile(config):  # Path.is_file() raises for a name too long
        none = "" if is_ours else ", or - for none"
        beside = (file.name for file in Path(config).parent.glob("*.y*ml"))
        near = did_you_mean(Path(config).name, beside)
        cause = f"there is no config file {config!r}"
        raise PlanError(f"{cause}; {near}give the path of a YAML file{none}")
    if is_ours and config == "-":
        raise PlanError(
            "this project's train.py needs a config, but '-' passes none; give one, or set "
            "TRAIN_SCRIPT to your own script"
        )
    return config


def refuse_missing(here: Path, words: Words) -> None:
    """Raise PlanError if this machine lacks the module or the program that the words name.

    They are those of choose_program(). A module may be in `here`, or where this Python finds
    modules. A script is left to check_script().
    """
    if words[0] == "--no-python" and not which(words[1]):
        raise PlanError(f"{words[1]!r} is not an executable program; correct its path")
    if words[0] != "-m":
        return

    package = words[1].partition(".")[0]
    # find_spec("") would raise ValueError.
    is_found = PathFinder.find_spec(package, [str(here)]) or (package and find_spec(package))
    if not is_found:
        raise PlanError(f"there is no module {words[1]!r}; correct its name, or set PYTHONPATH")


def is_our_train_py(script: str) -> bool:
    """Return whether a script is this project's train.py, changed or not. It is read, but not run.

    In a repository into which our folders were copied, train.py may be the user's own.
    """
    return is_same(OURS, Path(script)) and MARK in OURS.read_bytes()


def check_script(plan: Plan) -> None:
    """Raise PlanError if the script is not a Python program, or has a syntax error.

    Only this machine's file is checked: the preflight compares those of the nodes. In a container,
    another Python may accept it.
    """
    name = plan.words[0]
    script = plan.directory / name
    if plan.container or not script.is_file():  # -m or --no-python, for example
        return
    if script.suffix in _OTHER:
        cure = "put the script before it, or --no-python if it is a program"
        raise PlanError(f"{name!r} is not a Python program; {cure}")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), name, "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.lineno:  # otherwise it is no text: compiled, or an archive
            cause = f"{name}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
            raise PlanError(f"{cause}; correct it", "rank-error") from None
    except (ValueError, OSError):  # zero bytes, or not readable; Python names the cause
        pass


def show_help(plan: Plan) -> int | None:
    """If the script is asked for its help, run it once, alone, and return its exit code.

    Otherwise returns None, also for a program that is not Python, and in a dry run. Raises Refused
    if it cannot start.
    """
    is_program = plan.words[0] == "--no-python"
    if is_program or plan.words[-1] not in ("-h", "--help") or plan.is_dry_run:
        return None
    warn(f"{plan.program}: shows the help of {' '.join(plan.words[:-1])}; no rank is started")
    environ = {**plan.environ, **_ALONE, "PYTHONPATH": importable.search_path(plan.environ)}
    return plan.run_inside([plan.python, *plan.words], env=environ).returncode
