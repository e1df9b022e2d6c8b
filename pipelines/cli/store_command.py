"""The commands of a store (`rlhf store VERB`), whose modules are imported when they run."""

import argparse


def store(options: argparse.Namespace) -> int:
    """Run `rlhf store VERB`."""
    if options.store_verb == "ls":
        from pipelines.cli.store_lists import store_ls

        store_ls(options)
        return 0
    from pipelines.cli.store_verbs import look_after_store  # 0.6 s, and a list takes 0.3 s without

    return look_after_store(options)
