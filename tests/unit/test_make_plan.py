"""From arguments, environment and scheduler to a plan: which wins, and what is rejected."""

import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from captured import captured
from job_tools import make_tool

from distributed.environment import LauncherError
from launcher.container import config_texts
from launcher.plan import own, pbs, resume
from launcher.plan.check_config import check_config
from launcher.plan.hosts import read_hostfile
from launcher.plan.make_plan import choose_run_id, make_plan
from launcher.plan.plan import ROOT, Batch, Plan, print_plan
from launcher.plan.settings import VARIABLES, in_order
from launcher.plan.typed import Typed
from launcher.record.run_json import note_start
from launcher.slurm_node import slurm_node
from launcher.text import PlanError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("train: {max_steps: 1, batch_size: 1}\n")
    return tmp_path


def plan_of(environ: dict[str, str] | None = None, **typed: Any) -> Plan:
    words = {"fanout": "local", "program": "x.sh", "typed": ("x.sh", "c.yaml"), "config": "c.yaml"}
    return make_plan(Typed(**{**words, "environ": environ or {}, **typed}))


BY_HAND = {"nnodes": "2", "node_rank": "1", "master": "10.0.0.1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
LIKE = {"like_torchrun": True, "rest": ("a.py", "--b=c"), "config": None}
SSH = {"fanout": "ssh", "node": ("n1", "n2:3")}
SRUN = {"fanout": "srun"}
DRY = {"is_dry_run": True}
SPARE = {"SPARES": "1", "MAX_RESTARTS": "1"}
PTY = captured("srun-pty-step", SLURM_STEP_NUM_TASKS="1", SLURM_STEP_NUM_NODES="1")
FIRST = captured("one-per-node-step", SLURM_NODEID="0", SLURM_STEP_ID="3")
MODULE, COMMAND = ({**LIKE, f"as_{kind}": True} for kind in ("module", "command"))
COPIES = [  # one copy's variables, and the variable with the number of copies
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE"),
    ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE"),
    ({"MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_SIZE": "2"}, "MVP_COMM_WORLD_SIZE"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE"),
    ({"MPI_LOCALRANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE"),
    ({"PALS_RANKID": "0", "PMI_SIZE": "2"}, "PMI_SIZE"),
    ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE"),
]


@pytest.mark.parametrize(
    ("given", "address", "port"),
    [
        ("10.77.0.1 ", "10.77.0.1", 29500),  # hostname -I, with one address
        ("tcp://a", "a", 29500),
        ("a:29400", "a", 29400),
        ("http://a:80/", "a", 80),
        ("[fd00::1]:29400", "fd00::1", 29400),
        ("fd00::1", "fd00::1", 29500),
    ],
)
def test_a_master_in_another_form_is_used(given: str, address: str, port: int) -> None:
    two = {"nnodes": "2", "node_rank": "1"}
    for plan in (plan_of({"MASTER_ADDR": given}, **two), plan_of({}, **two, master=given)):
        assert (plan.master_addr, plan.port) == (address, port)
        assert plan.environ.get("MASTER_ADDR", address) == address  # what an agent reads
    assert plan_of({"MASTER_ADDR": given, "MASTER_PORT": "2000"}, **two).port == 2000
    assert plan_of({"MASTER_ADDR": given}).port is None  # one node needs no master


IMPOSSIBLE = ["node..1", ".a", "a" * 64, "\udcff", f"a.{'b' * 64}.c"]


@pytest.mark.parametrize(
    "given", ["10.0.0.1 172.17.0.1 ", "10.0.0.1,10.0.0.2", "a:x", "a/b", *IMPOSSIBLE]
)
def test_a_master_that_can_be_none_is_refused_at_once(given: str) -> None:
    for typed in (BY_HAND, SSH):
        with pytest.raises(PlanError, match=r"the master is '.*'; give one address or name"):
            plan_of({"MASTER_ADDR": given}, **{**typed, "master": None})
    assert plan_of({"MASTER_ADDR": given}).num_nodes == 1


def test_a_name_that_only_slurm_knows_becomes_its_address(tools: Path) -> None:
    told = "NodeName=gpu-1.invalid Arch=x86_64\n   NodeAddr=10.77.0.1 NodeHostName=gpu-1"
    make_tool(tools / "scontrol", f'[[ $* == "show node gpu-1.invalid" ]] && echo "{told}"')
    job = captured("batch-step", SLURM_JOB_NODELIST="gpu-1.invalid,gpu-2.invalid")
    assert plan_of(job, **SRUN).master_addr == "10.77.0.1"
    step = captured("one-per-node-step", SLURM_STEP_NODELIST="gpu-1.invalid,gpu-2.invalid")
    assert slurm_node(step) == (2, 1, "10.77.0.1")


FOREIGN = {
    "GRACE": "30s",
    "HANG_SECONDS": "0",
    "HOSTS": "/etc/hosts",
    "LOG_DIR": "s3://bucket/logs",
    "MASTER_PORT": "tcp://10.96.0.7:80",
    "MAX_RESTARTS": "unlimited",
    "MIN_NODES": "1",
    "NCCL_PROFILE": "perf",
    "NUMA_BINDING": "on",
    "PREFLIGHT_SECONDS": "1",
    "RUN_ID": "manual__2026-11-29T00:00:00+00:00",
    "SHOW_RANKS": "true",
    "SILENCE_SECONDS": "never",
    "SKIP_PREFLIGHT": "yes",
    "SPARES": "x",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_launch_sh_ignores_what_other_programs_set(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of({name: FOREIGN[name]}, **LIKE)
    told = capsys.readouterr().err
    assert re.fullmatch(rf"x\.sh: warning: {name}( is |=).*; ignored\n", told)
    expected = plan_of({}, **LIKE)  # with the run id of this process
    assert replace(plan, environ=expected.environ, command=expected.command) == expected
    assert {*plan.environ} <= {"LOG_DIR", "MASTER_PORT", "MAX_RESTARTS", *SEEN_BY_SCRIPTS}


SEEN_BY_SCRIPTS = ("PREFLIGHT_SECONDS", "SHOW_RANKS", "SKIP_PREFLIGHT")


@pytest.mark.parametrize("name", FOREIGN)
def test_other_scripts_refuse_it_unless_it_is_a_url(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "://" in FOREIGN[name]:
        assert plan_of({name: FOREIGN[name]}).port is None
        assert f"warning: {name} is " in capsys.readouterr().err
        return
    with pytest.raises((PlanError, LauncherError), match=name):
        plan_of({name: FOREIGN[name]}, **BY_HAND)


def test_launch_sh_refuses_what_was_typed_as_an_option() -> None:
    with pytest.raises(PlanError, match="MAX_RESTARTS is 'unlimited'"):
        plan_of({}, **LIKE, max_restarts="unlimited")


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (Batch(16, 0, 1), "32 samples a step = 2 ranks x 16"),
        (Batch(0, 32, 2), "32 samples a step = 2 ranks x 8 x 2 accumulated"),
        (Batch(0, 33, 1), "32 samples a step = 2 ranks x 16"),
        (Batch(0, 1, 1), "2 samples a step = 2 ranks x 1"),
    ],
)
def test_a_batch_in_words(batch: Batch, told: str) -> None:
    assert batch.describe(2) == told


def test_a_batch_of_one_sample() -> None:
    assert Batch(1, 0, 1).describe(1) == "1 sample a step = 1 rank x 1"


@pytest.mark.parametrize(
    ("batch", "least", "told"),
    [  # of 4 nodes with 2 ranks each
        (Batch(0, 48, 1), 2, []),
        (Batch(0, 32, 4), 2, ["3 of 4 nodes"]),  # 24 micro-batches
        (Batch(6, 0, 1), 2, []),
        (Batch(4, 0, 1), 2, ["3 of 4 nodes"]),  # 32 samples
        (Batch(4, 0, 1), 4, []),
        (Batch(4, 0, 1), 0, []),
    ],
)
def test_fewer_nodes_that_cannot_share_the_batch_are_told(
    batch: Batch, least: int, told: list[str]
) -> None:
    plan, out = (
        replace(plan_of(), hosts="n[1-4]", num_nodes=4, min_nodes=least, batch=batch),
        io.StringIO(),
    )
    print_plan(plan, None, None, [2] * 4, out)
    assert re.findall(r"^warning {4}(.*) cannot share this batch", out.getvalue(), re.M) == told


@pytest.mark.parametrize(
    ("field", "typed", "environ", "expected"),
    [  # argument, then environment, then default
        ("nproc", {"nproc": "auto"}, {"NPROC_PER_NODE": "2"}, None),
        ("port", {"port": "2000"}, {"MASTER_PORT": "3000"}, 2000),
        ("port", {"port": "auto"}, {"MASTER_PORT": "3000"}, None),
        ("port", {}, {"MASTER_PORT": "3000"}, 3000),
        ("port", {}, {}, None),
        ("port", BY_HAND, {}, 29500),
        ("master_addr", BY_HAND, {"MASTER_ADDR": "10.0.0.2"}, "10.0.0.1"),
        ("master_addr", {"nnodes": "2"}, {"MASTER_ADDR": "10.0.0.2"}, "10.0.0.2"),
        ("master_addr", {}, {"MASTER_ADDR": "10.0.0.2"}, "127.0.0.1"),
        ("master_addr", SSH, {"MASTER_ADDR": "10.0.0.2"}, "10.0.0.2"),
        ("master_addr", SSH, {}, "n1"),
        ("run_id", {}, {"RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "mine"),
        ("run_id", {}, {"SLURM_JOB_ID": "7"}, "7"),
        ("run_id", {}, {**STEP, "SLURM_STEP_ID": "0"}, "7"),
        ("run_id", {}, {**STEP, "SLURM_STEP_ID": "2"}, "7.2"),
        ("run_id", {}, {"PBS_JOBID": "7.host"}, "7.host"),
        ("run_id", BY_HAND, {}, ""),
        ("variables", {"log_level": "ERROR"}, {"LOG_LEVEL": "INFO"}, {"LOG_LEVEL": "ERROR"}),
        ("variables", {}, {"SHOW_RANKS": "all", "FRESH": "1"}, {"SHOW_RANKS": "all", "FRESH": "1"}),
        ("variables", {}, {"NUMA_BINDING": "node"}, {"NUMA_BINDING": "node"}),
        (  # upper or lower case; a user's own script gets them unchanged
            *("variables", {}, {"LOG_LEVEL": "info", "BACKEND": "GLOO"}),
            {"LOG_LEVEL": "INFO", "BACKEND": "gloo"},
        ),
        ("variables", LIKE, {"LOG_LEVEL": "info"}, {"LOG_LEVEL": "info"}),
        ("backend", LIKE, {"BACKEND": "NCCL"}, "nccl"),
        ("backend", LIKE, {"BACKEND": "hf", "LAUNCHER": "local"}, "auto"),
        ("variables", LIKE, {"BACKEND": "hf", "LOG_LEVEL": "trace", "FRESH": "true"}, {}),
        ("log_dir", {}, {"LOG_DIR": "else where"}, Path("else where")),
        ("log_dir", {}, {}, Path("logs")),
        ("grace_s", {}, {}, 30),
        ("grace_s", {}, {"GRACE": "0"}, 0),
        ("grace_s", LIKE, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 7),  # as the agent reads it
        ("grace_s", {**LIKE, "passed": ("--shutdown-timeout", "9")}, {"GRACE": "5"}, 9),
        ("silence_s", SSH, {}, 60),
        ("silence_s", SSH, SPARE, 10),  # a false alarm costs little: a spare takes over
        ("silence_s", SSH, {**SPARE, "SILENCE_SECONDS": "30"}, 30),
        *(("has_checks", {}, {"SKIP_PREFLIGHT": one}, one != "1") for one in ("", "0", "1")),
        ("engine", {}, {"LAUNCHER": "srun"}, ""),
        ("words", {"config": "-"}, {"TRAIN_SCRIPT": "-mine.py"}, ["./-mine.py"]),
        ("words", {**LIKE, "rest": ["-x.py", "-y"]}, {}, ["./-x.py", "-y"]),
        ("words", LIKE, {"TRAIN_SCRIPT": "own.py", "CONFIG_FLAG": "-f"}, ["a.py", "--b=c"]),
        ("words", {**MODULE, **DRY}, {}, ["-m", "a.py", "--b=c"]),
        ("words", {**COMMAND, **DRY}, {}, ["--no-python", "a.py", "--b=c"]),
        ("run_id", {"run_id": "typed"}, {}, "typed"),
        ("run_id", {"run_id": "typed"}, {"RUN_ID": "typed.1"}, "typed.1"),  # a resume line
        ("run_id", {"run_id": "../a:b c"}, {}, "_._a_b_c"),
        ("run_id", {"run_id": "typed", **BY_HAND}, {}, ""),  # node rank 0 names the run
        ("port", {"port": "0"}, {}, None),
        ("log_dir", {"log_dir": "typed"}, {"LOG_DIR": "mine"}, Path("typed")),
        ("max_restarts", {"max_restarts": "3"}, {"MAX_RESTARTS": "2"}, 3),
        ("min_nodes", SSH, SPARE, 1),
        ("num_nodes", SSH, {"MAX_RESTARTS": "1", "MIN_NODES": "1"}, 2),
        ("min_nodes", SSH, {"MAX_RESTARTS": "1", "MIN_NODES": "1"}, 1),
        ("min_nodes", SSH, {"MAX_RESTARTS": "1", "SPARES": "0"}, 0),
        ("master_addr", SSH, SPARE, "n1"),
        ("master_addr", SRUN, captured("batch-step", MASTER_ADDR="n1i"), "n1i"),
        # On a single node, MASTER_ADDR is left over from another run.
        ("master_addr", SRUN, captured("requeued-batch-step", MASTER_ADDR="x"), "node1"),
        ("num_nodes", SRUN, {**captured("batch-step"), **SPARE}, 1),
        # The job that submit_with_config.sh submits sets them aside, not the check of the config.
        ("num_nodes", {**BY_HAND, "fanout": "check"}, {**SPARE, "MIN_NODES": "1"}, 2),
        ("num_nodes", LIKE, captured("one-per-node-step"), 2),
        ("node_rank", LIKE, captured("one-per-node-step"), 1),
        ("num_nodes", {**LIKE, "nnodes": "1"}, captured("one-per-node-step"), 1),
        ("num_nodes", {**LIKE, "nnodes": "1"}, COPIES[0][0], 1),
        ("num_nodes", BY_HAND, COPIES[3][0], 2),
        ("num_nodes", LIKE, {"PMI_RANK": "0", "PMI_SIZE": "1"}, 1),
        ("num_nodes", LIKE, captured("one-per-node-step") | COPIES[3][0], 2),  # srun --mpi=pmi2
    ],
)
def test_what_wins(
    field: str, typed: dict[str, Any], environ: dict[str, str], expected: object
) -> None:
    assert getattr(plan_of(environ, **typed), field) == expected


def test_an_id_that_is_not_that_of_the_resumed_run_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for run_id, warns in {"typed": False, "typed.1": False, "mine": True}.items():
        plan_of(run_id="typed", environ={"RUN_ID": run_id})
        told = f"warning: RUN_ID is {run_id}; --rdzv-id typed is ignored"
        assert (told in capsys.readouterr().err) == warns


def test_a_new_run_id_where_nothing_names_the_run() -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", plan_of().run_id)


@pytest.mark.parametrize(
    ("name", "environ", "nproc", "num_nodes", "run_id"),
    [
        ("batch-step", {}, 2, 2, "1"),
        ("salloc-command", {}, 2, 2, "2"),
        ("salloc-interactive-step", {}, 2, 2, "3"),
        ("array-batch-step", {}, 2, 1, "5_5"),
        ("requeued-batch-step", {}, None, 1, "11"),
        ("requeued-batch-step", {"SLURM_GPUS_ON_NODE": "4"}, 4, 1, "11"),
        ("requeued-batch-step", {"SLURM_GPUS_ON_NODE": "4", "NPROC_PER_NODE": "2"}, 2, 1, "11"),
    ],
)
def test_world_of_a_slurm_job(
    name: str, environ: dict[str, str], nproc: int | None, num_nodes: int, run_id: str
) -> None:
    for fanout in ("srun", "auto"):
        plan = plan_of(captured(name, **environ), fanout=fanout, is_dry_run=True)
        assert plan.fanout == "srun"
        found = (plan.nproc, plan.num_nodes, plan.run_id, plan.master_addr)
        assert found == (nproc, num_nodes, run_id, "node1")


@pytest.mark.parametrize(
    ("typed", "environ", "cause"),
    [
        ({}, {"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE is 'two'; give a whole"),
        ({"nproc": "two"}, {}, "is 'two'; give a whole number from 1 to 4096, or auto (launch.sh "),
        (
            {**SSH, "node": ("node1:two",)},
            {},
            "for 'node1:two' is 'two'; give a whole number from 1 to 4096, or auto",
        ),
        ({"port": "65536"}, {}, "the port is '65536'"),
        ({}, {"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
        ({}, {"MASTER_PORT": "0"}, "MASTER_PORT is '0'; give a whole number from 1 to 65535"),
        ({}, {"FRESH": "2"}, "FRESH is '2'; choose from 0, 1"),
        ({}, {"SKIP_PREFLIGHT": "false"}, "SKIP_PREFLIGHT is 'false'; choose from 0, 1"),
        ({**MODULE, "rest": ("no.such",)}, {}, "there is no module 'no.such'; correct its name"),
        ({**MODULE, "rest": (".",)}, {}, "there is no module '.'; correct its"),
        ({**COMMAND, "rest": ("./nope",)}, {}, "'./nope' is not an executable program; correct"),
        ({"nnodes": ""}, {}, "the number of nodes is ''"),
        (
            {**BY_HAND, "node_rank": "2"},
            {},
            "the node rank is '2'; give a whole number from 0 to 1",
        ),
        ({}, {"GRACE": "1.5"}, "GRACE is '1.5'"),
        ({}, {"SILENCE_SECONDS": "9"}, "SILENCE_SECONDS is '9'; give a whole number from 10 to"),
        ({}, {"MAX_RESTARTS": "x"}, "MAX_RESTARTS is 'x'"),
        ({"engine": "torch.distributed.launch"}, {"MAX_RESTARTS": "1"}, "cannot restart ranks"),
        (SSH, {"SPARES": "x"}, "SPARES is 'x'"),
        (SSH, {"SPARES": "1"}, "SPARES=1 without MAX_RESTARTS; set it, say to 3 (each"),
        (SSH, {**SPARE, "MIN_NODES": "2"}, "MIN_NODES is '2'; give a whole number from 1 to 1"),
        (SSH, {**SPARE, "MIN_NODES": "0"}, "MIN_NODES is '0'"),
        ({}, SPARE, "SPARES=1: this launcher does not replace nodes; use launch_torchrun_auto"),
        ({**SSH, "fanout": "pdsh"}, SPARE, "SPARES=1: this launcher does not replace nodes"),
        (SRUN, captured("batch-step", LAUNCHER="srun", **SPARE), "SPARES=1: this launcher"),
        ({}, {"BACKEND": "mpi"}, "BACKEND is 'mpi'; choose from nccl, gloo"),
        ({}, {"BACKEND": "glo"}, "BACKEND is 'glo'; did you mean gloo? choose from nccl, gloo"),
        ({}, {"LAUNCHER": "torchrun"}, "LAUNCHER is 'torchrun'; choose from agent, srun"),
        ({}, {"RUN_ID": "a b"}, "RUN_ID is 'a b'; use at most 128"),
        ({}, {"RUN_ID": "-x"}, "RUN_ID is '-x'"),
        ({"config": "2"}, {"TRAIN_SCRIPT": "a.py"}, "give the path of a YAML file, or - for none"),
        ({"config": "-"}, {}, "this project's train.py needs a config, but '-' passes none; give"),
        ({"fanout": "ssh", "node": ("-o",)}, {}, "'-o' is not a node"),
        ({"fanout": "ssh", "node": ("n1", "./none")}, {}, "there is no file './none'; correct its"),
        ({"fanout": "ssh", "node": ("/dev/null",)}, {}, "'/dev/null' is not a node"),
        ({"like_torchrun": True, "rest": ("x.py",), "hosts": "./none"}, {}, "no file './none'; "),
        ({"like_torchrun": True, "rest": ("x.py",), "hosts": "a/b,n1"}, {}, "no file 'a/b'; corr"),
        ({"fanout": "ssh", "node": ("n[1-2]", "n2:4")}, {}, "n2 is named twice"),
        (SRUN, {}, "this is not a SLURM job; use sbatch x.sh, or salloc first"),
        ({"has_health_check": True}, captured("batch-step"), "2 nodes, but srun did not start"),
        *(({}, environ, f"started the launcher 2 times ({size})") for environ, size in COPIES),
        (SSH, COPIES[0][0], "start it once, without mpiexec; for separate runs, unset OMPI_COMM"),
    ],
)
def test_what_is_refused_in_one_line(
    typed: dict[str, Any], environ: dict[str, str], cause: str
) -> None:
    with pytest.raises((PlanError, LauncherError)) as raised:
        plan_of(environ, **typed)
    assert cause in str(raised.value)
    assert "; " in str(raised.value) and "\n" not in str(raised.value)


def test_modules_and_programs_that_are_here_are_not_refused(folder: Path) -> None:
    (folder / "mine").mkdir()
    for name in ("mine", "json.tool", "distributed.selftest"):
        module: dict[str, Any] = {**MODULE, "rest": (name,)}
        assert plan_of(**module).words == ["-m", name]
    command: dict[str, Any] = {**COMMAND, "rest": ("ls",)}
    assert plan_of(**command).words == ["--no-python", "ls"]
    lacking: dict[str, Any] = {**MODULE, "rest": ("of.the.image",)}
    assert plan_of({"CONTAINER": str(folder)}, **lacking).words == ["-m", "of.the.image"]
    assert plan_of(**lacking, hosts="n1").words == ["-m", "of.the.image"]


def test_a_container_reads_the_defaults_of_a_config_with_and_without_their_ending(
    folder: Path,
) -> None:
    texts = {"a": "data: /a\n", "b": "data: /b\n", "c": "defaults: [a.yaml, b]\n"}
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    assert sorted(config_texts(Path("c.yaml"))) == sorted(texts.values())


def test_a_value_that_is_too_long_for_a_file_is_no_file() -> None:
    own = {"TRAIN_SCRIPT": "own.py"}
    long = "x" * 5000
    with pytest.raises(PlanError, match="there is no config file"):
        plan_of(own, config=long)
    words = plan_of({**own, "CONFIG_FLAG": "--set"}, config=long).words
    assert words == ["own.py", "--set", long]


def test_only_a_users_script_gets_values_that_are_no_file() -> None:
    with pytest.raises(PlanError, match="there is no config file"):
        plan_of({"CONFIG_FLAG": "--set"}, config="none.yaml")


def test_pyxis_is_only_for_slurm_also_in_a_dry_run_of_a_batch_script(folder: Path) -> None:
    (folder / "image.sqsh").touch()
    image = {"CONTAINER": "image.sqsh"}
    in_slurm: dict[str, Any] = {"batch_script": "scripts/slurm/slurm_train.sh", **DRY}
    in_pbs: dict[str, Any] = {"batch_script": "scripts/pbs/pbs_train.sh", **DRY, "nodefile": True}
    assert str(plan_of(image, **in_slurm).container).endswith("image.sqsh (pyxis)")
    assert str(plan_of(image, **in_pbs).container).endswith("image.sqsh (enroot)")
    with pytest.raises(PlanError, match="which only pyxis can load, and only in a SLURM job"):
        plan_of({"CONTAINER": "nvcr.io/x"}, **in_pbs)


def test_a_checkpoint_that_is_not_there_is_refused_before_the_start(folder: Path) -> None:
    asked: dict[str, Any] = {"setting": ("resume=nope/step-1",)}
    with pytest.raises(PlanError, match="resume: there is no 'nope/step-1'; correct the path"):
        check_config(plan_of(**asked))
    (folder / "checkpoints/mine").mkdir(parents=True)  # the run's own checkpoints come first
    assert check_config(plan_of({"RUN_ID": "mine"}, **asked)).run_id == "mine"
    (folder / "nope/step-1").mkdir(parents=True)
    check_config(plan_of(**asked))


def test_the_config_counts_where_nothing_else_was_said(folder: Path) -> None:
    (folder / "c.yaml").write_text(
        "train: {max_steps: 1, batch_size: 1}\ncheckpoint: {dir: kept}\n"
        "distributed: {backend: gloo, join_timeout: 7}\nprepare: first.sh\n"
    )
    plan = check_config(plan_of())
    assert (plan.backend, plan.join_timeout_s, plan.checkpoint_dir) == ("gloo", 7, Path("kept"))
    assert (plan.prepare, plan.batch) == ("first.sh", Batch(1, 0, 1))
    said = check_config(plan_of({"BACKEND": "nccl"}))
    assert said.backend == "nccl"
    assert said.task_file == ""
    empty = replace(plan_of({"GRACE": ""}), run_id="", environ={})
    assert replace(plan_of(), run_id="") == empty


def test_a_task_of_the_users_own_is_among_the_compared_files(folder: Path) -> None:
    (folder / "mine.py").write_text("class Digits: ...\n")
    (folder / "c.yaml").write_text("task: mine:Digits\ntrain: {max_steps: 1, batch_size: 1}\n")
    plan = check_config(plan_of())
    assert plan.task_file == "mine.py"
    assert plan.request().words[-1] == plan.task_file
    assert plan.run_variables()["LAUNCH_TASK_FILE"] == plan.task_file


def test_agents_know_whether_there_was_a_preflight() -> None:
    assert plan_of({"SKIP_PREFLIGHT": "1"}).run_variables()["SKIP_PREFLIGHT"] == "1"
    assert not {"SKIP_PREFLIGHT", "SILENCE_SECONDS"} & plan_of().run_variables().keys()
    assert plan_of(SPARE, **SSH).run_variables()["SILENCE_SECONDS"] == "10"


@pytest.mark.parametrize(
    ("environ", "submitted", "more", "names"),
    [  # squeue's answer to the second launch, SLURM's variables, run ids
        (PTY, "today", {}, ["", ".1"]),
        (PTY, "", {}, ["", ".1"]),  # the job has ended, so SLURM no longer knows it
        (FIRST, "", {}, [".3", ".3.1"]),
        (captured("batch-step"), "today", {}, ["", ".1"]),
        (captured("batch-step"), "today", {"SLURM_RESTART_COUNT": "1"}, ["", ""]),  # it resumes
        (captured("batch-step"), "last year", {}, ["", ""]),  # the lock rejects it later
        ({"PBS_JOBID": "7.host", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"}, "", {}, ["", ".1"]),
    ],
)
def test_each_launch_in_a_job_is_a_run_of_its_own(
    tools: Path, environ: dict[str, str], submitted: str, more: dict[str, str], names: list[str]
) -> None:
    job = environ.get("SLURM_JOB_ID") or environ["PBS_JOBID"]
    logs = Path("logs")
    launches = zip((environ, environ | more), ("today", submitted), names, strict=True)
    for given, told, name in launches:
        typed = Typed("auto", environ=given, is_dry_run=True)  # which reserves no name
        make_tool(tools / "squeue", f"echo {told}")
        run_id = f"{job}{name}"
        assert choose_run_id(typed, logs, is_namer=True) == run_id
        note_start(logs / run_id, given)
    assert choose_run_id(typed, logs, is_namer=False) == ""


def test_the_nodes_of_a_step_meet_at_one_port_before_they_know_the_run() -> None:
    ports = {
        plan_of(captured("one-per-node-step", SLURM_NODEID=rank, SLURM_PROCID=rank), **LIKE).port
        for rank in "01"
    }
    assert len(ports) == 1 and None not in ports


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\xef\xbb\xbfn1\r\nn2\r\n", ["n1", "n2"]),  # written on Windows
        (b"n1\nn1\nn2\nn1\n", ["n1:3", "n2:1"]),  # written by LSF and OAR
        (b"fd00::1 slots=8\n[fd00::2] slots=4\n", ["[fd00::1]:8", "[fd00::2]:4"]),
        (b"me@fd00::1 slots=8\nme@n1 slots=4\n", ["[me@fd00::1]:8", "me@n1:4"]),
        (b"n1:2\nn1:2\n", ["n1:2", "n1:2"]),  # rejected later, because node n1 is named twice
    ],
)
def test_files_of_hosts_of_other_programs(text: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(text)
    assert read_hostfile(tmp_path / "hosts") == words


@pytest.mark.parametrize(
    ("given", "own", "told"),
    [
        ({}, {}, {None}),
        ({"LOG_LEVEL": "debug"}, {}, {"INFO"}),
        ({"LOG_LEVEL": "DEBUG"}, {"TORCH_CPP_LOG_LEVEL": "WARNING"}, {"INFO", "WARNING"}),
    ],
)
def test_at_level_debug_torch_logs_though_the_agent_imports_it(
    given: dict[str, str], own: dict[str, str], told: set[str | None]
) -> None:
    def named(plan: Plan) -> set[str | None]:
        variables = plan.run_variables()
        return {variables.get(f"TORCH_{name}") for name in ("CPP_LOG_LEVEL", "DISTRIBUTED_DEBUG")}

    assert named(plan_of(given | own)) == told
    assert named(plan_of(given | own, **LIKE)) == {None}  # not for the user's own script


# --- the resume line ------------------------------------------------------------------------------


NOT_BY_NAME = {"RUN_ID", "RUN_SECRET", "SHOW_RANKS", "NO_COLOR", "PYTHON"}


def line(environ: dict[str, str], fanout: str = "local", **typed: Any) -> str:
    """Return the resume line of `x.sh` in this environment."""
    words: dict[str, Any] = {"typed": ("x.sh",), "python": "/env/bin/python", **typed}
    return resume.resume_line(Typed(fanout, **words, environ=environ), fanout)


def test_what_was_typed_and_what_shaped_the_run() -> None:
    typed = ("scripts/x.sh", "c.yaml", "a b", "--dry-run", "resume=never", "--", "'")
    told = line({"TRAIN_SCRIPT": "my own.py", "RUN_ID": "mine", "GRACE": "5"}, typed=typed)
    assert told == """TRAIN_SCRIPT='my own.py' GRACE=5 scripts/x.sh c.yaml 'a b' -- ''"'"''"""


def test_each_variable_of_the_help_is_repeated() -> None:
    text = (ROOT / "scripts/lib/help.txt").read_text().partition("Environment variables")[2]
    rows = re.findall(r"^  ([A-Z_]+(?:, [A-Z_]+)*)", text, re.MULTILINE)
    names = {name for row in rows for name in row.split(", ")}
    assert len(names) > 30
    repeated = {*in_order("resume"), *in_order("resume_over_ssh")}
    assert names - repeated == NOT_BY_NAME


REPEATED = [
    *("TRAIN_SCRIPT", "CONFIG_FLAG", "NPROC_PER_NODE", "BACKEND", "LOG_DIR"),
    *("MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "GRACE", "LAUNCHER"),
    *("NCCL_PROFILE", "VENV", "CONDA_ENV", "MODULES", "FRESH"),
    *("NUMA_BINDING", "SITE", "CONTAINER", "CONTAINER_ARGS", "HANG_SECONDS"),
    *("SILENCE_SECONDS", "SPARES", "MIN_NODES", "HOSTS", "SKIP_PREFLIGHT"),
    *("LOG_LEVEL", "SRUN_OPTS"),
]
REPEATED_OVER_SSH = ["SSH_OPTS", "FORWARD_ENV", "PREFLIGHT_SECONDS"]


@pytest.mark.parametrize(
    ("fanout", "names"), [("local", REPEATED), ("ssh", [*REPEATED, *REPEATED_OVER_SSH])]
)
def test_the_variables_are_repeated_in_one_order(fanout: str, names: list[str]) -> None:
    told = line(dict.fromkeys(sorted(VARIABLES), "7"), fanout)
    assert told.endswith(" PYTHON=/env/bin/python x.sh")
    assert [name for name in re.findall(r"(\w+)=7", told) if name in names] == names


def test_an_agent_is_started_with_the_variables_that_it_reads() -> None:
    given = {"NUMA_BINDING": "NODE", "FRESH": "1", "SHOW_RANKS": "ALL", "GRACE": "5"}
    given |= {"HANG_SECONDS": "9", "BACKEND": "Gloo", "LOG_LEVEL": "info", "LAUNCHER": "agent"}
    named = [f"{name}={value}" for name, value in plan_of(given).variables.items()]
    told = "LOG_LEVEL=INFO BACKEND=gloo GRACE=5 HANG_SECONDS=9 SHOW_RANKS=all FRESH=1"
    assert " ".join(named) == f"{told} NUMA_BINDING=node"


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
        # Variables that will be set again: by the site, the scheduler or the project's environment.
        ({"NCCL_DEBUG": "INFO"}, {"activated": ("NCCL_DEBUG",)}, "x.sh"),
        ({"CUDA_VISIBLE_DEVICES": "0", "PBS_JOBID": "7"}, {}, "x.sh"),
        ({"PYTHON": "p"}, {"python": f"{ROOT}/.venv/bin/python"}, "x.sh"),
        ({"LOG_LEVEL": "DEBUG"}, {}, "LOG_LEVEL=DEBUG x.sh"),
        ({"HOME": "/root", "PATH": "/bin"}, {}, "x.sh"),
        # Secrets.
        ({"WANDB_API_KEY": "hush", "WANDB_IDENTITY_TOKEN_FILE": "hush"}, {}, "x.sh"),
        ({"VLLM_API_KEY": "hush", "VLLM_HOST_IP": "10.0.0.1", "FSDP_X": "1"}, {}, "FSDP_X=1 x.sh"),
        ({"RUN_SECRET": "hush"}, {}, "x.sh"),
    ],
)
def test_other_programs_variables(
    environ: dict[str, str], typed: dict[str, Any], told: str
) -> None:
    assert line(environ, **typed) == told


def test_what_the_shell_was_begun_with_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image that sets NCCL_VERSION; this process represents the shell."""
    before = dict(
        word.split("=", 1)
        for word in Path("/proc/self/environ").read_text().split("\0")
        if "=" in word
    )
    monkeypatch.setattr(own, "_find_shell", os.getpid)
    monkeypatch.setattr(resume, "FORWARDED", re.compile("PATH|OMP_.*"))
    assert line({"PATH": before["PATH"], "OMP_NUM_THREADS": "3"}) == "OMP_NUM_THREADS=3 x.sh"
    assert line({"PATH": "/other"}) == "PATH=/other x.sh"


def test_a_name_without_a_star_is_not_a_beginning() -> None:
    names = ("PYTHONPATH", "NCCL_DEBUG", "PYTHONPATH_OF_MINE", "CUDA_VISIBLE_DEVICES_OLD", "NCCL")
    assert [*filter(resume.FORWARDED.fullmatch, names)] == ["PYTHONPATH", "NCCL_DEBUG"]


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
