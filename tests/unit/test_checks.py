"""Each check on a healthy machine and on one with its fault; signs of slow or broken hardware."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import string
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_runs
import pytest
import torch
import yaml
from agents import PATIENCE_S, ROOT, execute, written
from job_tools import make_tool
from ports import free_port

from distributed.environment import port_from_id
from distributed.errors import Refused
from launcher import text
from launcher.master_port import open_master_port, open_port
from launcher.preflight import cgroup, checks, gpus, infiniband, must_match
from launcher.preflight.check_node import check_node
from launcher.preflight.checks import Machine
from launcher.preflight.gpus import Gpu, GpuError, find_slow, visible_gpus
from launcher.preflight.infiniband import Port, can_open_devices, ports_of_nccl, read_ports
from launcher.record.run_json import writing_to
from launcher.wire import limits
from launcher.wire.messages import Fault, Request

ASKED: dict[str, Any] = {  # of one node, which is checked
    "has_checks": True,
    "backend": "auto",
    "num_workers": 0,
    "meeting_size": 0,
    "within_s": limits.MEETING_S,
}


def make_machine(**changes: object) -> Machine:
    """Return a healthy single node, with changes of it or of what is asked about it."""
    request = Request(
        run_id="mine",
        num_nodes=1,
        node_rank=0,
        nproc=None,
        cpu_nproc=1,
        master_addr="127.0.0.1",
        port=None,
        words=[__file__],
        directory=Path.cwd(),
        log_dir=Path(),
        checkpoint_dir=None,
        **ASKED,
    )
    own = {field.name for field in dataclasses.fields(Machine)}
    asked = {name: value for name, value in changes.items() if name not in own}
    machine = Machine(
        request=dataclasses.replace(request, **asked),  # type: ignore[arg-type]
        nproc=2,
        port=free_port(),
        port_error=0,
        gpus=(),
        gpu_error="",
        environ={},
        cpus=0,
        ports=(),
        can_open_ports=True,
    )
    known = {name: value for name, value in changes.items() if name in own}
    return dataclasses.replace(machine, **known)  # type: ignore[arg-type]


def fake_nvidia_smi(tools: Path, gpus: str, users: str = "", listed: str = "") -> None:
    """Put an nvidia-smi on PATH that prints these tables."""
    answers = f"--query-gpu=*) printf '%s' '{gpus}' ;;\n-L) printf '%s' '{listed}' ;;\n"
    answers += f"--query-compute-apps=*) printf '%s' '{users}' ;;\n"
    make_tool(tools / "nvidia-smi", f"case $1 in\n{answers}esac")


Check = Callable[[Machine], Iterator[Fault]]


def find(check: Check, *, only: str = "", **changes: object) -> Fault | None:
    """Return the one fault (of this name, if given) that a check finds with these changes."""
    found = [fault for fault in check(make_machine(**changes)) if only in ("", fault.name)]
    assert len(found) <= 1, found
    return found[0] if found else None


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_sound_node_passes_each_check(check: Check) -> None:
    # The limits and /dev/shm are this machine's; their own tests set them.
    assert all(fault.warns for fault in check(make_machine()))


TWO = (Gpu("0", "GPU-aa", 0), Gpu("1", "GPU-bb", 0))
BAD, BUSY = Gpu("1", "GPU-bb", 3), Gpu("0", "GPU-aa", 0, "", ("pid 7 (x)",))
ELSEWHERE = {"num_nodes": 2, "master_addr": "192.0.2.1"}
EVERY = "^" + ",".join(string.ascii_letters + string.digits)  # all names


def gloo(name: str) -> dict[str, Any]:
    return {"environ": {"GLOO_SOCKET_IFNAME": name}}


def nccl(name: str) -> dict[str, Any]:
    return {"environ": {"NCCL_SOCKET_IFNAME": name}}


@pytest.mark.parametrize(
    ("check", "changes", "fault", "cause"),
    [  # "?" marks a fault that only warns; "" means none
        ("gpus", {"nproc": 99}, "", ""),  # on CPUs, any number can run
        ("gpus", {"nproc": 2, "gpus": TWO}, "", ""),
        ("gpus", {"nproc": 3, "gpus": TWO, "backend": "gloo"}, "", ""),
        (
            "gpus",
            {"nproc": 4, "gpus": TWO * 2},
            "too-few-gpus?",
            "4 processes, but only 2 visible GPUs",
        ),
        ("gpus", {"gpus": (TWO[0], BAD)}, "gpu-unhealthy", "GPU 1 has 3 uncorrected memory errors"),
        *(
            ("gpus", {"gpu_error": "GPU is lost", "nproc": nproc}, "gpu-unhealthy", "GPU is lost")
            for nproc in (0, 2)
        ),
        ("gpus", {"nproc": 1, "gpus": (BUSY,)}, "gpu-unhealthy?", "GPU 0 is in use by pid 7 (x)"),
        ("cpus", {"cpus": 2, "nproc": 2}, "", ""),
        ("cpus", {"cpus": 1, "nproc": 2}, "few-cpus?", "1 CPU for 2 ranks"),
        ("cpus", {"cpus": 8, "nproc": 2, "num_workers": 3}, "", ""),
        ("cpus", {"cpus": 7, "num_workers": 3}, "few-cpus?", "2 ranks, each with 3 data workers"),
        ("cpus", {"cpus": 0, "nproc": 8}, "", ""),  # unknown
        ("master", {"num_nodes": 2, "master_addr": "no-such-host.invalid"}, "name-unresolved?", ""),
        ("master", {"num_nodes": 2, "master_addr": "localhost"}, "loopback-address?", ""),
        ("master", ELSEWHERE, "no-such-interface?", "192.0.2.1 does not belong to this node"),
        ("master", {**ELSEWHERE, "node_rank": 1}, "", ""),
        ("interfaces", gloo("lo"), "", ""),
        *(("interfaces", gloo(name), "no-such-interface", "") for name in ("none9", "^lo")),
        ("interfaces", gloo("lo,none9"), "no-such-interface", "has no interface none9"),
        *(("interfaces", nccl(name), "", "") for name in ("lo", "l", "=lo", "^none9")),
        *(("interfaces", nccl(name), "no-such-interface", "") for name in ("=l", "none9", EVERY)),
        ("interfaces", nccl("=l"), "no-such-interface", "==l (= before a name: only this one) "),
        ("interfaces", nccl(EVERY), "no-such-interface", " (^ excludes) excludes all interfaces"),
    ],
)
def test_what_a_check_finds(check: str, changes: dict[str, Any], fault: str, cause: str) -> None:
    found = find(getattr(checks, f"check_{check}"), **changes)
    assert (f"{found.name}{'?' * found.warns}" if found else "") == fault
    assert cause in (found.cause if found else "")


@pytest.mark.parametrize(
    ("mine", "files", "cpus", "left"),
    [
        ("0::/", {}, 8, None),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1, None),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000"}, 4, None),
        ("0::/", {"cpu.max": "20000 100000"}, 1, None),  # at least one
        ("0::/gone", {"cpu.max": "200000 100000"}, 2, None),  # a container without a namespace
        (
            "4:cpu,cpuacct:/a\n0::/",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            3,
            None,
        ),
        (
            "4:cpu:/\n0::/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            8,
            None,
        ),
        ("0::/a", {"a/pids.max": "max", "a/pids.current": "7"}, 8, None),
        ("0::/a", {"a/pids.max": "60", "a/pids.current": "40"}, 8, 20),
        ("8:pids:/a", {"pids/a/pids.max": "60", "pids/a/pids.current": "70"}, 8, 0),
    ],
)
def test_quotas_of_cpus_and_processes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mine: str,
    files: dict[str, str],
    cpus: int,
    left: int | None,
) -> None:
    for name, content in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(f"{content}\n")
    (tmp_path / "mine").write_text(f"{mine}\n")
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path / "tree")
    monkeypatch.setattr(cgroup, "MINE", tmp_path / "mine")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert (cgroup.count_cpus(), cgroup.count_processes_left()) == (cpus, left)
    found = find(checks.check_cpus, cpus=cgroup.count_cpus(), nproc=10)
    assert found and found.cause.endswith(" (by a quota)") == (cpus < 8)
    found = find(checks.check_limits, only="low-nproc", nproc=2)
    told = f"only {left} more processes and threads can start here, for 2 ranks"
    assert (found.cause if found else "") == (told if left is not None else "")


def test_the_limit_of_processes_of_a_user() -> None:
    """In a process of its own, whose limit stays low; a user's threads are all counted."""
    code = """import os, resource
from launcher.preflight import cgroup
if os.getuid() == 0:  # who has no limit
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))
print(cgroup.count_processes_left())"""
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert 0 <= int(told.stdout) < 50, told.stderr


