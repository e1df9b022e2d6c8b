"""The former name of `rlhf_contrib.environments.openenv`."""

from rlhf_core.moved import moved

moved(__name__)
