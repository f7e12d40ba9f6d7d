"""Each check on a machine that is sound, and on one with the fault that it is there for."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_tools import make_tool
from ports import free_port

from distributed.environment import port_from_id
from launcher import text
from launcher.master_port import open_master_port, open_port
from launcher.preflight import checks, must_match
from launcher.preflight.check_node import check_node
from launcher.preflight.checks import Machine
from launcher.preflight.gpus import Gpu, GpuError, visible_gpus
from launcher.wire import limits
from launcher.wire.messages import Fault, Request


def make_machine(**changes: object) -> Machine:
    """Return a sound single node, changed."""
    machine = Machine(
        run_id="mine",
        num_nodes=1,
        node_rank=0,
        nproc=2,
        cpu_nproc=1,
        master_addr="127.0.0.1",
        port=free_port(),
        port_error=0,
        words=[__file__],
        directory=Path.cwd(),
        log_dir=Path(),
        checkpoint_dir=None,
        gpus=(),
        gpu_error="",
        environ={},
    )
    return dataclasses.replace(machine, **changes)  # type: ignore[arg-type]


def fake_nvidia_smi(tools: Path, gpus: str, users: str = "", listed: str = "") -> None:
    """Put an nvidia-smi on PATH which answers with these tables."""
    answers = f"--query-gpu=*) printf '%s' '{gpus}' ;;\n-L) printf '%s' '{listed}' ;;\n"
    answers += f"--query-compute-apps=*) printf '%s' '{users}' ;;\n"
    make_tool(tools / "nvidia-smi", f"case $1 in\n{answers}esac")


Check = Callable[[Machine], Iterator[Fault]]


def find(check: Check, *, only: str = "", **changes: object) -> Fault | None:
    """Return the one fault (of this name, where given) that a check finds on a changed node."""
    found = [fault for fault in check(make_machine(**changes)) if only in ("", fault.name)]
    assert len(found) <= 1, found
    return found[0] if found else None


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_sound_node_passes_each_check(check: Check) -> None:
    # The limits and /dev/shm are those of the machine; their own tests set them.
    assert all(fault.warns for fault in check(make_machine()))


TWO = (Gpu("0", "GPU-aa", 0), Gpu("1", "GPU-bb", 0))
BAD, BUSY = Gpu("1", "GPU-bb", 3), Gpu("0", "GPU-aa", 0, "", ("pid 7 (x)",))
ELSEWHERE = {"num_nodes": 2, "master_addr": "192.0.2.1"}
EVERY = "^" + ",".join(string.ascii_letters + string.digits)  # whatever a name begins with


def gloo(name: str) -> dict[str, Any]:
    return {"environ": {"GLOO_SOCKET_IFNAME": name}}


def nccl(name: str) -> dict[str, Any]:
    return {"environ": {"NCCL_SOCKET_IFNAME": name}}


@pytest.mark.parametrize(
    ("check", "changes", "fault", "cause"),
    [  # a fault that only warns ends with "?"; "": there is none
        ("gpus", {"nproc": 99}, "", ""),  # on the CPU any number runs
        ("gpus", {"nproc": 2, "gpus": TWO}, "", ""),
        ("gpus", {"nproc": 3, "gpus": TWO, "backend": "gloo"}, "", ""),
        ("gpus", {"gpus": (TWO[0], BAD)}, "gpu-unhealthy", "GPU 1 has 3 uncorrected memory errors"),
        ("gpus", {"gpu_error": "GPU is lost"}, "gpu-unhealthy", "GPU is lost"),
        ("gpus", {"nproc": 1, "gpus": (BUSY,)}, "gpu-unhealthy?", "GPU 0 is in use by pid 7 (x)"),
        ("cpus", {"cpus": 2, "nproc": 2}, "", ""),
        ("cpus", {"cpus": 1, "nproc": 2}, "few-cpus?", "1 CPU for 2 ranks"),
        ("cpus", {"cpus": 8, "nproc": 2, "num_workers": 3}, "", ""),
        ("cpus", {"cpus": 7, "num_workers": 3}, "few-cpus?", "2 ranks, each with 3 data workers"),
        ("cpus", {"cpus": 0, "nproc": 8}, "", ""),  # not known
        ("master", {"num_nodes": 2, "master_addr": "no-such-host.invalid"}, "name-unresolved?", ""),
        ("master", {"num_nodes": 2, "master_addr": "localhost"}, "loopback-address?", ""),
        ("master", ELSEWHERE, "no-such-interface?", "192.0.2.1 is none of this node's"),
        ("master", {**ELSEWHERE, "node_rank": 1}, "", ""),
        ("interfaces", gloo("lo"), "", ""),
        *(("interfaces", gloo(name), "no-such-interface", "") for name in ("none9", "^lo")),
        *(("interfaces", nccl(name), "", "") for name in ("lo", "l", "=lo", "^none9")),
        *(("interfaces", nccl(name), "no-such-interface", "") for name in ("=l", "none9", EVERY)),
    ],
)
def test_what_a_check_finds(check: str, changes: dict[str, Any], fault: str, cause: str) -> None:
    found = find(getattr(checks, f"check_{check}"), **changes)
    assert (f"{found.name}{'?' * found.warns}" if found else "") == fault
    assert cause in (found.cause if found else "")


def test_a_python_without_torch_gets_a_command_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(prefix: str) -> str:
        monkeypatch.setattr(sys, "prefix", prefix)
        return text.environment_cure("torch")

    monkeypatch.setattr(text, "__file__", f"{tmp_path}/launcher/text.py")
    monkeypatch.setattr(sys, "executable", "/p/bin/python")
    begin, pip = "set PYTHON to one that has it, or run ", "/p/bin/python -m pip install torch"
    assert told(sys.base_prefix) == f"{begin}{pip}"  # pip and make init bring no Makefile
    (tmp_path / "Makefile").touch()
    assert told("/p") == f"{begin}{pip}"
    assert told(sys.base_prefix) == f"{begin}make -C {tmp_path} setup"


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
            "driver 470.82.01 of the GPUs is too old for torch's CUDA 12.8",
        ),
        ({"cuda": "14.0"}, with_driver("999.1"), "", ""),  # of which nothing is known here
        ({"hip": "6.4"}, with_driver("525.60.13"), "", ""),
        ({"hip": "6.4"}, amd(HIP="0,1", CUDA="0,1"), "", ""),
        ({"hip": "6.4"}, amd(ROCR="2,3", HIP="0,1"), "", ""),
        (
            *({"hip": "6.4"}, amd(HIP="0", CUDA="0,1"), "visible-devices"),
            "HIP_VISIBLE_DEVICES=0 but CUDA_VISIBLE_DEVICES=0,1",
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
    found = find(checks.check_build, **changes)
    assert (found.name if found else "", found.cause if found else "") == (fault, cause)


# As on an A100 of which the first is divided in two.
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
    with pytest.raises(GpuError, match="no answer"):
        visible_gpus({})


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
    """Return what node rank 0 of a run is asked for, changed."""
    here = Path()
    request = Request("a-run", 1, 0, None, 1, "127.0.0.1", None, ["x.py"], here, here, None)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def test_a_live_run_of_the_same_id_is_named() -> None:
    serve = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=1)"
    command = [sys.executable, "-c", f"{serve}; input()", "--rdzv-id", "mine", "script"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        port = int(agent.stdout.readline())
        taken = make_machine(port=port, port_error=open_master_port(a_request(port=port))[2])
        (live,) = checks.check_master(taken)
        (other,) = checks.check_master(dataclasses.replace(taken, run_id="min"))
        agent.communicate(b"\n")
    assert (live.name, other.name) == ("run-is-live", "port-in-use")
    assert live.cause == "run mine is live: its node agent runs here"


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


def test_node_rank_0_opens_the_port_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It opened and closed it first, to see if it can: a node that came then was cut off."""
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
    monkeypatch.setattr(checks, "interface_to", {}.get)
    fault = find(checks.check_interfaces)
    assert fault is not None and fault.cause.startswith("the loopback interface is down")


@pytest.mark.parametrize(("mib", "is_small"), [(64, True), (512, False)])  # 64: Docker's default
def test_a_small_shm(monkeypatch: pytest.MonkeyPatch, mib: int, is_small: bool) -> None:
    used = shutil.disk_usage("/")._replace(total=mib << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used)
    fault = find(checks.check_limits, only="small-shm")
    told = Fault(
        "small-shm",
        "/dev/shm is only 64 MiB",
        "start Docker with --ipc=host or --shm-size=8g",
        warns=True,
    )
    assert fault == (told if is_small else None)


def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LEAST_DISK", 1 << 60)
    fault = find(checks.check_folders, log_dir=tmp_path / "not" / "yet")
    assert fault is not None and fault.name == "disk-low" and fault.warns
