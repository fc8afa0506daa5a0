"""The host engine: shared memory between the processes of one machine, threads as streams. Needs no compiler and no GPU."""
