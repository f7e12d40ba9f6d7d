"""The config: typed, composed of layers; if invalid, rejected with one line. Needs no torch.

A config is YAML. `defaults: [distributed]` puts it on top of distributed.yaml in the same folder;
`key=value` arguments (`train.batch_size=8`) override both. Times are in seconds, sizes in bytes,
intervals in optimizer steps.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from distributed.strategy import check_strategy
from training.asked import Asked
from training.classes import check_name
from training.config_file import Loader, SettingsError, Tree, line_of, read_file

COMMAND_LINE = "command line"
BUILT_IN_TASK = "language_model"
TRACKERS = {"tensorboard": "training.trackers:TensorBoard", "wandb": "training.trackers:WandB"}
Count = Annotated[int, Field(gt=0, le=10**15)]
Interval = Annotated[int, Field(ge=0, le=10**15)]
Seconds = Annotated[float, Field(gt=0, le=10**7)]
Rate = Annotated[float, Field(ge=0, le=10**9)]
Positive = Annotated[float, Field(gt=0, le=10**9)]


def _word_or_count(*words: str) -> PlainValidator:
    """Accept one of these words, or a whole number above 0."""

    def check(value: object) -> object:
        if value in words or (type(value) is int and 0 < value <= 10**15):
            return value
        raise ValueError(f"should be {', '.join(words)} or a whole number above 0, not {value!r}")

    return PlainValidator(check)


def _may_have_wandb_login(environ: Mapping[str, str]) -> bool:
    """Return whether wandb may find a login, or need none; otherwise it would lose the metrics."""
    # For a rank, the login was checked where the run was launched.
    names = ("RANK", "WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC")
    files = "~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings"
    return any(map(environ.get, names)) or any(map(os.path.exists, map(os.path.expanduser, files)))


NOTHING = ("", "null", "~")  # `key=null` unsets a setting


class Section(BaseModel):
    """A group of settings. Unknown keys and wrong types are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Data(Section):
    path: str | None = None  # of text or tokens; see training/tasks/data.py
    num_workers: Interval = 0  # processes per rank that load batches; 0: the rank itself
    pin_memory: bool = False  # faster copies to a GPU


class LanguageModel(Section):
    layers: Count = 4
    heads: Count = 4
    width: Count = 128  # of the residual stream; a multiple of heads
    context: Count = 128  # tokens that each prediction sees
    vocabulary: Count = 256  # at least that of the tokens; for text, 256 (bytes)
    ngrams: Annotated[int, Field(ge=0, le=8)] = 0  # N: also embed the last 2, 3, ... N tokens
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _check_heads(self) -> LanguageModel:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class Train(Section):
    max_steps: Count | None = None  # the run ends after max_steps or epochs, whichever comes first
    max_seconds: Seconds | None = None  # then the run saves and stops; resume it later
    epochs: Count | None = None
    batch_size: Count | None = None  # samples per process and micro-batch; or:
    global_batch_size: Count | None = None  # samples per optimizer step, over all processes
    grad_accumulation: Count = 1  # micro-batches per optimizer step
    learning_rate: Rate = 3e-4  # the peak, after the warm-up; a cosine to 0 follows
    warmup_steps: Interval = 0
    weight_decay: Rate = 0.1
    compile: bool = False  # torch.compile, each block separately
    activation_checkpointing: Annotated[Any, _word_or_count("none", "full")] = "none"
    clip_norm: Positive | None = 1.0  # of all gradients together; null: no limit
    log_every: Count = 10
    eval_every: Interval = 0  # 0: never, not even at the end

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
        """Return the number of samples in one process's micro-batch.

        A global batch that is not divisible is rounded to the nearest one that is.
        """
        if self.batch_size is not None:
            return self.batch_size
        assert self.global_batch_size is not None
        return max(1, round(self.global_batch_size / (world_size * self.grad_accumulation)))


class Checkpoint(Section):
    dir: str = "checkpoints"  # a run saves in <dir>/<run id>/
    every: Interval = 0  # 0: only by the clock and at the end
    every_minutes: Rate = 10.0  # after the last save; 0: never
    snapshot_every: Interval = 0  # into memory that outlives the ranks; 0: never
    keep_last: Count = 3  # intact checkpoints; older ones are deleted, except the best
    format: Literal["full", "sharded"] = "full"  # rank 0 writes all; or each rank its part


class MixedPrecision(Section):
    enabled: bool = False  # on GPUs; CPUs always compute in float32
    dtype: Literal["bfloat16", "float16"] = "bfloat16"


class Fsdp(Section):
    shard: Annotated[Any, _word_or_count("all", "node")] = "all"  # ranks that share a model
    reshard_after_forward: bool = True  # false: more memory, less traffic
    cpu_offload: bool = False  # keep parameters in the CPU's memory until needed


class Distributed(Section):
    strategy: Annotated[str, AfterValidator(check_strategy)] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    join_timeout: Seconds = 300  # for all ranks to join
    timeout: Seconds = 1800  # of one collective
    hang_seconds: Seconds | None = None  # a rank silent for longer is stuck; null: from its steps
    find_unused_parameters: bool = False  # an option of DDP, as are the next two
    static_graph: bool = False
    bucket_cap_mb: Positive | None = None
    fsdp: Fsdp = Fsdp()
    mixed_precision: MixedPrecision = MixedPrecision()


