"""Losses and gradients against TRL's DPOTrainer: same weights, same token rows, their forward and loss.

Ours take the road of a real run: PairBatch, PolicyModel, objective. TRL comes with the extra `oracle`; where
it is missing these tests are skipped, or fail if PACMR_REQUIRE_ORACLE=1 says that it has to be there.
"""

import importlib
import os
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from pacmr_lightning.batch import Segment
from pacmr_lightning.objectives import CDPO, DPO, IPO, RDPO
from pacmr_lightning.rewards import Rewards

EPS = 0.2
# TRL 1.16 ignores label_smoothing with "sigmoid". With s the sigmoid loss and r the robust one,
# cDPO = 2 (1 - eps) s - (1 - 2 eps) r: 2 (1 - eps) (-ls(u)) + (1 - eps) ls(u) - eps ls(-u).
ROBUST = {"loss_type": ["robust"], "label_smoothing": EPS}
MIXED = {"loss_type": ["sigmoid", "robust"], "loss_weights": [2 * (1 - EPS), -(1 - 2 * EPS)]}
CASES = {
    "dpo": (DPO, {"loss_type": ["sigmoid"]}),
    "rdpo": (partial(RDPO, label_noise=EPS), ROBUST),
    "ipo": (partial(IPO, length_normalize=True), {"loss_type": ["ipo"]}),
    "sft": (partial(DPO, sft_weight=0.7), {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}),
    "cdpo": (partial(CDPO, label_noise=EPS), MIXED | {"label_smoothing": EPS}),
}


@pytest.fixture(scope="module", autouse=True)
def oracle():
    if os.environ.get("PACMR_REQUIRE_ORACLE") == "1":
        importlib.import_module("trl")
    pytest.importorskip("trl", reason="TRL is not installed; pip install 'pacmr-lightning[oracle]'")


def trainer_of(policy, tokenizer, **options):
    """TRL's trainer with the policy's weights."""
    from trl import DPOConfig, DPOTrainer

    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}
    here = {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False}
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy.name, dtype=torch.float32),
        args=DPOConfig(**here, **options),
        # Tokenized when the trainer is made, and never used.
        train_dataset=Dataset.from_list([{"prompt": "What is", "chosen": " the sea", "rejected": " it"}]),
        processing_class=tokenizer,
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
    )
    theirs = trainable(trainer.model)
    ours = {name.removeprefix("peft."): p for name, p in policy.adapter().items()}
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    trainer.model.eval()
    return trainer


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def trl_rows(batch) -> dict[str, torch.Tensor]:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    def tokens(row: int, segment: Segment) -> list[int]:
        return batch.input_ids[row][batch.segment_ids[row] == segment].tolist()

    names = ("prompt", "chosen", "rejected")
    examples = [{f"{n}_ids": tokens(i, Segment[n.upper()]) for n in names} for i in range(len(batch))]
    return DataCollatorForPreference(pad_token_id=0)(examples)


@pytest.mark.parametrize("layout", ["shared", "separate"])
@pytest.mark.parametrize("case", list(CASES))
def test_losses_and_gradients(case, layout, make_policy, make_batch, tokenizer, tmp_path):
    """Each pair's loss, and the gradient of the batch's mean loss in every LoRA matrix, to 1e-5.

    TRL's SFT term is a mean over the tokens of a forward pass, so there each pair has a pass of its own.
    """
    make, options = CASES[case]
    beta = 0.3
    policy, batch, objective = make_policy(layout=layout), make_batch(6), make(beta)
    trainer = trainer_of(policy, tokenizer, beta=beta, output_dir=str(tmp_path / "trl"), **options)
    batch = batch.with_reference(policy.reference_log_probs(batch))
    losses = objective(Rewards.of(policy.log_probs(batch), batch, beta))
    assert losses.std() > 1e-2  # something to be right about

    for i in range(len(batch)):
        with torch.no_grad():
            theirs = trainer._compute_loss(trainer.model, trl_rows(batch[i : i + 1]), False)
        torch.testing.assert_close(losses[i].detach(), theirs, rtol=1e-5, atol=1e-5)

    parts = [batch[i : i + 1] for i in range(len(batch))] if case == "sft" else [batch]
    theirs = [trainer._compute_loss(trainer.model, trl_rows(part), False) for part in parts]
    mean = torch.stack(theirs).mean()
    torch.testing.assert_close(losses.mean(), mean, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(mean, list(trainable(trainer.model).values()))
    found = torch.autograd.grad(losses.mean(), list(policy.adapter().values()))
    scale = max(float(e.abs().max()) for e in expected)
    ours = dict(zip((n.removeprefix("peft.") for n in policy.adapter()), found, strict=True))
    for name, gradient in zip(trainable(trainer.model), expected, strict=True):
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * scale)
