"""The command lines of all entry scripts, and how they are parsed."""

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run as torchrun

from distributed.errors import BAD_INPUT
from launcher import command_line, start
from launcher.agent import torchrun_arguments
from launcher.cli.arguments import Call, parse, read_usage
from launcher.cli.options import COMMANDS, Option, options_of
from launcher.plan.script import choose_program
from launcher.plan.spares import FANOUTS
from launcher.plan.typed import Typed
from launcher.text import PlanError

ROOT = Path(__file__).resolve().parents[2]
FILES = {file.stem: file for file in ROOT.glob("scripts/**/*.sh") if file.parent.name != "lib"}
# Tested separately.
LEFT = ("typed", "environ", "usage", "program", "here", "python", "batch_script")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call_of(command: str, **more: str) -> Call:
    file = str(FILES[command])
    given = {
        **{"command": command, "program": f"{command}.sh", "file": file, "directory": "/where"},
        **{"python": "/bin/python", "site": "", "activated": "", "script": "./x"},
    }
    return Call(**given | more)


def read(
    command: str, *words: str, environ: Mapping[str, str] | None = None, **call: str
) -> dict[str, Any]:
    """Return the fields checked here whose values differ from those of the bare command."""
    typed = parse(call_of(command, **call), words, environ or {})
    fixed = Typed(COMMANDS[command].fanout, **COMMANDS[command].fixed)
    values = {field.name: getattr(typed, field.name) for field in fields(Typed)}
    return {
        name: value
        for name, value in values.items()
        if name not in LEFT and value != getattr(fixed, name)
    }


def by_prefix(names: Mapping[str, Option]) -> Iterator[tuple[str, str]]:
    """Yield each long option with each of its unambiguous prefixes."""
    for name in filter(re.compile("--").match, names):
        for end in range(3, len(name)):
            if [one for one in names if one.startswith(name[:end])] == [name]:
                yield name, name[:end]


# --- every option of every command --------------------------------------------------------------

GIVEN = {"launch": ("x.py",), "launch_torchrun_multinode": ("c", "1", "2", "0", "addr")}
VALUES = {"test": "basic", "rdzv_backend": "static", "config_name": "n"}
BESIDE = {"--config-name": ("--config-path", "d"), "--config-path": ("--config-name", "n")}


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command in COMMANDS for name in options_of(command)],
)
def test_each_option_in_each_form(command: str, name: str) -> None:
    option = options_of(command)[name]
    value = VALUES.get(option.field, "7")
    beside, end = BESIDE.get(name, ()), GIVEN.get(command, ())
    forms = [[name, value] if option.has_value else [name]]
    if option.has_value:
        forms.append([f"{name}={value}" if name.startswith("--") else f"{name}{value}"])
    forms += [["--" + one[2:].replace("-", "_"), *more] for one, *more in forms if one[1] == "-"]
    plain, *others = (read(command, *beside, *form, *end) for form in forms)
    assert all(other == plain for other in others)
    if option.field in {field.name for field in fields(Typed)} - {"passed"}:
        assert plain[option.field] == (value if option.has_value else True)
    elif option.field == "passed":
        assert name in (plain.get("passed") or plain["rest"])
    if option.has_value:
        with pytest.raises(
            PlanError, match=f"^option {name} needs a value; see {command}.sh --help$"
        ):
            read(command, *beside, name)
    elif name.startswith("--"):
        with pytest.raises(PlanError, match=f"^option {name} takes no value; "):
            read(command, f"{name}=7", *end)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_shortened_option(command: str) -> None:
    options = options_of(command)
    for name, short in by_prefix(options):
        option = options[name]
        words = [VALUES.get(option.field, "7")] if option.has_value else []
        words = [*words, *BESIDE.get(name, ()), *GIVEN.get(command, ())]
        assert read(command, short, *words) == read(command, name, *words)


def test_the_agent_knows_which_options_of_launch_have_a_value() -> None:
    for name, option in options_of("launch").items():
        if option.field == "passed":
            given = [name, "7"] if option.has_value else [name]
            assert command_line.split([*given, "x.py"]) == (given, ["x.py"])


