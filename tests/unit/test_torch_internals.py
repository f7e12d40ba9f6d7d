"""The names of torch that one file may use alone: this torch has each, or what replaces it."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from agents import rarely
from torch import _weights_only_unpickler, nn
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from distributed import torch_internals
from distributed.checkpoint import files
from distributed.environment import LauncherError
from distributed.errors import Refused
from distributed.strategy import Sharding
from launcher.agent import fork, torchrun_arguments

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "distributed/torch_internals.py"
pytestmark = pytest.mark.another_torch("private names")
# Without an underscore, and yet in no documentation.
UNDOCUMENTED = (
    "torch.numa",
    "torch.distributed.elastic.utils",
    "torch.distributed.elastic.rendezvous.utils",
)


# --- who uses them ------------------------------------------------------------------------------


def names_of_torch(source: str) -> Iterator[str]:
    """Yield the full names of torch in a source: imported, reached from there, or in a string."""
    tree = ast.parse(source)
    torchs: dict[str, str] = {}  # what a name stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torchs |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            torchs |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    torchs = {own: full for own, full in torchs.items() if full.partition(".")[0] == "torch"}
    yield from torchs.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if re.fullmatch(r"[\w.]+", rest) and (root == "torch" or root in torchs):
                yield f"{torchs.get(root, root)}.{rest}"
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch."):
            yield str(node.value)  # for import_module


def private_names(source: str) -> list[str]:
    return [*filter(is_private, names_of_torch(source))]


def is_private(name: str) -> bool:
    is_hidden = any(one.startswith("_") and not one.endswith("__") for one in name.split("."))
    return is_hidden or name.startswith(UNDOCUMENTED)


def test_one_file_alone_uses_private_names_of_torch() -> None:
    files = [ROOT / "train.py"]
    for wing in ("distributed", "launcher", "training", "scripts"):
        files += sorted((ROOT / wing).rglob("*.py"))
    found = {file: private_names(file.read_text()) for file in files}
    assert len(found.pop(HOME)) > 10  # it can be seen
    assert {str(file): names for file, names in found.items() if names} == {}


# --- that this torch has them -------------------------------------------------------------------


def test_this_torch_has_each() -> None:
    assert torch_internals.tree_leaves({"a": [1, 2]}) == [1, 2]
    assert torch_internals.tree_map_only(int, str, [1, 2.5]) == ["1", 2.5]
    assert torch_internals.is_lost_by_fork() is False
    assert torch_internals.rendezvous_settings("join_timeout=5, x=y")["join_timeout"] == "5"
    for dump in torch_internals.recorders:
        assert isinstance(json.loads(dump() or "{}"), dict)
    ours, theirs = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    torch_internals.copy_each(ours, theirs)
    assert all(map(torch.equal, ours, theirs))
    for name in ("fully_shard", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy"):
        assert hasattr(torch_internals.import_fsdp(), name)
    for name in ("DTensor", "distribute_tensor"):
        assert hasattr(torch_internals.import_dtensor(), name)


def test_process_groups_and_their_store() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert torch_internals.process_groups() == [dist.group.WORLD]
        torch_internals.default_store().set("key", "value")
        assert torch_internals.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_blocks_are_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_internals.load_dynamo()
    config = sys.modules["torch._dynamo"].config
    monkeypatch.setattr(config, "optimize_ddp", True)
    torch_internals.compile_beside_ddp()
    assert config.optimize_ddp is False


# --- what is done without them ------------------------------------------------------------------


class OldStore(TCPStore):
    """torch's store as it was before 2.8: libuv's takes no listening socket."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if options["use_libuv"]:
            raise NotImplementedError("The libuv TCPStore backend does not support this")
        super().__init__(*args, **options)


@pytest.mark.parametrize("kind", [TCPStore, OldStore])
def test_the_store_takes_over_the_port_that_is_open(
    monkeypatch: pytest.MonkeyPatch, kind: type[TCPStore]
) -> None:
    monkeypatch.setattr(torch_internals, "TCPStore", kind)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    early = socket.create_connection(("127.0.0.1", port))  # before there is a store
    store = torch_internals.serve_store("127.0.0.1", port, listener.detach())
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    store.set("key", "value")
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    assert client.get("key") == b"value"
    early.close()


@pytest.mark.parametrize(
    ("find", "name", "before"),
    [
        (torch_internals.import_fsdp, "fully_shard", "torch.distributed._composable.fsdp"),
        (torch_internals.import_dtensor, "DTensor", "torch.distributed._tensor"),
    ],
)
def test_what_was_elsewhere_is_found(
    monkeypatch: pytest.MonkeyPatch, find: Any, name: str, before: str
) -> None:
    old = types.ModuleType(before)
    monkeypatch.delattr(find(), name)
    monkeypatch.setitem(sys.modules, before, old)
    assert find() is old


def test_bytes_are_read_by_a_torch_that_does_not_know_how_they_are_pickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = dict(_weights_only_unpickler._get_allowed_globals())
    known.pop("_codecs.encode", None)  # as torch 2.4 has it
    monkeypatch.setattr(_weights_only_unpickler, "_get_allowed_globals", lambda: known)
    content = {"ranks": [b"\x00\xff", torch.ones(1)]}
    assert files.unpack(files.pack(content)) == content


def test_fsdp_on_a_cpu_is_refused_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import fsdp

    monkeypatch.setattr(torch.cpu, "Stream", type("Stream", (), {}))
    with pytest.raises(LauncherError) as error:
        fsdp.shard(nn.Linear(2, 2), [], torch.device("cpu"), Sharding())
    told = f"strategy fsdp needs GPUs with torch {torch.__version__}; install torch 2.8 or newer, "
    assert str(error.value) == f"{told}or use ddp [env-missing]"


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
    if given:
        monkeypatch.setenv("PET_MASTER_PORT", given)
    parser = torchrun.get_args_parser()
    if not given:
        parser.set_defaults(master_port=29500)  # before torch 2.12
    monkeypatch.setattr(torchrun, "get_args_parser", lambda: parser)
    args, _ = torchrun_arguments.parse([*words, "script.py"])
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
    words = [sys.executable, str(ROOT / "scripts/lib/agent.py"), str(script)]
    done = subprocess.run(words, capture_output=True, text=True)
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
        torchrun_arguments.parse([option, "script.py"])
    lacks = f"{name}: torchrun of torch {torch.__version__} has no such option; {cure}"
    assert str(error.value) == lacks
