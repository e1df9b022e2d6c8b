"""A real NeMo Gym resources server, for an interpreter with `nemo-gym`: `python nemo_gym_server.py PORT`.

A session counts; the answer earns the share of digits in its last message, and one more if the counter stands at
`expected_count`. It masks the sample if `broken` is set.
"""

import sys
from unittest.mock import MagicMock

import uvicorn
from fastapi import Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from pydantic import BaseModel


class Seed(BaseSeedSessionRequest):
    initial_count: int = 0


class Increment(BaseModel):
    count: int


class Verify(BaseVerifyRequest):
    expected_count: int = -1
    broken: bool = False


class Verified(BaseVerifyResponse):
    reward_components: dict[str, float]


class Counter(SimpleResourcesServer):
    config: BaseResourcesServerConfig
    counts: dict = {}

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/increment")(self.increment)
        return app

    async def seed_session(self, request: Request, body: Seed) -> BaseSeedSessionResponse:
        self.counts[request.session[SESSION_ID_KEY]] = body.initial_count
        return BaseSeedSessionResponse()

    async def increment(self, request: Request, body: Increment) -> dict:
        self.counts[request.session[SESSION_ID_KEY]] += body.count
        return {"count": self.counts[request.session[SESSION_ID_KEY]]}

    async def verify(self, request: Request, body: Verify) -> Verified:
        texts = [part.text for item in body.response.output if item.type == "message" for part in item.content]
        last = texts[-1] if texts else ""
        digits = sum(letter.isdigit() for letter in last) / max(len(last), 1)
        counted = float(self.counts[request.session[SESSION_ID_KEY]] == body.expected_count)
        failed = (
            {"mask_sample": True, "failure_kind": "sandbox_error", "failure_reason": "broken"} if body.broken else {}
        )
        components = {"digits": digits, "counted": counted}
        return Verified(**body.model_dump(), **failed, reward=digits + counted, reward_components=components)


if __name__ == "__main__":
    config = BaseResourcesServerConfig(
        host="127.0.0.1", port=int(sys.argv[1]), entrypoint="", name="counter", domain="agent"
    )
    server = Counter(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
