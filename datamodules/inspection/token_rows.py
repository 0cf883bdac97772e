"""Printed rows, token by token, as the model sees them."""

from collections.abc import Iterator, Sequence

from rich.padding import Padding
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.batch import Segment

from ..tokenized_pairs import TokenizedPairs

LEGEND = (
    "Tokens are set apart by blanks; ▁ is a blank of the text and ⏎ a line break. Those in ‹angle brackets› "
    "count for the loss, those of the prompt do not."
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
    """Return tokens decoded one by one, shortened; angle brackets mark those that count for the loss."""
    pieces = {}
    for place in range(len(ids)):
        if SHOWN <= place < len(ids) - SHOWN:
            continue
        # In context: some tokenizers drop the leading space of what they decode.
        before = tokenizer.decode(ids[max(place - 1, 0) : place])
        both = tokenizer.decode(ids[max(place - 1, 0) : place + 1])
        name = tokenizer.convert_ids_to_tokens(ids[place])
        # Lists come of lists only.
        assert isinstance(before, str) and isinstance(both, str) and isinstance(name, str)
        text = both[len(before) :] if both.startswith(before) else ""
        # Partial UTF-8 characters have no text; show the token's name.
        if not text or "\N{REPLACEMENT CHARACTER}" in both:
            text = name
        piece = "".join(_visible(character) for character in text)
        pieces[place] = f"‹{piece}›" if counts else piece
    shown = list(pieces.values())
    left_out = len(ids) - len(shown)
    if left_out:
        shown.insert(SHOWN, f"[… {left_out} tokens are left out here …]")
    return " ".join(shown)


def _visible(character: str) -> str:
    if character.isprintable() and character != " ":
        return character
    return {" ": "▁", "\n": "⏎"}.get(character) or character.encode("unicode_escape").decode()
