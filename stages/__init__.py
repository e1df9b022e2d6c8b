"""One file per stage of the lifecycle: a config class and a `run` function that reads like the paper."""
