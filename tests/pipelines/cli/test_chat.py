"""`rlhf chat` answers with the policy that it is given."""

from __future__ import annotations

import io
import secrets
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.cli.chat import talk
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import RlhfError
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message, SamplingRequest
from tests.support.workshop import RUNTIME


def said(store: ArtifactStore, policy: Path | str, text: str) -> str:
    printed = io.StringIO()
    options = Namespace(policy=str(policy), once=text, max_tokens=12, temperature=1.0)
    talk(options, store, Console(file=printed, width=200))
    return printed.getvalue()


def test_the_answer_is_what_the_policy_samples(
    store: ArtifactStore, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda below: 3)
    prompt = ChatTemplate.load(policy).prompt_ids((Message("user", "What is 12 + 30?"),))
    with LocalRuntime(RUNTIME).sampler(policy) as sampler:
        sampling = SamplingConfig(temperature=1.0, max_tokens=12)
        expected = sampler.generate([SamplingRequest(prompt, seed=3)], sampling)[0].text
    assert expected.strip()
    assert said(store, policy, "What is 12 + 30?") == f"{expected}\n"


def test_a_policy_that_the_store_has_not_is_an_error(store: ArtifactStore) -> None:
    with pytest.raises(RlhfError, match="ppo"):
        said(store, "ppo", "What is 12 + 30?")
