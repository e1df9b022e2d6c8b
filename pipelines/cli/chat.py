"""Talk to a policy in the terminal (`rlhf chat`)."""

from __future__ import annotations

import argparse
import secrets

from rich.console import Console

from pipelines.cli.common import console, store_folder
from pipelines.flows.inputs import find_artifact
from rlhf_core.config.engines import HFSamplerConfig, RuntimeConfig, SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.runtime.factory import open_runtime
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message, PolicyRef, SamplingRequest


def chat(options: argparse.Namespace) -> None:
    """Talk to a policy."""
    talk(options, ArtifactStore(store_folder(options)), console)


def talk(options: argparse.Namespace, store: ArtifactStore, console: Console) -> None:
    """Answer `--once TEXT`, or every line of input until an empty one."""
    policy = store.path(find_artifact(store, PolicyRef, options.policy))
    template = ChatTemplate.load(policy)
    sampling = SamplingConfig(temperature=options.temperature, max_tokens=options.max_tokens)
    # The user types one line at a time: plain transformers answers before vLLM would have started.
    runtime = open_runtime(RuntimeConfig(type="local", sampler=HFSamplerConfig()))
    history: list[Message] = []
    try:
        with runtime.sampler(policy) as sampler:
            while True:
                text = options.once or console.input("[bold]> [/bold]").strip()
                if not text:
                    return
                history.append(Message("user", text))
                request = SamplingRequest(template.prompt_ids(tuple(history)), secrets.randbelow(2**31))
                answer = sampler.generate([request], sampling)[0].text
                console.print(answer, markup=False, highlight=False)
                history.append(Message("assistant", answer))
                if options.once:
                    return
    except EOFError:
        return
    finally:
        runtime.close()
