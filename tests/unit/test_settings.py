"""The config: composition, overrides, and one clear line for each way to get it wrong."""

import functools
import json
import pickle
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from agents import ROOT, written
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.plan.plan import Batch
from training.config_file import SettingsError
from training.settings import KNOWN, NOTHING, load

LOCAL3 = ROOT / "config/local3.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text("seed: 1\ntrain: {batch_size: 4, max_steps: 10}\n")
    path = tmp_path / "my.yaml"
    path.write_text("defaults: [base]\nseed: 2\ntrain: {learning_rate: 1e-3}\n")
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(SettingsError) as error:
        load(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_file_lies_over_its_defaults_and_the_command_line_over_both(config: Path) -> None:
    settings = load(config, ["train.max_steps=20", "train.learning_rate=2e-3"])
    assert settings.seed == 2
    assert settings.train.batch_size == 4
    assert settings.train.max_steps == 20
    assert settings.train.learning_rate == 0.002


@pytest.mark.parametrize(("order", "seed"), [("base, _self_", 2), ("_self_, base", 1)])
def test_self_is_the_files_own_place_as_in_hydra(config: Path, order: str, seed: int) -> None:
    config.write_text(config.read_text().replace("[base]", f"[{order}]"))
    assert load(config).seed == seed


@pytest.mark.parametrize(
    ("base", "given", "join"),
    [
        ({}, ["distributed.timeout=900"], 900),
        ({"join_timeout": 20, "timeout": 1800}, ["distributed.timeout=900"], 900),
        ({}, ["distributed.timeout=900", "distributed.join_timeout=30"], 30),
        ({"timeout": 900}, ["distributed.join_timeout=30"], 30),
        ({}, ["distributed.timeout=60"], 300),
    ],
)
def test_a_timeout_alone_is_the_time_to_join_too(
    config: Path, base: dict[str, int], given: list[str], join: int
) -> None:
    with (config.parent / "base.yaml").open("a") as file:
        print(f"distributed: {json.dumps(base)}", file=file)
    assert load(config, given).distributed.join_timeout == join


@pytest.mark.parametrize(
    ("variable", "given", "limit"),
    [("", [], 7), ("20", [], None), ("20", ["distributed.hang_seconds=9"], 9)],
)
def test_the_variable_wins_over_the_configs_hang_seconds(
    config: Path, variable: str, given: list[str], limit: float | None
) -> None:
    """The setting becomes None, and a rank's beats read the variable."""
    with (config.parent / "base.yaml").open("a") as file:
        print("distributed: {hang_seconds: 7}", file=file)
    environ = {"HANG_SECONDS": variable}
    assert load(config, given, environ).distributed.hang_seconds == limit


@pytest.mark.slow
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
@example("# not a comment")
@example("\"quoted\" 'twice' $HOME `id` \\")
@example("ü/日本 €.txt")
@example("007")
@example("2024-13-45")
@example("!!int x")
def test_text_arrives_byte_for_byte(text: str) -> None:
    expected = None if text in NOTHING else text
    assert load(LOCAL3, [f"data.path={text}"]).data.path == expected


def test_an_override_may_hold_a_list_for_a_task_of_ones_own(config: Path) -> None:
    settings = load(config, ["task=json:JSONDecoder", "model.sizes=[1, 2]", "model.deep.name=a b"])
    assert settings.as_tree()["model"] == {"sizes": [1, 2], "deep": {"name": "a b"}}


TRAIN = "train: {max_steps: 1, batch_size: 1}\n"
LISTS = "[" * 3000 + "]" * 3000
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e300", "9" * 400])
@pytest.mark.parametrize("key", [key for key, kind in KNOWN.items() if kind is not str])
def test_a_number_out_of_bounds_is_refused_in_one_line(config: Path, key: str, value: str) -> None:
    if str not in get_args(KNOWN[key]):
        assert error_of(config, f"{key}={value}").startswith(f"command line: {key}: ")


@pytest.mark.slow
@given(st.sampled_from(sorted(KNOWN)), st.text())
def test_any_value_is_taken_or_refused_in_one_line(key: str, value: str) -> None:
    try:
        load(LOCAL3, [f"{key}={value}"])
    except SettingsError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=3", "train.batchsize: unknown key; did you mean train.batch_size?"),
        ("max_steps=3", "max_steps: unknown key; did you mean train.max_steps?"),
        ("zzz=3", "known keys: seed, task, resume, data"),
        ("train.lr=3", "train.lr: unknown key; did you mean train.learning_rate?"),
        ("lr=3", "lr: unknown key; did you mean train.learning_rate?"),
        ("learning-rate=3", "did you mean train.learning_rate?"),
        ("train.bs=3", "did you mean train.batch_size?"),
        ("gbs=3", "did you mean train.global_batch_size?"),
        ("train.wd=3", "did you mean train.weight_decay?"),
        ("steps=3", "did you mean train.max_steps?"),
        ("train.epoch=3", "did you mean train.epochs?"),
        ("train.num_train_epochs=3", "did you mean train.epochs?"),
        ("train.warmup=3", "did you mean train.warmup_steps?"),
        ("accum=3", "did you mean train.grad_accumulation?"),
        ("batchSize=3", "did you mean train.batch_size?"),
        ("model.num_hidden_layers=3", "did you mean model.layers?"),
        ("model.vocab=3", "did you mean model.vocabulary?"),
        ("data_path=x", "did you mean data.path?"),
        ("clip_norm=3", "did you mean train.clip_norm?"),
        ("train.width=3", "did you mean model.width?"),
        ("train.zzz=3", "train.zzz: unknown key; known keys: max_steps, max_seconds, epochs"),
        ("train.learning_rate=-1", "should be greater than or equal to 0, not -1"),
        ("train.learning_rate=.nan", "should be greater than or equal to 0, not nan"),
        ("model.dropout=1", "model.dropout: should be less than 1, not 1"),
        ("train.max_steps=1.0", "should be a valid integer, not 1.0"),
        ("train.learning_rate=true", "should be a valid number, not True"),
        ("data.pin_memory=1", "data.pin_memory: should be a valid boolean, not 1"),
        ("seed=null", "seed: should be a valid integer, not empty"),
        ("tracking=[1]", "tracking: should be a list of names, not [1]"),
        ("tracking=3", "tracking: should be a list of names, not 3"),
        ("seed=99999999999999999999999", "seed: should be less than 4294967296"),
        ("train.max_steps=x", "train.max_steps: should be a valid integer, not 'x'"),
        ("train.max_steps=true", "train.max_steps: should be a valid integer"),
        ("train.max_steps=0", "train.max_steps: should be greater than 0, not 0"),
        ("train=3", "train: should be a section of settings, not 3"),
        ("checkpoint.format=x", "checkpoint.format: should be 'full' or 'sharded', not 'x'"),
        ("distributed.strategy=ddpp", "'ddpp' is unknown; use auto, single, dp, ddp, fsdp"),
        ("distributed.fsdp.shard=host", "should be all, node or a whole number above 0, not "),
        ("train.activation_checkpointing=0", "none, full or a whole number above 0, not 0"),
        ("model.heads=3", "width 128 is not a multiple of heads 3"),
        ("train.max_steps=null", "nothing ends the run"),
        ("task=nonesuch:Task", "there is no module nonesuch; put nonesuch.py into"),
        ("task=json.nonesuch:Task", "there is no module json.nonesuch; put json/nonesuch.py into"),
        ("task=json:Decoder", "json/__init__.py has no class Decoder"),
        ("task=json", "neither language_model nor module:Class"),
        ("train.max_steps", "is not a setting; write it as"),
        slow(f"train.max_steps={'[' * 3000}", "command line: train.max", id="deep"),
    ],
)
def test_a_wrong_override_is_one_line(config: Path, override: str, message: str) -> None:
    error = error_of(config, override)
    assert error.startswith("command line: ")
    assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {max_steps: 1, batchsize: 2}", "train.batchsize: unknown key; did you mean"),
        ("trian: {max_steps: 1}", "trian: unknown key; did you mean train?"),
        ("train: {max_steps: 1}", "train: needs batch_size (per process) or global_batch_size"),
        ("train: {batch_size: '4', max_steps: 1}", "train.batch_size: should be a valid integer"),
        ("train:", "train: should be a section of settings, not empty"),
        ("seed: 1", "train: is missing"),
        (f"{TRAIN}data: {{path: 3}}", "data.path: should be a valid string, not 3"),
        (f"{TRAIN}train.lr: 3", "train.lr: unknown key; did you mean train.learning_rate?"),
        (f"{TRAIN}task: json:JSONDecoder\nmodel: 3", "model: should be a section whose keys are"),
        (
            f"{TRAIN}task: json:JSONDecoder\nmodel: {{1: 2}}",
            "model: should be a section whose keys",
        ),
        ("seed: 1\nseed: 2", ":2:1: not YAML: seed is given twice"),
        ("train: [1\nseed: 2", ":2:5: not YAML"),
        ("day: 2024-13-45", "not YAML"),
        ("defaults: base", "defaults: should be a list of names"),
        ("defaults: [nonesuch]", "nonesuch.yaml: no such file"),
        ("seed: \udcff", "can't decode byte 0xff in position 6"),  # bytes that are not text
        (f"zzz.yyy: 3\n{TRAIN}", "zzz.yyy: unknown key"),
        (f"7: 3\n{TRAIN}", "7: "),
        (f'{TRAIN}"a\\e[31m": 1', r"a\x1b[31m: unknown key"),
        (f"{TRAIN}a: \0", "not YAML"),
        (f"{TRAIN}~: 1", "Keys should be strings"),
        slow(f"{TRAIN}{BOMB}", "has over 10000 values; check its aliases (*name)", id="bomb"),
        slow(f"{TRAIN}a: {LISTS}", "not YAML: maximum recursion depth exceeded", id="lists"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text, errors="surrogateescape")
    error = error_of(path)
    assert error.startswith(str(tmp_path))
    assert message in error


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "seed: 1\ntrain:\n  # the size\n  max_steps: 1\n  batch_size: four\n",
            ":5: train.batch_size",
        ),
        ("seed: 1\ntrain: {max_steps: 1,\n  batchsize: 4}\n", ":3: train.batchsize"),
        ("train:\n  max_steps: 1\n  batch_size: 1\nmodel:\n  width: x\n", ":5: model.width"),
        ("seed: 1\ntrain: {max_steps: 1}\n", ":2: train"),
        ("a: &a {max_stepz: 1}\ntrain: {<<: *a, batch_size: 1}\n", ": train.max_stepz"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, place: str) -> None:
    path = written(tmp_path / "wrong.yaml", text)
    assert error_of(path).startswith(f"{path}{place}: ")
    path.write_text(TRAIN)
    assert error_of(path, "train.batch_size=x").startswith("command line: train.batch_size: ")


