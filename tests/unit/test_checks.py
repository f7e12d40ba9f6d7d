"""Each check on a machine that is sound, and on one with the fault that it is there for."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from distributed.environment import port_from_id
from launcher import text
from launcher.handshake import open_port
from launcher.preflight import checks, must_match
from launcher.preflight.check_node import check_node, open_master_port
from launcher.preflight.checks import Machine
from launcher.preflight.gpus import Gpu, GpuError, visible_gpus
from launcher.wire import limits
from launcher.wire.messages import Fault, Request

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture
def fake_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that puts an nvidia-smi on PATH which answers with these tables."""

    def install(gpus: str, users: str = "", listed: str = "") -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(
            f"#!/bin/sh\ncase $1 in\n"
            f"--query-gpu=*) printf '%s' '{gpus}' ;;\n"
            f"-L) printf '%s' '{listed}' ;;\n"
            f"--query-compute-apps=*) printf '%s' '{users}' ;;\nesac\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


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
NO_NAME = {"master_addr": "no-such-host.invalid"}
EVERY = "^" + ",".join(name for _, name in socket.if_nameindex())


def gloo(name: str) -> dict[str, Any]:
    return {"environ": {"GLOO_SOCKET_IFNAME": name}}


def nccl(name: str) -> dict[str, Any]:
    return {"environ": {"NCCL_SOCKET_IFNAME": name}}


@pytest.mark.parametrize(
    ("check", "changes", "fault", "cause"),
    [  # a fault that only warns ends with "?"; "": there is none
        ("program", {"words": ["/no/such.py"]}, "env-missing", "there is no script '/no/suc"),
        ("gpus", {"nproc": 99}, "", ""),  # on the CPU any number runs
        ("gpus", {"nproc": 2, "gpus": TWO}, "", ""),
        ("gpus", {"nproc": 3, "gpus": TWO, "backend": "gloo"}, "", ""),
        ("gpus", {"nproc": 3, "gpus": TWO}, "too-few-gpus", "3 processes but 2 visible GPUs"),
        ("gpus", {"gpus": (TWO[0], BAD)}, "gpu-unhealthy", "GPU 1 has 3 uncorrected memory errors"),
        ("gpus", {"gpu_error": "GPU is lost"}, "gpu-unhealthy", "GPU is lost"),
        ("gpus", {"nproc": 1, "gpus": (BUSY,)}, "gpu-unhealthy?", "GPU 0 is in use by pid 7 (x)"),
        ("master", NO_NAME, "name-unresolved", ""),
        ("master", {**NO_NAME, "num_nodes": 2}, "name-unresolved?", ""),  # known some seconds later
        ("master", {"master_addr": "127.0.0.1"}, "", ""),
        ("master", {"num_nodes": 2, "master_addr": "localhost"}, "loopback-address?", ""),
        (
            *("master", {"num_nodes": 2, "master_addr": "127.3.2.1"}, "loopback-address"),
            "the master 127.3.2.1 is a loopback address, which no other machine can reach",
        ),
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


@pytest.mark.parametrize(
    ("has_environment", "has_makefile", "command"),
    [
        (True, True, "/p/bin/python -m pip install torch"),
        (False, False, "/p/bin/python -m pip install torch"),  # pip and make init bring no Makefile
        (False, True, "make -C ROOT setup"),
    ],
)
def test_a_python_without_torch_gets_a_command_that_is_there(
    has_environment: bool,
    has_makefile: bool,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "kit"
    (root / "launcher").mkdir(parents=True)
    if has_makefile:
        (root / "Makefile").touch()
    monkeypatch.setattr(text, "__file__", f"{root}/launcher/text.py")
    monkeypatch.setattr(sys, "executable", "/p/bin/python")
    monkeypatch.setattr(sys, "prefix", "/p" if has_environment else sys.base_prefix)
    told = text.environment_cure("torch")
    assert told == f"set PYTHON to one that has it, or run {command.replace('ROOT', str(root))}"


OLD = "has torch 2.3.1+cu118, too old for the launchers; install 2.4 or newer"
EMPTY = "' holds no _C for this Python; set PYTHON to one that has it, or run "


@pytest.mark.parametrize(
    ("version", "told"),
    [("2.3.1+cu118", OLD), ("2.10.0a0", EMPTY), ("", " has no torch; set PYTHON to one ")],
)
def test_a_torch_that_is_too_old_or_not_whole(tmp_path: Path, version: str, told: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    if version:
        (tmp_path / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    code = """
from pathlib import Path
from launcher.preflight.checks import Machine, check_program
from launcher.wire.messages import Request
asked = Request("x", 1, 0, 1, 1, "127.0.0.1", 1, ["-m", "x"], Path(), Path(), None)
machine = Machine(**vars(asked), port_error=0, gpus=(), gpu_error="", environ={})
print(*(f"{fault.cause}; {fault.cure} [{fault.name}]" for fault in check_program(machine)))
"""
    bare = [sys.executable, "-S", "-c", code]
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    result = subprocess.run(bare, cwd=ROOT, env=path, capture_output=True, text=True)
    assert told in result.stdout and result.stdout.endswith(" [env-missing]\n"), result.stderr


def test_nccl_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "DEVICES", (str(tmp_path / "none"),))
    fault = find(checks.check_gpus, nproc=2, backend="nccl")
    assert fault is not None
    told = (fault.name, fault.cause, fault.cure)
    assert told == (
        "too-few-gpus",
        "backend nccl needs a GPU, and there is none",
        "set BACKEND=gloo",
    )
    assert find(checks.check_gpus, nproc=2, backend="auto") is None
    monkeypatch.setattr(checks, "DEVICES", (str(tmp_path),))  # and no nvidia-smi
    assert find(checks.check_gpus, nproc=2, backend="nccl") is None


def test_gpus_are_read_from_nvidia_smi(fake_nvidia_smi: Callable[..., None]) -> None:
    rows = "0, GPU-aa, 0, 580.1, [N/A]\n1, GPU-bb, [N/A], 580.1, [N/A]\n"
    fake_nvidia_smi(f"{rows}2, GPU-cc, 5, 580.1, Disabled\n", "GPU-bb, 42, /usr/bin/a, b\n")
    assert visible_gpus({}) == (
        Gpu("0", "GPU-aa", 0, "580.1"),
        Gpu("1", "GPU-bb", 0, "580.1", ("pid 42 (/usr/bin/a, b)",)),
        Gpu("2", "GPU-cc", 5, "580.1"),
    )


@pytest.mark.parametrize(
    ("torch", "driver", "backend", "cause"),
    [
        ({"cuda": "12.8"}, "525.60.13", "auto", ""),
        ({"cuda": None, "hip": "6.3"}, "525.60.13", "auto", ""),
        ({"cuda": None}, "580.65.06", "gloo", ""),
        ({"cuda": None}, "", "auto", "1 GPU here, but torch 9.9 is built without CUDA"),
        (
            {"cuda": "12.8"},
            "470.82.01",
            "nccl",
            "driver 470.82.01 of the GPUs is too old for torch's CUDA 12.8",
        ),
        ({"cuda": "14.0"}, "999.1", "auto", ""),  # of which nothing is known here
    ],
)
def test_a_torch_that_cannot_use_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
    torch: dict[str, str | None],
    driver: str,
    backend: str,
    cause: str,
) -> None:
    monkeypatch.setattr(must_match, "read_torch", lambda: {"__version__": "9.9", **torch})
    fault = find(checks.check_build, gpus=(Gpu("0", "GPU-aa", 0, driver),), backend=backend)
    assert (fault.cause if fault else "") == cause
    assert fault is None or fault.name == "torch-without-gpu"


@pytest.mark.parametrize(
    ("cpus", "ranks", "workers", "cause"),
    [
        (2, 2, 0, ""),
        (2, 8, 0, "2 CPUs for 8 ranks"),
        (1, 2, 0, "1 CPU for 2 ranks"),
        (8, 2, 3, ""),
        (7, 2, 3, "7 CPUs for 2 ranks, each with 3 data workers"),
        (0, 8, 0, ""),  # not known
    ],
)
def test_few_cpus_are_a_warning(cpus: int, ranks: int, workers: int, cause: str) -> None:
    fault = find(checks.check_cpus, cpus=cpus, nproc=ranks, num_workers=workers)
    assert (fault.cause if fault else "") == cause
    assert fault is None or (fault.name == "few-cpus" and fault.warns)


# As on an A100 of which the first is divided in two.
MIG_ROWS = "0, GPU-5c1f, 0, 580.1, Enabled\n1, GPU-77aa, 0, 580.1, Disabled\n"
MIG_LIST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c1f)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77aa)
"""


def test_mig_instances_count_as_devices(fake_nvidia_smi: Callable[..., None]) -> None:
    fake_nvidia_smi(MIG_ROWS, listed=MIG_LIST)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], left: str
) -> None:
    table = "\n".join(["device,Unique ID", *(f"card{i},0x{u}8f68e" for i, u in enumerate("abcd"))])
    (tmp_path / "rocm-smi").write_text(f"#!/bin/sh\necho '{table}'\n")
    (tmp_path / "rocm-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "".join(gpu.uuid[4] for gpu in visible_gpus(variables)) == left


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"}, ""),
        (
            {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0,1"},
            "HIP_VISIBLE_DEVICES=0 but CUDA_VISIBLE_DEVICES=0,1",
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"},
            "CUDA_VISIBLE_DEVICES=2,3 asks for GPU 3, but ROCR_VISIBLE_DEVICES=2,3 leaves "
            "only 2 GPUs, numbered from 0",
        ),
    ],
)
def test_variables_of_amd_that_contradict_each_other(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cause: str
) -> None:
    monkeypatch.setattr(must_match, "read_torch", lambda: {"hip": "6.4"})
    fault = find(checks.check_build, environ=variables)
    assert (fault.cause if fault else "") == cause
    assert fault is None or fault.name == "visible-devices"


def test_a_driver_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_nvidia_smi: Callable[..., None]
) -> None:
    fake_nvidia_smi("")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(limits, "NVIDIA_SMI_S", 0.1)
    with pytest.raises(GpuError, match="no answer"):
        visible_gpus({})


@pytest.mark.parametrize(
    ("visible", "left"),
    [("2,0", ["2", "0"]), ("GPU-bb", ["1"]), ("", []), ("-1", []), ("0,7,1", ["0"])],
)
def test_cuda_visible_devices(
    fake_nvidia_smi: Callable[..., None], visible: str, left: list[str]
) -> None:
    fake_nvidia_smi(
        "".join(f"{i}, GPU-{u}, 0, 580, [N/A]\n" for i, u in enumerate(("aa", "bb", "cc")))
    )
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


def test_port_in_use_names_the_holder(listener: int) -> None:
    port, none, code = open_master_port(a_request(port=listener))
    assert (port, none) == (listener, None)
    fault = find(checks.check_master, port=listener, port_error=code)
    assert fault is not None
    assert fault.name == "port-in-use"
    assert f"port {listener} is taken by pid {os.getpid()} (" in fault.cause


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

    for module in ("preflight.check_node", "wire.meeting"):
        monkeypatch.setattr(f"launcher.{module}.open_port", note)
    report = check_node(a_request(num_nodes=2, meeting_size=2, within_s=0.05))
    assert opened == [report.port, 0]


def test_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(checks.check_interfaces) is None
    monkeypatch.setattr(checks, "interface_to", {}.get)
    fault = find(checks.check_interfaces)
    assert fault is not None and fault.cause.startswith("the loopback interface is down")


def test_the_interface_that_leads_to_the_master_is_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "none9"}
    fault = find(checks.check_interfaces, environ=environ)  # of one machine
    assert fault is not None
    assert "name one of lo" in fault.cure
    ways = {"127.0.0.1": "lo", "192.0.2.1": "eth7"}
    monkeypatch.setattr(checks, "interface_to", ways.get)
    fault = find(checks.check_interfaces, environ=environ, master_addr="192.0.2.1")
    assert fault is not None
    assert fault.cure.startswith("unset it, or name eth7, which leads to the master")


def test_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        fault = find(checks.check_limits, only="low-nofile")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert fault == Fault(
        "low-nofile",
        "the limit on open files is 512 (data workers need 1024)",
        "run ulimit -n 65536 before the launch",
        warns=True,
    )


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


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fault = find(checks.check_folders, log_dir=tmp_path / "file" / "logs")
    assert fault is not None
    assert fault.name == "dir-unwritable"
    assert find(checks.check_folders, log_dir=tmp_path / "new" / "logs") is None
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # nothing is left behind
