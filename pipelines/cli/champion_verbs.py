"""Show the champions of the registry, and go back to the previous one (`rlhf champion`, `rlhf rollback`)."""

from __future__ import annotations

import argparse

from pipelines.cli.common import console
from pipelines.services.home import Home
from pipelines.services.registry import tracking_uri
from rlhf_core.errors import ConfigError, explain, nearest


def champion(options: argparse.Namespace) -> None:
    """Print which version is champion, and which ones were, newest first."""
    from rlhf_core.tracking.champions import read_champions  # with MLflow's parts

    uri = tracking_uri(Home.here())
    found = read_champions(uri, model_name(uri, options.name))
    if found is None:
        raise ConfigError(
            explain("champion", options.name, "the registry has no such model", _known(uri, options.name))
        )
    now = f"version {found.current} ({found.digests[found.current][:12]})" if found.current else "none"
    _print(f"{found.name}: champion {now}")
    for move in reversed(found.moves):
        _print(f"{move.at}  version {move.version} ({move.digest[:12]})  {move.how} by {move.by}: {move.why}")
    if found.previous:
        _print(f"`rlhf rollback {found.name} --reason ...` makes version {found.previous} champion")


def rollback(options: argparse.Namespace) -> None:
    """Make the previous champion champion again."""
    from rlhf_core.tracking.champions import roll_back

    if not options.reason.strip():
        raise ConfigError(explain("reason", options.reason, "is empty", "say why: it is kept in the registry"))
    uri = tracking_uri(Home.here())
    name = model_name(uri, options.name)
    before, now = roll_back(uri, name, why=options.reason.strip())
    _print(f"{name}: champion is version {now}, before version {before}: {options.reason.strip()}")


def model_name(uri: str, given: str) -> str:
    """Return the given name, or that of the only model that has a champion."""
    from rlhf_core.tracking.champions import model_names

    if given:
        return given
    names = model_names(uri)
    if len(names) != 1:
        rule = f"several models have champions: {', '.join(names)}" if names else "no model has a champion yet"
        remedy = "name one of them" if names else "publish a policy whose gate holds"
        raise ConfigError(explain("champion", given, rule, remedy))
    return names[0]


def _known(uri: str, name: str) -> str:
    from rlhf_core.tracking.champions import model_names

    return nearest(name, model_names(uri))


def _print(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
