"""train.py, run for real: its command line, its runs by launcher and strategy, its resuming."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import AGENT, PATIENCE_S, ROOT, execute, rarely, run_agent, run_program
from captured import captured
from launched import Work, hash_of, state_of
from ports import free_port
from torch import nn

from distributed.checkpoint import Saver, State, weights_hash
from distributed.environment import detect
from distributed.errors import STOPPED
from training.config_file import SettingsError
from training.model import follow_config
from training.optimizer import find_last_step, make_optimizer, share_of_peak
from training.resume import choose_batch_size, log_resume, resume_line
from training.settings import Train
from training.settings import load as load_config

pytestmark = pytest.mark.slow  # whole runs of train.py

TRAIN, LOCAL3 = str(ROOT / "train.py"), str(ROOT / "config/local3.yaml")
TINY = [
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "model.dropout=0.1",
    "train.max_steps=6", "train.batch_size=4", "train.warmup_steps=2", "train.log_every=2",
    "train.eval_every=3", "checkpoint.every=3",
]  # fmt: skip


def run(
    folder: Path, *arguments: object, program: object = TRAIN, processes: int = 1, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run train.py or another program to its end; several processes run under an agent."""
    command = [*AGENT, f"--nproc-per-node={processes}"] if processes > 1 else [sys.executable]
    return execute(folder, *command, program, *arguments, **{"OMP_NUM_THREADS": "1", **options})


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run train.py with an `import torch` that fails."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('train.py', {}, '__main__')"
    )
    return run_program([sys.executable, "-c", code, *arguments], ROOT, **variables)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text whose path has special characters."""
    folder = tmp_path_factory.mktemp("a b 'c' \"d\" $HOME ü")
    for n in range(40):
        (folder / f"{n}.txt").write_text(f"the text of file number {n}\n" * 10)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A folder in which two processes trained to the end, as the run `first`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "stdout").write_text(run_tiny(folder, text, "first").stdout)
    return folder


def run_tiny(
    folder: Path, text: Path, run_id: str, *more: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    words = ["--config", LOCAL3, f"data.path={text}", *TINY, *more]
    return run(folder, *words, **{"processes": 2, "RUN_ID": run_id, **options})


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        ["--config", "config/local3.yaml"],
        ["--config_path", "config/local3.yaml"],
        ["--config-path", "config", "--config-name", "local3"],
        ["--config-path=config", "--config-name=local3.yaml"],
    ],
)
def test_check_prints_one_line_without_torch(config: list[str]) -> None:
    done = check(*config, "--check")
    assert (done.returncode, done.stderr) == (0, "")
    file = "config/local3.yaml"
    assert done.stdout == f"ok: {file}, task language_model, 1 process x 32 samples\n"


def test_check_knows_the_number_of_processes_from_a_launcher() -> None:
    def told(*settings: str, world_size: str = "2") -> str:
        done = check("--config", LOCAL3, "--check", *settings, WORLD_SIZE=world_size)
        return done.stdout or done.stderr

    assert told().endswith(", 2 processes x 16 samples\n")
    assert told(world_size="3").endswith(", 3 processes x 11 samples\n")
    assert "strategy dp runs in one process" in told("distributed.strategy=dp")
    groups = ("distributed.strategy=fsdp", "distributed.fsdp.shard=3")
    assert "2 ranks cannot be split into groups of 3" in told(*groups)
    assert told(*groups, world_size="3").startswith("ok: ")


def test_check_tells_launchers_in_json() -> None:
    words = ("--config", LOCAL3, "--check", "--json", "distributed.join_timeout=20")
    done = check(*words, "--distributed-backend", "gloo", "checkpoint.dir=a b$c\nd")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "backend": "gloo",
        "join_timeout_s": 20,
        "checkpoint_dir": "a b$c\nd",
        "task_file": "",
        "prepare": "",
        "resume": "auto",
        "num_workers": 0,
        "batch": {"samples": 0, "samples_in_all": 32, "accumulation": 1},
    }
    assert done.stdout.count("\n") == 1


def test_the_home_folder_is_meant_by_its_sign() -> None:
    """Otherwise a folder named ~ would be created, which is dangerous to remove."""
    words = ("--config", LOCAL3, "--check", "--json", "checkpoint.dir=~/kept")
    assert json.loads(check(*words, HOME="/home/me").stdout)["checkpoint_dir"] == "/home/me/kept"
    done = check("--config", LOCAL3, "--check", "data.path=~nobody-here/text")
    assert done.returncode == 2
    assert "data.path: there is no folder or file ~nobody-here/text" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --config/--config_path --config-path is required"),
        (["--config", LOCAL3, "train.batchsize=2"], "did you mean train.batch_size?"),
        (["--config", LOCAL3, "--chekc"], "unrecognized arguments: --chekc"),
        (["--config-path", "config"], "--config-path DIR and --config-name NAME go together"),
        (["--config", LOCAL3, "--log-level", "loud"], "log level LOUD is not one of DEBUG, INFO"),
        (["--config", LOCAL3, "--distributed-backend", "mpi"], "invalid choice: 'mpi'"),
        (
            ["--config", LOCAL3, "--check", "data.path=/nope"],
            "data.path: there is no folder or file /nope",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not done.stdout


def test_a_mistake_of_one_rank_is_one_line(tmp_path: Path, text: Path) -> None:
    """Each rank starts in its own folder; only rank 0's holds the data."""
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    (tmp_path / "0/text").symlink_to(text)
    command = [sys.executable, TRAIN, "--config", LOCAL3, *TINY, "data.path=text"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path / rank,
            env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    mistake = "rank 1: data.path: there is no folder or file text; correct it"
    assert said == [f"train.py: {mistake} [config-invalid]\n", ""]


def test_a_changed_weight_decay_is_that_of_the_settings_after_a_resume() -> None:
    before, now = (Train(batch_size=1, max_steps=1, weight_decay=one) for one in (0.1, 0.05))
    model = nn.Linear(2, 2)
    moments = make_optimizer(model, before).state_dict()
    for group in moments["param_groups"]:
        group.pop("follows_config", None)  # as in an older checkpoint
    optimizer = make_optimizer(model, now)
    with follow_config(optimizer, now, before.as_tree()):
        optimizer.load_state_dict(moments)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0]


