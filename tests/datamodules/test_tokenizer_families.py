"""A pair's tokens over families of tokenizers and chat templates: those of the whole text, as in TRL."""

from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pacmr_lightning.datamodules.tokenization import response_tokens, tokenize_pairs
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.generation import decode_response
from pacmr_lightning.policy.chat_template import end_tokens, render, template_warnings

from .checked_rows import pairs

CORPUS = ["Name a colour of the sea. The sea is blue and calm.", "Human: a sea?\n\nAssistant: blue.\n"] * 20
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def metaspace(scheme, split=True):
    options = {"prepend_scheme": scheme, "split": split}
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**options)
    tokenizer.decoder = decoders.Metaspace(**options)
    return tokenizer, trainers.BpeTrainer


def unigram():
    tokenizer = metaspace("always")[0]
    tokenizer.model = models.Unigram()
    return tokenizer, lambda **options: trainers.UnigramTrainer(unk_token="<unk>", **options)


def prepend():
    """As in Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer, trainers.BpeTrainer


def byte_level(add_prefix_space):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, lambda **options: trainers.BpeTrainer(initial_alphabet=alphabet, **options)


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer


FAMILIES = {
    **{f"Metaspace {scheme}": partial(metaspace, scheme) for scheme in ("always", "first", "never")},
    "Metaspace always, not split": partial(metaspace, "always", split=False),
    **{"Unigram": unigram, "Prepend": prepend, "WordPiece": word_piece},
    "byte level": partial(byte_level, False),
    "byte level with a prefix space": partial(byte_level, True),
}


def build(family, added="<s> $A", template=None, special=SPECIAL):
    tokenizer, trainer_of = FAMILIES[family]()
    trainer = trainer_of(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(added, f"{added} $B", marks)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


TEXTS = [
    ("Name a colour.\nAnswer:\n", "blue.", "calm."),
    ("Name a colour.\nAnswer:", " blue.", " calm."),
    ("Name a colour. ", "blue.", "calm."),
    ("Name a colour.\n", "\nblue.", "\n\ncalm."),
    ("The se", "a is calm", "as are blue"),
    ("Name a colour.</s>", "blue.</s>", "calm."),
    ("Human: a sea?\n\nAssistant:", "  calm sea", " a colour"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("added", ["<s> $A", "$A", "$A </s>", "<s> $A </s>"])
def test_texts(family, added):
    tokenizer, sides = build(family, added), ("chosen", "rejected")
    # WordPiece writes the rest of a word in other tokens than a word.
    texts = [each for each in TEXTS if family != "WordPiece" or each[0] != "The se"]
    rows = [dict(zip(("prompt", *sides), each, strict=True)) for each in texts]
    for row, found in zip(rows, tokenize_pairs(pairs(*rows), tokenizer, 100)[0], strict=True):
        whole_ids = []
        for side in sides:
            whole = tokenizer(row["prompt"] + row[side].removesuffix("</s>") + "</s>")["input_ids"]
            whole_ids.append(whole[:-1] if added.endswith("</s>") else whole)
            ids = found["prompt_ids"] + found[f"{side}_ids"]
            assert tokenizer.decode(ids) == tokenizer.decode(whole_ids[-1]), row
            assert [i for i in found[f"{side}_ids"] if i == tokenizer.eos_token_id] == ids[-1:], row
        if all(ids[: len(found["prompt_ids"])] == found["prompt_ids"] for ids in whole_ids):
            # No token spans the boundary: the ids are the same, too.
            assert [found["prompt_ids"] + found[f"{side}_ids"] for side in sides] == whole_ids, row
        if added == "<s> $A" and family != "WordPiece" and not row["prompt"].endswith("</s>"):
            decoded = decode_response(tokenizer, found["prompt_ids"], found["chosen_ids"])
            assert decoded == row["chosen"], "as it was written"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)
MARK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>{% endif %}{{ m['content'] }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
# It begins an answer with an empty thought when it generates, and drops thoughts of a conversation.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NO_SYSTEM = CHATML.replace("messages %}", "messages if m['role'] != 'system' %}")
QUESTION = [{"role": "system", "content": "Be calm."}, {"role": "user", "content": "a colour?"}]


def chat_row(chosen="blue.", rejected="calm.", prompt=QUESTION):
    sides = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt} | {k: [{"role": "assistant", "content": v}] for k, v in sides.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("template", [CHATML, PLAIN, MARK, THINKING])
def test_conversations(family, template):
    tokenizer = build(family, template=template)
    [found] = tokenize_pairs(pairs(chat_row()), tokenizer, 300)[0]
    for side in ("chosen", "rejected"):
        messages = [*QUESTION, *chat_row()[side]]
        whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        ids = found["prompt_ids"] + found[f"{side}_ids"]
        # But for the newline after the end of the turn.
        assert whole[: len(ids)] == ids and not tokenizer.decode(whole[len(ids) :]).strip()
        assert ids[-1] == end_tokens(tokenizer)[0]


def test_marks_that_are_no_tokens():
    tokenizer = build("byte level", template=CHATML, special=["<s>", "</s>", "<unk>"])
    [found] = tokenize_pairs(pairs(chat_row()), tokenizer, 300)[0]
    assert tokenizer.decode(found["chosen_ids"]) == "blue.<|im_end|></s>"
    marks, end = template_warnings(tokenizer)
    assert "writes <|im_start|>, <|im_end|>, which the tokenizer splits into pieces" in marks
    assert "no end token after an answer; </s> is added to each response" in end


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("<|im_end|>", ["<|im_end|>", "<|im_end|>\n", "</s><|im_end|>", "<|im_end|></s>"]),
        ("</s>", ["", "</s>", "</s>\n", "</s></s>"]),
    ],
)
def test_one_end_token_of_several(expected, given):
    tokenizer = build("byte level", template=CHATML)
    found = response_tokens(tokenizer, ["a sea?\n"] * 4, [f"blue.{end}" for end in given])
    assert tokenizer.batch_decode(found) == [f"blue.{expected}"] * 4


def test_a_generation_prompt_that_conversations_lack():
    tokenizer = build("byte level", template=THINKING)
    start, response, left_out = render(tokenizer, QUESTION, {"role": "assistant", "content": "<b>blue.</b>"})
    assert start.endswith("<|im_start|>assistant\n") and response == "<b>blue.</b><|im_end|>"
    assert not left_out
    [sentence] = template_warnings(tokenizer)
    assert "<think>" in sentence and "prompts end where the two part" in sentence


@pytest.mark.parametrize("sides", [("<think>\nhm</think>4", "5"), ("4", "<think>\nhm</think>5")])
def test_one_response_that_begins_as_a_generation_prompt_ends(sides):
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    tokenizer = build("byte level", template=template)
    row = chat_row(*sides) | {"augmented_prompt": [{"role": "user", "content": "which colour?"}]}
    [found] = tokenize_pairs(pairs(row), tokenizer, 300)[0]
    for name, text in zip(("chosen", "rejected"), sides, strict=True):
        assert tokenizer.decode(found[f"{name}_ids"]) == f"{text}<|im_end|>"
    for name in ("prompt", "augmented"):
        assert tokenizer.decode(found[f"{name}_ids"]).endswith("<|im_start|>assistant\n")


def test_a_template_without_a_generation_prompt():
    tokenizer = build("byte level", template=CHATML.partition("{% if add_generation_prompt")[0])
    [found] = tokenize_pairs(pairs(chat_row()), tokenizer, 300)[0]
    assert tokenizer.decode(found["chosen_ids"]) == "<|im_start|>assistant\nblue.<|im_end|>"
    [sentence] = template_warnings(tokenizer)
    assert "ignores add_generation_prompt, so '<|im_start|>assistant' is learned" in sentence


def talk(answer="blue.", system="Be calm.", user="a colour?", **more):
    texts = {"system": system, "user": user, "assistant": answer}
    *prompt, last = ({"role": role, "content": text} for role, text in texts.items())
    return prompt, last | more


def only(condition):
    turns = "{% for m in messages %}{% if " + condition + " %}[{{ m.content }}]{% endif %}{% endfor %}"
    return turns + "{% if add_generation_prompt %}[{% endif %}"


THOUGHT = "<think>a sea</think>blue."


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (NO_SYSTEM, talk(), True),
        (THINKING, talk(THOUGHT), True),
        (PLAIN, talk("  blue. \n"), True),
        (CHATML, talk(THOUGHT), False),
        (CHATML, talk(" blue. \n"), False),
        (CHATML, talk(reasoning_content="of the sea"), True),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"), talk(), True),
        # A message that occurs in others.
        (only("m.role != 'system'"), talk("yes", "Be nice.", "nice"), True),
        (only("not loop.first"), talk("yes", "yes", "yes"), True),
        (only("loop.index > 2"), talk("Be calm. calm", "Be calm.", "calm"), True),
        (only("true"), talk("ab", "a", "b"), False),
    ],
)
def test_what_a_template_changes(template, messages, expected):
    assert render(build("byte level", template=template), *messages).changed == expected


def test_a_system_prompt_of_the_template_s_own():
    own = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe calm.<|im_end|>\n{% endif %}"
    for template, expected in ((own + CHATML, True), (CHATML, False), (NO_SYSTEM, False)):
        said = " ".join(template_warnings(build("byte level", template=template)))
        assert ("writes a system prompt of its own, 'Be calm.'" in said) == expected


def test_several_named_templates():
    tokenizer = build("byte level", template={"default": CHATML, "tool_use": PLAIN})
    assert tokenize_pairs(pairs(chat_row()), tokenizer, 300)[1]["kept"] == 1
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(UserError, match=r"multiple chat templates with no default.*\['rag'\]"):
        tokenize_pairs(pairs(chat_row()), tokenizer, 300)


@pytest.mark.parametrize("call", ["strftime_now('%d %b %Y')", "strftime_now(form)"])
def test_a_template_s_date_does_not_depend_on_the_day(call):
    date = "{% if strftime_now is defined %}{{ " + call + " }}\n{% endif %}"
    template = "{% set form = '%d %b %Y' %}" + date + CHATML
    tokenizer = build("byte level", template=template)
    [found] = tokenize_pairs(pairs(chat_row()), tokenizer, 300)[0]
    assert tokenizer.decode(found["prompt_ids"]).startswith("26 Jul 2024\n<|im_start|>system")
    said = "writes today's date; it is rendered as of 26 July 2024"
    assert any(said in sentence for sentence in template_warnings(tokenizer))
    assert tokenizer.chat_template == template
