"""One runnable file per claim of speed; peers in the same run, results beside it in `bench/results/`."""
