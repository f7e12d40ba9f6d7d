"""The rows of `make test-gpu`: each returns what it saw, or raises Failed."""

import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu_runs import (
    GPT2_CONFIG,
    HAS_GPU,
    LAUNCH,
    ROOT,
    SELF_TEST,
    SMALL_CONFIG,
    TRAIN,
    Ended,
    Failed,
    Machine,
)

from launcher.preflight.gpus import Gpu, visible_gpus

STEPS = ["train.max_steps=60", "train.log_every=5", "train.eval_every=0", "checkpoint.every=0"]
if not HAS_GPU:  # any machine can run the rows that need no GPU
    STEPS += ["model.layers=1", "model.width=32", "model.context=64", "train.global_batch_size=8"]
WIDE = ["model.width=512", "model.heads=8", "model.context=256"]  # enough work for a GPU
PROBE = str(ROOT / "tests/gpu/probe.py")
HANG_S = 15


@dataclass(frozen=True)
class Row:
    """One thing that must work."""

    name: str
    see: Callable[[Machine], str]
    needs_gpu: bool


ROWS: list[Row] = []


def row(name: str, *, needs_gpu: bool = True) -> Callable[..., Callable[[Machine], str]]:
    """Add a function to the rows, in the order of this file."""

    def add(see: Callable[[Machine], str]) -> Callable[[Machine], str]:
        ROWS.append(Row(name, see, needs_gpu))
        return see

    return add


def run_probe(machine: Machine, what: str, **variables: str) -> Ended:
    """Run a function of probe.py in one rank."""
    return machine.run([LAUNCH, "--nproc-per-node", "1", PROBE, what], **variables)


# --- the start ----------------------------------------------------------------------------------


@row("ranks forked after `import torch`, CUDA untouched before")
def fork(machine: Machine) -> str:
    ended = run_probe(machine, "untouched").expect()
    untouched(ended)
    return f"the agent opens no CUDA device; launch and one kernel in {ended.seconds:.1f} s"


def untouched(ended: Ended) -> dict[str, Any]:
    """Return what the probe printed. Raises Failed if CUDA was used too early, or by the agent."""
    told: dict[str, Any]
    told = json.loads(next(line for line in ended.text.splitlines() if line.startswith("{")))
    if told["before"] != [False] or told["after"]:
        raise Failed(f"CUDA was in use before the rank's first use, or in the agent: {told}")
    if not (told["own"] and told["is_shared"]):
        raise Failed(f"the probe saw nothing: {told}")
    return told


@row("preflight")
def preflight(machine: Machine) -> str:
    ended = machine.run([LAUNCH, "--nproc-per-node", "gpu", PROBE, "untouched"]).expect()
    told = re.findall(r"^(?:preflight|warning).*", ended.text, re.MULTILINE)
    return "; ".join(" ".join(line.split()) for line in told)


@row("nvidia-smi's values compared with NVML's")
def facts(machine: Machine) -> str:
    seen = visible_gpus({})
    known = [*nvml()]
    told = [(gpu.uuid, gpu.driver, gpu.total_mib) for gpu in seen]
    if told != known:
        raise Failed(f"nvidia-smi {told}, NVML {known}")
    return "; ".join(describe(gpu) for gpu in seen)


def describe(gpu: Gpu) -> str:
    lanes = f"{gpu.lanes} of {gpu.max_lanes} PCIe lanes"
    return f"{gpu.model}, {gpu.total_mib} MiB, driver {gpu.driver}, {lanes}"


