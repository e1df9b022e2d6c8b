"""Trace one prompt through a PPO step: the files of this repository that it enters, and how often it changes file.

    python -m benchmarks.measure_walk

A toy policy is trained with GAE for three steps of one prompt each, on the runtime in this process; the calls of the
second step are traced. Every function that is entered counts, in every thread. Code that runs at import does not count,
and the work of a reward in a separate process is not traced. A switch is a call in another file than the previous call.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlhf_core", "stages", "pipelines")
STEPS, TRACED = 3, 2
Call: TypeAlias = tuple[str, str]
"""File and qualified name of a function."""
NO_FUNCTIONS = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
FOLLOWED = ("__call__", "__enter__", "__exit__")
"""Special methods that a reader looks up. Others are operators and constructors (`a + b`, `len(a)`, `A(b)`); neither
they nor their callees are followed.
"""


class CallTrace:
    """The calls of functions of this repository, as (file, function), while `record(True)` holds.

    >>> trace = CallTrace()
    >>> trace.calls = [("a.py", "f"), ("a.py", "g"), ("b.py", "h"), ("a.py", "f")]
    >>> trace.files(), trace.switches()
    (['a.py', 'b.py'], 2)
    """

    def __init__(self) -> None:
        self._recording = False
        self.calls: list[Call] = []
        self.callers: dict[Call, Call | None] = {}
        """Function -> the function of this repository that called it first, None if the stage itself did."""
        self.docs: dict[Call, str] = {}
        """Function -> the first line of its docstring, "" if it has none."""
        self._names: dict[str, str] = {}

    def files(self) -> list[str]:
        """The distinct files, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    def functions(self) -> dict[str, list[str]]:
        """File -> its functions that were called, both in the order of their first calls."""
        found: dict[str, dict[str, None]] = {}
        for file, function in self.calls:
            found.setdefault(file, {})[function] = None
        return {file: list(names) for file, names in found.items()}

    def switches(self) -> int:
        """The number of calls in another file than the call before."""
        return sum(before[0] != after[0] for before, after in zip(self.calls, self.calls[1:]))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the calls of this thread inside the `with` block."""
        sys.setprofile(self._observe)
        try:
            yield
        finally:
            self.record(False)
            sys.setprofile(None)

    def record(self, on: bool) -> None:
        """Start recording, also in threads that start later, but not in older threads such as a heartbeat."""
        self._recording = on
        threading.setprofile(self._observe if on else None)  # type: ignore[arg-type]

    def _observe(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._recording or event != "call" or frame.f_code.co_name in NO_FUNCTIONS:
            return
        if _is_operator(frame) or (frame.f_back is not None and _is_operator(frame.f_back)):
            return
        path = frame.f_code.co_filename
        place = self._names.get(path)
        if place is None:
            file = Path(path)
            ours = file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PACKAGES
            place = self._names[path] = str(file.relative_to(ROOT)) if ours else ""
        if place:
            call = (place, frame.f_code.co_qualname)
            self.calls.append(call)
            if call not in self.callers:
                definer = (place, call[1].partition(".<locals>.")[0])  # of a function that is passed to another one
                self.callers[call] = definer if definer in self.callers else self._caller(frame)
                # The compiler puts the docstring of a function first among its constants.
                doc = frame.f_code.co_consts[0] if "<lambda>" not in call[1] and frame.f_code.co_consts else None
                self.docs[call] = doc.strip().splitlines()[0] if isinstance(doc, str) else ""

    def _caller(self, frame: FrameType) -> Call | None:
        """The innermost function on the stack below `frame` that was recorded with its present caller.

        A function with several callers is recorded only below the first one, and so does not count for the others.
        """
        stack: list[Call | None] = [None]
        below = frame.f_back
        while below is not None:
            stack.append((self._names.get(below.f_code.co_filename, ""), below.f_code.co_qualname))
            below = below.f_back
        recorded = [call for call in stack[1:] if call in self.callers]
        return next((call for call in recorded if call and self.callers[call] in stack), next(iter(recorded), None))


def _is_operator(frame: FrameType) -> bool:
    return frame.f_code.co_name.startswith("__") and frame.f_code.co_name not in FOLLOWED


def trace_step() -> CallTrace:
    """Trace the calls of one PPO step of one prompt, on the in-process runtime; takes a few seconds."""
    from rlhf_core.config.engines import SamplingConfig, TrainerConfig
    from rlhf_core.config.policy import KLInReward, PPOConfig
    from rlhf_core.config.rewards import FunctionReward, RewardsConfig
    from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig
    from rlhf_core.data.tables import write_prompts
    from rlhf_core.runtime.local_runtime import LocalRuntime
    from rlhf_core.stage.run import execute
    from rlhf_core.store.artifacts import ArtifactStore
    from rlhf_core.tracking.memory import MemoryStageTracker
    from rlhf_core.types import Message, PolicyRef, Prompt, PromptsRef
    from stages.table import STAGES

    trace = CallTrace()

    def progress(done: int, total: int, message: str) -> None:
        trace.record(done + 1 == TRACED)

    config = PPOConfig(
        steps=STEPS,
        prompts_per_step=1,
        samples_per_prompt=1,
        sampling=SamplingConfig(max_tokens=4),
        rewards=RewardsConfig(terms={"number": FunctionReward(function="rlhf_core.rewards.verifiable:final_number")}),
        kl=KLInReward(coef=0.05),
        epochs=1,
        minibatches=1,
        checkpoint_every=STEPS,
        table_every=STEPS,
    )
    with tempfile.TemporaryDirectory() as name, trace.installed():
        folder = Path(name)
        store = ArtifactStore(folder / "store")
        policy = store.external(PolicyRef, make_policy(folder / "policy"))
        write_prompts(folder / "prompts", [Prompt("q", (Message("user", "What is 12 + 30?"),), "42", "toy")])
        prompts = store.external(PromptsRef, folder / "prompts")
        inputs: dict[str, Any] = {"policy": policy, "reference": policy, "prompts": prompts, "reward_models": {}}
        runtime = RuntimeConfig(type="local", trainer=TrainerConfig(engine="torch"), sampler=HFSamplerConfig())
        spec = STAGES["ppo"].spec(config, inputs=inputs, seed=17, label="ppo", engines={})
        execute(store, spec, runtime=LocalRuntime(runtime), tracker=MemoryStageTracker(), progress=progress)
    return trace


def make_policy(folder: Path) -> Path:
    """Write a Llama of one layer with its tokenizer; returns its folder."""
    from rlhf_core.config.models import InitModel
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer

    shape = InitModel(
        vocab_size=320, hidden_size=32, layers=1, heads=2, kv_heads=2, intermediate_size=64, max_positions=64
    )
    train_tokenizer(["What is 12 + 30? It is 42."] * 5, vocab_size=320, folder=folder)
    initialize_llama(shape, folder, seed=7)
    return folder


def main() -> None:
    """Print the files in order with the functions that were called, and both counts."""
    trace = trace_step()
    for number, (file, functions) in enumerate(trace.functions().items(), start=1):
        print(f"{number:3d}  {file}: {', '.join(functions)}")
    print(f"{len(trace.files())} files, {trace.switches()} switches")


if __name__ == "__main__":
    main()