# --- whole runs ---------------------------------------------------------------------------------


def test_a_run_ends_with_all_it_promises(trained: Path) -> None:
    folder = trained / "logs/first"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trains = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in trains] == [1, 2, 4, 6]
    assert [line["step"] for line in validations] == [3, 6]
    names = {"step", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_second", "time"}
    assert set(trains[0]) == names | {"data_wait", "peak_memory_gb"}
    assert (folder / "loss.png").exists()
    assert len(list((trained / "logs/tensorboard/first").iterdir())) == 1
    saved = ["best", "latest", "lock", "step-3", "step-6"]
    assert sorted(os.listdir(trained / "checkpoints/first")) == saved
    stdout = (trained / "stdout").read_text()
    assert re.search(r"^step 6/6  loss ", stdout, re.M)
    result = stdout[stdout.index("\ndone ") :]
    labels = [line.split()[0] for line in result.splitlines() if line[:1].strip()]
    assert labels == ["done", "validation", "sample", "checkpoint", "logs", "resume"]
    assert "order-0 entropy" in stdout
    assert "RUN_ID=first torchrun --nproc-per-node=2 " in stdout


@pytest.mark.parametrize("umask", [0o077, *rarely(0o002)])
def test_the_users_umask_decides_who_can_read_a_run(tmp_path: Path, text: Path, umask: int) -> None:
    command = [*AGENT, "--nproc-per-node=1", "--log-dir=logs", TRAIN, "--config", LOCAL3]
    environ = {**os.environ, "RUN_ID": "shared", "OMP_NUM_THREADS": "1"}
    words = [*command, f"data.path={text}", *TINY]
    subprocess.run(words, cwd=tmp_path, env=environ, umask=umask, check=True)
    found = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert {"lock", "model.pt", "metrics.jsonl", "node_0.log", "run.json"} <= {
        path.name for path in found
    }
    for path in found:
        mode = (0o777 if path.is_dir() else 0o666) & ~umask
        assert path.stat().st_mode & 0o777 == mode, path


# Makes a CPU behave like a GPU: normally, it computes in float32 whatever the config says.
MIXED = """
import sys
import train
import training.model
from training.arguments import read_command_line
training.model.is_mixed = lambda settings: True
train.helper.finish(train.train(*read_command_line("")))
"""


def train_mixed(
    folder: Path, text: Path, dtype: str, *settings: str, program: str = MIXED, **options: Any
) -> tuple[str, State]:
    """Train as on a GPU; returns the output and the saved state."""
    (folder / "mixed.py").write_text(program)
    precision = f"distributed.mixed_precision.dtype={dtype}"
    options = {"program": "mixed.py", "processes": 1, "PYTHONPATH": str(ROOT), **options}
    run_id = options.setdefault("RUN_ID", "one")
    done = run_tiny(folder, text, run_id, precision, *settings, **options)
    return done.stdout, state_of(folder / "checkpoints" / run_id)


def scaler_of(state: State) -> dict[str, Any]:
    """Return the state of rank 0's loss scaler."""
    return dict(state.ranks[0]["objects"]["scaler"])


@pytest.mark.long
def test_float16_scales_the_loss_and_resumes_with_the_same_bytes(
    tmp_path: Path, text: Path
) -> None:
    def end(run_id: str, *settings: str) -> tuple[str, Any]:
        _, state = train_mixed(tmp_path, text, "float16", *settings, RUN_ID=run_id)
        return weights_hash(state.model), scaler_of(state)

    weights, scaler = end("whole")
    assert scaler["scale"] >= 1024 and scaler["_growth_tracker"] > 0
    end("parts", "train.max_steps=3")
    assert end("parts", "train.max_steps=6") == (weights, scaler)


@pytest.mark.parametrize("strategy", [*rarely("ddp"), "fsdp"])
def test_a_run_saved_without_a_scaler_resumes_with_float16(
    tmp_path: Path, text: Path, strategy: str
) -> None:
    words = f"distributed.strategy={strategy}", "train.max_steps=3"
    _, state = train_mixed(tmp_path, text, "bfloat16", *words, processes=2)
    assert scaler_of(state) == {}
    _, state = train_mixed(tmp_path, text, "float16", words[0], processes=2)
    assert scaler_of(state)["scale"] >= 1024


def test_mixed_precision_on_a_cpu_is_said_not_to_be(tmp_path: Path, text: Path) -> None:
    words = ["distributed.mixed_precision.enabled=true", "train.max_steps=1"]
    done = run_tiny(tmp_path, text, "mixed", *words)
    line = "precision  float32: mixed precision needs a GPU\n"
    assert done.stderr.count(line) == (0 if torch.cuda.is_available() else 1)


def test_skipped_steps_are_told_once_at_the_end(tmp_path: Path, text: Path) -> None:
    """The scaler begins with a factor that makes float16 overflow."""
    program = MIXED.replace(
        "train.helper.finish(",
        "make = train.helper.grad_scaler\n"
        "train.helper.grad_scaler = lambda dtype: make(dtype, init_scale=2.0**40)\n"
        "train.helper.finish(",
    )
    told, _ = train_mixed(tmp_path, text, "float16", "train.max_steps=40", program=program)
    found = re.findall(r"^skipped    (\d+) steps, because their gradients", told, re.M)
    assert len(found) == 1 and 1 < int(found[0]) < 40


def test_the_settings_are_kept_and_a_resume_with_others_names_them(
    trained: Path, text: Path
) -> None:
    shutil.copytree(trained / "checkpoints/first", trained / "checkpoints/longer", symlinks=True)
    more = ("train.max_steps=8", "train.learning_rate=1e-3", "resume=never", "resume=auto")
    done = run_tiny(trained, text, "longer", *more, "train.batch_size=8", processes=1)
    assert "resumed    after step 6\nmodel " in done.stdout
    assert re.findall("^resumed .*", done.stderr, re.M) == [
        "resumed    with train.max_steps 8 (was 6)",
        "resumed    with train.batch_size 8 (was 4)",
        "resumed    with train.learning_rate 0.001 (was 0.003)",
        "resumed    with 1 process (was 2): sums are rounded differently",
    ]
    kept = trained / "logs/longer/config.yaml"
    first, longer = (
        load_config(trained / f"logs/{name}/config.yaml") for name in ("first", "longer")
    )
    assert (first.train.max_steps, longer.train.max_steps) == (6, 8)
    before = hash_of(trained / "checkpoints/longer")
    words = ("--config", kept, "train.max_steps=8")
    again = run(trained, *words, RUN_ID="longer", LAUNCH_COMMAND="launch 'a b'")
    assert "resumed    after step 8\nmodel " in again.stdout
    assert (
        "\ndone       step 8: an earlier start has completed the run; "
        "to train on, raise train.max_steps or train.epochs\n" in again.stdout
    )
    assert "resume     RUN_ID=longer launch 'a b'\n" in again.stdout
    assert hash_of(trained / "checkpoints/longer") == before


def test_the_resume_line_without_a_launcher_or_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "a=1", "resume=never"])
    environment = detect({"RUN_ID": "r1"})
    assert resume_line(environment, None) == "resume     RUN_ID=r1 python train.py a=1"
    assert resume_line(environment, "") == ""  # the launcher knows no correct command


TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
}
ONE_NODE = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        (captured("one-per-node-step"), "srun --nodes=2 --ntasks=2 python"),
        (TORCHRUN, "torchrun --nproc-per-node=4 --nnodes=2 --node-rank=1 --master-addr=n1"),
        (TORCHRUN | ONE_NODE, "torchrun --nproc-per-node=4"),
    ],
)
def test_the_resume_line_starts_as_many_ranks_as_the_launcher_did(
    environ: dict[str, str], start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "a=1"])
    line = resume_line(detect({**environ, "RUN_ID": "r1"}), None)
    assert line == f"resume     RUN_ID=r1 {start} train.py a=1"


def test_resume_never_and_resume_from_a_path(trained: Path, text: Path) -> None:
    refused = run_tiny(trained, text, "first", "resume=never", processes=1, code=2)
    assert refused.stderr.startswith("train.py: resume: never, but checkpoints/first")
    path = "resume=checkpoints/first/step-3"
    run_tiny(trained, text, "branch", path)
    assert hash_of(trained / "checkpoints/branch") == hash_of(trained / "checkpoints/first")
    missing = run_tiny(trained, text, "nothing", "resume=checkpoints/no", processes=1, code=2)
    told = "resume: checkpoints/no holds no checkpoint; correct the path"
    assert missing.stderr == f"train.py: {told} [config-invalid]\n"
    saver = Saver(trained / "own/run", keep_last=1)  # as another script does
    saver.save(1, State({}, {}, {"step": 1}, [{}]))
    saver.wait()
    another = run_tiny(trained, text, "third", "resume=own/run", processes=1, code=2)
    assert "train.py: resume: the checkpoint is another script's; " in another.stderr


