"""Prompts for evaluation, for a policy or a model behind an endpoint."""

import json
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.conversation import TEMPLATE_COLUMNS, Messages
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.files import text_hash
from pacmr_lightning.policy.chat_template import render

from .chat import decode_messages
from .reading import values_of
from .sampling import stratified_sample
from .sources import Source
from .tokenization import Tokenization, prompt_tokens


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt to answer."""

    id: str
    """Id of the first pair with the prompt; without pairs, a hash of the prompt."""
    text: str
    """A text, or a conversation as JSON."""
    chat: bool = False
    answer: dict[str, Any] = field(default_factory=dict)
    """A response in the data, as a message; empty if the prompt is a text."""
    columns: dict[str, Any] = field(default_factory=dict)
    """``tools`` and ``chat_template_kwargs`` of the row, if any."""

    @property
    def asked(self) -> str | Messages:
        """The text or the chat messages."""
        return decode_messages(self.text) if self.chat else self.text

    def rendered(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the text that a model reads, with the chat template's special tokens."""
        if not self.chat:
            return self.text
        options = {name: value for name, value in self.columns.items() if name == "tools"}
        options |= self.columns.get("chat_template_kwargs", {})
        return render(tokenizer, decode_messages(self.text), self.answer, options).prompt


def draw_prompts(source: Source, count: int | None, seed: int) -> list[EvaluationPrompt]:
    """Return ``count`` distinct evaluation prompts (None: all), whose draw depends on them and the seed."""
    # The same messages with other tools are another prompt.
    distinct: dict[str, EvaluationPrompt] = {}
    if source.prompts is not None:
        distinct = {text: EvaluationPrompt(text_hash(text), text) for text in source.prompts if text.strip()}
    else:
        rows = source.load("validation")
        columns = ("id", "prompt", "chosen", "chat", "reason", *TEMPLATE_COLUMNS)
        for name, prompt, chosen, chat, reason, *texts in values_of(rows, *columns):
            if reason is None and prompt.strip():
                parts = zip(TEMPLATE_COLUMNS, texts, strict=True)
                given = {column: json.loads(text) for column, text in parts if text is not None}
                answer = decode_messages(chosen)[0] if chat else {}
                key = "".join([prompt, *filter(None, texts)])
                distinct.setdefault(key, EvaluationPrompt(name, prompt, chat, answer, given))
    if not distinct:
        raise UserError(f"{source.name} has no prompt to answer; look at its validation rows.")
    hashes = [text_hash(text) for text in distinct]
    asked, count = count, min(count or len(distinct), len(distinct))
    drawn = stratified_sample(hashes, [None] * len(distinct), count, seed)
    if count < len(distinct):
        rank_zero_info(f"{source.name}: {count:,} of {len(distinct):,} prompts, drawn with seed {seed}.")
    elif asked is not None and asked > count:
        rank_zero_info(f"{source.name} has {count:,} distinct prompts, fewer than the {asked:,} asked for.")
    prompts = list(distinct.values())
    return [prompts[i] for i in drawn]


def prompt_loader(
    prompts: list[EvaluationPrompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokenization: Tokenization,
    max_length: int,
    batch_size: int,
    world_size: int,
    longest_first: bool,
) -> DataLoader[PromptBatch]:
    """Return a loader of ``PromptBatch``, each prompt once; over ``max_length`` tokens they are left out."""
    texts = [prompt.rendered(tokenizer) for prompt in prompts]
    tokens = prompt_tokens(tokenizer, texts, [prompt.chat for prompt in prompts], tokenization)
    places = [place for place, ids in enumerate(tokens) if 0 < len(ids) <= max_length]
    if not places:
        raise UserError(
            f"None of the {len(prompts)} prompts to answer has 1 to {max_length} tokens; raise "
            "predict_max_length."
        )
    if len(places) < world_size:
        raise UserError(
            f"There are {len(places)} prompts to answer, but each of {world_size} processes needs one; use "
            "fewer of them."
        )
    if len(places) < len(prompts):
        rank_zero_info(
            f"{len(prompts) - len(places)} of {len(prompts)} prompts are left out: longer than "
            f"predict_max_length {max_length} tokens."
        )
    if longest_first:
        places.sort(key=lambda place: -len(tokens[place]))

    def collate(part: list[int]) -> PromptBatch:
        return PromptBatch.collate(
            [prompts[i].id for i in part],
            [texts[i] for i in part],
            [tokens[i] for i in part],
            pad_id=tokenizer.pad_token_id,
            asked=[prompts[i].asked for i in part],
            places=part,
            columns=[prompts[i].columns for i in part],
        )

    # Any sequence works, but torch's types name a Dataset.
    return DataLoader(places, batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]
