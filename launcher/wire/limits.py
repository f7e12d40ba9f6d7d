"""Every time limit and interval of the launcher, in seconds, each with its reason.

`tests/unit/test_limits.py` checks which limits must be longer than others: a process must wait
longer than any process that it waits for. The helper has its own limits (distributed/limits.py).
"""

# Each node adds this to a limit in which all nodes must answer: four times the processor time that
# the costliest answer, a node's stacks, takes node rank 0 (`make bench-scale`).
EACH_NODE_S = 0.005


def for_nodes(limit_s: float, nodes: int) -> float:
    """Return the limit for an answer from this many nodes."""
    return limit_s + EACH_NODE_S * nodes


GRACE_S = 30  # for the ranks to save when they are stopped, unless GRACE is set
POLL_S = 0.01  # between two checks of something that sends no event
LOOK_S = 0.2  # the same, if nobody waits for it: podman's client, another process's lock

# Signs of life between a launcher and the agents, and among the agents.
BEAT_S = 2.0  # between two of them
# After this long without one, the other end is lost (SILENCE_SECONDS). TCP sends lost packets again
# at growing intervals: after an outage of 51 s at most, a sign of life arrives within this time.
SILENCE_S = 60.0
SPARED_SILENCE_S = 10.0  # the same, if the run can continue without the node
QUIET_S = 10.0  # a warning names a node that has been silent for this long
GAP_S = 5.0  # an end that follows a longer gap is attributed to the gap
HELD_UP_S = 120.0  # the longest wait of an agent for a file system, in which it still sends them
STILL_S = 5.0  # between two readings of a clock; longer than any iteration of a loop

# The preflight.
JOIN_S = 300.0  # the default of distributed.join_timeout
LOGIN_NODE_S = 3  # for a scheduler to answer, which identifies a login node
CHECKS_S = 3  # of the preflight's time, reserved for the checks of a node
MEETING_S = 7.0  # for all nodes of a step to come to the master's port
SSH_CONNECT_S = 5
PDSH_CONNECT_S = 10
PDSH_READY_S = 8.0  # for every node to report that it is ready for pdsh
PDSH_FETCH_S = 20.0  # for pdsh to reach a node that waits for it
PROBE_S = 3.0  # to find out why there is no connection to a node
CONNECT_PACE_S = 0.1  # between groups of new connections
CONNECT_AGAIN_S = 0.3  # before another try; doubled after each try
STEP_PREFLIGHT_S = 300.0  # in a SLURM job; its other steps may have to end first
STEP_NAMING_S = 10.0  # after this, silent nodes are named if others have answered
STEP_IMAGE_S = 1800.0  # with pyxis, which may load the image on each node
NVIDIA_SMI_S = 30.0  # to list 8 GPUs without persistence mode; one off the bus can make it hang
NVIDIA_SMI_MORE_S = 8.0  # in total, including the queries for details
PBSDSH_S = 5.0  # for all nodes to answer
GREETING_S = 3.0  # a connection to the master's port that is silent for this long is dropped
PAIR_AGAIN_S = 0.3  # between two tries to reach another node
PAIR_PASS_S = 1.0  # the shortest limit for packets of any size to arrive
SKEW_S = 5.0  # a larger difference between clocks is reported
PROOF_S = 3.0  # for a new connection to prove that it knows the secret

# The agents meet at node rank 0.
CHECKIN_TELL_S = 3.0  # a wait that takes longer reports what it waits for
CHECKIN_CONNECT_S = 4.0  # the kernel detects after 3 s that a host on this network is down
CHECKIN_AGAIN_S = 0.1  # between two tries
CHECKIN_REJECTED_S = 10.0  # then an agent stops trying a node rank 0 that turns it away
CHECKIN_LATE_S = 15.0  # after a refusal by hand, to tell it to nodes that come later
CHECKIN_PASS_S = 10.0  # for an agent's first message to arrive
PAIRS_S = 6.0  # for each pair of nodes to test its link
LOSS_SPREAD_S = 6.0  # between the first and the last agent that notices a lost node
SUCCESSOR_S = 20.0  # to find the node that replaces node rank 0