# --- the grammar --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("launch_singlenode", [], {}),
        ("launch_singlenode", [""], {"config": ""}),
        ("launch_singlenode", ["-", "2"], {"config": "-", "nproc": "2"}),
        (  # settings in any position
            *("launch_singlenode", ["a.b=1", "c", "+x=", "2", "~y=z=1"]),
            {"config": "c", "nproc": "2", "setting": ("a.b=1", "+x=", "~y=z=1")},
        ),
        ("launch_singlenode", ["1=2"], {"config": "1=2"}),
        ("launch_singlenode", ["is=file"], {"config": "is=file"}),
        (
            *("launch_singlenode", ["c", "--dry-run", "--", "--dry-run", "a=b", "--"]),
            {"config": "c", "is_dry_run": True, "rest": ("--dry-run", "a=b", "--")},
        ),
        (
            *("launch_torchrun_auto", ["c", "2", "n1", "a=b", "n2:3", "-f", "file"]),
            {"config": "c", "nproc": "2", "node": ("n1", "n2:3")}
            | {"setting": ("a=b",), "hostfile": "file"},
        ),
        ("cluster_train", ["c", "2", "1"], {"config": "c", "nnodes": "2", "node_rank": "1"}),
        ("run_ddp", ["-n=2", "-l=INFO"], {"nproc": "2", "log_level": "INFO"}),
        (
            *("submit_with_config", ["config=c", "num_gpus_train=8", "--exclude=n1", "--wait"]),
            {"setting": ("config=c", "num_gpus_train=8"), "passed": ("--exclude", "n1")}
            | {"wait": True},
        ),
        ("test_distributed", ["--json=/a"], {"rest": ("--json", "/a")}),
        # torchrun's grammar
        (
            "launch",
            ["x.py", "-m", "--help", "a=b", "--"],
            {"nproc": "1"} | {"rest": ("x.py", "-m", "--help", "a=b", "--")},
        ),
        ("launch", ["--", "x.py", "--"], {"nproc": "1", "rest": ("x.py", "--")}),
        ("launch", ["a=b"], {"nproc": "1", "rest": ("a=b",)}),
        ("launch", ["--no_py", "a.b"], {"nproc": "1", "as_command": True, "rest": ("a.b",)}),
        ("launch", ["--hosts", "n1,n2", "x"], {"hosts": "n1,n2", "rest": ("x",)}),
        (
            *("launch", ["--hosts=n1", "--nproc-per-node=gpu", "--via", "pdsh", "x"]),
            {"hosts": "n1", "via": "pdsh", "nproc": "auto", "cpu_nproc": 0} | {"rest": ("x",)},
        ),
    ],
)
def test_what_is_read(
    command: str, words: list[str], expected: dict[str, object], folder: Path
) -> None:
    (folder / "is=file").touch()
    assert read(command, *words) == expected


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [  # the number of nodes, this node's rank, the master and the port
        (["--nnodes=2", "--rdzv-endpoint=a"], {}, ("2", None, "a", None)),
        (["--nnodes=2", "--rdzv-endpoint=[fd00::1]:4"], {}, ("2", None, "fd00::1", "4")),
        (["--nnodes=2", "--rdzv-endpoint=a:4", "--master-port=5"], {}, ("2", None, "a", "5")),
        (["--nnodes=2", "--rdzv-endpoint=a:4", "--master-addr=b"], {}, ("2", None, "b", "4")),
        (["--nnodes=1", "--rdzv-backend=c10d"], {}, ("1", None, None, None)),
        (["--nnodes=2", "--rdzv-backend=c10d"], {"SLURM_STEP_ID": "0"}, ("2", None, None, None)),
        (["--rdzv-endpoint=a:4"], {"SLURM_STEP_ID": "0"}, (None, None, "a", "4")),
        (["--rdzv-endpoint=a:4"], {}, (None, None, None, None)),
        ([], {"PET_NNODES": "2", "PET_MASTER_ADDR": "a"}, ("2", None, "a", None)),
        (["--nnodes=3"], {"PET_NNODES": "2", "PET_NODE_RANK": ""}, ("3", None, None, None)),
        (
            *(["--nnodes=2"], {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "a:4"}),
            ("2", "auto", "a", "4"),
        ),
    ],
)
def test_the_master_of_torchruns_arguments(
    words: list[str], environ: dict[str, str], expected: tuple[str | None, ...]
) -> None:
    found = read("launch", *words, "x.py", environ=environ)
    assert tuple(map(found.get, ("nnodes", "node_rank", "master", "port"))) == expected