def nvml() -> Any:
    """Yield the UUID, driver version and memory (MiB) of each GPU."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    count, driver = ctypes.c_uint(), ctypes.create_string_buffer(96)
    library.nvmlInit_v2()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlSystemGetDriverVersion(driver, 96)
    for index in range(count.value):
        device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        library.nvmlDeviceGetUUID(device, uuid, 96)
        library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        yield uuid.value.decode(), driver.value.decode(), memory[0] >> 20
    library.nvmlShutdown()


# --- one rank, two ranks ------------------------------------------------------------------------


@row("NCCL, one rank")
def nccl(machine: Machine) -> str:
    ended = run_probe(machine, "all_reduce").expect()
    told = next(line for line in ended.text.splitlines() if line.startswith("NCCL"))
    return f"{told}, {ended.seconds:.1f} s with the launch"


@row("gloo, two ranks on one GPU", needs_gpu=False)
def gloo(machine: Machine) -> str:
    return tell(machine.train("gloo", *STEPS, ranks=2, BACKEND="gloo"))


@row("`NUMA_BINDING=node`: the CPUs near the GPU, found without CUDA in the agent")
def numa(machine: Machine) -> str:
    ended = run_probe(machine, "untouched", NUMA_BINDING="node").expect()
    return f"{untouched(ended)['cpus']} of {os.cpu_count()} CPUs"


def refusal(machine: Machine, code: int, fault: str, **variables: str) -> str:
    command = [TRAIN, SMALL_CONFIG, "2", *STEPS, "tracking=[]"]
    ended = machine.run(command, BACKEND="nccl", **variables).expect(code, fault)
    return f"{ended.seconds:.1f} s, {ended.last()}"


row("NCCL, two ranks on one GPU: refused before the start")(
    partial(refusal, code=3, fault="too-few-gpus")
)
row("the same without the preflight: refused by the ranks")(
    partial(refusal, code=2, fault="duplicate-gpu", SKIP_PREFLIGHT="1")
)


@row("`scripts/test_distributed.sh 1`", needs_gpu=False)
def self_test(machine: Machine) -> str:
    ended = machine.run([SELF_TEST, "1"]).expect()
    if told := re.search(r".*Warning(?!: Failed to initialize NumPy).*", ended.text):
        raise Failed(told[0])
    speed = re.search(r"[\d.]+ [GT]FLOP/s", ended.text)
    return f"{ended.last()}, {speed[0] if speed else 'no speed'}"


# --- training -----------------------------------------------------------------------------------


def tell(lines: list[dict[str, float]]) -> str:
    """Return a run's figures. Raises Failed if the model has not learned."""
    first, last = lines[0], lines[-1]
    if not last["loss"] < first["loss"] - 0.3:
        raise Failed(f"loss {first['loss']:.3f} at first, {last['loss']:.3f} at the end")
    speed = statistics.median(line["tokens_per_second"] for line in lines[len(lines) // 2 :])
    return f"loss {first['loss']:.2f} to {last['loss']:.2f}, {speed:,.0f} tokens/s"


def precision(dtype: str) -> list[str]:
    return [*WIDE, f"distributed.mixed_precision.dtype={dtype}"]


def train(machine: Machine, run_id: str, settings: list[str]) -> str:
    return tell(machine.train(run_id, *STEPS, *settings))


SHARDED = ["distributed.strategy=fsdp", "checkpoint.format=sharded", "checkpoint.snapshot_every=20"]
AGAIN = ["train.activation_checkpointing=full"]
TRAININGS = [  # (row, run id, does it need a GPU?, settings)
    ("train.py in bfloat16", "bfloat16", True, precision("bfloat16")),
    ("train.py in float16, with a scaler", "float16", True, precision("float16")),
    ("train.py, activations computed again", "again", False, AGAIN),
    ("train.py, FSDP with one rank, sharded snapshots", "fsdp", True, [*WIDE, *SHARDED]),
    ("train.py, compiled", "compiled", True, [*WIDE, "train.compile=true"]),
]
for name, run_id, needs_gpu, settings in TRAININGS:
    row(name, needs_gpu=needs_gpu)(partial(train, run_id=run_id, settings=settings))


@row("a step of train.py waits for the GPU", needs_gpu=False)
def waits(machine: Machine) -> str:
    words = ["--config", SMALL_CONFIG, *STEPS, "tracking=[]"]
    words.append(f"checkpoint.dir={machine.folder / 'checkpoints'}")
    command = [sys.executable, str(ROOT / "bench/waits.py"), *words]
    return machine.run(command, RUN_ID="waits").expect().last()


# --- faults -------------------------------------------------------------------------------------


def restart(machine: Machine, run_id: str, *settings: str, ranks: int = 1, **variables: str) -> str:
    """Kill rank 0 of a run once; returns what that cost."""
    steps = machine.folder / f"{run_id}.txt"
    machine.train(
        run_id,
        *STEPS,
        *settings,
        "checkpoint.snapshot_every=5",
        ranks=ranks,
        TRAIN_SCRIPT=str(ROOT / "tests/gpu/dies_once.py"),
        MAX_RESTARTS="1",
        STEPS=str(steps),
        **variables,
    )
    lines = [line.split() for line in steps.read_text().splitlines()]
    dead = [line for line in lines if line[0] == "0"][-1]
    back = next(line for line in lines if line[0] == "1")
    lost = int(dead[1]) - int(back[1])
    if not 0 <= lost <= 5:
        raise Failed(f"killed before step {dead[1]}, but continued from {back[1]}")
    return f"{lost} steps lost, continued after {float(back[2]) - float(dead[2]):.2f} s"


row("`kill -9` of a rank: a restart from snapshots in memory", needs_gpu=False)(
    partial(restart, run_id="killed")
)


@row("a rank that waits for a kernel that never ends: named, with its stack")
def hang(machine: Machine) -> str:
    ended = run_probe(machine, "hang", HANG_SECONDS=str(HANG_S))
    if ended.fault != "rank-stuck" or "synchronize" not in ended.text:
        raise Failed(f"code {ended.code} [{ended.fault}]: {ended.last()}")
    return f"[rank-stuck] after {ended.seconds:.1f} s with HANG_SECONDS={HANG_S}: {ended.last()}"


def named(machine: Machine, what: str, fault: str) -> str:
    told = run_probe(machine, what).expect(1, fault).block()
    return f"[{fault}] {told.get('cause', '')[:160]}"


row("out of memory on the GPU")(partial(named, what="out_of_memory", fault="out-of-memory"))
row("an illegal memory access")(partial(named, what="illegal_access", fault="cuda-error"))
row("an index out of range in a kernel")(partial(named, what="bad_index", fault="cuda-error"))


@row("`kill -9` of the launcher: memory left on the GPU")
def left_on_gpu(machine: Machine) -> str:
    before = used_mib()
    launcher = machine.start([LAUNCH, "--nproc-per-node", "1", PROBE, "holds_memory"])
    assert launcher.stdout is not None
    late = threading.Timer(machine.left(), launcher.kill)
    late.start()
    told = next((line for line in launcher.stdout if line.startswith("holds")), "")
    late.cancel()
    if not told:
        raise Failed("the rank did not allocate its memory in time")
    held = used_mib()
    began = time.monotonic()
    launcher.send_signal(signal.SIGKILL)
    while (used := used_mib()) > before + 16 and time.monotonic() < began + 15:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    if used > before + 16 or held < before + 1024:
        raise Failed(f"{before} MiB used before, {held} during the run, {used} at the end")
    return f"nothing ({before} MiB before, {held} during the run, {used} after {seconds:.1f} s)"


def used_mib() -> int:
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(words, capture_output=True, text=True).stdout.split()))


