"""python -m training.plot: pictures of one run or several."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from training import plot


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    lines = [{"step": step, **dict.fromkeys(names, step * 0.5)} for step in range(1, 20)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 20, "lo')


def size_of(picture: Path) -> tuple[int, ...]:
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


@pytest.mark.slow
def test_runs_are_drawn_in_a_size_for_a_slide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "logs/one", "loss", "validation_loss", "lr", "tokens_per_second", "grad_norm")
    write(tmp_path / "elsewhere/two", "loss")
    assert plot.main(["one", "elsewhere/two", "--to", "both.png"]) == 0
    assert capsys.readouterr().out == "both.png\n"
    assert size_of(tmp_path / "both.png") == (1280, 720)
    assert plot.main(["elsewhere/two"]) == 0
    assert size_of(tmp_path / "elsewhere/two/runs.png") == (1280, 720)


def test_runs_of_one_name_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[list[str]] = []
    monkeypatch.setattr(plot, "draw", lambda runs, to: told.append([*runs, str(to)]))
    for folder in ("a", "b"):
        write(tmp_path / folder / "same", "loss")
    assert plot.main(["a/same", "b/same"]) == 0
    assert told == [["a/same", "b/same", "a/runs.png"]]


def test_a_picture_lies_beside_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    monkeypatch.setattr(plot, "draw", lambda runs, to: told.append(str(to)))
    write(tmp_path / "logs/one", "loss")
    write(tmp_path / "mine/two", "loss")
    write(tmp_path / "mine/three", "loss")
    assert plot.main(["one"]) == 0
    monkeypatch.setenv("LOG_DIR", "mine")
    assert plot.main(["two", "three"]) == 0
    assert told == ["logs/one/runs.png", "mine/runs.png"]


def test_each_panel_shows_its_metrics(tmp_path: Path) -> None:
    write(tmp_path / "run", "loss", "validation_loss", "lr", "samples_per_second", "validation_x")
    curves = plot._curves(plot.read_metrics(tmp_path / "run/metrics.jsonl"))
    assert {panel: plot._shown(curves, panel) for panel in plot.PANELS} == {
        "loss": ["loss", "validation_loss"],
        "speed": ["samples_per_second"],
        "learning rate": ["lr"],
        "gradient norm": [],
    }
    assert curves["loss"][-1] == (19, 9.5)  # the last line is half a line


def test_a_run_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main(["none"]) == 2
    told = capsys.readouterr().err
    assert (
        told == "plot: there is no logs/none/metrics.jsonl; give a run id, or its folder of logs\n"
    )
