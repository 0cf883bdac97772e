"""Arithmetic that a DPO step needs, and the rate of a model's matrix products."""

from functools import partial

import torch
import torch.nn.functional as F
from machine import median_time
from peft.tuners.lora import LoraLayer

from pacmr_lightning.batch import PairBatch, Segment
from pacmr_lightning.policy import PolicyModel


def needed(policy: PolicyModel, batch: PairBatch) -> float:
    """Return floating-point operations of the matrix products of one step, forward and backward.

    A prompt counts once, attention without masked parts, logits for response tokens. Frozen matrices need
    their inputs' gradients only, adapters also their weights'; the embeddings need none.
    """
    segments = batch.segment_ids
    tokens = batch.token_count
    prompt, chosen, rejected = ((segments == s).sum(1).double() for s in list(Segment)[1:])
    seen = sum(part * (part + 1) / 2 for part in (prompt, chosen, rejected)) + prompt * (chosen + rejected)
    config = policy.model.config
    head = policy.model.get_output_embeddings().weight
    total = 4 * float((chosen + rejected).sum()) * head.numel()
    total += 12 * config.num_hidden_layers * float(seen.sum()) * config.hidden_size
    for name, layer in policy.named_modules():
        if isinstance(layer, LoraLayer):
            # The first layer's q, k and v read the embeddings.
            reads = ".layers.0." in name and name.endswith(("q_proj", "k_proj", "v_proj"))
            base = layer.get_base_layer().weight.numel()
            a, b = (part["default"].weight.numel() for part in (layer.lora_A, layer.lora_B))
            total += 2 * tokens * ((1 if reads else 2) * base + (2 if reads else 3) * a + 3 * b)
    return total


@torch.no_grad()
def fastest_product(policy: PolicyModel, batch: PairBatch, repetitions: int = 5) -> float:
    """Return operations per second of the fastest of the model's matrix products, on all its tokens."""
    head = policy.model.get_output_embeddings().weight
    responses = int((batch.segment_ids >= Segment.CHOSEN).sum())
    products = {(head.shape, responses): head}
    for layer in policy.modules():
        if isinstance(layer, LoraLayer):
            weight = layer.get_base_layer().weight
            products[weight.shape, batch.token_count] = weight
    rates = []
    for (_, rows), weight in products.items():
        x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        seconds = median_time(partial(F.linear, x, weight), weight.device.type, repetitions)
        rates.append(2 * rows * weight.numel() / seconds)
    return max(rates)
