"""The documentation site: ``make docs`` builds it, with warnings as errors."""

project = "gradveil"
author = "The gradveil maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "gradveil"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
suppress_warnings = ["myst.xref_missing"]