def test_files_in_the_runs_folder_save_and_stop(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "logs/by-hand"
    folder.mkdir(parents=True)
    (folder / "save").touch()
    never = ("checkpoint.every=0", "checkpoint.every_minutes=0", "train.eval_every=0")
    run_tiny(tmp_path, text, "by-hand", *never, "train.max_steps=3", processes=1)
    saved = {path.name for path in (tmp_path / "checkpoints/by-hand").glob("step-*")}
    assert saved == {"step-1", "step-3"}
    for name in ("save", "stop"):
        (folder / name).touch()
    longer = (*never, "train.max_steps=9")
    done = run_tiny(tmp_path, text, "by-hand", *longer, processes=1, code=STOPPED)
    assert "stopped    after step 4, which is saved (the stop file)" in done.stdout
    assert not {"save", "stop"} & {path.name for path in folder.iterdir()}


# --- parts --------------------------------------------------------------------------------------


def make_train(**changes: object) -> Train:
    return Train(batch_size=1, max_seconds=1, **changes)  # type: ignore[arg-type]


def test_the_learning_rate_rises_falls_and_ends_at_nothing() -> None:
    settings = make_train(warmup_steps=4)
    rates = [share_of_peak(step, settings, 14) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.03
    assert share_of_peak(1000, settings, None) == 1.0


def test_the_first_limit_ends_the_run() -> None:
    assert find_last_step(make_train(), 10) is None
    assert find_last_step(make_train(epochs=3), 10) == 30
    assert find_last_step(make_train(epochs=3, grad_accumulation=4), 10) == 7
    assert find_last_step(make_train(epochs=3, max_steps=20), 10) == 20
    with pytest.raises(SettingsError, match="10 batches, too few for one step; lower train"):
        find_last_step(make_train(epochs=1, grad_accumulation=11), 10)


@pytest.mark.parametrize(
    ("config", "ranks", "before", "each"),
    [
        ({"global_batch_size": 32}, 3, None, 11),
        ({"global_batch_size": 32}, 3, (3, 33), 11),
        ({"global_batch_size": 32}, 2, (3, 33), 16),  # the config's value again
        ({"global_batch_size": 32}, 3, (2, 32), "32 samples are not divisible by 3"),
        ({"batch_size": 8}, 2, (4, 32), 16),
        ({"batch_size": 8}, 3, (4, 32), "32 samples are not divisible by 3"),
        ({"batch_size": 8}, 2, (2, 32), 16),  # the second start with 2 ranks
        ({"batch_size": 8}, 8, (8, 32), 4),
        ({"batch_size": 4}, 2, (4, 32), 4),  # a changed setting applies
        ({"batch_size": 8, "grad_accumulation": 2}, 2, (2, 32), 8),
    ],
)
def test_the_batch_of_a_run_that_is_resumed(
    config: dict[str, int], ranks: int, before: tuple[int, int] | None, each: int | str
) -> None:
    train = Train(max_steps=1, **config)  # type: ignore[arg-type]
    then = {"train": {"batch_size": 8, "grad_accumulation": 1}}
    count, samples = before or (0, 0)
    saved = State({}, {}, {"global_batch_size": samples, "settings": then}, [{}] * count)
    if isinstance(each, int):
        assert choose_batch_size(train, ranks, saved if before else None) == each
    else:
        with pytest.raises(SettingsError, match=each):
            choose_batch_size(train, ranks, saved if before else None)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ({}, []),  # an older checkpoint
        ({"sizes": [5]}, []),  # the training data had no length
        ({"sizes": [5, 64]}, ["resumed    with 67 training samples (was 64)"]),
        ({"sizes": [7, 67]}, ["resumed    with 5 validation samples (was 7)"]),
    ],
)
def test_data_that_has_changed_is_named_after_a_resume(
    caplog: pytest.LogCaptureFixture, before: dict[str, list[int]], told: list[str]
) -> None:
    now = {"step": 3, "settings": {}, "global_batch_size": 4, "sizes": [5, 67]}
    saved = State({}, {}, {"step": 3, "settings": {}, "global_batch_size": 4, **before}, [{}])
    log_resume(saved, now, 1)
    assert caplog.messages == told


