"""Runs OpenRLHF agent files (`--train.agent_func_path`) unchanged.

Such a file defines `AgentExecutor`, on top of the base classes of `openrlhf.utils.agent`. Where OpenRLHF is not installed a
module of that name with these classes is put in its place. The file's `llm_engine` asks our sampler.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_core.agents.games import rewarded
from rlhf_core.agents.programs import Engine, EpisodeCut, Program, ProgramResult
from rlhf_core.agents.sessions import plain_text
from rlhf_core.callables import load_file
from rlhf_core.config.agents import OpenRLHFAgent
from rlhf_core.errors import ConfigError, explain

MODULES = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent", "openrlhf.utils.logging_utils")


class AgentExecutorBase(ABC):
    """Drives an episode: samples with `llm_engine` and returns the conversation's tokens with what it earned."""

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Return `observation_tokens`, `action_ranges`, `reward` and so on."""


class AgentInstanceBase(ABC):
    """An environment of one episode."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the states with the first `observation`."""
        return states

    @abstractmethod
    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return `rewards`, `environment_feedback`, `done` and, if wanted, `scores`, `sampling_params`, `extra_logs`."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays an `AgentInstanceBase`: its feedback is appended as raw text, and only that text is tokenised."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        if not issubclass(agent_instance_cls, AgentInstanceBase):
            raise TypeError(f"{agent_instance_cls.__name__} must derive from AgentInstanceBase")
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Return the episode; besides OpenRLHF's keys `turn_rewards`, and `truncated` where the last turn was cut."""
        instance = self.agent_instance_cls()
        text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
        tokens = _tokenised(hf_tokenizer, text)
        ranges: list[tuple[int, int]] = []
        rewards: list[float] = []
        result: dict[str, Any] = {}
        truncated = False
        while len(tokens) < max_length:
            sampling_params.max_tokens = max_length - len(tokens)
            try:
                turn = (await llm_engine.generate(tokens, deepcopy(sampling_params))).outputs[0]
            except EpisodeCut:
                truncated = True
                break
            truncated = turn.finish_reason == "length"
            ranges.append((len(tokens), len(tokens) + len(turn.token_ids)))
            states = {
                "observation_text": text,
                "action_text": turn.text,
                "label": label,
                "sampling_params": sampling_params,
            }
            result = await instance.step(states)
            feedback = result["environment_feedback"]
            rewards.append(float(result["rewards"]))
            text += turn.text + feedback
            tokens = tokens + list(turn.token_ids) + _tokenised(hf_tokenizer, feedback)
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


@dataclass
class SamplingParams:
    """What an agent reads and changes; only `max_tokens` may differ from the stage's configuration."""

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
    """A turn, with the names of vLLM's output; `text` holds special tokens."""

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
    """What an executor samples with, in place of OpenRLHF's vLLM engine."""

    def __init__(self, engine: Engine, tokenizer: Any, allowed: SamplingParams) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._allowed = allowed

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Return one continuation. ValueError for parameters that the trainer does not know of, and for images."""
        if multi_modal_data:
            raise ValueError("images were given to generate, and the policy reads text alone")
        for name in ("temperature", "top_p", "top_k", "n", "stop"):
            wanted, allowed = getattr(sampling_params, name), getattr(self._allowed, name)
            if name == "top_k" and wanted == -1:
                wanted = 0
            if wanted != allowed and not (name == "stop" and not wanted):
                raise ValueError(
                    f"sampling_params.{name} = {wanted!r}: the trainer takes it to be {allowed!r}; leave it"
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


def open_executor(config: OpenRLHFAgent, *, tokenizer: str) -> Program:
    """Load the file and return its executor as a program; ConfigError if it has none. One executor plays all episodes."""
    provide_modules()
    module = load_file("agent.file", Path(config.file))
    try:
        executor = module.AgentExecutor()
    except Exception as error:
        raise ConfigError(
            explain("agent.file", config.file, f"has no AgentExecutor that can be made: {error!r}", "mend the file")
        ) from error
    from transformers import AutoTokenizer  # after the file: it takes seconds, and the file may be wrong

    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    takes_images = "images" in inspect.signature(executor.execute).parameters

    async def program(prompt: Mapping[str, Any], seed: int, engine: Engine) -> ProgramResult:
        sampling = prompt["sampling"]
        params = SamplingParams(**sampling)
        result = await executor.execute(
            prompt=prompt["text"],
            label=prompt["label"],
            sampling_params=params,
            max_length=config.max_episode_tokens,
            hf_tokenizer=loaded,
            llm_engine=LLMEngine(engine, loaded, SamplingParams(**sampling)),
            **({"images": None} if takes_images else {}),
        )
        return rewarded(as_result(result), needed=config.needs_reward)

    return program


def as_result(result: Mapping[str, Any]) -> ProgramResult:
    """Return what an executor's dictionary says; KeyError if it lacks the conversation."""
    reward = result.get("reward")
    rewards = result.get("turn_rewards") or ([] if reward is None else [reward])
    extras = {name: value for name, value in (result.get("extra_logs") or {}).items() if is_number(value)}
    scores = result.get("scores")
    if is_number(scores):
        extras["score"] = scores
    return ProgramResult(
        rewards=tuple(float(value) for value in rewards),
        extras={plain_text(str(name)): float(value) for name, value in extras.items()},
        truncated=bool(result.get("truncated")),
        token_ids=tuple(int(token) for token in result["observation_tokens"]),
        actions=tuple((int(start), int(end)) for start, end in result["action_ranges"]),
    )


def is_number(value: Any) -> bool:
    """Say whether `value` is one number, also as a tensor of one element."""
    return isinstance(value, (int, float)) or (hasattr(value, "numel") and value.numel() == 1)


def provide_modules() -> None:
    """Make `import openrlhf.utils.agent` work where OpenRLHF is not installed."""
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
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


def _tokenised(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
