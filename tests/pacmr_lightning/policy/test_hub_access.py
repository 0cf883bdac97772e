"""The Hub without a connection: no retries, one sentence, and the cached copy where there is one."""

import socket
import time

import datasets
import pytest
from huggingface_hub import constants
from transformers import AutoConfig, LlamaConfig

from pacmr_lightning.datamodules.hub import load_split
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy.base_model import is_adapter
from pacmr_lightning.policy.hub_access import locate, unreachable

from ...local_server import LocalHandler, LocalServer
from .test_base_model import put_on_hub


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    unreachable.cache_clear()
    yield
    unreachable.cache_clear()


@pytest.fixture
def nobody(monkeypatch):
    """An address where nothing listens."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port.getsockname()[1]}")
        yield


@pytest.mark.parametrize("load", [load_tokenizer, is_adapter, lambda name: load_split(name, "train")])
def test_without_a_connection_it_ends_at_once(load, nobody, tmp_path):
    (tmp_path / "tiny-llama").mkdir()
    start = time.monotonic()
    with pytest.raises(
        UserError, match=r"tiny-lama cannot be loaded: there is no such folder, no copy"
    ) as said:
        load("tiny-lama")
    assert time.monotonic() - start < 5  # huggingface_hub's own retries take 25 s per file
    assert "127.0.0.1" in str(said.value) and str(said.value).endswith("did you mean tiny-llama?")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./tiny-lama", "folder ./tiny-lama does not exist"),
        ("some/where/else", "folder some/where/else does not exist"),
        ("some/body", "and HF_HUB_OFFLINE is set; check the spelling"),
    ],
)
def test_paths_and_offline_on_purpose(name, said, monkeypatch):
    """Nothing is looked for on the Hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=said):
        locate(name)


def test_the_cached_copy_is_used(nobody, tmp_path, capsys, monkeypatch):
    LlamaConfig(hidden_size=64).save_pretrained(tmp_path / "model")
    name = put_on_hub(tmp_path / "model", tmp_path / "cache")
    start = time.monotonic()
    assert not is_adapter(name)
    assert AutoConfig.from_pretrained(name).hidden_size == 64
    assert time.monotonic() - start < 5
    assert "copies in its cache are used" in capsys.readouterr().err
    assert constants.HF_HUB_OFFLINE


def test_a_slow_hub_counts_as_reached(monkeypatch):
    class Slow(LocalHandler):
        def do_HEAD(self):
            time.sleep(0.5)

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    with LocalServer(Slow) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        assert locate("some/body") == "some/body" and not constants.HF_HUB_OFFLINE
