"""Nothing is lost: runs that are stopped, killed, hung or out of disk space continue; examples/."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import AGENT, GLOO_SAYS, PATIENCE_S, ROOT, execute, rarely, written
from launched import hash_of, state_of
from recovery import SHARDED, STOPS, Job, Outcome, draw_kills

pytestmark = pytest.mark.slow

NOT_FINITE = "a weight is not finite after step 10"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def whole(job: Job) -> Outcome:
    """The result of two ranks that are not interrupted."""
    return job.finish("whole", 2)


def test_a_run_that_is_never_stopped_records_each_step_once(whole: Outcome) -> None:
    trained = [step for step, loss, _ in whole.metrics if loss is not None]
    validated = [step for step, _, loss in whole.metrics if loss is not None]
    assert trained == [1, *range(7, 60, 7), 60]
    assert validated == [20, 40, 60]


@pytest.mark.parametrize(
    ("nproc", "workers", "stops"),
    [
        pytest.param(2, 0, 1, marks=pytest.mark.another_torch("train.py")),
        pytest.param(2, 2, 1, marks=[pytest.mark.another_torch("train.py"), pytest.mark.long]),
        pytest.param(2, 2, 3, marks=pytest.mark.long),
        pytest.param(1, 2, 5, marks=pytest.mark.long),
        pytest.param(4, 0, 2, marks=pytest.mark.long),
    ],
)
def test_stopped_and_resumed_it_ends_with_the_same_bytes(
    job: Job, whole: Outcome, nproc: int, workers: int, stops: int
) -> None:
    settings = [f"data.num_workers={workers}"]
    name = f"{nproc}-{workers}-{stops}"
    is_whole = (nproc, workers) == (2, 0)
    never = whole if is_whole else job.finish(f"never-{name}", nproc, *settings)
    draw = random.Random(stops)
    faults = [f"{draw.choice(STOPS)} {draw.randrange(nproc)} {draw.randrange(1, 20)}"] * stops
    assert job.stop_and_finish(f"often-{name}", nproc, settings, faults) == never


@pytest.mark.parametrize(("format", "times"), [("sharded", 1), *rarely(("full", 12))])
def test_killed_while_saving_it_ends_with_the_same_bytes(job: Job, format: str, times: int) -> None:
    kills = draw_kills(random.Random(1), times, format)
    longer = ["train.max_steps=120", *(SHARDED if format == "sharded" else ())]
    never = job.finish(f"long-{format}", 2, *longer)
    (job.folder / "killed").unlink(missing_ok=True)
    assert job.kill_and_finish(f"killed-{format}", 2, longer, kills) == never
    assert len((job.folder / "killed").read_text().split()) == times


@pytest.mark.another_torch("train.py")
def test_a_signal_to_the_launcher_saves_and_leaves_with_75(job: Job, whole: Outcome) -> None:
    process = job.start("signalled", 2, FAULT="sleep 0 1000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("data"):
            break
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=PATIENCE_S)[0]
    if process.returncode != 0:  # it had not finished by then
        assert process.returncode == 75
        assert re.search(r"^stopped    after step \d+, which is saved \(SIGTERM\)$", output, re.M)
        assert "stopped  by SIGTERM after saving a checkpoint (code 75); nothing is left" in output
    assert job.finish("signalled", 2) == whole


def test_with_another_number_of_ranks_it_sees_each_sample_once(job: Job) -> None:
    alone, moved = job.folder / "alone.seen", job.folder / "moved.seen"
    code, _ = job.run("alone", 1, SEEN=str(alone))
    assert code == 0
    code, _ = job.run("moved", 1, FAULT="SIGTERM 0 25", SEEN=str(moved))
    assert code == 75
    code, output = job.run("moved", 2, SEEN=str(moved))
    assert code == 0
    assert "with 2 processes (was 1): sums are rounded differently" in output
    assert sorted(moved.read_text().split()) == sorted(alone.read_text().split())
    steps = [step for step, _, _ in job.outcome("moved").metrics]
    assert steps == [step for step, _, _ in job.outcome("alone").metrics]


def test_what_no_longer_fits_is_one_line(job: Job, whole: Outcome) -> None:
    shutil.copytree(job.folder / "checkpoints/whole", job.folder / "checkpoints/other")
    code, output = job.run("other", 3)
    assert code == 2
    cause = "the run's 16 samples are not divisible by 6 (ranks x grad_accumulation)"
    cause += "; resume it with a different number of processes"
    assert f"train.py: resume: {cause}" in output
    told = f"[config-invalid]\ncause    resume: {cause}\ncode     2\n"
    assert told in output  # without frames
    task = (job.folder / "noisy.py").read_text()
    (job.folder / "wide.py").write_text(task.replace("16", "32"))
    code, output = job.run("other", 2, "task=wide:Noisily")
    assert code == 2
    assert (
        "train.py: the checkpoint is from a different model, " in output
        and "size mismatch" in output
    )


def test_sharded_checkpoints_in_a_folder_that_is_not_shared_are_refused_at_the_start(
    job: Job,
) -> None:
    apart = written(
        job.folder / "apart.py",
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.chdir('elsewhere')\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n",
    )
    (job.folder / "elsewhere").mkdir()
    for name in ("job.yaml", "noisy.py"):
        (job.folder / "elsewhere" / name).symlink_to(job.folder / name)
    code, output = job.run("apart", 2, *SHARDED, script=apart)
    assert code == 2
    assert "rank 1: checkpoints/apart does not exist on " in output
    assert "[dir-not-shared]" in output and "step 1/" not in output


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("sleep", marks=pytest.mark.another_torch("hang")),
        pytest.param("SIGSTOP", marks=pytest.mark.long),
    ],
)
def test_a_stuck_rank_is_named_with_its_stack(job: Job, fault: str) -> None:
    limit = "distributed.hang_seconds=20"
    code, output = job.run(f"stuck-{fault}", 2, limit, FAULT=f"{fault} 1 9")
    assert code == 137
    block = output[output.index("FAILED") :]
    assert re.match(r"FAILED   rank 1 \(.*, at step 4 +\[rank-stuck\]\n", block)
    state = ", and its process is stopped (SIGSTOP)" if fault == "SIGSTOP" else ""
    cause = rf"^cause    no progress reported for \d+ s{re.escape(state)}; the limit, .*, is 20 s$"
    assert re.search(cause, block, re.M)
    assert re.search(r"^         noisy.py:\d+ in loss$", block, re.M)
    assert re.search(r"^stacks   rank 0: .*train.py:\d+ in train", block, re.M)
    assert re.search(r"^stacks   rank 1: noisy.py:\d+ in loss < ", block, re.M)
    assert "nothing is left running" in block


@pytest.mark.parametrize(
    ("fault", "setting", "rank", "cause", "saved"),
    [  # in step 14, the second half of its batch; at the save of step 10
        ("nan 1 27", "", 1, r"the loss at step 14 is nan on rank 1, for samples (\d+, ){7}\d+", 10),
        ("nan-gradient 1 20", "train.clip_norm=null", 0, NOT_FINITE, 5),
        *rarely(
            ("nan-gradient 1 20", "", 0, NOT_FINITE, 5),
            ("nan-gradient 1 20", "distributed.strategy=fsdp", 0, NOT_FINITE, 5),
        ),
    ],
)
def test_a_loss_or_a_weight_that_is_no_number_stops_the_run(
    job: Job, fault: str, setting: str, rank: int, cause: str, saved: int
) -> None:
    name = f"{fault.split()[0]}-{len(setting)}"
    code, output = job.run(name, 2, *setting.split(), FAULT=fault)
    assert code == 1
    block = output[output.index("FAILED") :]
    head = rf"FAILED   rank {rank} \(local rank {rank}, \S+\) .*\[loss-not-finite\]\n"
    assert re.match(head, block)
    assert re.search(f"{cause}; try a", block)
    state = state_of(job.folder / "checkpoints" / name)
    assert state.progress["step"] == saved
    assert all(tensor.isfinite().all() for tensor in state.model.values())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_run_by_name(job: Job, small_disk: Path) -> None:
    code, output = job.run("full", 2, f"checkpoint.dir={small_disk}", "checkpoint.keep_last=50")
    assert code == 1
    block = output[output.index("FAILED") :]
    assert re.match(r"FAILED   rank 0 .*\[disk-full\]\n", block)
    saved = re.search(r"CheckpointError: step (\d+) was not saved", block)
    assert saved is not None
    assert state_of(small_disk / "full").progress["step"] == int(saved[1]) - 5


# --- the programs of examples/ run, stop and resume as their docstrings say -----------------------


LAUNCH = ROOT / "scripts/ssh/launch_singlenode.sh"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# Only this pytest worker has these run ids, from which ports are derived.
WHOLE, STOPPED = (f"{name}-{os.getpid()}" for name in ("whole", "stopped"))


def run(folder: Path, *words: str, **variables: Any) -> str:
    return execute(folder, LAUNCH, *words, OMP_NUM_THREADS="1", **variables).stdout


def run_forked(folder: Path, run_id: str, *words: str) -> str:
    """Like run(), with two ranks and no config, but started by the agent itself."""
    command = [*AGENT, "--nproc-per-node=2", f"--rdzv-id={run_id}", *words]
    return execute(folder, *command, RUN_ID=run_id, OMP_NUM_THREADS="1").stdout


@pytest.mark.another_torch("launch")
def test_the_minimal_one_learns(tmp_path: Path) -> None:
    out = run(tmp_path, "-", "2", TRAIN_SCRIPT=str(ROOT / "examples/minimal_ddp.py"))
    losses = [float(loss) for loss in re.findall(r"^epoch \d  loss ([\d.]+)$", out, re.M)]
    assert len(losses) == 3 and losses[2] < losses[0] / 4


@pytest.mark.parametrize(("example", "steps"), [("resumable", 800), *rarely(("fsdp", 400))])
def test_a_stopped_one_ends_with_the_weights_of_an_uninterrupted_run(
    tmp_path: Path, example: str, steps: int
) -> None:
    script = str(ROOT / f"examples/{example}.py")
    run_forked(tmp_path, WHOLE, script, str(steps))
    variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [LAUNCH, "-", "2", "--", str(steps)],
        cwd=tmp_path,
        env={**os.environ, **variables, "TRAIN_SCRIPT": script, "RUN_ID": STOPPED},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout
        next(line for line in launcher.stdout if line.startswith("step 100 "))
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 75
    (saved,) = (tmp_path / "checkpoints" / STOPPED).glob("step-*")
    assert 100 <= int(saved.name[5:]) < steps
    out = run_forked(tmp_path, STOPPED, script, str(steps))
    assert "step 100 " not in out and f"step {steps} " in out
    assert hash_of(tmp_path / "checkpoints" / WHOLE) == hash_of(tmp_path / "checkpoints" / STOPPED)


# Rank 1 kills itself in the third epoch of a new run, perhaps while the second is being saved.
KILLED = """
    if epoch == 2 and env.rank == 1 and progress["step"] == 0:
        __import__("os").kill(__import__("os").getpid(), 9)
    model.eval()
