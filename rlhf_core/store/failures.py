"""The former name of `rlhf_core.stage.failures`."""

from rlhf_core.moved import moved

moved(__name__)
