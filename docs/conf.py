"""The site: the pages of this folder, and a page per public name from its docstring. `make docs` builds it."""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "_extensions")]

from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import linattn  # noqa: E402
from linattn.version import __version__  # noqa: E402

project, author, copyright = "linattn", "the linattn authors", "the linattn authors, MIT licence"
release = version = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "formulas",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["reference/examples", "reference/names/every.rst", "jupyter_execute"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 3
# the notebooks hold their outputs, which `make notebooks` renews and a test compares
nb_execution_mode = "off"
# one list of all names, below; the pages get theirs when they are read
autosummary_generate = ["reference/names/every.rst"]
# a method without a sentence of its own shows its signature, not torch's text
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
toc_object_entries_show_parents = "hide"
autodoc_default_options = {"show-inheritance": False}
python_display_short_literal_types = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
default_role = "code"

html_theme = "pydata_sphinx_theme"
html_title = "linattn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_extensions/search_order.js")
html_show_sourcelink = False
# pages of no section need no list of its pages
html_sidebars = {"index": [], "how_it_works": [], "which_method": [], "methods": []}
html_theme_options = {
    "github_url": "https://github.com/linattn/linattn",
    "show_prev_next": False,
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": ["copyright"],
    "footer_end": [],
}

# the packages whose names a page of the interface lists
PAGES = {
    "operators": ("ops",),
    "feature_maps": ("feature_maps",),
    "attention": ("attention",),
    "modules": ("nn", "integrations.torch"),
    "generation": ("generation",),
    "models": ("models",),
    "states": ("states",),
    "distributed": ("distributed",),
    "diagnostics": ("diagnostics",),
    "transformers": ("integrations.transformers",),
    "linearize": ("linearize",),
}


def public_names(package: str) -> list[str]:
    """Return the public names of a package with the package where users find them: linattn if it has them."""
    own = importlib.import_module(f"linattn.{package}").__all__
    return sorted(f"linattn.{name}" if name in linattn.__all__ else f"linattn.{package}.{name}" for name in own)


LISTED = {page: [name for package in packages for name in public_names(package)] for page, packages in PAGES.items()}
PUBLIC = {name.rpartition(".")[2]: name for names in LISTED.values() for name in names}
PACKAGES = {name.rpartition(".")[0] for name in PUBLIC.values()}
SOURCE = "https://github.com/linattn/linattn/blob/main/"
# torch's methods that print a module and draw its first weights
CONVENTIONS = {"extra_repr", "reset_parameters"}
# a span of code, or a character that reStructuredText would take for markup
MARKUP = re.compile(r"`[^`]+`|[*|_\\]")


def public_value(public: str) -> Any:
    package, _, name = public.rpartition(".")
    return getattr(importlib.import_module(package), name)


def example(public: str) -> str:
    """Return the file with the example of a name: a record that differs from its function by case shares its."""
    name = public.rpartition(".")[2]
    return name if f"{name}.py" in EXAMPLES else name.lower()


def members(public: str) -> dict[str, str]:
    """Return the attributes with a docstring, properties and methods of a class, each with its directive. Where a
    public class is among the bases, that one defines the interface: methods that it lacks are helpers."""
    mro = getattr(public_value(public), "__mro__", ())
    bases = [base for base in reversed(mro) if base.__module__.startswith("linattn.")]
    interface = {name for base in bases[:-1] if base.__name__ in PUBLIC for name in vars(base)}
    explained = {key for base in bases for key in ModuleAnalyzer.for_module(base.__module__).find_attr_docs()}

    def directive(base: type, name: str, value: object) -> str:
        method = isinstance(value, (FunctionType, classmethod, staticmethod)) and (not interface or name in interface)
        attribute = "autoattribute" if (base.__name__, name) in explained else ""
        return "automethod" if method else "autoproperty" if isinstance(value, property) else attribute

    every = {name: directive(base, name, value) for base in bases for name, value in vars(base).items()}
    return {name: each for name, each in every.items() if each and name[0] != "_" and name not in CONVENTIONS}


def table(names: list[str], folder: str) -> str:
    """Return the directive that lists names without their package, with a page for each in `folder`."""
    return f".. autosummary::\n   :toctree: {folder}\n   :nosignatures:\n\n" + "".join(f"   ~{x}\n" for x in names)


NAMES = Path(__file__).parent / "reference/names"
NAMES.mkdir(exist_ok=True)
NAMES.joinpath("every.rst").write_text(table(sorted(PUBLIC.values()), "."), "utf-8")
EXAMPLES = {path.name for path in Path(__file__).parent.glob("reference/examples/*.py")}
autosummary_context = {
    "interface": {public: members(public) for public in PUBLIC.values()},
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
    """Docstrings are plain text with `code`, in which indented lines are code or formulas, and public names are links.
    Options that the command line has too add its help texts. Each page ends with what the name's file says of itself,
    which tells where the method comes from."""

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
        text = MARKUP.sub(escaped, line)
        code = line.startswith("    ") and line.isascii()
        lines[place] = f"| ``{line.strip()}``" if code else f"| {text.strip()}" if line.startswith("    ") else text


def name_functions(
    app: object, what: str, name: str, value: object, options: object, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show defaults that are functions by their names, without an address; one that has no name is an ellipsis."""
    named = arguments and re.sub(r"<(?:built-in )?function (\w+)[^>]*>", r"\1", arguments)
    return named and re.sub(r"<function [^ ]*<lambda>[^>]*>", "...", named), returned


def list_names(app: object, page: str, text: list[str]) -> None:
    """The pages of the interface end with tables of their names. Its first page has a list of each page's names."""
    folder, _, own = page.partition("/")
    if page == "reference/index":
        text[0] += "".join(map(layer, LISTED))
        text[0] += "\n```{toctree}\n:hidden:\n:maxdepth: 1\n\n" + "\n".join(LISTED) + "\n```\n"
    elif folder == "reference" and own in LISTED:
        text[0] += "\n```{eval-rst}\n" + table(LISTED[own], "names") + "```\n"


def layer(page: str) -> str:
    """Return a section with the title and the names of a page of the interface."""
    title = Path(__file__).with_name("reference").joinpath(f"{page}.md").read_text("utf-8").splitlines()[0]
    links = " · ".join(f"[`{name.rpartition('.')[2]}`](names/{name}.rst)" for name in LISTED[page])
    return f"\n## [{title.removeprefix('# ')}]({page}.md)\n\n{links}\n"


def follow_to_source(app: object, package: str, attribute: str) -> str | None:
    """The source of a name and of its members is in the name's module, also where a member is a class of Python's."""
    return getattr(public_value(f"{package}.{attribute.partition('.')[0]}"), "__module__", None)


def setup(app: object) -> None:
    app.connect("source-read", list_names)  # type: ignore[attr-defined]
    app.connect("source-read", link_to_source)  # type: ignore[attr-defined]
    app.connect("autodoc-process-signature", name_functions)  # type: ignore[attr-defined]
    app.connect("viewcode-follow-imported", follow_to_source)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", as_restructured_text)  # type: ignore[attr-defined]
