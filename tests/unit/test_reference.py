"""The tables of docs/reference.md, and of the guide's defaults, are the code's."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path

import pytest
import yaml
from agents import ROOT

from distributed import errors
from distributed.environment import DEFAULT_LOG_DIR
from distributed.strategy import STRATEGIES
from launcher.cli.options import COMMANDS, COMMON, TASKS
from launcher.plan import make_plan
from launcher.record.run_json import Record
from launcher.wire import limits
from training.settings import KNOWN, Settings, load

REFERENCE, GUIDE = ((ROOT / name).read_text() for name in ("docs/reference.md", "LAUNCH_GUIDE.md"))
HELP = (ROOT / "scripts/lib/help.txt").read_text()


def section_of(text: str, heading: str) -> str:
    """Return what follows a heading, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.M)
    assert found, heading
    return re.split(rf"^#{{2,{len(found[1])}}} ", text[found.end() :], maxsplit=1, flags=re.M)[0]


CONFIG = section_of(REFERENCE, "The config")


def options_of(*commands: str) -> set[str]:
    return {name for command in commands for name in COMMANDS[command].options}


def options_of_train() -> set[str]:
    text = (ROOT / "training/arguments.py").read_text()
    calls = re.findall(r"add_argument\(\s*((?:\"-[\w-]+\",\s*)*\"-[\w-]+\")", text)
    return set(re.findall(r"\"(-[\w-]+)\"", " ".join(calls)))


# The code's options by the heading of their table in docs/reference.md.
OVER_SSH = ("launch_torchrun_auto", "launch_pdsh_multinode", "launch_multinode")
OPTIONS = {
    "Every launcher": {*COMMON, *TASKS},
    "launch.sh": options_of("launch"),
    ", ".join(f"{name}.sh" for name in OVER_SSH): options_of(*OVER_SSH),
    "run_ddp.sh": options_of("run_ddp"),
    "submit_with_config.sh": options_of("submit_with_config"),
    "test_distributed.sh": options_of("test_distributed"),
    "train.py": options_of_train(),
}


@pytest.mark.parametrize("heading", OPTIONS)
def test_the_tables_of_options_are_the_codes(heading: str) -> None:
    rows = re.findall(r"^\| (`-.*?) \|", section_of(REFERENCE, heading), re.M)
    assert sorted(re.findall(r"`(-[\w-]+)`", " ".join(rows))) == sorted(OPTIONS[heading])


def test_every_option_has_its_table_and_is_in_the_help() -> None:
    every = {name for command in COMMANDS for name in options_of(command)}
    assert every | {*COMMON, *TASKS} <= set.union(*OPTIONS.values())
    assert {*COMMON, *TASKS} <= set(re.findall(r"(?<![\w-])--?[a-z-]+", f"-h {HELP}"))


def test_the_table_of_the_config_and_its_defaults_are_the_codes() -> None:
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \|([^|]*)\|", CONFIG, re.M))
    assert sorted(rows) == sorted(KNOWN)
    least = Settings.model_validate({"train": {"batch_size": 1, "max_steps": 1}})
    for key in set(KNOWN) - {"train.batch_size", "train.max_steps"}:
        value: object = least
        for part in key.split("."):
            value = getattr(value, part)
        shown = rows[key].strip()
        is_number = isinstance(value, float)
        assert (float(shown) if is_number else yaml.safe_load(shown)) == value, key


def test_every_variable_of_the_help_is_in_the_reference() -> None:
    told = HELP.partition("Environment")[2]
    variables = [
        name
        for names in re.findall(r"^  ((?:[A-Z_]+, )*[A-Z_]+)(?: |$)", told, re.M)
        for name in names.split(", ")
    ]
    assert len(variables) > 15
    table = section_of(REFERENCE, "Environment variables")
    for name in variables:
        assert re.search(rf"^\| .*`{name}`.* \|", table, re.M), name
    ours = table.partition("### Variables of other programs")[0]
    rows = re.findall(r"^\| (`.*?) \|", ours, re.M)
    assert sorted(re.findall(r"`([A-Z_]+)`", " ".join(rows))) == sorted({*variables})
    cells = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", ours, re.M))
    for name, default in DEFAULTS.items():
        assert re.search(rf"(^| )`?{default}`?[ ,]", cells[name].partition("|")[0]), name
    for name, words in make_plan._WORDS.items():
        assert not [word for word in words if f"`{word}`" not in cells[name]], name


# Of variables whose default is a value in the code.
DEFAULTS = {
    "GRACE": limits.GRACE_S,
    "LOG_DIR": DEFAULT_LOG_DIR,
    "MASTER_PORT": make_plan.BY_HAND_PORT,
    "MAX_RESTARTS": 0,
    "SPARES": 0,
    "LAUNCHER": "agent",
    "SHOW_RANKS": 0,
}


def test_the_table_of_exit_codes_is_the_codes() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", section_of(REFERENCE, "Exit codes"), re.M)
    codes = [int(code) for cell, _ in rows for code in cell.split(", ")]
    ours = [errors.BAD_INPUT, errors.REFUSED, errors.STOPPED, errors.CANNOT_START]
    killed = [128 + one for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)]
    assert sorted(codes) == sorted([0, *ours, *killed])


def test_the_table_of_strategies_is_the_codes() -> None:
    table = section_of((ROOT / "docs/train-py.md").read_text(), "Strategies")
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.M)) == sorted(STRATEGIES)


def test_the_table_of_run_json_is_the_records() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section_of(REFERENCE, "run.json"), re.M)
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(names) == sorted(one.name for one in dataclasses.fields(Record))


def test_the_defaults_of_the_batch_scripts_are_in_the_guide() -> None:
    table = section_of(GUIDE, "SLURM jobs")
    for column, name in enumerate(("slurm_train.sh", "slurm_train_single_node.sh"), 1):
        lines = (ROOT / "scripts/slurm" / name).read_text()
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", lines, re.M))
        hours = asked.pop("time").removesuffix(":00:00")
        shown = {
            "nodes": asked.pop("nodes"),
            "GPUs per node": asked.pop("gpus-per-node"),
            "CPUs per GPU": asked.pop("cpus-per-gpu"),
            "time": f"{hours} hours",
            "name": asked.pop("job-name"),
            "output": f"`{asked.pop('output').replace('%j', 'JOBID')}`",
            "signal before the time limit": f"{asked.pop('signal').rpartition('@')[2]} s",
        }
        assert asked.keys() == {"requeue", "open-mode"}
        for row, value in shown.items():
            cells = re.search(rf"^\| {row} \| (.*) \|$", table, re.M)
            assert cells and cells[1].split(" | ")[column - 1] == value, row


@pytest.mark.parametrize("page", ["reference.md", "train-py.md"])
def test_every_config_shown_is_one(page: str, tmp_path: Path) -> None:
    (tmp_path / "distributed.yaml").write_text((ROOT / "config/distributed.yaml").read_text())
    blocks_of_yaml = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S
    )
    assert blocks_of_yaml
    for number, text in enumerate(blocks_of_yaml):
        config = tmp_path / f"{number}.yaml"
        config.write_text(text)
        load(config, [])
