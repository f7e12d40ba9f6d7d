"""The helper's calls that move values, run on real ranks over gloo."""

import contextlib
import io
import os
import random
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agents import PATIENCE_S, execute, rarely
from ports import free_port
from test_torch_helper import own_environment, run_ranks
from torch import Tensor, nn

from distributed import checkpoint
from distributed import torch as helper
from distributed.checkpoint.files import read_progress
from distributed.checkpoint.one_call import complete
from distributed.collectives import gloo_group
from distributed.torch_internals import default_store
from launcher.agent.torch_internals import group_backends
from launcher.failure import is_peer_lost

pytestmark = pytest.mark.slow


def both(function: Any, *arguments: object) -> list[Any]:
    """Run a function on two ranks that have joined; returns each rank's result, by rank.

    Fails if a rank refuses the function because this torch is too old.
    """
    results = run_ranks(_joined, function, arguments, ranks=[0, 1], world_size=2)
    for result in results:
        if isinstance(result, str) and "; install torch " in result:
            pytest.fail(result)
    return results


def _joined(function: Any, arguments: Any) -> Any:
    helper.init_distributed(join_timeout_s=30, timeout_s=30)
    return function(*arguments)


# --- joining ------------------------------------------------------------------------------------


def _join_twice() -> tuple[bool, str]:
    first = helper.init_distributed()
    return helper.init_distributed() == first, first.run_id


def test_a_second_call_returns_the_same_environment() -> None:
    (is_same, run_id), other = run_ranks(_join_twice, ranks=[0, 1], world_size=2)
    assert is_same and other == (True, run_id)
    (alone,) = run_ranks(_join_twice, ranks=[0], world_size=1)
    assert alone[0]


def _join_after_torch() -> str:
    dist.init_process_group("gloo")
    return helper.init_distributed().run_id


def test_a_group_that_the_script_made_is_taken() -> None:
    first, other = run_ranks(_join_after_torch, ranks=[0, 1], world_size=2)
    assert first == other and "Error" not in first


def _wrap(**options: Any) -> bool:
    helper.init_distributed()
    return bool(helper.setup_distributed_models(nn.Linear(1, 1), **options).gradient_as_bucket_view)


def test_a_script_may_choose_every_option_of_ddp() -> None:
    assert both(_wrap) == [True, True]
    assert both(partial(_wrap, gradient_as_bucket_view=False)) == [False, False]


# --- values -------------------------------------------------------------------------------------


