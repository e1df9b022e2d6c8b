"""An agent without OpenAI's client: any program that can post JSON to its endpoint. It asks twice, for digits."""

import json
import os
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}


def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    with urlopen(Request(URL, json.dumps(body).encode(), HEADERS)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


messages = json.loads(sys.stdin.readline())["messages"]
shares = []
for _ in range(2):
    try:
        said = ask(messages)
    except HTTPError as error:
        if json.load(error)["error"]["code"] != "context_length_exceeded":
            raise
        break  # no room for another turn
    shares.append(sum(letter.isdigit() for letter in said) / max(len(said), 1))
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "More."}]
print(json.dumps({"reward": sum(shares)}))  # noqa: T201
