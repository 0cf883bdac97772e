import datasets
import pytest
from peft import LoraConfig
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from pacmr_lightning.datamodules.reading import read_preferences
from pacmr_lightning.datamodules.tokenization import prompt_tokens, response_tokens, tokenize_pairs
from pacmr_lightning.datamodules.tokenizer import load_tokenizer, train_tokenizer
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError

from .checked_rows import pairs


def test_one_token_may_be_bos_eos_and_padding(tokenizer):
    tokenizer.bos_token = tokenizer.pad_token = "<eos>"
    eos = tokenizer.eos_token_id
    names = [("<eos>", eos)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", "<eos> $A $B", names)
    row = {"prompt": "the sea<eos>", "chosen": " calm", "rejected": " rain<eos>"}
    kept, _ = tokenize_pairs(pairs(row), tokenizer, 50)
    assert tokenizer.decode(kept["prompt_ids"][0]) == "<eos>the sea<eos>"
    assert tokenizer.decode(kept["chosen_ids"][0]) == " calm<eos>"
    assert tokenizer.decode(kept["rejected_ids"][0]) == " rain<eos>"


def test_dropped_pairs_are_counted_by_reason(tokenizer):
    hh = "\n\nHuman: a\n\nAssistant:"
    rows = [
        {"prompt": "x", "chosen": " a", "rejected": " b"},
        {"prompt": "x", "chosen": "  \n", "rejected": " b"},
        {"prompt": "x", "chosen": " a", "rejected": "<eos>"},
        {"prompt": "x", "chosen": " a", "rejected": " a"},
        {"prompt": "x", "chosen": " a", "rejected": " a<eos>"},
        {"prompt": "x", "chosen": " a", "rejected": " b" * 50},
        {"chosen": hh + " a", "rejected": hh + hh + " a"},
        {"chosen": "\n\nHuman: yes", "rejected": "\n\nHuman: no"},
        {"chosen": hh + " a", "rejected": hh},
    ]
    kept, counts = tokenize_pairs(pairs(*rows), tokenizer, 40)
    assert kept["chosen_ids"][:] == response_tokens(tokenizer, ["x"], [" a"])
    once = dict.fromkeys(("different prompts", "no common prompt", "no augmented prompt"), 1)
    assert counts == {"rows": 9, "kept": 1, "too long": 1, "empty response": 3, "equal responses": 2} | once


def test_empty_prompt_is_dropped_only_without_bos(tokenizer):
    rows = pairs({"prompt": "", "chosen": "a", "rejected": "b"})
    assert tokenize_pairs(rows, tokenizer, 10)[1]["kept"] == 1
    tokenizer.add_bos_token = False
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match="1 empty prompt"):
        tokenize_pairs(rows, tokenizer, 10)


def test_augmented_prompts(tokenizer):
    given = {"prompt": "I do not know", "chosen": " a", "rejected": " b"}
    rows = [
        given | {"augmented_prompt": "No idea"},
        given,
        given | {"augmented_prompt": given["prompt"]},
        given | {"augmented_prompt": "very long " * 20},
        given | {"prompt": "Name it"},
        given | {"augmented_prompt": " "},
    ]
    kept, counts = tokenize_pairs(pairs(*rows), tokenizer, 60)
    assert kept["has_augmented_prompt"][:] == [True, True, False, False, False, True]
    assert kept["augmented_ids"][:2] == prompt_tokens(tokenizer, ["No idea", "I don't know"], [False] * 2)
    assert kept["augmented_ids"][2:] == [[], [], [], kept["augmented_ids"][1]]
    assert (counts["kept"], counts["no augmented prompt"]) == (6, 3)


SECOND_PROCESS = """
import os, sys
from huggingface_hub import constants
constants.HF_HUB_OFFLINE = not constants.HF_HUB_OFFLINE
from pacmr_lightning.datamodules.reading import read_preferences
from pacmr_lightning.datamodules.tokenization import tokenize_pairs
from pacmr_lightning.datamodules.tokenizer import load_tokenizer, train_tokenizer
tokenizer = load_tokenizer(sys.argv[2])
tokenizer(["used", "before"], padding=True)
assert os.environ.get("PYTHONHASHSEED", "random") != "random" or hash("prompt") != int(sys.argv[3])
kept, counts = tokenize_pairs(read_preferences(sys.argv[1]), tokenizer, 100)
print(counts["kept"])
print(train_tokenizer(["the sea is calm, and so is the rain"], 300).backend_tokenizer.to_str())
"""


