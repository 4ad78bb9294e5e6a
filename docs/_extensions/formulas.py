"""Formulas without a script or a network. `$…$` and `$$…$$` become MathML, which browsers draw themselves. In prose,
tables and docstrings, which are written to be read in an editor, a symbol such as S_{i−1} gets a real subscript."""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

# an index or an exponent after one letter, a sign of a sum or a bracket: v_jᵀ, S_{i−1}, softmax_j(x), x/d^¼, (x)^(1/16)
SCRIPT = re.compile(
    r"(?:(?<![A-Za-z0-9_])(?P<base>[^\W\d_]\u0304?|softmax|concat)_(?P<below>\{[^}]*\}|[a-z0-9]{1,2}(?![A-Za-z0-9_])))"
    r"|(?:(?<=[\w)])\^(?P<above>\{[^}]*\}|\([^)]*\)|-?[\w½¼]{1,2}(?![A-Za-z0-9_])))"
)
UNIT = re.compile(r"(?<=\d) (?=[%×])|(?<=%) (?=\([\d,]+\))|(?<=[%)]) (?=/ )")
# not FixedTextElement, which a table of autosummary is
VERBATIM = (nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw, addnodes.desc_signature)


def typeset(text: str) -> Iterator[nodes.Node]:
    """Split a text into its subscripts, its superscripts and the rest."""
    end = 0
    for match in SCRIPT.finditer(text):
        yield nodes.Text(text[end : match.start()] + (match["base"] or ""))
        script = match["below"] or match["above"]
        script = script[1:-1] if script.startswith("{") else script
        yield (nodes.subscript if match["below"] else nodes.superscript)("", "", *typeset(script))
        end = match.end()
    yield nodes.Text(text[end:])


class Scripts(SphinxPostTransform):
    default_priority = 200

    def run(self, **options: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            # a number stays with its unit
            words = UNIT.sub("\u00a0", text.astext())
            changed = words != text.astext() or SCRIPT.search(words)
            if changed and not any(isinstance(each, VERBATIM) for each in ancestors(text)):
                text.parent.replace(text, [each for each in typeset(words) if each.astext()])


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while (node := node.parent) is not None:
        yield node


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def display(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(Scripts)
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
