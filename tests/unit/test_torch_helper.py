"""The public helper, with real process groups over gloo between real processes."""

import dataclasses
import math
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agents import PATIENCE_S, ROOT, run_program
from ports import free_port
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import IterableDataset

from distributed import limits, rendezvous
from distributed import torch as helper
from distributed.environment import LauncherError, detect
from distributed.torch_internals import held_by_gloo, references

pytestmark = pytest.mark.slow  # real process groups take seconds each


def own_environment(**more: str) -> dict[str, Any]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


FORKSERVER = multiprocessing.get_context("forkserver")  # imports torch once for all ranks
FORKSERVER.set_forkserver_preload(["torch", "torch._dynamo"])


def run_ranks(
    function: Callable[..., object], *arguments: object, ranks: Sequence[int], world_size: int
) -> list[Any]:
    """Run function(*arguments) as each of these ranks, started as if by hand, without a launcher.

    Returns each rank's result, or its exception as text, in the order given.
    """
    variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    environment = own_environment(**variables, MASTER_PORT=str(free_port()))
    started = []
    for rank in ranks:
        mine = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        result, sending = FORKSERVER.Pipe(duplex=False)
        process = FORKSERVER.Process(target=_rank, args=(sending, mine, function, arguments))
        process.start()
        sending.close()
        started.append((process, result))
    try:
        return [
            result.recv() if result.poll(PATIENCE_S) else "still running" for _, result in started
        ]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _rank(
    sending: Any, environment: dict[str, str], function: Callable[..., object], arguments: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        sending.send(function(*arguments))
    except Exception as error:
        sending.send(f"{type(error).__name__}: {error}")
    sending.close()
    helper.finish()


def _join_late(late_s: float) -> tuple[float, float]:
    """Return when this rank had joined the process group, and when it knew that all had."""
    joined, join = [], dist.init_process_group

    def slow_join(*arguments: Any, **options: Any) -> None:
        join(*arguments, **options)
        time.sleep(late_s * dist.get_rank())
        joined.append(time.monotonic())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "init_process_group", slow_join)
        helper.init_distributed()
    return joined[0], time.monotonic()


def test_rank_0_does_not_leave_with_its_store_while_others_join() -> None:
    (_, told), (joined, _) = run_ranks(_join_late, 0.5, ranks=[0, 1], world_size=2)
    assert told >= joined


# --- several ranks ------------------------------------------------------------------------------


def _share() -> dict[str, Any]:
    env = helper.init_distributed()
    helper.seed_everything(7, env.rank)  # weights differ until all ranks get rank 0's
    frozen = nn.Linear(1, 1).requires_grad_(False)
    models: Any = helper.setup_distributed_models(frozen, nn.Linear(3, 1), None)
    teacher, model, _ = models
    student: Any = helper.unwrap(model)
    data: Any = range(9)
    loader = helper.get_dataloader_for_distributed(data, batch_size=2, shuffle=True, seed=3)
    with helper.no_sync(model):
        model(torch.full((1, 3), 5.0)).sum().backward()
    local = model.module.weight.grad.mean().item()
    model(torch.full((1, 3), float(env.rank))).sum().backward()
    found = {
        "place": (env.rank, helper.is_main_process()),
        "drawn": [int(number) for batch in loader for number in batch],
        "run id": env.run_id,
        "kinds": [type(one).__name__ for one in models],
        "weights": [one.weight.sum().item() for one in (student, teacher)],
        "gradients": (local, model.module.weight.grad.mean().item()),
        "uneven": helper.sync_metrics({"z": env.rank, "a": 1.5}, weight=env.rank + 1),
        "empty": helper.sync_metrics({"z": (4, math.nan)[env.rank]}, weight=(9, 0)[env.rank]),
    }
    helper.barrier()
    with pytest.raises(ValueError, match=r"^world_size is 3 but this run's is 2; "):
        helper.sync_metrics({}, 3)
    for _ in range(2):
        helper.cleanup_distributed()
    assert not dist.is_initialized()
    return found


def test_ranks_join_share_data_and_agree() -> None:
    found = run_ranks(_share, ranks=[0, 1], world_size=2)
    assert [one.pop("place") for one in found] == [(0, True), (1, False)]
    drawn = [number for one in found for number in one.pop("drawn")]
    assert {*drawn} == {*range(9)} and len(drawn) == 10
    first, other = found
    assert first == other  # the weights of both are rank 0's
    assert first["kinds"] == ["Linear", "DistributedDataParallel", "NoneType"]
    assert first["gradients"] == (5.0, 5.5)  # first its own 5, then the mean of 5 and 6
    assert (first["uneven"], first["empty"]) == ({"z": 2 / 3, "a": 1.5}, {"z": 4.0})


