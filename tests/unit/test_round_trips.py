"""What a script saves comes back as it was, or the save refuses it by name."""

import math
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from agents import ROOT
from forked_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from distributed import models
from distributed import torch as helper
from distributed.checkpoint import CheckpointError, Saver, State, load, one_call, weights_hash
from distributed.collectives import own_rank
from distributed.environment import LauncherError

# --- tensors --------------------------------------------------------------------------------------


class Special(Tensor):
    """A kind of tensor of a script's own."""


def holder_of(tensor: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("held", tensor)
    return module


in_each_format = pytest.mark.parametrize("format", ["full", "sharded"])


@in_each_format
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.ones(3).as_subclass(Special), "is a Special, not a plain tensor; convert"),
        (lambda: torch.ones(3).expand(4, 3), r"was made by expand\(\).*; add .contiguous\(\)"),
        (lambda: torch.ones(3, device="meta"), r"is on the meta device.*; use to_empty\(\) first"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is nested"),
        (lambda: nn.LazyLinear(3).weight, "is a UninitializedParameter"),
    ],
)
def test_a_tensor_that_could_not_be_loaded_is_refused_by_name(
    tmp_path: Path, format: str, make: Callable[[], Tensor], told: str
) -> None:
    saver = Saver(tmp_path, keep_last=1, format=format)
    with pytest.raises(CheckpointError, match=rf"^model\.held {told}"):
        saver.save(1, State({"held": make()}, {}, {"step": 1}))
    with pytest.raises(CheckpointError, match=rf"^optimizer\.state\.0\.held {told}"):
        saver.save(1, State({}, {"state": {0: {"held": make()}}}, {"step": 1}))


def test_a_tensor_that_comes_later_is_refused_too(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep_last=1)
    saver.save(1, State({}, {"state": {}}, {"step": 1}))
    later = {"state": {0: {"held": torch.ones(3).as_subclass(Special)}}}
    with pytest.raises(CheckpointError, match=r"^optimizer\.state\.0\.held is a Special"):
        saver.save(2, State({}, later, {"step": 2}))


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_a_sparse_tensor_needs_a_full_checkpoint(
    tmp_path: Path, make: Callable[[Tensor], Tensor]
) -> None:
    state = State(holder_of(make(torch.eye(3))).state_dict(), {}, {"step": 1})
    with pytest.raises(CheckpointError, match=r"^model\.held is nested, sparse or quantized"):
        Saver(tmp_path / "parts", keep_last=1, format="sharded").save(1, state)
    Saver(tmp_path / "whole", keep_last=1).save(1, state)
    again = holder_of(make(2 * torch.eye(3)))
    found = load(tmp_path / "whole")
    assert found is not None
    again.load_state_dict(found.model)
    held: Any = again.held
    assert torch.equal(held.to_dense(), torch.eye(3))


@in_each_format
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2).to(torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor(3),
        torch.arange(6.0).view(2, 3).T,
        torch.arange(9.0)[1:8:2],
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3).expand(1, 3),
        nn.Parameter(torch.ones(3)).data,
    ],
)
def test_tensors_that_come_back(tmp_path: Path, format: str, tensor: Tensor) -> None:
    module = holder_of(tensor)
    Saver(tmp_path, keep_last=1, format=format).save(1, State(module.state_dict(), {}, {"step": 1}))
    found = load(tmp_path)  # waits for the save
    assert found is not None
    module.load_state_dict(found.model)
    held = found.model["held"]
    assert (held.dtype, held.shape) == (tensor.dtype, tensor.shape)
    assert held.to(torch.complex64).tolist() == tensor.to(torch.complex64).tolist()


# --- values and objects of the script -------------------------------------------------------------


def make_loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "value",
    [
        *({1: "a", None: 2.5}, {(1, 2): 3}, (1, (2, [3])), [{2: (3,)}], {1, 2}, Counter({3: 2})),
        *(math.inf, -math.inf, 10**30, "text", None, True, {"a": [0.5, None]}, b"bytes"),
    ],
)
def test_a_value_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    loop = make_loop()
    helper.save(tmp_path, 1, *loop, value=value)
    found = helper.load(tmp_path, *loop)
    assert found == {"step": 1, "value": value} and type(found["value"]) is type(value)


def test_numbers_and_tensors_are_values_too(tmp_path: Path) -> None:
    loop = make_loop()
    values = {"nan": math.nan, "small": numpy.float32(0.5), "mean": torch.ones(2)}
    helper.save(tmp_path, numpy.int64(3), *loop, score=numpy.float32(0.25), **values)
    found = helper.load(tmp_path, *loop)
    assert found and math.isnan(found["nan"]) and torch.equal(found["mean"], torch.ones(2))
    assert repr([found["step"], found["small"], found["score"]]) == "[3, 0.5, 0.25]"
    assert (tmp_path / "best").is_symlink()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1, 2])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]
    ),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=4),
}