def test_second_process_reads_the_cache_and_trains_the_same_tokenizer(
    write_rows, pair_rows, tokenizer, tiny_tokenizer_folder, tmp_path, monkeypatch, forked
):
    path, cache = write_rows(pair_rows(20)), tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)

    def run(max_length):
        assert tokenize_pairs(read_preferences(path), tokenizer, max_length)[1]["kept"] == 20
        return {str(file): file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}

    first = run(100)
    assert len(first) == 2
    words = (path, tiny_tokenizer_folder, hash("prompt"))
    output, errors = forked(SECOND_PROCESS, *words, HF_DATASETS_CACHE=str(cache)).communicate()
    trained = train_tokenizer(["the sea is calm, and so is the rain"], 300).backend_tokenizer.to_str()
    assert output.splitlines() == ["20", trained], errors
    assert run(100) == first
    assert len(run(99)) == 3


def test_tokenizers_that_lack_something(tmp_path, tokenizer):
    """Without padding it is EOS; others cannot be loaded."""
    with pytest.raises(UserError, match=r"tokenizer is .*, which AutoTokenizer cannot load") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "no-pad")
    loaded = load_tokenizer(str(tmp_path / "no-pad"))
    assert loaded.pad_token_id == loaded.eos_token_id
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no-eos")
    with pytest.raises(UserError, match="has no EOS"):
        load_tokenizer(str(tmp_path / "no-eos"))


OWN, BASES = "{{ 'own' }}", "{{ 'base' }}"


@pytest.mark.parametrize(
    ("own", "base", "expected", "said"),
    [
        (OWN, BASES, OWN, "'s own tokenizer and chat template are used, not those of its base"),
        (None, BASES, BASES, "'s own tokenizer is used, with the chat template of its base"),
        ("no tokenizer", BASES, BASES, "has no tokenizer; that of its base"),
    ],
)
def test_whose_tokenizer_an_adapter_has(own, base, expected, said, tokenizer, tmp_path, caplog):
    tokenizer.chat_template = base
    tokenizer.save_pretrained(tmp_path / "base")
    LoraConfig(base_model_name_or_path=str(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    if own != "no tokenizer":
        tokenizer.add_tokens(["own"])
        tokenizer.chat_template = own
        tokenizer.save_pretrained(tmp_path / "adapter")
    # An adapter on an adapter has what that one has.
    LoraConfig(base_model_name_or_path=str(tmp_path / "adapter")).save_pretrained(tmp_path / "second")
    for folder in (tmp_path / "adapter", tmp_path / "second"):
        found = load_tokenizer(folder)
        assert found.chat_template == expected
        assert ("own" in found.get_vocab()) == (own != "no tokenizer")
        assert said in caplog.text and str(tmp_path / "base") in caplog.text
        caplog.clear()


TEXTS = [text for row in World().sft_rows(500, 0) for text in row.values()]
HARD = [
    "Describe the ocean in a calm mood:",
    " bright cold deep wild",
    "  two leading spaces, one trailing ",
    "Don 't tidy , this up . I 'm n't",
    "line\n\n\tbreaks\r\n and é, ﬁ, 漢字, 🙂, \u200b, \u0301",
    "",
]


def test_the_trained_tokenizer(tmp_path):
    trained = train_tokenizer(TEXTS, vocab_size=420)
    trained.save_pretrained(tmp_path)
    for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path)):
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")
        for text in HARD:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
        frequent = tokenizer(" bright cold deep wild", add_special_tokens=False)["input_ids"]
        assert len(frequent) == 4 and len(tokenizer) <= 420


def test_a_vocabulary_that_cannot_hold_all_bytes():
    with pytest.raises(UserError, match=r"vocab_size is 258, but .* at least 259"):
        train_tokenizer(TEXTS, vocab_size=258)
    assert len(train_tokenizer(TEXTS, vocab_size=259)) == 259
