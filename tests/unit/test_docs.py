"""The guides and the code agree on paths, flags, settings, variables and faults."""

import ast
import dataclasses
import html
import importlib
import importlib.util
import re
import shlex
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
import pytest
import yaml
from agents import MODULES, ROOT, execute, written

import distributed
from distributed import errors
from distributed.environment import DEFAULT_LOG_DIR
from distributed.strategy import STRATEGIES
from launcher.cli import tools
from launcher.cli.options import COMMANDS, COMMON, TASKS, options_of
from launcher.explain.kinds import Kind
from launcher.explain.rules import RULES, UNKNOWN, match_rule
from launcher.plan import make_plan
from launcher.plan.settings import TABLE, VARIABLES
from launcher.record.run_json import Record
from launcher.wire import limits
from training.settings import KNOWN, Settings, Train, load

GUIDES = [ROOT / f"{name}.md" for name in ("README", "LAUNCH_GUIDE", "TROUBLESHOOTING")]
GUIDES += [ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")]
GUIDES += [ROOT / "bench/README.md", *sorted(ROOT.glob("docs/*.md"))]
TEXT = {str(guide.relative_to(ROOT)): guide.read_text() for guide in GUIDES}
TEXT["bench"] = TEXT.pop("bench/README.md")
# The flags and settings in this part belong to the scripts that the bench runs.
TEXT["bench"] = re.sub(r"<!-- shapes -->.*<!-- /shapes -->", "", TEXT["bench"], flags=re.DOTALL)
LAUNCH_GUIDE = TEXT["LAUNCH_GUIDE.md"]
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!#).*\n)+)", TEXT["TROUBLESHOOTING.md"], re.M))

SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("scripts/**/*.sh"))
ENTRIES = [name for name in SCRIPTS if "/lib/" not in name]
BASH = "\n".join((ROOT / name).read_text() for name in SCRIPTS)
HELP = (ROOT / "scripts/lib/help.txt").read_text()
PYTHON = "\n".join(module.read_text() for module in MODULES)
# What the table of settings says to the code, without its texts for users.
SETTINGS = [word for one in TABLE.values() for word in (*one.names, *one.sent, *one.own)]
CODE = "\n".join((BASH, HELP, PYTHON, *SETTINGS))
MAKEFILE = (ROOT / "Makefile").read_text()

# Options and variables of other programs.
FOREIGN_FLAGS = """
torchrun --nproc-per-node --node-rank --redirects --tee --use-env --monitor-interval --standalone
SLURM --nodes --gres --time --ntasks --ntasks-per-node --cpus-per-task --cpus-per-gpu --mem
SLURM --mem-per-gpu --batch --start --jobid --account --partition --requeue --format
SLURM --signal --het-group --output --error --array --gpus --gpus-per-task --gpu-bind
docker --device --ipc --shm-size --ulimit --cpus --pids-limit, nsys --trace-fork-before-exec
accelerate --num_processes --mixed_precision --num_machines --machine_rank --main_process_ip
DeepSpeed --num_gpus --hostfile --include --deepspeed --local_rank, mpirun --hostfile
nvidia-smi --query-gpu, tensorboard --logdir, mypy --strict, py-spy --pid
bats --no-tempdir-cleanup
a script of the reader's, or of the guide: --lr --name --conf
"""
FOREIGN_VARIABLES = """
NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_TREE_THRESHOLD
NCCL_CROSS_NIC
TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCHELASTIC_SIGNALS_TO_HANDLE TORCH_LOGS PYTORCH_ALLOC_CONF
ACCELERATE_MIXED_PRECISION ACCELERATE_GRADIENT_ACCUMULATION_STEPS ACCELERATE_DYNAMO_BACKEND
ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED ACCELERATE_DEEPSPEED_CONFIG_FILE FSDP_VERSION
FSDP_AUTO_WRAP_POLICY OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
CUDA_LAUNCH_BLOCKING SLURM_NNODES SLURM_NPROCS SBATCH_PARTITION PBS_HOME PBS_NODENUM PDSH_SSH_ARGS
RES_OPTIONS PR_SET_CHILD_SUBREAPER; a site's module file: LAUNCH_KIT
"""
# Words in the code that look like names of faults but are not.
NO_FAULTS = {
    *("all-gather", "all-reduce", "all-to-all", "reduce-scatter"),  # collectives
    *("ch-run", "compute-apps", "nvidia-smi", "rocm-smi"),
    *("opencv-python", "scikit-learn"),  # packages
    "gpus-per-node",  # an option of sbatch
}


