"""Cause faults of environments, each in a separate process as in a run, with a real policy: no failure may score 0."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.leftovers import end_with_the_run, watched
from rlhf_core.agents.episodes import Episode
from rlhf_core.agents.process import GRACE_S, Environments
from rlhf_core.config.agents import AgentConfig, EnvironmentAgent, OpenEnvAgent
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.models import InitModel
from rlhf_core.config.rewards import EpisodeReward, RewardsConfig
from rlhf_core.config.runtime import HFSamplerConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rewards.terms import episode_reward
from rlhf_core.rollouts.answers import OpenEnvironments, answers, episode_metrics
from rlhf_core.rollouts.scored_step import valid_groups
from rlhf_core.types import Generation, Message, Prompt, Rollout, derive_seed

if TYPE_CHECKING:
    from rlhf_core.sampling.hf_sampler import HFSampler

GROUP = 2
STEP_S = 3.0
START_S = 30.0
"""Seconds for the policy's turns, and for restarted processes on a busy machine."""
DEADLINE_S = STEP_S + GRACE_S + START_S
TURNS = 2
REWARD = 0.5
"""Reward of a turn in a working environment."""
WELL = "is well"
TINY = InitModel(
    vocab_size=320, hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate_size=128, max_positions=512
)
TEXTS = ["What is 12 + 30? It is 42.", "Say something, and then say more."] * 5

WORLD = """
import asyncio, os, re, subprocess, time
from pathlib import Path
from rlhf_core.agents.environment import StepResult

class World:
    def reset(self, prompt, seed):
        self._mood = prompt["label"]
        if self._mood == "raises at its reset":
            raise KeyError("no such board")
        if self._mood == "leaves a child in a session of its own":
            subprocess.Popen(["sleep", "600"], start_new_session=True)

    async def step(self, action, turn):
        mood, well = self._mood, StepResult("go on", reward=0.5, done=turn == 1)
        if turn == 0:
            return well
        once = Path(__file__).with_suffix(".once")
        match mood:
            case "raises":
                raise ValueError("the board is broken")
            case "raises once" if not once.exists():
                once.touch()
                raise ConnectionError("not now")
            case "dies":
                os._exit(3)
            case "dies with a child in a session of its own":
                subprocess.Popen(["sleep", "600"], start_new_session=True)
                os._exit(3)
            case "hangs while it awaits":
                await asyncio.sleep(600)
            case "hangs and holds the interpreter lock":
                re.match(r"(a+)+$", "a" * 40 + "b")
            case "is slow within its deadline":
                await asyncio.sleep(1.5)
            case "disconnects":
                await asyncio.open_connection("127.0.0.1", 9)
            case "prints garbage":
                os.write(1, b"garbage" * 100_000)
            case "earns NaN":
                return StepResult(reward=float("nan"), done=True)
            case "earns a text":
                return StepResult(reward="good", done=True)
            case "returns a table":
                return {"observation": "?", "reward": 0.0, "done": True}
            case "returns nothing":
                return None
        return well

    def close(self):
        if self._mood == "hangs as it is closed":
            time.sleep(600)
"""

SERVER = """
import json, os, sys, time
from websockets.sync.server import serve

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
KNOWN = {"/health": {"status": "healthy"}, "/metadata": {}, "/schema": {"action": TEXT, "observation": TEXT}}

def answer(connection, request):
    if request.path != "/ws":
        return connection.respond(200, json.dumps(KNOWN[request.path]))

def play(connection):
    turn = 0
    for message in connection:
        asked = json.loads(message)
        mood = asked["data"]["mood"] if asked["type"] == "reset" else mood if asked["type"] == "step" else "closes"
        if asked["type"] == "step":
            turn += 1
        if turn == 2 and mood == "disconnects" or mood == "closes":
            return
        if turn == 2 and mood == "dies":
            os._exit(3)
        if turn == 2 and mood == "hangs":
            time.sleep(600)
        reward = None if turn == 0 or mood == "says of no turn what it earned" else 0.5
        if turn == 2 and mood == "answers NaN":
            reward = float("nan")
        data = {"observation": {"text": "go on"}, "reward": reward, "done": turn == 2}
        if turn == 2 and mood == "answers no observation":
            data = {"what": "?"}
        connection.send(json.dumps({"type": "observation", "data": data}))

with serve(play, "127.0.0.1", int(sys.argv[1]), process_request=answer) as server:
    print(server.socket.getsockname()[1], flush=True)
    server.serve_forever()
"""

RUN = """
import sys, tempfile
tempfile.tempdir = sys.argv[2]  # who is killed removes nothing
from campaigns.faults.environments import Table
from rlhf_core.config.agents import EnvironmentAgent
with Table(EnvironmentAgent(environment=sys.argv[1], step_timeout_s=600)) as table:
    print("up", flush=True)
    table.play("hangs and holds the interpreter lock")
"""

