"""Configure agents, whose answers are episodes of turns: `[ppo.agent]` and `[generate.agent]` with `type`.

`[ppo.agents.NAME]` are agents for the prompts of some sources.
"""

import ast
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from rlhf_core.config.rewards import EpisodeReward, RewardsConfig
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.schema.base import FAILURES, OPERATIONAL, Config, FunctionName, HttpAddress, Seconds, added_option
from rlhf_core.schema.secrets import HOLDS_SECRETS, refuse_plain_options


class EpisodeLimits(Config):
    """The settings of every kind of agent: limits, failures, scheduling and credit of its episodes."""

    max_turns: int = Field(8, ge=1)
    """Maximum number of turns of the policy; an episode that is not over then is cut (`finish_reason = "length"`)."""
    max_episode_tokens: int = Field(2048, ge=2)
    """Most tokens of prompt, turns and environment text together; `sampling.max_tokens` limits one turn."""
    step_timeout_s: Annotated[Seconds, FAILURES] = 60.0
    """Deadline, in seconds, of the environment's part of one turn."""
    episode_timeout_s: Annotated[Seconds, FAILURES] = 600.0
    """Deadline, in seconds, of the environment's part of a whole episode; sampling does not count."""
    retries: Annotated[int, Field(ge=0), FAILURES] = 1
    """Number of times an episode is repeated after its environment failed. After that it is counted and left out, never
    scored 0."""
    processes: Annotated[int, Field(ge=1), FAILURES] = 1
    """Number of processes for the environments, many in each; a step that does not `await` blocks its process."""
    scheduling: Annotated[Literal["lockstep", "continuous"], OPERATIONAL] = "lockstep"
    """`lockstep` samples the turns of all episodes in one batch, so that a restart gives the same bytes; `continuous`
    samples a turn as soon as its environment has replied."""
    credit: Literal["episode", "turn"] = "episode"
    """`turn` assigns the reward of each turn (the term `type = "episode"`) to the turn's last token. Estimators that
    compare whole answers use the sum either way."""
    sources: tuple[str, ...] = added_option(())
    """Sources of the prompts that the agent plays. `agent` without sources plays every prompt that no other agent
    plays."""

    def callables(self) -> tuple[str, ...]:
        """The user's functions and classes, whose modules belong to the key of a stage."""
        return ()

    def read_files(self) -> tuple[str, ...]:
        """Further files whose content belongs to the key of a stage."""
        return ()


class RewardingAgent(EpisodeLimits):
    """Base class of agents that may end an episode without a reward."""

    needs_reward: bool = True
    """Whether an episode that ends without any reward counts as failed; set false if rewards come from elsewhere."""


class EnvironmentAgent(EpisodeLimits):
    """An environment with `reset` and `step` (`rlhf_core.agents.environment`)."""

    type: Literal["environment"] = "environment"
    environment: FunctionName
    """Environment class, or function that returns an environment, as `package.module:Class` or `path/to/file.py:Class`;
    called once per episode."""
    arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}
    """Keyword arguments of the call; secrets as `"env:NAME"`."""

    def callables(self) -> tuple[str, ...]:
        """The environment."""
        return (self.environment,)


class OpenRLHFAgent(RewardingAgent):
    """An unchanged file for OpenRLHF's `--train.agent_func_path`: it defines a class `AgentExecutor` or, for OpenRLHF
    0.8.0 to 0.8.6, a function `step`."""

    type: Literal["openrlhf"] = "openrlhf"
    file: str = Field(pattern=r"\.py$")
    """Path of the OpenRLHF agent file."""

    def callables(self) -> tuple[str, ...]:
        """The class in the file, or the function if it defines only that."""
        names = _defined_names(self.file)
        return (f"{self.file}:{'step' if 'step' in names and 'AgentExecutor' not in names else 'AgentExecutor'}",)


class ToolsAgent(EpisodeLimits):
    """Functions that the policy may call through the chat template; an answer without a call ends the episode."""

    type: Literal["tools"] = "tools"
    tools: tuple[FunctionName, ...] = Field(min_length=1)
    """Functions as `package.module:function` or `path/to/file.py:function`. Their schemas are built from their types
    and from docstrings that describe each argument."""
    max_tool_calls: int = Field(8, ge=1)
    """Maximum number of tool calls in an episode; further calls return an error."""

    def callables(self) -> tuple[str, ...]:
        """The tools."""
        return self.tools


