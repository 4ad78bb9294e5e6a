"""The site: the pages of this folder, and a page per public name from its docstring. `make docs` builds it."""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sphinx.pycode import ModuleAnalyzer  # noqa: E402

from linattn.version import __version__  # noqa: E402

project, author, copyright = "linattn", "the linattn authors", "the linattn authors, MIT licence"
release = version = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["reference/examples", "jupyter_execute"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# the notebooks hold their outputs, which `make notebooks` renews and a test compares
nb_execution_mode = "off"
autosummary_generate = True
# a method without a sentence of its own shows its signature, not torch's text
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_default_options = {"show-inheritance": False}
python_display_short_literal_types = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
default_role = "code"

html_theme = "pydata_sphinx_theme"
html_title = "linattn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# pages of no section need no list of its pages
html_sidebars = {"index": [], "which_method": [], "methods": []}
html_theme_options = {
    "github_url": "https://github.com/linattn/linattn",
    "show_prev_next": False,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}

# where public names are
PACKAGES = ("linattn", "linattn.integrations.transformers", "linattn.linearize")
PUBLIC = {name: f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__}
SOURCE = "https://github.com/linattn/linattn/blob/main/"
# a span of code, or a character that reStructuredText would take for markup
MARKUP = re.compile(r"`[^`]+`|[*|_\\]")


def repeated_fields(public: str) -> list[str]:
    """Return the fields of a record that have no docstring, so that the class explains them."""
    package, _, name = public.rpartition(".")
    value = getattr(importlib.import_module(package), name)
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    described = ModuleAnalyzer.for_module(value.__module__).find_attr_docs() if inspect.isclass(value) else {}
    names = getattr(value, "_fields", [each.name for each in fields])
    return [field for field in names if (name, field) not in described]


def example(public: str) -> str:
    """Return the file with the example of a name: a record that differs from its function by case shares its."""
    name = public.rpartition(".")[2]
    return name if f"{name}.py" in EXAMPLES else name.lower()


EXAMPLES = {path.name for path in Path(__file__).parent.glob("reference/examples/*.py")}
autosummary_context = {
    "repeated_fields": {public: repeated_fields(public) for public in PUBLIC.values()},
    "example": {public: example(public) for public in PUBLIC.values()},
}


def link_to_source(app: object, page: str, text: list[str]) -> None:
    """Links to files beside the documentation lead to the repository."""
    here = (Path(__file__).parent / page).parent

    def absolute(match: re.Match[str]) -> str:
        target = (here / match[1]).resolve()
        inside = target.is_relative_to(Path(__file__).parent) or not target.is_relative_to(ROOT)
        return match[0] if inside else f"]({SOURCE}{target.relative_to(ROOT).as_posix()}{match[2]})"

    text[0] = re.sub(r"\]\((\.\./[^)#]+)([^)]*)\)", absolute, text[0])


def as_restructured_text(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code`, in which indented lines are formulas, and public names are links. Options
    that the command line has too add its help texts. Each page ends with what the name's file says of itself, which
    tells where the method comes from."""

    def escaped(match: re.Match[str]) -> str:
        public = PUBLIC.get(match[0].strip("`"))
        # in a class, a name that begins small is that of its method
        if public is not None and public != name and (what == "function" or match[0][1].isupper()):
            return f":py:obj:`~{public}`"
        return f"`{match[0]}`" if match[0].startswith("`") else "\\" + match[0]

    if what == "class" and dataclasses.is_dataclass(value):
        helps = {each.name: each.metadata.get("help") for each in dataclasses.fields(value)}
        lines += ["", *(f"- `{option}`: {text}" for option, text in helps.items() if text)]
    if isinstance(value, dict):
        lines[:] = [f"The names: {', '.join(f'`{key}`' for key in value)}."]
    elif name.rpartition(".")[0] in PACKAGES:
        file = inspect.getmodule(value)
        lines += ["", *inspect.getdoc(file).splitlines()] if file and file.__doc__ else []
    for place, line in enumerate(lines):
        lines[place] = f"| ``{line.strip()}``" if line.startswith("    ") else MARKUP.sub(escaped, line)


def name_functions(
    app: object, what: str, name: str, value: object, options: object, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show defaults that are functions by their names, without an address; one that has no name is an ellipsis."""
    named = arguments and re.sub(r"<(?:built-in )?function (\w+)[^>]*>", r"\1", arguments)
    return named and re.sub(r"<function [^ ]*<lambda>[^>]*>", "...", named), returned


def setup(app: object) -> None:
    app.connect("source-read", link_to_source)  # type: ignore[attr-defined]
    app.connect("autodoc-process-signature", name_functions)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", as_restructured_text)  # type: ignore[attr-defined]
