from __future__ import annotations

import pickle
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.errors import TrainingError
from rlhf_core.training.adamw import adamw
from rlhf_core.training.state import (
    check_engine_settings,
    load_random_state,
    load_training_state,
    save_engine_settings,
    save_random_state,
    save_training_state,
    trained_parameters,
)


def test_every_generator_of_the_process_goes_on_where_it_was(tmp_path: Path) -> None:
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    numpy.random.standard_normal()  # leaves a cached second normal behind
    save_random_state(tmp_path / "random.pt")
    expected = (random.random(), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist())
    load_random_state(tmp_path / "random.pt")
    assert (random.random(), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist()) == expected


def test_only_trained_parameters_are_saved() -> None:
    module = nn.Linear(2, 3)
    module.weight.requires_grad_(False)
    assert list(trained_parameters(module)) == ["bias"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    small, large = nn.Linear(2, 3), nn.Linear(2, 4)
    save_training_state(tmp_path / "state.pt", small, adamw(small, OptimizerConfig(), fused=False))
    with pytest.raises(TrainingError, match="its parameters are not those of this model"):
        load_training_state(tmp_path / "state.pt", large, adamw(large, OptimizerConfig(), fused=False))


def test_a_missing_file_says_how_many_workers_to_resume_with(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="resume with as many workers as wrote it"):
        load_random_state(tmp_path / "random_state_00001.pt")


def test_a_checkpoint_of_other_engine_settings_is_refused_and_names_both(tmp_path: Path) -> None:
    save_engine_settings(tmp_path, {"zero_stage": 1, "workers": 2})
    check_engine_settings(tmp_path, {"zero_stage": 1, "workers": 2})
    message = (
        "checkpoint = {'zero_stage': 1, 'workers': 2}: this run has {'zero_stage': 2, 'workers': 2}; "
        "resume with those numbers, or start the stage over with --force"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}$"):
        check_engine_settings(tmp_path, {"zero_stage": 2, "workers": 2})


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"python": Path("x")}, tmp_path / "random.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_random_state(tmp_path / "random.pt")
