"""Chat rows: what of them is prompt and response, and the tokenizer's own template as the truth."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pacmr_lightning.datamodules import Files, PreferenceDataModule, Prompts
from pacmr_lightning.datamodules.chat import decode_messages
from pacmr_lightning.datamodules.reading import read_preferences
from pacmr_lightning.datamodules.token_report import token_warnings
from pacmr_lightning.datamodules.tokenization import tokenize_completions, tokenize_pairs
from pacmr_lightning.errors import UserError

from ..conftest import TURNS
from .checked_rows import demonstrations, pairs

QUESTION = [{"role": "system", "content": "Be calm."}, {"role": "user", "content": "What is the sea?"}]


def answer(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def plain(tokenizer):
    tokenizer.chat_template = TURNS
    return tokenizer


def pair_of(prompt, before=()):
    sides = {"chosen": [*before, *answer("Rain.")], "rejected": [*before, *answer("Books.")]}
    return {"prompt": prompt, **sides}


EXPLICIT = pair_of(QUESTION)


def test_rewording_changes_what_the_user_says(plain):
    row = pair_of([message | {"content": "I do not know."} for message in QUESTION])
    given = (None, "Tell me of the sea.", "", [], [USER | {"content": " "}])
    kept, _ = tokenize_pairs(pairs(*(row | {"augmented_prompt": said} for said in given)), plain, 512)
    view, other, *blank = plain.batch_decode(kept["augmented_ids"][:])
    assert blank == [view] * 3 and kept["by_rules"][:] == [True, False, True, True, True]
    assert "[system]I do not know." in view and "[user]I don't know." in view
    assert "[system]I do not know." in other and "[user]Tell me of the sea." in other, "the last message"


SYSTEM, USER = QUESTION
SPACED = USER | {"content": "\n What is the sea? "}
OTHER = {"role": "user", "content": "What is rain?"}
EARLIER = [USER, *answer("Water."), OTHER]
REPEATED = {
    "system message in the conversation": ([USER], QUESTION, QUESTION),
    "system message in the prompt": (QUESTION, [USER], QUESTION),
    "spaces": ([SPACED], [USER], [USER]),
    "spaces and a system message": ([SPACED], QUESTION, QUESTION),
    "spaces in the system message": ([SYSTEM | {"content": "Be calm. "}, USER], QUESTION, QUESTION),
    "prompt as text": ("What is the sea?", [], [USER]),
    "prompt as text, and again": ("What is the sea? ", QUESTION, QUESTION),
    "several turns": ([*EARLIER[:2], OTHER], [SYSTEM, *EARLIER], [SYSTEM, *EARLIER]),
    "only the first of several turns": ([SPACED], [SYSTEM, *EARLIER], [SYSTEM, *EARLIER]),
    "system message alone": ([SYSTEM], [USER], QUESTION),
    "not at all": (EARLIER, [], EARLIER),
    "the conversation goes on": (EARLIER[:2], [OTHER], EARLIER),
}


@pytest.mark.parametrize("case", REPEATED)
def test_a_repeated_prompt_is_there_once(case):
    prompt, before, expected = REPEATED[case]
    [row] = pairs(pair_of(prompt, before))
    found = [decode_messages(row[name]) for name in ("prompt", "chosen", "rejected")]
    assert found == [expected, answer("Rain."), answer("Books.")]
    [row] = demonstrations({"prompt": prompt, "completion": before + answer("Rain.")})
    assert [decode_messages(row[name]) for name in ("prompt", "completion")] == [expected, answer("Rain.")]


UNCLEAR = {
    "another system message": (QUESTION, [SYSTEM | {"content": "Be brief."}, USER]),
    "system message after the question": ([USER], [SYSTEM, OTHER]),
    "last question alone": (EARLIER, [OTHER]),
    "question after another one": ([OTHER], EARLIER),
    "question again": (EARLIER[:2], [USER, *answer("Salt."), OTHER]),
    "other words": ([USER], [USER | {"content": "Q: What is the sea?"}]),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_may_be_the_prompt_again_is_dropped(plain, case):
    prompt, before = UNCLEAR[case]
    _, counts = tokenize_pairs(pairs(EXPLICIT, pair_of(prompt, before)), plain, 512)
    assert counts["kept"] == 1 and counts["different prompts"] == 1
    rows = [{"prompt": p, "completion": b + answer("Rain.")} for p, b in ((QUESTION, []), (prompt, before))]
    _, counts = tokenize_completions(demonstrations(*rows), plain, 512)
    assert counts == {"rows": 2, "kept": 1, "no completion": 1}


def test_unusable_conversations_are_counted(plain):
    demos = [{"completion": QUESTION + answer("a")}, {"completion": QUESTION}, {"completion": answer("a")}]
    kept, counts = tokenize_completions(demonstrations(*demos), plain, 512)
    assert counts == {"rows": 3, "kept": 1, "no completion": 2}
    assert plain.decode(kept["completion_ids"][0]) == "a<eos>"
    rows = [
        pair_of(None, QUESTION),
        {"chosen": QUESTION + answer("a"), "rejected": QUESTION[1:] + answer("b")},
        {"chosen": answer("a"), "rejected": answer("b")},
        {"chosen": QUESTION, "rejected": QUESTION},
        {"chosen": [*QUESTION, {"role": "expert", "content": "a"}], "rejected": QUESTION + answer("b")},
        EXPLICIT | {"chosen": answer(" ")},
    ]
    _, counts = tokenize_pairs(pairs(*rows), plain, 512)
    assert counts["kept"] == 1 and counts["different prompts"] == 1
    assert counts["no common prompt"] == counts["empty response"] == 1
    assert counts["last message not from assistant"] == 2


def test_texts_and_conversations_in_one_dataset(plain, pair_rows):
    rows = [*pair_rows(2), EXPLICIT, *pair_rows(1)]
    mixed, counts = tokenize_pairs(pairs(*rows), plain, 512)
    alone, _ = tokenize_pairs(pairs(EXPLICIT), plain, 512)
    assert counts["kept"] == 4 and mixed["prompt_ids"][0][0] == plain.bos_token_id
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert mixed[name][2] == alone[name][0]


def test_errors(tokenizer):
    rows = pairs(EXPLICIT)
    for template, said in (
        (None, "has no chat template"),
        (
            "{{ raise_exception('no system role') }}",
            r"refuses the roles .*'user'.*no system role.* The row is '",
        ),
        ("{{ messages|length }}", "another way once its response follows"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=said):
            tokenize_pairs(rows, tokenizer, 512)
    [clean] = demonstrations({"completion": QUESTION + answer("Rain."), "augmented_prompt": QUESTION})
    assert clean["unread"] == "augmented_prompt", "what is not read may hold anything"
    said = "test, row 1: 'chosen' is a text, but 'augmented_prompt' is a list of chat messages; write both"
    with pytest.raises(UserError, match=said):
        pairs({"augmented_prompt": QUESTION, "chosen": "a", "rejected": "b"})


CALL = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "Says how high the sea is."}}]
TOOL_TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m['role'] }}]"
    "{% if m.reasoning_content and (keep is not defined or keep) %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% if m.content is string %}{{ m.content }}{% elif m.content is not none %}BROKEN{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.tool_call_id }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [
    *QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "High.", "tool_call_id": "1"},
]
ANSWERS = {
    "text": answer("High."),
    "reasoning": [{"role": "assistant", "content": "High.", "reasoning_content": "The tool says so."}],
    "call": [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "call beside a text": [{"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}],
}


@pytest.mark.parametrize("kwargs", [None, {"keep": False}])
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "text"])
def test_all_that_the_template_reads(tokenizer, tmp_path, write_rows, kind, ending, kwargs):
    tokenizer.chat_template = TOOL_TEMPLATE
    row = {"prompt": TALK, "chosen": ANSWERS[kind], "rejected": answer("Low."), "tools": TOOLS}
    row |= {"chat_template_kwargs": kwargs}
    rows = [row | {"id": "a"}, EXPLICIT | {"id": "b"}]
    if ending == "text":
        rows[0] |= {name: json.dumps(row[name]) for name in row}
    path = write_rows(rows)
    if ending == "parquet":
        path = str(tmp_path / "rows.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    kept, _ = tokenize_pairs(read_preferences(path), tokenizer, 1024)
    options = {"tools": TOOLS, "tokenize": False, **(kwargs or {})}
    whole = tokenizer.apply_chat_template(TALK + ANSWERS[kind], **options).rstrip()
    found = tokenizer.decode(kept["prompt_ids"][0] + kept["chosen_ids"][0])
    assert found.removesuffix("<eos>").rstrip() == whole
    start = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, **options)
    assert tokenizer.decode(kept["prompt_ids"][0]) == start
    view = tokenizer.decode(kept["augmented_ids"][0] or kept["prompt_ids"][0])
    assert view.startswith("[tools]") and "tool_call" not in view and '"tide"' in view
    assert "[tools]" not in tokenizer.decode(kept["prompt_ids"][1])
    data = {"prompt": TALK, "completion": ANSWERS[kind], "tools": TOOLS, "chat_template_kwargs": kwargs}
    sft, _ = tokenize_completions(demonstrations(data), tokenizer, 1024)
    assert sft["completion_ids"][0] == kept["chosen_ids"][0] and sft["prompt_ids"][0] == kept["prompt_ids"][0]


def test_prompts_to_answer(tokenizer, tmp_path, write_rows, caplog):
    """Through the datamodule: rendered, with their tools, and as the rows have them."""
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_rows([pair_of(TALK) | {"tools": tools} for tools in (TOOLS, TOOLS, None)])
    data = PreferenceDataModule(Files(path, path), str(tmp_path / "tokenizer"), global_batch_size=2)
    (found,) = list(data.predict_dataloader())
    expected = [
        tokenizer.apply_chat_template(TALK, tools=tools, tokenize=False, add_generation_prompt=True)
        for tools in (TOOLS, None)
    ]
    order = [expected.index(prompt) for prompt in found.prompts]
    assert sorted(order) == [0, 1] and found.asked == [TALK, TALK]
    assert [found.columns[order.index(i)] for i in (0, 1)] == [{"tools": TOOLS}, {}]
    for prompt, ids, mask in zip(found.prompts, found.input_ids, found.attention_mask, strict=True):
        assert tokenizer.decode(ids[mask == 1]) == prompt
    source = Prompts(write_rows([{"prompt": "Hi"}], "texts.jsonl"))
    (found,) = PreferenceDataModule(source, str(tmp_path / "tokenizer")).predict_dataloader()
    assert found.prompts == ["Hi"] and "texts.jsonl are texts, read without the chat template" in caplog.text


def test_what_is_not_read_is_named(tokenizer, write_rows, caplog):
    tokenizer.chat_template = TURNS
    chat = EXPLICIT | {"chosen": ANSWERS["reasoning"], "tools": TOOLS, "images": ["a"], "margin": 1.5}
    chat["label"] = "Tie (bothbad)"
    text = {"prompt": "a", "chosen": " b", "rejected": " c", "tools": TOOLS, "system": "s", "label": "tier1"}
    path = write_rows([chat, text])
    rows = read_preferences(path)
    columns = "images, label (in some rows), margin, system, tools (in some rows)"
    assert f"{path}: these columns are not read: {columns}." in caplog.messages
    tokens, _ = tokenize_pairs(rows, tokenizer, 512)
    said = token_warnings(tokenizer, rows, tokens, "train")
    assert any("does not read reasoning_content, tools of the rows" in line for line in said)


BAD_MESSAGES = [
    ([USER | {"role": "User"}, *answer("Rain.")], "'chosen' is .* the role 'User', but .*call it 'user'"),
    ([USER, {"role": "gpt", "content": "a"}], "the role 'gpt', but .*call it 'assistant'"),
    ([{"from": "human", "value": "a"}], "rename 'from' to 'role' and 'value' to 'content'"),  # ShareGPT
    ([USER | {"content": [{"type": "image"}]}], "part of content that is 'image'"),
    ([USER, {"role": "assistant", "content": None}], "two texts, 'role' and 'content'"),
    (json.dumps([{"role": "user", "content": 3}]), "two texts, 'role' and 'content'"),
    (
        "[{'content': 'a', 'role': 'user'}\n {'content': 'b', 'role': 'assistant'}]",  # as NumPy writes them
        "looks like a list of chat messages but cannot be read; write it as JSON",
    ),
    *((each, "but it must be a string, or a list of chat messages") for each in (USER, json.dumps(USER))),
    (json.dumps({"messages": QUESTION}), "but it must be a string, or a list"),
]


@pytest.mark.parametrize(("messages", "expected"), BAD_MESSAGES)
def test_bad_messages(messages, expected):
    with pytest.raises(UserError, match=f"^test, row 1: .*{expected}"):
        pairs({"chosen": messages, "rejected": messages})


@pytest.mark.parametrize("write", [json.dumps, repr, lambda messages: json.dumps(messages, indent=1)])
def test_messages_as_text(write):
    row = pair_of(QUESTION, QUESTION) | {"augmented_prompt": [USER | {"content": "The sea?"}]}
    [expected] = pairs(row)
    [found] = pairs(*[{name: write(value) for name, value in row.items()}])
    assert found == expected and found["chat"]
    [found] = pairs(row | {"chosen": write(row["chosen"])})
    assert found == expected, "one of them as text, the other as a list"
    texts = {"prompt": write(QUESTION), "chosen": "a", "rejected": "b"}
    for mixed in (row | {"chosen": write(row["chosen"]), "rejected": "No."}, texts):
        with pytest.raises(UserError, match="'chosen' is a text, but 'prompt' is a list of chat messages"):
            pairs(mixed)


def test_other_json_is_a_text():
    for text in ('[{"name": "tide"}]', "[1, 2]", "[see above]", '{"role": "admin"}', "[", "[" * 9999):
        [row] = pairs({"prompt": text, "chosen": text, "rejected": "b"})
        assert (row["prompt"], row["chosen"], row["chat"]) == (text, text, False)


def test_parts_and_odd_characters_of_a_text():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "the sea?", "image": None}]
    odd = {"role": "user", "content": 'quotes " and \n lines \\ and émoji 🌊', "name": "x", "weight": None}
    [found] = pairs(pair_of([SYSTEM, odd, *answer("Yes."), USER | {"content": parts}]))
    expected = [SYSTEM, {name: odd[name] for name in ("role", "content", "name")}, *answer("Yes."), USER]
    assert decode_messages(found["prompt"]) == expected


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("tools", value, "list of JSON schemas") for value in ("[{", {"name": "tide"}, 3)),
        ("chat_template_kwargs", [1], "an object with arguments of the chat template"),
        ("chat_template_kwargs", "no", "an object with arguments of the chat template"),
        ("chat_template_kwargs", {"tokenize": True}, "without add_generation_prompt, .*tokenize"),
    ],
)
def test_bad_tools_and_arguments(name, value, said):
    with pytest.raises(UserError, match=f"row 1: '{name}' is .*{said}"):
        pairs(EXPLICIT | {name: value})