class ProgramAgent(RewardingAgent):
    """A command, run once per episode, that calls the policy as an OpenAI server (`rlhf_core.agents.program`)."""

    type: Literal["program"] = "program"
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, e.g. `["python", "agent.py"]`; `python` means the current interpreter."""
    files: tuple[str, ...] = ()
    """Further files that affect the program; like the files in `command` they belong to the key of a stage."""
    variables: Annotated[dict[str, str], HOLDS_SECRETS] = {}
    """Environment variables of the program, added to the environment of the run; secrets as `"env:NAME"`."""
    give_label: bool = False
    """Whether the program gets the prompt's label, for programs that compute a reward themselves."""
    request_timeout_s: Annotated[Seconds, FAILURES] = 600.0
    """Deadline, in seconds, of one request of the program, including sampling."""

    def read_files(self) -> tuple[str, ...]:
        """The scripts in `command`, the module that `-m` names if it is below this folder, and `files`."""
        program, *arguments = self.command
        # Without a slash the program is searched only on PATH.
        words = [program] * ("/" in program) + arguments
        modules = [name.replace(".", "/") for flag, name in pairwise(self.command) if flag == "-m"]
        found = [path for name in modules for path in (f"{name}.py", f"{name}/__main__.py") if Path(path).is_file()]
        return (*(word for word in words if word.endswith((".py", ".sh", ".js"))), *found, *self.files)

    @model_validator(mode="after")
    def _check_command_secrets(self) -> Self:
        # References are refused too: every user of the machine can read the arguments of a command.
        refuse_plain_options("command", self.command, remedy="pass it to the program with `variables`")
        return self


class ServedAgent(EpisodeLimits):
    """Base class of agents whose environment is behind a server."""

    url: Annotated[HttpAddress, FAILURES, HOLDS_SECRETS]
    """Address of the server. Write a secret in it as `${env:NAME}`."""
    token_env: Annotated[str, FAILURES, HOLDS_SECRETS] = ""
    """Environment variable with a bearer token for the server."""
    version: str = ""
    """Version of the environment. It belongs to the key of a stage, which cannot see the server's code; if the server
    reports a version, it must be this one."""


class OpenEnvAgent(ServedAgent, RewardingAgent):
    """An OpenEnv server: each episode is a session on its `/ws` (`rlhf_contrib.environments.openenv`)."""

    type: Literal["openenv"] = "openenv"
    action_field: str = ""
    """Field of an action that gets the policy's turn; by default the only text field of the schema. `json` reads the
    turn as JSON for the whole action."""
    observation_field: str = ""
    """Field of an observation that the policy reads, e.g. `text`; by default the only text field, or else all fields as
    JSON."""
    reset_arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}
    """Further arguments of each reset, in addition to the seed; secrets as `"env:NAME"`."""
    give_label: bool = False
    """Whether each reset gets the label's keys."""


class NemoGymAgent(ServedAgent):
    """A NeMo Gym resources server, which provides tools and verifies the answer (`rlhf_contrib.environments.nemo_gym`)."""

    type: Literal["nemo_gym"] = "nemo_gym"
    label_field: str = ""
    """Field of a task that gets a label that is not a JSON object, e.g. `expected_answer`."""


class VerifiersAgent(RewardingAgent):
    """An environment of `verifiers`, run in its own interpreter (`rlhf_contrib.environments.verifiers`)."""

    type: Literal["verifiers"] = "verifiers"
    python: Annotated[str, FAILURES]
    """Interpreter of the virtual environment in which `verifiers` and the environment are installed."""
    environment: str
    """Name of the environment for `load_environment`."""
    arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}
    """Arguments of the environment; secrets as `"env:NAME"`."""
    version: str = ""
    """Version of `verifiers` that must be installed there, or a prefix of it; it belongs to the key of a stage."""
    environment_version: str = ""
    """Version of the environment. It is in the key of a stage, which cannot see the packages installed there."""
    folders: tuple[str, ...] = ()
    """Folders from which its modules may be imported; all their `*.py` files belong to the key of a stage."""
    request_timeout_s: Annotated[Seconds, FAILURES] = 600.0
    """Deadline, in seconds, of one request of the environment, including sampling."""

    def read_files(self) -> tuple[str, ...]:
        """The modules below `folders`."""
        return tuple(str(path) for folder in self.folders for path in sorted(Path(folder).rglob("*.py")))


AgentConfig = Annotated[
    EnvironmentAgent | OpenRLHFAgent | ToolsAgent | ProgramAgent | OpenEnvAgent | NemoGymAgent | VerifiersAgent,
    Field(discriminator="type"),
]
AgentName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w-]*$")]