def test_a_python_without_torch_gets_a_command_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(prefix: str) -> str:
        monkeypatch.setattr(sys, "prefix", prefix)
        return text.torch_cure()

    monkeypatch.setattr(text, "__file__", f"{tmp_path}/launcher/text.py")
    monkeypatch.setattr(sys, "executable", "/p/bin/python")
    begin, pip = "set PYTHON to a Python that has it, or run ", "/p/bin/python -m pip install torch"
    assert told(sys.base_prefix) == f"{begin}{pip}"  # pip and make init install no Makefile
    (tmp_path / "Makefile").touch()
    assert told("/p") == f"{begin}{pip}"
    assert told(sys.base_prefix) == f"{begin}make -C {tmp_path} setup"
    monkeypatch.setattr(text, "__file__", f"{tmp_path}/a kit/launcher/text.py")
    monkeypatch.setattr(sys, "executable", "/a python/bin/python")
    assert told("/p").startswith(f"{begin}'/a python/bin/python' -m pip install torch")
    (tmp_path / "a kit").mkdir()
    (tmp_path / "a kit/Makefile").touch()
    assert told(sys.base_prefix) == f"{begin}make -C '{tmp_path}/a kit' setup"


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(must_match, "versions", lambda: {"torch": "2.3.1+cu118"})
    fault = find(checks.check_program)
    assert fault is not None and fault.name == "env-missing"
    assert fault.cause.endswith(" has torch 2.3.1+cu118, too old for the launchers")