NAME = r"stranger|[a-z]+(?:-[a-z]+)+"


# --- the text of the guides ---------------------------------------------------------------------


def blocks(text: str) -> list[str]:
    """Return the contents of the fenced and the indented blocks."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    return fenced + re.findall(r"(?:^ {4,}\S.*\n)+", text, re.M)


def spans(text: str) -> list[str]:
    """Return the text between backticks, including spans over several lines."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]


def code_of(text: str) -> str:
    """Return everything that is formatted as code."""
    return "\n".join(blocks(text) + spans(text))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub creates for the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(fence: str = "bash") -> Iterator[str]:
    """Yield every command line in the fenced blocks of a language, without its comment."""
    for text in TEXT.values():
        for block in re.findall(rf"^```{fence}\n(.*?)^```", text, re.M | re.S):
            yield from (re.sub(r"\s+#\s.*", "", line) for line in block.splitlines() if line)


ALL_CODE = "\n".join(map(code_of, TEXT.values()))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(guide: Path) -> None:
    for link in re.findall(r"(?:\]\(|src=\")([^)\s\"]+)", guide.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = guide.parent / path if path else guide
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_path_named_exists() -> None:
    folders = ".ci|bench|config|distributed|examples|docs|launcher|scripts|tests|training"
    for path in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*", ALL_CODE):
        is_users = path in ("config/x.py", "config/site.env")  # nanoGPT's; the cluster's own
        assert is_users or (ROOT / path.rstrip(".")).exists(), path


def test_the_layout_names_every_folder_and_no_other() -> None:
    layout = next(block for block in blocks(TEXT["CONTRIBUTING.md"]) if "what users type" in block)
    above: list[str] = []
    named = set()
    for line in layout.splitlines():
        indent, names = re.match(r"( +)((?:[\w.-]+/? )*[\w.-]+/?)(?: {2,}|$)", line).groups()  # type: ignore
        del above[len(indent) // 2 - 2 :]
        named |= {ROOT.joinpath(*above, name) for name in names.split()}
        above.append(names)
    assert [place for place in named if not place.exists()] == []
    for top in ("scripts", "launcher", "distributed", "training"):
        folders = {ROOT / top, *(file.parent for file in (ROOT / top).rglob("*.py"))}
        assert folders <= named


def test_make_files_says_what_every_file_is_for() -> None:
    shown = subprocess.run(["make", "-s", "files"], cwd=ROOT, capture_output=True, text=True)
    listed = dict(re.findall(r"^(\S+) *(.*)$", shown.stdout, re.M))
    assert {"launcher/plan/", "launcher/plan/plan.py", "scripts/launch.sh"} < listed.keys()
    assert [name for name, said in listed.items() if not 10 < len(said) <= 100] == []


def test_every_module_named_exists() -> None:
    for module in re.findall(r"-m (distributed\.\w+)", ALL_CODE):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    imports = r"from torch_launch_kit\.distributed\.torch import \((.*?)\)"
    imported = re.search(imports, TEXT["docs/your-script.md"], re.S)
    assert imported
    table = TEXT["docs/your-script.md"].partition("## The helper")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    helper = importlib.import_module("distributed.torch")
    assert {*re.findall(r"\w+", imported[1])} <= {*helper.__all__}
    assert sorted(re.findall(r"`(\w+)\b", " ".join(rows))) == sorted(helper.__all__)


def test_every_flag_named_is_a_flag() -> None:
    known, named = (
        set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        for text in (CODE + FOREIGN_FLAGS, ALL_CODE)
    )
    known |= {"--rdzv-id", "--rdzv-backend", "--log-dir"}  # torchrun's, parsed by its parser
    assert named - known == set()


def test_every_key_named_is_a_key() -> None:
    keys = set(KNOWN)
    sections = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    for key in re.findall(rf"(?<![\w./:-])((?:{sections})\.[a-z_.]+\b)(?!\()", ALL_CODE):
        is_section = any(known.startswith(f"{key}.") for known in keys)
        path = ROOT / key.replace(".", "/")
        is_module = path.with_suffix(".py").exists() or path.is_dir()
        is_file = key.endswith((".py", ".sh", ".yaml", ".pt", ".bin"))
        assert key in keys or is_section or is_module or is_file, key


def test_every_variable_named_is_read_somewhere() -> None:
    named = set(re.findall(r"(?<![\w$.%])\$?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\b", ALL_CODE))
    assert named - set(re.findall(r"\w+", CODE + FOREIGN_VARIABLES)) == set()


def test_every_make_target_named_exists_and_every_target_is_named() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.M)) - {"help"}
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", ALL_CODE, re.M))
    words = (span.split() for span in spans("\n".join(TEXT.values())))
    named |= {one[1] for one in words if one[:1] == ["make"] and len(one) > 1}
    assert named == targets


