"""The config: typed, composed of layers; if invalid, rejected with one line. Needs no torch.

A config is YAML. `defaults: [distributed]` puts it on top of distributed.yaml in the same folder;
`key=value` arguments (`train.batch_size=8`) override both. Times are in seconds, sizes in bytes,
intervals in optimizer steps.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml

from distributed.strategy import check_strategy
from training.asked import Asked
from training.classes import check_name
from training.config_file import Loader, SettingsError, Tree, line_of, read_file, with_ending
from training.sections import InvalidSetting, Section, keys_of, read, within

COMMAND_LINE = "command line"
BUILT_IN_TASK = "language_model"
TRACKERS = {"tensorboard": "training.trackers:TensorBoard", "wandb": "training.trackers:WandB"}
Count = Annotated[int, within(gt=0, le=10**15)]
Interval = Annotated[int, within(ge=0, le=10**15)]
Seconds = Annotated[float, within(gt=0, le=10**7)]
Rate = Annotated[float, within(ge=0, le=10**9)]
Positive = Annotated[float, within(gt=0, le=10**9)]


def _word_or_count(*words: str) -> Callable[[object], object]:
    """Return a check that accepts one of these words, or a whole number above 0."""

    def check(value: object) -> object:
        if value in words or (type(value) is int and 0 < value <= 10**15):
            return value
        raise ValueError(f"should be {', '.join(words)} or a whole number above 0, not {value!r}")

    return check


NOTHING = ("", "null", "~")  # `key=null` unsets a setting


def _check_task(task: str) -> str:
    """Return the name of a task; raises ValueError if there is no such class."""
    return check_name(task, BUILT_IN_TASK)


def _check_tracking(names: list[str]) -> list[str]:
    """Return the names of trackers; raises ValueError if one does not exist or is not installed."""
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb is not installed; run pip install wandb, or omit it")
    return [check_name(name, *TRACKERS) for name in names]


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Where the data is, and how it is loaded."""

    path: str | None = None  # of text or tokens; see training/tasks/data.py
    num_workers: Interval = 0  # processes per rank that load batches; 0: the rank itself
    pin_memory: bool = False  # faster copies to a GPU


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Section):
    """The size of the built-in task's model."""

    layers: Count = 4
    heads: Count = 4
    width: Count = 128  # of the residual stream; a multiple of heads
    context: Count = 128  # tokens that each prediction sees
    vocabulary: Count = 256  # at least that of the tokens; for text, 256 (bytes)
    ngrams: Annotated[int, within(ge=0, le=8)] = 0  # N: also embed the last 2, 3, ... N tokens
    dropout: Annotated[float, within(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


@dataclass(frozen=True, kw_only=True)
class Train(Section):
    """How long to train, with which batches and which learning rate."""

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

    def __post_init__(self) -> None:
        if not (self.batch_size or self.global_batch_size):
            raise ValueError("needs batch_size (per process) or global_batch_size")
        if self.batch_size and self.global_batch_size:
            raise ValueError("has both batch_size and global_batch_size; keep one")
        if self.max_steps is None and self.max_seconds is None and self.epochs is None:
            raise ValueError("nothing ends the run; set max_steps, max_seconds or epochs")

    def batch_size_on(self, world_size: int) -> int:
        """Return the number of samples in one process's micro-batch.

        A global batch that is not divisible is rounded to the nearest one that is.
        """
        if self.batch_size is not None:
            return self.batch_size
        assert self.global_batch_size is not None
        return max(1, round(self.global_batch_size / (world_size * self.grad_accumulation)))


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """Where and when to save, and what to keep."""

    dir: str = "checkpoints"  # a run saves in <dir>/<run id>/
    every: Interval = 0  # 0: only by the clock and at the end
    every_minutes: Rate = 10.0  # after the last save; 0: never
    snapshot_every: Interval = 0  # into memory that outlives the ranks; 0: never
    keep_last: Count = 3  # intact checkpoints; older ones are deleted, except the best
    format: Literal["full", "sharded"] = "full"  # rank 0 writes all; or each rank its part


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(Section):
    """Whether to compute in a smaller type than float32."""

    enabled: bool = False  # on GPUs; CPUs always compute in float32
    dtype: Literal["bfloat16", "float16"] = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Fsdp(Section):
    """How strategy fsdp shards the model; see Sharding in distributed/strategy.py."""

    shard: Annotated[Any, _word_or_count("all", "node")] = "all"  # ranks that share a model
    reshard_after_forward: bool = True  # false: more memory, less traffic
    cpu_offload: bool = False  # keep parameters in the CPU's memory until needed


@dataclass(frozen=True, kw_only=True)
class Distributed(Section):
    """How the ranks join, and how the model is spread over them."""

    strategy: Annotated[str, check_strategy] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    join_timeout: Seconds = 300  # for all ranks to join
    timeout: Seconds = 1800  # of one collective
    hang_seconds: Seconds | None = None  # a rank silent for longer is stuck; null: from its steps
    find_unused_parameters: bool = False  # an option of DDP, as are the next two
    static_graph: bool = False
    bucket_cap_mb: Positive | None = None
    fsdp: Fsdp = Fsdp()
    mixed_precision: MixedPrecision = MixedPrecision()


@dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """All settings of train.py."""

    seed: Annotated[int, within(ge=0, lt=2**32)] = 0
    task: Annotated[str, _check_task] = BUILT_IN_TASK  # or my_module:MyTask, see training/tasks
    resume: str = "auto"  # auto: from this run's newest checkpoint; never; or a path
    data: Data = Data()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    distributed: Distributed = Distributed()
    model: LanguageModel = LanguageModel()
    # wandb, or my_module:MyTracker: training/trackers.py
    tracking: Annotated[list[str], _check_tracking] = field(default_factory=lambda: ["tensorboard"])
    prepare: str | None = None  # a batch script that submit_with_config.sh runs before the training


@dataclass(frozen=True, kw_only=True)
class OwnTaskSettings(Settings):
    """The settings of a run with the user's own task, which alone defines the keys of `model`."""

    model: Annotated[Tree, Asked] = field(default_factory=lambda: Asked({}))  # type: ignore[assignment]


def data_path(path: str | None) -> Path | None:
    """Return the folder or file at data.path (built-in task); SettingsError if it is missing."""
    found = Path(os.path.expanduser(path)) if path else None  # Path.expanduser rejects some ~names
    if found and not found.exists():
        raise SettingsError(f"data.path: there is no folder or file {found}; correct it")
    return found


KNOWN = dict(keys_of(Settings))  # the type of each setting by its full key


def load(path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = {}) -> Settings:
    """Read a config, combine it with its defaults and the `key=value` overrides, and check it.

    Raises SettingsError: one line that names the file (or "command line"), the key and the fix.
    `environ` holds this process's variables; by default, none has an effect. If HANG_SECONDS is
    set, it replaces distributed.hang_seconds, unless that is on the command line.
    """
    layers = _read_layers(path)
    layers[COMMAND_LINE] = _read_overrides(overrides)
    tree, level_of = _merge_layers(layers)

    kind = Settings if tree.get("task", BUILT_IN_TASK) == BUILT_IN_TASK else OwnTaskSettings
    try:
        settings = read(kind, tree)
        _check_login(settings.tracking, environ)
    except InvalidSetting as error:
        known = error.key
        while known and known not in level_of:
            known = known.rpartition(".")[0]
        source = [*layers][level_of[known]] if known in level_of else str(path)
        raise SettingsError(f"{source}{line_of(source, known)}: {error}") from None

    changed: Tree = {}
    limits = settings.distributed
    # If a layer sets only timeout, join_timeout is raised to it: timeout used to be both.
    join_timeout_level = level_of.get("distributed.join_timeout", -1)
    is_below = join_timeout_level < level_of.get("distributed.timeout", -1)
    if is_below and limits.join_timeout < limits.timeout:
        changed["join_timeout"] = limits.timeout
    # Each rank's beats read $HANG_SECONDS; only a setting on the command line overrides it.
    is_typed = level_of.get("distributed.hang_seconds") == len(layers) - 1  # the command line
    if environ.get("HANG_SECONDS") and not is_typed:
        changed["hang_seconds"] = None
    return read(kind, _merge(tree, {"distributed": changed}))


def _merge_layers(layers: Mapping[str, Tree]) -> tuple[Tree, dict[str, int]]:
    """Return the settings of all layers, of which the last wins, and the layer that sets each.

    Layers are numbered from 0. A layer that sets one of the two batch sizes unsets the other below.
    """
    tree: Tree = {}
    level_of = dict[str, int]()
    for level, layer in enumerate(layers.values()):
        level_of |= dict.fromkeys(_paths(layer), level)
        train = layer.get("train", {})
        if isinstance(train, dict):
            sizes = [train.get(name) for name in ("batch_size", "global_batch_size")]
            if sizes.count(None) == 1:  # a null chooses nothing
                tree = _merge(tree, {"train": {"batch_size": None, "global_batch_size": None}})
        tree = _merge(tree, layer)
    return tree, level_of


def _read_layers(path: Path) -> dict[str, Tree]:
    """Return what a config and its defaults contain, by file, the lowest layer first.

    Raises SettingsError if a file cannot be read, or `defaults` is not a list.
    """
    config = read_file(path)
    names = config.pop("defaults", [])
    if not isinstance(names, list):
        raise SettingsError(f"{path}: defaults: should be a list of names, such as [distributed]")
    if "_self_" not in names:  # Hydra's name for the file itself
        names.append("_self_")

    files = [path if name == "_self_" else path.parent / with_ending(name) for name in names]
    return {str(file): config if file == path else read_file(file) for file in files}


def _check_login(trackers: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise InvalidSetting if wandb is to be used, but has no login: it would lose the metrics.

    A rank, which has RANK, is not checked: a launch has done that already, on the machine where it
    was typed. Only rank 0 logs in; if it cannot, a warning says that its metrics are lost.
    """
    if "wandb" not in trackers or environ.get("RANK"):
        return

    variables = "WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"
    files = "~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings"
    found = [*map(environ.get, variables), *map(os.path.exists, map(os.path.expanduser, files))]
    if not any(found):
        raise InvalidSetting(
            "tracking",
            "wandb has no login on this machine; "
            "run wandb login, or set WANDB_API_KEY or WANDB_MODE=offline",
        )


def _paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Yield the full key of each section and setting, such as train and train.max_steps."""
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
    """Turn `a.b=value` into {a: {b: value}}; of two values for one key, the later wins.

    Raises SettingsError for a text that has no key or no `=`.
    """
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise SettingsError(f"{COMMAND_LINE}: {text!r} is not a setting; write it as seed=1")
        layer = _parse_value(key, value)
        for name in reversed(names):
            layer = {name: layer}
        tree = _merge(tree, layer)
    return tree


def _parse_value(key: str, text: str) -> Any:
    """Return text as is for a key of type str, otherwise parsed if it is a YAML scalar or list.

    Text that means nothing (see NOTHING) is None for any key.
    """
    if text in NOTHING:
        return None
    kind = KNOWN.get(key)
    if str in (kind, *get_args(kind)):
        return text
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | list) else text