def _held_after_calls() -> int:
    """Count the tensors that a thread still holds after the call."""
    helper.init_distributed()
    held = 0
    for _ in range(200):
        tensor = torch.ones(1)
        with held_by_gloo(tensor):
            torch.distributed.all_reduce(tensor)
        held += references(tensor) - 1  # without the variable's
    return held


@pytest.mark.another_torch("train.py")
def test_no_thread_holds_a_tensor_after_the_call() -> None:
    """A thread takes the GIL to release a tensor; if the program exits just then, Python aborts."""
    assert run_ranks(_held_after_calls, ranks=[0, 1], world_size=2) == [0, 0]


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ValueError, match=r"Stream is an IterableDataset, .*; make its __iter__"):
        helper.get_dataloader_for_distributed(Stream(), 2, shuffle=False)


def _join(join_timeout_s: float) -> None:
    helper.init_distributed(join_timeout_s=join_timeout_s)


def test_missing_ranks_are_named_in_time() -> None:
    start = time.monotonic()
    (error,) = run_ranks(_join, 2.0, ranks=[0], world_size=2)
    assert re.match(
        r"TimeoutError: 1 of 2 ranks did not join .*: rank 1; .* \[node-missing\]$", error
    )
    assert "within 2 s" in error and 2 < time.monotonic() - start < PATIENCE_S
    first, other = run_ranks(_join, 20.0, ranks=[0, 2], world_size=4)
    assert "2 of 4 ranks did not join" in first and ": rank 1, 3; " in first
    assert other == first  # rank 0 serves its store until all ranks know


def test_missing_master_is_named_in_time_without_a_trace_of_torch() -> None:
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment = own_environment(MASTER_PORT=str(free_port()), **place)
    script = "from distributed import torch as helper; helper.init_distributed(join_timeout_s=2)"
    joining = run_program([sys.executable, "-c", script], ROOT, **environment)
    *_, error = joining.stderr.splitlines()
    message = r"TimeoutError: rank 1 on \S+ could not connect to 127.0.0.1:\d+ within 2 s; .*"
    assert re.fullmatch(message + r" \[node-missing\]", error)
    assert ".cpp:" not in joining.stderr


def test_rank_started_twice_stops_every_rank() -> None:
    errors = run_ranks(_join, 25.0, ranks=[0, 1, 1], world_size=3)
    message = r"LauncherError: rank 1 is used twice, on .* and on .*; .* \[duplicate-node-rank\]"
    assert re.fullmatch(message, errors[0])
    assert {*errors} == {errors[0]}


def test_gpu_used_twice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [dataclasses.replace(detect({}), rank=rank, world_size=3) for rank in range(3)]
    faults = []
    for env, uuid in zip(places, ("aa", "bb", "aa"), strict=True):  # works without a GPU
        gpu = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        faults.append(rendezvous._check_in(store, env, torch.device("cpu"), owns_gpu=True))
    assert faults[:2] == [None, None]
    assert faults[2] is not None
    assert faults[2][0] == "duplicate-gpu"
    message = r"GPU-aa is used twice, on \S+ \(rank 0, .*\) and on \S+ \(rank 2, .*\); .*"
    assert re.fullmatch(message, faults[2][1])


def _join_behind_a_service(address: str) -> int:
    if os.environ["RANK"] == "0":  # only the others' network leads from that address to rank 0
        os.environ["MASTER_ADDR"] = address
    return helper.init_distributed(join_timeout_s=PATIENCE_S).world_size


def test_rank_0_serves_behind_an_address_that_it_cannot_reach() -> None:
    joined = run_ranks(_join_behind_a_service, "240.0.0.1", ranks=[0, 1], world_size=2)
    assert joined == [2, 2]


def _join_at_a_taken_port() -> None:
    with socket.create_server(("", int(os.environ["MASTER_PORT"]))):
        helper.init_distributed(join_timeout_s=5)


@pytest.mark.another_torch("torchrun")
def test_taken_port_is_named() -> None:
    (error,) = run_ranks(_join_at_a_taken_port, ranks=[0], world_size=2)
    assert re.fullmatch(
        r"OSError: cannot listen on 127.0.0.1:\d+; give each process its own.* \[port-in-use\]",
        error,
    )