def test_a_mistake_in_the_defaults_names_their_file(config: Path) -> None:
    train = "train: {batch_size: 4, max_steps: 5, "
    for wrong in (f"{train}max_stepz: 10}}", f'"": 4\n{train}}}'):
        (config.parent / "base.yaml").write_text(f"{wrong}\n")
        assert error_of(config).startswith(f"{config.parent}/base.yaml:1: ")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("class Mine: ...", ""),
        (
            "import torch\ntry:\n    from other import Mine\nexcept ImportError:\n    Mine = None",
            "",
        ),
        ("from other import *", ""),
        ("class Theirs:\n    Mine = 1\nprint(Mine)", "own_task.py has no class Mine"),
        ("class Mine:\n  x = (", "own_task.py, line 2: '(' was never closed"),
    ],
    ids=["class", "import", "star", "only used", "syntax"],
)
def test_the_class_of_a_task_is_found_without_importing_it(
    config: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: str
) -> None:
    monkeypatch.syspath_prepend(config.parent)
    monkeypatch.setitem(sys.modules, "own_task", None)
    monkeypatch.delitem(sys.modules, "own_task")
    (config.parent / "own_task.py").write_text(source)
    if error:
        assert error in error_of(config, "task=own_task:Mine")
    else:
        assert load(config, ["task=own_task:Mine"]).task == "own_task:Mine"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import nonesuch", "(ModuleNotFoundError: No module named 'nonesuch')"),
        ("raise RuntimeError('no GPU')", "(RuntimeError: no GPU)"),
    ],
)
def test_a_package_that_cannot_be_imported_is_not_missing(
    config: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: str
) -> None:
    monkeypatch.syspath_prepend(config.parent)
    package = config.parent / f"own_{len(source)}"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "tasks.py").write_text("class Mine: ...")
    told = error_of(config, f"task={package.name}.tasks:Mine")
    assert f"the package of {package.name}.tasks cannot be imported {error}" in told


