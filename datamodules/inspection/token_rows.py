"""Printed rows, token by token, as the model sees them."""

from collections.abc import Iterator, Sequence

from rich.padding import Padding
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.batch import Segment

from ..tokenized_pairs import TokenizedPairs

LEGEND = (
    "Tokens by their names in the vocabulary, set apart by blanks. Those in ‹angle brackets› count for the "
    "loss, those of the prompt do not."
)
SHOWN = 60
"""Tokens shown at each end of a long part."""

_STYLES = {Segment.PROMPT: "dim", Segment.CHOSEN: "green", Segment.REJECTED: "red"}


def show_rows(
    pairs: TokenizedPairs, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]
) -> Iterator[Text | Padding]:
    """Yield printed forms of the shortest, median and longest of N pairs, collated as in training."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    places = {"shortest": order[0], "median": order[len(order) // 2], "longest": order[-1]}
    batch = pairs.batch(list(places.values()))
    for row, name in enumerate(places):
        ids, segments = batch.input_ids[row], batch.segment_ids[row]
        parts = {kind: ids[segments == kind].tolist() for kind in Segment}
        counts = ", ".join(f"{len(parts[kind])} {kind.name.lower()}" for kind in _STYLES)
        padding = f"{len(parts[Segment.PAD])} of padding beside the others"
        yield Text.assemble((f"The {name} pair, {batch.ids[row]}", "bold"), f" (tokens: {counts}, {padding})")
        for kind, style in _STYLES.items():
            heading = Text(f"{kind.name.lower()}: ", style="bold")
            shown = token_text(parts[kind], tokenizer, counts=kind != Segment.PROMPT)
            yield Padding(heading + Text(shown, style=style), (0, 0, 0, 2), expand=False)


def token_text(ids: list[int], tokenizer: PreTrainedTokenizerBase, counts: bool) -> str:
    """Return the names of tokens, shortened; angle brackets mark those that count for the loss."""
    names = tokenizer.convert_ids_to_tokens(ids)
    # A terminal would obey some characters.
    names = [name if name.isprintable() else repr(name)[1:-1] for name in names]
    shown = [f"‹{name}›" if counts else name for name in names]
    if (left_out := len(ids) - 2 * SHOWN) > 0:
        shown[SHOWN:-SHOWN] = [f"[… {left_out} tokens are left out here …]"]
    return " ".join(shown)