def test_nccl_where_no_nvidia_smi_tells_of_the_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "DEVICES", (str(tmp_path),))
    assert find(checks.check_gpus, backend="nccl") is None


def test_gpus_are_read_from_nvidia_smi(tools: Path) -> None:
    rows = "0, GPU-aa, 0, 580.1, [N/A]\n1, GPU-bb, [N/A], 580.1, [N/A]\n"
    users = "GPU-bb, 42, /usr/bin/a, b\n"
    fake_nvidia_smi(tools, f"{rows}2, GPU-cc, 5, 580.1, Disabled\n", users)
    assert visible_gpus({}) == (
        Gpu("0", "GPU-aa", 0, "580.1"),
        Gpu("1", "GPU-bb", 0, "580.1", ("pid 42 (/usr/bin/a, b)",)),
        Gpu("2", "GPU-cc", 5, "580.1"),
    )


def with_driver(version: str, **changes: object) -> dict[str, Any]:
    return {"gpus": (Gpu("0", "GPU-aa", 0, version),), **changes}


def amd(**chosen: str) -> dict[str, Any]:
    return {"environ": {f"{name}_VISIBLE_DEVICES": numbers for name, numbers in chosen.items()}}


@pytest.mark.parametrize(
    ("torch", "changes", "fault", "cause"),
    [
        ({"cuda": "12.8"}, with_driver("525.60.13"), "", ""),
        ({"cuda": None}, with_driver("580.65.06", backend="gloo"), "", ""),
        (
            *({"cuda": None}, with_driver(""), "torch-without-gpu"),
            "1 GPU here, but torch 9.9 is built without CUDA",
        ),
        (
            *({"cuda": "12.8"}, with_driver("470.82.01", backend="nccl"), "torch-without-gpu"),
            "GPU driver 470.82.01 is too old for torch's CUDA 12.8",
        ),
        # A cuda-compat package of the same major version; one that is too old.
        ({"cuda": "12.8", "libcuda": "12040"}, with_driver("470.82.01"), "", ""),
        (
            *({"cuda": "13.0", "libcuda": "12080"}, with_driver("470.82.01"), "torch-without-gpu"),
            "GPU driver 470.82.01 is too old for torch's CUDA 13.0",
        ),
        ({"cuda": "14.0"}, with_driver("999.1"), "", ""),  # a version without an entry
        ({"hip": "6.4"}, with_driver("525.60.13"), "", ""),
        ({"hip": "6.4"}, amd(HIP="0,1", CUDA="0,1"), "", ""),
        ({"hip": "6.4"}, amd(ROCR="2,3", HIP="0,1"), "", ""),
        (
            *({"hip": "6.4"}, amd(HIP="0", CUDA="0,1"), "visible-devices"),
            "HIP_VISIBLE_DEVICES=0 but CUDA_VISIBLE_DEVICES=0,1",
        ),
        (
            *({"hip": "6.4"}, amd(ROCR="", HIP="0"), "visible-devices"),
            "HIP_VISIBLE_DEVICES=0 asks for GPU 0, but ROCR_VISIBLE_DEVICES= leaves "
            "only 0 GPUs, numbered from 0",
        ),
        (
            *({"hip": "6.4"}, amd(ROCR="2,3", CUDA="2,3"), "visible-devices"),
            "CUDA_VISIBLE_DEVICES=2,3 asks for GPU 3, but ROCR_VISIBLE_DEVICES=2,3 leaves "
            "only 2 GPUs, numbered from 0",
        ),
    ],
)
def test_what_torch_and_its_gpus_are_built_for(
    monkeypatch: pytest.MonkeyPatch,
    torch: dict[str, str | None],
    changes: dict[str, Any],
    fault: str,
    cause: str,
) -> None:
    monkeypatch.setattr(must_match, "read_torch", lambda: {"__version__": "9.9", **torch})
    monkeypatch.setattr(checks, "newest_cuda", lambda: int(torch.get("libcuda") or 0))
    found = find(checks.check_build, **changes)
    assert (found.name if found else "", found.cause if found else "") == (fault, cause)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")
