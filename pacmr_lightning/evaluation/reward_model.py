"""A reward model as a judge."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import UserError, check_at_least
from ..files import expanded
from ..policy.chat_template import render_messages
from ..policy.hub_access import model_state, pretrained
from ..policy.positions import positions
from .answer_store import AnswerStore
from .conversation import Messages, as_messages, as_text
from .judging import Comparison, Opinion, PairJudge, Verdict, by_scores


class RewardModelJudge(PairJudge):
    """A sequence classifier with one label, such as the reward models on the Hugging Face Hub.

    It scores prompt and response together, in the tokenizer's chat template where it has one, else as one
    text. Both opinions of a verdict are the same; equal scores prefer neither.

    Args:
        model: folder or Hub id.
        dtype: of the weights; "bfloat16" is for GPUs.
        batch_size: responses at a time.
        max_length: tokens of prompt and response at most. A longer pair gets no verdict and is never cut.
    """

    def __init__(
        self,
        model: str,
        dtype: Literal["float32", "bfloat16"] = "float32",
        batch_size: int = 8,
        max_length: int = 2048,
    ):
        check_at_least(1, batch_size=batch_size, max_length=max_length)
        self.name: str = expanded(model)
        self.dtype = dtype
        self.batch_size = batch_size
        self.max_length = max_length

    # mypy takes a cached property for a read-only one.
    @cached_property
    def settings(self) -> dict[str, Any]:  # type: ignore[override]
        """The options, and a digest of the model's content."""
        try:
            state = model_state(self.name)
        except (OSError, UserError):  # loading it reports the error
            state = None
        options = {"dtype": self.dtype, "max_length": self.max_length}
        return {"reward_model": self.name, "content": state, **options}

    def check(self) -> None:
        """Raise a UserError if there is no such model or tokenizer, or it is too short or no reward model."""
        _ = self._tokenizer
        config = pretrained(AutoConfig, self.name, "model")
        if config.num_labels != 1:
            raise UserError(
                f"{self.name} is no reward model (it has {config.num_labels} labels); give a sequence "
                "classifier that was trained with one label."
            )
        limit = positions(config)
        if limit is not None and self.max_length > limit:
            raise UserError(
                f"max_length is {self.max_length}, but {self.name} reads at most {limit} tokens; set it to "
                f"{limit} or less."
            )

    def compare(self, items: Sequence[Comparison], store: AnswerStore) -> list[Verdict]:
        """Score 2 N responses; nothing is stored."""
        scores, problems = self._scores(
            [(item.prompt, r) for item in items for r in (item.first, item.second)]
        )
        verdicts = []
        for i in range(0, len(scores), 2):
            first, second = scores[i : i + 2]
            if problem := problems.get(i) or problems.get(i + 1):
                verdicts.append(Verdict((Opinion("none", "", problem),) * 2))
            else:
                verdicts.append(by_scores(first, second))
        return verdicts

    def _scores(self, responses: list[tuple[str | Messages, str]]) -> tuple[list[float], dict[int, str]]:
        """Return the scores of N responses to their prompts, and by place why one has none."""
        scores, problems, tokens = [math.nan] * len(responses), dict[int, str](), dict[int, list[int]]()
        for place, (prompt, response) in enumerate(responses):
            try:
                tokens[place] = judged_tokens(self._tokenizer, prompt, response)
            except (TemplateError, ValueError) as error:
                problems[place] = f"the chat template refuses the conversation ({error})"
        for place in [place for place, ids in tokens.items() if len(ids) > self.max_length]:
            del tokens[place]
            problems[place] = f"prompt and response are longer than max_length {self.max_length} tokens"
        # By length, for little padding.
        order = sorted(tokens, key=lambda place: len(tokens[place]), reverse=True)
        size = self.batch_size if order and self._pad_id is not None else 1
        for start in tqdm(range(0, len(order), size), desc=f"Scoring with {self.name}", unit="batch"):
            part = order[start : start + size]
            with torch.inference_mode():
                logits = classified(self._model, [tokens[place] for place in part], self._pad_id or 0)
            for place, value in zip(part, logits[:, 0].float().tolist(), strict=True):
                scores[place] = value
                if not math.isfinite(value):
                    problems[place] = f"the score is {value}"
        return scores, problems

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return pretrained(AutoTokenizer, self.name, "model")

    @cached_property
    def _model(self) -> PreTrainedModel:
        self.check()
        options = {"dtype": getattr(torch, self.dtype), "output_loading_info": True}
        model, loading = pretrained(AutoModelForSequenceClassification, self.name, "model", **options)
        # transformers initialises a missing head at random, with a warning only.
        if missing := loading["missing_keys"]:
            raise UserError(
                f"{self.name} is no reward model ({len(missing)} of its weights are missing); give a "
                "sequence classifier that was trained with one label."
            )
        return Fabric(accelerator="auto", devices=1).to_device(model).eval()

    @cached_property
    def _pad_id(self) -> int | None:
        """Padding that ends no text, as decoders score at the last other token; None: score one at a time."""
        config = self._model.config.get_text_config()
        if config.pad_token_id is None and self._tokenizer.pad_token_id != self._tokenizer.eos_token_id:
            config.pad_token_id = self._tokenizer.pad_token_id
        return config.pad_token_id


def judged_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, response: str) -> list[int]:
    """Return the token ids of prompt and response as ``RewardModelJudge`` reads them."""
    if tokenizer.chat_template is None:
        text = prompt if isinstance(prompt, str) else f"{as_text(prompt)}\n\nAssistant:"
        space = "" if text[-1:].isspace() else " "
        return tokenizer(text + space + response.strip(), verbose=False)["input_ids"]
    messages = [*as_messages(prompt), {"role": "assistant", "content": response.strip()}]
    chat = render_messages(tokenizer, messages)
    return tokenizer(chat, add_special_tokens=False, verbose=False)["input_ids"]


def classified(model: PreTrainedModel, tokens: list[list[int]], pad_id: int) -> Tensor:
    """Return the (N, L) logits of a sequence classifier with L labels for N lists of token ids."""
    rows = [torch.tensor(ids, device=model.device) for ids in tokens]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(input_ids=ids, attention_mask=mask).logits
