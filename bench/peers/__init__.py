"""Workers that run one engine each in its own process, so that two engines can be timed in turn."""
