"""A user's own task, with all that it may define: evaluate, optimizer, schedule, loader, an end."""

import math
import types
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import rarely
from launched import Work
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from distributed.checkpoint import weights_hash
from distributed.checkpoint.files import read_progress
from distributed.environment import detect
from distributed.models import blocks
from training.config_file import SettingsError
from training.model import fix_bucket_order, mean_metrics, set_up_blocks, validate
from training.optimizer import Schedule, choose_optimizer
from training.settings import Settings, Train
from training.tasks import Task, evaluate, metrics_of, scores_of

pytestmark = pytest.mark.slow

# Points left and right of a line; the weights, the order and the noise are random.
TASK = """
import os, signal
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, TensorDataset
from training.tasks import Task

def points(number, seed):
    x = torch.randn(number, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())

class Points(Task):
    best, best_is_highest = "accuracy", True

    def __init__(self, settings):
        self.settings = settings
        self.train, self.validation = points(64, 1), points(37, 2)

    def model(self):
        self.frozen = nn.Identity().eval()  # as a frozen encoder
        layers = nn.Linear(2, 8), nn.Dropout(0.1), nn.ReLU(), self.frozen, nn.Linear(8, 2)
        return nn.Sequential(*layers)

    def loss(self, model, batch):
        assert not self.frozen.training
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        scores, labels = model(batch[0]), batch[1]
        right = (scores.argmax(1) == labels).sum()
        loss = cross_entropy(scores, labels, reduction="sum")
        return {"loss": (loss, len(labels)), "accuracy": (right, len(labels))}

class Own(Points):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def schedule(self, optimizer, last_step):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=last_step + 1)

class Stopping(Own):
    calls = 0

    def loss(self, model, batch):
        self.calls += model.training
        if self.calls == int(os.environ.get("STOP_AFTER", 0)):
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().loss(model, batch)

class Steps(Stopping):
    def schedule(self, optimizer, last_step):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 20])

class Plateau(Stopping):
    def schedule(self, optimizer, last_step):
        which = torch.optim.lr_scheduler.ReduceLROnPlateau
        return which(optimizer, mode="max", factor=0.5, patience=0, threshold=0.2)

    def metrics(self, loss):
        return {"half": loss / 2, "not_yet": None}

class Normed(Points):
    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])

class Endless(IterableDataset):
    def __iter__(self):
        data = points(64, 1)
        return (data[index] for index in torch.randperm(64).tolist())

class Streaming(Stopping):
    def __init__(self, settings):
        super().__init__(settings)
        self.train = Endless()

class Short(Points):
    def __init__(self, settings):
        super().__init__(settings)
        self.train = Once()

class Once(IterableDataset):  # the second epoch has no sample
    def __init__(self):
        data = points(16, 1)
        self.samples = iter([data[index] for index in range(16)])

    def __iter__(self):
        return self.samples

class Uneven(Points):  # the loss is 1 on rank 0, of one term, and 5 on rank 1, of three
    def loss(self, model, batch):
        return 1 + 4 * int(os.environ["RANK"]) + 0 * super().loss(model, batch)

    def weight(self, batch):
        return 1 + 2 * int(os.environ["RANK"])

    def evaluate(self, model, batch):
        return {**super().evaluate(model, batch), "rare": (0.0, 0)}

class Unlike(Points):
    def __init__(self, settings):
        self.train, self.validation = points(67 - int(os.environ["RANK"]), 1), points(37, 2)

class Blind(Points):
    def __init__(self, settings):
        self.train, self.validation = points(64, 1), []

class Apart(Points):  # its samples to validate on have another shape
    def __init__(self, settings):
        self.train, self.validation = points(64, 1), [torch.ones(5)] * 3

    def evaluate(self, model, batch):
        return {"loss": (batch.sum(), len(batch))}

class Misspelt(Points):
    best = "acuracy"

    def loss(self, model, batch):
        raise RuntimeError("this is the first step")

class Early(Points):
    def on_validation(self, step, metrics):
        return step >= 8 and metrics["accuracy"] > 0

class EarlyStep(Points):
    def on_step(self, step):
        return step == 7
"""
CONFIG = """
task: points:Points
train: {max_steps: 30, batch_size: 4, log_every: 1, eval_every: 4, learning_rate: 0.01}
checkpoint: {every: 4, keep_last: 2}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "points.py").write_text(TASK)
    (folder / "points.yaml").write_text(CONFIG)
    return Work(folder, "points.yaml")


def test_metrics_are_exact_over_the_ranks_and_choose_the_best(work: Work) -> None:
    told = work.run("points", 2)
    accuracy = work.metrics("points", "validation_accuracy")
    assert set(accuracy) == {*range(4, 31, 4), 30}
    assert all(abs(value * 37 - round(value * 37)) < 1e-9 for value in accuracy.values())
    assert f"validation loss {work.metrics('points', 'validation_loss')[30]:.4f}, " in told
    assert f"accuracy {accuracy[30]:.4f}" in told
    best = read_progress(work.folder / "checkpoints/points/best")
    assert -best["score"] == max(accuracy.values())
    assert accuracy[best["step"]] == max(accuracy.values())


@pytest.mark.parametrize("task", ["Streaming", pytest.param("Stopping", marks=pytest.mark.long)])
def test_an_optimizer_and_a_schedule_of_ones_own_resume_exactly(work: Work, task: str) -> None:
    word = f"task=points:{task}"
    work.run(f"whole-{task}", 2, word)
    rates = work.metrics(f"whole-{task}", "lr")
    assert max(rates.values()) == pytest.approx(0.5, abs=0.02)
    work.run(f"parts-{task}", 2, word, code=75, STOP_AFTER="11")
    told = work.run(f"parts-{task}", 1, "task=points:Points", code=2)
    assert "the checkpoint is from a different model, optimizer or other object; use those" in told
    work.run(f"parts-{task}", 2, word)
    parts, whole = (weights_hash(work.weights(f"{one}-{task}")) for one in ("parts", "whole"))
    assert parts == whole
    assert work.metrics(f"parts-{task}", "lr") == rates


def test_a_schedule_by_validations_resumes_exactly(work: Work) -> None:
    word = "task=points:Plateau"
    work.run("whole-plateau", 2, word)
    rates = work.metrics("whole-plateau", "lr")
    assert min(rates.values()) < rates[1] == 0.1  # it fell
    work.run("parts-plateau", 2, word, code=75, STOP_AFTER="11")
    work.run("parts-plateau", 2, word)
    assert work.metrics("parts-plateau", "lr") == rates
    parts, whole = (weights_hash(work.weights(f"{one}-plateau")) for one in ("parts", "whole"))
    assert parts == whole
    assert work.metrics("parts-plateau", "half") and not work.metrics("parts-plateau", "not_yet")


@pytest.mark.parametrize(
    ("optimizer", "schedule", "told"),
    [
        (lambda _: [1], None, "returned a list; return a torch.optim.optimizer.Optimi"),
        (None, lambda *_: len, "returned a builtin_function_or_method; return a torch.o"),
        (
            None,
            lambda one, _: ReduceLROnPlateau(one),
            "ReduceLROnPlateau needs validations; set tr",
        ),
        (None, lambda one, _: ReduceLROnPlateau(one, "max"), ""),
    ],
)
def test_what_is_no_optimizer_or_schedule_is_refused(
    optimizer: Any, schedule: Any, told: str
) -> None:
    task: Any = types.SimpleNamespace(best="loss", best_is_highest=False)
    task.optimizer = optimizer or (lambda _: None)
    task.schedule = schedule or (lambda *_: None)
    settings = Train(max_steps=1, batch_size=1, eval_every=0 if told else 1)
    told = told or "has mode='max', but best_is_highest is False; match them"
    with pytest.raises(SettingsError, match=rf"^task: \S*test_task.py:\d+: .*{told}"):
        Schedule(choose_optimizer(task, nn.Linear(1, 1), settings), task, settings, 1)


def test_metrics_that_are_missing_are_skipped_and_others_must_be_numbers() -> None:
    task: Any = types.SimpleNamespace(metrics=lambda loss: {"a": loss, "b": None})
    assert metrics_of(task, 1.5) == {"a": 1.5}
    task.metrics = lambda loss: {"a": torch.tensor([loss])}
    assert metrics_of(task, 1.5) == {"a": 1.5}
    for wrong in ({"a": "b"}, {"a": torch.ones(2)}, 0.5, None):
        task.metrics = lambda loss, wrong=wrong: wrong
        with pytest.raises(
            TypeError, match=r"test_task.py:\d+: metrics returned .*; return {name: "
        ):
            metrics_of(task, 1.5)
    task.evaluate = lambda model, batch: {"a": (1.0, 2), "b": None}
    assert evaluate(task, nn.Identity(), None) == {"a": (1.0, 2), "b": (0.0, 0.0)}


def test_a_metric_may_be_missing_in_some_batches() -> None:
    task: Any = types.SimpleNamespace(metrics=lambda loss: {})
    task.evaluate = lambda model, batch: {"loss": (batch, 1)} if batch else {"rare": (3.0, 2)}
    settings = Settings(train=Train(max_steps=1, batch_size=1))
    batches = [(4.0, True), (0.0, True)]
    assert mean_metrics(task, nn.Identity(), batches, settings, 1) == {"loss": 4.0, "rare": 1.5}
    task.evaluate = lambda model, batch: {5: (batch, 1)}  # as in {k: ... for k in (1, 5)}
    assert mean_metrics(task, nn.Identity(), batches, settings, 1) == {"5": 2.0}


def test_a_task_is_found_beside_its_config(work: Work, tmp_path: Path) -> None:
    config = str(work.folder / "points.yaml")
    words = ("train.max_steps=null", "train.epochs=2", "data.num_workers=1")
    assert "samples/s" in Work(tmp_path, config, *words).run("mine", 2)
    assert read_progress(tmp_path / "checkpoints/mine/latest")["step"] == 16


def test_the_loss_of_ranks_counts_by_its_terms(work: Work) -> None:
    told = work.run("uneven", 2, "task=points:Uneven", "train.max_steps=4")
    assert work.metrics("uneven", "loss") == dict.fromkeys(range(1, 5), 4.0)
    assert "accuracy" in told and not work.metrics("uneven", "validation_rare")  # it had no terms


@pytest.mark.long
def test_a_schedule_by_steps_goes_on_where_it_was(work: Work) -> None:
    """JSON would turn its steps into strings, and the rate would never change again."""
    work.run("steps", 1, "task=points:Steps", code=75, STOP_AFTER="6")
    work.run("steps", 2, "task=points:Steps")
    rates = work.metrics("steps", "lr")
    assert [rates[step] for step in (9, 10, 20, 21)] == pytest.approx([0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize(("task", "nproc", "step"), [("EarlyStep", 1, 8), *rarely(("Early", 2, 9))])
def test_a_task_may_end_the_run(work: Work, task: str, nproc: int, step: int) -> None:
    told = work.run(task, nproc, f"task=points:{task}")
    assert f"done       step {step}, ended by task " in told
    assert "\nresume " not in told
    again = work.run(task, nproc, f"task=points:{task}")
    assert ": an earlier start has completed the run\n" in again
    assert max(work.metrics(task, "loss")) == step


@pytest.mark.long
@pytest.mark.parametrize(
    ("nproc", "task", "settings"),
    [  # the backward pass for DDP's bucket order used to index `train`
        (4, "Streaming", ["train.batch_size=1"]),
        (3, "Blind", ["train.eval_every=0"]),
        (3, "Apart", []),
    ],
)
def test_data_may_lack_a_length_and_data_to_validate_on_may_be_missing_or_unlike(
    work: Work, nproc: int, task: str, settings: list[str]
) -> None:
    work.run(task, nproc, f"task=points:{task}", "train.max_steps=3", *settings)
    assert len(work.metrics(task, "loss")) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [  # the ranks would draw different samples, or wait for each other for ever
        (["task=points:Unlike"], "data: ranks 0 and 1 differ; give all nodes the same data"),
        (
            ["task=points:Blind"],
            "data: validation has no samples; give it samples, or set train.eval_every=0",
        ),
        *rarely(
            (
                ["task=points:Streaming", "train.epochs=3"],
                "train.epochs: the data has no length; use train.max_steps",
            )
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(work: Work, words: list[str], told: str) -> None:
    assert told in work.run("refused", 2, *words, code=2)


def test_an_epoch_without_a_batch_is_told_in_one_line(work: Work) -> None:
    told = work.run("short", 2, "task=points:Short", code=2)
    assert "train.py: data: epoch 1 is too small for one batch per rank; iter(train) must" in told
    assert "Traceback" not in told


class PerSample:
    """A task whose loss takes only training data, and returns one value per sample."""

    train = TensorDataset(torch.ones(8, 2))
    validation = TensorDataset(torch.ones(8, 3))
    loader = Task.loader
    collate = None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])  # type: ignore[no-any-return]


def test_a_mistake_in_a_loss_is_named_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.model.count_ranks", lambda: 3)
    task: Any = PerSample()
    settings = Settings(train=Train(max_steps=1, batch_size=2))
    told = r"loss returned a tensor of shape \[2, 1\]"
    with pytest.raises(TypeError, match=told) as raised:
        fix_bucket_order(task, nn.Linear(2, 1), 2, settings, detect({}))
    assert raised.value.__notes__[0].startswith("the batch has samples ")  # type: ignore[attr-defined]


def test_a_validation_does_not_change_the_numbers_of_later_steps() -> None:
    data = TensorDataset(torch.ones(3, 1))
    task: Any = types.SimpleNamespace(
        validation=data, collate=None, metrics=lambda loss: {}, evaluate=lambda *_: {"loss": (1, 1)}
    )
    settings = Settings(train=Train(max_steps=1, batch_size=2))
    model = nn.Linear(1, 1)
    before = torch.get_rng_state()
    assert validate(task, model, 2, settings, 1) == {"loss": 1.0}
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_is_tried_before_the_first_step(work: Work) -> None:
    told = work.run("tried", 2, "task=points:Misspelt", code=1)
    assert "task.best is 'acuracy', but evaluate returns loss, accuracy;" in told
    assert "this is the first step" in told and not work.metrics("tried", "validation_loss")


def test_a_best_that_no_validation_returns_is_told() -> None:
    task: Any = types.SimpleNamespace(best="acuracy", best_is_highest=True)
    with pytest.warns(UserWarning, match="best is 'acuracy', but evaluate returns loss, accuracy;"):
        assert scores_of(task, {"loss": 1.0, "accuracy": 0.5}) == {}
    assert scores_of(task, {}) == {}  # there was no validation
    task.best = "accuracy"
    assert scores_of(task, {"accuracy": 0.5}) == {"validation_loss": None, "score": -0.5}
    for odd in (math.nan, math.inf):  # cannot be compared, or would always be the best
        assert scores_of(task, {"accuracy": odd}) == {"validation_loss": None, "score": math.inf}


def test_a_model_without_blocks_recomputes_nothing_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
    set_up_blocks(
        nn.Linear(1, 1), Train(batch_size=1, max_steps=1, activation_checkpointing="full")
    )
    assert "recompute  nothing: the model has no blocks (nn.ModuleList)" in caplog.text
    caplog.clear()
    set_up_blocks(model, Train(batch_size=1, max_steps=1, activation_checkpointing=1))
    set_up_blocks(nn.Linear(1, 1), Train(batch_size=1, max_steps=1))
    assert not caplog.text


def test_the_blocks_of_lists_within_lists_are_found_once() -> None:
    first, shared = nn.Linear(1, 1), nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)])})
    stages = nn.ModuleList([nn.ModuleList([first, shared, shared]), nn.ModuleList([nn.Tanh()])])
    found = [*blocks(nn.ModuleDict({"stages": stages}))]
    assert found[:2] == [first, shared] and [type(one) for one in found[2:]] == [nn.Tanh]


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        [torch.zeros(3, 2), torch.zeros(3)],
        ([torch.zeros(5), torch.zeros(7), torch.zeros(9)], [0, 1, 2]),  # samples of unequal sizes
        {"tokens": torch.zeros(3, 2), "labels": torch.zeros(3)},
        {"texts": ["a", "b", "c"]},
        {"inputs": {"tokens": torch.zeros(3, 2)}, "labels": torch.zeros(3)},
        ({"tokens": torch.zeros(3, 2)}, torch.zeros(3)),
        (UserDict(tokens=torch.zeros(3, 2)), torch.zeros(3)),
    ],
)
def test_the_weight_is_the_number_of_samples(batch: Any) -> None:
    assert Task.weight(Work, batch) == 3  # type: ignore[arg-type]