def test_variables_of_torchrun_do_not_contradict_hosts_that_were_typed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = {"PET_NNODES": "7", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}
    environ = {**given, "PET_RDZV_ENDPOINT": "a:4", "PET_NPROC_PER_NODE": "2"}
    found = read("launch", "--hosts=n1,n2", "x.py", environ=environ)
    assert found == {"hosts": "n1,n2", "nproc": "2", "rest": ("x.py",)}
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 4
    assert all(name in "".join(told) for name in given)
    assert all(line.endswith(" is ignored; --hosts names the nodes") for line in told)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("gpu", {"nproc": "auto", "cpu_nproc": 0}),
        ("CPU", {"nproc": str(os.sysconf("SC_NPROCESSORS_ONLN"))}),
        ("3", {"nproc": "3"}),
        ("many", {}),
    ],
)
def test_words_for_a_number_of_processes_also_stand_in_the_variable(
    given: str, expected: dict[str, object]
) -> None:
    found = read("launch", "--hosts=n1,n2", "x.py", environ={"NPROC_PER_NODE": given})
    assert found == {"hosts": "n1,n2", "rest": ("x.py",), **expected}


def test_what_only_launch_takes_from_the_environment() -> None:
    environ = {"NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2", "PET_RDZV_ID": "r", "PET_ROLE": "w"}
    found = read("launch", "x.py", environ=environ)
    assert found == {"nproc": "3", "max_restarts": "2", "run_id": "r", "rest": ("x.py",)}
    environ["PET_NPROC_PER_NODE"] = "4"
    assert read("launch", "x.py", environ=environ)["nproc"] == "4"
    flags = {"PET_NO_PYTHON": "1", "PET_MODULE": "0", "PET_STANDALONE": "", "PET_RUN_PATH": "1"}
    found = read("launch", "x.sh", environ=flags)
    assert found == {"as_command": True, "nproc": "1", "rest": ("x.sh",)}
    assert read("launch_singlenode", environ=environ) == {}
    assert read("pbs_train", environ={"CONFIG": "c"}) == {"config": "c"}
    assert read("pbs_train", "d", environ={"CONFIG": "c"}) == {"config": "d"}


# --- the batch script, the usage, a job array ---------------------------------------------------


@pytest.mark.parametrize(
    ("command", "file", "expected"),
    [
        ("slurm_train", "", "scripts/slurm/slurm_train.sh"),
        ("slurm_train", "/spool/slurm_script", "scripts/slurm/slurm_train.sh"),
        ("slurm_train", "mine.sh", "{folder}/mine.sh"),
        ("slurm_train", "link.sh", "scripts/slurm/slurm_train.sh"),
        ("pbs_train", "/spool/7.host.SC", "scripts/pbs/pbs_train.sh"),
        ("launch", "/spool/slurm_script", "scripts/launch.sh"),
        ("launch", "mine.sh", ""),
        ("launch_singlenode", "/spool/slurm_script", ""),
    ],
)
def test_the_batch_script_that_a_resume_line_names(
    command: str, file: str, expected: str, folder: Path
) -> None:
    (folder / "mine.sh").write_text("# an edited copy\n")
    (folder / "link.sh").symlink_to(FILES["slurm_train"])
    more = {"file": file} if file else {}
    typed = parse(call_of(command, **more), GIVEN.get(command, ()), {})
    assert typed.batch_script == expected.format(folder=folder)


def test_a_usage_on_two_lines_is_one() -> None:
    usage = read_usage(str(FILES["cluster_train"]))
    assert usage.startswith("scripts/cluster_train.sh [CONFIG] ") and "\\" not in usage
    assert usage.endswith(" [MASTER_PORT] [key=value...] [-- ARGS...]")