LEFT_OUT = {
    "raises": "the board is broken",
    "raises at its reset": "no such board",
    "dies": "its process ended with status 3",
    "dies with a child in a session of its own": "its process ended with status 3",
    "hangs while it awaits": "step_timeout_s = 3",
    "hangs and holds the interpreter lock": "longer than step_timeout_s = 3 without waiting",
    "disconnects": "Connect call failed",
    "earns NaN": "the reward is nan, and must be finite",
    "earns a text": "could not convert string to float: 'good'",
    "returns a table": "step returned a dict; it must return a StepResult",
    "returns nothing": "step returned a NoneType; it must return a StepResult",
}
"""Behavior of one episode's environment -> text that its failure reason must contain."""
RECOVERED = {
    "raises once": "played again from its seeds (retries = 1)",
    "hangs as it is closed": "its process was killed; the other episodes in it were played again",
    "is slow within its deadline": "waited for",
    "prints garbage": "what it printed went to standard error",
    "leaves a child in a session of its own": "the child ended with the process of the environment",
}
LEFT_OUT_BY_A_SERVER = {
    "disconnects": "the server closed the connection at the step",
    "hangs": "step_timeout_s = 3",
    "answers NaN": "nan",
    "answers no observation": "what its protocol does not know",
    "says of no turn what it earned": "it ended without any reward",
}


class Table:
    """Plays two groups of episodes at a time with a tiny policy, and scores them by their rewards."""

    def __init__(self, config: AgentConfig) -> None:
        policy = _policy()
        self._sampler, self._chat = _sampler(policy), ChatTemplate.load(policy)
        self._scorer = Scorer(RewardsConfig(terms={"game": EpisodeReward()}), {"game": episode_reward})
        self._environments = Environments(config, tokenizer=str(policy))
        self._opened = OpenEnvironments({"agent": self._environments}, {"": "agent"})
        self.failed = 0.0
        """The fraction of episodes that failed in the last play."""

    def play(self, *labels: str) -> list[Rollout]:
        """Play one episode for each label."""
        prompts = [Prompt(f"p{at // GROUP}", (Message("user", "hi"),), one, "faults") for at, one in enumerate(labels)]
        work = [Episode(one, self._chat.prompt_ids(one.messages), derive_seed(7, at)) for at, one in enumerate(prompts)]
        drawn = answers(self._sampler, self._chat, work, SamplingConfig(max_tokens=32), self._opened)
        self.failed = episode_metrics([completion for _, completion in drawn])["rollout/failed_episodes"]
        return self._scorer([Generation(one.prompt, *drawn[at]) for at, one in enumerate(work)])

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._environments.close()


@dataclass(frozen=True)
class Labels:
    """The labels of an episode with a fault, and of an episode without one."""

    faulty: str
    well: str = WELL


def _left_out(config: AgentConfig, labels: Labels, named: str) -> Outcome:
    """Play one faulty episode together with three working ones, and then three more."""
    _policy()
    with watched() as watch:
        with Table(config) as table:
            began = time.monotonic()
            rollouts = table.play(labels.faulty, *[labels.well] * 3)
            noticed, failed = time.monotonic() - began, table.failed
            began = time.monotonic()
            again = _right(table.play(*[labels.well] * 4))
            took = time.monotonic() - began
        left = watch.left()
    broken = rollouts[0]
    invalid = math.isnan(broken.reward) and named in broken.invalid
    kept = list(valid_groups(rollouts, group_size=GROUP)) == rollouts[GROUP:]
    if invalid and _right(rollouts[1:]) and kept and failed == 0.25 and again and not left:
        return Outcome("left out", noticed, took, broken.invalid)
    rewards = [one.reward for one in rollouts]
    return Outcome("not handled", noticed, None, f"{broken.invalid!r}, {rewards}, {again}, {len(left)} left")


def _recovered(mood: str, folder: Path) -> Outcome:
    """Play one such episode together with three working ones, twice: all must earn the expected reward."""
    config = _world(folder, retries=1 if mood == "raises once" else 0)
    _policy()
    with watched() as watch:
        with Table(config) as table:
            began = time.monotonic()
            good = [_right(table.play(mood, *[WELL] * 3)) and table.failed == 0.0 for _ in range(2)]
            took = time.monotonic() - began
        left = watch.left()
    if good == [True, True] and not left:
        return Outcome("recovered", None, took, RECOVERED[mood])
    return Outcome("not handled", None, took, f"right: {good}; {len(left)} processes are left")


def _one_error(config: AgentConfig, label: str, named: Sequence[str]) -> Outcome:
    """Make all episodes of a step fail: this must be one error with the reason and a prompt."""
    _policy()
    with watched() as watch:
        with Table(config) as table:
            began = time.monotonic()
            rollouts = table.play(*[label] * 4)
            said = "the step went on without any episode"
            try:
                valid_groups(rollouts, group_size=GROUP)
            except RewardError as error:
                said = str(error)
            noticed = time.monotonic() - began
        left = watch.left()
    if all(part in said for part in named) and all(math.isnan(one.reward) for one in rollouts) and not left:
        return Outcome("one error", noticed, None, said)
    return Outcome("not handled", noticed, None, f"{said}; {len(left)} processes are left")


