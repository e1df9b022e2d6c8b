from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pipelines.flows.profile import find_profile, load_profile
from rlhf_core.errors import ConfigError

SAMPLER_OPTIONS = [
    name for name in tomllib.loads(find_profile("tiny/full").read_text())["runtime"]["sampler"] if name != "type"
]


def test_an_option_of_another_type_is_called_so_and_says_how_to_remove_it() -> None:
    override = "runtime.sampler.type=hf"
    with pytest.raises(
        ConfigError, match=r"^runtime\.sampler\.max_model_len = 256: is not an option of type 'hf'; remove it"
    ):
        load_profile("tiny/full", [override])
    removed = [f"runtime.sampler.{name}=none" for name in SAMPLER_OPTIONS]
    assert load_profile("tiny/full", [override, *removed]).runtime.sampler.type == "hf"


def test_a_key_that_is_no_option_of_any_type_is_unknown(tmp_path: Path) -> None:
    """A value in the place of a table made the error itself an error."""
    profile = tmp_path / "mine.toml"
    for text in (
        'extends = "tiny/full"\nunknown = 1\n',
        'extends = "tiny/full"\n[ppo.advantage]\ntype = "gae"\ngamma = 0.9\nlamb = 1\n',
    ):
        profile.write_text(text)
        with pytest.raises(ConfigError, match=r"unknown key; (remove it|did you mean)"):
            load_profile(str(profile))
