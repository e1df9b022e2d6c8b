"""Run engines on Ray or in this process. `factory.open_runtime` chooses; importing this package starts nothing."""
