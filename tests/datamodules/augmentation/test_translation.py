"""Back-translation with tiny Marian models that really translate, so the right answers are known."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from pacmr_lightning.datamodules.augmentation import translator
from pacmr_lightning.datamodules.augmentation.rewriter import LIKE_FRAME, WORDLESS, Rewriting
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError

from ...conftest import stored
from .marian import POSITIONS, back_and_forth, random_words, sentence, translators  # noqa: F401


@pytest.fixture
def changed(translators, tmp_path):  # noqa: F811
    def copy(bias=None, generation=None, tokenizer=None):
        folder = tmp_path / "changed"
        shutil.copytree(translators[1], folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        place = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
        for token, value in (bias or {}).items():
            model.final_logits_bias[0, place(token)] = value
        model.generation_config.update(**(generation or {}))
        model.save_pretrained(folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | (tokenizer or {})))
        return str(folder)

    return copy


def rewrite(rewriter, pieces, folder):
    return rewriter.rewrite([[piece] for piece in pieces], Path(folder) / "answers.sqlite")


def test_batches_are_what_transformers_generates_for_one_sentence(translators, tmp_path):  # noqa: F811
    rng = random.Random(3)
    texts = list(dict.fromkeys(sentence(random_words(rng)) for _ in range(20)))
    expected = {text: text for text in texts}
    for folder, prefix in zip(translators, (">>cmn_Hans<< ", ""), strict=True):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        for text, there in expected.items():
            ids = tokenizer(prefix + there, return_tensors="pt")
            out = model.generate(**ids, num_beams=3, do_sample=False, max_new_tokens=POSITIONS - 1)
            expected[text] = tokenizer.decode(out[0], skip_special_tokens=True)
    found = rewrite(translator.BackTranslation(*translators, num_beams=3), texts, tmp_path)
    assert {text: result.text for text, result in found.items()} == expected


def test_the_target_language_is_asked_for(translators, tmp_path):  # noqa: F811
    rewriter = translator.BackTranslation(*translators)
    assert rewriter.settings["forward"]["prefix"] == ">>cmn_Hans<< "
    assert rewriter.settings["backward"]["prefix"] == ""
    other = translator.BackTranslation(*translators, forward_prefix=">>cmn_Hans<< Describe ")
    assert rewrite(other, ["the sea"], tmp_path)["the sea"].text == "Describe the ocean"
    assert rewrite(rewriter, ["the sea"], tmp_path)["the sea"].text == "the ocean"
    curly, straight = (f"I was {quote}lost{quote}" for quote in '“"')  # read alike
    found = rewrite(rewriter, [curly, straight], tmp_path)
    assert found[curly].text == found[straight].text != curly


def test_sentences_are_cut_to_what_the_model_reads(translators, tmp_path):  # noqa: F811
    rewriter = translator.BackTranslation(*translators)
    tokenizer = AutoTokenizer.from_pretrained(translators[0])
    clause = "What is the best book in a sad"
    text = f"{clause}, {clause}, {clause} {clause}. Describe the sea!"
    parts = rewriter.parts(text)
    pieces = [part.text for part in parts if part.content]
    assert "".join(part.text for part in parts) == text and len(pieces) == 5
    sizes = [len(tokenizer(f">>cmn_Hans<< {piece}")["input_ids"]) for piece in pieces]
    assert max(sizes) <= POSITIONS // 2
    found = rewrite(rewriter, pieces[:-1], tmp_path)
    assert [found[piece].text for piece in pieces[:-1]] == [back_and_forth(piece) for piece in pieces[:-1]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": {"</s>": 1e4}}, translator.EMPTY),
        ({"bias": {"▁sea": 1e4}}, translator.REPEATED),
        ({"bias": {"</s>": -1e4}, "generation": {"no_repeat_ngram_size": 1}}, translator.ENDLESS),
        ({"tokenizer": {"model_max_length": 6}}, translator.TOO_LONG),
    ],
)
def test_useless_translations_leave_the_piece_as_it_was(translators, changed, tmp_path, change, reason):  # noqa: F811
    piece = "Describe the sea in a calm mood:"
    rewriter = translator.BackTranslation(translators[0], changed(**change), num_beams=2)
    [result] = rewrite(rewriter, [piece], tmp_path).values()
    assert (result.text, result.kept) == (piece, reason)


def test_no_content_becomes_frame_or_loses_its_words():
    assert Rewriting.checked("People: hi", "Human: hi", None) == Rewriting("People: hi", LIKE_FRAME)
    assert Rewriting.checked("Human: oh", "Human: hi", None).text == "Human: hi"
    assert Rewriting.checked("hello", " hi ", None).text == "hi"
    assert Rewriting.checked("hello", " 42? ", None) == Rewriting("hello", WORDLESS)


def test_results_are_stored_by_all_that_changes_them(translators, tmp_path):  # noqa: F811
    folder = shutil.copytree(translators[1], tmp_path / "copy")

    prompts = World().prompts()

    def run(prompts=prompts[:10], **options):
        rewriter = translator.BackTranslation(translators[0], str(folder), **({"num_beams": 1} | options))
        found = rewrite(rewriter, prompts, tmp_path)
        return {piece: result.text for piece, result in found.items()}, stored(store), vars(rewriter.forward)

    store = tmp_path / "answers.sqlite"
    first, count, _ = run()
    again, same, loaded = run(batch_size=3)
    assert (again, same, count) == (first, 10, 10) and "model" not in loaded, "no model was needed"
    assert run(prompts[5:15])[1] == 15
    for number, options in enumerate(({"num_beams": 2}, {"dtype": "bfloat16"}, {"backward_prefix": "x "}), 1):
        assert run(**options)[1] == 15 + 10 * number
    # A folder is known by its content.
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    assert run()[1] == 55


def test_models_that_cannot_be_used(translators, tiny_llama, tmp_path):  # noqa: F811
    forward, backward = translators
    with pytest.raises(UserError, match=r"forward is '.*llama', a llama model, which does not translate"):
        _ = translator.BackTranslation(tiny_llama(tmp_path / "llama"), backward).settings
    # It has two target languages, and not that of the way back.
    said = r"backward is .* \(>>cmn_Hans<<, >>cmn_Hant<<\); choose one with backward_prefix"
    with pytest.raises(UserError, match=said):
        _ = translator.BackTranslation(forward, forward).settings
    other = translator.BackTranslation(forward, forward, backward_prefix=">>cmn_Hans<< ")
    assert other.settings["backward"]["prefix"] == ">>cmn_Hans<< "


@pytest.mark.slow
def test_without_sentencepiece(translators):  # noqa: F811
    script = (
        "import sys; sys.modules['sentencepiece'] = None;"
        "from pacmr_lightning.datamodules.augmentation.translator import BackTranslation;"
        "from pacmr_lightning.errors import UserError\n"
        "try: BackTranslation(*sys.argv[1:]).parts('Hello.')\n"
        "except UserError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script, *translators], capture_output=True, text=True)
    assert "requires the SentencePiece library" in found.stdout and "pacmr-lightning[augment]" in found.stdout