def test_the_libcuda_that_the_loader_finds(tmp_path: Path) -> None:
    source = written(tmp_path / "cuda.c", "void cuDriverGetVersion(int *v) { *v = 12080; }")
    library = tmp_path / "libcuda.so.1"
    execute(tmp_path, "cc", "-shared", "-fPIC", "-o", library, source)
    code = "from launcher.preflight.gpus import newest_cuda; print(newest_cuda())"
    for answer in ("12080\n", "0\n"):
        done = execute(ROOT, sys.executable, "-c", code, LD_LIBRARY_PATH=str(tmp_path))
        assert done.stdout == answer
        library.write_text("not a library")


# As on a machine whose first A100 is divided into two.
MIG_ROWS = "0, GPU-5c1f, 0, 580.1, Enabled\n1, GPU-77aa, 0, 580.1, Disabled\n"
MIG_LIST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c1f)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77aa)
"""


def test_mig_instances_count_as_devices(tools: Path) -> None:
    fake_nvidia_smi(tools, MIG_ROWS, listed=MIG_LIST)
    assert [(gpu.index, gpu.uuid[:8]) for gpu in visible_gpus({})] == [
        ("0:0", "MIG-c6d4"),
        ("0:1", "MIG-cba6"),
        ("1", "GPU-77aa"),
    ]
    (chosen,) = visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-cba663e8"})
    assert chosen.index == "0:1"


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({}, "abcd"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "ba"),
        ({"HIP_VISIBLE_DEVICES": "3"}, "d"),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, "cd"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, "d"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-b"}, "b"),
    ],
)
def test_gpus_of_amd(
    tools: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], left: str
) -> None:
    table = "\n".join(["device,Unique ID", *(f"card{i},0x{u}8f68e" for i, u in enumerate("abcd"))])
    make_tool(tools / "rocm-smi", f"echo '{table}'")
    monkeypatch.setenv("PATH", str(tools))
    assert "".join(gpu.uuid[4] for gpu in visible_gpus(variables)) == left


def test_a_driver_that_hangs(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tool(tools / "nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(limits, "NVIDIA_SMI_S", 0.1)
    with pytest.raises(GpuError, match="did not answer"):
        visible_gpus({})


def test_a_slow_nvidia_smi_only_lists_the_gpus(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = r"0, GPU-aa, 0, 580.1, [N/A]\n1, GPU-bb, 0, 580.1, [N/A]\n"
    script = f"[[ $1 == --query-gpu=* ]] || exec sleep 60\nsleep 0.2; printf '{rows}'"
    make_tool(tools / "nvidia-smi", script)
    monkeypatch.setattr(limits, "NVIDIA_SMI_MORE_S", 0.1)
    assert visible_gpus({}) == (Gpu("0", "GPU-aa", 0, "580.1"), Gpu("1", "GPU-bb", 0, "580.1"))


@pytest.mark.parametrize(
    ("nproc", "environ", "cures"),
    [
        (None, {}, ["give the number of processes"]),
        (8, {}, []),
        (None, {"SLURM_GPUS_ON_NODE": "8"}, []),
    ],
)
def test_without_checks_the_number_of_processes_is_not_guessed(
    tools: Path, nproc: int | None, environ: dict[str, str], cures: list[str]
) -> None:
    make_tool(tools / "nvidia-smi", "echo 'Field \"x\" is not a valid field to query.'; exit 2")
    report = check_node(a_request(has_checks=False, nproc=nproc), environ)
    assert [fault.cure for fault in report.faults] == cures
    assert cures or report.nproc == 8


def test_without_checks_ranks_that_need_a_gpu_do_not_start_on_the_cpu() -> None:
    """As with `--nproc-per-node gpu`; by default, one rank starts."""
    needs_gpu = check_node(a_request(has_checks=False, nproc=None, cpu_nproc=0), {})
    assert [fault.name for fault in needs_gpu.faults] == ["too-few-gpus"]
    usual = check_node(a_request(has_checks=False, nproc=None, cpu_nproc=1), {})
    assert (usual.nproc, usual.faults) == (1, [])


@pytest.mark.parametrize(
    ("visible", "left"),
    [("2,0", ["2", "0"]), ("GPU-bb", ["1"]), ("", []), ("-1", []), ("0,7,1", ["0"])],
)
def test_cuda_visible_devices(tools: Path, visible: str, left: list[str]) -> None:
    names = enumerate(("aa", "bb", "cc"))
    fake_nvidia_smi(tools, "".join(f"{i}, GPU-{u}, 0, 580, [N/A]\n" for i, u in names))
    found = visible_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in found] == left


def a_request(**changes: object) -> Request:
    """Return a preflight request for node rank 0, with changes."""
    here = Path()
    request = Request(
        "a-run", 1, 0, None, 1, "127.0.0.1", None, ["x.py"], here, here, None, **ASKED
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def test_a_live_run_of_the_same_id_is_named() -> None:
    serve = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=1)"
    command = [sys.executable, "-c", f"{serve}; input()", "--rdzv-id", "mine", "script"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        port = int(agent.stdout.readline())
        error = open_master_port(a_request(port=port))[2]
        (live,) = checks.check_master(make_machine(port=port, port_error=error))
        (other,) = checks.check_master(make_machine(port=port, port_error=error, run_id="min"))
        agent.communicate(b"\n")
    assert (live.name, other.name) == ("run-is-live", "port-in-use")
    assert live.cause == "run mine is live: its node agent is running here"


def port_opened(request: Request) -> int:
    port, listener, _ = open_master_port(request)
    if listener is not None:
        listener.close()
    return port


def test_the_port_moves_on_from_one_in_use() -> None:
    wanted = port_from_id("a-run")
    with socket.create_server(("127.0.0.1", wanted)):
        assert port_opened(a_request(num_nodes=2)) == wanted
        assert port_opened(a_request(port=wanted)) == wanted
        assert port_opened(a_request()) > wanted
    assert port_opened(a_request()) == wanted


def test_runs_of_the_same_id_in_two_folders_have_two_ports() -> None:
    for place in ({"num_nodes": 2, "directory": Path("other")}, {"log_dir": Path("other")}):
        assert port_opened(a_request(**place)) != port_opened(a_request())
    # Over ssh, a live run with another LOG_DIR is found at the port.
    assert port_opened(a_request(num_nodes=2, log_dir=Path("other"))) == port_opened(a_request())


def test_node_rank_0_opens_the_port_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to open and close the port first, as a test, and cut off any node that connected."""
    opened = []

    def note(port: int, address: str = "") -> socket.socket:
        opened.append(port)
        return open_port(port, address)

    for module in ("master_port", "wire.meeting"):
        monkeypatch.setattr(f"launcher.{module}.open_port", note)
    report = check_node(a_request(num_nodes=2, meeting_size=2, within_s=0.05), {})
    assert opened == [report.port, 0]