# --- the same final weights with every entry point ------------------------------------------------


SHORT = ["train.max_steps=6", "train.eval_every=0", "checkpoint.every=3", "model.dropout=0.1"]
SHORT += ["model.layers=1", "model.context=32", "tracking=[]", f"data.path={ROOT}/distributed"]
LAUNCHERS = [
    "launch_torchrun_multinode.sh",
    pytest.param("torchrun", marks=[pytest.mark.another_torch("torchrun"), pytest.mark.long]),
    pytest.param(
        "torch.distributed.launch",
        marks=[pytest.mark.another_torch("torch.distributed.launch"), pytest.mark.long],
    ),
    *rarely("launch_singlenode.sh", "run_ddp.sh", "cluster_train.sh"),
]


def commands(launcher: str) -> list[list[str]]:
    """Return the command for each node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    by_launch = ["env", f"ENGINE={launcher}", *AGENT]
    port = str(free_port())
    train = ["--nproc-per-node=2", f"--master-port={port}", f"{ROOT}/train.py", "--config", LOCAL3]
    by_hand = [f"{ROOT}/scripts/ssh/launch_torchrun_multinode.sh", LOCAL3, "1", "2"]
    return {
        "launch_singlenode.sh": [[f"{ROOT}/scripts/ssh/launch_singlenode.sh", LOCAL3, "2"]],
        "run_ddp.sh": [[f"{ROOT}/scripts/run_ddp.sh", "-n", "2", "-c", LOCAL3]],
        "cluster_train.sh": [[f"{ROOT}/scripts/cluster_train.sh", LOCAL3]],
        "launch_torchrun_multinode.sh": [[*by_hand, rank, "127.0.0.1", port] for rank in "01"],
        "the agent": [[*AGENT, *train, "distributed.backend=gloo"]],
        "torchrun": [[*torchrun, *train]],
        "torch.distributed.launch": [[*by_launch, *train]],
    }[launcher]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights_of("the agent", tmp_path_factory.mktemp("reference"))


def weights_of(launcher: str, folder: Path) -> str:
    """Train for a few steps, and return the hash of the final weights."""
    run_id = f"same-{os.getpid()}"  # it determines the port, and other workers run too
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_ID": run_id, "BACKEND": "gloo"}
    environment |= {"LOG_DIR": f"{folder}/logs", "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    settings = [*SHORT, f"checkpoint.dir={folder}/checkpoints"]
    nodes = [
        subprocess.Popen([*command, *settings], env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands(launcher)
    ]
    for node in nodes:
        _, err = node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 0, err
    return hash_of(folder / "checkpoints" / run_id)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_weights_from_every_launcher(
    launcher: str, reference: str, tmp_path: Path
) -> None:
    assert weights_of(launcher, tmp_path) == reference


# --- fsdp, ddp and single train the same model ----------------------------------------------------


STEPS = 50
WORDS = [
    *("model.layers=2", "model.width=32", "model.heads=2", "model.context=16"),
    *("train.global_batch_size=8", "train.warmup_steps=2", "train.eval_every=25"),
    *("train.log_every=1", f"train.max_steps={STEPS}", "checkpoint.every=0"),
]
REFERENCE = f"single-{os.getpid()}"  # each pytest worker needs its own port
FSDP = pytest.mark.another_torch("FSDP")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Work:
    folder = tmp_path_factory.mktemp("strategies")
    work = Work(folder, LOCAL3, f"data.path={text}", *WORDS)
    work.run(REFERENCE, 1)
    return work


def assert_same(work: Work, run_id: str) -> None:
    mine, theirs = (work.metrics(one, "loss") for one in (run_id, REFERENCE))
    assert mine.keys() == theirs.keys() and len(mine) == STEPS
    assert [*mine.values()] == pytest.approx([*theirs.values()], rel=2e-5)
    weights = work.weights(REFERENCE)
    for name, tensor in work.weights(run_id).items():
        assert tensor.shape == weights[name].shape
        assert torch.allclose(tensor, weights[name], atol=2e-4), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("nproc", "settings"),
    [
        (2, "strategy=ddp"),
        (2, "strategy=ddp static_graph=true bucket_cap_mb=0.01"),
        (2, "strategy=fsdp"),
        (4, "strategy=fsdp"),
        (2, "strategy=fsdp fsdp.reshard_after_forward=false"),
        (2, "strategy=fsdp fsdp.shard=node train.grad_accumulation=2"),
        pytest.param(4, "strategy=fsdp fsdp.shard=2 train.grad_accumulation=2", marks=FSDP),
        (2, "strategy=fsdp train.activation_checkpointing=full"),
        (2, "strategy=ddp train.activation_checkpointing=2"),
        (2, "strategy=ddp train.compile=true"),
        (2, "strategy=fsdp train.compile=true train.activation_checkpointing=full"),
    ],
)
def test_losses_and_weights_are_those_of_one_process(work: Work, nproc: int, settings: str) -> None:
    words = [word if "train." in word else f"distributed.{word}" for word in settings.split()]
    run_id = settings.replace(" ", "-").replace("=", "_") + str(nproc)
    work.run(run_id, nproc, *words)
    assert_same(work, run_id)
    if "compile" in settings:
        assert list((work.folder / "checkpoints" / run_id / "compiled").iterdir())


STOPPING = """
import os, signal
from dataclasses import replace
from training.settings import LanguageModel
from training.tasks.language_model import LanguageModelTask

