"""Sharded checkpoints: a part from each rank, and one checkpoint of all parts."""

import contextlib
import itertools
import json
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks
from launched import state_of
from test_checkpoint import Intruder, flip_a_bit, names, save
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from distributed import torch as helper
from distributed.checkpoint import (
    CheckpointError,
    Saver,
    State,
    files,
    gather_ranks,
    load,
    sharded,
    weights_hash,
)
from distributed.torch import gather_bytes
from launcher.cli.checkpoint import main

pytestmark = pytest.mark.slow

SHAPES = (16, 7, 1)  # of the model's layers; the ranks cannot share 7 or 1 evenly


def _average(rank: int, folder: Path, shard: int) -> None:
    """Check that the gradient is the mean over the ranks, as under DDP."""
    model = helper.setup_distributed_models(
        nn.Linear(4, 4, bias=False), strategy="fsdp", sharding=helper.Sharding(shard=shard)
    )
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    gradient: Any = model.weight.grad
    assert gradient.full_tensor().tolist() == 4 * [4 * [2.5]]


@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("shard", [4, 2])
def test_gradients_are_the_mean_of_all_ranks(tmp_path: Path, shard: int) -> None:
    on_ranks(4, _average, tmp_path, shard)


def _hash(rank: int, _folder: Path) -> None:
    model = helper.setup_distributed_models(nn.Linear(4, 4), strategy="fsdp")
    weights: dict[str, Any] = {**model.state_dict(), "count": torch.zeros(2)}
    with pytest.raises(TypeError, match=r"^bias is a DTensor; pass its full_tensor\(\)"):
        weights_hash(weights)
    whole = {name: getattr(one, "full_tensor", one.detach)() for name, one in weights.items()}
    hashes = gather_bytes(weights_hash(whole).encode())
    assert hashes[0] == hashes[1]


@pytest.mark.another_torch("FSDP")
def test_a_sharded_tensor_has_no_hash(tmp_path: Path) -> None:
    """Its memory is not its content, of which each rank holds a part."""
    on_ranks(2, _hash, tmp_path)


def make_state(step: int, strategy: str = "single", shard: int | str = "all") -> State:
    """Return a model and an AdamW that has taken one step, as held by this rank."""
    torch.manual_seed(step)
    layers = [nn.Linear(size, after) for size, after in itertools.pairwise(SHAPES)]
    sharding = helper.Sharding(shard=shard)
    model = helper.setup_distributed_models(
        nn.Sequential(*layers), strategy=strategy, sharding=sharding
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, SHAPES[0])).sum().backward()
    optimizer.step()
    weights = helper.unwrap(model).state_dict()
    return State(weights, optimizer.state_dict(), {"step": step}, gather_ranks({"own": step}))


def _save(rank: int, folder: Path, steps: int, strategy: str, shard: int | str = "all") -> None:
    saver = Saver(folder / "run", keep_last=9, enabled=rank == 0, format="sharded")
    for step in range(1, steps + 1):
        saver.save(step, make_state(step, strategy, shard))
    saver.wait()
    helper.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks saved a run twice."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(2, _save, folder, 2, "fsdp")
    return folder / "run"


@pytest.mark.parametrize(
    ("ranks", "strategy", "shard"),
    [(2, "ddp", "all"), (2, "fsdp", "all"), (4, "fsdp", "all"), (4, "fsdp", 2)],
)
def test_ranks_together_save_what_one_process_has(
    tmp_path: Path, ranks: int, strategy: str, shard: int | str
) -> None:
    on_ranks(ranks, _save, tmp_path, 1, strategy, shard)
    found, alone = state_of(tmp_path / "run"), make_state(1)
    assert weights_hash(found.model) == weights_hash(alone.model)
    assert [*found.ranks] == [{"own": 1}] * ranks
    assert found.optimizer["param_groups"] == alone.optimizer["param_groups"]
    for index, moments in alone.optimizer["state"].items():
        assert weights_hash(found.optimizer["state"][index]) == weights_hash(moments)
    sizes = [part.stat().st_size for part in (tmp_path / "run/step-1").glob("*.distcp")]
    assert len(sizes) == ranks and min(sizes) > 0


