"""The preflight: each check on a node that is sound, and on one with the fault it is there for."""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed import gpus, preflight
from distributed.environment import port_from_id
from distributed.gpus import Gpu, GpuError, visible_gpus
from distributed.preflight import Fault, Node

ROOT = Path(__file__).resolve().parents[2]


def make_node(**changes: object) -> Node:
    """Return a sound single node, changed."""
    node = Node(
        nnodes=1,
        node_rank=0,
        nproc=2,
        master_addr="127.0.0.1",
        port=free_port(),
        script=Path(__file__),
        directories=(Path.cwd(),),
        gpus=(),
        gpu_error="",
        environ={},
    )
    return dataclasses.replace(node, **changes)  # type: ignore[arg-type]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def fake_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that puts an nvidia-smi on PATH which answers with these tables."""

    def install(gpus: str, users: str = "") -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(
            f"#!/bin/sh\ncase $1 in\n"
            f"--query-gpu=*) printf '%s' '{gpus}' ;;\n"
            f"--query-compute-apps=*) printf '%s' '{users}' ;;\nesac\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


Check = Callable[[Node], Iterator[Fault]]


def find(check: Check, *, only: str = "", **changes: object) -> Fault | None:
    """Return the one fault (of this name, where given) that a check finds on a changed node."""
    found = [fault for fault in check(make_node(**changes)) if only in ("", fault.name)]
    assert len(found) <= 1, found
    return found[0] if found else None


@pytest.mark.parametrize("check", preflight.CHECKS, ids=lambda check: check.__name__)
def test_a_sound_node_passes_each_check(check: Check) -> None:
    # The limits and /dev/shm are those of the machine; their own tests set them.
    assert all(fault.warns for fault in check(make_node()))


def test_missing_script() -> None:
    fault = find(preflight.check_program, script=Path("/no/such.py"))
    assert fault is not None
    assert (fault.name, fault.cause) == ("env-missing", "there is no script '/no/such.py'")


def test_missing_torch() -> None:
    bare = [sys.executable, "-S", "-m", "distributed.preflight", "--run-id", "x"]  # -S: no packages
    result = subprocess.run(bare, cwd=ROOT, env={}, capture_output=True, text=True)
    assert result.returncode == 3
    assert result.stderr.count("\n") == 1
    assert "[env-missing]" in result.stderr
    assert "has no torch; run make setup" in result.stderr


def test_processes_and_gpus() -> None:
    two = (Gpu("0", "GPU-aa", 0), Gpu("1", "GPU-bb", 0))
    assert find(preflight.check_gpus, nproc=99) is None  # on the CPU any number runs
    assert find(preflight.check_gpus, nproc=2, gpus=two) is None
    fault = find(preflight.check_gpus, nproc=3, gpus=two)
    assert fault is not None
    assert fault.name == "too-few-gpus"
    assert fault.cause == "3 processes but 2 visible GPUs"


def test_unhealthy_gpus() -> None:
    good, bad = Gpu("0", "GPU-aa", 0), Gpu("1", "GPU-bb", 3)
    fault = find(preflight.check_gpus, gpus=(good, bad))
    assert fault is not None
    assert fault.cause == "GPU 1 has 3 uncorrected memory errors"
    assert find(preflight.check_gpus, nproc=1, gpus=(good,)) is None
    fault = find(preflight.check_gpus, gpu_error="nvidia-smi: GPU is lost")
    assert fault is not None
    assert fault.cause == "nvidia-smi: GPU is lost"


def test_gpus_in_use() -> None:
    fault = find(preflight.check_gpus, nproc=1, gpus=(Gpu("0", "GPU-aa", 0, ("pid 7 (x)",)),))
    assert fault is not None
    assert fault.warns
    assert fault.cause == "GPU 0 is in use by pid 7 (x)"


def test_gpus_are_read_from_nvidia_smi(fake_nvidia_smi: Callable[[str, str], None]) -> None:
    fake_nvidia_smi("0, GPU-aa, 0\n1, GPU-bb, [N/A]\n2, GPU-cc, 5\n", "GPU-bb, 42, /usr/bin/a, b\n")
    assert visible_gpus({}) == (
        Gpu("0", "GPU-aa", 0),
        Gpu("1", "GPU-bb", 0, ("pid 42 (/usr/bin/a, b)",)),
        Gpu("2", "GPU-cc", 5),
    )


def test_a_driver_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_nvidia_smi: Callable[[str], None]
) -> None:
    fake_nvidia_smi("")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(gpus, "LIMIT_S", 0.1)
    with pytest.raises(GpuError, match="no answer"):
        visible_gpus({})


