"""The Hub without a connection: no retries, one sentence, and the cached copy where there is one."""

import shutil
import socket
import time

import datasets
import pytest
import torch
from huggingface_hub import constants

from pacmr_lightning.datamodules.hub import load_split
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy.base_model import adapter_base, is_adapter, load_base
from pacmr_lightning.policy.hub_access import locate, unreachable
from pacmr_lightning.policy.merged_adapters import compared_tokens

from ...local_server import LocalHandler, LocalServer
from .test_base_model import logits, lora, trained


@pytest.fixture(autouse=True)
def fresh(monkeypatch, inside):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(inside / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    unreachable.cache_clear()
    yield
    unreachable.cache_clear()


@pytest.fixture
def nobody(monkeypatch):
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port.getsockname()[1]}")
        yield


@pytest.mark.parametrize("load", [load_tokenizer, is_adapter, lambda name: load_split(name, "train")])
def test_without_a_connection_it_ends_at_once(load, nobody, tmp_path):
    (tmp_path / "tiny-llama").mkdir()
    start = time.monotonic()
    sentence = "tiny-lama cannot be loaded: there is no such folder, no copy"
    with pytest.raises(UserError, match=sentence) as said:
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
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=said):
        locate(name)


@pytest.mark.filterwarnings("ignore:Unable to fetch remote file")  # of a tokenizer, which it has none of
def test_the_cached_copy_is_used(nobody, tiny_llama, tmp_path, capsys):
    """Of an adapter, which is merged: transformers would load it beside its base."""
    base = tiny_llama(tmp_path / "base", initializer_range=0.3)
    expected = trained(base, tmp_path / "adapter", lora(target_modules=["q_proj", "v_proj"]))
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "pairs")
    for name in ("models--somebody--adapter", "models--somebody--base", "datasets--somebody--pairs"):
        repository = tmp_path / "cache" / name  # as the Hub's client keeps what it has downloaded
        shutil.copytree(tmp_path / name.split("--")[2], repository / "snapshots" / ("0" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
    start = time.monotonic()
    assert [row for _, row in load_split("somebody/pairs", "train").read(["prompt"])] == [{"prompt": "a"}]
    assert adapter_base("somebody/adapter") == base and not is_adapter("somebody/base")
    assert time.monotonic() - start < 5
    found = load_base("somebody/adapter", torch.float32)
    assert "copies in its cache are used" in capsys.readouterr().err
    assert constants.HF_HUB_OFFLINE and not hasattr(found, "peft_config")
    torch.testing.assert_close(logits(found), expected, atol=1e-4, rtol=1e-4)
    assert (logits(found) - logits(load_base("somebody/base", torch.float32))).abs().max() > 0.05
    with torch.device("meta"):  # Lightning makes a GPU torch's default while it is merged
        assert compared_tokens(found, [7]).device.type == "cpu"


def test_a_slow_hub_counts_as_reached(monkeypatch):
    class Slow(LocalHandler):
        def do_HEAD(self):
            time.sleep(0.5)

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    with LocalServer(Slow) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        assert locate("some/body") == "some/body" and not constants.HF_HUB_OFFLINE
