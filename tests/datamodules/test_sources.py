import pytest

from pacmr_lightning.datamodules import sources
from pacmr_lightning.datamodules.evaluation_prompts import draw_prompts
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError


@pytest.mark.parametrize("kind", [sources.Files, sources.CompletionFiles])
def test_validation_is_carved_out_by_prompt(write_rows, pair_rows, kind):
    rows = [row | {"chosen": f" {k}", "completion": f" {k}"} for row in pair_rows(300) for k in range(3)]
    source = kind(write_rows(rows), validation_fraction=0.2)
    train, validation = source.load("train"), source.load("validation")
    assert not set(train["prompt"]) & set(validation["prompt"])
    assert len(train) + len(validation) == 900
    # Four standard errors of a share of 300 prompts.
    assert len(set(validation["prompt"])) / 300 == pytest.approx(0.2, abs=4 * (0.16 / 300) ** 0.5)
    assert source.load("train")["id"][:] == train["id"][:]


@pytest.mark.parametrize("kind", [sources.Files, sources.CompletionFiles])
def test_wrong_options(write_rows, pair_rows, kind):
    path = write_rows(pair_rows(2, completion=" a"))
    for fraction in (0.0, 1.0, -1):
        with pytest.raises(UserError, match=f"validation_fraction is {fraction}"):
            kind(path, validation_fraction=fraction)
    with pytest.raises(UserError, match=f"has no effect beside the validation rows of {path}"):
        kind(path, path, validation_fraction=0.1)
    said = r"No validation rows .* at validation_fraction 1e-09, .* \d+ distinct prompts .* raise"
    with pytest.raises(UserError, match=said):
        kind(path, validation_fraction=1e-9).load("validation")
    one = write_rows(pair_rows(1, completion=" a") * 9, "one.jsonl")
    with pytest.raises(UserError, match=r"1 distinct prompts are split; give the source validation"):
        kind(one).load("validation")
    with pytest.raises(UserError, match="names '' as its training or validation rows"):
        kind(path, "")
    with pytest.raises(UserError, match="pairs is 0"):
        sources.EmbeddedWorld(pairs=0)


def test_pairs_of_one_world():
    one, other, again = (sources.EmbeddedWorld(200, 50, 3, pairs_seed=seed) for seed in (3, 4, None))
    train, validation = one.load("train"), one.load("validation")
    assert (len(train), len(validation)) == (200, 50) and not set(train["id"]) & set(validation["id"])
    assert train[:] == again.load("train")[:] and train["chosen"][:] != other.load("train")["chosen"][:]
    assert validation[:] == other.load("validation")[:]
    assert set(train["prompt"]) <= set(one.prompts) == set(other.prompts)
    pair = (train["prompt"][0], train["chosen"][0])
    assert one.gold_reward(*pair) == other.gold_reward(*pair)


def test_a_world_is_made_once(monkeypatch):
    """What is on disk is what is asked for: another seed, size or share of good responses is made anew."""
    kinds = [sources.EmbeddedWorld(40, 5, *seeds) for seeds in ((50, None), (50, 51), (51, None))]
    options = (40, 5, 4, 50), (41, 5, 4, 50), (40, 5, 3, 50), (40, 5, 4, 51)
    kinds += [sources.WorldCompletions(*each) for each in options]
    made = [source.load("train")[:] for source in kinds]
    assert len({repr(rows) for rows in made}) == len(kinds)

    def rows(self, *_):
        raise UserError("made anew")

    monkeypatch.setattr(World, "preference_rows", rows)
    monkeypatch.setattr(World, "sft_rows", rows)
    assert [source.load("train")[:] for source in kinds] == made
    monkeypatch.setattr(World, "key", "other code")
    for source in kinds:
        with pytest.raises(UserError, match=r"^made anew$"):
            source.load("train")


def test_prompts_alone(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "tell me", "completion": " more"}\n{"prompt": "sing"}\n')
    source = sources.Prompts(str(file))
    assert [prompt.text for prompt in draw_prompts(source, None, 0)] == ["tell me", "sing"]
    with pytest.raises(UserError, match=r"prompts.jsonl has prompts only, for pacmr predict"):
        source.load("train")
    for row, said in (
        ('{"text": "a"}', "None, but it must be a string."),
        ('{"prompt": "\\ud83d"}', "half of a"),
    ):
        file.write_text(f'{{"prompt": "tell me"}}\n{row}\n')
        with pytest.raises(UserError, match=f"line 2: 'prompt' is {said}"):
            sources.Prompts(str(file))
