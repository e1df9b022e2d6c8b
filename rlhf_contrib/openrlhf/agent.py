"""Run OpenRLHF agent files (`--train.agent_func_path`) unchanged.

An agent file defines `AgentExecutor` on top of the base classes of `openrlhf.utils.agent`, or (0.8.0 to 0.8.6) a
function `step`. If OpenRLHF is not installed, this module provides these base classes under that module name. They work
for the executors of all versions. The file's `llm_engine` samples with the project's own sampler.
"""

import asyncio
import importlib.util
import inspect
import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from rlhf_core.agents.programs import EpisodeCut, Program, ProgramEngine, ProgramResult, ProgramSession, rewarded
from rlhf_core.config.agents import OpenRLHFAgent
from rlhf_core.data.pieces import encode, following
from rlhf_core.errors import ConfigError
from rlhf_core.pretrained import load_tokenizer
from rlhf_core.types import plain_text
from rlhf_core.user_code.modules import NO_DIGESTS, UserFile

SESSION = ProgramSession
# Modules of OpenRLHF that agent files import.
MODULES = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent", "openrlhf.utils.logging_utils")


CONSTRUCTOR = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
"""Constructor arguments of an `AgentExecutor` in OpenRLHF 0.8.7 to 0.9.0; later versions pass none."""


class AgentInstanceBase(ABC):
    """An environment of one episode. Its `__init__` may be async, as with a Ray actor."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The initial states, with the first `observation`."""
        return states

    @abstractmethod
    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """One turn: `rewards`, `environment_feedback`, `done`, optionally `scores`, `sampling_params`, `extra_logs`."""


