"""The former name of `rlhf_contrib.serve.reward_server`."""

from rlhf_core.moved import moved

moved(__name__)
