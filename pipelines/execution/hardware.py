"""The former name of `rlhf_contrib.planner.hardware`."""

from rlhf_core.moved import moved

moved(__name__)
