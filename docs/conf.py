"""The documentation as a site: ``make docs`` writes it to build/docs."""

from importlib.metadata import version as installed_version

project = "pacmr-lightning"
copyright = "the pacmr-lightning authors"
release = version = installed_version("pacmr-lightning")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "pacmr-lightning"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# What a class inherits from torch or Lightning is said there.
autodoc_default_options = {"members": True, "show-inheritance": True, "imported-members": True}
napoleon_use_ivar = True
