"""Damage profiles: TOML files as bytes and as values, the profiles that they extend, and `--set`."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any

from campaigns.fuzz.campaign import Wrong
from campaigns.fuzz.mutations import changed, damaged, odd, written
from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import PipelineConfig, load_profile, parse, profile_names, shipped_profiles
from rlhf_core.store.artifacts import ArtifactStore

PLANNED = 0.05
"""Fraction of the valid profiles that are also planned, which reads the stages' code."""
NAMES = ("extends", "name", "ppo", "ppo.kl_coef", "data", "runtime", "type", "sft.loop", "rewards.terms.x", "a", "")


class Target:
    """Damaged profiles, and valid ones with damaged overrides."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shipped = [(shipped_profiles() / f"{name}.toml").read_bytes() for name in profile_names()]

    def attempt(self, rng: random.Random) -> None:
        """Load one profile, and check that the configuration survives a round trip through a file."""
        path = self._folder / "profile.toml"
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(damaged(rng.choice(self._shipped), rng))
        elif kind == 1:
            tree = changed(tomllib.loads(rng.choice(self._shipped).decode()), rng)
            path.write_bytes(toml(tree if isinstance(tree, dict) else {"name": tree}).encode("utf-8", "surrogatepass"))
        elif kind == 2:
            self._write_chain(path, rng)
        else:
            path.write_bytes(rng.choice(self._shipped))
        overrides = [override(rng) for _ in range(rng.choice((1, 2, 3) if kind == 3 else (0, 0, 0, 1)))]
        config = load_profile(path, overrides)
        again = parse(json.loads(config.model_dump_json(exclude_none=True)), origin="its own JSON")
        if again != config:
            raise Wrong(f"{path.read_bytes()[:500]!r} with {overrides} differs from its JSON")
        if rng.random() < PLANNED:
            self._plan(config)

    def _write_chain(self, path: Path, rng: random.Random) -> None:
        """Write a profile that extends another, or that tries to."""
        base = self._folder / "base.toml"
        named: Any = rng.choice(
            ("base.toml", "profile.toml", "tiny/full", "tiny", ".", "", "/", "/dev/null", "a\0b", odd(rng))
        )
        base.write_bytes(damaged(rng.choice(self._shipped), rng) if rng.random() < 0.3 else rng.choice(self._shipped))
        changes = changed(tomllib.loads(rng.choice(self._shipped).decode()), rng) if rng.random() < 0.5 else {}
        tree = {"extends": named} | (changes if isinstance(changes, dict) else {})
        path.write_bytes(toml(tree).encode("utf-8", "surrogatepass"))

    def _plan(self, config: PipelineConfig) -> None:
        plan_stages(config, ArtifactStore(self._folder / "store"))


def override(rng: random.Random) -> str:
    """A possible value of `--set`."""
    key = rng.choice(NAMES)
    if rng.random() < 0.2:
        return damaged(f"{key}=1".encode(), rng).decode("utf-8", "surrogateescape")
    value = odd(rng)
    text = written(literal(value)) if rng.random() < 0.7 else str(value)[:5000]
    return f"{key}={text}"


def toml(tree: dict[str, Any]) -> str:
    """A tree as TOML, with each top-level key on a separate line."""
    return written("".join(f"{_key(name)} = {literal(value)}\n" for name, value in tree.items()))


def literal(value: Any) -> str:
    """A value as TOML; values that TOML cannot express become text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {literal(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False)


def _key(name: Any) -> str:
    return json.dumps(str(name), ensure_ascii=False)
