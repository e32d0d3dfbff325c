"""Sphinx settings of the book; tools/book.py puts this file beside the pages and builds them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Distributed training in PyTorch, for real"
html_title = project
extensions = ["myst_nb", "native_math"]
root_doc = "index"

nb_execution_mode = "off"  # the stored outputs are the tested ones
nb_render_image_options = {"align": "left"}
myst_enable_extensions = ["dollarmath", "linkify"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # an italic sentence under a figure is no missing heading

html_math_renderer = "native"

html_context = {"default_mode": "light"}  # the figures are drawn on white
html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
html_show_sphinx = False
html_copy_source = False
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["book.css"]
