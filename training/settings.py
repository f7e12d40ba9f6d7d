"""The config: typed, composed, and refused in one line where it is wrong. Needs no torch.

A config is YAML. `defaults: [distributed]` lays it over distributed.yaml in its own folder, and
`key=value` arguments (`train.batch_size=8`) lie over both. Times are in seconds, sizes in bytes,
intervals in optimizer steps.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

COMMAND_LINE = "command line"
BUILT_IN_TASK = "language_model"

Count = Annotated[int, Field(gt=0)]
Interval = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0)]
NOTHING = ("", "null", "~")  # `key=null` takes a setting back
Tree = dict[str, Any]  # a config before it is checked


class SettingsError(ValueError):
    """The config, or the data it names, is wrong: one line with the place, the cause, the cure."""


class Given(str):
    """The text after `key=` on the command line: text where text is wanted, else a YAML value."""


class Section(BaseModel):
    """A group of settings: every key is known, has one type, and does not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _read_given(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Given):
            return value
        kind = cls.model_fields[str(info.field_name)].annotation
        wants_text = str in (kind, *get_args(kind))
        parsed = _parse(value)
        return str(value) if wants_text and parsed is not None else parsed


class Data(Section):
    path: str | None = None  # folder of text files; unset: the sources of Python's standard library
    max_bytes: Count = 64_000_000  # of text read, in the order of the files' hashes
    validation_bytes: Count = 131_072  # of the validation files, the rest of which goes unused
    num_workers: Interval = 0  # processes that load batches; 0: the training process itself
    pin_memory: bool = False  # faster copies to a GPU


class LanguageModel(Section):
    layers: Count = 4
    heads: Count = 4
    width: Count = 128  # of the residual stream; a multiple of heads
    context: Count = 128  # bytes that a prediction can look back on
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _check_heads(self) -> LanguageModel:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class Train(Section):
    max_steps: Count | None = None  # the first of max_steps, max_seconds and epochs ends the run
    max_seconds: Seconds | None = None  # looked at every log_every steps
    epochs: Count | None = None
    batch_size: Count | None = None  # samples per process and micro-batch; or else:
    global_batch_size: Count | None = None  # samples per optimizer step, over all processes
    grad_accumulation: Count = 1  # micro-batches per optimizer step
    learning_rate: Rate = 3e-4  # at its peak; a cosine takes it to 0 at the last step
    warmup_steps: Interval = 0
    weight_decay: Rate = 0.1
    clip_norm: Seconds | None = 1.0  # of all gradients together; null: no limit
    log_every: Count = 10
    eval_every: Interval = 0  # 0: no validation at all, also not at the end

    @model_validator(mode="after")
    def _check_choices(self) -> Train:
        if self.batch_size is None and self.global_batch_size is None:
            raise ValueError("needs batch_size (per process) or global_batch_size")
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError("has both batch_size and global_batch_size; keep one")
        if self.max_steps is None and self.max_seconds is None and self.epochs is None:
            raise ValueError("nothing ends the run; set max_steps, max_seconds or epochs")
        return self

    def batch_size_on(self, world_size: int) -> int:
        """Return the samples of one process's micro-batch.

        Raises:
            SettingsError: the global batch cannot be shared out evenly.
        """
        if self.global_batch_size is None:
            assert self.batch_size is not None
            return self.batch_size
        shares = world_size * self.grad_accumulation
        if self.global_batch_size % shares:
            raise SettingsError(
                f"train.global_batch_size: {self.global_batch_size} does not divide by {shares} "
                f"({world_size} processes x {self.grad_accumulation} accumulated); "
                f"use a multiple of {shares}"
            )
        return self.global_batch_size // shares


class Checkpoint(Section):
    dir: str = "checkpoints"  # a run saves in <dir>/<run id>/
    every: Interval = 0  # 0: only at the end
    keep_last: Count = 3  # whole checkpoints of the run, older ones are deleted


class MixedPrecision(Section):
    enabled: bool = False  # on a GPU; has no effect on a CPU
    dtype: Literal["bfloat16"] = "bfloat16"