def _refused_strategies() -> list[str]:
    helper.init_distributed()
    refused = []
    for strategy in ("single", "dp", "fsdp", "ddp"):
        sharding = helper.Sharding(shard=3)
        try:
            helper.setup_distributed_models(nn.Linear(1, 1), strategy=strategy, sharding=sharding)
        except LauncherError as error:
            refused.append(str(error))
    return refused


def test_strategies_that_do_not_fit_the_ranks_are_refused() -> None:
    *alone, groups = run_ranks(_refused_strategies, ranks=[0, 1], world_size=2)[0]
    text = "strategy {} runs in one process but the launcher started 2; use strategy ddp"
    assert len(alone) == 2
    for strategy, error in zip(("single", "dp"), alone, strict=True):
        assert error.startswith(text.format(strategy)) and error.endswith(" [wrong-world]")
    told = "fsdp.shard: 2 ranks cannot be split into groups of 3; use all, or a divisor of 2"
    assert groups == f"{told} [wrong-world]"


def _leave_rank_0_alone_in_a_barrier() -> str:
    env = helper.init_distributed(timeout_s=10)
    store = torch.distributed.distributed_c10d._get_default_store()
    if env.rank == 1:
        store.wait(["rank 0 gave up"], timedelta(seconds=PATIENCE_S))
        return "stayed out"
    try:
        helper.barrier()
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("rank 0 gave up", "")
    return "passed"


def test_collective_gives_up_after_its_timeout() -> None:
    gave_up, _ = run_ranks(_leave_rank_0_alone_in_a_barrier, ranks=[0, 1], world_size=2)
    assert "Timed out waiting 10000ms" in gave_up


def _join_at_the_agents_store(port: str) -> str:
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=port)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    return helper.init_distributed(join_timeout_s=20).run_id


def test_ranks_use_the_agents_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("launch/0/gate", "of the attempt before")
    ids = run_ranks(_join_at_the_agents_store, str(store.port), ranks=[0, 1], world_size=2)
    assert ids[0] == ids[1] and re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", ids[0])


# --- alone --------------------------------------------------------------------------------------


def test_alone_everything_works_without_a_group() -> None:
    env = helper.init_distributed()
    assert env.world_size == 1 and helper.is_main_process()
    assert not torch.distributed.is_initialized()
    helper.barrier()
    assert helper.sync_metrics({"loss": 2.5}, weight=9) == {"loss": 2.5}
    assert math.isnan(helper.sync_metrics({"loss": 2.5}, weight=0)["loss"])  # as in a group
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a loss like that of a loop
        loss = torch.ones((), requires_grad=True) * 2
        assert helper.sync_metrics({"loss": loss}) == {"loss": 2.0}
    model = nn.Linear(2, 2)
    for strategy in ("auto", "single", "dp", "ddp", "fsdp"):
        wrapped = helper.setup_distributed_models(model, strategy=strategy)
        assert helper.unwrap(wrapped) is model
        with helper.no_sync(wrapped):
            wrapped(torch.ones(2, device=helper.device()))


@pytest.mark.parametrize("value", [None, "high", [1.0], torch.ones(2), 1j])
def test_a_metric_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^sync_metrics: recall is .*; pass a number, or a tensor"):
        helper.sync_metrics({"loss": 1.0, "recall": value})


def test_seeds_repeat_and_differ_by_rank() -> None:
    import random

    import numpy

    def draw(seed: int, rank: int) -> tuple[float, float, float]:
        helper.seed_everything(seed, rank)
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    assert draw(1, 0) == draw(1, 0)
    draws = [draw(seed, rank) for seed in range(4) for rank in range(4)]
    for kind in zip(*draws, strict=True):
        assert len(set(kind)) == 16


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="'ddpp' is unknown; use auto, single, dp, ddp, fsdp"):
        helper.setup_distributed_models(model, strategy="ddpp")
    with pytest.raises(ValueError, match="backend 'mpi' is unknown; use nccl, gloo or auto"):
        helper.init_distributed(backend="mpi")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^backend nccl needs a GPU but .* has none; use gloo$"):
        helper.init_distributed(backend="nccl")
    monkeypatch.setenv("BACKEND", "nccl")
    with pytest.raises(ValueError, match="needs a GPU"):
        helper.init_distributed(backend="auto")
    helper.init_distributed(backend="gloo")  # the argument takes precedence


# --- the end ---------------------------------------------------------------------------


def finish_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    code = "from distributed.exit import *\n" + textwrap.dedent(code)
    return run_program([sys.executable, "-c", code], folder, **own_environment())


