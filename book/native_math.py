"""A Sphinx extension: formulas as MathML, which browsers draw themselves, without a network."""

from docutils import nodes
from latex2mathml.converter import convert


def _inline(translator, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _display(translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app) -> dict:
    """Register the writers of both kinds of formula (sphinx-doc.org, add_html_math_renderer)."""
    app.add_html_math_renderer("native", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
