"""Every launcher's variables, completely or partly set."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from captured import captured
from hypothesis import given
from hypothesis import strategies as st

from distributed import environment, job
from distributed.environment import (
    Environment,
    LauncherError,
    detect,
    port_from_id,
)
from distributed.hostlist import HostlistError
from launcher.slurm_node import slurm_node

Variables = dict[str, str]

TORCHRUN: Variables = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "23817",
    "TORCHELASTIC_RUN_ID": "none",
    "RUN_ID": "r1",
}
BY_HAND: Variables = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1234",
}
STEP, BATCH = captured("srun-step"), captured("batch-step")


def mpi(prefix: str, rank: int, size: int, local_rank: int, local_size: int) -> Variables:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"{prefix}_COMM_WORLD_{name}": str(number) for name, number in names.items()}


OPENMPI = mpi("OMPI", 1, 2, 1, 2) | {"PMIX_NAMESPACE": "prterun-node1-4711@1"}
MVAPICH = mpi("MV2", 3, 4, 1, 2)
INTEL: Variables = {  # as set by mpiexec.hydra of MPICH and Intel MPI; only Intel sets the id
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "I_MPI_HYDRA_UUID": "e40c",
}
PALS: Variables = {
    "PALS_RANKID": "3",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_APID": "c1",
}
CRAY = PALS | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_LOCAL_SIZE": ""}
MASTER, PORT = {"MASTER_ADDR": "node1"}, {"MASTER_PORT": "999"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}


def place(env: Environment) -> tuple[object, ...]:
    return dataclasses.astuple(env)[:9]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ("torchrun", 5, 1, 8, 4, 1, 2, "node1", 23817)),
        (BY_HAND, ("torchrun", 1, 1, 2, 2, 0, 1, "127.0.0.1", 1234)),
        (
            BY_HAND | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            ("torchrun", 3, 1, 4, 2, 1, 2, "127.0.0.1", 1234),
        ),
        (STEP | MASTER | PORT, ("slurm", 3, 1, 4, 2, 1, 2, "node1", 999)),
        (STEP | ARRAY, ("slurm", 3, 1, 4, 2, 1, 2, "node1", port_from_id("70_7.0"))),
        (OPENMPI, ("openmpi", 1, 1, 2, 2, 0, 1, "127.0.0.1", port_from_id("prterun-node1-4711@1"))),
        (mpi("OMPI", 3, 4, 1, 2) | MASTER | PORT, ("openmpi", 3, 1, 4, 2, 1, 2, "node1", 999)),
        # Open MPI 5 gives rank 1 of three the local rank 2.
        (mpi("OMPI", 1, 6, 2, 3) | MASTER | PORT, ("openmpi", 1, 2, 6, 3, 0, 2, "node1", 999)),
        (INTEL, ("mpich", 1, 1, 2, 2, 0, 1, "127.0.0.1", port_from_id("e40c"))),
        (MVAPICH | MASTER | PORT, ("mvapich", 3, 1, 4, 2, 1, 2, "node1", 999)),
        (
            mpi("MVP", 3, 4, 1, 2) | MASTER | {"PBS_JOBID": "7.host"},
            ("mvapich", 3, 1, 4, 2, 1, 2, "node1", port_from_id("7.host")),
        ),
        (PALS | MASTER, ("pals", 3, 1, 4, 2, 1, 2, "node1", port_from_id("c1"))),
        (CRAY | MASTER, ("pals", 3, 1, 4, 2, 1, 2, "node1", port_from_id("c1"))),
        ({"RUN_ID": "r1"}, ("plain", 0, 0, 1, 1, 0, 1, "127.0.0.1", port_from_id("r1"))),
    ],
)
def test_place_of_each_launcher(variables: Variables, expected: tuple[object, ...]) -> None:
    assert place(detect(variables)) == expected


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (STEP | OPENMPI | TORCHRUN, "torchrun"),
        (STEP | OPENMPI, "openmpi"),
        (BATCH | OPENMPI, "openmpi"),
        (STEP | INTEL, "mpich"),  # mpiexec started its own helpers with srun
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "5"} | PALS, "slurm"),  # srun
        (STEP | {"PMIX_RANK": "3"}, "slurm"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "plain"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, "plain"),
    ],
)
def test_of_several_launchers_the_innermost_counts(variables: Variables, launcher: str) -> None:
    assert detect(variables).launcher == launcher


def test_mpich_gives_the_ranks_of_a_node_one_port() -> None:
    code = "from distributed.environment import detect; print(detect().master_port)"
    environ = {**os.environ, **INTEL, "I_MPI_HYDRA_UUID": ""}
    code = f"import os; os.setpgid(0, 0); {code}"  # each rank has its own process group
    command = [sys.executable, "-c", code]
    assert len({subprocess.check_output(command, env=environ) for _ in range(2)}) == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"PMI_RANK": "0"},
        {"PMIX_RANK": "1"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"},
    ],
)
def test_a_rank_that_cannot_be_told_its_local_rank_is_refused(variables: Variables) -> None:
    with pytest.raises(LauncherError, match=r"_RANK=., but no variable gives .* unset \w+_RANK \["):
        detect(variables)


def test_agent_hands_on_its_own() -> None:
    env = detect(
        TORCHRUN
        | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
        | {"HEARTBEAT_FILE": "/tmp/beat", "BACKEND": "gloo", "LOG_DIR": "elsewhere"}
    )
    assert (env.agent_store, env.restart_count, env.heartbeat_file) == (True, 2, "/tmp/beat")
    assert detect({"SLURM_RESTART_COUNT": "1"}).restart_count == 1
    assert (env.backend, env.log_dir) == ("gloo", Path("elsewhere"))
    assert not env.is_main and detect({}).is_main
    assert detect({}).log_dir == Path("logs")


def test_local_rank_argument() -> None:
    by_argument = {name: value for name, value in BY_HAND.items() if name != "LOCAL_RANK"}
    env = detect(by_argument, local_rank=1)
    assert (env.launcher, env.local_rank) == ("launch", 1)
    assert detect(BY_HAND, local_rank=1).local_rank == 1
    with pytest.raises(LauncherError, match=r"LOCAL_RANK=1 but --local-rank is 0"):
        detect(BY_HAND, local_rank=0)
    with pytest.raises(LauncherError, match="RANK is not set"):
        detect({}, local_rank=0)


OTHER_GROUPS = {"SLURM_HET_SIZE": "1", "SLURM_JOB_NODELIST_HET_GROUP_0": "other"}
TASKS = "SLURM_STEP_TASKS_PER_NODE"


def without(variables: Variables, name: str) -> Variables:
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        *((BY_HAND, n) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")),
        (TORCHRUN, "GROUP_RANK"),
        *(
            (STEP, f"SLURM_{n}")
            for n in ("STEP_NUM_TASKS", "STEP_NUM_NODES", "STEP_TASKS_PER_NODE", "STEP_NODELIST")
        ),
        *((STEP, n) for n in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")),
        *((OPENMPI, f"OMPI_COMM_WORLD_{n}") for n in ("SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        *((PALS, n) for n in ("PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")),
    ],
)
def test_half_set_environment_names_what_is_missing(variables: Variables, missing: str) -> None:
    one_line = rf"^[^\n]*\b{missing} is not .*; .+ \[wrong-world\]$"
    with pytest.raises(LauncherError, match=one_line):
        detect(without(variables, missing))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (BY_HAND | {"RANK": "2"}, "RANK=2 is not a number from 0 to 1 (WORLD_SIZE=2)"),
        (BY_HAND | {"RANK": "one"}, "RANK=one is not a number from 0 to 1"),
        (BY_HAND | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a number from 1 to "),
        (BY_HAND | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a number from 1 to 65535"),
        (BY_HAND | {"LOCAL_RANK": "0"}, "set LOCAL_WORLD_SIZE"),
        (BY_HAND | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 is not a number from 0 to 0 (LOCAL_W"),
        (STEP | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 is not a number from 0 to 1 (tasks"),
        (STEP | {TASKS: "2(x"}, f"{TASKS}=2(x cannot be read"),
        (STEP | {TASKS: "5"}, f"SLURM_STEP_NUM_NODES=2 is not a number from 1 to 1 ({TASKS}=5)"),
        (STEP | {"WORLD_SIZE": "3"}, "WORLD_SIZE=3 but SLURM_STEP_NUM_TASKS=4"),
        (STEP | OTHER_GROUPS, "has hosts that are in none of the job's groups; "),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR is not set; use mpirun -x or "),
        (MVAPICH, "MASTER_ADDR is not set; use mpirun -x or mpiexec -genv (MASTER_ADDR: first"),
        (MVAPICH | MASTER, "MASTER_PORT is not set; use mpirun -x or mpiexec"),
    ],
)
def test_contradiction_names_both_sides(variables: Variables, text: str) -> None:
    with pytest.raises(LauncherError, match=r"^[^;\n]+; [^;\n]+ \[wrong-world\]$") as raised:
        detect(variables)
    assert text in str(raised.value)
    assert raised.value.fault == "wrong-world"


@pytest.mark.parametrize(
    ("variables", "run_id"),
    [
        ({"RUN_ID": "mine", "TORCHELASTIC_RUN_ID": "t", "PBS_JOBID": "9.pbs"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "t", "PBS_JOBID": "9.pbs"}, "t"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "77", "PBS_JOBID": "9.pbs"}, "77"),
        ({"SLURM_JOB_ID": "77"} | ARRAY, "70_7"),
        ({"PBS_JOBID": "9.pbs"}, "9.pbs"),
    ],
)
def test_run_id_order(variables: Variables, run_id: str) -> None:
    assert detect(variables).run_id == run_id


def test_ports_are_stable_spread_and_in_range() -> None:
    ports = {port_from_id(str(job)) for job in range(5000)}
    assert len(ports) > 4400  # an even spread would give 4490
    assert min(ports) >= 10_000 and max(ports) < 32_768
    assert port_from_id("20261120-161233-3f9a") == 25_164  # the same on every machine, forever


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # launcher, rank, local rank, world size, local world size, node rank, nodes, master, run id
        ("srun-step", ("slurm", 3, 1, 4, 2, 1, 2, "node1", "1")),
        ("one-per-node-step", ("slurm", 1, 0, 2, 1, 1, 2, "node1", "1.2")),
        ("sub-step", ("slurm", 0, 0, 1, 1, 0, 1, "node2", "1.1")),
        ("srun-pty-step", ("slurm", 0, 0, 4, 3, 0, 2, "node1", "4")),
        ("array-step", ("slurm", 1, 1, 2, 2, 0, 1, "node1", "5_5")),
        ("het-plain-step", ("slurm", 0, 0, 1, 1, 0, 1, "node1", "6")),
        ("het-group-0-step", ("slurm", 0, 0, 5, 1, 0, 3, "node1", "6.1")),
        ("het-group-1-step", ("slurm", 1, 0, 5, 2, 1, 3, "node1", "6.1")),
        ("het-reversed-step", ("slurm", 0, 0, 5, 1, 0, 3, "node3", "8")),
        ("requeued-batch-step", ("plain", 0, 0, 1, 1, 0, 1, "127.0.0.1", "11")),
        ("het-batch-step", ("plain", 0, 0, 1, 1, 0, 1, "127.0.0.1", "6")),
    ],
)
def test_place_in_a_real_slurm(name: str, expected: tuple[object, ...]) -> None:
    env = detect(captured(name, SLURM_TASK_PID=""))
    assert (*place(env)[:8], env.run_id) == expected


def test_a_shell_of_several_tasks_is_one_process_alone(shell: str) -> None:
    environ = captured("srun-pty-step", SLURM_TASK_PID=shell)
    assert (detect(environ).launcher, detect(environ).world_size) == ("plain", 1)
    assert slurm_node(environ) is None
    for task in (  # not the shell of srun --pty, but a command that it started on each node
        {"SLURM_TASK_PID": str(os.getpid())},
        {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"},
        {"SLURM_PTY_PORT": ""},
    ):
        assert detect({**environ, **task}).world_size == 4
        with pytest.raises(LauncherError, match="srun started 4 tasks on 2 nodes; give it --nta"):
            slurm_node({**environ, **task})


def test_master_of_a_step() -> None:
    step = captured("one-per-node-step")
    assert slurm_node(step) == (2, 1, "node1")
    assert slurm_node({**step, "MASTER_ADDR": "node1i"}) == (2, 1, "node1i")
    assert slurm_node({**step, "MASTER_ADDR": "node1i"}, master="node1j") == (2, 1, "node1j")
    alone = captured("sub-step", MASTER_ADDR="elsewhere")
    assert slurm_node(alone) == (1, 0, "node2")


def test_local_sizes_follow_the_groups_of_a_heterogeneous_job() -> None:
    there = captured("het-reversed-step")  # 1 task on node3, then 2 on node1 and 2 on node2
    older = {name: value for name, value in there.items() if "HET_GROUP" not in name}
    for environ in (there, older):
        second = {"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
        env = detect({**environ, **second})
        assert (env.local_world_size, env.master_addr) == (2, "node3")
        assert detect(environ).local_world_size == 1


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("batch-step", "job 1 has 4 tasks, but srun did not start this process"),
        ("array-batch-step", "job 5_5 has 2 tasks, but srun did not start this process"),
        ("salloc-interactive-step", "job 3 has 4 tasks, but srun did not start this process"),
        ("salloc-command", "job 2 has 4 tasks, but srun did not start this process"),
        ("arbitrary-step", "srun --distribution=arbitrary can put rank 0 on any node"),
    ],
)
def test_refused_in_a_real_slurm(name: str, cause: str) -> None:
    with pytest.raises(LauncherError, match=re.escape(cause)) as raised:
        detect(captured(name))
    assert raised.value.fault == ("batch-step" if "srun did not" in cause else "wrong-world")
    if name == "batch-step":  # only --nodes was requested
        with pytest.raises(LauncherError, match="job 1 has 2 tasks, but srun did not start this"):
            detect(without(BATCH, "SLURM_NTASKS"))


READ = "".join(inspect.getsource(one) for one in (environment, job))
NAMES = sorted({*TORCHRUN, *OPENMPI, *MVAPICH, *re.findall(r'"([A-Z]+_[A-Z_]+)"', READ)})
NAMES += ["SLURM_JOB_NODELIST_HET_GROUP_0"]
VALUES = [
    *("", "0", "1", "2", "-1", "1.5", "99999999999", "9" * 30, "4294967290", " 1", "1e3", "\u00b2"),
    *("node1", "node[1-2]", "node[1-999999999]", "n[1-3", "n[1-9][1-9][1-9][1-9][1-9][1-9][1-9]"),
    *("2(x2)", "2(x99999999)", "2(x999999999999)", "../../x", "a\nb", "\x1b[31m", "x" * 100_000),
    *("arbitrary", "latest", "none", "gloo"),
]


@given(
    st.sampled_from([BY_HAND, TORCHRUN, OPENMPI, INTEL, MVAPICH, CRAY, STEP, BATCH, {}]),
    st.sets(st.sampled_from(NAMES), max_size=5),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(), max_size=5),
)
def test_any_environment_gives_a_place_or_one_line(
    base: Variables, dropped: set[str], changed: Variables
) -> None:
    variables = {name: value for name, value in base.items() if name not in dropped} | changed
    try:
        env = detect(variables)
    except (LauncherError, HostlistError) as error:
        assert str(error).isprintable()
        assert len(str(error)) < 1000
    else:
        assert 0 <= env.local_rank < env.local_world_size <= env.world_size
        assert 0 <= env.rank < env.world_size and 0 <= env.node_rank < env.num_nodes
        assert re.fullmatch(r"[\w.\[\]-]{1,128}", env.run_id, re.ASCII)
