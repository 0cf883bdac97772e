import pytest

from pacmr_lightning.datamodules.rewording import reword


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("I do not know", "I don't know"),
        ("I don't know", "I do not know"),
        ("I'm here and he can't come", "I am here and he cannot come"),
        ("I am here", "I'm here"),
        ("Do not go", "Don't go"),
        ("It rains because of the sea", "It rains due to the sea"),
        ("Maybe so. Wait... what??", "Perhaps so. Wait… what?"),
        ("He said “yes”.  And then i left!!!", 'He said "yes". And then i left!'),
        (" I won't \n", " I will not \n"),
        # The headers of TL;DR change places, and the turn markers of HH stay byte for byte.
        (
            "SUBREDDIT: r/a\n\nTITLE: I'm lost\n\nPOST: I do not\n\nknow.\n\nTL;DR:",
            "TITLE: I am lost\n\nSUBREDDIT: r/a\n\nPOST: I don't\n\nknow.\n\nTL;DR:",
        ),
        (
            "\n\nHuman: I'm lost...\n\nAssistant: Maybe.  Why?\n\nHuman: I don't know\n\nAssistant:",
            "\n\nHuman: I am lost…\n\nAssistant: Perhaps. Why?\n\nHuman: I do not know\n\nAssistant:",
        ),
        ("", ""),
        ("Name three rivers.", "Name three rivers."),
        # Word order would have to change.
        ("Why don't you go?", "Why don't you go?"),
        ("Isn't the sea blue?", "Isn't the sea blue?"),
        # These cannot be contracted.
        ("He is taller than I am now", "He is taller than I am now"),
        ("Who knows where I am?", "Who knows where I am?"),
        # Parts of longer words.
        ("Mayberry and Q&A", "Mayberry and Q&A"),
        ("Describe the sea in a calm mood:", "Describe the sea in a calm mood:"),
        # Formulas and code; without code the same words change.
        *((same, same) for same in ("if (!!x)", "a ?? b", "What is 7!!", "n - 1", "R&D b/c & so on")),
        *((f"Maybe:\n{code}",) * 2 for code in ("for i in a:", 'say("I do not")', "x = 1", "    go", "go;")),
        ("Maybe (22F) or item(s) & so; on", "Perhaps (22F) or item(s) & so; on"),
    ],
)
def test_rules(prompt, expected):
    assert reword(prompt) == expected
