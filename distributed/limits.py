"""The time limits and intervals of the helper, in seconds; the launcher uses them too."""

SECOND_INTERRUPT_S = 0.3  # schedulers and terminals may send one SIGINT twice
STOP_LOOK_S = 1.0  # between two checks for a file that requests a stop or a save
COMMIT_S = 30.0  # the longest that the commit of a checkpoint may take
SNAPSHOT_PIECE_S = 0.02  # between two pieces of a copy while ranks train: 200 MB/s at most
EXIT_S = 30.0  # for threads and exit handlers when a rank exits
SCHEDULER_S = 10  # for SLURM or PBS to answer
SCHEDULER_SILENT_S = 2  # if it has not answered by then, we print a line

# Unless HANG_SECONDS is set, a rank counts as stuck after a silence of 10 times the longest one
# so far, but of at least
SILENCE_S = 60.0
FIRST_SILENCE_S = 600.0  # before two steps are done (compilation, caches), or if a hook counts them
