"""What `make docs` does besides mkdocs: pages from outside docs/, links into the source, the version, the reference.

A link to a file of the project, be it relative or through the address of the repository, leads to the file's page, or
to the repository if the file has no page. A link to a file that does not exist fails the build. In the reference
``<!-- exports: MODULE -->`` stands for every public name of a module. Every public name must be in the reference and
have a docstring.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvdist.version import __version__

ROOT = Path(__file__).resolve().parent.parent

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "kvdist/protocol/WIRE.md": "protocol/wire.md",
    "kvdist/protocol/COLLECTIVE.md": "protocol/collective.md",
    **{f"examples/{name}/README.md": f"examples/{name}.md" for name in ("limping", "mxnet_bridge", "recommender")},
    **{
        f"benchmarks/results/{path.name}": f"benchmarks/{path.name}"
        for path in sorted((ROOT / "benchmarks" / "results").iterdir())
        if path.suffix in (".md", ".png")
    },
}
"""Files of the project outside docs/ → where they are on the site."""

PUBLIC = (
    "kvdist", "kvdist.kv", "kvdist.optimizer", "kvdist.lr_scheduler", "kvdist.collective", "kvdist.horovod",
    "kvdist.keras", "kvdist.mxnet", "kvdist.tensorflow", "kvdist.profiler",
)  # fmt: skip
"""Modules whose ``__all__`` users import from."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
EXPORTS = re.compile(r"<!-- exports: ([\w.]+)(?: except ([\w.]+))? -->")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version beside the name, in the head of each page."""
    config.site_name += f" {__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie outside docs/."""
    for source, target in ELSEWHERE.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Turn links between files of the project into links of the site, and name the exports of modules."""
    uri = page.file.src_uri
    source = next((file for file, target in ELSEWHERE.items() if target == uri), f"docs/{uri}")
    parts = FENCE.split(_with_exports(markdown))
    repository = config.repo_url or ""
    return "".join(part if part.startswith("```") else _relinked(part, source, uri, repository) for part in parts)


def _relinked(text: str, source: str, uri: str, repository: str) -> str:
    def relink(match: re.Match[str]) -> str:
        image, shown, target = match.groups()
        file, mark, anchor = target.partition("#")
        of_project = re.fullmatch(re.escape(repository) + r"/(?:blob|raw|tree)/main/(.+)", file)
        if not of_project and ("://" in target or not file):
            return match[0]
        path = of_project[1] if of_project else posixpath.join(posixpath.dirname(source), file)
        path = posixpath.normpath(path)
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: the link to {target} leads to no file")
        goal = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not goal:
            return shown if image else f"[{shown}]({repository}/blob/main/{path}{mark}{anchor})"
        return f"{image}[{shown}]({posixpath.relpath(goal, posixpath.dirname(uri) or '.')}{mark}{anchor})"

    return LINK.sub(relink, text)


def on_pre_build(**_: object) -> None:
    """Fail for a public name without a docstring or without a place in the reference."""
    texts = [_with_exports(path.read_text("utf-8")) for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    shown = {_object(name).path for text in texts for name in DIRECTIVE.findall(text)}
    faults = [fault for module in PUBLIC for name in _exports(module) for fault in _faults(f"{module}.{name}", shown)]
    if faults:
        raise PluginError("\n".join(["the reference is not complete:", *sorted(set(faults))]))


@cache
def _package() -> Any:
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    package = loader.load("kvdist")
    loader.resolve_aliases(external=False)
    return package


def _object(path: str) -> Any:
    """What a dotted name stands for, where it is defined."""
    found = _package()
    for name in path.split(".")[1:]:
        found = found.members[name]
        found = found.final_target if found.is_alias else found
    return found


def _exports(module: str) -> list[str]:
    """The public names of a module but for its submodules and its version."""
    names = [str(name) for name in _object(module).exports or ()]
    return [name for name in names if f"{module}.{name}" not in PUBLIC and not name.startswith("__")]


def _with_exports(text: str) -> str:
    def directives(match: re.Match[str]) -> str:
        left_out = {_object(f"{match[2]}.{name}").path for name in _exports(match[2])} if match[2] else set()
        paths = [f"{match[1]}.{name}" for name in _exports(match[1])]
        return "\n\n".join(f"::: {path}" for path in paths if _object(path).path not in left_out)

    return EXPORTS.sub(directives, text)


def _faults(path: str, shown: set[str]) -> list[str]:
    found = _object(path)
    faults = [] if {found.path, found.module.path} & shown else [f"{path} does not stand in docs/reference"]
    members = [found]
    if found.is_class:
        members += [one for one in found.members.values() if one.is_function and not one.name.startswith("_")]
    return faults + [f"{one.path} has no docstring" for one in members if not one.has_docstring]
