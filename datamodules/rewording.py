"""Rule-based prompt augmentation for English, without a model or network."""

import re

VERSION = 2
"""Part of the key of token caches; raise it when a rule changes."""

_VERBS = ("do", "does", "did", "is", "are", "was", "were", "has", "have", "had", "would", "should", "could")
_NEGATED = {f"{verb} not": f"{verb}n't" for verb in _VERBS} | {"will not": "won't", "cannot": "can't"}
_CONTRACTED = {"I'm": "I am", "I've been": "I have been", "I'll": "I will"} | {
    f"{who}'{short}": f"{who} {long}"
    for who in ("you", "we", "they")
    for short, long in (("re", "are"), ("ve been", "have been"), ("ll", "will"))
}
_SAME = {
    "for example": "for instance",
    "a lot of": "lots of",
    "right now": "at the moment",
    "maybe": "perhaps",
    "although": "even though",
    "what is the": "what's the",
    "how do I": "how can I",
}
_SYNONYMS = _SAME | {other: phrase for phrase, other in _SAME.items()}
_SYNONYMS |= {"because of": "due to", "in order to": "so as to", "regarding": "concerning"}
_SPELLING = {"w/": "with", "w/o": "without"}

# "Don't you" and "isn't the" cannot be spelt out without changing the word order.
_SUBJECTS = (
    "I|you|he|she|it|we|they|this|that|these|those|there|the|a|an|my|your|his|her|our|their|any\\w+|every\\w+"
)
_NO_SUBJECT_AFTER = rf"(?!\s+(?:{_SUBJECTS})\b)"
# "than I am" and a clause's last "I am." cannot be contracted.
_INSIDE_CLAUSE = r"(?=\s+[a-z])"
_COMPARING = ("than", "as", "what", "who", "where", "how", "like")
_NOT_AFTER_COMPARISON = "".join(rf"(?<!\b{w} )" for w in _COMPARING)


def _alternatives(phrases: dict[str, str]) -> str:
    return "|".join(re.escape(p) for p in sorted(phrases, key=len, reverse=True))


_EXPANDED = {long: short for short, long in _CONTRACTED.items()}
_SPELT_OUT = {short: long for long, short in _NEGATED.items()}
_REPLACEMENT = {
    phrase.lower(): other
    for table in (_NEGATED, _SPELT_OUT, _CONTRACTED, _EXPANDED, _SYNONYMS, _SPELLING)
    for phrase, other in table.items()
}


def _first_letter_free(pattern: str) -> str:
    """Let each alternative also begin a sentence."""
    return "|".join(
        rf"[{p[0].lower()}{p[0].upper()}]{p[1:]}" if p[0].isalpha() else p for p in pattern.split("|")
    )


# One pass over all tables, so that no rule undoes another.
_PHRASES = re.compile(
    r"(?<![\w'’/])(?:"
    rf"(?:{_first_letter_free(_alternatives(_NEGATED))}){_NO_SUBJECT_AFTER}"
    rf"|(?:{_first_letter_free(_alternatives(_SPELT_OUT))}){_NO_SUBJECT_AFTER}"
    rf"|{_NOT_AFTER_COMPARISON}(?:{_first_letter_free(_alternatives(_EXPANDED))}){_INSIDE_CLAUSE}"
    rf"|(?:{_first_letter_free(_alternatives(_CONTRACTED))})"
    rf"|(?:{_first_letter_free(_alternatives(_SYNONYMS))})"
    rf"|(?:{_alternatives(_SPELLING)})"
    r")(?![\w'’/])"
)
_WORD = r"(?<=[^\W\d_]{2})"  # 7!! and n?? are formulas
_PUNCTUATION = [
    (re.compile(r"[“”]"), '"'),
    (re.compile(r"[‘’]"), "'"),
    (re.compile(r"(?<![.\d])\.\.\.(?![.\d])"), "…"),
    (re.compile(rf"{_WORD}([!?])\1+(?!\S)"), r"\1"),
    (re.compile(rf"{_WORD} -{{1,2}} (?=[^\W\d_]{{2}})"), " – "),
    (re.compile(r"(?<=[.!?,;:\w]) {2,}(?=\w)"), " "),
]
# Signs, calls such as f("a"), spreads, "is not None", ends and beginnings of lines.
_CODE = re.compile(
    r"[`{}=]|\\[a-z]|\w\((?:\w*[\"'.,(]|\))|[(\[]\.{3}|\bnot (?:None|null)\b|;[ \t]*$|^(?: {4}|\t)[ \t]*\S"
    r"|^(?:\$|>>>|#include|git|import|select|sudo) |^(?:class|def|elif|else|for|if|try|while|with)\b.*:$",
    re.MULTILINE,
)
_TURN = re.compile(r"(\n\n(?:Human|Assistant):)")
_TLDR = re.compile(r"(SUBREDDIT: [^\n]*)\n\n(TITLE: )([^\n]*)\n\n(POST: )(.*?)(\n\nTL;DR:\s*)", re.DOTALL)


def reword(prompt: str) -> str:
    """Return the request in other words, or as it is if no rule applies; deterministic.

    Contractions, some phrases, punctuation and spacing vary, and the headers ``SUBREDDIT`` and ``TITLE`` of a
    TL;DR prompt swap places. ``POST`` stays last; ``TL;DR:``, HH's turn markers and outer whitespace stay
    byte for byte, and so does a text with code. Content words and word order stay too, so consistency asks
    less of the policy than under a paraphrase or back-translation (as in Qu et al.).
    """
    if tldr := _TLDR.fullmatch(prompt):
        subreddit, title_mark, title, post_mark, post, end = tldr.groups()
        return f"{title_mark}{_reword_text(title)}\n\n{subreddit}\n\n{post_mark}{_reword_text(post)}{end}"
    # Splitting by a group keeps the markers as the odd parts.
    parts = _TURN.split(prompt)
    return "".join(part if i % 2 else _reword_text(part) for i, part in enumerate(parts))


def _reword_text(text: str) -> str:
    core = text.strip()
    if not core or _CODE.search(text):
        return text
    start = text.index(core)
    end = text[start + len(core) :]
    # Punctuation first: the table of phrases is written with straight apostrophes.
    for pattern, replacement in _PUNCTUATION:
        core = pattern.sub(replacement, core)
    return text[:start] + _PHRASES.sub(_replace_phrase, core) + end


def _replace_phrase(match: re.Match[str]) -> str:
    phrase = match.group()
    other = _REPLACEMENT[phrase.lower()]
    # A capital at the beginning of a sentence stays.
    return other[0].upper() + other[1:] if phrase[0].isupper() else other