def rates_of(loop: tuple[nn.Module, Any], schedule: Any, steps: int) -> list[float]:
    """Step the schedule; returns each step's learning rate."""
    rates = []
    for _ in range(steps):
        loop[1].step()
        needs_metric = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
        schedule.step(*[1.0] * needs_metric)
        rates.append(loop[1].param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("way", ["object", "state"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_if_never_stopped(tmp_path: Path, name: str, way: str) -> None:
    whole, before, after = make_loop(), make_loop(), make_loop()
    expected = rates_of(whole, SCHEDULES[name](whole[1]), 6)
    schedule, again = SCHEDULES[name](before[1]), SCHEDULES[name](after[1])
    rates = rates_of(before, schedule, 3)
    if way == "object":
        helper.save(tmp_path, 3, *before, schedule=schedule)
        helper.load(tmp_path, *after, schedule=again)
    else:
        helper.save(tmp_path, 3, *before, schedule=schedule.state_dict())
        found = helper.load(tmp_path, *after)
        assert found
        again.load_state_dict(found["schedule"])
    assert rates + rates_of(after, again, 3) == expected


def test_an_object_that_only_one_side_names_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = make_loop()
    helper.save(tmp_path, 1, *loop, averaged=AveragedModel(loop[0]))
    helper.load(tmp_path, *loop, schedule=lr_scheduler.StepLR(loop[1], 2))
    assert caplog.messages == [
        "load: averaged is only in the checkpoint, so it is not loaded",
        "load: schedule is not in the checkpoint, so it is not loaded",
    ]


def test_a_checkpoint_of_another_model_is_one_line(tmp_path: Path) -> None:
    loop = make_loop()
    helper.save(tmp_path, 1, *loop)
    other = nn.Linear(3, 4)
    told = (
        r"^the checkpoint is from a different model, .* \(Error.*size mismatch for weight.*for bias"
    )
    with pytest.raises(CheckpointError, match=told) as raised:
        helper.load(tmp_path, other, torch.optim.SGD(other.parameters()))
    assert "\n" not in str(raised.value)


class Meter:
    """Counts on each rank by itself."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "by": {1: torch.tensor(self.count)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + int(state["by"][1])


def _count(rank: int, folder: Path) -> None:
    model, optimizer = make_loop()
    helper.save(folder / "run", 1, model, optimizer, meter=Meter(10 + rank))
    helper.load(folder / "run", model, optimizer, meter=(meter := Meter()))
    assert meter.count == 2 * (10 + rank)


@pytest.mark.slow
def test_every_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    on_ranks(2, _count, tmp_path)
    loop = make_loop()
    assert helper.load(tmp_path / "run", *loop, meter=(meter := Meter())) == {"step": 1}
    assert meter.count == 20


# --- runs that go on as if never stopped ----------------------------------------------------------


class Net(nn.Module):
    """Two blocks, which fsdp shards one by one, and a part that a test may compile."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.body: Any = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.body(batch)  # type: ignore[no-any-return]


def step_on(model: nn.Module, optimizer: Any, step: int) -> None:
    """Take one step on data that depends on the step and the rank alone."""
    torch.manual_seed(1000 * step + own_rank())
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def hash_of(model: nn.Module) -> str:
    """Return a hash of the weights, whole, with the names of the plain model."""
    state: Any = helper.unwrap(model).state_dict()
    return weights_hash(
        {
            name.replace("_orig_mod.", ""): getattr(one, "full_tensor", one.detach)()
            for name, one in state.items()
        }
    )


def train(
    folder: Path, last: int, model: nn.Module, optimizer: Any, after: Any = None, **objects: Any
) -> str:
    """Train up to a step as a script does, and save each step; returns a hash of the weights."""
    progress = helper.load(folder, model, optimizer, **objects)
    for step in range(progress["step"] if progress else 0, last):
        step_on(model, optimizer, step)
        if after:
            after()
        helper.save(folder, step + 1, model, optimizer, **objects)
    return hash_of(model)


def compiled(model: nn.Module) -> nn.Module:
    """Compile as a script does, but without generating code, which takes long."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compile_body(net: Net) -> Net:
    net.body = compiled(net.body)
    return net


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


# How a script wraps the model: `wrap` is setup_distributed_models.
WAYS: dict[str, Callable[[Any, Any], nn.Module]] = {
    "plain": lambda wrap, net: wrap(net),
    "outside": lambda wrap, net: compiled(wrap(net)),
    "inside": lambda wrap, net: wrap(compiled(net)),
    "in place": lambda wrap, net: compile_in_place(wrap(net)),
    "body": lambda wrap, net: wrap(compile_body(net)),
}


def _compile(rank: int, folder: Path, strategy: str) -> None:
    """Save in each way, and resume it in the next one."""

    def make(way: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = WAYS[way](
            lambda net: helper.setup_distributed_models(net, strategy=strategy), Net()
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    whole = train(folder / "whole", 4, *make("plain"))
    for way, next_way in zip(WAYS, [*[*WAYS][1:], "plain"], strict=True):
        assert train(folder / way, 2, *make(way)) != whole
        found = load(folder / way)
        assert found and [*found.model] == [*Net().state_dict()], way
        assert train(folder / way, 4, *make(next_way)) == whole, way


@pytest.mark.slow
@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_compiled_model_and_a_plain_one_resume_each_other(tmp_path: Path, strategy: str) -> None:
    on_ranks(1 if strategy == "single" else 2, _compile, tmp_path, strategy)


def test_names_that_were_saved_with_the_wrappers_still_load(tmp_path: Path) -> None:
    net = Net()
    for number, prefix in enumerate(("_orig_mod.", "_orig_mod.module.")):
        optimizer = torch.optim.AdamW(net.parameters())
        weights = {f"{prefix}{name}": one for name, one in Net().state_dict().items()}
        saver = Saver(tmp_path / str(number), keep_last=1)
        saver.save(1, State(weights, optimizer.state_dict(), {"step": 1}))
        assert helper.load(tmp_path / str(number), net, optimizer) == {"step": 1}
        assert torch.equal(net.body[0].weight, weights[f"{prefix}body.0.weight"])


def _see_through(rank: int, folder: Path, strategy: str) -> None:
    for way in ("plain", "outside", "inside"):
        wrapped = WAYS[way](
            lambda net: helper.setup_distributed_models(net, strategy=strategy), Net()
        )
        assert type(helper.unwrap(wrapped)).__name__.endswith("Net")
        assert helper.is_sharded(wrapped) == (strategy == "fsdp")
        assert len([*helper.blocks(wrapped)]) == 2
        local: list[float] = []
        exchanged: list[float] = []
        for enabled, norms in ((True, local), (False, exchanged)):
            wrapped.zero_grad()
            with helper.no_sync(wrapped, enabled=enabled):
                step_on(wrapped, SimpleNamespace(step=lambda: None, zero_grad=lambda: None), 0)
            norms += helper.gather_json(float(helper.clip_gradients(wrapped, 1.0)))
        assert exchanged[0] == exchanged[1], way
        if strategy == "ddp":
            assert local[0] != local[1], way


@pytest.mark.slow
@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_helper_sees_through_wrappers_in_any_order(tmp_path: Path, strategy: str) -> None:
    on_ranks(2, _see_through, tmp_path, strategy)


def test_a_modules_own_attribute_is_no_wrapper() -> None:
    own = nn.Module()
    own.module = nn.Linear(1, 1)
    averaged = AveragedModel(own)
    assert helper.unwrap(own) is own and helper.unwrap(averaged) is averaged
    scripted = torch.jit.script(nn.Linear(2, 2))  # its modules are in no ordinary dict
    assert helper.unwrap(scripted) is scripted


def _shard_the_moments(rank: int, folder: Path) -> None:
    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = helper.setup_distributed_models(Net())
        kind = torch.optim.AdamW
        return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1)

    whole = train(folder / "whole", 4, *make())
    assert train(folder / "run", 2, *make()) != whole
    assert train(folder / "run", 4, *make()) == whole


@pytest.mark.slow
def test_an_optimizer_that_is_spread_over_the_ranks(tmp_path: Path) -> None:
    on_ranks(2, _shard_the_moments, tmp_path)


def _average(rank: int, folder: Path, strategy: str, kind: str) -> None:
    def run(name: str, last: int) -> list[str]:
        torch.manual_seed(0)
        net = Net()
        make_ema: Any = get_ema_multi_avg_fn
        how = {"multi_avg_fn": make_ema(0.9)} if kind == "ema" else {}
        averaged = AveragedModel(net, **how)
        model, averaged = helper.setup_distributed_models(net, averaged, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule: Any = SWALR(optimizer, 0.01, anneal_epochs=4)
        if "anneal_func" in schedule.state_dict():  # a function; newer torch stores its name
            with pytest.raises(
                CheckpointError, match=r"holds (builtins\.)?getattr, which is not loaded"
            ):
                helper.save(folder / name, 1, model, optimizer, schedule=schedule)
            schedule = lr_scheduler.StepLR(optimizer, 2)

        def after() -> None:
            schedule.step()
            averaged.update_parameters(model)
            with torch.no_grad():
                averaged(torch.ones(2, 4))  # an evaluation

        objects = {"averaged": averaged, "schedule": schedule}
        trained = train(folder / name, last, model, optimizer, after, **objects)
        assert int(averaged.n_averaged) == last
        return [trained, hash_of(averaged), str(schedule.get_last_lr())]

    whole = run("whole", 6)
    assert len({*whole}) == 3 and run("run", 3) != whole
    assert run("run", 6) == whole
    assert len({*helper.gather_json(str(whole))}) == 1


@pytest.mark.slow
@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_averaged_model_goes_on_as_if_never_stopped(
    tmp_path: Path, strategy: str, kind: str
) -> None:
    on_ranks(2, _average, tmp_path, strategy, kind)


# --- load right after save ------------------------------------------------------------------------


class SlowSaver(Saver):
    """Begins to write only when somebody waits for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.go = threading.Event()

    def _begin_folder(self, temporary: Path) -> Path:
        assert self.go.wait(60)
        return super()._begin_folder(temporary)

    def wait(self) -> None:
        if self.last_step is not None:
            self.go.set()
        super().wait()


def _load_at_once(rank: int, folder: Path, strategy: str) -> None:
    one_call.Saver = SlowSaver  # type: ignore[attr-defined]
    model = helper.setup_distributed_models(Net(), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    helper.save(folder / "run", 1, model, optimizer, note=rank)
    for place in ("run", "run/../run", "run/step-1"):
        assert helper.load(folder / place, model, optimizer) == {"step": 1, "note": rank}


@pytest.mark.slow
@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_load_waits_for_the_save_in_progress(tmp_path: Path, strategy: str) -> None:
    on_ranks(1 if strategy == "single" else 2, _load_at_once, tmp_path, strategy)


@in_each_format
def test_load_waits_for_a_saver_too(tmp_path: Path, format: str) -> None:
    saver = SlowSaver(tmp_path, keep_last=1, format=format)
    saver.save(1, State({"weight": torch.ones(2)}, {}, {"step": 1}))
    found = load(tmp_path)
    assert found and found.model["weight"].tolist() == [1, 1]


def test_after_a_save_that_failed_the_one_before_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(tmp_path, keep_last=2)
    saver.save(1, State({}, {}, {"step": 1}))
    saver.save(2, State({}, {}, {"step": object()}))  # not JSON
    found = load(tmp_path)
    assert found and found.progress == {"step": 1}
    assert "step 2 was not saved" in caplog.text
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        saver.save(3, State({}, {}, {"step": 3}))


# --- the page -------------------------------------------------------------------------------------


def _follow_the_page(rank: int, folder: Path, strategy: str) -> None:
    page = (ROOT / "docs/your-script.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (block,) = [one for one in blocks if "AveragedModel" in one]
    block = block.replace("torch_launch_kit.", "").replace("(net, ema)", "(net, ema, strategy=how)")

    def run(name: str, steps: int) -> str:
        torch.manual_seed(0)
        names: dict[str, Any] = {
            **{"make_model": Net, "loss_of": lambda model, batch: model(batch).square().mean()},
            **{"batches": (torch.randn(5, 4) for _ in range(99)), "how": strategy},
            **{"folder": folder / name, "STEPS": steps, "print_main": print, "torch": torch},
        }
        exec(block, names)
        return hash_of(names["ema"])

    whole = run("whole", 6)
    assert run("run", 3) != whole
    assert run("run", 6) == whole


@pytest.mark.slow
@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_block_of_the_page_goes_on_as_if_never_stopped(tmp_path: Path, strategy: str) -> None:
    on_ranks(2, _follow_the_page, tmp_path, strategy)


# --- statistics over all ranks --------------------------------------------------------------------


def _sync_batchnorm(rank: int, folder: Path) -> None:
    with pytest.raises(LauncherError, match=r"^sync_batchnorm needs GPUs: .*; pass "):
        helper.setup_distributed_models(nn.BatchNorm1d(3), sync_batchnorm=True)

    # As if there were GPUs: no rank computes.
    patched: dict[str, Any] = {
        "device": lambda: torch.device("meta"),
        "DistributedDataParallel": lambda model, **_: model,
        "broadcast_weights": lambda model: None,
    }
    with mock.patch.multiple(models, **patched):
        frozen = nn.Sequential(nn.BatchNorm1d(3)).requires_grad_(False)
        trained = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        made = models.setup_distributed_models(trained, frozen, None, sync_batchnorm=True)
    assert type(made[0][1]) is nn.SyncBatchNorm and made[2] is None
    assert type(made[1][0]) is nn.BatchNorm1d


@pytest.mark.slow
def test_batchnorm_over_all_ranks_needs_gpus(tmp_path: Path) -> None:
    on_ranks(2, _sync_batchnorm, tmp_path)
    alone = helper.setup_distributed_models(nn.BatchNorm1d(3), sync_batchnorm=True)
    assert type(alone) is nn.BatchNorm1d
