"""Tiny Marian models that really translate: trained on the spot to write every English word as a Chinese one.

Words of one meaning share a Chinese word, whose way back is the first of them, so what a back-translation of
a sentence must give is known: ``back_and_forth``. The forward model has two target languages, as the real one
has: it is trained with ``>>cmn_Hans<<`` only and would be at a loss without.
"""

import json
import random
import re

import pytest
import sentencepiece
import torch
from filelock import FileLock
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from pacmr_lightning.embedded_world import MOODS, TOPICS, World

_OTHERS = (
    "Describe the in a mood : . ? , What/Which is/was I my best/finest book/novel lost/misplaced friend/pal"
)
MEANINGS = (*TOPICS, *MOODS, *(tuple(words.split("/")) for words in _OTHERS.split()))
_CHINESE = {word: chr(0x4E00 + 7 * i) for i, words in enumerate(MEANINGS) for word in words}
_FIRST = {word: words[0] for words in MEANINGS for word in words}
_PUNCTUATION = ":.?,"
_WORDS = [word for word in _CHINESE if word not in _PUNCTUATION]

POSITIONS = 24
LONGEST = 10
"""Words in a sentence that the models are trained on."""


def sentence(words):
    return re.sub(r" (?=[:.?,])", "", " ".join(words))


def back_and_forth(text):
    """What comes back of a text of known words: the first word of each meaning."""
    return sentence([_FIRST[word] for word in re.findall(r"\w+|[:.?,]", text)])


def random_words(rng):
    words = []
    for _ in range(rng.randint(1, LONGEST)):
        words += rng.choices(_WORDS) + (rng.choices(_PUNCTUATION) if rng.random() < 0.2 else [])
    return words[:LONGEST]


def _chinese(words):
    return "".join(_CHINESE[word] for word in words)


def _train_pieces(texts, path, kind, size):
    options = {"model_type": kind, "vocab_size": size, "character_coverage": 1.0, "hard_vocab_limit": False}
    options |= {"bos_id": -1, "minloglevel": 2}
    with path.open("wb") as file:
        train = sentencepiece.SentencePieceTrainer.train
        train(sentence_iterator=iter(texts), model_writer=file, **options)


def _tokenizer(folder, source, target, codes):
    vocabulary = ["</s>", "<unk>"]
    for path in (source, target):
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
        vocabulary += [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
    vocabulary += [*codes, "<pad>"]
    file = folder / "vocabulary.json"
    file.write_text(json.dumps({piece: i for i, piece in enumerate(dict.fromkeys(vocabulary))}))
    return MarianTokenizer(str(source), str(target), str(file), model_max_length=POSITIONS)


def _model_for(tokenizer):
    options = {"vocab_size": len(tokenizer), "d_model": 64, "max_position_embeddings": POSITIONS}
    for side in ("encoder", "decoder"):
        options |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 128}
    options |= dict.fromkeys(("pad_token_id", "decoder_start_token_id"), tokenizer.pad_token_id)
    options |= dict.fromkeys(("eos_token_id", "forced_eos_token_id"), tokenizer.eos_token_id)
    return MarianMTModel(MarianConfig(**options, dropout=0.0, scale_embedding=True, init_std=0.1))


def _train(model, tokenizer, source, target):
    """Trains on random sentences, until no prompt of the world is translated wrongly."""
    rng = random.Random(1)
    prompts = [re.findall(r"\w+|[:.?,]", prompt) for prompt in World().prompts()]

    def inputs(batch):
        texts, targets = ([write(words) for words in batch] for write in (source, target))
        found = tokenizer(texts, text_target=targets, padding=True, return_tensors="pt")
        found["labels"][found["labels"] == tokenizer.pad_token_id] = -100
        return found

    for steps in (280, 120, 120, 120, 120):
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.15)
        for _ in range(steps):
            model(**inputs([random_words(rng) for _ in range(32)])).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        asked = inputs(prompts)
        with torch.no_grad():
            found = model(**asked).logits.argmax(-1)
        if (found == asked["labels"])[asked["labels"] != -100].all():
            break
    model.eval()


def train_translators(folder):
    """Writes the models ``en-zh`` and ``zh-en`` into a folder (seconds on one core)."""
    rng = random.Random(0)
    sample = [random_words(rng) for _ in range(2000)]
    english, chinese = folder / "english.spm", folder / "chinese.spm"
    _train_pieces([sentence(words) for words in sample], english, "unigram", 200)
    _train_pieces([_chinese(words) for words in sample], chinese, "char", 100)
    forward = _tokenizer(folder, english, chinese, [">>cmn_Hans<<", ">>cmn_Hant<<"])
    backward = _tokenizer(folder, chinese, english, [])
    for name, seed, tokenizer, source, target in (
        ("en-zh", 0, forward, lambda words: ">>cmn_Hans<< " + sentence(words), _chinese),
        ("zh-en", 1, backward, _chinese, lambda words: back_and_forth(sentence(words))),
    ):
        torch.manual_seed(seed)
        model = _model_for(tokenizer)
        _train(model, tokenizer, source, target)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@pytest.fixture(scope="session")
def translators(tmp_path_factory):
    """Folders of the forward and the backward model, trained once for all processes of the tests."""
    shared = tmp_path_factory.getbasetemp()
    if shared.name.startswith("popen-"):  # of one of xdist's processes
        shared = shared.parent
    folder = shared / "translators"
    with FileLock(shared / "translators.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            train_translators(folder)
            (folder / "done").touch()
    return str(folder / "en-zh"), str(folder / "zh-en")