# --- faults -------------------------------------------------------------------------------------


def faults_of_python(module: Path) -> Iterator[str]:
    """Yield the faults named in a module's strings: `name`, `... [name]` or `name: ...`."""
    tree = ast.parse(module.read_text())
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)) and all(map(is_word, node.elts)):
            left_out |= {id(word) for word in node.elts}  # the names of options, for example
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in left_out:
            text = str(node.value)  # type: ignore[attr-defined]
            for alone, last in re.findall(rf"^!?({NAME})(?:$|: )|\[({NAME})\]$", text):
                yield alone or last


def is_word(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(re.fullmatch(r"[\w-]+", str(node.value)))


def faults_of_bash(text: str) -> Iterator[str]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    code = "\n".join(line for line in lines if not line.startswith("refuse()"))
    yield from re.findall(rf"\brefuse ({NAME}) ", code)
    yield from re.findall(rf"\bdie [0-9] [\"']({NAME}): ", code)
    yield from re.findall(rf"\[({NAME})\]\"", code)


def known_faults() -> set[str]:
    found = {name for module in MODULES for name in faults_of_python(module)}
    found |= {rule.fault for rule in RULES if rule.kind != Kind.CONSEQUENCE}
    return (found | set(faults_of_bash(BASH))) - NO_FAULTS


def test_every_fault_has_a_section_and_every_section_a_fault() -> None:
    assert len(known_faults()) > 20
    sections = re.findall(r"^## (.+)$", TEXT["TROUBLESHOOTING.md"], re.M)
    assert sorted(sections) == sorted(known_faults())


def test_the_index_names_every_section_once_under_its_phase() -> None:
    text = TEXT["TROUBLESHOOTING.md"]
    phases = dict(re.findall(r"^# (.+)\n((?:(?!# ).*\n?)+)", text, re.M))
    index: dict[str, list[str]] = {}
    for line in phases.pop("Index").splitlines():
        if head := re.fullmatch(r"\| (.+) \| \|", line):
            rows = index.setdefault(head[1], [])
        elif row := re.fullmatch(r"\| \[([\w-]+)\]\(#\1\) \| \S.* \|", line):
            rows.append(row[1])
    sections = {phase: re.findall(r"^## (.+)$", part, re.M) for phase, part in phases.items()}
    assert index == {phase: names for phase, names in sections.items() if names}


def test_each_rule_is_found_by_a_text_of_its_section() -> None:
    """Text that people paste into a search engine leads to the section that `explain` names."""
    for section, text in SECTIONS.items():
        told = re.search(r"\*\*In other logs:\*\*(.*?)\n\n", text, re.S)
        for quoted in re.findall(r"`([^`]+)`", told[1]) if told else ():
            rule = match_rule(quoted.replace("\n", " "))
            assert rule is not None and rule.fault == section, f"{section}: {quoted}"
    for name in {rule.fault for rule in RULES if rule.kind != Kind.CONSEQUENCE} - {UNKNOWN}:
        quoted_texts = (
            text.replace("\n", " ") for text in re.findall(r"`([^`]+)`", SECTIONS[name])
        )
        found = {rule.fault for text in quoted_texts if (rule := match_rule(text)) is not None}
        assert name in found, f"{name}: no text that its rule knows"


def test_every_fault_named_anywhere_in_the_guides_is_known() -> None:
    text = "\n".join(TEXT.values())
    named = set(re.findall(rf"\[({NAME})\](?!\()", text))
    named |= set(re.findall(rf"TROUBLESHOOTING\.md#({NAME})", text)) - anchors(text)
    assert named - known_faults() == set()


# --- scripts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ENTRIES)
def test_every_script_answers_help_with_the_usage_of_the_guide(script: str) -> None:
    result = execute(ROOT, ROOT / script, "--help")
    assert result.stderr == ""
    usage = re.search(r"^usage: (.*)$", result.stdout, re.M)
    example = re.search(r"^example: (.*)$", result.stdout, re.M)
    assert usage and example
    assert f"    {usage[1]}\n" in "".join(TEXT.values())
    own_names = {name for name in ENTRIES if (ROOT / name).samefile(ROOT / script)}
    for line in (usage, example):
        assert own_names & {word.removeprefix("$PWD/") for word in line[1].split()}
    assert f"`{script}`" in TEXT["README.md"]


def planned() -> list[str]:
    # Commands that query SLURM or need a run are tested on the cluster in a box.
    others = r"submit_with|explain|checkpoint|.* --(stop|stacks) "
    starts = rf"(\w+=\S+ )*scripts/(?!{others})|(?!.*~/).*\btrain\.py\b"
    return sorted({line for line in commands() if re.match(starts, line)})


@pytest.mark.slow
@pytest.mark.parametrize("line", planned())
def test_every_command_of_the_guides_plans(line: str, tmp_path: Path) -> None:
    """The guides' commands are accepted: launches with --dry-run, train.py with --check."""
    words = shlex.split(line)
    variables: dict[str, Any] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    own_config = written(tmp_path / "my.yaml", "train: {batch_size: 1, max_steps: 1}\n")
    words = [str(own_config) if word == "my.yaml" else word for word in words]
    if "train.py" in words:
        execute(ROOT, sys.executable, *words[words.index("train.py") :], "--check")
    else:
        execute(ROOT, words[0], "--dry-run", *words[1:], **variables)


KIT = "~/launch-kit/"


def typed_in_a_repository() -> list[str]:
    """Return the launches that start the reader's own script, from its folder."""
    typed = {line for line in commands("(?:ba)?sh") if f"{KIT}scripts/" in line}
    return sorted(line for line in typed if "explain.sh" not in line)


@pytest.mark.slow
@pytest.mark.parametrize("line", typed_in_a_repository())
def test_every_command_for_a_readers_script_plans(line: str, tmp_path: Path) -> None:
    """In another folder, the command starts that folder's train.py, with its arguments."""
    (tmp_path / "train.py").write_text("import torch\n")
    script, *words = shlex.split(line.partition(KIT)[2])
    named = [word for word in ("train.py", "--") if word in words]  # before the script's arguments
    (tmp_path / "nodes").write_text("node1\nnode2\n")
    variables: dict[str, Any] = {"TRAIN_SCRIPT": "train.py"} if named == ["--"] else {}
    if "job" in words:
        variables |= {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}
    result = execute(tmp_path, ROOT / script, "--dry-run", *words, **variables)
    if named:
        arguments = shlex.join(words[words.index(named[0]) + 1 :])
        assert re.search(rf"train\.py .*{re.escape(arguments)}", result.stdout)


def test_every_command_of_the_guides_for_checkpoints_is_one() -> None:
    lines = [line for line in commands() if line.startswith("scripts/checkpoint.sh ")]
    assert len(lines) > 4
    assert [line for line in lines if tools.refusal(shlex.split(line)[1:])] == []


# --- the first page -----------------------------------------------------------------------------


def block_of(shown: str) -> list[str]:
    """Return the words of the failure block that ends a text, without the parts that vary.

    The picture is narrow: its long rows are wrapped.
    """
    block = " ".join(shown[shown.index("FAILED") :].split())
    block = re.sub(r"\(the batch has samples [\d,. ]+\)", "(SAMPLES)", block)
    block = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "RUN", block)
    block = re.sub(r"\d+ s after the start", "N s after the start", block)
    block = re.sub(r"(node_0.log|~/launch-kit/\S+):\d+", r"\1:N", block)
    return block.split()


