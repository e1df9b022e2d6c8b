"""Checkpoints of states that are offloaded to host memory: written from there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("offloaded_program.py")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(3, "bfloat16"), pytest.param(2, "float32", marks=pytest.mark.full)])
def test_offloaded_states_are_written_without_a_copy_and_training_goes_on_from_them(
    policy_folder, tmp_path, stage, dtype
):
    words = [sys.executable, str(PROGRAM), str(policy_folder), str(tmp_path), str(stage), dtype]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    made = json.loads(ran.stdout.splitlines()[-1])
    assert made["moments"] > 0 and made["copied"] == 0
    assert made["of_one_number"] > 0  # the step of AdamW
    assert made["notes"] == [], "it was written before the next step"
    assert made["resumed"] == made["losses"][2:]
    assert made["losses"][0] > made["losses"][3]
