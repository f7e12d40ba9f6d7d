"""Read the command line of an entry script: one grammar for all of them.

It has positional arguments, --options, key=value settings anywhere, and, after `--`, the training
script's own arguments, unchanged. launcher/cli/options.py defines each command's arguments, and
launcher/plan/settings.ini the options.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from distributed.job import job_id
from launcher.cli.options import COMMANDS, COMMON, TASKS, options_of
from launcher.plan.plan import ROOT
from launcher.plan.typed import Typed, Values, Words, is_same
from launcher.text import Environ, PlanError, did_you_mean, read_text

_SETTING = re.compile(r"[A-Za-z_+~][A-Za-z0-9_.+-]*=")
_ARRAY_INDEXES = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID")  # Torque has the last
_COPIES = ("slurm_script", ".SC")  # how SLURM and PBS name their copies of a batch script


class Call(NamedTuple):
    """What scripts/lib/launch.sh puts before the words that were typed."""

    command: str  # a key of COMMANDS
    program: str  # the script's name, for messages
    file: str  # the script as it was submitted or started
    directory: str  # where the command was typed
    python: str  # for the nodes; inside the container, if there is one
    site: str
    activated: str  # names of variables, separated by spaces
    script: str  # as it was typed


def parse(call: Call, words: Words, environ: Environ) -> Typed:
    """Return what was typed, as named fields.

    In a task of a job array, the task's number replaces {task} in settings, also for the resume
    line. Raises PlanError if the command does not accept the words. May print warnings.
    """
    command = COMMANDS[call.command]
    known: Values = {
        "program": call.program,
        "python": call.python,
        "site": call.site,
        "activated": tuple(call.activated.split()),
        "here": Path(call.directory),
        "usage": read_usage(call.file),
        "fanout": command.fanout,
        **command.fixed,
    }

    is_scheduled = command.is_batch or bool(job_id(environ))
    values = _Reader(call.command, known, words, is_scheduled=is_scheduled).read()
    if command.finish and values["fanout"] not in TASKS.values():  # --help needs none
        command.finish(values, environ)
    values["batch_script"] = _choose_batch_script(values, call.file)
    typed = [call.script, *words]

    if task := next(filter(None, map(environ.get, _ARRAY_INDEXES)), ""):
        filled = {word: word.replace("{task}", task) for word in values.get("setting", ())}
        values["setting"] = tuple(filled.values())
        typed = [filled.get(word, word) for word in typed]
    return Typed(**values, typed=tuple(typed), environ=environ)


def read_usage(file: str) -> str:
    """Return the usage line of a script's header; empty if the script cannot be read.

    A backslash at the end of a line joins the next one to it.
    """
    text = re.sub(r"\\\n# *", "", read_text(Path(file)))
    line = re.search(r"(?m)^# usage: (.*)$", text)
    return line[1] if line else ""


def _choose_batch_script(values: Values, file: str) -> str:
    """Return the script that a resume line submits: ours, or the user's edited copy of it.

    Empty if the command has no batch script, or if launch.sh was run without a scheduler.
    """
    ours: str = values.get("batch_script", "")
    if file.endswith(_COPIES):  # the scheduler's copy; nothing shows where the original is
        return ours
    if not ours or values.get("like_torchrun"):
        return ""
    return ours if is_same(Path(file), ROOT / ours) else os.path.abspath(file)


class _Reader:
    """Reads the words of one command line into values, by field."""

    def __init__(
        self, command: str, values: Values, words: Iterable[str], *, is_scheduled: bool
    ) -> None:
        self.own = options_of(command)  # not those that all commands accept
        self.values = values
        self.is_scheduled = is_scheduled
        self.options = {**COMMON, **self.own}
        self.arguments = [*COMMANDS[command].arguments]  # still missing
        self.words = iter(words)  # still unread
        self.see = f"see {values['program']} --help"

    def read(self) -> Values:
        """Return the values. Reads all words.

        Raises PlanError if the command does not accept one.
        """
        for word in self.words:
            if word == "--":
                self.values["rest"] = tuple(self.words)
            elif word.startswith("-") and word != "-":
                self._read_option(word)
            elif self.arguments[:1] == ["program"]:
                self.values["rest"] = (word, *self.words)
            else:
                self._read_argument(word)
        return self.values

    def _append(self, field: str, *words: str) -> None:
        """Add words to a field that has several."""
        self.values[field] = (*self.values.get(field, ()), *words)

    # --- arguments and settings ---

    def _read_argument(self, word: str) -> None:
        """Add a setting, a node or the next positional argument. Raises PlanError for more."""
        if _SETTING.match(word) and not os.path.exists(word):  # a file's name may contain a =
            self._append("setting", word)
        elif not self.arguments:
            raise PlanError(f"unexpected argument {word!r}; usage: {self.values['usage']}")
        elif self.arguments[0] == "node":
            self._append("node", word)
        else:
            self.values[self.arguments.pop(0)] = word

    # --- options ---

    def _read_option(self, word: str) -> None:
        """Add an option to the values, with its value from the same word or from the next one.

        An option such as --status replaces the run. Raises PlanError if the option is unknown,
        lacks a value, has one too many, or does not apply to a job.
        """
        name, value = self._split_option(word)
        if name in TASKS:
            self._replace_run(name, [] if value is None else [value])
            return

        option = self.options[name]
        if option.field == "is_detached":
            self._refuse_scheduled(name)
        if not option.has_value and value is not None:
            raise PlanError(f"option {name} takes no value; {self.see}")
        if option.has_value and value is None:
            value = next(self.words, None)
            if value is None:
                raise PlanError(f"option {name} needs a value; {self.see}")

        if option.field == "passed":
            self._append("passed", name, *([] if value is None else [value]))
        else:
            self.values[option.field] = True if value is None else value

    def _split_option(self, word: str) -> tuple[str, str | None]:
        """Return the full name of a word's option, and the value in the same word, or None.

        Raises PlanError if the option is unknown or its abbreviation ambiguous. Options that all
        commands accept cannot be abbreviated.
        """
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            value = text if equals else None
        else:
            name, value = word[:2], word[2:].removeprefix("=") or None  # -r3

        spelt = name.replace("_", "-")
        # spelt[2:]: -r abbreviates nothing, and a bare -- would abbreviate every option.
        longer = [full for full in self.own if spelt[2:] and full.startswith(spelt)]
        meant = [spelt] if spelt in self.options or spelt in TASKS else longer
        if len(meant) != 1:
            raise PlanError(self._unknown(name if word.startswith("--") else word, meant))
        return meant[0], value

    def _unknown(self, word: str, longer: Sequence[str]) -> str:
        """Return the message for an unknown option, or for an ambiguous abbreviation."""
        hint = did_you_mean(word, (*self.options, *TASKS))
        if 0 < len(longer) < 4:  # more would fill the line
            hint = f"did you mean {' or '.join(longer)}? "
        own = "its name" if "program" in self.arguments else "--"
        cure = f"{hint}{self.see}, and put the training script's own options after {own}"
        return f"unknown option {word!r}; {cure}"

    # --- options that replace a run ---

    def _replace_run(self, option: str, words: Iterable[str]) -> None:
        """Replace the run by a task: --help, --version, or --status RUN and the like.

        `words` are those that were read with the option; all unread ones belong to it, too. Raises
        PlanError for --status or --stop of a job, and for options that do not go with the task.
        """
        task = TASKS[option]
        words = [*words, *self.words]
        is_about_runs = task not in ("help", "version")
        if task in ("status", "stop"):
            self._refuse_scheduled(option)

        others = [flag for flag in ("--strict", "--detach") if self.values.get(COMMON[flag].field)]
        known = ["--dry-run", "--all"] if task == "status" else ["--dry-run"]
        others += [word for word in words if word.startswith("-") and word not in known]
        if is_about_runs and others:
            raise PlanError(f"{others[0]} cannot be used with {option}; give only run ids")

        self.values |= {
            "fanout": task,
            "is_dry_run": "--dry-run" in words or self.values.get("is_dry_run", False),
            "rest": tuple(word for word in words if word != "--dry-run"),
        }

    def _refuse_scheduled(self, option: str) -> None:
        """Raise PlanError if the command runs in a job, or submits one."""
        if self.is_scheduled:
            raise PlanError(
                f"{option} does not apply to a SLURM or PBS job; "
                "use sbatch, squeue and scancel (PBS: qsub, qstat and qdel)"
            )
