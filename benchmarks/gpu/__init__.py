"""The first day on a GPU as one command: `python -m benchmarks.gpu`."""