def test_the_citation_names_the_newest_release() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == distributed.__version__
    release = re.search(r"^## (\d.*)$", TEXT["CHANGELOG.md"], re.M)
    assert release and release[1] == f"{cited['version']} - {cited['date-released']}"


def test_the_figures_are_those_of_the_benches() -> None:
    """`python bench/figures.py` updates them; so does each bench."""
    section = f"<!-- figures -->\n{figures.text()}<!-- /figures -->"
    assert section in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_first_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    """Compare the rows and the words; numbers differ from machine to machine."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^    \$ (scripts/launch.sh --nproc.*)\n((?:    .*\n)+)", page, re.M)
    assert block
    command = shlex.split(block[1])
    command[0], command[-1] = str(ROOT / command[0]), str(ROOT / command[-1])
    both = ["bash", "-c", 'exec "$@" 2>&1', "bash"]
    shown = execute(tmp_path, *both, *command, BACKEND="gloo").stdout
    today = [line for line in shown.splitlines() if "warning: " not in line]
    assert [line.split()[0] for line in block[2].splitlines()] == [one.split()[0] for one in today]


@pytest.mark.slow
def test_the_picture_of_a_failure_shows_the_block_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python docs/pictures.py failure` draws it again."""
    # torch sets it in a process that compiles, as other tests do; the resume line would repeat it.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    assert spec and spec.loader
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    rows: dict[float, str] = defaultdict(str)
    text = r'<text class="[^"]*" x="[\d.]+" y="([\d.]+)"[^>]*>([^<]*)</text>'
    for y, piece in re.findall(text, (ROOT / "docs/failure.svg").read_text(encoding="utf-8")):
        rows[float(y)] += html.unescape(piece).replace("\xa0", " ")
    drawn = "\n".join(rows[y].rstrip("\n") for y in sorted(rows))
    today = pictures.take("failure", tmp_path)
    assert block_of(drawn) == block_of(re.sub(r"\x1b\[[\d;]*m", "", today))