class Stopping(LanguageModelTask):
    calls = 0

    def __init__(self, settings):
        shape = LanguageModel(**settings.model)
        super().__init__(replace(settings, model=shape))

    def loss(self, model, batch):
        self.calls += model.training
        if self.calls == 12:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().loss(model, batch)
"""


# Ranks, strategy, last step.
MOVES = ((4, "fsdp", 12), (2, "ddp", 24), (1, "single", 36), (2, "fsdp", STEPS))


@pytest.mark.parametrize(
    ("written", "moves"),
    [
        pytest.param("sharded", [(2, "fsdp", 12), (1, "fsdp", STEPS)], marks=FSDP),
        *rarely(("sharded", MOVES), ("full", MOVES)),
    ],
)
def test_a_run_moves_between_strategies(
    work: Work, written: str, moves: Sequence[tuple[int, str, int]]
) -> None:
    (work.folder / "stopping.py").write_text(STOPPING)
    chosen = f"checkpoint.format={written}"
    run_id = f"{written}-{len(moves)}"
    for nproc, strategy, last in moves[:-1]:
        words = (f"distributed.strategy={strategy}", "task=stopping:Stopping", chosen)
        told = work.run(run_id, nproc, *words, code=75)
        assert f"stopped    after step {last}," in told
        parts = [*(work.folder / f"checkpoints/{run_id}/step-{last}").glob("*.distcp")]
        assert len(parts) == (nproc if written == "sharded" else 0)
    nproc, strategy, _ = moves[-1]
    work.run(run_id, nproc, f"distributed.strategy={strategy}", chosen)
    assert_same(work, run_id)


@pytest.mark.parametrize("strategy", ["ddp", *rarely("fsdp")])
def test_between_two_log_lines_no_step_waits_for_the_device(tmp_path: Path, strategy: str) -> None:
    """Check each step of a run."""
    words = ["--config", LOCAL3, *WORDS, f"distributed.strategy={strategy}"]
    words += ["train.log_every=3", "train.max_steps=8", "train.grad_accumulation=2"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = ["--nproc-per-node=2", "--log-dir=logs", ROOT / "bench/waits.py"]
    done = run_agent(*options, *words, folder=tmp_path, **own)
    assert done.returncode == 0 and "waits      none" in done.stdout + done.stderr, done
