from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.agents.episodes import Episode, play_episodes
from rlhf_core.agents.process import Environments
from rlhf_core.agents.program import earned, open_agent
from rlhf_core.agents.programs import EpisodeFailed, ProgramResult
from rlhf_core.config.agents import ProgramAgent
from rlhf_core.config.engines import SamplingConfig
from tests.rlhf_core.agents.scripted import ScriptedSampler, chat, chat_folder, prompt, sampled_as_it_stands
from tests.rlhf_core.agents.test_conversation import SpelledEngine

OPENAI_AGENT = str(Path(__file__).with_name("openai_agent.py"))


def played(script: str, *texts: str, **settings: Any) -> ProgramResult:
    """Run a script for a prompt with the label `a-secret`; the policy says `texts`."""
    template = chat()
    program = open_agent(ProgramAgent(command=("sh", "-c", script), **settings), tokenizer=chat_folder())
    messages = [{"role": "user", "content": "What is 3?"}]
    told = {"id": "q", "messages": messages, "label": "a-secret", "source": "test", "text": "", "sampling": {}}

    async def run() -> ProgramResult:
        async with asyncio.timeout(60.0):
            return await program(told, 7, SpelledEngine(template, *texts))

    return asyncio.run(run())


def asking(then: str = "") -> str:
    """Return a script that asks for one turn."""
    ask = (
        "import json, os, urllib.request as u;"
        "b = json.dumps({'messages': [{'role': 'user', 'content': 'Hi'}]}).encode();"
        "h = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']};"
        "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', b, h)).read()"
    )
    return f'{sys.executable} -S -c "{ask}" && {then or "true"}'


def test_an_agent_written_for_openais_client_is_played_token_by_token():
    template = chat()
    sampler = ScriptedSampler(template, lambda request, turn: f"It is {turn}.")
    episodes = [Episode(one, template.prompt_ids(one.messages), 100) for one in (prompt(0, "a"), prompt(1, "b"))]
    config = ProgramAgent(command=("python", OPENAI_AGENT), retries=0, step_timeout_s=240.0)
    with Environments(config, tokenizer=chat_folder()) as environments:
        done = play_episodes(sampler, template, episodes, environments, config, SamplingConfig(max_tokens=24))
    for completion in (episode.completion for episode in done):
        assert completion.failure == "" and len(completion.spans) == 2
        assert completion.spans[-1].reward == pytest.approx(2 / 16) and completion.extras == {"letters": 16.0}
    assert sampled_as_it_stands(done, sampler)


def test_the_last_line_says_what_was_earned():
    result = played(asking('echo thinking; echo \'{"reward": 2, "tries": 3}\''), "It is 3.")
    assert result == ProgramResult((2.0,), {"tries": 3.0})


def test_a_command_that_ends_badly_has_failed_and_is_named():
    with pytest.raises(EpisodeFailed, match=r"(?s)ended with status 3:\nit is broken"):
        played("echo it is broken >&2; exit 3")


def test_a_command_that_does_not_survive_the_end_of_its_tokens_was_cut():
    assert played(asking("exit 1"), needs_reward=False) == ProgramResult((), truncated=True)
    with pytest.raises(EpisodeFailed, match="ended with status 1"):
        played(asking("exit 1"))


@pytest.mark.parametrize("line", ["done", '{"reward": null}'])
def test_a_command_that_says_no_reward_has_failed_unless_none_is_needed(line):
    with pytest.raises(EpisodeFailed, match="without any reward"):
        played(f"echo '{line}'")
    assert played(f"echo '{line}'", needs_reward=False).rewards == ()


def test_the_program_is_told_its_seed_its_variables_and_the_label_only_where_it_is_asked_for(tmp_path):
    for give in (False, True):
        told = tmp_path / f"told-{give}"
        script = f'cat > {told}; echo "$MY_OWN|$RLHF_SEED" >> {told}'
        played(script, give_label=give, variables={"MY_OWN": "value"}, needs_reward=False)
        assert ("a-secret" in told.read_text()) == give and "What is 3?" in told.read_text()
        assert told.read_text().endswith("value|7\n")


def test_the_scripts_of_a_command_belong_to_its_key():
    config = ProgramAgent(command=("python", "agent.py", "--fast"), files=("rules.json",))
    assert config.read_files() == ("agent.py", "rules.json")
    assert ProgramAgent(command=("./agents/solve.py", "--fast")).read_files() == ("./agents/solve.py",)
    assert ProgramAgent(command=("solve.sh",)).read_files() == ()  # it is looked for on PATH


def test_the_module_of_a_command_belongs_to_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game" / "played").mkdir(parents=True)
    (tmp_path / "game" / "alone.py").touch()
    (tmp_path / "game" / "played" / "__main__.py").touch()
    read = [ProgramAgent(command=("python", "-m", name)).read_files() for name in ("game.alone", "game.played", "json")]
    assert read == [("game/alone.py",), ("game/played/__main__.py",), ()]


def test_a_secret_is_no_part_of_a_profile():
    with pytest.raises(ValueError, match=r"variables.JUDGE_API_KEY = .\*\*\*.: is a secret in plain text"):
        ProgramAgent(command=("true",), variables={"LEVEL": "3", "JUDGE_API_KEY": "x"})


@pytest.mark.parametrize(
    ("output", "rewards", "extras"),
    [
        ('done\n{"reward": 1}\n', (1.0,), {}),
        ('{"reward": null, "tries": 2}', (), {"tries": 2.0}),
        ("[" * 5000, (), {}),  # cannot be read
        ("1" * 5000, (), {}),
    ],
)
def test_the_last_line_may_hold_a_reward(output, rewards, extras):
    assert earned(output) == {"rewards": rewards, "extras": extras}


def test_a_reward_that_is_no_number_is_a_failure():
    with pytest.raises(EpisodeFailed, match="finite number"):
        earned('{"reward": NaN}')
