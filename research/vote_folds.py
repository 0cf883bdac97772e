"""Training pairs with one vote each, and test pairs of other debates with the majority's label, in folds.

    python -m research.vote_folds runs/votes.jsonl --output runs/vote-policies

The file is that of ``research.votes``. Fold k has the sides of three debates as test; what most of the other
votes say is its label.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import write_json_lines

from . import command

FOLDS = 4
REWORDINGS = (
    "People are discussing: {debate}\nOne of them takes this side: {side}\nWhat they say:",
    "Question: {debate}\nWrite an argument for this side: {side}\nText:",
    "Topic: {debate}\nPosition: {side}\nReason:",
)
"""Other words for "Debate: ...\\nArgue for: ...\\nArgument:", in place of a back-translation."""


def vote_folds(file: str, *, output: str, train: int = 800, test: int = 240, characters: int = 250) -> None:
    """Write train.jsonl, clean.jsonl (no label that most others contradict) and test.jsonl of each fold.

    Args:
        file: pairs with votes, JSON Lines.
        output: folder for fold-0 to fold-3.
        train: pairs of the other debates that are drawn.
        test: pairs of the fold's debates that are drawn from those that the other votes decide.
        characters: most of a response.
    """
    pairs = pd.read_json(file, lines=True, dtype=False)
    pairs = pairs[(pairs["chosen"].str.len() <= characters) & (pairs["rejected"].str.len() <= characters)]
    debates = sorted(pairs["category"].unique())
    random = np.random.default_rng(0)
    fold_of = dict(zip(random.permutation(debates), np.arange(len(debates)) % FOLDS, strict=True))
    for fold in range(FOLDS):
        inside = pairs["category"].map(fold_of) == fold
        checked = pairs[inside & pairs["flipped"].notna()]
        for option, asked, there in (("train", train, (~inside).sum()), ("test", test, len(checked))):
            if asked > there:
                raise UserError(f"{file} has {there} pairs for fold {fold}; lower --{option} {asked}.")
        trained = pairs[~inside].sample(train, random_state=fold)
        trained = trained.assign(
            augmented_prompt=[reworded(*row) for row in trained[["id", "prompt"]].to_numpy()]
        )
        decided = checked.sample(test, random_state=fold)
        contradicted = decided["flipped"].astype(bool)
        by_majority = decided.assign(
            chosen=decided["chosen"].where(~contradicted, decided["rejected"]),
            rejected=decided["rejected"].where(~contradicted, decided["chosen"]),
            contradicted=contradicted,
        )
        folder = Path(output) / f"fold-{fold}"
        columns = ["id", "prompt", "chosen", "rejected"]
        learned = [*columns, "augmented_prompt"]
        write_json_lines(folder / "train.jsonl", trained[learned].to_dict("records"))
        wrong = trained["flipped"].fillna(False).astype(bool)
        write_json_lines(folder / "clean.jsonl", trained.loc[~wrong, learned].to_dict("records"))
        write_json_lines(folder / "test.jsonl", by_majority[columns].to_dict("records"))
        by_majority[["id", "contradicted"]].to_csv(folder / "votes.csv", index=False)
        longer = (by_majority["chosen"].str.len() > by_majority["rejected"].str.len()).mean()
        print(
            f"fold {fold}: {len(trained)} pairs, {wrong.sum()} contradicted "
            f"({wrong.sum() / trained['flipped'].notna().sum():.3f} of those decided); test {len(decided)}, "
            f"{contradicted.mean():.3f} of the votes contradicted, the longer one preferred in {longer:.3f}"
        )


def reworded(identity: str, prompt: str) -> str:
    """Return the prompt by one of ``REWORDINGS``, the same each time."""
    debate, side, _ = prompt.split("\n")
    which = sum(identity.encode()) % len(REWORDINGS)
    return REWORDINGS[which].format(
        debate=debate.removeprefix("Debate: "), side=side.removeprefix("Argue for: ")
    )


main = command("vote_folds", vote_folds)

if __name__ == "__main__":
    main()
