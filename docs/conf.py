"""The documentation as a site: ``make docs`` writes it to build/docs."""

import re
import shutil
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
NOTEBOOK = "../examples/noisy_labels.ipynb"
# The notebook is the tutorial: one file, shown with the outputs that it holds.
shutil.copyfile(HERE / NOTEBOOK, HERE / "tutorial.ipynb")

project = "pacmr-lightning"
copyright = "the pacmr-lightning authors"
release = version = installed_version("pacmr-lightning")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"
suppress_warnings = ["misc.highlighting_failure"]  # commands of the notebook over two lines
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False  # options begin with two hyphens
html_theme = "furo"
html_title = "pacmr-lightning"
html_static_path = ["static"]
html_css_files = ["site.css"]
# Colours of the audit report (pacmr_lightning/audit/report.css).
FONTS = {"font-stack": "system-ui, sans-serif", "font-stack--monospace": "ui-monospace, monospace"}
LIGHT = {
    "color-brand-primary": "#0b57d0",
    "color-brand-content": "#0b57d0",
    "color-brand-visited": "#0b57d0",
    "color-foreground-primary": "#1a1a1a",
    "color-sidebar-background": "#f3f5f9",
}
DARK = {
    "color-brand-primary": "#8ab4f8",
    "color-brand-content": "#8ab4f8",
    "color-brand-visited": "#8ab4f8",
}
html_theme_options = {"light_css_variables": LIGHT | FONTS, "dark_css_variables": DARK}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# What a class inherits from torch or Lightning is said there.
autodoc_default_options = {"members": True, "show-inheritance": True, "imported-members": True}
napoleon_use_ivar = True


def setup(app: Sphinx) -> None:
    """Fill in the generated parts of pages; adapt links that lead out of ``docs``."""
    from generated import filled

    def read(app: Sphinx, name: str, text: list[str]) -> None:
        # The notebook's own links begin in examples/, those to it in docs/.
        page = filled(text[0]).replace(NOTEBOOK, "tutorial.ipynb").replace("](../docs/", "](")
        # Links to files outside docs/ become their paths.
        text[0] = re.sub(r"\[([^\]]+)\]\(\.\./([^()\s]+)\)", r"\1 (`\2`)", page)

    app.connect("source-read", read)
