"""Uploads to the Hub by its real client: one commit or none, and one sentence without the token."""

import traceback

import pytest
from huggingface_hub import constants

from pacmr_lightning.errors import UserError
from pacmr_lightning.runs.hub_upload import check_repository, push

KEPT = "The files are kept."


@pytest.fixture
def files(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A")
    (tmp_path / "a.safetensors").write_bytes(bytes(range(256)) * 99)
    return {name: tmp_path / name for name in ("README.md", "a.safetensors")}


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_files_arrive_in_one_commit(kind, hub, files):
    address = push(files, "me/mine", kind, private=True, kept=KEPT)
    assert address.endswith("/datasets/me/mine" if kind == "dataset" else "/me/mine")
    assert hub.files == {(kind, "me/mine"): {name: path.read_bytes() for name, path in files.items()}}
    assert hub.private == {(kind, "me/mine"): True} and hub.commits == 1
    files["README.md"].write_text("---\nlicense: mit\n---\n# B")
    push(files, "me/mine", kind, private=True, kept=KEPT)
    assert hub.files[kind, "me/mine"]["README.md"].endswith(b"# B") and hub.commits == 2


def test_a_public_repository_is_not_taken_for_a_private_one(hub, files):
    hub.make("me/mine")
    with pytest.raises(UserError) as stop:
        push(files, "me/mine", "model", private=True, kept=KEPT)
    assert str(stop.value) == (
        "me/mine cannot be uploaded to: it is there already, and public; leave --private out, or name "
        f"another repository. {KEPT}"
    )
    assert hub.files["model", "me/mine"] == {}
    push(files, "me/mine", "model", private=False, kept=KEPT)
    assert set(hub.files["model", "me/mine"]) == set(files)


def refused(files):
    with pytest.raises(UserError) as stop:
        push(files, "me/mine", "model", private=False, kept=KEPT)
    text = "".join(traceback.format_exception(stop.value))
    assert "hf_" not in text and "Bearer" not in text and "direct cause" not in text
    sentence = str(stop.value)
    assert sentence.startswith("me/mine cannot be uploaded to: ") and "\n" not in sentence
    assert sentence.endswith(f". {KEPT}") and not sentence.endswith(f".. {KEPT}")
    return sentence


@pytest.mark.parametrize(
    ("step", "status", "reason"),
    [
        ("create", 401, "the token is not valid"),
        ("create", 403, "may not write there"),
        ("preupload", 403, "may not write there"),
        ("preupload", 404, "no such repository"),
        ("put", 403, "may not write there"),
        ("commit", 500, "the Hub answered with status 500"),
    ],
)
def test_refusals(step, status, reason, hub, files):
    hub.refuse[step] = status
    assert reason in refused(files)
    assert hub.commits == 0 and not any(hub.files.values())
    hub.refuse.clear()
    push(files, "me/mine", "model", private=False, kept=KEPT)
    assert set(hub.files["model", "me/mine"]) == set(files), "it can be done again"


@pytest.mark.parametrize("token", ["hf_wrong", "hf_“quoted”"])
def test_a_wrong_token(token, hub, files, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    refused(files)
    assert hub.files == {}


def test_no_network(hub, files, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    refused(files)


def test_the_login_is_taken(hub, files, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="push is me/mine, but there is no token for the Hub"):
        check_repository("me/mine", "push")
    (tmp_path / "no-login").write_text(hub.token)
    check_repository("me/mine", "push")
    push(files, "me/mine", "model", private=False, kept=KEPT)
    assert hub.commits == 1


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/", "me/mi ne", "./mine", "me/a--b", ""])
def test_wrong_names(name, hub):
    with pytest.raises(UserError, match=r"push is .* is named OWNER/NAME"):
        check_repository(name, "push")
