"""The former name of `rlhf_contrib.planner.stage_models`."""

from rlhf_core.moved import moved

moved(__name__)