def test_finish_flushes_runs_exit_handlers_and_gives_its_code(tmp_path: Path) -> None:
    done = finish_in(
        tmp_path,
        """
        import logging.handlers, pathlib, threading, time
        file = logging.handlers.MemoryHandler(99, target=logging.FileHandler("kept.log"))
        logging.getLogger().addHandler(file)
        atexit.register(print, "and last this", end="")
        atexit.register(print, "then this", end=", ")
        atexit.register(lambda: 1 / 0)
        def work():
            time.sleep(0.3)
            print("the thread's end", end=", ")
        threading.Thread(target=work).start()
        logging.warning("last words")
        print("printed", end=", ")
        finish(7)
        """,
    )
    assert done.returncode == 7
    assert done.stdout == "printed, the thread's end, then this, and last this"
    assert "ZeroDivisionError" in done.stderr
    assert (tmp_path / "kept.log").read_text() == "last words\n"


def test_finish_does_not_wait_5_s_for_each_data_worker(tmp_path: Path) -> None:
    code = """
    import atexit
    from distributed import torch as helper
    kind = helper.torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    atexit.register(print, "bye")
    if not hasattr(kind, "_clean_up_worker"):
        helper.skip_worker_joins()
        kind._clean_up_worker = lambda: print("joined")  # as in older versions of torch
    atexit.register(kind._clean_up_worker)
    helper.finish(7)
    """
    done = run_program([sys.executable, "-c", textwrap.dedent(code)], **own_environment())
    assert (done.returncode, done.stdout) == (7, "bye\n")


def test_exit_handlers_have_a_limit(tmp_path: Path) -> None:
    done = finish_in(
        tmp_path,
        """
        import distributed.exit, threading, time
        distributed.limits.EXIT_S = 0.5
        print(time.monotonic(), end="")
        atexit.register(threading.Event().wait)
        finish(3)
        """,
    )
    assert time.monotonic() - float(done.stdout) < limits.EXIT_S
    assert done.returncode == 3
    assert "threads or exit handlers are still running after 0.5 s; exiting anyway" in done.stderr


@pytest.mark.another_torch("train.py")  # and with another Python
def test_finish_can_be_an_exit_handler(tmp_path: Path) -> None:
    code = 'atexit.register(print, "once")\natexit.register(finish, 2)\nsys.exit(4)'
    done = finish_in(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (2, "once\n", "")


# --- under launchers that are not ours ------------------------------------------------------------


PYTHON = [sys.executable, "-m"]
OPTIONS = ["--no-python", "--nproc-per-node=3", f"--master-port={free_port()}"]
LAUNCHERS = {
    "torchrun": [*PYTHON, "torch.distributed.run", *OPTIONS],
    "launch": [*PYTHON, "torch.distributed.launch", "--use-env", *OPTIONS],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3"],
}
# Rank 2 of three exits before it joins, or gets rank 1's number.
WRONG = """
own=OMPI_COMM_WORLD_
[[ ${OMPI_COMM_WORLD_RANK:-} ]] || own=
declare -n rank=${own}RANK
if ((rank == 2)); then
  [[ $1 == twice ]] || exit 0
  export "${own}RANK=1" "${own}LOCAL_RANK=1"
fi
shift
exec "$@"
"""
SAID = {
    "missing": r"1 of 3 ranks did not join at \S+ within 10 s: rank 2; .* \[node-missing\]",
    "twice": r"rank 1 is used twice, on .* \[duplicate-node-rank\]",
}


@pytest.mark.long
@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_that_joins_says_the_same_line(
    tmp_path: Path, launcher: str, fault: str
) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    train = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "config/local3.yaml")]
    train += ["train.max_steps=2", "model.layers=1", "distributed.join_timeout=10"]
    command = [*LAUNCHERS[launcher], "bash", "-c", WRONG, "bash", fault, *train]
    done = run_program(command, tmp_path, OMP_NUM_THREADS="1")
    lines = re.findall(r"^train\.py: .*", done.stderr, re.MULTILINE)
    assert len(lines) == (2 if fault == "missing" else 3) and len({*lines}) == 1, done.stderr
    assert re.fullmatch(f"train\\.py: {SAID[fault]}", lines[0])
    assert "Traceback" not in done.stderr.partition("torch/distributed")[0]
    codes = re.findall(r"exitcode +: (\d+) ", done.stderr)  # torchrun's own exit code is 1
    assert codes or launcher == "mpirun"
    assert {*(codes or [str(done.returncode)])} == {"2"}, done.stderr
