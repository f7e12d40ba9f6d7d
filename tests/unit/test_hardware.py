"""GPUs and InfiniBand ports that are slow or down, from what real machines showed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from agents import ROOT, execute
from test_checks import make_machine

from launcher.preflight import checks, gpus
from launcher.preflight.checks import Machine
from launcher.preflight.gpus import Gpu, find_slow, visible_gpus
from launcher.preflight.infiniband import Port, can_open_devices, ports_of_nccl, read_ports
from launcher.wire import limits
from launcher.wire.messages import Fault

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
def install(tmp_path: Path, tools: Path) -> Install:
    """A function that puts an nvidia-smi on PATH which tells of these GPUs."""

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
    """The words are those of https://github.com/plambe/zabbix-nvidia-smi-multi-gpu/issues/17."""
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
    monkeypatch.setattr(limits, "NVIDIA_SMI_S", 5.0)
    install([{"name": "H100", "nvlink": "\t Link 0: 26.562 GB/s\n"}, {"name": "H100"}], nvlink_s=60)
    assert [gpu.nvlinks for gpu in visible_gpus({})] == [None, None]


@pytest.mark.parametrize(
    ("links", "odd"),
    [
        ([4, 4, 0], ""),  # a bridge joins two of three cards
        ([12, 12, 0, 0], ""),
        ([18, 17], "GPU 1 has 17 active NVLinks, others of the model have 18"),
        ([None, None], ""),
    ],
)
def test_nvlinks(links: Sequence[int | None], odd: str) -> None:
    told = [Gpu(str(i), "", 0, model="H100", nvlinks=one) for i, one in enumerate(links)]
    assert [*find_slow(told)] == ([odd] if odd else [])


def test_clocks_that_vendors_choose_are_no_fault() -> None:
    clocks = enumerate((2100, 2115, 1410))
    told = [Gpu(str(i), "", 0, model="RTX 3090", max_clock_mhz=clock) for i, clock in clocks]
    (odd,) = find_slow(told)
    assert odd == "GPU 2 has at most 1410 MHz, others of the model have 2115"


# --- InfiniBand ---------------------------------------------------------------------------------


def make_sysfs(folder: Path, ports: Mapping[str, Sequence[str]]) -> Path:
    """Make what /sys/class/infiniband is: links to folders elsewhere."""
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
def test_ports_of_real_machines(one: dict[str, Any], tmp_path: Path) -> None:
    ports = tuple(read_ports(make_sysfs(tmp_path, one["ports"])))
    assert len(ports) == len(one["ports"])
    faults = [*checks.check_infiniband(on_two_nodes(ports=ports))]
    assert [(fault.name, fault.cause, fault.warns) for fault in faults] == (
        [("infiniband-down", one["fault"], True)] if one["fault"] else []
    )
    assert one["source"].startswith("https://")


UP, DOWN = Port("mlx5_0", "1", "ACTIVE", "LinkUp"), Port("mlx5_1", "1", "DOWN", "Polling")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nodes": 1},
        {"backend": "gloo"},
        {"backend": "auto"},  # without GPUs that is gloo
        {"environ": {"NCCL_IB_DISABLE": "1"}},
        {"environ": {"NCCL_PROFILE": "ethernet"}},
        {"environ": {"NCCL_NET": "Socket"}},
        {"environ": {"NCCL_IB_HCA": "mlx5_0"}, "can_open_ports": True},
    ],
)
def test_ports_that_nccl_does_not_use_may_be_down(changes: dict[str, Any]) -> None:
    machine = on_two_nodes(**{"ports": (UP, DOWN), "can_open_ports": False, **changes})
    assert [*checks.check_infiniband(machine)] == []


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
    """https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html says how."""
    ports = [Port(device, "1", "", "") for device in ("mlx5_0", "mlx5_1", "mlx5_10")]
    named = dict(zip("abc", ports, strict=True))
    assert ports_of_nccl(ports, {"NCCL_IB_HCA": chosen}) == [named[one] for one in left]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"environ": {"NCCL_IB_HCA": "ib0"}}, "NCCL_IB_HCA=ib0 names none of the active ports"),
        ({"can_open_ports": False}, "port mlx5_0:1 is active, but /dev/infiniband cannot be op"),
    ],
)
def test_a_port_that_nccl_cannot_use_is_told(changes: dict[str, Any], cause: str) -> None:
    """NCCL takes TCP then, and says that it found no device."""
    (fault,) = checks.check_infiniband(on_two_nodes(ports=(UP,), **changes))
    assert (fault.name, fault.warns) == ("nccl-on-sockets", True)
    assert fault.cause.startswith(cause)


def test_a_machine_or_a_container_without_such_cards(tmp_path: Path) -> None:
    assert read_ports(tmp_path / "none") == []
    assert not can_open_devices(tmp_path)
    (tmp_path / "uverbs0").touch()
    assert can_open_devices(tmp_path)


# --- make test-gpu on a machine without a GPU -----------------------------------------------------


@pytest.mark.long
def test_each_row_passes_or_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    command = [sys.executable, ROOT / "tests/gpu", "--json", file, "gloo", "preflight", "launcher"]
    path = f"{ROOT}:{ROOT}/bench"
    done = execute(ROOT, *command, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    results = {row["name"]: row["result"] for row in json.loads(file.read_text())}
    assert results.pop("gloo, two ranks on one GPU") == "pass"
    assert len(results) == 3 and {*results.values()} == {"needs a GPU"}
    assert done.stdout.endswith("\n1 passed, 0 failed, 3 not run\n")
