"""The CPUs and the GPU of each rank, on fake machines and in a run."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agents import PATIENCE_S, rarely

from distributed.errors import REFUSED, Refused
from launcher.agent.fork import cpus_of_ranks
from launcher.plan.make_plan import _WORDS

binding = pytest.importorskip("torch.numa.binding")
ROOT = Path(__file__).resolve().parents[2]
MODES = _WORDS["NUMA_BINDING"]


@dataclass(frozen=True)
class Topology:
    """A machine; all of its NUMA nodes are alike. CPUs are numbered as Linux does: threads last."""

    sockets: int
    nodes: int  # per socket
    cores: int  # per node
    threads: int  # per core
    caches: int  # of the third level, per node
    gpus: tuple[int, ...]  # the NUMA node of each; -1: the machine does not say
    allowed: range | None = None  # CPUs of this process, where they are not all

    def write(self, root: Path) -> None:
        """Write what Linux shows of it in /sys."""
        cores = self.sockets * self.nodes * self.cores
        for node in range(self.sockets * self.nodes):
            own = range(node * self.cores, (node + 1) * self.cores)
            cpus = [core + thread * cores for core in own for thread in range(self.threads)]
            put(root, f"devices/system/node/node{node}/cpulist", cpus)
            share = self.cores // self.caches
            for cpu in cpus:
                core = cpu % cores
                where = f"devices/system/cpu/cpu{cpu}"
                siblings = [core + thread * cores for thread in range(self.threads)]
                put(root, f"{where}/topology/thread_siblings_list", siblings)
                put(root, f"{where}/topology/physical_package_id", [node // self.nodes])
                cache = (core - own.start) // share
                near = [one for one in cpus if (one % cores - own.start) // share == cache]
                for index, kind, shared in ((0, "Data", siblings), (3, "Unified", near)):
                    put(root, f"{where}/cache/index{index}/type", kind)
                    put(root, f"{where}/cache/index{index}/level", [index])
                    put(root, f"{where}/cache/index{index}/shared_cpu_list", shared)
        put(root, "devices/system/node/possible", [*range(self.sockets * self.nodes)])
        for gpu, node in enumerate(self.gpus):
            put(root, f"bus/pci/devices/0000:{gpu:02x}:00.0/numa_node", [node])


TOPOLOGIES = {
    "a workstation": Topology(1, 1, 8, 2, 1, (-1,)),
    "one socket, four GPUs": Topology(1, 1, 16, 1, 4, (0, 0, 0, 0)),
    "DGX-1": Topology(2, 1, 20, 2, 1, (0, 0, 0, 0, 1, 1, 1, 1)),
    "DGX A100": Topology(2, 4, 16, 2, 4, (3, 3, 1, 1, 7, 7, 5, 5)),
    "DGX H100": Topology(2, 1, 56, 2, 1, (0, 0, 0, 0, 1, 1, 1, 1)),
    "GH200": Topology(4, 1, 72, 1, 1, (0, 1, 2, 3)),
    "cores that do not divide": Topology(1, 2, 7, 1, 7, (0, 0, 0, 1, 1)),
    "a job with half of the CPUs": Topology(2, 2, 8, 2, 2, (0, 1, 2, 3), allowed=range(32)),
}


def put(root: Path, path: str, content: str | list[int]) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else ",".join(map(str, content)))


@pytest.fixture(params=TOPOLOGIES)
def topology(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Topology:
    """This machine, as far as torch's binding can see."""
    machine: Topology = TOPOLOGIES[request.param]
    machine.write(tmp_path)
    total = machine.sockets * machine.nodes * machine.cores * machine.threads

    def moved(path: str) -> str:
        return str(path).replace("/sys/", f"{tmp_path}/", 1)

    def opened(path: str, *words: Any) -> Any:
        return builtins.open(moved(path), *words)

    fake_os = SimpleNamespace(
        path=os.path,
        listdir=lambda path: os.listdir(moved(path)),
        sched_getaffinity=lambda _: {*(machine.allowed or range(total))},
    )
    monkeypatch.setattr(binding, "open", opened, raising=False)
    monkeypatch.setattr(binding, "os", fake_os)
    monkeypatch.setattr(binding.shutil, "which", lambda _: "numactl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(machine.gpus))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(pci_domain_id=0, pci_bus_id=gpu, pci_device_id=0),
    )
    return machine


@pytest.mark.parametrize("mode", MODES)
def test_the_masks_are_those_that_torchrun_sets(topology: Topology, mode: str) -> None:
    ours = cpus_of_ranks(mode, len(topology.gpus))
    for local_rank, cpus in enumerate(ours):
        options = binding.NumaOptions(binding.AffinityMode(mode))
        words = binding._maybe_wrap_command_args_with_numa_binding(
            ("python",), gpu_index=local_rank, numa_options=options
        )
        assert cpus == numbers(words[1].removeprefix("--physcpubind=")) != set()


def numbers(ranges: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8."""
    pairs = (map(int, re.findall(r"\d+", part)) for part in ranges.split(","))
    bounds = ([*pair] for pair in pairs)
    return {one for bound in bounds for one in range(bound[0], bound[-1] + 1)}


def test_without_a_mode_ranks_have_what_the_agent_has() -> None:
    assert cpus_of_ranks("", 3) == [None, None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_where_torch_cannot_tell_it_is_refused_in_one_line() -> None:
    with pytest.raises(Refused, match=r"^cannot bind ranks .*; leave NUMA_BINDING out \[numa-unk"):
        cpus_of_ranks("node", 2)


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
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "scripts/lib/agent.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
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
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    words = ["--nproc-per-node=2", "--virtual-local-rank", str(tmp_path / "script.py")]
    told = {}
    for module in ("distributed.run", "torch.distributed.run"):
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        told[module] = sorted(done.stdout.splitlines())
    ranks = [f"{rank} 0 {gpu}" for rank, gpu in enumerate(gpus)]
    assert told["torch.distributed.run"] == ranks
    assert told["distributed.run"] == [*ranks, "record of 0: 2", "record of 1: 1"]  # to the end


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_launch_that_cannot_bind_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')\n")
    done = subprocess.run(
        [str(ROOT / "scripts/launch.sh"), "--nproc-per-node=2", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "NUMA_BINDING": "socket", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert done.stderr.endswith("; leave NUMA_BINDING out [numa-unknown]\n")
