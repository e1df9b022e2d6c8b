"""A real OpenEnv server, for an interpreter with `openenv-core`: `python openenv_server.py PORT [SESSIONS]`.

An episode has two turns; each earns the share of digits in its text. The word `crash` raises.
"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    text: str


class Heard(Observation):
    message: str
    turn: int


class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._turn = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._turn = 0
        return Heard(message=f"Say digits ({seed}).", turn=0)

    def step(self, action, timeout_s=None, **kwargs):
        if "crash" in action.text:
            raise RuntimeError("the digits are gone")
        self._turn += 1
        share = sum(letter.isdigit() for letter in action.text) / max(len(action.text), 1)
        return Heard(message=f"turn {self._turn}", turn=self._turn, reward=share, done=self._turn == 2)

    @property
    def state(self):
        return State(episode_id="digits", step_count=self._turn)


if __name__ == "__main__":
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    app = create_fastapi_app(Digits, Say, Heard, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
