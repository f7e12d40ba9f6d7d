"""NCCL uses TCP although InfiniBand is active: reported once, from NCCL's own log."""

import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from agents import ROOT, Run, eventually, rarely, world, written
from ports import free_port
from test_checks import HARDWARE, make_sysfs

from distributed.network import choose_variables, interface_to
from launcher.agent.diagnosis.nccl_network import NetworkWatch, prepare_watch
from launcher.preflight import infiniband
from launcher.record.run_folder import RunFolder

LOGS = yaml.safe_load((HARDWARE / "nccl.yaml").read_text())
ACTIVE = {"mlx5_0/1": ["4: ACTIVE", "5: LinkUp", "InfiniBand"]}


def look(watch: NetworkWatch) -> str:
    shown: list[str] = []
    watch.poll_nccl_log(shown.append)
    return "".join(shown)


@pytest.mark.parametrize("one", LOGS, ids=lambda one: one["nccl"])
def test_what_nccl_logged_in_real_runs(one: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    watch = NetworkWatch(log, 0, "mlx5_0:1")
    assert look(watch) == ""  # NCCL has not started
    before, _, _ = one["text"].partition("Using network")
    log.write_text(before)
    assert look(watch) == ""
    log.write_text(one["text"])
    warning = look(watch)
    if one["reason"]:
        assert f"NCCL uses TCP, although port mlx5_0:1 is active ({one['reason']}); " in warning
        assert warning.endswith(" [nccl-on-sockets]")
    else:
        assert warning == ""
    assert look(watch) == ""  # it is reported once
    assert one["source"].startswith("https://")


def test_older_lines_of_a_log_do_not_count(tmp_path: Path) -> None:
    log = written(tmp_path / "node_0.log", LOGS[0]["text"])
    watch = NetworkWatch(log, log.stat().st_size, "mlx5_0:1")
    assert look(watch) == ""
    with log.open("a") as more:
        more.write("[0] node1:1:1 [0] NCCL INFO Using network Socket\n")
    assert "although port mlx5_0:1 is active; " in look(watch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a run on a machine with an active port."""
    monkeypatch.setattr(infiniband, "SYSFS", make_sysfs(tmp_path / "sys", ACTIVE))
    run = RunFolder(tmp_path / "logs", "mine", 0, {})
    run.create()
    return run


def test_rank_0_writes_a_log_where_a_port_is_active(folder: RunFolder) -> None:
    (folder.path / "nccl.log").write_text(LOGS[0]["text"])  # from an earlier run
    watch = prepare_watch(folder, {})
    assert watch.log == folder.path / "nccl.log"
    assert look(watch) == ""
    assert watch.variables == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV",
        "NCCL_DEBUG_FILE": str(folder.path / "nccl.log"),
    }


@pytest.mark.parametrize(
    "environ",
    [
        {"NCCL_IB_DISABLE": "1"},
        {"NCCL_PROFILE": "ethernet"},
        {"NCCL_NET": "IB"},  # NCCL then fails by itself
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_DEBUG_SUBSYS": "COLL"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "mine.log"},
        {"NCCL_CONF_FILE": "nccl.conf"},
    ],
)
def test_what_the_user_has_chosen_stays(environ: Mapping[str, str], folder: RunFolder) -> None:
    os.chdir(folder.path)
    Path("nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    assert prepare_watch(folder, environ) == NetworkWatch()


@pytest.mark.parametrize("environ", [{"NCCL_DEBUG": "info"}, {"LOG_LEVEL": "DEBUG"}])
def test_a_log_that_the_user_asked_for_is_read(
    environ: Mapping[str, str], folder: RunFolder
) -> None:
    folder.node_log.write_text("older\n")
    assert prepare_watch(folder, environ) == NetworkWatch(folder.node_log, 6, "mlx5_0:1")


def test_without_an_active_port_there_is_nothing_to_watch(
    folder: RunFolder, tmp_path: Path
) -> None:
    for file in (tmp_path / "sys").rglob("state"):
        file.write_text("1: DOWN\n")
    assert prepare_watch(folder, {}) == NetworkWatch()


# --- real agents and ranks ----------------------------------------------------------------------

# The kernel's files about InfiniBand come from the folder that the first argument names.
ON_THIS_MACHINE = f"""
import pathlib, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from launcher.preflight import infiniband
infiniband.SYSFS = pathlib.Path(sys.argv[1])
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Logs like NCCL: only at INFO, to NCCL_DEBUG_FILE if set, otherwise to stdout.
PROGRAM = """
import os, sys, time
print("NCCL_DEBUG is", os.environ.get("NCCL_DEBUG"), flush=True)
if os.environ.get("NCCL_DEBUG") == "INFO":
    file = os.environ.get("NCCL_DEBUG_FILE")
    with open(file, "w") if file else os.fdopen(1, "w", closefd=False) as log:
        log.write(open(sys.argv[1]).read())
    print("logged", flush=True)
time.sleep(45)
"""


def say_what_they_log(folder: Path) -> list[str]:
    """Return what the ranks that have started print about NCCL_DEBUG."""
    logs = "".join(log.read_text() for log in folder.glob("node_*.log"))
    return re.findall(r"NCCL_DEBUG is (.*)", logs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{}, *rarely({"NCCL_DEBUG": "INFO"})], ids=["by us", "by the user"]
)
def test_it_is_told_within_seconds(tmp_path: Path, runs: list[Run], asked: dict[str, str]) -> None:
    sysfs = make_sysfs(tmp_path / "sys", ACTIVE)
    driver, script, text = (tmp_path / name for name in ("driver.py", "script.py", "text"))
    driver.write_text(ON_THIS_MACHINE)
    script.write_text(PROGRAM)
    text.write_text(LOGS[1]["text"])
    port = free_port()
    for node in range(2):
        through = [sys.executable, str(driver), str(sysfs)]
        words = [f"--log-dir={tmp_path}", "--rdzv-id=mine", str(script), str(text)]
        runs.append(Run([*world(port, node, nproc=2), *words], None, through, **asked))
    runs[0].wait_for("logged\n")
    stderr = runs[0].process.stderr
    assert stderr is not None
    while "[nccl-on-sockets]" not in (line := stderr.readline()):
        assert line, "ended without a warning"
    assert "although port mlx5_0:1 is active (Failed to open libibverbs.so[.1]); give" in line
    eventually(lambda: len(say_what_they_log(tmp_path / "mine")) == 4)
    assert say_what_they_log(tmp_path / "mine").count("INFO") == (4 if asked else 1)
    os.kill(runs[0].process.pid, signal.SIGTERM)
    said = "".join(run.finish() for run in runs)
    assert "nccl-on-sockets" not in said  # it was reported once
    assert ("NCCL INFO" in runs[0].output) == bool(asked)  # the terminal shows what the user chose
    assert (tmp_path / "mine/nccl.log").exists() == (not asked)


# --- interfaces and settings ----------------------------------------------------------------------


ELSEWHERE = "192.0.2.1"  # reserved for documentation, RFC 5737


def default_interface() -> str:
    """Return the interface of the default route, as the kernel lists it."""
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    names = [name for name, destination, *_ in routes if destination == "00000000"]
    return names[0] if names else pytest.skip("this machine has no default route")


def test_interface_to_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("::1") in ("lo", None)  # None without IPv6
    assert interface_to("no-such-host.invalid") is None
    assert interface_to(ELSEWHERE) == default_interface()


IB, OFF = {"NCCL_PROFILE": "infiniband"}, {"NCCL_PROFILE": "none"}
ROUTED = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # over the default route
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
THEIRS = {"GLOO_SOCKET_IFNAME": "x0", "NCCL_SOCKET_IFNAME": "^docker", "NCCL_NET": "Socket"}


@pytest.mark.parametrize(
    ("master", "nodes", "given", "chosen"),
    [
        (ELSEWHERE, 2, {}, ROUTED),
        (ELSEWHERE, 2, IB, ROUTED | {"NCCL_NET": "IB"}),
        (ELSEWHERE, 2, OFF, {}),
        (ELSEWHERE, 2, THEIRS | IB, {}),
        ("127.0.0.1", 2, {}, {}),  # all nodes on one machine
        ("127.0.0.1", 2, {"NCCL_PROFILE": "ethernet"}, {"NCCL_IB_DISABLE": "1"}),
        # A single machine uses loopback.
        *((ELSEWHERE, 1, given, LOOPBACK) for given in ({}, IB)),
        *((ELSEWHERE, 1, given, {}) for given in (OFF, LOOPBACK | {"GLOO_SOCKET_IFNAME": "x0"})),
    ],
)
def test_what_is_chosen_for_the_network(
    master: str, nodes: int, given: dict[str, str], chosen: dict[str, str]
) -> None:
    if "{}" in str(chosen):
        chosen = {key: value.format(default_interface()) for key, value in chosen.items()}
    assert choose_variables(master, nodes, given) == chosen


def test_a_profile_that_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast'; use infiniband, ethernet, none"):
        choose_variables(ELSEWHERE, 2, {"NCCL_PROFILE": "fast"})