def test_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(checks.check_interfaces) is None
    monkeypatch.setattr(checks, "is_loopback_up", lambda: False)
    fault = find(checks.check_interfaces)
    assert fault is not None and fault.cause.startswith("the loopback interface is down")


@pytest.mark.parametrize(
    ("mib", "free", "is_small"),
    [(64, 64, True), (512, 512, False), (64000, 64, True)],  # 64: Docker's default
)
def test_a_small_or_full_shm(
    monkeypatch: pytest.MonkeyPatch, mib: int, free: int, is_small: bool
) -> None:
    used = shutil.disk_usage("/")._replace(total=mib << 20, free=free << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used)
    fault = find(checks.check_limits, only="small-shm")
    told = Fault(
        "small-shm",
        f"/dev/shm has only {free} MiB free, of {mib} MiB",
        "empty it, or give Docker --ipc=host or --shm-size=8g",
        warns=True,
    )
    assert fault == (told if is_small else None)


@pytest.fixture(params=["size=4k", "nr_inodes=1"])
def full_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    with contextlib.suppress(OSError):
        (tmp_path / "full").write_bytes(bytes(8192))
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_at_the_start_is_no_lack_of_permission(full_disk: Path) -> None:
    found = find(checks.check_folders, log_dir=full_disk, only="disk-full")
    assert found is not None and "(No space left on device)" in found.cause and not found.warns
    told = r"\(No space left on device\); set LOG_DIR \[disk-full\]"
    with pytest.raises(Refused, match=told), writing_to(full_disk / "logs"):
        (full_disk / "logs/run.json").write_text("{}")


def test_a_full_quota_is_a_full_disk() -> None:
    for number, fault in {errno.EDQUOT: "disk-full", errno.EROFS: "dir-unwritable"}.items():
        assert text.unwritable_fault(OSError(number, "")) == fault


def test_a_folder_that_cannot_be_made_is_one_fault() -> None:
    faults = [*checks.check_folders(make_machine(log_dir=Path("/proc/x")))]
    assert [fault.name for fault in faults] == ["dir-unwritable"]


