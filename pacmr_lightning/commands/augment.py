"""Command ``pacmr augment``: augmented training prompts by back-translation, paraphrase or rules."""

import random
from collections import Counter
from collections.abc import Sequence
from textwrap import indent

import numpy as np
from jsonargparse import lazy_instance

from ..command_line.output import print_result
from ..datamodules.augmentation import augmented_prompts
from ..datamodules.augmentation.paraphrase import Paraphrase  # noqa: F401 - for its short name on the command line
from ..datamodules.augmentation.rewriter import Rewriter, augment_pairs, augment_prompts
from ..datamodules.augmentation.structure import texts_of
from ..datamodules.augmentation.translator import BackTranslation
from ..datamodules.sources import Source
from ..datamodules.tokenizer import load_tokenizer
from ..errors import UserError, check_at_least
from ..evaluation.response_files import answers_path, output_path
from ..files import write_text

_BACK_TRANSLATION = lazy_instance(BackTranslation)
_EXAMPLES = 6
_MAX_LENGTH = 1024


def augment(
    source: Source,
    output: str,
    rewriter: Rewriter = _BACK_TRANSLATION,
    n: int | None = None,
    tokenizer: str | None = None,
    max_length: int = _MAX_LENGTH,
    seed: int = 42,
) -> None:
    """Writes augmented prompts (paraphrases) of the training pairs, for VNet.

    Writes OUTPUT, for --data.augmentations, and OUTPUT's name with -report.md, a report with examples.
    OUTPUT.answers.sqlite stores work in progress: the same command resumes an interrupted run.

    Args:
        source: source of the pairs.
        output: Parquet file to write, one row per prompt.
        rewriter: BackTranslation (to Chinese and back), Paraphrase (a language model) or Rules.
        n: number of training pairs to augment, a sample stratified by category of the pairs that training
            keeps; null for the prompts of all pairs. Qu et al. have 4,380 (TL;DR) and 5,584 (HH).
        tokenizer: folder or Hub id of the model, needed with n to know which pairs training keeps.
        max_length: with n, tokens of a prompt, original or augmented, with the longer response, as in
            training.
        seed: seed of the sample and of the report's examples.
    """
    path = output_path(output, ".parquet")
    source.refuse_own("output", path)
    check_at_least(1, n=n)
    if (n is None) != (tokenizer is None) or (n is None and max_length != _MAX_LENGTH):
        raise UserError(
            f"n is {n or 'null'}, tokenizer {tokenizer or 'null'} and max_length {max_length}, but a sample "
            "takes the first two, and only a sample any of them: for all prompts leave them out."
        )
    settings = rewriter.settings  # fails before long work if a model cannot be loaded
    source_rows = source.load("train")
    prompts = augmented_prompts.training_prompts(source_rows)
    if not prompts:
        raise UserError(
            f"No training pair of {source.name} has a usable prompt; look at its rows with pacmr inspect."
        )
    answers = answers_path(path)
    if n is None or tokenizer is None:
        rows = augment_prompts(prompts, rewriter, answers)
    else:
        encodes = load_tokenizer(tokenizer)
        rows = augment_pairs(source_rows, rewriter, answers, encodes, max_length, n, seed)
    kept, pieces = sum((row.kept for row in rows), Counter[str]()), sum(row.pieces for row in rows)
    if pieces and kept.total() == pieces:
        raise UserError(
            f"{rewriter.method} changed none of {pieces:,} pieces (mostly: {kept.most_common(1)[0][0]}); "
            "change its options, or use another rewriter."
        )
    augmented_prompts.write_augmentations(
        path, rows, rewriter.method, settings, only_these_pairs=n is not None
    )
    about = (
        f"{rewriter.method} of {len(rows):,} of {len(prompts):,} distinct training prompts of {source.name}"
    )
    report = path.with_name(f"{path.stem}-report.md")
    text = _summary(rows, about, kept, pieces)
    write_text(report, text + _examples(rows, seed))
    print_result(text)
    print(f"Augmented prompts: {path}\nReport with examples: {report}")
    if answers.exists():
        print(f"Stored pieces, which another run reuses: {answers} (can be deleted)")


def _summary(
    rows: Sequence[augmented_prompts.AugmentedPrompt], about: str, kept: Counter[str], pieces: int
) -> str:
    """Return statistics of the prompts as Markdown, headed by ``about``; ``kept`` and ``pieces`` are sums."""
    pairs = sum(len(row.ids) for row in rows)
    identical = sum(row.prompt == row.augmented for row in rows)
    ratios = [len(row.augmented) / len(row.prompt) for row in rows]
    lines = [
        "# Augmented prompts",
        "",
        f"{about[0].upper()}{about[1:]}, which {pairs:,} pairs have.",
        "",
        f"- equal to the prompt, so that its pairs are in no meta-batch: {_share(identical, len(rows))}",
        "- characters over those of the prompt, median (5% to 95%): {:.2f} ({:.2f} to {:.2f})".format(
            *np.quantile(ratios, (0.5, 0.05, 0.95))
        ),
        f"- pieces with words that were left as they were: {_share(kept.total(), pieces)}",
        *(f"  - {why}: {_share(count, pieces)}" for why, count in kept.most_common()),
    ]
    return "\n".join(lines) + "\n"


def _examples(rows: Sequence[augmented_prompts.AugmentedPrompt], seed: int) -> str:
    """Return a seeded sample of changed prompts, before and after, as Markdown."""
    changed = [row for row in rows if row.prompt != row.augmented]
    text = "\n## Examples\n"
    for number, row in enumerate(random.Random(seed).sample(changed, min(_EXAMPLES, len(changed))), 1):
        text += f"\n### {number}" + (f" ({row.category})" if row.category else "") + "\n"
        for title, prompt in (("before", row.prompt), ("after", row.augmented)):
            lines = "\n".join(texts_of(prompt, row.chat)).strip()
            text += f"\n{title}:\n\n{indent(lines, '    ')}\n"
    return text


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "-"