@pytest.mark.parametrize(
    ("visible", "left"),
    [("2,0", ["2", "0"]), ("GPU-bb", ["1"]), ("", []), ("-1", []), ("0,7,1", ["0"])],
)
def test_cuda_visible_devices(
    fake_nvidia_smi: Callable[..., None], visible: str, left: list[str]
) -> None:
    fake_nvidia_smi("0, GPU-aa, 0\n1, GPU-bb, 0\n2, GPU-cc, 0\n")
    found = visible_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in found] == left


def test_unknown_name() -> None:
    fault = find(preflight.check_master, master_addr="no-such-host.invalid")
    assert fault is not None
    assert fault.name == "name-unresolved"


def test_loopback_master_of_several_nodes() -> None:
    assert find(preflight.check_master, master_addr="127.0.0.1") is None
    assert find(preflight.check_master, nnodes=2, master_addr="192.0.2.1") is None
    literal = find(preflight.check_master, nnodes=2, master_addr="localhost")
    assert literal is not None
    assert literal.warns
    other = find(preflight.check_master, nnodes=2, master_addr="127.3.2.1")
    assert other is not None
    assert not other.warns


def test_port_in_use_names_the_holder(listener: int) -> None:
    fault = find(preflight.check_master, port=listener)
    assert fault is not None
    assert fault.name == "port-in-use"
    assert f"port {listener} is taken by pid {os.getpid()} (" in fault.cause
    assert find(preflight.check_master, node_rank=1, port=listener) is None


def test_the_port_moves_on_from_one_in_use() -> None:
    wanted = port_from_id("a run")
    with socket.create_server(("127.0.0.1", wanted)):
        assert preflight.choose_port("a run", search=False) == wanted
        assert preflight.choose_port("a run", search=True) > wanted
    assert preflight.choose_port("a run", search=True) == wanted


@pytest.mark.parametrize(("wanted", "sound"), [("lo", True), ("none9", False), ("^lo", False)])
def test_gloo_interface(wanted: str, sound: bool) -> None:
    fault = find(preflight.check_interfaces, environ={"GLOO_SOCKET_IFNAME": wanted})
    assert (fault is None) == sound


@pytest.mark.parametrize(
    ("wanted", "sound"),
    [("lo", True), ("l", True), ("=lo", True), ("=l", False), ("none9", False), ("^none9", True)],
)
def test_nccl_interface(wanted: str, sound: bool) -> None:
    fault = find(preflight.check_interfaces, environ={"NCCL_SOCKET_IFNAME": wanted})
    assert (fault is None) == sound


def test_nccl_interface_that_excludes_all() -> None:
    every = "^" + ",".join(name for _, name in socket.if_nameindex())
    fault = find(preflight.check_interfaces, environ={"NCCL_SOCKET_IFNAME": every})
    assert fault is not None
    assert fault.name == "no-such-interface"


def test_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        fault = find(preflight.check_limits, only="low-nofile")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert fault == Fault("low-nofile", "at most 512 open files", "ulimit -n 65536", warns=True)


def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LEAST_DISK", 1 << 60)
    fault = find(preflight.check_folders, directories=(tmp_path / "not" / "yet",))
    assert fault is not None
    assert fault.name == "disk-low"
    assert fault.warns


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fault = find(preflight.check_folders, directories=(tmp_path / "file" / "logs",))
    assert fault is not None
    assert fault.name == "dir-unwritable"
    assert find(preflight.check_folders, directories=(tmp_path / "new" / "logs",)) is None
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # nothing is left behind


def test_warnings_refuse_only_when_strict(capsys: pytest.CaptureFixture[str]) -> None:
    warning = Fault("low-nofile", "cause", "cure", warns=True)
    assert preflight.report([warning], strict=False) == 0
    told = capsys.readouterr().err
    assert told.startswith("preflight: warning: ")
    assert told.endswith(": cause; cure [low-nofile]\n")
    assert preflight.report([warning], strict=True) == 3
    assert "warning" not in capsys.readouterr().err
    assert preflight.report([dataclasses.replace(warning, warns=False)], strict=False) == 3


def test_facts_for_the_plan(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distributed.preflight", "--run-id", "x", "--cpu-nproc", "2"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    facts = dict(line.split("=") for line in result.stdout.splitlines())
    assert facts["gpus"] == "0"
    assert facts["nproc"] == "2"
    assert facts["checks"] == str(sum(preflight.CHECKS.values())) == "14"
    assert set(facts) == {"gpus", "nproc", "port", "checks", "warnings", "seconds"}


def test_no_torch_is_imported() -> None:
    code = "import sys, distributed.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