def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LEAST_DISK", 1 << 60)
    fault = find(checks.check_folders, log_dir=tmp_path / "not" / "yet")
    assert fault is not None and fault.name == "disk-low" and fault.warns


# --- GPUs and InfiniBand ports that are slow or down ----------------------------------------------


HARDWARE = ROOT / "tests/hardware"
MACHINES = yaml.safe_load((HARDWARE / "gpus.yaml").read_text())
FABRICS = yaml.safe_load((HARDWARE / "infiniband.yaml").read_text())

NVIDIA_SMI = """
import json, sys, time
machine = json.load(open({file!r}))
if sys.argv[1] == "nvlink":
    time.sleep(machine["nvlink_s"])
    print(machine["nvlink"])
elif sys.argv[1].startswith("--query-gpu="):
    columns = sys.argv[1].partition("=")[2].split(",")
    for column in columns:
        if column in machine["unknown"]:
            print(f'Field "{{column}}" is not a valid field to query.')
            sys.exit(2)
    for gpu in machine["gpus"]:
        print(", ".join(str(gpu.get(column, "[N/A]")) for column in columns))
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts on PATH an nvidia-smi that shows the given GPUs."""
    monkeypatch.setattr(limits, "NVIDIA_SMI_MORE_S", 300.0)

    def put(
        told: Sequence[Mapping[str, Any]], *, unknown: Sequence[str] = (), nvlink_s: float = 0
    ) -> None:
        rows = [{**gpu, "index": index, "uuid": f"GPU-{index}"} for index, gpu in enumerate(told)]
        nvlink = "".join(
            f"GPU {row['index']}: {row.get('name')} (UUID: {row['uuid']})\n{row.get('nvlink', '')}"
            for row in rows
        )
        file = tmp_path / "machine.json"
        machine = {"gpus": rows, "nvlink": nvlink, "unknown": unknown, "nvlink_s": nvlink_s}
        file.write_text(json.dumps(machine))
        tool = tools / "nvidia-smi"
        tool.write_text(f"#!{sys.executable}\n{NVIDIA_SMI.format(file=str(file))}")
        tool.chmod(0o755)

    return put


def find_in_gpus() -> list[Fault]:
    machine = make_machine(gpus=visible_gpus({}), nproc=1)
    return [*checks.check_gpus(machine), *checks.check_gpu_speed(machine)]


@pytest.mark.parametrize("one", MACHINES, ids=lambda one: one["machine"])
def test_what_nvidia_smi_said_on_real_machines(one: dict[str, Any], install: Install) -> None:
    install([*one["gpus"], *[one["gpus"][0]] * one.get("others", 0)])
    faults = find_in_gpus()
    assert [[fault.name, fault.cause] for fault in faults] == one["faults"]
    assert all(fault.warns for fault in faults)
    assert one["source"].startswith("https://")


OLD = [{"clocks_throttle_reasons.active": "0x8", "driver_version": "430.1", "pcie": 1}]


def test_an_old_nvidia_smi_that_refuses_a_field_is_asked_for_the_rest(install: Install) -> None:
    """The text is from https://github.com/plambe/zabbix-nvidia-smi-multi-gpu/issues/17."""
    install(OLD)
    assert [fault.name for fault in find_in_gpus()] == ["gpu-slow"]
    install(OLD, unknown=["clocks_throttle_reasons.active"])
    assert find_in_gpus() == []
    assert visible_gpus({})[0].driver == "430.1"
    install(OLD, unknown=["mig.mode.current"])
    with pytest.raises(gpus.GpuError, match=r"mig\.mode\.current. is not a valid"):
        visible_gpus({})