class AgentExecutorBase:
    """Runs an episode: samples from an engine and returns the conversation's tokens and rewards.

    Since OpenRLHF 0.9.1, `execute` receives all arguments and returns the episode. Up to 0.9.0, the constructor
    receives an `AgentInstanceBase` and the arguments in `CONSTRUCTOR`; `execute` takes three arguments and puts the
    episode on `result_queue`. Here it does so by playing an instance.
    """

    def __init__(
        self,
        agent_instance_cls: type[AgentInstanceBase] | None = None,
        max_steps: int = 0,
        max_length: int = 0,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ) -> None:
        if agent_instance_cls is not None and not issubclass(agent_instance_cls, AgentInstanceBase):
            raise TypeError(f"{agent_instance_cls.__name__} must derive from AgentInstanceBase")
        self.agent_instance_cls = agent_instance_cls
        self.max_steps = max_steps
        self.max_length = max_length
        self.llm_engine = llm_engine
        self.hf_tokenizer = hf_tokenizer
        self.result_queue = result_queue

    async def generate(self, prompt_ids: Any, sampling_params: Any) -> Any:
        """The last output of the constructor's engine for a prompt."""
        request = {"prompt_token_ids": prompt_ids}
        return [output async for output in self.llm_engine.generate(request, sampling_params, "episode")][-1]

    async def execute(self, prompt: str, label: str, sampling_params: Any) -> Any:
        """Run an instance of the constructor's class and put the episode on the queue."""
        if self.agent_instance_cls is None:
            raise NotImplementedError(f"{type(self).__name__} defines no execute and has no AgentInstanceBase to play")
        limits = {"max_length": self.max_length, "max_steps": self.max_steps}
        played = play_instance(
            self.agent_instance_cls, prompt, label, sampling_params, self.hf_tokenizer, self.generate, **limits
        )
        await self.result_queue.put(await played)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays an `AgentInstanceBase`; all other inputs are arguments of `execute` (since OpenRLHF 0.9.1)."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        super().__init__(agent_instance_cls)

    async def execute(  # type: ignore[override]  # OpenRLHF changed the arguments with the version
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        assert self.agent_instance_cls is not None
        return await play_instance(
            self.agent_instance_cls,
            prompt,
            label,
            sampling_params,
            hf_tokenizer,
            llm_engine.generate,
            max_length=max_length,
        )


async def play_instance(
    agent_instance_cls: type[AgentInstanceBase],
    prompt: str,
    label: str,
    sampling_params: Any,
    hf_tokenizer: Any,
    generate: Callable[[Any, Any], Coroutine[Any, Any, Any]],
    *,
    max_length: int,
    max_steps: int = sys.maxsize,
) -> dict[str, Any]:
    """Play one episode and return OpenRLHF's keys, plus `turn_rewards` and `truncated` (the last turn hit a limit).

    Feedback is appended as raw text, and only the feedback is tokenized, so sampled token ids stay unchanged.
    """
    instance = agent_instance_cls.__new__(agent_instance_cls)
    begun = agent_instance_cls.__init__(instance)  # type: ignore[func-returns-value]  # a coroutine where it is async
    if inspect.isawaitable(begun):
        await begun
    text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
    tokens = list(encode(hf_tokenizer, text))
    ranges: list[tuple[int, int]] = []
    rewards: list[float] = []
    result: dict[str, Any] = {}
    truncated = False
    while len(tokens) < max_length and len(ranges) < max_steps:
        sampling_params.max_tokens = max_length - len(tokens)
        try:
            turn = (await generate(tokens, deepcopy(sampling_params))).outputs[0]
        except EpisodeCut:
            truncated = True
            break
        truncated = turn.finish_reason == "length"
        ranges.append((len(tokens), len(tokens) + len(turn.token_ids)))
        said = {"observation_text": text, "action_text": turn.text}
        result = await instance.step(said | {"label": label, "sampling_params": sampling_params})
        feedback = result["environment_feedback"]
        rewards.append(float(result["rewards"]))
        text += turn.text + feedback
        tokens = tokens + list(turn.token_ids)
        tokens += following(hf_tokenizer, feedback, after=tokens[-1])
        sampling_params = result.get("sampling_params") or sampling_params
        if result["done"]:
            break
    else:
        truncated = True
    return {
        "prompt": prompt,
        "label": label,
        "observation_tokens": tokens,
        "action_ranges": ranges,
        "turn_rewards": rewards,
        "reward": sum(rewards),
        "scores": result.get("scores", sum(rewards)),
        "extra_logs": result.get("extra_logs", {}),
        "truncated": truncated,
    }


class StepFunction(AgentInstanceBase):
    """The `step` function of an agent file (OpenRLHF 0.8.0 to 0.8.6), as an environment.

    The function receives the whole text so far and returns the next text: as `(reward, state, done, extra)` up to
    0.8.2, then in a dictionary under `next_state` (0.8.3) or `next_observation`. OpenRLHF runs the file again for each
    episode, and so does this class. The file's globals are therefore the state of one episode.
    """

    file: UserFile

    def __init__(self) -> None:
        self._step = self.file.run().step
        names = inspect.signature(self._step).parameters.values()
        self._takes_sampling = any(one.kind is one.VAR_KEYWORD or one.name == "sampling_params" for one in names)

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Call the function for one turn. Raises ValueError if its result changes the earlier conversation."""
        observation, action = state_dict["observation_text"], state_dict["action_text"]
        passed = {"sampling_params": state_dict["sampling_params"]} if self._takes_sampling else {}
        result = await self._step(observation, action, state_dict["label"], **passed)
        if not isinstance(result, Mapping):
            reward, said, done, _ = result  # OpenRLHF 0.8.2 does not log the fourth either
            result = {"rewards": reward, "next_observation": said, "done": done}
        said = result["next_observation" if "next_observation" in result else "next_state"]
        if not said.startswith(observation + action):
            # OpenRLHF would tokenize the changed text and train on it as if the policy had sampled it.
            raise ValueError("step: the next observation must begin with observation + action, as they were given")
        return {**result, "environment_feedback": said[len(observation + action) :]}


@dataclass
class SamplingParams:
    """Sampling parameters that an agent can read; only `max_tokens` may differ from the stage's configuration."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    logprobs: int = 1
    min_tokens: int = 1
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True
    stop: Any = None
    n: int = 1


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token."""

    logprob: float


@dataclass(frozen=True)
class TurnOutput:
    """One turn, with the field names of vLLM's output; `text` includes special tokens."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]
    finish_reason: str


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one request."""

    prompt_token_ids: list[int]
    outputs: list[TurnOutput]


class LLMEngine:
    """The engine that an executor samples with, in place of OpenRLHF's vLLM engine."""

    def __init__(self, engine: ProgramEngine, tokenizer: Any, allowed: SamplingParams) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._allowed = allowed

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Sample one continuation. Raises ValueError for images and for parameters that differ from the stage's."""
        if multi_modal_data:
            raise ValueError("generate was called with images, and the policy reads only text")
        for name in ("temperature", "top_p", "top_k", "n", "stop"):
            wanted, allowed = getattr(sampling_params, name), getattr(self._allowed, name)
            if name == "top_k" and wanted == -1:
                wanted = 0
            if wanted != allowed and not (name == "stop" and not wanted):
                raise ValueError(
                    f"sampling_params.{name} = {wanted!r}: the trainer assumes {allowed!r}; do not change it"
                )
        ids = tuple(int(token) for token in prompt_token_ids)
        answer = await self._engine.generate(ids, max_tokens=int(sampling_params.max_tokens or 0))
        turn = TurnOutput(
            token_ids=list(answer.token_ids),
            text=self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=False),
            logprobs=[{token: Logprob(value)} for token, value in zip(answer.token_ids, answer.logprobs, strict=True)],
            finish_reason=answer.finish_reason,
        )
        return RequestOutput(list(ids), [turn])