class AgentsBySource(Config):
    """The options `agent` and `agents`: the agent of each prompt, by its source, and the checks of both."""

    if TYPE_CHECKING:
        agent: AgentConfig | None
        agents: dict[AgentName, AgentConfig]

    @property
    def by_key(self) -> dict[str, AgentConfig]:
        """The agents by their keys: `agent`, `agents.NAME`."""
        named = {f"agents.{name}": agent for name, agent in sorted(self.agents.items())}
        return named if self.agent is None else {"agent": self.agent} | named

    @property
    def plays_all(self) -> bool:
        """Whether prompts of every source have an agent."""
        return self.agent is not None and not self.agent.sources

    def agent_keys(self) -> dict[str, str]:
        """Map each source to the key of the agent that plays its prompts; "" stands for all other sources.

        The key is "" if prompts are answered in one turn.
        """
        named = {source: key for key, agent in self.by_key.items() for source in agent.sources}
        return {"": "agent" * self.plays_all} | named

    def longest(self, max_tokens: int) -> int:
        """The most tokens of an episode, or of an answer of one turn if there are any, which has `max_tokens`."""
        return max([max_tokens] * (not self.plays_all) + [one.max_episode_tokens for one in self.by_key.values()])

    def check_agents(self, sources: Collection[str], *, key: str) -> None:
        """Raise ConfigError for a source of an agent that no prompt has; `sources` are the sources of the prompts."""
        for name, agent in self.by_key.items():
            for source in sorted(set(agent.sources) - set(sources)):
                rule = f"no prompt has the source {source!r}; {nearest(source, sorted(sources))}"
                raise ConfigError(f"{key}.{name}.sources = {list(agent.sources)}: {rule}")

    @model_validator(mode="after")
    def _check_agent_sources(self) -> Self:
        owners: dict[str, str] = {}
        for key, agent in self.by_key.items():
            if not agent.sources and key != "agent":
                raise ValueError(
                    f"{key}.sources = []: an agent in `agents` plays the prompts of its sources; add some, or move it to "
                    "`agent`, which plays all others"
                )
            for source in agent.sources:
                if source in owners:
                    raise ValueError(
                        f"{key}.sources = {list(agent.sources)}: {owners[source]} has {source!r}, too; leave it to one of them"
                    )
                owners[source] = key
        return self


def check_episode_rewards(agents: AgentsBySource, rewards: RewardsConfig) -> None:
    """Raise ValueError for a term of type `episode` on prompts without an episode, or whose turns earn no part of it.

    The spans of partial rollouts look like an episode's spans, and none of them earns anything.
    """
    terms = {name: term for name, term in rewards.terms.items() if isinstance(term, EpisodeReward)}
    played = {source for agent in agents.by_key.values() for source in agent.sources}
    for name, term in terms.items():
        if not agents.by_key:
            raise ValueError(
                f"rewards.terms.{name}.type = 'episode': only agent episodes have this reward; set agent, or remove the term"
            )
        if not agents.plays_all and not (term.sources and played.issuperset(term.sources)):
            raise ValueError(
                f"rewards.terms.{name}.sources = {list(term.sources)}: only episodes have this reward, and agents play the "
                f"sources {sorted(played)}; set sources to some of them"
            )
    plain = all(term.weight_end is None and term.normalize == "none" and not term.clip for term in terms.values())
    summed = rewards.normalize == "none" and not rewards.clip and rewards.composition.type == "weighted_sum"
    for key, agent in agents.by_key.items():
        if agent.credit == "turn" and not (terms and plain and summed):
            raise ValueError(
                f'{key}.credit = "turn": needs a term of type "episode" with a constant weight in a weighted sum, nothing '
                'normalized or clipped, so that each turn earns what it adds; change the rewards, or set "episode"'
            )


def turn_weight(agents: AgentsBySource, rewards: RewardsConfig, source: str) -> float:
    """The weight of a turn's reward that is assigned to the turn itself; 0 if the whole episode earns it."""
    keys = agents.agent_keys()
    key = keys.get(source, keys[""])
    if not key or agents.by_key[key].credit == "episode":
        return 0.0
    terms = [term for term in rewards.terms.values() if isinstance(term, EpisodeReward)]
    return sum(term.weight for term in terms if not term.sources or source in term.sources)


def _defined_names(file: str) -> set[str]:
    """The names that a file defines or imports at its top level; empty if it is missing or not valid Python."""
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return set()  # the code that needs the file reports it
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.AsyncFunctionDef, ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
