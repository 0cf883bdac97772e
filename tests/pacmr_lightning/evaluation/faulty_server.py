"""A chat endpoint on this machine that answers by rule and misbehaves by script.

    with FaultyServer(reply) as server:
        server.script = ["hang", "html"]  # the first requests, in the order of their arrival
        Endpoint("model", base_url=server.url)

``reply(messages)`` is the text of a good answer.
"""

import json
import re
import select
import socket
import threading

from ...local_server import LocalHandler, LocalServer

QUICK = {"retry-after-ms": "1"}
"""Header that lets the client go on at once."""
SECRET = "sk-this-is-the-secret-key-0123456789"


def prefer_longer(messages):
    text = messages[-1]["content"]
    summaries = "Summary A:" in text
    first, second = re.search(
        r"(?:Summary|Response) A: (.*?)\n\n(?:Summary|Response) B: (.*?)\n\n(?:Reply|FIRST)", text, re.DOTALL
    ).groups()
    letter = "A" if len(first) > len(second) else "B"
    verdict = f"Preferred: {letter}" if summaries else f'More helpful: "{letter}"'
    return f"Comparison: the other one is shorter.\n{verdict}"


def prefer_position_a(messages):
    word = "Preferred" if "Summary A:" in messages[-1]["content"] else "More helpful"
    return f"Comparison: the first one is first.\n{word}: A"


def message(content, reason="stop", error=None, **fields):
    return {"choices": [{"message": {"content": content, **fields}, "finish_reason": reason, "error": error}]}


class FaultyServer(LocalServer):
    """Serves chat completions until the block ends.

    Attributes:
        replies: rules of models that answer in another way than ``reply``.
        script: what happens to the next requests, first come first: a fault of ``Handler``, an HTTP status, a
            pair of a status and the error's fields, the body of a 200 (fields on top of a good answer's, as
            of ``message``, or a list), or None for a good answer. After it, all are good.
        always: what happens to every request after the script instead of a good answer.
        together: requests that must have been under way at a time before any good answer.
        requests: the JSON bodies of all requests.
        keys: their Authorization headers.
        most_at_once: requests that were under way at a time, at most.
    """

    def __init__(self, reply):
        self.reply = reply
        self.replies = {}
        self.together = 1
        self.script = []
        self.always = None
        self.requests = []
        self.keys = set()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Condition()
        self._stopped = threading.Event()
        super().__init__(Handler)
        self.url += "/v1"

    def __exit__(self, *_):
        self._stopped.set()
        super().__exit__()

    def arrive(self, body, key):
        with self._lock:
            self.requests.append(body)
            self.keys.add(key)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self._lock.notify_all()
            return self.script.pop(0) if self.script else self.always

    def leave(self):
        with self._lock:
            self._at_once -= 1

    def gather(self):
        """Waits for the others; the limit only guards against a client that sends fewer."""
        with self._lock:
            self._lock.wait_for(lambda: self.most_at_once >= self.together, 60)

    def hang(self, connection):
        """Until the client hangs up, or the server is stopped."""
        while not self._stopped.is_set() and not select.select([connection], [], [], 0.01)[0]:
            pass


class Handler(LocalHandler):
    def do_POST(self):
        chat = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"]
        fault = chat.arrive(body, key)
        try:
            self.behave(chat, body, key, fault)
        finally:
            chat.leave()

    def behave(self, chat, body, key, fault):
        good = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": []}
        # Of every answer, also of those thrown away.
        good["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}

        def choice(content):
            message = {"role": "assistant", "content": content}
            return good | {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

        whole, never = choice("whole"), json.dumps(choice("never seen"))
        if fault is None:
            chat.gather()
            reply = chat.replies.get(body["model"], chat.reply)
            self.send(200, choice(reply(body["messages"])))
        elif isinstance(fault, (dict, list)):
            self.send(200, whole | fault if isinstance(fault, dict) else fault, QUICK)
        elif isinstance(fault, (int, tuple)):
            status, fields = fault if isinstance(fault, tuple) else (fault, {})
            # A careless server repeats the key.
            error = {"message": f"no {status} for {key}", "type": "t", "param": None, "code": None}
            self.send(status, {"error": error | fields}, QUICK)
        elif fault == "status 429, retry after 1 s":
            self.send(429, {"error": {"message": "slow down"}}, {"Retry-After": "1"})
        elif fault == "hang":
            chat.hang(self.connection)
            self.close_connection = True
        elif fault == "cut":
            self.cut()
        elif fault == "truncated body":
            self.send_text(200, never[:40], "application/json", {"Content-Length": str(len(never))})
            self.cut()
        elif fault == "html":
            self.send_text(200, "<html>Welcome to the proxy</html>", "text/html", QUICK)

    def send(self, status, body, headers=None):
        self.send_text(status, json.dumps(body), "application/json", headers)

    def send_text(self, status, text, kind, headers=None):
        self.respond(status, text.encode(), {"Content-Type": kind, **(headers or {})})

    def cut(self):
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
