"""The command lines of all entry scripts, and what is made of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import command_line
from launcher.cli.arguments import Call, parse
from launcher.cli.commands import COMMANDS, Option
from launcher.plan.typed import Typed
from launcher.text import PlanError

ROOT = Path(__file__).resolve().parents[2]
FILES = {file.stem: file for file in ROOT.glob("scripts/**/*.sh") if file.parent.name != "lib"}
LEFT = ("typed", "usage", "program", "here", "python", "batch_script")  # tested by themselves
CPUS = os.sysconf("SC_NPROCESSORS_ONLN")


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
    """Return what differs from the command without words, of Typed's fields that count here."""
    typed = parse(call_of(command, **call), words, environ or {})
    fixed = Typed(COMMANDS[command].fanout, **COMMANDS[command].fixed)
    values = {field.name: getattr(typed, field.name) for field in fields(Typed)}
    return {
        name: value
        for name, value in values.items()
        if name not in LEFT and value != getattr(fixed, name)
    }


def by_prefix(names: Mapping[str, Option]) -> Iterator[tuple[str, str]]:
    """Yield each long option with every shorter form that is its alone."""
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
    [(command, name) for command in COMMANDS for name in COMMANDS[command].options],
)
def test_each_option_in_each_form(command: str, name: str) -> None:
    option = COMMANDS[command].options[name]
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
            PlanError, match=f"^option {name} has no value; see {command}.sh --help$"
        ):
            read(command, *beside, name)
    elif name.startswith("--"):
        with pytest.raises(PlanError, match=f"^option {name} takes no value; "):
            read(command, f"{name}=7", *end)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_shortened_option(command: str) -> None:
    options = COMMANDS[command].options
    for name, short in by_prefix(options):
        option = options[name]
        words = [VALUES.get(option.field, "7")] if option.has_value else []
        words = [*words, *BESIDE.get(name, ()), *GIVEN.get(command, ())]
        assert read(command, short, *words) == read(command, name, *words)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_its_script_and_each_field_its_place(command: str) -> None:
    file = FILES[command]
    assert re.search(rf'^ *\(?run_command ({command}|"\${{NAME%.sh}}")', file.read_text(), re.M)
    known = {field.name for field in fields(Typed)}
    assert {*COMMANDS[command].fixed} <= known
    for name in COMMANDS[command].arguments:
        assert name in known or name == "program"


def test_the_agent_knows_which_options_of_launch_have_a_value() -> None:
    for name, option in COMMANDS["launch"].options.items():
        if option.field == "passed":
            given = [name, "7"] if option.has_value else [name]
            assert command_line.split([*given, "x.py"]) == (given, ["x.py"])


