"""Command ``pacmr augment``: augmented training prompts by back-translation, paraphrase or rules."""

from collections import Counter

from jsonargparse import lazy_instance

from ..command_line.output import print_result
from ..datamodules.augmentation.augmentation_report import examples, summary
from ..datamodules.augmentation.augmented_prompts import training_prompts, write_augmentations
from ..datamodules.augmentation.paraphrase import Paraphrase  # noqa: F401 - for its short name on the command line
from ..datamodules.augmentation.rewriter import Rewriter, augment_pairs, augment_prompts
from ..datamodules.augmentation.translation import BackTranslation
from ..datamodules.sources import Source
from ..datamodules.tokenizer import load_tokenizer
from ..errors import UserError
from ..evaluation.response_files import answers_path
from ..files import local_path, write_text

_BACK_TRANSLATION = lazy_instance(BackTranslation)


def augment(
    source: Source,
    output: str,
    rewriter: Rewriter = _BACK_TRANSLATION,
    n: int | None = None,
    tokenizer: str | None = None,
    max_length: int = 768,
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
        max_length: tokens of a prompt, original or augmented, with the longer response, as in training.
        seed: seed of the sample and of the report's examples.
    """
    path = local_path(output)
    if path.suffix != ".parquet" or path.is_dir():
        raise UserError(f"output is {output!r}, but it must be a file that ends in .parquet.")
    if n is not None and tokenizer is None:
        raise UserError(
            f"n is {n}, a number of pairs that training keeps at max_length {max_length}; give --tokenizer, "
            "the model's folder or Hub id."
        )
    settings = rewriter.settings  # fails before long work if a model cannot be loaded
    source_rows = source.load("train")
    prompts = training_prompts(source_rows)
    if not prompts:
        raise UserError(
            f"No training pair of {source.name} has a usable prompt; look at its rows with pacmr inspect."
        )
    answers = answers_path(path)
    if n is None or tokenizer is None:
        rows, rewritings = augment_prompts(prompts, rewriter, answers)
    else:
        encodes = load_tokenizer(tokenizer)
        rows, rewritings = augment_pairs(source_rows, rewriter, answers, encodes, max_length, n, seed)
    kept = Counter(rewriting.kept for rewriting in rewritings.values())
    if rewritings and not kept[None]:
        raise UserError(
            f"{rewriter.method} changed none of {len(rewritings):,} pieces (mostly: "
            f"{kept.most_common(1)[0][0]}); change its options, or use another rewriter."
        )
    write_augmentations(path, rows, rewriter.method, settings, only_these_pairs=n is not None)
    about = (
        f"{rewriter.method} of {len(rows):,} of {len(prompts):,} distinct training prompts of {source.name}"
    )
    report = path.with_name(f"{path.stem}-report.md")
    text = summary(rows, about)
    write_text(report, text + examples(rows, seed))
    print_result(text)
    print(f"Augmented prompts: {path}\nReport with examples: {report}")
    if answers.exists():
        print(f"Stored pieces, which another run reuses: {answers} (can be deleted)")
