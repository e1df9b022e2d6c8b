"""The configuration of agents: `[ppo.agent]` and `[generate.agent]` with `type`, whose answers are episodes of turns."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_core.schema.base import FAILURES, OPERATIONAL, Config
from rlhf_core.schema.secrets import HOLDS_SECRETS, refuse_plain_options


class EpisodeLimits(Config):
    """What every kind of agent has: how long an episode may get, how it is played, and who earns its rewards."""

    max_turns: int = Field(8, ge=1)
    """Turns that the policy may take; an episode that is not over then is cut (`finish_reason = "length"`)."""
    max_episode_tokens: int = Field(2048, ge=2)
    """Tokens of the prompt, the turns and the environment's text together; `sampling.max_tokens` bounds one turn."""
    step_timeout_s: Annotated[float, Field(gt=0), FAILURES] = 60.0
    """Deadline, in seconds, of the environment's part of one turn."""
    episode_timeout_s: Annotated[float, Field(gt=0), FAILURES] = 600.0
    """Deadline, in seconds, of the environment's part of a whole episode; sampling does not count."""
    retries: Annotated[int, Field(ge=0), FAILURES] = 1
    """How often an episode is repeated after its environment failed. Then it is counted and left out, never scored
    0."""
    processes: Annotated[int, Field(ge=1), FAILURES] = 1
    """Processes that the environments live in, many in each; a step that does not `await` holds up the others in its own."""
    scheduling: Annotated[Literal["lockstep", "continuous"], OPERATIONAL] = "lockstep"
    """`lockstep` samples the turns of all episodes in one batch, so that a restart gives the same bytes; `continuous`
    samples a turn as soon as its environment has answered."""
    credit: Literal["episode", "turn"] = "episode"
    """`turn` puts what each turn earned (the term `type = "episode"`) at its own last token; estimators that compare whole
    answers see their sum either way."""

    def callables(self) -> tuple[str, ...]:
        """Return the users' functions and classes, whose modules belong to the key of a stage."""
        return ()

    def read_files(self) -> tuple[str, ...]:
        """Return the further files whose content belongs to the key of a stage."""
        return ()


class RewardingAgent(EpisodeLimits):
    """What agents have in common that may end an episode without saying what it earned."""

    needs_reward: bool = True
    """Whether an episode that ends without any reward has failed; false where the rewards come from elsewhere."""


class EnvironmentAgent(EpisodeLimits):
    """An environment with `reset` and `step` (`rlhf_core.agents.environment`)."""

    type: Literal["environment"] = "environment"
    environment: str
    """`package.module:Class` or `path/to/file.py:Class`, or a function that returns an environment; called per episode."""
    arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}
    """Keyword arguments of the call; secrets as `"env:NAME"`."""

    @field_validator("environment")
    @classmethod
    def _names_module_and_class(cls, spec: str) -> str:
        return named_object(spec)

    def callables(self) -> tuple[str, ...]:
        """Return the environment."""
        return (self.environment,)


class OpenRLHFAgent(RewardingAgent):
    """A file as OpenRLHF's `--train.agent_func_path` takes it, unchanged: it defines a class `AgentExecutor`, or, of
    OpenRLHF 0.8.0 to 0.8.6, a function `step`."""

    type: Literal["openrlhf"] = "openrlhf"
    file: str = Field(pattern=r"\.py$")
    """Path of the OpenRLHF agent file."""

    def callables(self) -> tuple[str, ...]:
        """Return the class in the file, or the function where it defines that alone."""
        names = _defined_names(self.file)
        return (f"{self.file}:{'step' if 'step' in names and 'AgentExecutor' not in names else 'AgentExecutor'}",)


class ToolsAgent(EpisodeLimits):
    """Functions that the policy may call through the chat template; an answer that calls none ends the episode."""

    type: Literal["tools"] = "tools"
    tools: tuple[str, ...] = Field(min_length=1)
    """Functions as `package.module:function` or `path/to/file.py:function`, typed and with a docstring that describes
    each argument: their schema is made of it."""
    max_tool_calls: int = Field(8, ge=1)
    """Most tool calls in an episode; further ones are answered with an error."""

    @field_validator("tools")
    @classmethod
    def _name_modules_and_functions(cls, specs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(named_object, specs))

    def callables(self) -> tuple[str, ...]:
        """Return the tools."""
        return self.tools