"""


@pytest.mark.parametrize("strategy", ["fsdp", *rarely("ddp")])
def test_a_killed_one_ends_with_the_bytes_of_an_uninterrupted_run(
    tmp_path: Path, strategy: str
) -> None:
    """This holds under torchrun too."""
    text = (ROOT / "examples/mixed_precision.py").read_text()
    text = text.replace('STRATEGY, DTYPE = "ddp"', f'STRATEGY, DTYPE = "{strategy}"')
    text = text.replace("ACCUMULATION, TESTS = 6, 4,", "ACCUMULATION, TESTS = 6, 5,")  # 24 batches
    (tmp_path / "whole.py").write_text(text)
    (tmp_path / "killed.py").write_text(text.replace("\n    model.eval()\n", KILLED))
    run_forked(tmp_path, WHOLE, "whole.py")
    variables: dict[str, Any] = {"OMP_NUM_THREADS": "1", "RUN_ID": STOPPED}
    variables["PYTHONPATH"] = str(ROOT / "launcher/importable")  # torchrun does not add it
    words = ["--nproc-per-node=2", "killed.py"]
    execute(tmp_path, ROOT / "scripts/launch.sh", *words, code=137, **variables)
    out = execute(tmp_path, *TORCHRUN, "killed.py", **variables).stdout
    assert "epoch 1 " not in out and "epoch 6 " in out
    assert hash_of(tmp_path / "checkpoints" / STOPPED) == hash_of(tmp_path / "checkpoints" / WHOLE)


@pytest.mark.long
def test_the_task_recognises_digits(tmp_path: Path) -> None:
    out = run(tmp_path, str(ROOT / "examples/digits.yaml"), "2")
    share = re.search(r"^validation loss [\d.]+, accuracy ([\d.]+)$", out, re.M)
    assert share and float(share[1]) > 0.95


PREAMBLE = """
import sys
from pathlib import Path
import torch

