"""An agent without OpenAI's client: any program that can post JSON to its endpoint. It asks twice, for digits.

It writes its requests to a socket: a test starts it hundreds of times, and `urllib` would take half of each start.
"""

import json
import os
import socket
import sys

HOST, _, PATH = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
ADDRESS, _, PORT = HOST.partition(":")
HEAD = (
    f"POST /{PATH}/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    f"Content-Type: application/json\r\nAuthorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
)


def ask(messages):
    """The status and the reply of one request."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    with socket.create_connection((ADDRESS, int(PORT))) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with connection.makefile("rb") as reply:
            head, _, answer = reply.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(answer)


messages = json.loads(sys.stdin.readline())["messages"]
shares = []
for _ in range(2):
    status, reply = ask(messages)
    if status != 200:
        if reply["error"]["code"] != "context_length_exceeded":
            raise RuntimeError(reply)
        break  # no room for another turn
    said = reply["choices"][0]["message"]["content"] or ""
    shares.append(sum(letter.isdigit() for letter in said) / max(len(said), 1))
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "More."}]
print(json.dumps({"reward": sum(shares)}))  # noqa: T201