def _left_out_here(mood: str, folder: Path) -> Outcome:
    return _left_out(_world(folder), Labels(mood), LEFT_OUT[mood])


def _all_raise(folder: Path) -> Outcome:
    return _one_error(_world(folder), "raises", ("prompt p0", "the board is broken", "every group of the step"))


def _left_out_by_a_server(mood: str, folder: Path) -> Outcome:
    del folder
    with _server() as url:
        return _left_out(_served(url), Labels(_mood(mood), _mood(WELL)), LEFT_OUT_BY_A_SERVER[mood])


def _server_dies(folder: Path) -> Outcome:
    """The server dies in the second turn of all episodes; once it is back, they must succeed."""
    del folder
    _policy()
    with ExitStack() as closing:
        watch = closing.enter_context(watched())
        url = closing.enter_context(_server())
        table = closing.enter_context(Table(_served(url)))
        began = time.monotonic()
        rollouts = table.play(*[_mood("dies")] * 4)
        noticed = time.monotonic() - began
        closing.enter_context(_server(int(url.rpartition(":")[2])))
        began = time.monotonic()
        again = _right(table.play(*[_mood(WELL)] * 4))
        took = time.monotonic() - began
    said, left = rollouts[0].invalid, watch.left()
    named = all("the server closed the connection at the step" in one.invalid for one in rollouts)
    if named and all(math.isnan(one.reward) for one in rollouts) and again and not left:
        return Outcome("left out", noticed, took, said)
    return Outcome("not handled", noticed, None, f"{said}; played again: {again}; {len(left)} processes are left")


def _server_is_not_there(folder: Path) -> Outcome:
    del folder
    with _server() as url:
        pass
    began = time.monotonic()
    try:
        Environments(_served(url), tokenizer="")
    except ConfigError as error:
        said = str(error)
        if url in said and "start the server there" in said:
            return Outcome("one error", time.monotonic() - began, None, said)
    return Outcome("not handled", None, None, "it was opened")


def _run_is_killed(folder: Path) -> Outcome:
    return end_with_the_run(RUN, _world(folder).environment, str(folder))


def _right(rollouts: Sequence[Rollout]) -> bool:
    return all(not one.invalid and one.reward == TURNS * REWARD for one in rollouts)


def _world(folder: Path, *, retries: int = 0) -> EnvironmentAgent:
    file = folder / "world.py"
    file.write_text(WORLD, encoding="utf-8")
    return EnvironmentAgent(environment=f"{file}:World", step_timeout_s=STEP_S, retries=retries)


def _served(url: str) -> OpenEnvAgent:
    return OpenEnvAgent(url=url, give_label=True, step_timeout_s=STEP_S, retries=0)


def _mood(mood: str) -> str:
    return json.dumps({"mood": mood})


@contextmanager
def _server(port: int = 0) -> Iterator[str]:
    """Yield the URL of a server with OpenEnv's protocol; port 0 picks a free one."""
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@cache
def _policy() -> Path:
    """The folder of a tiny policy with its tokenizer; created once, and loaded before any time is measured."""
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer

    folder = Path(_place().name)
    train_tokenizer(TEXTS, vocab_size=TINY.vocab_size, folder=folder)
    initialize_llama(TINY, folder, seed=7)
    # Half of all tokens end a turn, because an untrained policy hardly ever samples the regular end token.
    stops = {"eos_token_id": list(range(0, TINY.vocab_size, 2))}
    (folder / "generation_config.json").write_text(json.dumps(stops), encoding="utf-8")
    _sampler(folder)
    return folder


@cache
def _place() -> TemporaryDirectory[str]:
    """A folder that is removed when this process ends."""
    return TemporaryDirectory(prefix="faults-policy")


@cache
def _sampler(policy: Path) -> HFSampler:
    from rlhf_core.sampling.hf_sampler import HFSampler

    return HFSampler(policy, HFSamplerConfig())


FAULTS: list[Fault] = [
    *(Fault(f"environment {mood}", DEADLINE_S, partial(_left_out_here, mood)) for mood in LEFT_OUT),
    Fault("environment raises in every episode", DEADLINE_S, _all_raise),
    *(Fault(f"environment {mood}", DEADLINE_S, partial(_recovered, mood)) for mood in RECOVERED),
    *(
        Fault(f"environment behind a server: it {mood}", DEADLINE_S, partial(_left_out_by_a_server, mood))
        for mood in LEFT_OUT_BY_A_SERVER
    ),
    Fault("environment behind a server: it dies under all episodes", DEADLINE_S, _server_dies),
    Fault("environment behind a server: it is not there", DEADLINE_S, _server_is_not_there),
    Fault("run killed while an environment hangs", START_S, _run_is_killed),
]
