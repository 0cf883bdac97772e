"""Fixtures of all tests: nothing leaves the temporary folder, and a tokenizer that is trained on the spot."""

import os
import tempfile

# Before datasets is imported: it reads the variable once.
_CACHE = tempfile.TemporaryDirectory(prefix="pacmr-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from .forked import Process  # noqa: E402

WORDS = (
    "Describe the sea in a calm mood: What is the best of all books? I do not know it, because of the rain."
)

# No fixed deadline: a busy machine is no failure.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory):
    """A folder with a byte-level BPE tokenizer: it adds BOS, has EOS and PAD, and can encode any text."""
    from pacmr_lightning.datamodules.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([WORDS] * 20, vocab_size=300).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def forked():
    """Starts a process that runs code, as ``python -c`` does but without its imports; see forked.py."""
    started = []

    def start(code, *arguments, **options):
        started.append(Process(code, *arguments, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
