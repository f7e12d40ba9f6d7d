"""Each rank's CPUs and GPU."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import ROOT, execute, rarely

from distributed.errors import REFUSED
from launcher.agent.fork import cpus_of_ranks
from launcher.plan.settings import VARIABLES

binding = pytest.importorskip("torch.numa.binding")
MODES = VARIABLES["NUMA_BINDING"].words


@pytest.mark.parametrize("mode", MODES)
def test_the_cpus_are_those_that_torchrun_takes(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """torch's own search is replaced: here, each pair of GPU and mode has its own CPU."""

    def find(*, gpu_index: int, numa_options: Any) -> set[int]:
        return {10 * gpu_index + MODES.index(numa_options.affinity_mode.value)}

    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", find)
    monkeypatch.setattr(binding.shutil, "which", lambda _: "numactl")
    options = binding.NumaOptions(binding.AffinityMode(mode))
    for gpu, cpus in enumerate(cpus_of_ranks(mode, 3)):
        numactl = binding._maybe_wrap_command_args_with_numa_binding(
            ("python",), gpu_index=gpu, numa_options=options
        )
        assert cpus is not None
        (cpu,) = cpus
        assert numactl[1] == f"--physcpubind={cpu}"
        assert cpu == 10 * gpu + MODES.index(mode)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["script.py", *rarely("fresh.py")])
def test_ranks_run_where_they_are_bound(tmp_path: Path, script: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    first, last = cpus[0], cpus[-1]
    code = (
        "import runpy, sys\n"
        "import launcher.agent.fork as environment\n"
        f"environment.cpus_of_ranks = lambda mode, nproc: [{{{first}}}, {{{last}}}]\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    text = "import os\nprint(os.environ['RANK'], *os.sched_getaffinity(0))\n"
    (tmp_path / "script.py").write_text(text)
    fresh = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n"
    (tmp_path / "fresh.py").write_text(fresh + text)
    options = ["--nproc-per-node=2", "--numa-binding=node", str(tmp_path / script)]
    command = [sys.executable, "-c", code, ROOT / "scripts/lib/agent.py", *options]
    done = execute(tmp_path, *command, PYTHONPATH=str(ROOT))
    assert sorted(done.stdout.splitlines()) == [f"0 {first}", f"1 {last}"]


VIRTUAL = """
import os
from distributed import heartbeat
from distributed.torch import init_distributed
env = init_distributed(backend="gloo")
os.write(1, f"{env.rank} {env.local_rank} {os.environ['CUDA_VISIBLE_DEVICES']}\\n".encode())
if heart := heartbeat._heart():
    left = heart._record.nbytes // heartbeat.RECORD.size
    os.write(1, f"record of {env.rank}: {left}\\n".encode())
"""


@pytest.mark.long
@pytest.mark.parametrize(("visible", "gpus"), [("5,7", "57"), (None, "01")])
def test_each_rank_is_local_rank_0_of_one_gpu(
    tmp_path: Path, visible: str | None, gpus: str
) -> None:
    (tmp_path / "script.py").write_text(VIRTUAL)
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    words = ["--nproc-per-node=2", "--virtual-local-rank", str(tmp_path / "script.py")]
    told = {}
    for module in ("distributed.run", "torch.distributed.run"):
        done = execute(ROOT, sys.executable, "-m", module, *words, code=0, **environ)
        told[module] = sorted(done.stdout.splitlines())
    ranks = [f"{rank} 0 {gpu}" for rank, gpu in enumerate(gpus)]
    assert told["torch.distributed.run"] == ranks
    assert told["distributed.run"] == [*ranks, "record of 0: 2", "record of 1: 1"]  # and later ones


SHARED = """
import os
names = "RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"
print(*(os.environ.get(name, "-") for name in names))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("visible", "ranks"),
    [
        ("0,0,3", ["0 0 0 0.0", "1 0 0 0.1", "2 0 3 -"]),
        ("GPU-a, GPU-a", ["0 0 GPU-a 0.0", "1 0 GPU-a 0.1", "2 0 GPU-a 0.2"]),  # in turn
        *rarely(("0, 3,5", ["0 0 0, 3,5 -", "1 1 0, 3,5 -", "2 2 0, 3,5 -"])),
    ],
)
def test_ranks_share_a_gpu_that_is_named_several_times(
    tmp_path: Path, visible: str, ranks: list[str]
) -> None:
    """To NCCL, each of those ranks is a host of its own."""
    (tmp_path / "script.py").write_text(SHARED)
    command = [sys.executable, ROOT / "scripts/lib/agent.py", "--nproc-per-node=3", "script.py"]
    done = execute(tmp_path, *command, CUDA_VISIBLE_DEVICES=visible, PYTHONPATH=str(ROOT))
    assert sorted(done.stdout.splitlines()) == ranks


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_launch_that_cannot_bind_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')\n")
    command = [ROOT / "scripts/launch.sh", "--nproc-per-node=2", "script.py"]
    done = execute(tmp_path, *command, code=REFUSED, NUMA_BINDING="socket")
    assert done.stdout == ""
    assert done.stderr.endswith("; unset NUMA_BINDING [numa-unknown]\n")
