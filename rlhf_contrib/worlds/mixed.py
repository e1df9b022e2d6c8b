"""Several worlds as one data set, and their gold rewards by the source of the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhf_contrib.worlds import arithmetic, instructions, support
from rlhf_core.config.data import ArithmeticWorld, InstructionsWorld, MixedWorlds, SupportWorld
from rlhf_core.data.tables import Tables
from rlhf_core.types import Generation, derive_seed

GOLD = {"support": support.gold_reward, "arithmetic": arithmetic.exact_match}
"""Source -> the gold reward of its answers."""


def make_world(
    world: SupportWorld | ArithmeticWorld | InstructionsWorld, *, seed: int
) -> tuple[Tables, dict[str, float]]:
    """Build the tables of one world and facts about them."""
    match world:
        case SupportWorld():
            return support.make_tables(world, seed=seed)
        case ArithmeticWorld():
            return arithmetic.make_tables(world, seed=seed)
        case InstructionsWorld():
            return instructions.make_tables(world, seed=seed)


def make_tables(config: MixedWorlds, *, seed: int) -> tuple[Tables, dict[str, float]]:
    """Build the rows of all worlds, shuffled, and facts about them."""
    made = [make_world(world, seed=seed) for world in config.worlds]
    joined: dict[str, Any] = dict.fromkeys(made[0][0].named(), ())
    for tables, _ in made:
        joined = {name: (*joined[name], *rows) for name, rows in tables.named().items()}
    rng = random.Random(derive_seed(seed, "worlds"))
    shuffled = {name: tuple(rng.sample(rows, k=len(rows))) for name, rows in joined.items()}
    return replace(made[0][0], **shuffled), {name: value for _, facts in made for name, value in facts.items()}


def gold_reward(generations: Sequence[Generation]) -> list[float]:
    """Score each generation by the world of its prompt; KeyError for a world without a gold reward."""
    rewards = [0.0] * len(generations)
    for source in {one.prompt.source for one in generations}:
        places = [at for at, one in enumerate(generations) if one.prompt.source == source]
        for at, reward in zip(places, GOLD[source]([generations[at] for at in places]), strict=True):
            rewards[at] = reward
    return rewards