@pytest.mark.slow
def test_an_nvidia_smi_that_hangs_on_nvlinks_alone_does_no_harm(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NVIDIA_SMI_MORE_S", 5.0)
    install([{"name": "H100", "nvlink": "\t Link 0: 26.562 GB/s\n"}, {"name": "H100"}], nvlink_s=60)
    assert [gpu.nvlinks for gpu in visible_gpus({})] == [None, None]


@pytest.mark.parametrize(
    ("links", "odd"),
    [
        ([4, 4, 0], ""),  # a bridge connects two of three cards
        ([12, 12, 0, 0], ""),
        ([18, 17], "GPU 1 has 17 active NVLinks, but others of this model have 18"),
        ([None, None], ""),
    ],
)
def test_nvlinks(links: Sequence[int | None], odd: str) -> None:
    told = [Gpu(str(i), "", 0, model="H100", nvlinks=one) for i, one in enumerate(links)]
    assert [*find_slow(told)] == ([odd] if odd else [])


# --- InfiniBand ---------------------------------------------------------------------------------


def make_sysfs(folder: Path, ports: Mapping[str, Sequence[str]]) -> Path:
    """Create a folder like /sys/class/infiniband: links to folders elsewhere."""
    for port, states in ports.items():
        device, number = port.split("/")
        place = folder / "devices" / device / "ports" / number
        place.mkdir(parents=True)
        for name, state in zip(("state", "phys_state", "link_layer"), states, strict=True):
            (place / name).write_text(f"{state}\n")
        link = folder / "class" / device
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(folder / "devices" / device)
    return folder / "class"


def on_two_nodes(**changes: Any) -> Machine:
    return make_machine(**{"num_nodes": 2, "backend": "nccl", **changes})


@pytest.mark.parametrize("one", FABRICS, ids=lambda one: one["machine"])
def test_ports_of_real_machines(
    one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infiniband, "SYSFS", make_sysfs(tmp_path, one["ports"]))
    ports = tuple(read_ports())
    assert len(ports) == len(one["ports"])
    faults = [*checks.check_infiniband(on_two_nodes(ports=ports))]
    assert [(fault.name, fault.cause, fault.warns) for fault in faults] == (
        [("infiniband-down", one["fault"], True)] if one["fault"] else []
    )
    assert one["source"].startswith("https://")


UP, DOWN = Port("mlx5_0", "1", "ACTIVE", "LinkUp"), Port("mlx5_1", "1", "DOWN", "Polling")


UNUSED = [
    {"num_nodes": 1},
    {"backend": "gloo"},
    {"backend": "auto"},  # gloo, because there are no GPUs
    {"environ": {"NCCL_IB_DISABLE": "1"}},
    {"environ": {"NCCL_PROFILE": "ethernet"}},
    {"environ": {"NCCL_NET": "Socket"}},
]


@pytest.mark.parametrize(
    "changes", [*UNUSED, {"environ": {"NCCL_IB_HCA": "mlx5_0"}, "can_open_ports": True}]
)
def test_ports_that_nccl_does_not_use_may_be_down(changes: dict[str, Any]) -> None:
    machine = on_two_nodes(**{"ports": (UP, DOWN), "can_open_ports": False, **changes})
    assert [*checks.check_infiniband(machine)] == []


OF_ADMINISTRATOR = "ask the administrator to raise it (limits.conf; under SLURM, slurmd's limit)"


@pytest.mark.parametrize(
    ("kib", "most_kib", "changes", "fault", "cure"),
    [
        (8192, -1, {}, "low-memlock", "run ulimit -l unlimited"),
        (8192, 8192, {}, "low-memlock", OF_ADMINISTRATOR),
        (2 << 20, 2 << 20, {}, "", ""),
        *((8192, 8192, changes, "", "") for changes in UNUSED),
        (8192, 8192, {"ports": (DOWN,)}, "", ""),
        (8192, 8192, {"can_open_ports": False}, "", ""),
        (8192, 8192, {"environ": {"NCCL_IB_HCA": "mlx5_1"}}, "", ""),
        (16, 16, {"num_nodes": 1}, "low-memlock?", OF_ADMINISTRATOR),
        (16, -1, {"num_nodes": 1}, "low-memlock?", "run ulimit -l unlimited"),
    ],
)
def test_the_limit_on_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
    kib: int,
    most_kib: int,
    changes: dict[str, Any],
    fault: str,
    cure: str,
) -> None:
    """A card for Ethernet also has a folder in /sys/class/infiniband."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (kib << 10, most_kib << 10))
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    machine = {"num_nodes": 2, "backend": "nccl", "ports": (UP, DOWN), **changes}
    found = find(checks.check_limits, only="low-memlock", **machine)
    assert (f"{found.name}{'?' * found.warns}" if found else "") == fault
    assert (found.cure if found else "") == cure


@pytest.mark.parametrize(
    ("most", "node_rank", "num_nodes", "is_refused"),
    [
        (1024, 0, 105, False),
        (1024, 0, 106, True),
        (1024, 1, 1000, False),
        (-1, 0, 1000, False),
    ],
)
def test_the_agent_of_node_rank_0_may_open_enough_files(
    monkeypatch: pytest.MonkeyPatch, most: int, node_rank: int, num_nodes: int, is_refused: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    machine = {"num_nodes": num_nodes, "node_rank": node_rank, "nproc": 8}
    found = find(checks.check_limits, only="low-nofile", **machine)
    assert (found is not None) == is_refused
    if found:
        assert (
            found.cause == "the hard limit on open files is 1024, and this run's agent needs 1029"
        )
        assert not found.warns


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        ("mlx5", "abc"),
        ("mlx5_1", "bc"),
        ("=mlx5_1", "b"),
        ("=mlx5_0:2,mlx5_1:1", "b"),
        ("^mlx5_0", "bc"),
        ("^=mlx5_1", "ac"),
        ("", "abc"),
    ],
)
def test_the_ports_that_nccl_is_to_use(chosen: str, left: str) -> None:
    """See https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html."""
    ports = [Port(device, "1", "", "") for device in ("mlx5_0", "mlx5_1", "mlx5_10")]
    named = dict(zip("abc", ports, strict=True))
    assert ports_of_nccl(ports, {"NCCL_IB_HCA": chosen}) == [named[one] for one in left]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"environ": {"NCCL_IB_HCA": "ib0"}}, "NCCL_IB_HCA=ib0 does not match any active port"),
        ({"can_open_ports": False}, "port mlx5_0:1 is active, but /dev/infiniband cannot be op"),
    ],
)
def test_a_port_that_nccl_cannot_use_is_told(changes: dict[str, Any], cause: str) -> None:
    """NCCL then uses TCP, and logs that it found no device."""
    (fault,) = checks.check_infiniband(on_two_nodes(ports=(UP,), **changes))
    assert (fault.name, fault.warns) == ("nccl-on-sockets", True)
    assert fault.cause.startswith(cause)


def test_a_machine_or_a_container_without_such_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infiniband, "SYSFS", tmp_path / "none")
    monkeypatch.setattr(infiniband, "DEVICES", tmp_path)
    assert read_ports() == []
    assert not can_open_devices()
    (tmp_path / "uverbs0").touch()
    assert can_open_devices()


# --- make test-gpu and make test-nccl on a machine without a GPU ----------------------------------


@pytest.mark.long
def test_each_row_passes_or_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    command = [sys.executable, ROOT / "tests/gpu", "--seconds", PATIENCE_S, "--json", file]
    command += ["gloo", "preflight", "launcher"]
    path = f"{ROOT}:{ROOT}/bench"
    done = execute(ROOT, *command, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    results = {row["name"]: row["result"] for row in json.loads(file.read_text())}
    assert results.pop("gloo, two ranks on one GPU") == "pass"
    assert len(results) == 3 and {*results.values()} == {"needs a GPU"}
    assert done.stdout.endswith("\n1 passed, 0 failed, 3 not run\n")


@pytest.mark.parametrize(
    ("visible", "shared"), [(None, "0,1,0,1"), ("5", "5,5,5,5"), ("3,7", "3,7,3,7")]
)
def test_ranks_of_the_rows_for_nccl_share_the_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, shared: str
) -> None:
    monkeypatch.setattr(gpu_runs, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_runs.share_gpus(4) == {"CUDA_VISIBLE_DEVICES": shared}


def test_a_command_of_a_row_is_killed_if_it_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_runs, "STOP_S", 0.5)
    machine = gpu_runs.Machine(tmp_path, seconds=60, command_s=1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the command inherits
    with pytest.raises(gpu_runs.Failed, match="SIGINT did not end it"):
        machine.run(["tail", "-f", str(written(tmp_path / "never read", ""))])
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(bytes(tmp_path) in command for command in commands)


@pytest.mark.slow
def test_rows_for_nccl_run_through_gloo(tmp_path: Path) -> None:
    """make test-nccl PRETEND=1: a fault under both launchers, a start, a row that needs a GPU."""
    file = tmp_path / "table.json"
    words = ["`kill -9` of rank", "launch of 2", "illegal"]
    seen = see_nccl_rows("--pretend", "--seconds", PATIENCE_S, "--json", file, *words)
    assert "\n2 passed, 0 failed, 1 not run\n" in seen
    killed, illegal, start = json.loads(file.read_text())
    assert killed["told"].startswith("rank 1 [rank-killed] SIGKILL from outside this run")
    theirs = r"; torchrun: (code 1|not over) after [\d.]+ s, \d processes left$"  # it may be slow
    assert re.search(theirs, killed["told"])
    assert illegal["result"] == "needs a GPU"
    assert re.fullmatch(r"ours [\d.]+ s, torchrun [\d.]+ s", start["told"])
    ours, block = (tmp_path / "table.blocks/rank.txt").read_text().split("--- torchrun: ")
    assert "\nFAILED   rank 1 (" in ours and re.search(r"torch[./]distributed[./]elastic", block)


@pytest.mark.slow
def test_without_a_gpu_rows_for_nccl_say_what_they_need() -> None:
    seen = see_nccl_rows("known answers", "two hosts")
    assert "\n0 passed, 0 failed, 8 not run\n" in seen and seen.count("| needs a GPU |") == 8


def see_nccl_rows(*words: object) -> str:
    command = [sys.executable, ROOT / "tests/gpu", "--nccl", *words]
    path = f"{ROOT}:{ROOT}/bench"
    return execute(ROOT, *command, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path).stdout