@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink, lambda file: os.truncate(file, 100)])
def test_a_damaged_part_is_named_and_the_one_before_taken(
    saved: Path, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    files = {file.name for file in (saved / "step-2").iterdir()}
    assert files >= {"__0_0.distcp", "__1_0.distcp", ".metadata", "index.pt", "model.pt"}
    for name in files:
        run = shutil.copytree(saved, tmp_path / name, symlinks=True)
        damage(run / "step-2" / name)
        caplog.clear()
        assert state_of(run).progress["step"] == 1
        (record,) = caplog.records
        assert f"{run}/step-2" in record.message and name in record.message
        assert "\n" not in record.message
        shutil.rmtree(run / "step-1")
        with pytest.raises(CheckpointError, match=r"no intact .* is left.*\[checkpoint-damaged\]"):
            load(run)


def test_files_of_other_names_are_no_parts(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    (tmp_path / "run/secret").write_text("")
    forge(run / "step-2", {"../secret": files.entry_of(run / "secret")})
    with pytest.raises(CheckpointError, match=r"manifest\.json differs from what was written"):
        files.read_files(run / "step-2")


def forge(folder: Path, more: dict[str, Any] | None = None) -> None:
    """Give a checkpoint a manifest that matches its files."""
    data = [file for file in folder.iterdir() if file.name != "manifest.json"]
    entries = {file.name: files.entry_of(file) for file in data} | (more or {})
    (folder / "manifest.json").write_text(json.dumps({"version": 1, "saved": 0, "files": entries}))


def _fail_on_rank_1(rank: int, folder: Path) -> None:
    saver = Saver(folder / "run", keep_last=1, enabled=rank == 0, format="sharded")
    saver.save(1, make_state(1, "fsdp"))
    saver.wait()
    helper.barrier()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # write(2) fails beyond this
    saver.save(2, make_state(2, "fsdp"))
    with pytest.raises(CheckpointError, match=r"^step 2 was not saved: rank 1: "):
        saver.wait()
    helper.barrier()


def test_where_one_rank_fails_nothing_is_committed_and_all_know(tmp_path: Path) -> None:
    on_ranks(2, _fail_on_rank_1, tmp_path)
    assert names(tmp_path / "run") == ["latest", "step-1"]
    assert state_of(tmp_path / "run").progress["step"] == 1


def _work_apart(rank: int, folder: Path, run: Path) -> None:
    (folder / str(rank)).mkdir()
    os.chdir(folder / str(rank))
    saver = Saver(Path("run"), keep_last=1, enabled=rank == 0, format="sharded")
    expected = pytest.raises(CheckpointError, match=r"^run does not exist on .*\[dir-not-shared\]$")
    with expected if rank == 1 else contextlib.nullcontext():
        saver.check_folder()
    saver.save(1, make_state(1, "fsdp"))
    unseen = r"rank 1: run/step-1.tmp-.* does not exist on .*\[dir-not-shared\]$"
    with pytest.raises(CheckpointError, match=unseen):
        saver.wait()
    if rank == 0:
        shutil.copytree(run, "run", dirs_exist_ok=True)
        assert load(Path("run")) is not None
    else:
        with pytest.raises(CheckpointError, match=r"step-2 does not exist .*\[dir-not-shared\]$"):
            load(Path("run"))


def test_a_folder_that_is_not_shared_is_named(saved: Path, tmp_path: Path) -> None:
    on_ranks(2, _work_apart, tmp_path, saved)
    assert names(tmp_path / "0/run") == ["latest", "step-1", "step-2"]


class SlowSaver(Saver):
    """Begins to write only when the test allows it."""

    go = threading.Event()

    def _begin_folder(self, temporary: Path) -> Path:
        self.go.wait()
        return super()._begin_folder(temporary)


def _train_meanwhile(rank: int, folder: Path) -> None:
    saver = SlowSaver(folder / "run", keep_last=1, enabled=rank == 0, format="sharded")
    saver.save(1, make_state(1, "fsdp"))
    for number in range(20):
        dist.all_reduce(found := torch.full((3,), number))
        assert found.tolist() == [2 * number] * 3
    saver.go.set()
    saver.wait()
    helper.barrier()


def test_the_ranks_train_while_one_is_slow_to_save(tmp_path: Path) -> None:
    on_ranks(2, _train_meanwhile, tmp_path)
    assert load(tmp_path / "run") is not None


def _send_a_false_plan(rank: int, folder: Path) -> None:
    parts = sharded.Parts()
    if rank == 0:
        with pytest.raises(pickle.UnpicklingError):
            parts.plan_and_choose({"model": {"weight": torch.ones(4)}})
    else:
        gather_bytes(b"new", parts._group)
        gather_bytes(files.pack(Intruder(str(folder / "opened"))), parts._group)


def test_what_a_false_rank_sends_is_not_unpickled(tmp_path: Path) -> None:
    on_ranks(2, _send_a_false_plan, tmp_path)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("place", [".metadata", "index.pt", "__0_0.distcp", "a part's bytes"])
def test_what_a_false_checkpoint_holds_is_not_unpickled(
    saved: Path, tmp_path: Path, place: str
) -> None:
    folder = shutil.copytree(saved / "step-2", tmp_path / "step-2")
    intruder = files.pack(Intruder(str(tmp_path / "opened")))
    if place == "a part's bytes":  # torch would unpickle it without restrictions
        index = files.unpack((folder / "index.pt").read_bytes())
        index.state_dict_metadata["model.0.bias"] = BytesStorageMetadata()
        (folder / "index.pt").write_bytes(files.pack(index))
        (folder / "__0_0.distcp").write_bytes(intruder)
    elif place == ".metadata":
        (folder / place).write_bytes(pickle.dumps(Intruder(str(tmp_path / "opened"))))
    else:
        (folder / place).write_bytes(intruder.ljust((folder / place).stat().st_size))
    forge(folder)
    if place == ".metadata":
        assert load(folder) is not None
    else:
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            load(folder)
    assert not (tmp_path / "opened").exists()


def test_torchs_own_tools_read_it_too(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved / "step-2", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["model.0.weight"], make_state(2).model["0.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("format", ["full", "sharded"])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_weights_are_exported_tied_ones_too(tmp_path: Path, format: str, ending: str) -> None:
    safe = pytest.importorskip("safetensors.torch") if ending == "safetensors" else None
    model = Tied()
    state = State(model.state_dict(), {}, {"step": 1}, [{}])
    save(tmp_path / "run", 1, state, keep_last=1, format=format)
    file = tmp_path / f"weights.{ending}"
    assert main(["export", str(tmp_path / "run"), str(file)]) == 0
    weights = safe.load_file(file) if safe else torch.load(file, weights_only=True)
    assert weights_hash(weights) == weights_hash(model.state_dict())
    Tied().load_state_dict(weights)