class Distributed(Section):
    strategy: Literal["auto", "single", "dp", "ddp"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    join_timeout: Seconds = 300  # until all ranks must have met
    timeout: Seconds = 1800  # of one collective
    find_unused_parameters: bool = False
    mixed_precision: MixedPrecision = MixedPrecision()

    @field_validator("strategy", mode="before")
    @classmethod
    def _refuse_fsdp(cls, value: Any) -> Any:
        if value == "fsdp":
            raise ValueError("fsdp is not built yet; use ddp")
        return value


class Settings(Section):
    """Everything train.py can be told."""

    seed: Interval = 0
    task: str = BUILT_IN_TASK  # or my_module:MyTask, see training/tasks/__init__.py
    resume: str = "auto"  # auto: this run's newest; never; or the checkpoint a new run starts from
    data: Data = Data()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    distributed: Distributed = Distributed()
    model: LanguageModel | Tree


class BuiltIn(Settings):
    model: LanguageModel = LanguageModel()


class PluggedIn(Settings):
    model: Tree = {}  # the user's task has its own keys

    @field_validator("model", mode="before")
    @classmethod
    def _read_free(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cls._read_free(below) for key, below in value.items()}
        return _parse(value) if isinstance(value, Given) else value


def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a config, lay it over its defaults, lay the `key=value` overrides over it, and check it.

    Raises:
        SettingsError: one line that names the file (or "command line"), the key and the cure.
    """
    config = _read_file(path)
    tree: Tree = {}
    sources: dict[tuple[str, ...], str] = {}
    for name in _default_names(path, config):
        below = path.parent / f"{name}.yaml"
        _lay_over(tree, _read_file(below), str(below), sources)
    _lay_over(tree, config, str(path), sources)
    _lay_over(tree, _read_overrides(overrides), COMMAND_LINE, sources)
    task = str(tree.get("task", BUILT_IN_TASK))
    try:
        settings = (BuiltIn if task == BUILT_IN_TASK else PluggedIn).model_validate(tree)
    except ValidationError as error:
        _refuse(error, tree, sources, default_source=str(path))
    _check_task(task, path, sources.get(("task",), str(path)))
    return settings


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                problem = f"{key.value} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_file(path: Path) -> Tree:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; {_list_configs(path.parent)}") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: byte {error.start} is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SettingsError(f"{path}: {place}not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: should hold `key: value` lines")
    return tree


def _list_configs(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = sorted(file.name for file in folder.glob("*.yaml"))
    return f"{folder} holds {', '.join(names)}" if names else f"{folder} holds no .yaml files"


def _default_names(path: Path, config: Tree) -> list[str]:
    names = config.pop("defaults", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    raise SettingsError(f"{path}: defaults: should be a list of names, such as [distributed]")


def _read_overrides(overrides: Sequence[str]) -> Tree:
    """Turn `a.b=value` into {a: {b: value}}, the value untouched."""
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        *sections, name = key.split(".")
        if not equals or not all((*sections, name)):
            raise SettingsError(
                f"{COMMAND_LINE}: {text!r} is not a setting; write it as train.max_steps=100"
            )
        below = tree
        for section in sections:
            below = below.setdefault(section, {})
            if not isinstance(below, dict):
                raise SettingsError(f"{COMMAND_LINE}: {key}: {section} was given a value before")
        below[name] = Given(value)
    return tree


def _parse(text: str) -> Any:
    """Return text as a YAML scalar or list; text that YAML reads as anything else stays itself."""
    if text in NOTHING:
        return None
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):  # ValueError: the 13th month, say
        return str(text)
    return value if isinstance(value, bool | int | float | list) else str(text)


def _lay_over(
    tree: Tree,
    layer: Tree,
    source: str,
    sources: dict[tuple[str, ...], str],
    path: tuple[str, ...] = (),
) -> None:
    """Write a layer over a tree, and the layer's name over the sources of the keys it sets."""
    for own, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        if path == ("train",) and own in layer and other not in layer:
            tree.pop(other, None)  # two ways to say one thing: the upper layer's stands
    for key, value in layer.items():
        here = (*path, key)
        sources[here] = source
        if isinstance(value, dict):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            _lay_over(tree[key], value, source, sources, here)
        else:
            tree[key] = value


def _refuse(
    error: ValidationError, tree: Tree, sources: dict[tuple[str, ...], str], default_source: str
) -> NoReturn:
    """Raise the first of pydantic's errors as one line."""
    first, *others = error.errors(include_url=False)
    place = tuple(str(part) for part in first["loc"])
    source = next(
        (sources[place[:n]] for n in range(len(place), 0, -1) if place[:n] in sources),
        default_source,
    )
    more = f" ({len(others)} more like this)" if others else ""
    raise SettingsError(f"{source}: {'.'.join(place)}: {_explain(first, place)}{more}") from None


def _explain(error: Any, place: tuple[str, ...]) -> str:
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key; {_suggest('.'.join(place))}"
        case "missing":
            return "is missing"
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type":
            return f"should be a section of settings, not {_show(error['input'])}"
        case _:
            message = error["msg"].replace("Input should be a valid ", "should be a valid ")
            message = message.replace("Input should be ", "should be ")
            return f"{message}, not {_show(error['input'])}"


def _show(value: Any) -> str:
    return "empty" if value is None else repr(value)


def _suggest(key: str) -> str:
    known = list(known_keys(BuiltIn))
    section, _, name = key.rpartition(".")
    named_so = [other for other in known if other.rpartition(".")[2] == name]
    if near := named_so or difflib.get_close_matches(key, known, n=1):
        return f"did you mean {near[0]}?"
    beside = [other for other in known if section and other.rpartition(".")[0] == section]
    return f"known here: {', '.join(beside or BuiltIn.model_fields)}"


def known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the full path of every setting of a section."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from known_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_task(task: str, path: Path, source: str) -> None:
    """Look for the module of `my_module:MyTask` in the places it will be imported from."""
    if task == BUILT_IN_TASK:
        return
    module, colon, name = task.partition(":")
    if not (colon and module and name):
        raise SettingsError(f"{source}: task: {task!r} is neither {BUILT_IN_TASK} nor module:Class")
    folders = [*sys.path, str(Path.cwd()), str(path.resolve().parent)]
    if importlib.machinery.PathFinder.find_spec(module.partition(".")[0], folders) is None:
        raise SettingsError(
            f"{source}: task: there is no module {module}; put {module}.py into this folder, "
            "into the config's, or on PYTHONPATH"
        )
