"""The former name of `rlhf_contrib.harness.tasks`."""

from rlhf_core.moved import moved

moved(__name__)
