"""Paraphrases by a model on a real HTTP server, whose words are known."""

import json
from functools import partial

import pyarrow.parquet as pq
import pytest

from pacmr_lightning.command_line.parser import run_tool
from pacmr_lightning.commands.augment import augment
from pacmr_lightning.datamodules.augmentation.paraphrase import CUT, INSTRUCTION, REPEATED, Paraphrase
from pacmr_lightning.datamodules.sources import Files
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.endpoint import Endpoint

from ...pacmr_lightning.evaluation.faulty_server import message

main = partial(run_tool, "augment", augment)

SYNONYMS = {"sea": "ocean", "lost": "misplaced", "calm": "still"}


def reply(messages):
    text = messages[-1]["content"]
    if text == "a loop":
        return "all day long " * 3 + "it rains"
    if "two lines" in text:
        return "One.\nTwo."
    # Reasoning, which does not count, may have any number of lines.
    return "<think>One.\nTwo.</think>" + " ".join(SYNONYMS.get(w, w) for w in text.split(" "))


@pytest.fixture
def paraphrase(server):
    return Paraphrase(Endpoint("tiny", server.url, max_tokens=50, temperature=0.5, retries=1, concurrency=1))


def test_what_is_of_no_use_is_kept(server, paraphrase, tmp_path):
    loop = "the sea " * 6
    pieces = ["the sea was cut", "the sea in two lines", "the calm", f"{loop}calm", "a loop"]
    server.script = [message("half an", "length")]
    found = paraphrase.rewrite([pieces], tmp_path / "answers.sqlite")
    texts = [found[piece].text for piece in pieces]
    assert texts == [*pieces[:2], "the still", "the ocean " * 6 + "still", "a loop"]
    assert found["a loop"].kept == REPEATED
    assert found[pieces[0]].kept == CUT
    assert found[pieces[1]].kept == "the answer is not of the kind that was asked for"
    # A second try for several lines.
    assert [r["messages"][1]["content"] for r in server.requests].count(pieces[1]) == 2
    # It is asked again in another run, and what was valid is not.
    server.reply = lambda messages: "One line."
    found = paraphrase.rewrite([pieces], tmp_path / "answers.sqlite")
    assert [found[piece].text for piece in pieces[1:3]] == ["One line.", "the still"]


ROWS = [
    {"prompt": "\n\nHuman: I lost my calm \n\nAssistant: Where?\n\nHuman: At sea\n\nAssistant:"},
    {"prompt": "SUBREDDIT: r/sea\n\nTITLE: lost\n\nPOST: At sea\n\n- calm sea\n\nTL;DR:"},
]
AUGMENTED = [
    "\n\nHuman: I misplaced my still \n\nAssistant: Where?\n\nHuman: At ocean\n\nAssistant:",
    "SUBREDDIT: r/sea\n\nTITLE: misplaced\n\nPOST: At ocean\n\n- still ocean\n\nTL;DR:",
]


def test_the_tool(server, write_rows, tmp_path):
    """The frame stays; a second run asks nothing, another instruction asks everything again."""
    train = write_rows([row | {"chosen": " a", "rejected": " b"} for row in ROWS])
    arguments = ["--source", "Files", "--source.train", train, "--output", str(tmp_path / "out.parquet")]
    arguments += ["--rewriter", "Paraphrase", "--rewriter.endpoint.base_url", server.url]
    arguments += ["--rewriter.endpoint.model", "tiny", "--rewriter.endpoint.temperature", "0.5"]
    main(arguments)
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["augmented_prompt"] == AUGMENTED and set(table["method"]) == {"paraphrase"}
    settings = json.loads(table["settings"][0])
    assert settings["endpoint"]["base_url"] == server.url and settings["instruction"] == INSTRUCTION
    assert len(server.requests) == 5
    pieces = {request["messages"][1]["content"] for request in server.requests}
    assert "I lost my calm" in pieces and len(pieces) == 5
    assert server.requests[0]["messages"][0] == {"role": "system", "content": INSTRUCTION}
    assert (server.requests[0]["model"], server.requests[0]["temperature"]) == ("tiny", 0.5)
    main(arguments)
    assert len(server.requests) == 5
    main([*arguments, "--rewriter.instruction", "Say it again."])
    assert len(server.requests) == 10
    assert server.requests[-1]["messages"][0]["content"] == "Say it again."


def test_nothing_worded_differently_is_an_error(server, paraphrase, write_rows, tmp_path):
    train = write_rows([{"prompt": "the river was cut", "chosen": " a", "rejected": " b"}])
    for why, server.script in ((CUT, [message("half an", "length")]), ("came back unchanged", [])):
        with pytest.raises(UserError, match=rf"paraphrase changed none of 1 pieces \(mostly: {why}\)"):
            augment(Files(train), str(tmp_path / f"{why}.parquet"), paraphrase)
    assert not [*tmp_path.glob("*.parquet")]
