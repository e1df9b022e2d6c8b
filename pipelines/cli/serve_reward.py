"""The former name of `rlhf_contrib.serve.reward_verb`."""

from rlhf_core.moved import moved

moved(__name__)