def test_a_missing_file_names_those_beside_it(config: Path) -> None:
    error = error_of(config.with_name("mine.yaml"))
    assert error.endswith(f"no such file; {config.parent} holds base.yaml, my.yaml")
    assert "there is no folder" in error_of(config.parent / "no" / "my.yaml")


@pytest.mark.parametrize("name", ["my.yml", "my", "my.YAML"])
def test_a_missing_file_names_its_brother(config: Path, name: str) -> None:
    assert error_of(config.with_name(name)).endswith("no such file; did you mean my.yaml?")


@pytest.mark.parametrize("name", ["base", "base.yml"])
def test_a_default_may_have_either_ending(config: Path, name: str) -> None:
    config.with_name("base.yaml").rename(config.with_name("base.yml"))
    config.write_text(config.read_text().replace("base", name))
    if name == "base":
        assert "base.yaml: no such file; did you mean base.yml?" in error_of(config)
    else:
        assert load(config).train.batch_size == 4


def test_numbers_and_one_name_become_what_the_annotation_says(config: Path) -> None:
    settings = load(config, ["train.clip_norm=2", "tracking=tensorboard", "data.path=null"])
    assert repr(settings.train.clip_norm) == "2.0"
    assert settings.tracking == ["tensorboard"]
    assert settings.data.path is None