# --- the grammar --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("launch_singlenode", [], {}),
        ("launch_singlenode", ["c", "2"], {"config": "c", "nproc": "2"}),
        ("launch_singlenode", [""], {"config": ""}),
        ("launch_singlenode", ["-", "2"], {"config": "-", "nproc": "2"}),
        (  # settings anywhere
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
            "launch_singlenode",
            ["--dry_run", "--strict", "c"],
            {"config": "c"} | {"is_strict": True, "is_dry_run": True},
        ),
        ("launch_singlenode", ["--show", "all"], {"show": "all"}),
        ("launch_singlenode", ["--show=0", "--detach"], {"show": "0", "is_detached": True}),
        (
            *("launch_torchrun_auto", ["c", "2", "n1", "a=b", "n2:3", "-f", "file"]),
            {"config": "c", "nproc": "2", "node": ("n1", "n2:3")}
            | {"setting": ("a=b",), "hostfile": "file"},
        ),
        (
            *("launch_torchrun_multinode", ["c", "4", "2", "0", "addr", "9"]),
            {"config": "c", "nproc": "4", "nnodes": "2", "node_rank": "0"}
            | {"master": "addr", "port": "9"},
        ),
        ("cluster_train", ["c", "2", "1"], {"config": "c", "nnodes": "2", "node_rank": "1"}),
        ("run_ddp", ["-n2", "-c", "c"], {"nproc": "2", "config": "c"}),
        ("run_ddp", ["-n=2", "-l=INFO"], {"nproc": "2", "log_level": "INFO"}),
        ("run_ddp", ["--config-path=d", "--config-name", "n.yaml"], {"config": "d/n.yaml"}),
        (
            *("submit_with_config", ["config=c", "num_gpus_train=8", "--exclude=n1", "--wait"]),
            {"setting": ("config=c", "num_gpus_train=8"), "passed": ("--exclude", "n1")}
            | {"wait": True},
        ),
        (
            *(
                "test_distributed",
                ["2", "n1", "--json", "a b", "--quick", "--test=basic", "--", "x"],
            ),
            {"nproc": "2", "node": ("n1",)}
            | {"rest": ("--quick", "--test", "basic", "--json", "/where/a b", "x")},
        ),
        ("test_distributed", ["--json=/a"], {"rest": ("--json", "/a")}),
        # torchrun's
        (
            "launch",
            ["x.py", "-m", "--help", "a=b", "--"],
            {"nproc": "1"} | {"rest": ("x.py", "-m", "--help", "a=b", "--")},
        ),
        ("launch", ["--", "x.py", "--"], {"nproc": "1", "rest": ("x.py", "--")}),
        ("launch", ["a=b"], {"nproc": "1", "rest": ("a=b",)}),
        ("launch", ["-m", "a.b"], {"nproc": "1", "as_module": True, "rest": ("a.b",)}),
        ("launch", ["--no_py", "a.b"], {"nproc": "1", "as_command": True, "rest": ("a.b",)}),
        (
            *("launch", ["--redirect=0", "-t3", "--role", "--x", "--run-path", "y"]),
            {"nproc": "1", "rest": ("y",)}
            | {"passed": ("--redirects", "0", "-t", "3", "--role", "--x", "--run-path")},
        ),
        ("launch", ["--nproc-per-node=cpu", "x"], {"nproc": str(CPUS), "rest": ("x",)}),
        ("launch", ["--nproc_per=auto", "x"], {"nproc": "auto", "cpu_nproc": CPUS, "rest": ("x",)}),
        (
            "launch",
            ["--nproc-per-node", "gpu", "x"],
            {"nproc": "auto", "cpu_nproc": 0, "rest": ("x",)},
        ),
        ("launch", ["--standalone", "x"], {"nproc": "1", "nnodes": "1", "rest": ("x",)}),
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
    [  # the number of nodes, this one's rank, the master and the port
        (["--nnodes=1"], {}, ("1", None, None, None)),
        (["--nnodes=2:2"], {}, ("2", None, None, None)),
        (["--rdzv-endpoint=localhost:0"], {}, ("1", None, None, None)),
        (["--nnodes=2", "--rdzv-endpoint=a:4"], {}, ("2", None, "a", "4")),
        (["--nnodes=2", "--rdzv-endpoint=a"], {}, ("2", None, "a", None)),
        (["--nnodes=2", "--rdzv-endpoint=[fd00::1]:4"], {}, ("2", None, "fd00::1", "4")),
        (["--nnodes=2", "--rdzv-endpoint=a:4", "--master-port=5"], {}, ("2", None, "a", "5")),
        (["--nnodes=2", "--rdzv-endpoint=a:4", "--master-addr=b"], {}, ("2", None, "b", "4")),
        (["--nnodes=2", "--rdzv-backend=c10d"], {}, ("2", "auto", None, None)),
        (["--nnodes=2", "--rdzv-backend=c10d", "--node-rank=1"], {}, ("2", "1", None, None)),
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


def test_what_only_launch_takes_from_the_environment() -> None:
    environ = {"NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2", "PET_RDZV_ID": "r", "PET_ROLE": "w"}
    found = read("launch", "x.py", environ=environ)
    assert found == {"nproc": "3", "max_restarts": "2", "run_id": "r", "rest": ("x.py",)}
    environ["PET_NPROC_PER_NODE"] = "4"
    assert read("launch", "x.py", environ=environ)["nproc"] == "4"
    assert read("launch_singlenode", environ=environ) == {}
    assert read("pbs_train", environ={"CONFIG": "c"}) == {"config": "c"}
    assert read("pbs_train", "d", environ={"CONFIG": "c"}) == {"config": "d"}


def test_a_script_of_hydras_gets_the_config_in_two_parts(folder: Path) -> None:
    (folder / "own.py").write_text("import hydra\n@hydra.main()\ndef main(): ...\n")
    environ = {"TRAIN_SCRIPT": "own.py"}
    found = read("run_ddp", "--config-path", "d", "--", "x", environ=environ)
    assert found == {"config": "-", "rest": ("--config-path=d", "x")}


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


def test_the_usage_line_is_the_scripts_header() -> None:
    typed = parse(call_of("launch_singlenode"), (), {})
    usage = "scripts/ssh/launch_singlenode.sh CONFIG [NPROC] [key=value...] [-- ARGS...]"
    assert typed.usage == usage
    assert parse(call_of("launch_singlenode", file="/none"), (), {}).usage == ""


@pytest.mark.parametrize("name", ["SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", ""])
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
        (["--status"], ("status", (), False)),
        (["--status", "a", "b"], ("status", ("a", "b"), False)),
        (["--status", ""], ("status", ("",), False)),
        (["--stop=a"], ("stop", ("a",), False)),
        (["--dry-run", "--stop", "a"], ("stop", ("a",), True)),
        (["c", "2", "x=y", "--stop", "a", "--dry-run"], ("stop", ("a",), True)),
        (["--stacks", "a"], ("stacks", ("a",), False)),
    ],
)
def test_questions_about_runs(words: list[str], expected: tuple[object, ...]) -> None:
    typed = parse(call_of("launch_singlenode"), words, {})
    assert (typed.fanout, typed.rest, typed.is_dry_run) == expected


