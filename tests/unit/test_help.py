"""`-h` and `--help` of each script: what it accepts, the variables it reads, its true defaults."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from launcher.cli.arguments import Call, parse
from launcher.cli.commands import COMMANDS
from launcher.plan.make_plan import choose_program
from launcher.plan.spares import FANOUTS
from launcher.plan.typed import Typed
from launcher.text import PlanError

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    path.stem: path
    for path in ROOT.glob("scripts/**/*.sh")
    if "lib" not in path.parts and not path.is_symlink()
}
LAUNCHERS = sorted((SCRIPTS.keys() & COMMANDS.keys()) - {"test_distributed_integration"})
WORDS = {
    **{name: ["x.yaml", "2", "node1", "0", "node1"] for name in LAUNCHERS},
    **{"launch": ["x.py"], "launch_singlenode": ["x.yaml"], "cluster_train": ["x.yaml"]},
    **{"run_ddp": ["-c", "x.yaml"], "slurm_train": ["x.yaml"], "pbs_train": ["x.yaml"]},
    **{"slurm_train_single_node": ["x.yaml"], "submit_with_config": ["config=x.yaml"]},
    **{"test_distributed": ["2"]},
}


def shown(name: str, option: str = "--help") -> str:
    command = ["bash", str(SCRIPTS[name]), option]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read(name: str, words: list[str]) -> Typed:
    given = dict.fromkeys(Call._fields, "") | {"command": name, "program": f"{name}.sh"}
    call = Call(**given | {"file": str(SCRIPTS[name]), "directory": "/"})
    return parse(call, words, {})


def is_taken(name: str, words: list[str]) -> bool:
    try:
        read(name, words)
    except PlanError:
        return False
    return True


def test_the_entries_name_commands_and_each_command_has_a_script() -> None:
    text = (ROOT / "scripts/lib/help.txt").read_text()
    named = {word for line in re.findall(r"^#(.*)$", text, re.M) for word in line.split()}
    assert named == {*LAUNCHERS} == COMMANDS.keys() - {"test_distributed_integration"}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_h_is_short_and_begins_help(name: str) -> None:
    usage, all_of_it = shown(name, "-h").splitlines(), shown(name).splitlines()
    assert len(usage) <= 28
    if name in LAUNCHERS:
        assert all_of_it[: len(usage) - 2] == usage[:-2] and "--help also shows" in usage[-1]
    else:
        assert all_of_it == usage and not [line for line in usage if "--help" in line]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_it_shows_the_options_that_it_accepts(name: str) -> None:
    options = set(re.findall(r"^  (--[a-z-]+) ", shown(name).partition("\nOptions:\n")[2], re.M))
    assert {"--dry-run", "--show", "--stacks", "--version"} <= options
    values = {"--show": ["all"], "--stop": ["mine"], "--stacks": ["mine"]}
    for option in ("--strict", "--detach", "--status", "--stop", "--stacks", "--show"):
        words = [] if option.startswith("--sta") or option == "--stop" else WORDS[name]
        taken = is_taken(name, [option, *values.get(option, []), *words])
        assert taken or option not in options, option
        is_to_be_shown = option != "--strict" and taken
        assert option in options or not is_to_be_shown, option


@pytest.mark.parametrize("name", LAUNCHERS)
def test_it_shows_the_variables_that_it_reads(name: str) -> None:
    text = shown(name).partition("\nEnvironment variables")[2]
    assert re.search(r"^  RUN_ID ", text, re.M) and "\n  GRACE " in text
    typed = read(name, [*WORDS[name], "--nothing"] if name == "launch" else WORDS[name])
    if name != "submit_with_config":  # the job's own script reads it
        words, _, _ = choose_program(typed, {"TRAIN_SCRIPT": "own.py", "CONFIG_FLAG": "--conf"})
        assert ("own.py" in words) == ("\n  TRAIN_SCRIPT " in text)
        assert ("--conf" in words) == ("\n  CONFIG_FLAG " in text)
    engine = COMMANDS[name].fixed.get("engine")
    assert ("\n  FRESH " in text) == (not engine)
    replaces_nodes = COMMANDS[name].fanout in (*FANOUTS, "auto", "submit") and not engine
    has_spares = (replaces_nodes and not name.startswith("test_")) or name == "launch"
    assert ("\n  SPARES " in text) == has_spares


@pytest.mark.parametrize("name", ["slurm_train", "slurm_train_single_node"])
def test_the_size_it_shows_is_the_one_that_it_asks_for(name: str) -> None:
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", SCRIPTS[name].read_text(), re.M))
    nodes, gpus, cpus = (int(asked[one]) for one in ("nodes", "gpus-per-node", "cpus-per-gpu"))
    size = f"1 node with {gpus} GPUs" if nodes == 1 else f"{nodes} nodes with {gpus} GPUs each"
    hours = int(asked["time"].partition(":")[0])
    text = " ".join(shown(name, "-h").split())
    assert f"the job has {size}, {cpus} CPUs per GPU and {hours} hours." in text
