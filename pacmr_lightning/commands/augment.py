"""Command ``pacmr augment``: augmented training prompts by back-translation, paraphrase or rules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jsonargparse import lazy_instance

from ..command_line.output import print_result
from ..command_line.parser import run_tool
from ..datamodules.augmentation.augmentation_report import examples, summary
from ..datamodules.augmentation.augmented_prompts import prompt_hash, training_prompts, write_augmentations
from ..datamodules.augmentation.paraphrase import Paraphrase  # noqa: F401 - for its short name on the command line
from ..datamodules.augmentation.rewriter import Rewriter, augment_prompts
from ..datamodules.augmentation.translation import BackTranslation
from ..datamodules.sampling import stratified_sample
from ..datamodules.sources import Source
from ..errors import UserError
from ..evaluation.response_files import answers_path
from ..files import replacing

_BACK_TRANSLATION = lazy_instance(BackTranslation)


def augment(
    source: Source,
    output: str,
    rewriter: Rewriter = _BACK_TRANSLATION,
    n: int | None = None,
    seed: int = 42,
) -> None:
    """Writes augmented prompts of the training pairs for VNet; responses stay as they are.

    Writes OUTPUT, which the datamodule reads as its augmentations, and a report with examples (OUTPUT's name
    with -report.md). OUTPUT.answers.sqlite stores work in progress: the same command resumes a killed run.

    Args:
        source: where the pairs come from.
        output: Parquet file to write; a row a prompt.
        rewriter: BackTranslation (to Chinese and back), Paraphrase (a language model) or Rules.
        n: distinct prompts, a sample with categories in proportion; null means all. The paper's outer sets
            hold 4,380 (TL;DR) and 5,584 (HH) rows.
        seed: of the sample and of the report's examples.
    """
    path = Path(output).expanduser()
    if path.suffix != ".parquet" or path.is_dir():
        raise UserError(f"output is {output!r}, but it must be a file that ends in .parquet.")
    settings = rewriter.settings  # fails before long work if a model cannot be loaded
    prompts = training_prompts(source.load("train"))
    if not prompts:
        raise UserError(f"No training pair of {source.name} has a prompt that can be used; look at its rows.")
    found = len(prompts)
    if n is not None:
        names = [prompt_hash(prompt.prompt) for prompt in prompts]
        taken = stratified_sample(names, [prompt.category for prompt in prompts], n, seed)
        prompts = [prompts[i] for i in taken]
    answers = answers_path(path)
    rows, rewritings = augment_prompts(prompts, rewriter, answers)
    kept = Counter(rewriting.kept for rewriting in rewritings.values())
    if rewritings and not kept[None]:
        raise UserError(
            f"{rewriter.method} worded none of {len(rewritings):,} pieces differently (mostly: "
            f"{kept.most_common(1)[0][0]}); change its options, or use another rewriter."
        )
    write_augmentations(path, rows, rewriter.method, settings)
    about = f"{rewriter.method} of {len(rows):,} of {found:,} distinct training prompts of {source.name}"
    report = path.with_name(f"{path.stem}-report.md")
    text = summary(rows, about)
    with replacing(report) as temporary:
        temporary.write_text(text + examples(rows, seed), encoding="utf-8")
    print_result(text)
    if stored := sum(rewriting.stored for rewriting in rewritings.values()):
        print(f"{stored:,} of {len(rewritings):,} different pieces were there from an earlier run.")
    print(f"Augmented prompts: {path}\nReport with examples: {report}")
    if answers.exists():
        print(f"Pieces, which another run uses again: {answers} (may be deleted)")


def main(arguments: list[str]) -> None:
    """``pacmr augment --source CLASS ... --output FILE``."""
    run_tool("augment", augment, arguments)