# --- the tables of docs/reference.md, and of the guide's defaults ---------------------------------


REFERENCE, GUIDE = ((ROOT / name).read_text() for name in ("docs/reference.md", "LAUNCH_GUIDE.md"))


def section_of(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.M)
    assert found, heading
    return re.split(rf"^#{{2,{len(found[1])}}} ", text[found.end() :], maxsplit=1, flags=re.M)[0]


CONFIG = section_of(REFERENCE, "The config")


def own_options(*commands: str) -> set[str]:
    return {name for command in commands for name in options_of(command)}


def options_of_train() -> set[str]:
    text = (ROOT / "training/arguments.py").read_text()
    calls = re.findall(r"add_argument\(\s*((?:\"-[\w-]+\",\s*)*\"-[\w-]+\")", text)
    return set(re.findall(r"\"(-[\w-]+)\"", " ".join(calls)))


# The code's options by the heading of their table in docs/reference.md.
OVER_SSH = ("launch_torchrun_auto", "launch_pdsh_multinode", "launch_multinode")
OPTIONS = {
    "Every launcher": {*COMMON, *TASKS},
    "launch.sh": own_options("launch"),
    ", ".join(f"{name}.sh" for name in OVER_SSH): own_options(*OVER_SSH),
    "run_ddp.sh": own_options("run_ddp"),
    "submit_with_config.sh": own_options("submit_with_config"),
    "test_distributed.sh": own_options("test_distributed"),
    "train.py": options_of_train(),
}


@pytest.mark.parametrize("heading", OPTIONS)
def test_the_tables_of_options_are_the_codes(heading: str) -> None:
    rows = re.findall(r"^\| (`-.*?) \|", section_of(REFERENCE, heading), re.M)
    assert sorted(re.findall(r"`(-[\w-]+)`", " ".join(rows))) == sorted(OPTIONS[heading])


def test_every_option_has_its_table_and_is_in_the_help() -> None:
    every = own_options(*COMMANDS)
    assert every | {*COMMON, *TASKS} <= set.union(*OPTIONS.values())
    assert {*COMMON, *TASKS} <= set(re.findall(r"(?<![\w-])--?[a-z-]+", f"-h {HELP}"))


def test_the_table_of_the_config_and_its_defaults_are_the_codes() -> None:
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \|([^|]*)\|", CONFIG, re.M))
    assert sorted(rows) == sorted(KNOWN)
    least = Settings(train=Train(batch_size=1, max_steps=1))
    for key in set(KNOWN) - {"train.batch_size", "train.max_steps"}:
        value: object = least
        for part in key.split("."):
            value = getattr(value, part)
        shown = rows[key].strip()
        is_number = isinstance(value, float)
        assert (float(shown) if is_number else yaml.safe_load(shown)) == value, key