def test_settings_are_immutable_and_a_changed_copy_is_checked(config: Path) -> None:
    settings = load(config)
    with pytest.raises(FrozenInstanceError):
        settings.seed = 3  # type: ignore[misc]
    assert replace(settings, seed=3).seed == 3
    with pytest.raises(ValueError, match="width 128 is not a multiple of heads 3"):
        replace(settings.model, heads=3)


def test_all_settings_are_written_as_they_are_read(config: Path) -> None:
    settings = load(config)
    written(copy := config.with_name("copy.yaml"), yaml.safe_dump(settings.as_tree()))
    assert load(copy) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    own = ["task=json:JSONDecoder", "model.when=2024-05-06"]
    written(
        config.with_name("own.yaml"), f"{TRAIN}task: json:JSONDecoder\nmodel: {{day: 2024-05-06}}"
    )
    assert load(config.with_name("own.yaml")).as_tree()["model"] == {"day": "2024-05-06"}
    assert load(config, own).as_tree()["model"] == {"when": "2024-05-06"}


def test_which_settings_the_config_holds(config: Path) -> None:
    assert "tracking" not in load(config).given
    assert "tracking" in load(config, ["tracking=[tensorboard]", "distributed.timeout=900"]).given


def test_the_upper_layer_chooses_between_the_two_batch_sizes(config: Path) -> None:
    train = load(config, ["train.global_batch_size=12", "train.grad_accumulation=2"]).train
    assert train.batch_size is None
    # If the batch is not divisible, the nearest divisible batch is used.
    assert [train.batch_size_on(ranks) for ranks in (2, 4, 5, 64)] == [3, 2, 1, 1]
    assert "has both" in error_of(config, "train.global_batch_size=12", "train.batch_size=2")


def test_a_null_chooses_no_batch_size(tmp_path: Path) -> None:
    both = written(
        tmp_path / "both.yaml", "train: {max_steps: 1, batch_size: 2, global_batch_size: 8}\n"
    )
    assert "has both" in error_of(both)
    assert load(both, ["train.batch_size=null"]).train.global_batch_size == 8
    above = written(tmp_path / "above.yaml", "defaults: [both]\ntrain: {batch_size: null}\n")
    assert load(above).train.global_batch_size == 8


CONFIGS = {path.name for path in (ROOT / "config").glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(CONFIGS - {"distributed.yaml"}))  # which only has defaults
def test_a_shipped_config_runs_on_any_number_of_ranks(name: str) -> None:
    train = load(ROOT / "config" / name).train
    batch = Batch(train.batch_size or 0, train.global_batch_size or 0, train.grad_accumulation)
    for ranks in range(1, 65):
        each = train.batch_size_on(ranks)
        in_all = each * ranks * train.grad_accumulation
        assert f"{in_all} samples a step" in batch.describe(ranks)
        assert each >= 1
