"""Writes second wordings of the training prompts: back-translations, paraphrases or rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from jsonargparse import lazy_instance
from rich.console import Console
from tqdm import tqdm

from ..command_line.parser import run_tool
from ..datamodules.augmentation.files import AugmentedPrompt, prompt_hash, write_augmentations
from ..datamodules.augmentation.paraphrase import Paraphrase  # noqa: F401 - for its short name on the command line
from ..datamodules.augmentation.report import examples, summary
from ..datamodules.augmentation.rewriter import Rewriter, Rewriting
from ..datamodules.augmentation.structure import Part, texts_of, with_texts
from ..datamodules.augmentation.translation import BackTranslation
from ..datamodules.prompts import split_row
from ..datamodules.rows import values_of
from ..datamodules.sampling import stratified_sample
from ..datamodules.sources import Source
from ..errors import UserError
from ..files import replacing

_BACK_TRANSLATION = lazy_instance(BackTranslation)


@dataclass(frozen=True)
class TrainingPrompt:
    """A distinct prompt of the training pairs."""

    text: str
    """A text, or a conversation as JSON."""
    chat: bool
    category: str | None
    """That of the first pair that has the prompt."""
    pairs: int
    """Pairs that have it."""


def training_prompts(rows: Dataset) -> list[TrainingPrompt]:
    """The distinct prompts of the usable rows, in the order of their first rows.

    Args:
        rows: as a ``Source`` loads them.
    """
    pairs: Counter[str] = Counter()
    first: dict[str, tuple[bool, str | None]] = {}
    columns = values_of(rows, "prompt", "chosen", "rejected", "chat", "category")
    for prompt, chosen, rejected, chat, category in columns:
        split = split_row(prompt, chosen, rejected, chat)
        if split.reason is None and split.prompt.strip():
            pairs[split.prompt] += 1
            first.setdefault(split.prompt, (chat, category))
    return [TrainingPrompt(text, *first[text], count) for text, count in pairs.items()]


def augment(
    source: Source,
    output: str,
    rewriter: Rewriter = _BACK_TRANSLATION,
    n: int | None = None,
    seed: int = 42,
) -> None:
    """Words the prompts of training pairs differently, for VNet's second views; responses stay as they are.

    Writes OUTPUT, which the datamodule reads as its augmentations, and OUTPUT's name with -report.md, a
    report with examples. Work in progress is in OUTPUT.answers.sqlite: run the same command again after a
    kill and it goes on.

    Args:
        source: where the pairs come from.
        output: Parquet file to write; a row a prompt.
        rewriter: BackTranslation (to Chinese and back), Paraphrase (a language model) or Rules.
        n: distinct prompts, a sample with categories in proportion; null means all. The paper's outer sets
            hold 4,380 (TL;DR) and 5,584 (HH) rows.
        seed: of the sample and of the report's examples.

    Raises:
        UserError: the output cannot be written, no training pair is usable, ``n`` is out of range, or nothing
            was worded differently.
    """
    path = Path(output).expanduser()
    if path.suffix != ".parquet" or path.is_dir():
        raise UserError(f"output is {output!r}, but it must be a file that ends in .parquet.")
    settings = rewriter.settings  # a model that cannot be loaded says so here, before long work
    prompts = training_prompts(source.load("train"))
    if not prompts:
        raise UserError(f"No training pair of {source.name} has a prompt that can be used; look at its rows.")
    found = len(prompts)
    if n is not None:
        names = [prompt_hash(prompt.text) for prompt in prompts]
        taken = stratified_sample(names, [prompt.category for prompt in prompts], n, seed)
        prompts = [prompts[i] for i in taken]
    cut = _Cut(prompts, rewriter)
    answers = path.with_name(f"{path.name}.answers.sqlite")
    rewritings = rewriter.rewrite(cut.pieces, answers)
    if rewritings and all(rewriting.kept for rewriting in rewritings.values()):
        reasons = Counter(rewriting.kept for rewriting in rewritings.values())
        raise UserError(
            f"{rewriter.method} worded none of {len(rewritings):,} pieces differently (mostly: "
            f"{reasons.most_common(1)[0][0]}); change its options, or use another rewriter."
        )
    rows = [cut.join(number, rewritings) for number in range(len(prompts))]
    write_augmentations(path, rows, rewriter.method, settings)
    about = f"{rewriter.method} of {len(rows):,} of {found:,} distinct training prompts of {source.name}"
    report = path.with_name(f"{path.stem}-report.md")
    text = summary(rows, about)
    with replacing(report) as temporary:
        temporary.write_text(text + examples(rows, seed), encoding="utf-8")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(text)
    stored = sum(rewriting.stored for rewriting in rewritings.values())
    if stored:
        console.print(f"{stored:,} of {len(rewritings):,} different pieces were there from an earlier run.")
    console.print(f"Augmented prompts: {path}\nReport with examples: {report}")
    if answers.exists():
        console.print(f"Pieces, which another run uses again: {answers} (may be deleted)")


class _Cut:
    """Prompts cut into frame and pieces."""

    def __init__(self, prompts: list[TrainingPrompt], rewriter: Rewriter):
        self.prompts = prompts
        self.parts: list[list[list[Part]]] = [
            [rewriter.parts(text) for text in texts_of(prompt.text, prompt.chat)]
            for prompt in tqdm(prompts, desc="Cutting", unit="prompt", leave=False)
        ]
        """For each prompt, for each of its texts."""

    @property
    def pieces(self) -> list[list[str]]:
        """What is to be worded differently, for each prompt."""
        return [[part.text for part in _contents(texts)] for texts in self.parts]

    def join(self, number: int, rewritings: dict[str, Rewriting]) -> AugmentedPrompt:
        """A prompt with its pieces in other words."""
        prompt, texts = self.prompts[number], self.parts[number]
        done = [rewritings[part.text] for part in _contents(texts)]
        others = iter(done)
        new = ["".join(next(others).text if part.content else part.text for part in parts) for parts in texts]
        return AugmentedPrompt(
            prompt.text,
            with_texts(prompt.text, prompt.chat, new),
            prompt.chat,
            prompt.category,
            prompt.pairs,
            pieces=len(done),
            kept=Counter(rewriting.kept for rewriting in done if rewriting.kept is not None),
        )


def _contents(texts: list[list[Part]]) -> Iterable[Part]:
    return (part for parts in texts for part in parts if part.content)


def main(arguments: list[str]) -> None:
    """``pacmr augment --source CLASS ... --output FILE``."""
    run_tool("augment", augment, arguments)
