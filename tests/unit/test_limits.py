"""Time limits: a process that waits for another one, which itself waits, must wait longer."""

import ast
from pathlib import Path

import pytest

from distributed import limits as helper
from launcher.wire import limits

ROOT = Path(__file__).parents[2]
PROMISE_S = 2.0  # README: for all processes of a run to end once one is killed


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        # Signs of life: some may be late; a loop that runs once per sign is not stuck.
        (3 * limits.BEAT_S, limits.SPARED_SILENCE_S),
        (limits.BEAT_S, limits.GAP_S),
        (limits.QUIET_S, limits.SILENCE_S),
        (2 * limits.BEAT_S, limits.STILL_S),
        (limits.STILL_S + limits.BEAT_S, limits.SPARED_SILENCE_S),
        (limits.SILENCE_S, limits.HELD_UP_S),
        (limits.SPARED_SILENCE_S, limits.RANKS_END_S),
        (limits.RANKS_END_S, limits.DECIDE_S),
        # A stop: the agent's snapshot, the launcher's last request, the supervisor, the launcher,
        # the command that requested it.
        (limits.STOP_SNAPSHOT_S, limits.STOP_CLOSE_S),
        (limits.STOP_CLOSE_S + limits.CONTROL_TERM_S, limits.STOP_AGENT_S),
        (limits.STOP_AGENT_S, limits.STOP_CLOSE_S + limits.CONTROL_END_S),
        (limits.STOP_CLOSE_S + limits.CONTROL_END_S, limits.STOP_COMMAND_S),
        (helper.SECOND_INTERRUPT_S, limits.GRACE_S),
        (helper.STOP_LOOK_S, limits.GRACE_S),
        # One process dies, all stop.
        (limits.SETTLE_S + limits.RANK_TERM_S, PROMISE_S),
        (limits.ORPHANS_S, PROMISE_S),
        (limits.ORPHANS_S, limits.SWEEP_S),
        (limits.VERDICT_S, limits.SRUN_END_S),
        (limits.SRUN_END_S, limits.OTHERS_S),
        (limits.RANK_TERM_S + limits.KILL_S, limits.OTHERS_S),
        # A failure: the traceback arrives before the agent stops waiting for the error file.
        (limits.SETTLE_S, limits.VERDICT_S),
        (limits.TRACEBACK_S, limits.RAISED_S),
        (limits.STACKS_WRITE_S, limits.STACKS_ANSWER_S),
        (
            limits.ASKED_LOOK_S + limits.STACKS_WRITE_S + limits.STACKS_ANSWER_S,
            limits.STACKS_SHOW_S,
        ),
        (helper.SILENCE_S, helper.FIRST_SILENCE_S),
        # A start: the side that waits for connections waits longer than the side that connects.
        (limits.PDSH_CONNECT_S, limits.PDSH_FETCH_S),
        (limits.PDSH_READY_S, limits.PDSH_FETCH_S),
        (limits.CHECKIN_TELL_S, limits.CHECKIN_CONNECT_S),
        (limits.CHECKIN_CONNECT_S, limits.PAIRS_S),
        (limits.PAIR_PASS_S, limits.GREETING_S),
        (limits.NVIDIA_SMI_MORE_S, limits.NVIDIA_SMI_S),
        (limits.NVIDIA_SMI_S, limits.STEP_PREFLIGHT_S),
        (limits.STEP_NAMING_S, limits.STEP_PREFLIGHT_S),
        (limits.STEP_PREFLIGHT_S, limits.STEP_IMAGE_S),
        # Node rank 0 is lost: agents notice it at different times, then look for the successor.
        (2 * limits.LOSS_SPREAD_S, limits.SUCCESSOR_S),
        # The self-test: a stuck transfer is named before the ranks give up waiting.
        (limits.TRANSFER_S, limits.SELFTEST_S),
        (limits.SELFTEST_LOOK_S, limits.SELFTEST_S),
    ],
)
def test_whoever_waits_for_another_waits_longer(shorter: float, longer: float) -> None:
    assert shorter < longer


LARGE = 1000  # nodes


@pytest.mark.parametrize(
    ("shorter_s", "longer_s"),
    [
        (limits.SETTLE_S, limits.VERDICT_S),
        (limits.VERDICT_S, limits.SRUN_END_S),
        (limits.SRUN_END_S, limits.OTHERS_S),
        (limits.ASKED_LOOK_S + limits.STACKS_ANSWER_S, limits.STACKS_SHOW_S),
        (limits.CHECKIN_CONNECT_S, limits.PAIRS_S),
    ],
)
def test_limits_for_many_nodes_keep_their_order(shorter_s: float, longer_s: float) -> None:
    assert limits.for_nodes(shorter_s, LARGE) < limits.for_nodes(longer_s, LARGE)
    assert limits.for_nodes(longer_s, 4) < longer_s + 0.05  # a small run does not wait for it


def test_limits_for_many_nodes_stay_within_those_that_do_not_grow() -> None:
    assert limits.for_nodes(limits.MEETING_S, LARGE) < limits.STEP_PREFLIGHT_S
    assert limits.for_nodes(2 * limits.VERDICT_S, 2 * LARGE) < limits.RANKS_END_S
    stop_s = limits.STOP_CLOSE_S + limits.CONTROL_END_S
    assert limits.for_nodes(limits.OTHERS_S, LARGE) < stop_s  # as long as a stop may take


def test_no_other_file_has_a_time_limit() -> None:
    """No other file in launcher/ or distributed/ defines a constant that ends in _S."""
    found = [
        f"{file.relative_to(ROOT)}: {target.id}"
        for folder in ("launcher", "distributed")
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "limits.py"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_S")
    ]
    assert not found
