"""The preflight: each check on a node that is sound, and on one with the fault it is there for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distributed.environment import port_from_id
from launcher import gpus, preflight
from launcher.gpus import Gpu, GpuError, visible_gpus
from launcher.preflight import Fault, Machine, PreflightReport

ROOT = Path(__file__).resolve().parents[2]


def make_node(**changes: object) -> Machine:
    """Return a sound single node, changed."""
    node = Machine(
        run_id="mine",
        nnodes=1,
        node_rank=0,
        nproc=2,
        master_addr="127.0.0.1",
        port=free_port(),
        port_error=0,
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


Check = Callable[[Machine], Iterator[Fault]]


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
    bare = [sys.executable, "-S", "-m", "launcher.preflight", "--run-id", "x"]  # -S: no packages
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
    assert find(preflight.check_master, nnodes=2, node_rank=1, master_addr="192.0.2.1") is None
    literal = find(preflight.check_master, nnodes=2, master_addr="localhost")
    assert literal is not None
    assert literal.warns
    other = find(preflight.check_master, nnodes=2, master_addr="127.3.2.1")
    assert other is not None
    assert not other.warns


def test_a_live_run_of_the_same_id_is_named() -> None:
    serve = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=1)"
    command = [sys.executable, "-c", f"{serve}; input()", "--rdzv-id", "mine", "script"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        port = int(agent.stdout.readline())
        taken = make_node(port=port, port_error=preflight.bind_error(port))
        (live,) = preflight.check_master(taken)
        (other,) = preflight.check_master(dataclasses.replace(taken, run_id="min"))
        agent.communicate(b"\n")
    assert (live.name, other.name) == ("run-is-live", "port-in-use")
    assert live.cause == "run mine is live: its node agent runs here"


def test_a_master_address_of_another_machine_is_a_warning() -> None:
    (fault,) = preflight.check_master(make_node(nnodes=2, master_addr="192.0.2.1"))
    assert fault.warns and fault.name == "no-such-interface"
    assert "192.0.2.1 is not of this machine" in fault.cause
    assert not list(
        preflight.check_master(make_node(nnodes=2, node_rank=1, master_addr="192.0.2.1"))
    )


def test_port_in_use_names_the_holder(listener: int) -> None:
    code = preflight.bind_error(listener)
    fault = find(preflight.check_master, port=listener, port_error=code)
    assert fault is not None
    assert fault.name == "port-in-use"
    assert f"port {listener} is taken by pid {os.getpid()} (" in fault.cause


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


def test_the_interface_that_leads_to_the_master_is_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "none9"}
    fault = find(preflight.check_interfaces, environ=environ)  # of one machine
    assert fault is not None
    assert "name one of lo" in fault.cure
    monkeypatch.setattr(preflight, "interface_to", {"192.0.2.1": "eth7"}.get)
    fault = find(preflight.check_interfaces, environ=environ, master_addr="192.0.2.1")
    assert fault is not None
    assert fault.cure.startswith("unset it, or name eth7, which leads to the master")


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
    assert preflight.report([warning], strict=False, host="node1") == 0
    told = capsys.readouterr().err
    assert told == "preflight: warning: node1: cause; cure [low-nofile]\n"
    assert preflight.report([warning], strict=True, host="node1") == 3
    assert "warning" not in capsys.readouterr().err
    refusal = dataclasses.replace(warning, warns=False)
    assert preflight.report([refusal], strict=False, host="node1") == 3


def test_facts_for_the_plan(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher.preflight", "--run-id", "x", "--cpu-nproc", "2"]
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


# --- several nodes ------------------------------------------------------------------------------


def start_node(
    node_rank: int, port: int, *more: str, python: Sequence[str] = (sys.executable,)
) -> subprocess.Popen[str]:
    """Start one of three nodes that are all this machine."""
    place = ["--nnodes", "3", "--meet", "3", "--node-rank", str(node_rank), "--port", str(port)]
    return subprocess.Popen(
        [*python, "-m", "launcher.preflight", *place, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def compare(said: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.preflight", "--compare", *more]
    return subprocess.run(command, cwd=ROOT, input=said, capture_output=True, text=True)


def test_nodes_that_match_meet_and_pass(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    port = free_port()
    program = ["--directory", str(tmp_path), "--", "own.py", "x" * 300, " a  b ", "--flag"]
    nodes = [start_node(rank, port, *program) for rank in (2, 1, 0)]
    said = "".join(node.communicate()[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0, 0]
    result = compare(said)
    assert (result.returncode, result.stderr) == (0, "")
    facts = dict(line.split("=") for line in result.stdout.splitlines())
    assert facts["checks"] == str(sum(preflight.CHECKS.values()) + preflight.COMPARED) == "20"
    assert int(facts["warnings"]) >= 3  # each that 127.0.0.1 is loopback


def test_each_nodes_own_files_and_torch_are_compared(tmp_path: Path) -> None:
    port = free_port()
    nodes = []
    for rank, python in enumerate([(sys.executable,), (sys.executable, "-S"), (sys.executable,)]):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "my.yaml").write_text(f"seed: {rank // 2}")
        if rank != 2:
            (folder / "own.py").write_text(f"seed = {rank}")
        words = ["--directory", str(folder), "--", "own.py", "--config", "my.yaml"]
        nodes.append(start_node(rank, port, *words, python=python))
    said = [node.communicate() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 3, 3]
    assert "has no torch; " in said[1][1]
    assert "there is no script " in said[2][1]
    result = compare("".join(out for out, _ in said))
    assert result.returncode == 3
    differ = [re.sub("'[0-9a-f]{12}'", "HASH", line) for line in result.stderr.splitlines()]
    host = socket.gethostname().partition(".")[0]
    assert [line.removeprefix(f"preflight: {host}: ") for line in differ] == [
        f"{file} is HASH on node rank 0 ({host}) and HASH on node rank {rank} ({host});"
        " make them the same [code-mismatch]"
        for file, rank in (("own.py", 1), ("my.yaml", 2))
    ]


def make_answer(node_rank: int, **changes: Any) -> PreflightReport:
    answer = PreflightReport(
        node_rank=node_rank,
        num_nodes=3,
        nproc=1,
        host=f"node{node_rank + 1}",
        run_id="x",
        versions={"python": "3.11", "torch": "2.13.0"},
        files={"own.py": "aa", "my.yaml": "bb"},
    )
    return dataclasses.replace(answer, **changes)


BLOCKED = Fault("port-blocked", "no way", "open it")


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([{}, {"versions": {"python": "3.12", "torch": "2.13.0"}}], ["version-mismatch"]),
        ([{}, {"versions": {"python": "3.11", "torch": "2.6.0"}}], ["version-mismatch"]),
        ([{}, {"versions": {"python": "3.11", "torch": ""}}], []),  # which it has told
        ([{"versions": {"python": "3.11", "torch": ""}}, {}], []),
        ([{}, {"files": {"own.py": "aa"}}, {"files": {}}], ["code-mismatch"] * 3),
        ([{"files": {"own.py": "aa"}}, {}], ["code-mismatch"]),
        ([{}, {"met": [BLOCKED]}, {"met": [BLOCKED]}], ["port-blocked"] * 2),
        ([{"told": ["port-in-use"]}, {"met": [BLOCKED]}], []),
        ([{"told": ["small-shm"]}, {"met": [BLOCKED]}], ["port-blocked"]),
    ],
)
def test_faults_between_nodes(nodes: list[dict[str, Any]], found: list[str]) -> None:
    answers = [make_answer(rank, **changes) for rank, changes in enumerate(nodes)]
    assert [fault.name for _, fault in preflight.compare(reversed(answers))] == found


def test_nothing_is_said_of_the_port_of_a_node_that_gave_no_answer() -> None:
    answers = [
        make_answer(1),
        make_answer(2, met=[BLOCKED], files={"own.py": "aa", "my.yaml": "cc"}),
    ]
    (host, fault), *others = preflight.compare(answers)
    assert (host, fault.name, others) == ("node3", "code-mismatch", [])


def test_answers_arrive_in_pieces_and_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    long = {f"file {number} .yaml": "ab" * 6 for number in range(100)}
    answers = [make_answer(rank, files=long, told=[], met=[BLOCKED]) for rank in range(2)]
    for answer in answers:
        preflight.print_answer(answer)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 1024  # so much srun keeps together
    assert not any(line.endswith(" ") for line in lines)
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    mixed = [line for pair in zip(second, first, strict=True) for line in pair]
    assert sorted(preflight.read_answers(["gpus=0", *mixed]), key=lambda a: a.node_rank) == answers


def test_warnings_of_all_nodes_refuse_only_when_strict(capsys: pytest.CaptureFixture[str]) -> None:
    skew = Fault("clock-skew", "cause", "cure", warns=True)
    for answer in (make_answer(0, told=["small-shm"]), make_answer(1, met=[skew])):
        preflight.print_answer(answer)
    said = capsys.readouterr().out
    result = compare(said)
    assert (result.returncode, result.stdout) == (0, "checks=20\nwarnings=2\n")
    assert result.stderr == "preflight: warning: node2: cause; cure [clock-skew]\n"
    assert compare(said, "--strict").returncode == 3


@contextmanager
def a_master(says: bytes) -> Iterator[int]:
    """Be a node rank 0 that says this to the first that comes to its port."""

    def serve() -> None:
        with server.accept()[0] as visitor:
            visitor.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        thread.join()


def visit(says: bytes) -> list[Fault]:
    with a_master(says) as port:
        return list(preflight.visit_master("127.0.0.1", port, time.monotonic() + 5))


@pytest.mark.parametrize(("ahead", "sound"), [(0, True), (-4, True), (42, False), (-42, False)])
def test_clocks(listener: int, ahead: float, sound: bool) -> None:
    greeting = {"port": listener, "file": "", "time": time.time() - ahead}
    faults = visit(json.dumps(greeting).encode() + b"\n")
    assert sound == (not faults)
    for fault in faults:
        assert (fault.name, fault.warns) == ("clock-skew", True)
        assert fault.cause == f"the clock is {ahead:+d} s from node rank 0's"


def test_a_folder_that_is_not_shared(listener: int, tmp_path: Path) -> None:
    greeting = {"port": listener, "file": str(tmp_path / "file"), "time": time.time()}
    (fault,) = visit(json.dumps(greeting).encode() + b"\n")
    assert (fault.name, fault.warns) == ("dir-not-shared", False)
    assert fault.cause == f"{str(tmp_path)!r} is another folder on node rank 0"
    (tmp_path / "file").touch()
    assert visit(json.dumps(greeting).encode() + b"\n") == []


def test_another_port_that_is_closed() -> None:
    port = free_port()
    greeting = {"port": port, "file": "", "time": time.time()}
    (fault,) = visit(json.dumps(greeting).encode() + b"\n")
    assert (fault.name, fault.cause) == (
        "port-blocked",
        f"no way to 127.0.0.1:{port} (Connection refused)",
    )


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"{}\n", b"7\n"])
def test_another_program_at_the_port_is_left_to_node_rank_0(says: bytes) -> None:
    assert visit(says) == []


def test_a_master_that_refuses_until_the_deadline() -> None:
    (fault,) = preflight.visit_master("127.0.0.1", free_port(), time.monotonic() + 0.2)
    assert fault.name == "port-blocked"
    assert fault.cure == "open the port in the firewall"


def test_a_master_that_comes_later(tmp_path: Path) -> None:
    port = free_port()
    found: list[Fault] = []
    deadline = time.monotonic() + 20
    visitor = threading.Thread(
        target=lambda: found.extend(preflight.visit_master("127.0.0.1", port, deadline))
    )
    visitor.start()
    preflight.receive_others(port, 1, tmp_path / "not" / "yet", deadline)
    visitor.join()
    assert found == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_the_same_is_told_without_torch() -> None:
    code = "import json, sys; from launcher import identity; print(json.dumps(identity.versions()))"
    ours = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    code = "import torch; print(torch.__version__)"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(ours.stdout)["torch"] == theirs.stdout.strip()


def test_this_project_is_hashed_too(tmp_path: Path) -> None:
    for name in ("launcher", "distributed", "training"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    code = "from pathlib import Path; from launcher import identity"
    code += "; print(identity.hash_files([], Path())['this project'])"

    def hash_of(folder: Path) -> str:
        return subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True)

    assert hash_of(tmp_path) == hash_of(ROOT)
    (tmp_path / "training/tasks/__init__.py").write_text("changed")
    assert hash_of(tmp_path) != hash_of(ROOT)


def test_no_torch_is_imported() -> None:
    code = "import sys, launcher.preflight as it; it.identity.versions()"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