class Settings(Section):
    """All settings of train.py."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    task: str = BUILT_IN_TASK  # or my_module:MyTask, see training/tasks/__init__.py
    resume: str = "auto"  # auto: from this run's newest checkpoint; never; or a path
    data: Data = Data()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    distributed: Distributed = Distributed()
    model: LanguageModel = LanguageModel()
    tracking: list[str] = ["tensorboard"]  # wandb, or my_module:MyTracker: training/trackers.py
    prepare: str | None = None  # a batch script that submit_with_config.sh runs before the training

    @field_validator("task")
    @classmethod
    def _check_task(cls, task: str) -> str:
        return check_name(task, BUILT_IN_TASK)

    @field_validator("tracking", mode="before")
    @classmethod
    def _take_one_tracker(cls, names: object) -> object:
        return [names] if isinstance(names, str) else names

    @field_validator("tracking")
    @classmethod
    def _check_tracking(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if "wandb" in names and importlib.util.find_spec("wandb") is None:
            raise ValueError("wandb is not installed; run pip install wandb, or omit it")
        if "wandb" in names and not _may_have_wandb_login(info.context or {}):
            raise ValueError(
                "wandb has no login on this machine; "
                "run wandb login, or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        return [check_name(name, *TRACKERS) for name in names]


class OwnTaskSettings(Settings):
    # Only the user's task defines its keys.
    model: Annotated[Tree, AfterValidator(Asked)] = Asked({})  # type: ignore[assignment]


def data_path(path: str | None) -> Path | None:
    """Return the folder or file at data.path (built-in task); SettingsError if it is missing."""
    found = Path(os.path.expanduser(path)) if path else None  # Path.expanduser rejects some ~names
    if found and not found.exists():
        raise SettingsError(f"data.path: there is no folder or file {found}; correct it")
    return found


def _known_keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _known_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


KNOWN = dict(_known_keys(Settings))  # the type of each setting by its full key


def load(
    path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Settings:
    """Read a config, combine it with its defaults and the `key=value` overrides, and check it.

    Raises SettingsError: one line that names the file (or "command line"), the key and the fix.
    `environ` holds this process's variables; with None, no variable has an effect.
    """
    config = read_file(path)
    names = config.pop("defaults", [])
    if not isinstance(names, list):
        raise SettingsError(f"{path}: defaults: should be a list of names, such as [distributed]")
    names += [] if "_self_" in names else ["_self_"]  # Hydra's name for the file itself
    files = [path if name == "_self_" else path.parent / f"{name}.yaml" for name in names]
    layers = {str(file): config if file == path else read_file(file) for file in files}
    layers |= {COMMAND_LINE: _read_overrides(overrides)}
    tree: Tree = {}
    sources = {"": str(path)}  # the layer that sets each key
    for source, layer in layers.items():
        sources |= dict.fromkeys(_paths(layer), source)
        train = layer.get("train", {})
        if isinstance(train, dict) and ("batch_size" in train) != ("global_batch_size" in train):
            # Two ways to set one thing: the upper layer's choice unsets the other.
            layer["train"] = {"batch_size": None, "global_batch_size": None, **train}
        tree = _merge(tree, layer)
    kind = Settings if tree.get("task", BUILT_IN_TASK) == BUILT_IN_TASK else OwnTaskSettings
    try:
        settings = kind.model_validate(tree, context=environ)
    except ValidationError as error:
        found = error.errors(include_url=False)  # a misspelt section is both unknown and missing
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
        key = known = ".".join(map(str, first["loc"]))
        while known not in sources:
            known = known.rpartition(".")[0]
        raise SettingsError(
            f"{sources[known]}{line_of(sources[known], known)}: {key}: {_explain(first)}"
        ) from None
    limits = settings.distributed
    # If a config sets only timeout, join_timeout is raised to it: timeout used to be both.
    keys = "distributed.timeout", "distributed.join_timeout"
    set_by, join_by = (["", *layers].index(sources.get(key, "")) for key in keys)
    if set_by > join_by and limits.timeout > limits.join_timeout:
        limits = limits.model_copy(update={"join_timeout": limits.timeout})
    # Each rank's beats read $HANG_SECONDS; only a setting on the command line overrides it.
    typed = sources.get("distributed.hang_seconds") == COMMAND_LINE
    if environ and environ.get("HANG_SECONDS") and not typed:
        limits = limits.model_copy(update={"hang_seconds": None})
    return settings.model_copy(update={"distributed": limits})


def _paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


def _merge(below: Any, above: Any) -> Any:
    """Merge two layers of settings; `above` wins."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merge(below.get(key), value) for key, value in above.items()}


def _read_overrides(overrides: Sequence[str]) -> Tree:
    """Turn `a.b=value` into {a: {b: value}}; of two values for one key, the later wins."""
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise SettingsError(f"{COMMAND_LINE}: {text!r} is not a setting; write it as seed=1")
        layer = _parse(key, value)
        for name in reversed(names):
            layer = {name: layer}
        tree = _merge(tree, layer)
    return tree


def _parse(key: str, text: str) -> Any:
    """Return text as is for a key of type str, otherwise parsed if it is a YAML scalar or list."""
    if text in NOTHING:
        return None
    kind = KNOWN.get(key)
    if str in (kind, *get_args(kind)) and kind != list[str]:
        return text
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | list) else text


def _explain(error: Any) -> str:
    given = "empty" if error["input"] is None else repr(error["input"])
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key; {_suggest(error['loc'])}"
        case "missing":
            return "is missing"
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type":
            return f"should be a section of settings, not {given}"
        case _:
            return f"{error['msg'].removeprefix('Input ')}, not {given}"


def _suggest(key: tuple[str, ...]) -> str:
    if near := difflib.get_close_matches(".".join(key), [*Settings.model_fields, *KNOWN], n=1):
        return f"did you mean {near[0]}?"
    section: Any = Settings
    for name in key[:-1]:
        section = section.model_fields[name].annotation
    return f"known keys: {', '.join(section.model_fields)}"