class ProgramAgent(RewardingAgent):
    """A command per episode that talks to the policy as to an OpenAI server (`rlhf_core.agents.program_agent`)."""

    type: Literal["program"] = "program"
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, e.g. `["python", "agent.py"]`; `python` is the interpreter that runs this."""
    files: tuple[str, ...] = ()
    """Further files that decide what the program does; with those in `command` they belong to the key of a stage."""
    variables: Annotated[dict[str, str], HOLDS_SECRETS] = {}
    """Environment variables of the program, beside those that the run itself has; secrets as `"env:NAME"`."""
    give_label: bool = False
    """Tells the program the prompt's label, for programs that compute a reward themselves."""
    request_timeout_s: Annotated[float, Field(gt=0), FAILURES] = 600.0
    """Deadline, in seconds, of one request of the program, sampling included."""

    def read_files(self) -> tuple[str, ...]:
        """Return the scripts in `command`, the module that `-m` names if it is below this folder, and `files`."""
        program, *arguments = self.command
        # Without a slash the program is looked for on PATH alone.
        words = [program] * ("/" in program) + arguments
        modules = [name.replace(".", "/") for flag, name in pairwise(self.command) if flag == "-m"]
        found = [path for name in modules for path in (f"{name}.py", f"{name}/__main__.py") if Path(path).is_file()]
        return (*(word for word in words if word.endswith((".py", ".sh", ".js"))), *found, *self.files)

    @model_validator(mode="after")
    def _shows_no_secrets(self) -> Self:
        # No references either: everyone on the machine can read the words of a command.
        refuse_plain_options("command", self.command, remedy="give it to the program in variables")
        return self


class ServedAgent(EpisodeLimits):
    """What environments behind a server have in common."""

    url: Annotated[str, Field(pattern=r"^https?://"), FAILURES, HOLDS_SECRETS]
    """Address of the server. A secret in it is `${env:NAME}`."""
    token_env: Annotated[str, FAILURES, HOLDS_SECRETS] = ""
    """Environment variable with a bearer token for the server."""
    version: str = ""
    """Version of the environment. It belongs to the key of a stage, which cannot see the server's code; where
    the server says one, it must be this."""


class OpenEnvAgent(ServedAgent, RewardingAgent):
    """An OpenEnv server: each episode is a session on its `/ws` (`rlhf_core.agents.openenv`)."""

    type: Literal["openenv"] = "openenv"
    action_field: str = ""
    """The field of an action that takes the policy's turn; by default the only text among the schema's fields. `json`
    takes the turn as JSON for the whole action."""
    observation_field: str = ""
    """The field of an observation that the policy reads, e.g. `text`; by default the only text, or else all as JSON."""
    reset_arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}
    """Further arguments of each reset, beside the seed; secrets as `"env:NAME"`."""
    give_label: bool = False
    """Passes the label's keys to each reset."""


class NemoGymAgent(ServedAgent):
    """A NeMo Gym resources server: its tools are called, and it verifies the answer (`rlhf_core.agents.nemo_gym`)."""

    type: Literal["nemo_gym"] = "nemo_gym"
    label_field: str = ""
    """The field of a task that takes a label which is no JSON object, e.g. `expected_answer`."""


class VerifiersAgent(RewardingAgent):
    """An environment of `verifiers`, in an interpreter of its own (`rlhf_core.agents.verifiers`)."""

    type: Literal["verifiers"] = "verifiers"
    python: Annotated[str, FAILURES]
    """The interpreter of the virtual environment that `verifiers` and the environment are installed in."""
    environment: str
    """The environment's name, as `load_environment` takes it."""
    arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}
    """Arguments of the environment; secrets as `"env:NAME"`."""
    version: str = ""
    """Version of `verifiers` that must be installed there, or the beginning of it; it belongs to the key of a stage."""
    environment_version: str = ""
    """Version of the environment. It belongs to the key of a stage, which cannot see what is installed there."""
    folders: tuple[str, ...] = ()
    """Folders that its modules may be imported from; all their `*.py` belong to the key of a stage."""
    request_timeout_s: Annotated[float, Field(gt=0), FAILURES] = 600.0
    """Deadline of one request of the environment, sampling included."""

    def read_files(self) -> tuple[str, ...]:
        """Return the modules below `folders`."""
        return tuple(str(path) for folder in self.folders for path in sorted(Path(folder).rglob("*.py")))


AgentConfig = Annotated[
    EnvironmentAgent | OpenRLHFAgent | ToolsAgent | ProgramAgent | OpenEnvAgent | NemoGymAgent | VerifiersAgent,
    Field(discriminator="type"),
]


def named_object(spec: str) -> str:
    """Return `spec` if it reads `package.module:name` or `path/to/file.py:name`; ValueError otherwise."""
    module, separator, name = spec.rpartition(":")
    if not separator or not module or not name.isidentifier():
        raise ValueError("must read package.module:name or path/to/file.py:name; add what is missing")
    return spec


def _defined_names(file: str) -> set[str]:
    """Return what a file defines or imports at its top level; nothing for one that is not there or not valid."""
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return set()  # whoever needs the file says so
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.AsyncFunctionDef, ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
