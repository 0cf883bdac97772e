"""Paraphrases by a language model: a real server on this machine answers, in words that are known."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest

from pacmr_lightning.commands.augment import augment, main
from pacmr_lightning.datamodules.augmentation.paraphrase import CUT, INSTRUCTION, Paraphrase
from pacmr_lightning.datamodules.sources import Files
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.endpoint import Endpoint

SYNONYMS = {"sea": "ocean", "lost": "misplaced", "calm": "still"}


class _Server(ThreadingHTTPServer):
    """Answers with synonyms; texts with "two lines", "cut" or "broken" in them get what they ask for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, text):
        if "two lines" in text:
            return "One.\nTwo.", 2
        words = " ".join(SYNONYMS.get(word, word) for word in text.split(" "))
        return f" {words}\n", 50 if "cut" in text else 5


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        text, tokens = self.server.answer(request["messages"][-1]["content"])
        body = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 9, "completion_tokens": tokens},
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def paraphrase(server):
    return Paraphrase(Endpoint("tiny", server.url, max_tokens=50, temperature=0.5, retries=1))


def test_lines_are_paraphrased_whole(server, paraphrase, tmp_path):
    prompts = [["I lost the sea. Where?", "calm"], ["calm"]]
    found = paraphrase.rewrite(prompts, tmp_path / "answers.sqlite")
    assert {piece: (r.text, r.kept, r.stored) for piece, r in found.items()} == {
        "I lost the sea. Where?": ("I misplaced the sea. Where?", None, False),
        "calm": ("still", None, False),
    }
    assert sorted(request["messages"][1]["content"] for request in server.requests) == [
        "I lost the sea. Where?",
        "calm",
    ]
    first = server.requests[0]
    assert first["messages"][0] == {"role": "system", "content": INSTRUCTION}
    assert (first["model"], first["temperature"]) == ("tiny", 0.5)


def test_what_is_of_no_use_is_kept(server, paraphrase, tmp_path):
    pieces = ["the sea in two lines", "the sea was cut", "the calm"]
    found = paraphrase.rewrite([pieces], tmp_path / "answers.sqlite")
    assert [found[piece].text for piece in pieces] == [*pieces[:2], "the still"]
    assert found[pieces[0]].kept == "the answer is not of the kind that was asked for"
    assert found[pieces[1]].kept == CUT
    # A second try for several lines.
    assert [r["messages"][1]["content"] for r in server.requests].count(pieces[0]) == 2


ROWS = [
    {"prompt": "\n\nHuman: I lost my calm \n\nAssistant: Where?\n\nHuman: At sea\n\nAssistant:"},
    {"prompt": "SUBREDDIT: r/sea\n\nTITLE: lost\n\nPOST: At sea\n\n- calm sea\n\nTL;DR:"},
]
AUGMENTED = [
    "\n\nHuman: I misplaced my still \n\nAssistant: Where?\n\nHuman: At ocean\n\nAssistant:",
    "SUBREDDIT: r/sea\n\nTITLE: misplaced\n\nPOST: At ocean\n\n- still ocean\n\nTL;DR:",
]


def test_the_tool(server, write_rows, tmp_path, capsys):
    """The frame stays; a second run asks nothing, another instruction asks everything again."""
    train = write_rows([row | {"chosen": " a", "rejected": " b"} for row in ROWS])
    arguments = ["--source", "Files", "--source.train", train, "--output", str(tmp_path / "out.parquet")]
    arguments += ["--rewriter", "Paraphrase", "--rewriter.endpoint.base_url", server.url]
    main(arguments)
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["augmented_prompt"] == AUGMENTED and set(table["method"]) == {"paraphrase"}
    settings = json.loads(table["settings"][0])
    assert settings["endpoint"]["base_url"] == server.url and settings["instruction"] == INSTRUCTION
    assert len(server.requests) == 5
    main(arguments)
    assert len(server.requests) == 5
    assert "5 of 5 different pieces were there from an earlier run" in capsys.readouterr().out
    main([*arguments, "--rewriter.instruction", "Say it again."])
    assert len(server.requests) == 10
    assert server.requests[-1]["messages"][0]["content"] == "Say it again."


def test_from_python(server, paraphrase, write_rows, tmp_path):
    train = write_rows([row | {"chosen": " a", "rejected": " b"} for row in ROWS])
    augment(Files(train), str(tmp_path / "out.parquet"), paraphrase, n=1)
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 1


def test_nothing_worded_differently_is_an_error(paraphrase, write_rows, tmp_path):
    train = write_rows([{"prompt": "the sea was cut", "chosen": " a", "rejected": " b"}])
    said = rf"paraphrase worded none of 1 pieces differently \(mostly: {CUT}\)"
    with pytest.raises(UserError, match=said):
        augment(Files(train), str(tmp_path / "out.parquet"), paraphrase)
    assert not (tmp_path / "out.parquet").exists()