@pytest.mark.parametrize("name", ["SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", ""])
def test_a_task_of_an_array_has_its_number_in_its_settings(name: str) -> None:
    task = "7" if name else "{task}"
    words = ["{task}.yaml", "seed={task}", "data.path=a/{task}/b", "--", "{task}"]
    typed = parse(call_of("slurm_train"), words, {name: "7"} if name else {})
    assert typed.setting == (f"seed={task}", f"data.path=a/{task}/b")
    words[1:3] = typed.setting
    assert typed.typed == ("./x", *words)
    assert (typed.config, typed.rest) == ("{task}.yaml", ("{task}",))


# --- questions about runs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--status", "a", "b"], ("status", ("a", "b"), False)),
        (["--status", ""], ("status", ("",), False)),
        (["--status", "--all"], ("status", ("--all",), False)),
        (["--stop=a"], ("stop", ("a",), False)),
        (["c", "2", "x=y", "--stop", "a", "--dry-run"], ("stop", ("a",), True)),
    ],
)
def test_questions_about_runs(words: list[str], expected: tuple[object, ...]) -> None:
    typed = parse(call_of("launch_singlenode"), words, {})
    assert (typed.fanout, typed.rest, typed.is_dry_run) == expected


@pytest.mark.parametrize("task", ["status", "stop", "stacks"])
def test_questions_about_runs_are_asked_in_the_log_folder_that_was_typed(
    task: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*call_of("launch"), "--log-dir", "my runs", f"--{task}", "it"]
    assert start.main(words, {"LOG_DIR": "others"}) == BAD_INPUT
    assert "there is no run 'it' in my runs; " in capfd.readouterr().err


def test_in_a_job_stacks_can_be_asked_for() -> None:
    found = read("launch_singlenode", "--stacks", "a", environ={"SLURM_JOB_ID": "7"})
    assert found["fanout"] == "stacks"


def test_help_wherever_it_stands() -> None:
    typed = parse(call_of("launch"), ["--nproc-per-node", "2", "-h", "--fast"], {})
    assert typed.fanout == "help"
    assert parse(call_of("launch"), ["x.py", "-h"], {}).fanout == "local"


# --- what is rejected ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words", "cause"),
    [
        ("launch", ["--nprocs=2", "x.py"], "unknown option '--nprocs'; see launch"),
        ("launch", ["--nproc-pre-node=2", "x"], "did you mean --nproc-per-node? see launch.sh"),
        ("launch", ["--no", "x.py"], "'--no'; did you mean --node-rank or --no-python? see"),
        ("launch", ["-x3", "x.py"], "unknown option '-x3'; see launch.sh --help"),
        ("launch", ["--max_restart_s=3", "x"], "did you mean --max-restarts? see launch.sh"),
        ("launch_singlenode", ["c", "--detatch"], "did you mean --detach? see launch_singlenode"),
        ("launch_singlenode", ["-status"], "unknown option '-status'; did you mean --status? see"),
        ("launch", ["--nproc-per-node", "2", "--"], "no SCRIPT; usage: scripts/launch.sh"),
        ("launch", ["-m", ""], "SCRIPT is empty; usage: scripts/launch.sh"),
        (
            *("launch", ["--hosts=n1", "--rdzv-endpoint=n1:4", "x.py"]),
            "--hosts and --rdzv-endpoint both name the nodes; omit one",
        ),
        ("launch_singlenode", ["--strict", "--stop", "a"], "--strict cannot be used with --stop"),
        ("launch_singlenode", ["--stop", "-"], "- cannot be used with --stop; give only"),
        ("launch_singlenode", ["--stop", "--all"], "--all cannot be used with --stop; give only"),
    ],
)
def test_what_is_refused_in_one_line(command: str, words: list[str], cause: str) -> None:
    with pytest.raises(PlanError) as raised:
        read(command, *words)
    assert cause in str(raised.value)
    assert "; " in str(raised.value) and "\n" not in str(raised.value)


# --- what -h and --help show --------------------------------------------------------------------

SCRIPTS = {name: file for name, file in FILES.items() if not file.is_symlink()}
LAUNCHERS = sorted((SCRIPTS.keys() & COMMANDS.keys()) - {"test_distributed_integration"})


@functools.cache
def shown(name: str, option: str = "--help") -> str:
    command = ["bash", str(SCRIPTS[name]), option]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_taken(name: str, words: list[str]) -> bool:
    with contextlib.suppress(PlanError):
        return bool(parse(call_of(name), words, {}))
    return False


