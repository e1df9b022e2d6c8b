"""What a resumed run needs beside the checkpoint's own folder: trained weights, optimizer moments, random states.

Files are written by `torch.save` and read with `weights_only=True`, so that loading one runs no code.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_core.errors import TrainingError, explain

ENGINE_FILE = "engine.json"


def save_training_state(file: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Write the trained parameters and the optimizer. Frozen parameters (LoRA's base) come with the model's folder."""
    torch.save({"parameters": trained_parameters(module), "optimizer": optimizer.state_dict()}, file)


def load_training_state(file: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Restore what `save_training_state` wrote, bit for bit. Raises TrainingError if it is of another model."""
    state = _read(file)
    own = trained_parameters(module)
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in state["parameters"].items()}:
        odd = sorted(set(own) ^ set(state["parameters"]))[:3]
        rule = f"its parameters are not those of this model (names that only one of them has: {odd})"
        raise TrainingError(
            explain("checkpoint", str(file), rule, "resume with the model and LoRA that it was made with")
        )
    for name, parameter in own.items():
        parameter.copy_(state["parameters"][name])
    optimizer.load_state_dict(state["optimizer"])


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that an optimizer moves, by name, without their graph; they share memory with the model."""
    return {name: parameter.data for name, parameter in module.named_parameters() if parameter.requires_grad}


def save_engine_settings(folder: Path, settings: Mapping[str, int]) -> None:
    """Write what a checkpoint's layout depends on: the ZeRO stage and the number of workers."""
    (folder / ENGINE_FILE).write_text(json.dumps(dict(settings)))


def check_engine_settings(folder: Path, settings: Mapping[str, int]) -> None:
    """Raise TrainingError if the checkpoint in `folder` was written under other settings than `settings`."""
    file = folder / ENGINE_FILE
    written = json.loads(file.read_text()) if file.is_file() else {}
    if written != settings:
        remedy = "resume with those numbers, or start the stage over with --force"
        raise TrainingError(explain("checkpoint", written, f"this run has {dict(settings)}", remedy))


def save_random_state(file: Path) -> None:
    """Write the generators of this process: python, numpy, torch and every GPU."""
    generator: Any = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(generator["state"]["key"].astype("int64"))
    state = {
        "python": random.getstate(),
        "numpy": generator | {"state": generator["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(state, file)


def load_random_state(file: Path) -> None:
    """Restore what `save_random_state` wrote; GPU generators only where there are as many GPUs as there were."""
    state = _read(file)
    generator = state["numpy"]
    key = generator["state"]["key"].numpy().astype("uint32")
    random.setstate(state["python"])
    numpy.random.set_state(generator | {"state": generator["state"] | {"key": key}})
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _read(file: Path) -> Any:
    if not file.is_file():
        rule = "the checkpoint lacks this file"
        raise TrainingError(explain("checkpoint", str(file), rule, "resume with as many workers as wrote it"))
    return torch.load(file, map_location="cpu", weights_only=True)