STEPS, loss = int(sys.argv[1]), 0.5
values = torch.randn(310, 8, generator=torch.Generator().manual_seed(0))

class Noisy(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        return [super().__getitem__(index)[0] + torch.rand(8)]

dataset = Noisy(values)
make_model = lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout())
loss_of = lambda model, batch: model(batch[0]).square().mean()
"""
BETWEEN = """
optimizer = torch.optim.AdamW(model.parameters())
"""
OPTIONS = ["", "num_workers=1", "num_workers=1, persistent_workers=True"]
LOOPS = [(strategy, options) for strategy in ("ddp", "fsdp") for options in OPTIONS]


@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize(("strategy", "options"), [LOOPS[1], *rarely(LOOPS[0], *LOOPS[2:])])
def test_the_loop_that_the_page_shows_saves_and_resumes(
    tmp_path: Path, strategy: str, options: str
) -> None:
    """Model and data draw numbers; it resumes in the middle of an epoch of five steps."""
    page = (ROOT / "docs/your-script.md").read_text()
    calls, loop, _ = [
        one for one in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "import" in one
    ]
    calls = calls.replace("shuffle=True", f"shuffle=True, {options}")
    calls = calls.replace("make_model()", f"make_model(), strategy={strategy!r}")
    told = "print_main('after', step)\nwhile"
    own = written(tmp_path / "own.py", PREAMBLE + calls + BETWEEN + loop.replace("while", told, 1))
    hashes = []
    for name, steps, begin in ("whole", 7, 0), ("two", 3, 0), ("two", 7, 3):
        run_id = f"{name}-{os.getpid()}"  # the port is derived from it
        variables = {"TRAIN_SCRIPT": str(own), "RUN_ID": run_id}
        out = run(tmp_path, "-", "2", "--", str(steps), **variables)
        assert GLOO_SAYS.sub("", out) == f"{{'loss': 0.5}}\nafter {begin}\n"
        assert state_of(tmp_path / "checkpoints" / run_id).progress["step"] == steps
        hashes.append(hash_of(tmp_path / "checkpoints" / run_id))
    assert hashes[0] == hashes[2] != hashes[1]
