"""A figure in both formats."""

from matplotlib.figure import Figure

from pacmr_lightning.files import save_figure


def test_one_layout(tmp_path):
    """Laid out as matplotlib would, and not again for the next format or reader."""
    figure, same = (Figure(layout="constrained") for _ in range(2))
    for each in (figure, same):
        each.add_subplot().set(xlabel="x", ylabel="a label of\ntwo lines", title="title")
    save_figure(figure, tmp_path / "new" / "a.b")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"a.b.png", "a.b.pdf"}
    place = figure.axes[0].get_position().bounds
    same.draw_without_rendering()
    assert place == same.axes[0].get_position().bounds != Figure().add_subplot().get_position().bounds
    figure.axes[0].set_title("a title of\nmany\nlines")
    figure.savefig(tmp_path / "again.png")
    assert figure.axes[0].get_position().bounds == place
