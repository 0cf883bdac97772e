"""``tokenization: openrlhf`` beside OpenRLHF's rules, written here with the tokenizer alone."""

import json

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from pacmr_lightning import cli
from pacmr_lightning.datamodules import CompletionFiles, SFTDataModule
from pacmr_lightning.datamodules.tokenization import tokenize_completions, tokenize_pairs
from pacmr_lightning.errors import UserError
from pacmr_lightning.runs.finished_run import find_run, load_run

from ..conftest import files, quiet_trainer, read_lines, short_fit, write_lines
from .checked_rows import demonstrations, pairs
from .test_tokenizer_families import CHATML, FAMILIES, build

PROMPT = "Name a colour.\nAnswer:"
ENDS = [" blue.", " blue.\n\n", " blue. ", " calm sea</s>", " calm sea</s>\n", " a </s> colour"]

SPANNING = ("Metaspace always, not split", "Prepend")
"""Tokenizers of which a token may span prompt and response, here a colon and a space."""


def of_openrlhf(tokenizer, prompt, response, max_length):
    """Ids by OpenRLHF's rules, and how many are the prompt's; None if the row is dropped."""
    count = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    text = f"{prompt}{response}".rstrip("\n")
    if not text.endswith(tokenizer.eos_token):
        text += f" {tokenizer.eos_token}"
    ids = tokenizer(text, truncation=True, max_length=max_length, add_special_tokens=False)["input_ids"]
    return None if count >= max_length - 2 else ([*ids[:-1], tokenizer.eos_token_id], count)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts(family):
    tokenizer = build(family)
    rows = [{"prompt": PROMPT, "chosen": end, "rejected": " so many words"} for end in ENDS]
    rows += [row | {"prompt": "<s>" + row["prompt"]} for row in rows]
    found, _ = tokenize_pairs(pairs(*rows), tokenizer, 100, tokenization="openrlhf")
    answers = demonstrations(*(row | {"completion": row["chosen"]} for row in rows))
    sft, _ = tokenize_completions(answers, tokenizer, 100, "openrlhf")
    for row, ids, demo in zip(rows, found, sft, strict=True):
        for side in ("chosen", "rejected"):
            whole, count = of_openrlhf(tokenizer, row["prompt"], row[side], 100)
            if whole[:count] != ids["prompt_ids"]:  # OpenRLHF's mask begins inside of the response
                assert family in SPANNING
                assert tokenizer.decode(whole) == tokenizer.decode(ids["prompt_ids"] + ids[f"{side}_ids"])
            else:
                assert ids[f"{side}_ids"] == whole[count:], row
        assert (demo["prompt_ids"], demo["completion_ids"]) == (ids["prompt_ids"], ids["chosen_ids"])


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_messages(eos):
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    tokenizer = build("byte level", template="{{ bos_token }}" + CHATML, special=special)
    tokenizer.eos_token = eos
    asked = [{"role": "user", "content": "a sea?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("calm", "blue\n")]
    row = dict(zip(("prompt", "chosen", "rejected"), (asked, *answers), strict=True))
    [found], _ = tokenize_pairs(pairs(row), tokenizer, 300, tokenization="openrlhf")
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    for side, answer in zip(("chosen", "rejected"), answers, strict=True):
        whole = tokenizer.apply_chat_template(asked + answer, tokenize=False)
        expected = of_openrlhf(tokenizer, prompt, whole.removeprefix(prompt), 300)
        assert (found["prompt_ids"] + found[f"{side}_ids"], len(found["prompt_ids"])) == expected


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 50])
def test_lengths(room):
    """Prompts that leave less than three tokens are dropped; responses are cut, and the last token is EOS."""
    tokenizer = build("Metaspace first")
    row = {"prompt": PROMPT, "chosen": " blue", "rejected": " so many words of a sea"}
    max_length = room + len(tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    expected = [of_openrlhf(tokenizer, PROMPT, row[side], max_length) for side in ("chosen", "rejected")]
    if expected[0] is None:
        assert room < 3
        with pytest.raises(UserError, match="1 too long"):
            tokenize_pairs(pairs(row), tokenizer, max_length, tokenization="openrlhf")
        return
    [found], counts = tokenize_pairs(pairs(row), tokenizer, max_length, tokenization="openrlhf")
    for side, (ids, count) in zip(("chosen", "rejected"), expected, strict=True):
        assert (found["prompt_ids"] + found[f"{side}_ids"], len(found["prompt_ids"])) == (ids, count)
    assert counts.get("cut responses", 0) == (room < 50)


LENGTH = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    """Folder of SFT and DPO of a tiny model with the option; each pair and one row have a response to cut."""
    folder = tmp_path_factory.mktemp("openrlhf")
    model = tiny_llama(folder / "model", initializer_range=0.2)
    rows = [
        {"id": str(i), "prompt": f"What is {i}?", "chosen": f" It is {i}\n", "rejected": f" I do {i}" * 30}
        for i in range(12)
    ]
    for row in rows:
        row["completion"] = row["rejected" if row is rows[0] else "chosen"]
    path = write_lines(folder / "rows.jsonl", rows)
    rules = f"--data.tokenization openrlhf --data.max_length {LENGTH} --trainer.max_steps 3"
    sft = f"""fit --model SFTModule --model.model {model} --model.learning_rate 0.01 --data SFTDataModule
        --data.source CompletionFiles --data.source.train {path} --data.source.validation {path}
        --data.tokenizer {model} --data.batch_size 4 --trainer.accelerator cpu
        --trainer.enable_progress_bar false --trainer.default_root_dir {folder}/sft {rules}"""
    cli.main(sft.split())
    dpo = f"""{files(path)} --data.global_batch_size 4 --model.learning_rate 0.05 --model.max_new_tokens 2
        --trainer.default_root_dir {folder}/run {rules}"""
    cli.main(short_fit(f"{folder}/sft/model", dpo))
    return folder


def test_sft(folder, tmp_path):
    path = f"{folder}/rows.jsonl"
    options = {"tokenizer": f"{folder}/model", "max_length": LENGTH, "batch_size": 4}
    data = SFTDataModule(CompletionFiles(path, path), tokenization="openrlhf", **options)
    data.trainer = quiet_trainer(tmp_path)
    data.setup("fit")
    found = []
    for batch in data.val_dataloader():
        for ids, mask, labels in zip(*(batch[name] for name in batch), strict=True):
            found.append((ids[mask == 1].tolist(), int((labels[mask == 1] == -100).sum())))
    rows = read_lines(path)
    assert found == [of_openrlhf(data.tokenizer, row["prompt"], row["completion"], LENGTH) for row in rows]
    trained = torch.load(folder / "sft/checkpoints/last.ckpt", weights_only=True)["options"]["training rows"]
    assert trained == data.fit_options()["training rows"]


def test_audit_predict_and_export_use_the_tokens_of_the_run(folder, capsys):
    """u of the audit is that of both models, as transformers has them, on OpenRLHF's tokens."""
    run, out = folder / "run", folder / "merged"
    tokenizer = load_run(find_run(str(run), "last"))[1].tokenizer
    cli.main(["export", str(run), str(out), "--merged"])
    # With the default rules no pair would fit.
    assert "of the policy's implicit margins are left" in " ".join(capsys.readouterr().err.split())
    assert "return_token_type_ids=False, add_special_tokens=False)" in (out / "README.md").read_text()
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (out, folder / "sft/model")]

    def margin(row):
        total = 0.0
        for side, sign in (("chosen", 1), ("rejected", -1)):
            ids, count = of_openrlhf(tokenizer, row["prompt"], row[side], LENGTH)
            tokens = torch.tensor(ids)
            for model, own in zip(models, (1, -1), strict=True):
                with torch.no_grad():
                    log_probs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
                total += sign * own * log_probs.gather(1, tokens[1:, None])[count - 1 :].sum().item()
        return 0.1 * total

    rows = read_lines(folder / "rows.jsonl")
    cli.main(["audit", str(run), "--scorer", "policy"])
    table = pd.read_parquet(run / "audit/pairs.parquet").set_index("id")["u"]
    expected = [margin(row) for row in rows]
    assert max(map(abs, expected)) > 0.1
    assert table.loc[[row["id"] for row in rows]].tolist() == pytest.approx(expected, abs=1e-4)
    words = f"inspect --source Files --source.train {folder}/rows.jsonl --tokenizer {folder}/model"
    words += f" --max_length {LENGTH} --tokenization openrlhf --output {folder}/inspect.json"
    cli.main(words.split())
    splits = json.loads((folder / "inspect.json").read_text())["splits"].values()
    for counts in (split["counts"] for split in splits):
        assert counts["kept"] == counts["cut responses"] > 0
    cli.main(["predict", "--config", f"{run}/config.yaml", "--ckpt_path", f"{run}/checkpoints/last.ckpt"])
    lengths = {row["prompt"]: row["prompt_tokens"] for row in read_lines(run / "generations.jsonl")}
    assert lengths == {row["prompt"]: of_openrlhf(tokenizer, row["prompt"], "", LENGTH)[1] for row in rows}