# A rank fails, or is stuck.
SETTLE_S = 0.3  # after an exit that looks like a consequence, for its cause to appear
RANK_TERM_S = 1.0  # from SIGTERM to SIGKILL
SAVERS_LOOK_S = 0.4  # for ranks that handle SIGTERM to write their stacks
VERDICT_S = 1.5  # for the other nodes to report their ends, if no restart follows
RANKS_END_S = 60.0  # the same, if one may follow: a killed rank can hold its GPU for a while
# If a rank is still running this long after a traceback, it has caught the exception. On a busy
# machine, a rank that has not caught it can take more than a second to exit.
TRACEBACK_S = 3.0
# The same, for a rank that has written an error file: it is about to exit. If it has not exited
# after this, for example because of a thread, it counts as failed.
RAISED_S = 10.0
STACKS_WRITE_S = 2.0  # for the ranks of a node to write their stacks
STACKS_ANSWER_S = 5.0  # for the other nodes' stacks
STACKS_SHOW_S = 12.0  # for `--stacks` to receive the stacks of all ranks
ASKED_LOOK_S = 1.0  # between two checks for a request for stacks
NOTICE_SAME_S = 5.0  # one notice reaches an agent directly, and by its launcher and other agents
NOTICE_WARN_S = 10.0  # for a script that is still starting to set its handler

# A stop. GRACE is the number of seconds that the ranks have to save; each of these limits is added
# to it, and a process that waits for another one waits longer.
STOP_SNAPSHOT_S = 8.0  # for an agent to write a snapshot
STOP_CLOSE_S = 10  # then the launcher closes the control streams, and the nodes end their parts
STOP_AGENT_S = 15.0  # then a supervisor kills its agent, which may have waited for other nodes
STOP_COMMAND_S = 25.0  # then `--stop` stops waiting

# The end of a run.
ORPHANS_S = 1.0  # after the supervisor exits, for the agent to end the run
OTHERS_S = 5.0  # after one node's part has ended, for the others to end
CONTROL_TERM_S = 1.0  # after the control stream ends, for an agent's ranks to save
CONTROL_END_S = 10.0  # after the control streams end, for the nodes to end their parts
SRUN_END_S = 3.0  # for srun to exit once the run has ended
REQUEUE_S = 8.0  # after srun is killed, for SLURM to requeue a job that has lost a node
DECIDE_S = RANKS_END_S + 10.0  # after a node's part ends, for the run to continue without it
RECALL_S = 5.0  # an exit this soon after a gap in the signs of life is attributed to the gap
SWEEP_S = 2.0  # for leftover processes of a run on a node to exit by themselves
CLEAN_S = 0.3  # for Python's resource trackers to remove shared memory, once the others have ended
KILL_S = 1.0  # for killed processes to disappear

# Output and records.
PARTIAL_S = 0.2  # after this, an unfinished line of one of several streams is shown
PARTIAL_LOOK_S = PARTIAL_S / 2  # between two checks of such lines
DRAIN_S = 2.0  # at the end, for a slow terminal or pipe to accept the last output
TRICKLE_S = 0.001  # a pause, so that many small writes of a rank become one write
TERMINAL_STUCK_S = 0.5  # the agent stops waiting for a terminal that accepts nothing for this long
REDRAW_S = 5.0  # between two log entries of a line that redraws itself
PROGRESS_S = 60.0  # between two lines on a node that was started by hand and shows no rank
STEP_RECORD_S = 5.0  # between two updates of a run's step in run.json
RECORD_LOCK_S = 2.0  # the longest wait for another writer of run.json

# Snapshots in memory.
SNAPSHOT_PIECE_S = 0.002  # between two pieces of 128 KiB: at most 65 MB/s
SNAPSHOT_LOOK_S = 0.1  # between two checks for a newer one

# The self-test.
SELFTEST_S = 60.0  # for all ranks to reach the same point
SELFTEST_LOOK_S = 0.5  # between two checks for a stuck rank
COMPUTE_S = 0.2  # of computing, on each rank
COLLECTIVES_S = 1.0  # for all collectives; a sixth of that with --quick
CALL_S = 0.5  # for one call; on a very slow link, larger sizes would show nothing more
TRANSFER_S = 10.0  # for one transfer between two nodes
ROUND_S = 0.2  # of transfers, on up to 4 nodes
LEAST_ROUND_S = 0.03  # of transfers, on very many nodes
