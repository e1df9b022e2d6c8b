"""The former name of `rlhf_contrib.environments.verifiers`."""

from rlhf_core.moved import moved

moved(__name__)
