"""Columns of rows of data, and the checks of their values."""

import ast
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from datasets import Features, List, Value

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.conversation import Messages, checked_text
from pacmr_lightning.files import text_hash

from .chat import checked_messages, encode_messages, template_options
from .split_prompt import HUMAN, PromptAndResponses, split_completion, split_messages, split_prompt

_PROMPT_WORDS = frozenset(
    ["prompt", "question", "query", "instruction", "input", "request", "problem", "post", "context"]
) | {"message", "conversation", "history", "dialogue", "dialog"}
_MAY_FOLLOW = frozenset(("text", "str", "string", "body", "content"))
_NO_PROMPT = frozenset(("chosen", "rejected", "response", "answer", "completion", "output", "system"))
_OPTION = "--source.columns (--data.source.columns in pacmr fit)"
TIE = "tie"
"""``label`` of a pair whose responses the annotator found equally good."""
_SET_HERE = frozenset(("conversation", "tokenize", "add_generation_prompt", "continue_final_message"))
"""Arguments of ``apply_chat_template`` that rows may not set."""
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']:\s.*\}\s*\]\s*$""", re.DOTALL)

VOTES = ("votes_for", "votes_against")
"""Numbers of annotators who prefer ``chosen`` and ``rejected``, a tie being half a vote for each."""
OPPOSITES = ("flipped", "eta", "p_right")
"""Columns of flags and probabilities that become their opposites where a label is swapped."""


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a column name: ``promptText`` has ``prompt`` and ``text``."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def looks_like_prompt(name: str) -> bool:
    """Return whether a column name is that of a prompt, such as ``question`` or ``prompt_text``."""
    words = [word.removesuffix("s") for word in words_of(name) if word not in _MAY_FOLLOW]
    return bool(words) and words[-1] in _PROMPT_WORDS and _NO_PROMPT.isdisjoint(words)


def _messages_of(value: str) -> object:
    """Return messages that a text holds as JSON or Python literals (ValueError if broken), else the text."""
    if value.lstrip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            parsed = read(value.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        messages = parsed if isinstance(parsed, list) else [parsed]
        return parsed if messages and all(map(_is_message, messages)) else value
    if _LIKE_MESSAGES.match(value):  # as NumPy writes them, without commas
        raise ValueError(
            f"{value[:80]!r}..., which looks like a list of chat messages but cannot be read; write "
            "it as JSON"
        )
    return value


def looks_like_messages(value: str) -> bool:
    """Return whether a text holds chat messages as JSON or Python literals, perhaps broken ones."""
    try:
        return not isinstance(_messages_of(value), str)
    except ValueError:
        return True


def _is_message(value: object) -> bool:
    """True for a message, perhaps with ``from`` and ``value``, and for an object that holds ``messages``."""
    if not isinstance(value, dict):
        return False
    kinds = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    return any(kind <= value.keys() for kind in kinds) or isinstance(value.get("messages"), list)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r}, but it must be a string, or a list of chat messages")
    return checked_text(value)


def text_of(row: dict[str, Any], name: str, place: str) -> str:
    """Return a row's text, or raise a UserError that begins with its place."""
    try:
        return _text(row.get(name))
    except ValueError as error:
        said = f"{place}: {name!r} is {error}.".replace(", or a list of chat messages", "")
        raise UserError(said) from None


def _text_or_messages(value: object) -> str | Messages:
    if not isinstance(value, list):
        return _text(value)
    messages = checked_messages(value)
    _text(encode_messages(messages))  # no half of a surrogate pair
    return messages


def _label(value: object) -> str | None:
    # Ids and categories are often numbers; as text they mean the same.
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if value.is_integer() and abs(value) <= 2**53:  # pandas' integers beside gaps
            value = int(value)
    if isinstance(value, (float, list, dict)):
        raise ValueError(f"{value!r}, but it must be a string, a whole number or a date")
    return _text(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))


