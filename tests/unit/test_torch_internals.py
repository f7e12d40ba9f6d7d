"""Undocumented names of torch: two files alone use them, and this torch has each."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.run as torchrun
from agents import MODULES, ROOT, rarely, run_agent
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distributed import torch_internals
from distributed.environment import LauncherError
from distributed.errors import Refused
from distributed.strategy import Sharding
from launcher.agent import fork, torchrun_arguments
from launcher.agent import torch_internals as of_the_agent

HOMES = [ROOT / wing / "torch_internals.py" for wing in ("distributed", "launcher/agent")]
pytestmark = pytest.mark.another_torch("private names")
# Names with an underscore, or without documentation.
PRIVATE = re.compile(
    r"\b(?:torch|dist|nn)(?:\.\w+)*\._[a-z]\w*|from torch[\w.]* import (?:\([^)]*|.*)\b_[a-z]\w*"
    r"|torch\.numa\b|\belastic\.(?:rendezvous\.)?utils\b"
)


# --- which files use them -----------------------------------------------------------------------


def test_two_files_alone_use_private_names_of_torch() -> None:
    found = {file: PRIVATE.findall(file.read_text()) for file in MODULES}
    assert all(len(found.pop(home)) > 3 for home in HOMES)  # the search finds them
    assert {str(file): names for file, names in found.items() if names} == {}


# --- this torch has them ------------------------------------------------------------------------


def test_this_torch_has_each() -> None:
    assert torch_internals.tree_map_only(int, str, [1, 2.5]) == ["1", 2.5]
    assert of_the_agent.is_lost_by_fork() is False
    assert of_the_agent.rendezvous_settings("join_timeout=5, x=y")["join_timeout"] == "5"
    for dump in of_the_agent.recorders:
        assert isinstance(json.loads(dump() or "{}"), dict)
    ours, theirs = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    torch_internals.copy_each(ours, theirs)
    assert all(map(torch.equal, ours, theirs))
    for name in ("fully_shard", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy"):
        assert hasattr(torch_internals.import_fsdp(), name)
    for name in ("DTensor", "distribute_tensor"):
        assert hasattr(torch_internals.import_dtensor(), name)


def test_blocks_are_compiled_alone() -> None:
    of_the_agent.load_dynamo()
    config = sys.modules["torch._dynamo"].config
    with config.patch(optimize_ddp=True):  # monkeypatch would delete the setting at the end
        torch_internals.compile_beside_ddp()
        assert config.optimize_ddp is False
    assert config.optimize_ddp is True


# --- what happens without them ------------------------------------------------------------------


def test_the_store_takes_over_the_port_that_is_open() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    early = socket.create_connection(("127.0.0.1", port))  # before the store exists
    store = of_the_agent.serve_store("127.0.0.1", port, listener.detach())
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    store.set("key", "value")
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    assert client.get("key") == b"value"
    early.close()


def test_fsdp_on_a_cpu_is_refused_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import fsdp

    can_sum = "set_force_sum_reduction_for_comms"  # from torch 2.8 on
    monkeypatch.delattr(fsdp.fsdp2.FSDPModule, can_sum, raising=False)
    with pytest.raises(LauncherError) as error:
        fsdp.shard(nn.Linear(2, 2), [], torch.device("cpu"), Sharding())
    told = f"with torch {torch.__version__}, strategy fsdp needs GPUs; install torch 2.8 or newer, "
    assert str(error.value) == f"{told}or use ddp [env-missing]"


@pytest.mark.parametrize(
    ("devices", "chosen"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda cpu", "cpu")]
)
def test_tensors_are_exchanged_where_the_group_can_whatever_its_backend_is_called(
    monkeypatch: pytest.MonkeyPatch, devices: str, chosen: str
) -> None:
    group: Any = SimpleNamespace(_device_types=[*map(torch.device, devices.split())])
    for name in ("undefined", "cuda:nccl", "cpu:gloo,cuda:nccl", "nccl", "gloo"):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda _, name=name: name)
        assert torch_internals.device_of(group) == chosen


def test_offload_to_the_cpu_is_refused_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import fsdp

    monkeypatch.setattr(fsdp, "device_of", lambda: "cuda")
    with pytest.raises(LauncherError, match=r"cpu_offload needs collectives on the CPU.*gloo"):
        fsdp.shard(nn.Linear(2, 2), [], torch.device("cuda"), Sharding(cpu_offload=True))


def test_binding_to_cpus_is_refused_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "has_numa_binding", False)
    with pytest.raises(Refused, match=r"^this torch cannot bind ranks; install torch 2.9 or newer"):
        fork.cpus_of_ranks("node", 2)


@pytest.mark.parametrize(
    ("given", "words", "port"),
    [
        ("", [], 0),
        ("", ["--master-port=29500"], 29500),
        ("", ["--nnodes=2"], 29500),
        ("29500", [], 29500),
    ],
)
def test_one_node_has_any_free_port_although_old_torchrun_has_a_default(
    monkeypatch: pytest.MonkeyPatch, given: str, words: list[str], port: int
) -> None:
    parser = torchrun.get_args_parser()
    if not given:
        parser.set_defaults(master_port=29500)  # before torch 2.12
    monkeypatch.setattr(torchrun, "get_args_parser", lambda: parser)
    environ = {"PET_MASTER_PORT": given} if given else {}
    args, _ = torchrun_arguments.parse([*words, "script.py"], environ)
    assert args.master_port == port


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_thawed"), [("nanobind", True), *rarely(("builtins", False))])
def test_a_rank_frees_all_at_its_end_where_a_library_reports_leaks(
    tmp_path: Path, kind: str, is_thawed: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import gc, sys, types
class Last:
    def __del__(self, count=gc.get_freeze_count, frozen=gc.get_freeze_count()):
        print(count() < frozen / 2, flush=True)  # Python 3.12 freezes some as it ends
bound = type("nb_func", (), {{"__module__": {kind!r}}})()
sys.modules["triton._C.libtriton"] = types.SimpleNamespace(bound=bound)
assert gc.isenabled() and gc.get_freeze_count() > 0
last = Last()
""")
    done = run_agent(script)
    assert (done.returncode, done.stdout) == (0, f"{is_thawed}\n"), done.stderr


@pytest.mark.slow
def test_a_script_can_configure_logging_although_the_agent_has_logged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import logging\nlogging.basicConfig(level='INFO')\nlogging.info('seen')\n")
    code = (
        "import logging, runpy, sys\n"
        "logging.info('this adds a handler')\n"  # as torchrun does before torch 2.6
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = [sys.executable, "-c", code, str(ROOT / "scripts/lib/agent.py"), str(script)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "INFO:root:seen\n")


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ("--numa-binding=node", "install torch 2.9 or newer"),
        ("--virtual_local_rank", "install torch 2.10 or newer"),
        ("--nonsense", "see --help"),
    ],
)
def test_an_option_that_this_torchrun_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, option: str, cure: str
) -> None:
    parser = torchrun.get_args_parser()
    name = option.partition("=")[0].replace("_", "-")
    for spelling in (name, name.replace("-", "_").replace("__", "--", 1)):
        parser._option_string_actions.pop(spelling, None)
    monkeypatch.setattr(torchrun, "get_args_parser", lambda: parser)
    with pytest.raises(ValueError) as error:
        torchrun_arguments.parse([option, "script.py"], {})
    lacks = f"{name}: torchrun in torch {torch.__version__} has no such option; {cure}"
    assert str(error.value) == lacks
