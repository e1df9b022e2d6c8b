"""`rlhf chat` answers with the policy that it is given."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.cli.chat import talk
from rlhf_core.errors import RlhfError
from rlhf_core.store.artifacts import ArtifactStore


def said(store: ArtifactStore, policy: Path | str, text: str) -> str:
    printed = io.StringIO()
    options = Namespace(policy=str(policy), once=text, max_tokens=6, temperature=0.0)
    talk(options, store, Console(file=printed, width=200))
    return printed.getvalue()


def test_a_greedy_policy_gives_one_question_the_same_answer(store: ArtifactStore, policy: Path) -> None:
    first = said(store, policy, "What is 12 + 30?")
    assert first.strip()
    assert said(store, policy, "What is 12 + 30?") == first


def test_a_policy_that_the_store_has_not_is_an_error(store: ArtifactStore) -> None:
    with pytest.raises(RlhfError, match="ppo"):
        said(store, "ppo", "What is 12 + 30?")