def test_every_variable_of_the_help_is_in_the_reference() -> None:
    told = HELP.partition("Environment")[2]
    variables = [
        name
        for names in re.findall(r"^  ((?:[A-Z_]+, )*[A-Z_]+)(?: |$)", told, re.M)
        for name in names.split(", ")
    ]
    assert len(variables) > 15
    table = section_of(REFERENCE, "Environment variables")
    for name in variables:
        assert re.search(rf"^\| .*`{name}`.* \|", table, re.M), name
    ours = table.partition("### Variables of other programs")[0]
    rows = re.findall(r"^\| (`.*?) \|", ours, re.M)
    assert sorted(re.findall(r"`([A-Z_]+)`", " ".join(rows))) == sorted({*variables})
    cells = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", ours, re.M))
    for name, default in DEFAULTS.items():
        assert re.search(rf"(^| )`?{default}`?[ ,]", cells[name].partition("|")[0]), name
    for name, setting in VARIABLES.items():
        assert not [word for word in setting.words if f"`{word}`" not in cells[name]], name


def test_the_reference_says_why_a_variable_is_sent_to_the_nodes() -> None:
    section = section_of(REFERENCE, "Environment variables").partition("### What is sent")[2]
    lines = section.partition("\n- those that the activation")[0]
    names = [
        name
        for row in re.findall(r"^  - (.*?): ", re.sub(r"\n    ", " ", lines), re.M)
        for name in re.findall(r"`(\w+\*?)`", row)
    ]
    assert sorted(names) == sorted(name for setting in TABLE.values() for name in setting.sent)


# Variables whose default is a value in the code.
DEFAULTS = {
    "GRACE": limits.GRACE_S,
    "LOG_DIR": DEFAULT_LOG_DIR,
    "MASTER_PORT": make_plan.BY_HAND_PORT,
    "MAX_RESTARTS": 0,
    "SPARES": 0,
    "LAUNCHER": "agent",
    "SHOW_RANKS": 0,
}


def test_the_table_of_exit_codes_is_the_codes() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", section_of(REFERENCE, "Exit codes"), re.M)
    codes = [int(code) for cell, _ in rows for code in cell.split(", ")]
    ours = [errors.BAD_INPUT, errors.REFUSED, errors.STOPPED, errors.CANNOT_START]
    killed = [128 + one for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)]
    assert sorted(codes) == sorted([0, *ours, *killed])


def test_the_table_of_strategies_is_the_codes() -> None:
    table = section_of((ROOT / "docs/train-py.md").read_text(), "Strategies")
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.M)) == sorted(STRATEGIES)


def test_the_table_of_run_json_is_the_records() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section_of(REFERENCE, "run.json"), re.M)
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(names) == sorted(one.name for one in dataclasses.fields(Record))


def test_no_batch_file_of_the_guides_fixes_a_port() -> None:
    """Two jobs may share a node."""
    files = [block for text in TEXT.values() for block in blocks(text) if "#!/bin/bash" in block]
    assert len(files) > 2
    assert [file for file in files if re.search(r"\b29500\b", file)] == []


def test_the_defaults_of_the_batch_scripts_are_in_the_guide() -> None:
    table = section_of(GUIDE, "SLURM jobs")
    for column, name in enumerate(("slurm_train.sh", "slurm_train_single_node.sh"), 1):
        lines = (ROOT / "scripts/slurm" / name).read_text()
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", lines, re.M))
        hours = asked.pop("time").removesuffix(":00:00")
        shown = {
            "nodes": asked.pop("nodes"),
            "GPUs per node": asked.pop("gpus-per-node"),
            "CPUs per GPU": asked.pop("cpus-per-gpu"),
            "time": f"{hours} hours",
            "name": asked.pop("job-name"),
            "output": f"`{asked.pop('output').replace('%j', 'JOBID')}`",
            "signal before the time limit": f"{asked.pop('signal').rpartition('@')[2]} s",
        }
        assert asked.keys() == {"requeue", "open-mode"}
        for row, value in shown.items():
            cells = re.search(rf"^\| {row} \| (.*) \|$", table, re.M)
            assert cells and cells[1].split(" | ")[column - 1] == value, row


@pytest.mark.parametrize("page", ["reference.md", "train-py.md"])
def test_every_config_shown_is_one(page: str, tmp_path: Path) -> None:
    (tmp_path / "distributed.yaml").write_text((ROOT / "config/distributed.yaml").read_text())
    blocks_of_yaml = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S
    )
    assert blocks_of_yaml
    for number, text in enumerate(blocks_of_yaml):
        config = written(tmp_path / f"{number}.yaml", text)
        load(config, [])