def test_the_entries_name_commands_and_each_command_has_a_script() -> None:
    written, *lines = re.findall(r"^#!?(.*)$", HELP.read_text(), re.M)
    assert not [name for name in LAUNCHERS if written.strip() in shown(name)]
    named = {word for line in lines for word in line.split()}
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
        words = [] if option.startswith("--sta") or option == "--stop" else GIVEN.get(name, ())
        taken = is_taken(name, [option, *values.get(option, []), *words])
        assert taken or option not in options, option
        is_to_be_shown = option != "--strict" and taken
        assert option in options or not is_to_be_shown, option


@pytest.mark.parametrize("name", LAUNCHERS)
def test_it_shows_the_variables_that_it_reads(name: str) -> None:
    text = shown(name).partition("\nEnvironment variables")[2]
    assert re.search(r"^  RUN_ID ", text, re.M) and "\n  GRACE " in text
    typed = replace(parse(call_of(name), GIVEN.get(name, ()), {}), config="c.yaml")
    if name != "submit_with_config":  # the job's own script reads these variables
        environ = {"TRAIN_SCRIPT": "own.py", "CONFIG_FLAG": "--conf"}
        words, _, _ = choose_program(replace(typed, environ=environ))
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


# --- where the node agent finds the end of torchrun's options -------------------------------------

HELP = ROOT / "scripts/lib/help.txt"


@pytest.mark.parametrize(
    ("options", "program"),
    [
        ([], ["x.py"]),
        ([], []),
        ([], ["-"]),
        (["--nproc-per-node", "2"], ["x.py", "--log", "x"]),
        (["--nproc_per_node=2", "--standalone"], ["x.py", "--", "y"]),
        (["--standalone", "--no_python"], ["bash", "-c", "true"]),
        (["--stand", "-m"], ["pkg.mod", "-m", "x"]),
        (["--virtual_local_rank", "--run-path", "--use-env"], ["x.py"]),
        (["-r", "3", "-t3", "--node-rank", "-1"], ["x.py"]),
        (["--role", "--module"], ["x.py"]),
    ],
)
def test_where_the_program_begins(options: list[str], program: list[str]) -> None:
    assert command_line.split([*options, *program]) == (options, program)


def test_two_dashes_end_the_options() -> None:
    assert command_line.split(["--standalone", "--", "x.py", "--", "y"]) == (
        ["--standalone"],
        ["x.py", "--", "y"],
    )


def test_an_option_is_not_taken_from_the_program() -> None:
    words = ["--node_rank=1", "--node-r", "2", "x.py", "--node-rank", "3"]
    assert command_line.find_option(words, "--node-rank") == "2"
    assert command_line.find_option(words, "--signals-to-handle") == ""


def test_torch_takes_arguments_for_templates() -> None:
    args = command_line.read_for_torch(
        torchrun.parse_args, ["--nnodes=1:2", "x.py", "--log", "$$5", "${local_rank}"]
    )
    assert args.training_script_args == ["--log", "$$$$5", "$${local_rank}"]


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    usual, _ = torchrun_arguments.parse(["x.py"], {})
    names = re.findall(
        r"\b[A-Z][A-Z_]+\b", "".join(re.findall(r"(?m)^  [A-Z].*?(?:  |$)", HELP.read_text()))
    )
    assert {"GRACE", "SPARES", "VENV", "NO_COLOR"} < {*names}
    empty, _ = torchrun_arguments.parse(["x.py"], dict.fromkeys(names, ""))
    assert replace(empty, environ={}) == usual


def test_a_range_of_nodes_is_left_to_torchs_own_agent() -> None:
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    found = read("launch", "--nnodes=1:2", *rendezvous, "x.py")
    passed = [*("--nnodes", "1:2", "--rdzv-backend", "c10d"), "--rdzv-endpoint", "localhost:0"]
    assert [*found["passed"]] == [*passed, "--rdzv-id", "none"]
    again = read("launch", "--nnodes=1:2", *rendezvous, "--rdzv-id=7", "x.py")
    assert [*again["passed"]] == [*passed, "--rdzv-id", "7"]  # even if a live run has this id
    with pytest.raises(PlanError, match="a range needs --rdzv-backend c10d"):
        read("launch", "--nnodes=1:2", "x.py")