def _name(value: object) -> str | None:
    return _label(value) or None  # an empty one names nobody


def _tools(value: Any) -> str | None:
    """Return the JSON of a list of tools' JSON schemas; the list or each tool may be JSON text."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in parsed or ()]
    except (ValueError, TypeError):
        tools = [None]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{value!r}, but it must be a list of JSON schemas, or such a list as JSON text")
    return _text(json.dumps(tools, ensure_ascii=False, default=str)) if tools else None


def _template_kwargs(value: Any) -> str | None:
    try:
        arguments = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        arguments = value
    if not isinstance(arguments, dict | None) or not _SET_HERE.isdisjoint(arguments or ()):
        raise ValueError(
            f"{value!r}, but it must be an object with arguments of the chat template, such as "
            f'{{"enable_thinking": false}}, and without {", ".join(sorted(_SET_HERE))}'
        )
    return _text(json.dumps(arguments, ensure_ascii=False, default=str)) if arguments else None


def _flag(value: object) -> bool:
    if isinstance(value, str):  # as CSV has it
        value = {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError(f"{value!r}, but it must be true or false")
    return bool(value)


def _number(
    value: object, largest: float = sys.float_info.max, what: str = "a number of at least 0"
) -> float:
    number = value
    with suppress(ValueError):
        number = float(value) if isinstance(value, (str, Decimal, np.integer, np.floating)) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= largest:
        raise ValueError(f"{value!r}, but it must be {what}")
    return float(number)


def _probability(value: object) -> float:
    return _number(value, 1, "a probability between 0 and 1")


def _tie(value: object) -> str | None:
    # "tie (bothbad)" of Chatbot Arena is one, too. Other labels have other meanings elsewhere.
    word = value.strip().lower() if isinstance(value, str) else ""
    return TIE if re.match(rf"{TIE}(?![a-z\d])", word) else word if word == "chosen" else None


@dataclass(frozen=True)
class Columns:
    """Columns of a kind of row, and the checks of their values."""

    kind: str
    responses: tuple[str, ...]
    """Columns that every row has: texts, or all of them lists of chat messages."""
    required: tuple[str, ...]
    """Further columns of rows of texts; chat messages may contain the prompt."""
    optional: dict[str, Callable[[object], Any]]
    split_messages: Callable[..., PromptAndResponses]
    """Takes prompt (or None) and responses of a row of chat messages as given, and parts them."""

    @property
    def features(self) -> Features:
        """Features of a dataset of such rows.

        ``prompt`` and responses are apart; where ``reason`` says why a row is unusable, they are as given.
        ``texts``: a hash of them as given. ``chat``: the row holds chat messages as JSON.
        ``template_fields``: their fields beside role and content, separated by spaces. ``unread``: columns
        that are not read, separated by newlines. ``like_messages``: columns with a text that reads as
        messages, and is none.
        """
        kinds: dict[Callable[[object], Any], Value]
        kinds = {_flag: Value("bool"), _probability: Value("float64"), _number: Value("float64")}
        texts = {name: Value("string") for name in ("id", *self.responses)}
        others = {name: kinds.get(check, Value("string")) for name, check in self.optional.items()}
        about = dict.fromkeys(("texts", "reason", "template_fields", "unread"), Value("string"))
        about |= {"chat": Value("bool"), "like_messages": List(Value("string"))}
        return Features(texts | others | about)

    def json_columns(self, rows: Iterable[dict[str, Any]]) -> set[str]:
        """Return the columns whose texts hold chat messages as JSON, in each row that has a text.

        A text that looks like messages among others is a text, such as code. Responses go together.
        """
        sides = frozenset(self.responses)
        texts, others = set[str](), set[str]()
        for row in rows:
            for name in (*self.responses, "prompt", "augmented_prompt"):
                if name not in others and isinstance(value := row.get(name), str):
                    (texts if looks_like_messages(value) else others).add(name)
        return texts - others - (sides if sides & others else set())

    def check(self, row: dict[str, Any], place: str, as_json: Callable[[], Set[str]]) -> dict[str, Any]:
        """Return the row's values, id None if missing, messages as lists; errors begin with ``place``.

        ``as_json`` returns ``json_columns``, for which all rows are read.
        """

        def read(check: Callable[[Any], Any], name: str) -> Any:
            try:
                return check(row[name])
            except ValueError as error:
                hint = f"; {_OPTION} '{{{name}: null}}' of a Hub source leaves that column out"
                hint = hint if name in self.optional and name != "prompt" else ""
                raise UserError(f"{place}: {name!r} is {error}{hint}.") from None

        given = row
        texts = [name for name in (*self.responses, "prompt", "augmented_prompt") if name in row]
        like = [name for name in texts if isinstance(row[name], str) and looks_like_messages(row[name])]
        row = row | {name: read(_messages_of, name) for name in like if name in as_json()}
        lists = {name for name in self.responses if isinstance(row.get(name), list)}
        for name in self.responses if lists else (*self.required, *self.responses):
            if row.get(name) is None:
                names = ", ".join(map(repr, row)) or "none"
                raise UserError(
                    f"{place} has no {name!r} (columns found: {names}), or its value is null, as an empty "
                    f"cell of CSV is; rename the column (or, of a Hub source, {_OPTION} "
                    f"'{{{name}: ITS_NAME}}'), write a text, or remove the row."
                )
        checks = dict.fromkeys(self.responses, _text_or_messages) | {"id": _label} | self.optional
        clean: dict[str, Any] = {
            name: None if row.get(name) is None else read(check, name) for name, check in checks.items()
        }
        clean["chat"] = bool(lists)
        plain = [name for name in self.responses if name not in lists]
        talks = [name for name in texts if name in checks and isinstance(row[name], list)]
        if plain and talks:
            raise UserError(
                f"{place}: {plain[0]!r} is a text, but {talks[0]!r} is a list of chat messages; write both "
                'in one way, as [{"role": "assistant", "content": ...}] or as a text.'
            )
        for name in ("prompt", "augmented_prompt"):
            if lists and name in self.optional and isinstance(row.get(name), str):
                clean[name] = [{"role": "user", "content": row[name]}]
        self._check_prompt(clean, row, place)
        _check_votes(clean, place)
        fields: set[str] = set()
        if lists:
            messages = [m for name in texts for m in clean.get(name) or ()]
            fields = {field for message in messages for field in message} - {"role", "content"}
            fields |= template_options(clean["tools"], clean["chat_template_kwargs"]).keys()
        else:
            clean |= {"tools": None, "chat_template_kwargs": None}  # only chat templates read them
        empty = ("None", "nan", "''", "[]", "{}")
        unread = [name for name, at in given.items() if clean.get(name) is None and repr(at) not in empty]
        clean["template_fields"] = " ".join(sorted(fields)) or None
        clean["unread"] = "\n".join(sorted(unread)).encode(errors="replace").decode() or None
        clean["like_messages"] = [] if lists else [name for name in like if isinstance(row[name], str)]
        return clean

    def _check_prompt(self, clean: dict[str, Any], row: dict[str, Any], place: str) -> None:
        if clean["prompt"] is not None:
            return
        sides = [clean[name] for name in self.responses]
        if all(len(s) > 1 if clean["chat"] else s.startswith(HUMAN) for s in sides):
            return
        for name, value in row.items():
            if looks_like_prompt(name) and name not in clean and isinstance(value, (str, list)) and value:
                raise UserError(
                    f"{place} has no 'prompt', but a column {name!r}, which may be it; rename it to 'prompt' "
                    f"(of a Hub source: {_OPTION} '{{prompt: {name}}}'), or remove it."
                )


def _check_votes(clean: dict[str, Any], place: str) -> None:
    both = [clean.get(name) for name in VOTES]
    if (both[0] is None) != (both[1] is None) or both == [0, 0]:
        raise UserError(
            f"{place} has {both[0]!r} votes_for and {both[1]!r} votes_against, but a pair has both counts, "
            "the label included, of at least one vote in all."
        )
    if clean.get("label") == TIE and both[0] != both[1]:
        raise UserError(
            f"{place} has the label {TIE!r}, but {both[0]:g} votes_for and {both[1]:g} votes_against; remove "
            "one of the two."
        )


PREFERENCES = Columns(
    kind="preferences",
    responses=("chosen", "rejected"),
    required=(),
    optional={
        "prompt": _text_or_messages,
        "category": _name,
        "augmented_prompt": _text_or_messages,
        "flipped": _flag,
        "eta": _probability,
        "annotator": _name,
        "votes_for": _number,
        "votes_against": _number,
        "label": _tie,
        "weight": _number,
        "p_right": _probability,
        "tools": _tools,
        "chat_template_kwargs": _template_kwargs,
    },
    split_messages=split_messages,
)
SFT = Columns(
    kind="sft",
    responses=("completion",),
    required=("prompt",),
    optional={"prompt": _text_or_messages, "tools": _tools, "chat_template_kwargs": _template_kwargs},
    split_messages=split_completion,
)


def checked(
    numbered: Callable[[], Iterable[tuple[str, dict[str, Any]]]], columns: Columns, source: str
) -> Iterator[dict[str, Any]]:
    """Yield rows with checked values, unique ids, and prompt and responses apart.

    ``numbered`` has each row and its place for errors; it is called again where a text looks like messages.
    """
    places: dict[str, str] = {}
    repeats: Counter[str] = Counter()
    with_prompt = without = ""
    as_json = cache(lambda: columns.json_columns(row for _, row in numbered()))
    for place, row in numbered():
        clean = columns.check(row, place, as_json)
        if clean["prompt"] is not None:
            with_prompt = with_prompt or place
        elif not clean["chat"] and not clean[columns.responses[0]].startswith(HUMAN):
            without = without or place
        if with_prompt and without:
            raise UserError(
                f"{without} has no 'prompt', but {with_prompt} has one; give each row its prompt, or remove "
                "the row."
            )
        given = [clean[name] for name in ("prompt", *columns.responses)]
        # JSON, as different texts may be equal when simply joined, and None differs from an empty prompt.
        texts = text_hash(json.dumps(given, default=str))
        if clean["id"] is None:
            clean["id"] = f"{texts}-{repeats[texts]}"
            repeats[texts] += 1
        if clean["id"] in places:
            raise UserError(
                f"{place} has the id {clean['id']!r} of {places[clean['id']]}; "
                "give each row its own id, or leave the ids out and they are made."
            )
        places[clean["id"]] = place
        split = None  # a text with its prompt stays as it is
        if clean["chat"]:
            split = columns.split_messages(*given)
        elif clean["prompt"] is None:
            split = split_prompt(*given[1:])
        clean |= {"texts": texts, "reason": split and split.reason}
        if split and split.reason is None:
            clean |= {"prompt": split.prompt} | dict(zip(columns.responses, split.responses, strict=True))
            if clean["chat"] and clean.get("augmented_prompt"):
                clean["augmented_prompt"] = _whole(clean["augmented_prompt"], split.prompt)
        talks = [name for name, value in clean.items() if isinstance(value, list) and name != "like_messages"]
        yield clean | {name: encode_messages(clean[name]) for name in talks}
    if not places:
        raise UserError(f"{source} is empty; it must hold at least one row.")


def _whole(augmented: Messages, prompt: Messages) -> Messages:
    """Return an augmented conversation; a lone message of the user stands for the prompt's last one."""
    places = [i for i, message in enumerate(prompt) if message["role"] == "user"]
    if [message["role"] for message in augmented] != ["user"] or not places:
        return augmented
    return [*prompt[: places[-1]], *augmented, *prompt[places[-1] + 1 :]]