TURNED = torch.arange(6.0).view(2, 3).t()  # not contiguous
SHARES = [  # of rank 0 and of rank 1
    (torch.full((one, 2), 1).to(dtype), torch.full((two, 2), 2).to(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    for one, two in ((3, 1), (0, 2), (0, 0))
]
SHARES += [
    (torch.zeros((), requires_grad=True), torch.ones((), requires_grad=True)),
    (TURNED, TURNED[1:]),
    (torch.empty(0), torch.ones(2, 3, dtype=torch.int64)),
]


def _gather() -> list[Any]:
    found = [helper.gather(share[dist.get_rank()]) for share in SHARES]
    assert not any(one.requires_grad for one in found)
    return [(one.dtype, one.shape, one.tolist()) for one in found]


def test_gather_joins_unequal_shares_without_padding() -> None:
    wholes = [
        torch.cat([part if part.dim() else part[None] for part in (one, two)])
        if one.numel()
        else two
        for one, two in SHARES
    ]
    expected = [(one.dtype, one.shape, one.tolist()) for one in wholes]
    assert both(_gather) == [expected, expected]


def _gather_what_differs() -> Tensor:
    return helper.gather(torch.ones(2, 3 + dist.get_rank()))


def test_gather_refuses_rows_that_differ_on_every_rank() -> None:
    text = "ValueError: gather: rows differ between ranks ([[3], 'float32'] and [[4], 'float32']);"
    assert all(error.startswith(text) for error in both(_gather_what_differs))


VALUES: list[Any] = [None, 7, "text", {"a": [1, 2.5], "b": None}, [], True]
TENSORS = [
    torch.arange(6).view(2, 3).t(),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.empty(0, 3),
]


def _broadcast() -> list[Any]:
    is_first = dist.get_rank() == 0
    values = [helper.broadcast(one if is_first else "own") for one in VALUES]
    tensors = [helper.broadcast(one if is_first else None) for one in TENSORS]
    return [values, [(one.dtype, one.tolist()) for one in tensors]]


def test_broadcast_gives_all_the_value_of_rank_0() -> None:
    expected = [VALUES, [(one.dtype, one.tolist()) for one in TENSORS]]
    assert both(_broadcast) == [expected, expected]


def _mean() -> list[Any]:
    rank = dist.get_rank()
    given = [
        torch.tensor([[1.0, 2.0]]).t() * (rank + 1),
        torch.tensor(rank),
        torch.full((), 256.0 + rank, dtype=torch.bfloat16),
        torch.tensor(1.0 + rank, requires_grad=True),
        torch.tensor(rank, dtype=torch.float64),
    ]
    means = [helper.mean(one) for one in given]
    assert given[1].item() == rank
    return [(one.dtype, one.tolist()) for one in means]


def test_the_mean_of_tensors() -> None:
    first, other = both(_mean)
    single, double = torch.float32, torch.float64
    assert first == other
    assert first == [
        (single, [[1.5], [3.0]]),
        (single, 0.5),
        (single, 256.0),  # bfloat16 has no 257: rank 1 also had 256
        (single, 1.5),
        (double, 0.5),
    ]


def test_alone_a_value_is_its_own() -> None:
    rows = torch.ones(2, 2)
    assert helper.gather(rows) is not None and helper.gather(rows).tolist() == rows.tolist()
    assert helper.gather(torch.tensor(3)).tolist() == [3]
    assert helper.broadcast({"a": [1]}) == {"a": [1]}
    assert helper.broadcast(rows).tolist() == rows.tolist()
    assert helper.mean(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    with helper.main_first():
        pass


# --- rank 0 first -------------------------------------------------------------------------------


def _first_in(folder: str) -> list[str]:
    with helper.main_first():
        if dist.get_rank() == 0:
            time.sleep(0.3)
            open(f"{folder}/made", "w").close()
        return os.listdir(folder)


def test_rank_0_does_it_before_the_others(tmp_path: Any) -> None:
    assert both(_first_in, str(tmp_path)) == [["made"], ["made"]]


def _fail_first() -> None:
    with helper.main_first():
        if dist.get_rank() == 0:
            raise OSError("no space left")
        raise AssertionError("rank 1 must not begin")


def test_where_rank_0_fails_nobody_waits() -> None:
    start = time.monotonic()
    first, other = both(_fail_first)
    assert first == "OSError: no space left"
    assert other == "RuntimeError: rank 0 failed in main_first(); its message says why"
    assert is_peer_lost(other) and not is_peer_lost(first)  # the failure block shows rank 0's error
    assert time.monotonic() - start < PATIENCE_S


def _print() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        helper.print_main("step", 1, sep="=")
    return printed.getvalue()


def test_print_main_prints_on_rank_0() -> None:
    assert both(_print) == ["step=1\n", ""]


# --- the data -----------------------------------------------------------------------------------


def _refused_places() -> list[str]:
    refused = []
    for world_size, rank in ((3, None), (None, 1 - dist.get_rank()), (1, 0)):
        try:
            helper.get_dataloader_for_distributed(range(4), 1, world_size, rank, shuffle=False)  # type: ignore[arg-type]
        except ValueError as error:
            refused.append(str(error))
    helper.get_dataloader_for_distributed(range(4), 1, 2, dist.get_rank(), shuffle=False)  # type: ignore[arg-type]
    return refused


def test_another_world_size_or_rank_is_refused() -> None:
    text = "{} is {} but this run's is {}; make them agree [wrong-world]"
    for rank, refused in enumerate(both(_refused_places)):
        assert refused == [
            text.format("world_size", 3, 2),
            text.format("rank", 1 - rank, rank),
            text.format("world_size", 1, 2),
        ]


def _orders(workers: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the samples of three epochs, and of two epochs after a resume at the third."""
    loader = helper.get_dataloader_for_distributed(
        range(70),  # type: ignore[arg-type]
        8,
        shuffle=True,
        drop_last=True,  # drops three of each rank's 35 samples
        num_workers=workers,
    )
    assert not loader.persistent_workers
    begun = [[int(one) for batch in loader for one in batch] for _ in range(3)]
    sampler: Any = loader.sampler
    sampler.set_epoch(2)
    again = [[int(one) for batch in loader for one in batch] for _ in range(2)]
    sampler.set_epoch(2, done=16)
    assert [int(one) for batch in loader for one in batch] == begun[2][16:]
    assert [int(one) for batch in loader for one in batch] == again[1]
    return begun, again


@pytest.mark.parametrize("workers", [0, 1])
def test_each_iteration_is_another_epoch_and_a_resume_goes_on(workers: int) -> None:
    for begun, resumed in both(_orders, workers):
        assert len({*map(tuple, begun)}) == 3 and all(len({*one}) == 32 for one in begun)
        assert resumed[0] == begun[2] and resumed[1] not in begun


# --- process groups ---------------------------------------------------------------------------


def _limits_of_groups() -> set[float]:
    default_store().set_timeout(timedelta(seconds=5000))  # as init_distributed(timeout_s=5000)
    gloo_group()
    shard = helper.Sharding(shard=1)
    helper.setup_distributed_models(nn.Linear(2, 2), strategy="fsdp", sharding=shard)
    backends = group_backends()
    assert len({*backends}) >= 3, backends
    return {one.options._timeout.total_seconds() for one in backends}


@pytest.mark.another_torch("FSDP")
def test_other_process_groups_have_the_time_limit_too() -> None:
    for limits in both(_limits_of_groups):
        assert limits - {30.0} == {5000.0}  # the default group was made with 30 s


# --- gradients ----------------------------------------------------------------------------------


def _clip(strategy: str) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    model = helper.setup_distributed_models(nn.Linear(3, 4), strategy=strategy)
    model(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    norm = helper.clip_gradients(model, 0.5)
    assert type(norm) is Tensor and norm.dtype == torch.float32
    gradients = [one.grad for one in model.parameters()]
    whole = [getattr(one, "full_tensor", one.clone)() for one in gradients if one is not None]
    return float(norm), torch.cat([one.flatten() for one in whole]).tolist()


@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_clipped_by_the_norm_of_them_all(strategy: str) -> None:
    model = nn.Linear(3, 4)
    (model(torch.full((2, 3), 1.5)).sum()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    for found, gradients in both(_clip, strategy):
        assert found == pytest.approx(float(norm))
        assert gradients == pytest.approx(torch.cat(clipped).tolist())


# --- precision ----------------------------------------------------------------------------------


def test_autocast_computes_in_the_type_that_is_named() -> None:
    layer, inputs = nn.Linear(2, 2).to(helper.device()), torch.ones(1, 2, device=helper.device())
    for dtype in ("bfloat16", "float16", None):
        with helper.autocast(dtype):
            assert layer(inputs).dtype == getattr(torch, dtype or "float32")
    with pytest.raises(ValueError, match="dtype 'fp16' is unknown; use bfloat16, float16 or None"):
        helper.autocast("fp16")


def _skip(strategy: str) -> tuple[int, float, list[float]]:
    """Rank 1's loss is infinite in the second of three steps; this affects the shard of one row."""
    torch.manual_seed(0)
    model = helper.setup_distributed_models(nn.Linear(2, 2, bias=False), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = helper.grad_scaler("float16", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        with helper.autocast("float16"):
            out = model(torch.ones(1, 2, device=helper.device()))
        loss = out[0, 1].float()
        if step == 1 and dist.get_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        helper.clip_gradients(model, 100.0)
        scaler.step(optimizer)
        scaler.update()
    weights: Any = helper.unwrap(model).state_dict()["weight"]
    whole = getattr(weights, "full_tensor", weights.clone)()
    return int(scaler.skipped), scaler.get_scale(), whole.flatten().tolist()


@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_skip_the_step_of_an_infinite_gradient_and_count_it(strategy: str) -> None:
    first, other = both(_skip, strategy)
    assert first == other and first[:2] == (1, 4.0)
    torch.manual_seed(0)
    before = nn.Linear(2, 2, bias=False).weight.flatten().tolist()
    assert first[2] == pytest.approx([*before[:2], before[2] - 0.2, before[3] - 0.2], abs=1e-3)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_no_scaler_is_needed_for_other_types(dtype: str | None) -> None:
    scaler = helper.grad_scaler(dtype)
    assert not scaler.is_enabled() and scaler.state_dict() == {}
    loss = torch.ones((), requires_grad=True)
    assert scaler.scale(loss) is loss
    scaler.update()
    assert int(scaler.skipped) == 0


# --- save and load --------------------------------------------------------------------------------


class Loop:
    """A loop like those that users write; it draws random numbers."""

    def __init__(self, strategy: str = "auto", dtype: str | None = None) -> None:
        env = helper.init_distributed()
        helper.seed_everything(0)
        module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
        self.model = helper.setup_distributed_models(module, strategy=strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = helper.grad_scaler(dtype, init_scale=64.0)
        helper.seed_everything(0, env.rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(3, 4, device=helper.device()) + random.random()
            loss = self.model(inputs).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def weights(self) -> str:
        state: Any = helper.unwrap(self.model).state_dict()
        whole = {name: getattr(one, "full_tensor", one.detach)() for name, one in state.items()}
        return checkpoint.weights_hash(whole)

    def load(self, folder: str) -> dict[str, Any] | None:
        return helper.load(folder, self.model, self.optimizer, scaler=self.scaler)

    def save(self, folder: str, step: int, **progress: Any) -> None:
        helper.save(folder, step, self.model, self.optimizer, scaler=self.scaler, **progress)


def _save(folder: str, strategy: str, dtype: str | None) -> str:
    """Save after 3 steps; returns the weights after 5."""
    loop = Loop(strategy, dtype)
    assert loop.load(folder) is None
    loop.train(2)
    loop.save(folder, 2)
    loop.train(1)
    loop.save(folder, 3, epoch=1, losses=[0.5, None])
    loop.train(2)
    complete(0)
    return loop.weights()


def _load(folder: str, strategy: str, dtype: str | None) -> tuple[Any, str, float]:
    loop = Loop(strategy, dtype)
    progress = loop.load(folder)
    loop.train(2)
    return progress, loop.weights(), loop.scaler.get_scale()


CHANGES = [("ddp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")]


@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_loop_goes_on_as_if_never_stopped(tmp_path: Path, before: str, after: str) -> None:
    folder, whole = str(tmp_path / "run"), both(_save, str(tmp_path / "run"), before, "float16")
    format = {path.suffix for path in (tmp_path / "run/step-3").iterdir()}
    assert (".distcp" in format) == (before == "fsdp")
    resumed = both(_load, folder, after, "float16")
    assert len({*whole}) == 1 and whole[0].isalnum(), whole
    for found, weights, scale in resumed:
        assert (found, weights, scale) == (
            {"step": 3, "epoch": 1, "losses": [0.5, None]},
            whole[0],
            64.0,
        )


def _fewer(folder: str) -> tuple[Any, ...]:
    found = _load(folder, "auto", None)
    return found[0]["step"], found[2]


@pytest.mark.parametrize("strategy", ["fsdp", *rarely("ddp")])
def test_one_process_goes_on_with_what_two_have_saved(tmp_path: Path, strategy: str) -> None:
    folder = str(tmp_path / "run")
    both(_save, folder, strategy, None)
    assert run_ranks(_fewer, folder, ranks=[0], world_size=1) == [(3, 1.0)]


def test_a_run_saved_without_a_scaler_goes_on_with_float16(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    both(_save, folder, "ddp", "bfloat16")
    for progress, _, scale in both(_load, folder, "ddp", "float16"):
        assert progress["step"] == 3 and scale == 64.0


@pytest.mark.parametrize("strategy", ["ddp", *rarely("fsdp")])
@pytest.mark.parametrize("end", ["finish()", ""])
def test_the_end_of_a_script_waits_for_the_last_save(
    tmp_path: Path, strategy: str, end: str
) -> None:
    (tmp_path / "script.py").write_text(f"""
import torch
from distributed.torch import *
init_distributed()
model = setup_distributed_models(torch.nn.Linear(2000, 2000), strategy="{strategy}")
save("run", 1, model, torch.optim.SGD(model.parameters()))
{end}
""")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    words = [f"--master-port={free_port()}", "script.py"]
    execute(tmp_path, *torchrun, *words, **own_environment())
    assert (tmp_path / "run/latest").resolve().name == "step-1"


def test_what_could_not_be_loaded_is_refused_at_once(tmp_path: Path) -> None:
    loop = Loop()
    for name, odd in (
        ("score", None),
        ("score", torch.ones(2)),
        ("validation_loss", torch.ones(2)),
        ("validation_loss", "low"),
        ("validation_loss", "0.5"),
        ("validation_loss", {"loss": 1.0}),
    ):
        told = f"^the {name} is {re.escape(repr(odd))}; pass a number, or a tensor with one element"
        with pytest.raises(TypeError, match=told):
            loop.save(str(tmp_path), 1, **{name: odd})
    with pytest.raises(
        checkpoint.CheckpointError, match=r"^since holds datetime\.timedelta, which"
    ):
        loop.save(str(tmp_path), 1, since=timedelta(1))


def _of_tensors(score: float) -> dict[str, Any]:
    return {"validation_loss": torch.full((1,), score, requires_grad=True)}


@pytest.mark.parametrize(
    "given", [lambda score: {"score": score, "validation_loss": None}, _of_tensors]
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, given: Callable[[float], dict[str, Any]]
) -> None:
    loop = Loop()
    for step, score in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        loop.save(str(tmp_path / "run"), step, **given(score))
    complete(0)
    names = {path.name for path in (tmp_path / "run").iterdir() if path.name.startswith("step")}
    assert names == {"step-2", "step-3", "step-4"}
    assert loop.load(str(tmp_path / "run")) == {"step": 4, **given(2.5)}
    assert read_progress(tmp_path / "run/step-4") == {"step": 4, **given(2.5)}


def test_a_value_may_have_the_name_scaler(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    helper.save(tmp_path / "run", 1, net, optimizer, scaler="standard")
    assert helper.load(tmp_path / "run", net, optimizer) == {"step": 1, "scaler": "standard"}


def test_what_train_py_0_2_0_has_saved_beside_the_random_state_still_loads(tmp_path: Path) -> None:
    loop = Loop(dtype="float16")
    scaler = {**loop.scaler.state_dict(), "scale": 2.0}
    rank = {"rng": checkpoint.rng_state(), "meter": {"loss": 1.5}}
    progress = {"step": 1, "scaler": scaler}
    weights = loop.model.state_dict()
    state = checkpoint.State(weights, loop.optimizer.state_dict(), progress, [rank])
    saver = checkpoint.Saver(tmp_path / "run", keep_last=1)
    saver.save(1, state)
    assert loop.load(str(tmp_path / "run")) == {"step": 1}
    assert loop.scaler.state_dict()["scale"] == 2.0
