"""The keys that a user's own task reads, and the methods that it must have."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from training import sections
from training.asked import Asked, refuse_misspelt, warn_unread
from training.config_file import SettingsError
from training.settings import OwnTaskSettings, load
from training.tasks import Task, evaluate, load_task, loss_of

HERE = Path(__file__).name
MODEL = torch.nn.Linear(1, 1)


def make(model: dict[str, Any]) -> Any:
    train = {"batch_size": 1, "max_steps": 1}
    tree = {"task": "test_asked:Right", "train": train, "model": model}
    return sections.read(OwnTaskSettings, tree)


@pytest.mark.parametrize(
    ("model", "read", "told"),
    [
        ({"hiden": 9}, lambda m: m.get("hidden", 3), "model.hiden is not used by it; did you"),
        ({"net": {"hiden": 9}}, lambda m: m["net"].get("hidden"), "mean model.net.hidden?"),
        ({"hiden": 9}, lambda m: "hidden" in m and m["hidden"], "did you mean model.hidden?"),
        ({"hidden": 9, "other": 1}, lambda m: m.get("hidden"), ""),
        ({"hiden": 9}, lambda m: dict(**m), ""),
    ],
)
def test_a_misspelt_key_is_refused(model: dict[str, Any], read: Any, told: str) -> None:
    section = make(model).model
    read(section)
    if not told:
        refuse_misspelt(section, "it")
        return
    with pytest.raises(SettingsError) as error:
        refuse_misspelt(section, "it")
    assert told in str(error.value)


@pytest.mark.parametrize(
    "read",
    [
        lambda m: dict(**m),
        lambda m: {"c": 0} | m,
        lambda m: m | {"c": 0},
        lambda m: m.copy(),
        lambda m: [*m.items()],
        lambda m: [*m.values()],
        lambda m: (m["a"], m["b"]["c"]),
    ],
)
def test_what_was_read_is_not_named(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = make({"a": 1, "b": {"c": 2}})
    assert settings.as_tree()["model"] == {"a": 1, "b": {"c": 2}}
    assert pickle.loads(pickle.dumps(make({"a": 1}).model)) == {"a": 1}  # for a spawned worker
    warn_unread(settings.model, "it")
    assert [text.split()[1] for text in caplog.messages] == ["model.a", "model.b"]
    caplog.clear()
    read(settings.model)
    warn_unread(settings.model, "it")
    assert [text for text in caplog.messages if "model.b.c" not in text] == []


class Right(Task):
    def __init__(self, settings: Any) -> None:
        self.train = self.validation = [torch.zeros(1)]  # type: ignore[assignment]

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return torch.zeros(1)


class Los(Right):
    loss = Task.loss

    def los(self, model: Any, batch: Any) -> None: ...


class NoModel(Right):
    model = Task.model


class Schedule(Right):
    def schedule(self, optimizer: Any) -> None: ...  # type: ignore[override]


class Loader(Right):
    def loader(self, batch_size: int, rank: int) -> list[Any]:  # type: ignore[override]
        return []


class NoData(Right):
    def __init__(self, settings: Any) -> None: ...


class Alone:
    train = validation = ()

    def __init__(self, settings: Any) -> None: ...

    def model(self) -> None: ...

    def loss(self, model: Any, batch: Any) -> None: ...


class Static(Right):
    describe = staticmethod(lambda: "a")

    def __init__(self, settings: Any, *more: Any) -> None:
        super().__init__(settings)
        self.loss = lambda model, batch: batch  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Right", ""),
        ("Static", ""),
        ("Los", f"{HERE}:N: test_asked:Los has no method loss; did you mean los?"),
        ("NoModel", f"{HERE}:N: test_asked:NoModel has no method model; write one"),
        ("Schedule", "schedule: too many positional arguments; it should accept (self, opt"),
        ("Loader", "it should accept (self, batch_size, *, rank, world_size, epoch, skip)"),
        ("NoData", "test_asked:NoData has no validation; set self.validation in __init__"),
        ("Alone", "test_asked:Alone has no weight; make it a subclass of training.tasks.Task"),
        ("HERE", "test_asked:HERE is not a class; set task to a Task subclass"),
    ],
)
def test_a_task_is_checked_when_it_is_loaded(kind: str, told: str) -> None:
    settings = replace(make({}), task=f"test_asked:{kind}")
    if not told:
        assert load_task(settings)
        return
    with pytest.raises(SettingsError) as error:
        load_task(settings)
    text = str(error.value)
    line = text.partition(f"{HERE}:")[2].partition(":")[0]
    assert told in text.replace(f"{HERE}:{line}:", f"{HERE}:N:")
    assert kind in ("Alone", "HERE") or line.isdigit(), text


def test_what_a_task_returns_is_checked_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    task: Any = load_task(make({}))
    assert float(loss_of(task, MODEL, None)) == 0
    monkeypatch.setattr(Right, "loss", lambda self, model, batch: torch.ones(2))
    with pytest.raises(TypeError, match=rf"{HERE}:\d+: loss returned a tensor of shape \[2\]; ret"):
        loss_of(task, MODEL, None)
    monkeypatch.setattr(Right, "weight", lambda self, batch: 2)
    with pytest.raises(TypeError, match=rf"{HERE}:\d+: loss returned a tensor of shape \[2\]; ret"):
        Task.evaluate(task, MODEL, None)
    pairs = (torch.ones(2), 2), ("a", 1), (1.0, 2, 3)
    for wrong in (*({"loss": pair} for pair in pairs), {"loss": 0.5}, 0.5):
        monkeypatch.setattr(Right, "evaluate", lambda self, model, batch, wrong=wrong: wrong)
        with pytest.raises(TypeError, match=rf"{HERE}:\d+: evaluate returned .*; return {{name: "):
            evaluate(task, MODEL, None)


def test_a_config_of_an_own_task_notes_what_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "task: test_asked:Right\ntrain: {max_steps: 1, batch_size: 1}\nmodel: {a: 1}\n"
    (tmp_path / "own.yaml").write_text(text)
    model: Any = load(tmp_path / "own.yaml", ["model.hiden=100"]).model
    assert isinstance(model, Asked) and model["a"] == 1
    warn_unread(model, "it")
    assert caplog.messages == ["warning: model.hiden is not used by it; correct or omit it"]