class ConstructorEngine:
    """The constructor's `llm_engine`, with the call signature of vLLM's engine."""

    def __init__(self, engine: LLMEngine | None, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str = "", **kwargs: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Yield one continuation of a text, of token ids or of `{"prompt_token_ids": ids}`."""
        if self._engine is None:
            raise RuntimeError("llm_engine was used outside of execute, where no episode is running")
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        ids = list(encode(self._tokenizer, prompt)) if isinstance(prompt, str) else prompt
        yield await self._engine.generate(ids, sampling_params)


Play: TypeAlias = Callable[[str, str, SamplingParams, LLMEngine], Coroutine[Any, Any, Mapping[str, Any]]]
"""(prompt, label, sampling_params, llm_engine) -> the result dictionary of one episode."""


def open_agent(
    config: OpenRLHFAgent, *, tokenizer: str, code: Mapping[str, str] = NO_DIGESTS, notes: str = ""
) -> Program:
    """Load the agent file as a program that runs its `AgentExecutor` or `step`; ConfigError if it defines neither.

    One executor plays all episodes, unless its constructor takes the five arguments of older versions. Then each
    episode gets a new executor.
    """
    provide_modules()
    file = UserFile("agent.file", Path(config.file), code=code, notes=notes)
    module = file.run()
    if hasattr(module, "AgentExecutor"):
        kind = module.AgentExecutor
        _check_constructor(config, kind)
    elif inspect.iscoroutinefunction(getattr(module, "step", None)):
        kind = partial(MultiTurnAgentExecutor, type("Step", (StepFunction,), {"file": file}))
    else:
        rule = "defines neither a class AgentExecutor nor a function `async def step(observation, action, label, **kwargs)`"
        raise ConfigError("agent.file", config.file, rule, "name the file of --agent_func_path")
    loaded = load_tokenizer(Path(tokenizer))
    play = _executor_play(config, kind, loaded)

    async def program(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
        sampling = prompt["sampling"]
        llm_engine = LLMEngine(engine, loaded, SamplingParams(**sampling))
        result = await play(prompt["text"], prompt["label"], SamplingParams(**sampling), llm_engine)
        return rewarded(as_result(result), needed=config.needs_reward)

    return program


def _executor_play(config: OpenRLHFAgent, kind: Callable[..., AgentExecutorBase], tokenizer: Any) -> Play:
    """Build the function that runs an episode of the executor, with the arguments of its OpenRLHF version."""
    # A class of OpenRLHF up to 0.9.0, by its constructor or its `execute`.
    agent: Any = getattr(kind, "func", kind)
    early = not _binds(kind) or "llm_engine" not in inspect.signature(agent.execute).parameters

    def constructed(engine: LLMEngine | None = None, queue: asyncio.Queue[Any] | None = None) -> Any:
        given = (config.max_turns, config.max_episode_tokens, ConstructorEngine(engine, tokenizer), tokenizer, queue)
        return kind(**dict(zip(CONSTRUCTOR, given, strict=True))) if early else kind()

    try:
        executor = constructed()
    except Exception as error:
        rule = f"its AgentExecutor cannot be constructed: {error!r}"
        raise ConfigError("agent.file", config.file, rule, "fix the file") from error
    if early:

        async def play_early(
            prompt: str, label: str, params: SamplingParams, llm_engine: LLMEngine
        ) -> Mapping[str, Any]:
            queue: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
            await constructed(llm_engine, queue).execute(prompt, label, params)
            if queue.empty():
                raise RuntimeError("execute ended without putting an episode on result_queue")
            return queue.get_nowait()

        return play_early
    images = {"images": None} if "images" in inspect.signature(executor.execute).parameters else {}

    async def play(prompt: str, label: str, params: SamplingParams, llm_engine: LLMEngine) -> Mapping[str, Any]:
        episode: Mapping[str, Any] = await executor.execute(
            prompt=prompt,
            label=label,
            sampling_params=params,
            max_length=config.max_episode_tokens,
            hf_tokenizer=tokenizer,
            llm_engine=llm_engine,
            **images,
        )
        return episode

    return play


def _check_constructor(config: OpenRLHFAgent, kind: Any) -> None:
    """Raise ConfigError for a class that no version of OpenRLHF could construct."""
    if not _binds(kind) and not _binds(kind, **dict.fromkeys(CONSTRUCTOR)):
        rule = f"AgentExecutor{inspect.signature(kind)} can be constructed neither without arguments nor with {', '.join(CONSTRUCTOR)}"
        raise ConfigError("agent.file", config.file, rule, "give further arguments a default")


def _binds(kind: Any, **arguments: Any) -> bool:
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError:
        return False
    return True


def as_result(result: Mapping[str, Any]) -> ProgramResult:
    """Read an executor's dictionary. Raises KeyError without a conversation, ValueError for a non-numeric reward."""
    reward = result.get("reward")
    rewards = result.get("turn_rewards") or ([] if reward is None else [reward])
    extras = {name: value for name, value in (result.get("extra_logs") or {}).items() if is_number(value)}
    scores = result.get("scores")
    if scores is not None:
        if not is_number(scores) or not math.isfinite(scores):
            raise ValueError(
                f"scores = {scores!r}: must be one finite number, or None; fix what execute or step returns"
            )
        extras["score"] = scores
    return ProgramResult(
        rewards=tuple(float(value) for value in rewards),
        extras={plain_text(str(name)): float(value) for name, value in extras.items()},
        truncated=bool(result.get("truncated")),
        token_ids=tuple(int(token) for token in result["observation_tokens"]),
        actions=tuple((int(start), int(end)) for start, end in result["action_ranges"]),
        score=None if scores is None else float(scores),
    )


def is_number(value: Any) -> bool:
    """Whether `value` is a single number; a tensor with one element counts."""
    return isinstance(value, (int, float)) or (hasattr(value, "numel") and value.numel() == 1)


def provide_modules() -> None:
    """Make `import openrlhf.utils.agent` work if OpenRLHF is not installed.

    A folder on the import path that has the same name but no `__init__.py` does not count as OpenRLHF.
    """
    imported = sys.modules.get("openrlhf")
    spec = imported.__spec__ if imported else importlib.util.find_spec("openrlhf")
    provided_before = imported is not None and spec is None
    if provided_before or (spec is not None and spec.origin is not None):
        return
    modules = {name: ModuleType(name) for name in MODULES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        module.__path__ = []
        sys.modules[name] = module
    agent = modules["openrlhf.utils.agent"]
    for provided in (AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor):
        setattr(agent, provided.__name__, provided)
    modules["openrlhf.utils.logging_utils"].__dict__["init_logger"] = logging.getLogger