@pytest.mark.parametrize(
    ("word", "task"), [("-h", "help"), ("--help", "help"), ("--version", "version")]
)
def test_help_wherever_it_stands(word: str, task: str) -> None:
    typed = parse(call_of("launch"), ["--nproc-per-node", "2", word, "--fast"], {})
    assert typed.fanout == task
    assert parse(call_of("launch"), ["x.py", word], {}).fanout == "local"


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words", "cause"),
    [
        ("launch_singlenode", ["c", "1", "x y"], "one argument too many, 'x y'; see launch_"),
        (
            *("launch_singlenode", ["--fast"]),
            "unknown option '--fast'; see launch_singlenode.sh --help, and put the training "
            "script's own after --",
        ),
        ("launch", ["--fast", "x.py"], "'--fast'; see launch.sh --help, and put the training"),
        ("launch", ["--fast", "x.py"], "the training script's own after its name"),
        ("launch", ["--nprocs=2", "x.py"], "unknown option '--nprocs'; see launch"),
        ("launch", ["--nproc-pre-node=2", "x"], "did you mean --nproc-per-node? see launch.sh"),
        ("launch", ["--no", "x.py"], "'--no'; did you mean --node-rank or --no-python? see"),
        ("launch", ["-x3", "x.py"], "unknown option '-x3'; see launch.sh --help"),
        ("launch", ["--max_restart_s=3", "x"], "did you mean --max-restarts? see launch.sh"),
        ("launch_singlenode", ["c", "--detatch"], "did you mean --detach? see launch_singlenode"),
        ("launch_singlenode", ["-status"], "unknown option '-status'; did you mean --status? see"),
        ("launch_singlenode", ["--show"], "option --show has no value; see launch_singlenode.sh"),
        ("launch_singlenode", ["--dry-run=x"], "option --dry-run takes no value; see launch_"),
        ("run_ddp", ["--num-gpu-s", "2"], "did you mean --num-gpus? see run_ddp.sh --help"),
        ("run_ddp", ["--config-path=d"], "--config-path and --config-name go together; give both"),
        ("launch", [], "no SCRIPT; usage: scripts/launch.sh [TORCHRUN OPTIONS]"),
        ("launch", ["--nproc-per-node", "2", "--"], "no SCRIPT; usage: scripts/launch.sh"),
        ("launch", [""], "SCRIPT is an empty word; usage: scripts/launch.sh"),
        ("launch", ["-m", ""], "SCRIPT is an empty word; usage: scripts/launch.sh"),
        ("launch", ["--nnodes", "1:4", "x.py"], "--nnodes 1:4: the number of nodes cannot change"),
        ("launch", ["--rdzv-backend=etcd", "x.py"], "--rdzv-backend etcd: unknown here; omit it"),
        (
            *("launch", ["--hosts=n1", "--rdzv-endpoint=n1:4", "x.py"]),
            "--hosts names the nodes, and --rdzv-endpoint does so, too; omit one",
        ),
        ("launch_torchrun_multinode", ["c", "2", "2", "0"], "too few arguments; usage: scripts/s"),
        ("test_distributed", ["a=b"], "'a=b': settings have no effect here; omit them"),
        ("test_distributed", ["--test", "x"], "--test is 'x'; give basic or all"),
        ("launch_singlenode", ["--status", "--strict"], "--strict does not go with --status; give"),
        ("launch_singlenode", ["--strict", "--stop", "a"], "--strict does not go with --stop"),
        ("launch_singlenode", ["--stop", "-"], "- does not go with --stop; give the names of runs"),
        ("slurm_train", ["--detach"], "--detach does not apply to a SLURM or PBS job; use sbatch"),
        ("pbs_train", ["--stop", "a"], "--stop does not apply to a SLURM or PBS job; use sbatch"),
        ("submit_with_config", ["--status"], "--status does not apply to a SLURM or PBS job"),
    ],
)
def test_what_is_refused_in_one_line(command: str, words: list[str], cause: str) -> None:
    with pytest.raises(PlanError) as raised:
        read(command, *words)
    assert cause in str(raised.value)
    assert "; " in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PBS_JOBID"])
def test_in_a_job_the_scheduler_holds_every_run(name: str) -> None:
    for word in ("--detach", "--status", "--stop"):
        with pytest.raises(PlanError, match="does not apply to a SLURM or PBS job"):
            read("launch_singlenode", word, environ={name: "7"})
    assert read("launch_singlenode", "--stacks", "a", environ={name: "7"})["fanout"] == "stacks"