@row("stopped by SIGTERM, and resumed", needs_gpu=False)
def stop_and_resume(machine: Machine) -> str:
    """Compare with two uninterrupted runs, because kernels may add in a different order."""
    losses = [machine.train(run_id, *STEPS)[-1]["loss"] for run_id in ("whole", "twice")]
    at = stop_midway(machine, "parts")
    losses.append(machine.train("parts", *STEPS)[-1]["loss"])
    hashes = [hash_of(machine, run_id) for run_id in ("whole", "twice", "parts")]
    if abs(losses[2] - losses[0]) > 1e-3:
        raise Failed(f"stopped at {at}; last losses {losses}")
    same = "the same bytes" if hashes[2] == hashes[0] else "other bytes"
    also = "the same" if hashes[1] == hashes[0] else "other bytes"
    return f"code 75 at {at}, resumed to {same} (a second uninterrupted run: {also})"


def stop_midway(machine: Machine, run_id: str, *, ranks: int = 1, **variables: str) -> str:
    """Send SIGTERM to a run once it trains; returns where it stopped. Raises Failed."""
    words = [*STEPS, f"checkpoint.dir={machine.folder / 'checkpoints'}", "tracking=[]"]
    command = [TRAIN, SMALL_CONFIG, str(ranks), *words]
    stopped = machine.start(command, **{"RUN_ID": run_id, **variables})
    while stopped.poll() is None and not machine.metrics(run_id) and machine.left() > 0:
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    try:
        text, _ = stopped.communicate(timeout=max(1.0, machine.left()))
    finally:
        stopped.kill()  # its ranks end too
    if stopped.returncode != 75:
        raise Failed(f"code {stopped.returncode} in place of 75: {text[-200:]}")
    return os.readlink(machine.folder / "checkpoints" / run_id / "latest")


def hash_of(machine: Machine, run_id: str) -> str:
    folder = str(machine.folder / "checkpoints" / run_id)
    command = [sys.executable, "-m", "distributed.checkpoint", "hash", folder]
    return machine.run(command).expect().text


# --- speed --------------------------------------------------------------------------------------


@row("a save of GPT-2 124M and AdamW's state blocks the loop for", needs_gpu=False)
def saves(machine: Machine) -> str:
    stalls = machine.loop("stall", 100, 40)
    return ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in stalls.items())


@row("GPT-2 124M, compiled, in bfloat16: train.py compared with a bare loop")
def gpt2(machine: Machine) -> str:
    settings = ["train.max_steps=100", "train.log_every=10", "train.eval_every=0"]
    settings += ["checkpoint.every=0", *machine.gpt2_settings()]
    lines = machine.train("gpt2", *settings, config=GPT2_CONFIG)[4:]
    ours = statistics.harmonic_mean([line["tokens_per_second"] for line in lines])
    bare = machine.loop("bare", 100, 40)["tokens_per_second"]
    memory = lines[-1]["peak_memory_gb"]
    share = f"{lines[-1]['mfu']:.1%} of the GPU's FLOPs" if "mfu" in lines[-1] else "MFU unknown"
    return f"{ours:,.0f} tokens/s ({share}, {memory:.1f} GB), bare loop {bare:,.0f}"
